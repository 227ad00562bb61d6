"""A decoder of 100 million parameters that is given one token at a time, with its keys and values in caches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models import RMSNorm


@dataclass(frozen=True)
class Shape:
    """Layers, width, heads, width of the feed-forward, words, and tokens that caches have room for."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    hidden: int = 2048
    words: int = 16000
    room: int = 64


SMALL = Shape(2, 256, 4, 512, 500, 16)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


class Layer(nn.Module):
    """RMSNorm, rotary attention over a cache, SwiGLU."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.heads = s.heads
        self.norm1, self.norm2 = RMSNorm(s.width), RMSNorm(s.width)
        self.query, self.key, self.value, self.out = (nn.Linear(s.width, s.width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(s.width, s.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(s.hidden, s.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, at: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        y = self.norm1(x)
        q, k, v = (
            f(y).view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)
            for f in (self.query, self.key, self.value)
        )
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        keys, values = keys.index_copy(2, at, k), values.index_copy(2, at, v)
        attended = F.scaled_dot_product_attention(q, keys, values)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """Ids (batch, 1), the position's rotation and the caches to logits of the next token."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.words = nn.Embedding(s.words, s.width)
        self.layers = nn.ModuleList(Layer(s) for _ in range(s.layers))
        self.norm, self.head = RMSNorm(s.width), nn.Linear(s.width, s.words, bias=False)

    def forward(self, ids: Tensor, cos: Tensor, sin: Tensor, at: Tensor, *caches: Tensor) -> Tensor:
        x = self.words(ids)
        for layer, keys, values in zip(self.layers, caches[::2], caches[1::2]):
            x = layer(x, cos, sin, keys, values, at)
        return self.head(self.norm(x))

    def bytes_read(self) -> int:
        """Bytes of the weights that a token reads."""
        return sum(p.nbytes for name, p in self.named_parameters() if not name.startswith("words"))


def build(rows: int, dtype: torch.dtype, quick: bool) -> tuple[Decoder, tuple[Tensor, ...]]:
    """The decoder in eval mode, and the arguments of one step of `rows` sequences."""
    torch.manual_seed(0)
    s = SMALL if quick else Shape()
    each = s.width // s.heads
    model = Decoder(s).eval().to(dtype)
    ids, at = torch.randint(s.words, (rows, 1)), torch.tensor([5])
    cos, sin = (torch.randn(1, 1, 1, each).to(dtype) for _ in range(2))
    caches = [(torch.randn(rows, s.heads, s.room, each) * 0.1).to(dtype) for _ in range(2 * s.layers)]
    return model, (ids, cos, sin, at, *caches)
