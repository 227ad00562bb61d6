"""The rows of the `steps` suite: small networks at batch 1, whose host's work takes longer than their kernels.

An MLP, an LSTM over 8 steps, layers of a transformer (post-norm with GELU, pre-norm with rotary embeddings and SwiGLU),
a patch embedding with a block, residual and depthwise blocks of convolutional networks, and one RMS norm.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.contraction_rows import Built, Row
from benchmarks.convnet_models import Basic, Inverted
from benchmarks.models import RMSNorm


class Cell(nn.Module):
    """An LSTM cell over the steps of a sequence of batch 1."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = c = torch.zeros_like(x[0])
        for step in x.unbind():
            h, c = self.cell(step, (h, c))
        return h


class Decoder(nn.Module):
    """A pre-norm layer of a decoder: RMS norms, rotary embeddings, causal attention, SwiGLU."""

    def __init__(self, width: int, heads: int, tokens: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)
        half = width // heads // 2
        angles = torch.arange(tokens)[:, None] * 10_000.0 ** (-torch.arange(half) / half)
        self.register_buffer("cos", torch.cat((angles, angles), -1).cos())
        self.register_buffer("sin", torch.cat((angles, angles), -1).sin())

    def _turned(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return x * self.cos + torch.cat((-b, a), -1) * self.sin

    def forward(self, x: Tensor) -> Tensor:
        n, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(self._turned(q), self._turned(k), v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(n, t, w))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Patches(nn.Module):
    """A patch embedding with positions, an encoder's layer, and a head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 8, 8)
        self.places = nn.Parameter(torch.randn(1, 16, width) / 8)
        self.layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.patch(x).flatten(2).transpose(1, 2) + self.places).mean(1))


def _row(name: str, module: Callable[[], nn.Module], *size: int) -> Row:
    def make(quick: bool) -> Built:
        return module().eval(), (torch.randn(size),)

    return Row(name, make)


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 256), nn.ReLU(),
                         nn.Linear(256, 10), nn.Softmax(-1))  # fmt: skip


def _encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(64, 4, 256, 0.0, "gelu", batch_first=True)


ROWS = (
    _row("rms norm of 16", lambda: RMSNorm(8), 2, 8),
    _row("mlp", _mlp, 1, 64),
    _row("lstm, 8 steps", lambda: Cell(64), 8, 1, 64),
    _row("encoder layer", _encoder, 1, 16, 64),
    _row("decoder layer", lambda: Decoder(64, 4, 16), 1, 16, 64),
    _row("two decoder layers", lambda: nn.Sequential(Decoder(64, 4, 16), Decoder(64, 4, 16)), 1, 16, 64),
    _row("patches", lambda: Patches(64), 1, 3, 32, 32),
    _row("residual block", lambda: nn.Sequential(Basic(16, 16, 1), Basic(16, 32, 2)), 1, 16, 16, 16),
    _row("depthwise blocks", lambda: nn.Sequential(Inverted(16, 16, 1, 4), Inverted(16, 24, 2, 4)), 1, 16, 16, 16),
)
