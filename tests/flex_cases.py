"""Attention with score modifications and block masks as programs write it: rows for tests on every device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask

Tensor = torch.Tensor
Make = Callable[[int, int, int], tuple[Tensor, ...]]  # of heads, queries and keys


def none(heads: int, queries: int, keys: int) -> tuple[Tensor, ...]:
    """No captured tensors."""
    return ()


@dataclass(frozen=True)
class FlexCase:
    """`mod(score, b, h, q, k, *captured)` and `mask(b, h, q, k, *captured)`, and the sizes of a problem.

    `sizes`: batch, heads, heads of keys, queries, keys, elements of a head, and of a head of values. `turned`: the
    heads are behind the sequence in memory.
    """

    name: str
    mod: Callable[..., Any] | None = None
    mask: Callable[..., Any] | None = None
    sizes: tuple[int, ...] = (2, 4, 4, 70, 70, 16, 16)
    captured: Make = none
    masking: Make = none
    key_batch: int | None = None
    turned: bool = False
    block: int = 128
    each: str = ""  # "b", "h" or "bh": the block mask has lists of its own for each batch, each head
    dtype: torch.dtype = torch.float32

    def heads(self, device: str = "cpu") -> list[Tensor]:
        """Queries, keys and values."""
        torch.manual_seed(5)
        b, h, g, m, n, d, e = self.sizes
        out = []
        for batch, heads, rows, width in ((b, h, m, d), (self.key_batch or b, g, n, d), (self.key_batch or b, g, n, e)):
            shape = (batch, rows, heads, width) if self.turned else (batch, heads, rows, width)
            made = torch.randn(shape).to(device, self.dtype)
            out.append(made.transpose(1, 2) if self.turned else made)
        return out

    def buffers(self, device: str = "cpu") -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """What mod and mask capture."""
        torch.manual_seed(6)
        _, h, _, m, n, _, _ = self.sizes
        return tuple(tuple(t.to(device) for t in make(h, m, n)) for make in (self.captured, self.masking))  # type: ignore[return-value]

    def block_mask(self, masking: Sequence[Tensor], device: str = "cpu") -> Any:
        """torch's block mask; None without a mask."""
        if self.mask is None:
            return None
        mask, (_, _, _, m, n, _, _) = self.mask, self.sizes

        def captured(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return mask(b, h, q, k, *masking)  # type: ignore[no-any-return]

        batch, heads = (n if name in self.each else None for name, n in zip("bh", self.sizes))
        return create_block_mask(captured, batch, heads, m, n, device=device, BLOCK_SIZE=self.block)

    def exact(self, q: Tensor, k: Tensor, v: Tensor, captured: Any, masking: Any) -> tuple[Tensor, Tensor]:
        """The result and the logarithm of the sums, in the dtype of the arguments; 0 and -inf where all is masked."""
        heads, groups = q.shape[1], k.shape[1]
        k, v = (t.expand(q.shape[0], -1, -1, -1).repeat_interleave(heads // groups, 1) for t in (k, v))
        score = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        sizes = score.shape
        at = [
            torch.arange(n, device=q.device).view([-1 if i == d else 1 for i in range(4)]) for d, n in enumerate(sizes)
        ]
        if self.mod is not None:
            score = self.mod(score, *at, *captured)
        if self.mask is not None:
            score = torch.where(self.mask(*at, *masking), score, -math.inf)
        sums = score.logsumexp(-1)
        base = torch.where(sums.isinf(), 0.0, sums).unsqueeze(-1)
        weight = torch.where(sums.isinf().unsqueeze(-1), 0.0, torch.exp(score - base))
        return weight @ v, sums


def soft_cap(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    """Gemma's: scores within ±2."""
    return torch.tanh(s / 2) * 2


def alibi(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    """Press et al., 2021."""
    return s - torch.exp2(-(h + 1) * 0.5) * (q - k).abs()


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Keys up to the query."""
    return q >= k


def window(b: Any, h: Any, q: Any, k: Any) -> Any:
    """The last 40 keys."""
    return (q >= k) & (q - k < 40)


def neighbours(b: Any, h: Any, q: Any, k: Any) -> Any:
    """The places of an image of 16 columns at most 3 away."""
    return ((q // 16 - k // 16).abs() <= 3) & ((q % 16 - k % 16).abs() <= 3)


def documents(h: int, m: int, n: int) -> tuple[Tensor, ...]:
    """The document of each position."""
    return (torch.arange(max(m, n)) // 37,)


LONG = (1, 2, 2, 300, 300, 16, 16)
CASES: tuple[FlexCase, ...] = (
    FlexCase("plain"),
    FlexCase("other sizes", None, None, (1, 3, 1, 37, 91, 24, 40)),
    FlexCase("heads in two parts", alibi, None, (1, 2, 1, 40, 70, 72, 48), turned=True),
    FlexCase("heads of 192 and 128", None, causal, (1, 2, 2, 130, 128, 192, 128)),
    FlexCase("one query", alibi, None, (2, 4, 2, 1, 90, 16, 16)),
    FlexCase("one of all", None, None, (1, 1, 1, 1, 1, 16, 16)),
    FlexCase("soft cap", soft_cap, None, (1, 2, 1, 128, 128, 32, 32)),
    FlexCase("alibi", alibi, None, (1, 4, 4, 70, 90, 16, 16), turned=True),
    FlexCase("doubled", lambda s, b, h, q, k: s * 2 + 1),
    FlexCase("squared", lambda s, b, h, q, k: s + s * s * 0.1),
    FlexCase("masked by the modification", lambda s, b, h, q, k: torch.where(q >= k, s, -float("inf"))),
    FlexCase(
        "bias", lambda s, b, h, q, k, t: s + t[h, q, k], captured=lambda h, m, n: (torch.randn(h, m, n),)
    ),
    FlexCase(
        "bias of a head", lambda s, b, h, q, k, t: s + t[h], captured=lambda h, m, n: (torch.randn(h),)
    ),
    FlexCase(
        "relative", lambda s, b, h, q, k, t: s + t[h, q - k + 69], captured=lambda h, m, n: (torch.randn(h, 139),)
    ),
    FlexCase(
        "bias of the first", lambda s, b, h, q, k, t: s + t[0, q, 1], captured=lambda h, m, n: (torch.randn(h, m, n),)
    ),
    FlexCase(
        "temperature", lambda s, b, h, q, k, t: s * t, captured=lambda h, m, n: (torch.tensor(0.7),)
    ),
    FlexCase("remainders", lambda s, b, h, q, k: s + (q - k) % 7 * 0.1 - (k // 5) * 0.01),
    FlexCase(
        "by the distance",
        lambda s, b, h, q, k: s * torch.exp((k - q).abs().to(s.dtype) / -40.0) + torch.sigmoid(s),
    ),
    FlexCase(
        "by a table of keys", lambda s, b, h, q, k, t: s + torch.sin(t[k // 3].to(s.dtype)) * (h + 1),
        captured=lambda h, m, n: (torch.randn(n),),
    ),
    FlexCase("causal", None, causal, LONG),
    FlexCase("neighbours", None, neighbours, (1, 2, 2, 256, 256, 16, 16)),
    FlexCase("causal, few keys", soft_cap, causal, (1, 2, 2, 200, 90, 16, 16)),
    FlexCase("window", alibi, window, (1, 4, 2, 300, 300, 16, 32), turned=True),
    FlexCase(
        "documents", None, lambda b, h, q, k, t: (t[q] == t[k]) & (q >= k), LONG, masking=documents
    ),
    FlexCase("other mask of each head", None, lambda b, h, q, k: (q >= k) | (h == 1), LONG, each="h"),
    FlexCase("nothing for some", None, lambda b, h, q, k: (q >= k) & (q > 100), LONG, block=64),
    FlexCase("a rest of blocks alone", None, lambda b, h, q, k: (k > 100) & (q > 9), (1, 2, 2, 320, 320, 16, 16)),
    FlexCase("shared keys", soft_cap, causal, (3, 2, 1, 130, 140, 16, 16), key_batch=1, each="b"),
    FlexCase("float16", soft_cap, causal, (1, 2, 2, 150, 150, 64, 64), dtype=torch.float16),
)  # fmt: skip
BY_NAME = {case.name: case for case in CASES}
