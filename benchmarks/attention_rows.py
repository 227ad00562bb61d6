"""The rows of the `attention` suite: score modifications and masks of public models and papers, with their source.

Sizes are those of the models; on the CPU the sequences are a quarter as long.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.contraction_rows import Built, Row

Mod = Callable[..., Any]
HALF, FLOAT = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Problem:
    """`mod(table, s, b, h, q, k)` and `mask(table, b, h, q, k)`, where `table(heads, length)` is what they capture.

    `sizes`: batch, heads, heads of keys, length, elements of a head, and of a head of values.
    """

    name: str
    source: str
    sizes: tuple[int, int, int, int, int, int]
    mod: Mod | None = None
    mask: Mod | None = None
    table: Callable[[int, int], Tensor] | None = None
    dtype: torch.dtype = HALF


class Attention(nn.Module):
    """One call of `flex_attention`."""

    def __init__(self, problem: Problem, length: int) -> None:
        super().__init__()
        self.problem, self.length = problem, length
        made = problem.table(problem.sizes[1], length) if problem.table else torch.zeros(1)
        self.register_buffer("table", made)
        self.blocks = self._block_mask()

    def _apply(self, fn: Any, recurse: bool = True) -> Attention:
        super()._apply(fn, recurse)
        self.blocks = self._block_mask()
        return self

    def _block_mask(self) -> Any:
        own = self.problem.mask
        if own is None:
            return None

        def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
            return own(self.table, b, h, q, k)

        return create_block_mask(mask, None, None, self.length, self.length, device=str(self.table.device))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        own, table = self.problem.mod, self.table
        mod = None if own is None else (lambda s, b, h, q, k: own(table, s, b, h, q, k))
        return flex_attention(q, k, v, mod, self.blocks, enable_gqa=q.shape[1] != k.shape[1])


def causal(t: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    """Keys up to the query."""
    return q >= k


def soft_cap(cap: float) -> Mod:
    """Scores within ± `cap`."""
    return lambda t, s, b, h, q, k: torch.tanh(s / cap) * cap


def window(size: int) -> Mod:
    """The last `size` keys."""
    return lambda t, b, h, q, k: (q >= k) & (q - k < size)


def alibi(t: Any, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    """A slope for each head times the distance."""
    return s - t[h] * (q - k).abs()


def slopes(heads: int, length: int) -> Tensor:
    """ALiBi's."""
    return torch.exp2(-8.0 * torch.arange(1, heads + 1) / heads)


def relative(t: Any, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    """A learned number for each head and distance."""
    return s + t[h, (q - k).clamp(-127, 127) + 127]


def neighbours(side: int, reach: int) -> Mod:
    """The places of an image of `side` columns at most `reach` away."""
    return lambda t, b, h, q, k: ((q // side - k // side).abs() <= reach) & ((q % side - k % side).abs() <= reach)


PROBLEMS: tuple[Problem, ...] = (
    Problem("causal", "Llama 3 (2024)", (2, 32, 8, 4096, 128, 128), None, causal),
    Problem("causal of GPT-2", "Radford et al. (2019)", (8, 12, 12, 1024, 64, 64), None, causal),
    Problem("all keys", "ViT-L (2020)", (16, 16, 16, 576, 64, 64)),
    Problem("soft cap", "Gemma 2 (2024)", (1, 8, 4, 4096, 256, 256), soft_cap(50.0), causal),
    Problem("soft cap of 128", "Grok-1 (2024)", (1, 48, 8, 2048, 128, 128), soft_cap(30.0), causal),
    Problem("window", "Mistral 7B (2023)", (1, 16, 4, 8192, 128, 128), None, window(1024)),
    Problem("ALiBi", "Press et al. (2021), MPT-7B", (2, 32, 32, 2048, 128, 128), alibi, causal, slopes),
    Problem("ALiBi of 64", "BLOOM-560M (2022)", (4, 16, 16, 2048, 64, 64), alibi, causal, slopes),
    Problem(
        "relative bias", "T5 (2019)", (8, 12, 12, 512, 64, 64), relative, None, lambda h, n: torch.randn(h, 255)
    ),
    Problem(
        "documents", "packed sequences, Llama 3 (2024)", (1, 16, 16, 8192, 64, 64), None,
        lambda t, b, h, q, k: (t[q] == t[k]) & (q >= k), lambda h, n: torch.arange(n) // 700,
    ),
    Problem(
        "prefix", "PrefixLM, T5 (2019)", (4, 16, 16, 2048, 64, 64), None, lambda t, b, h, q, k: (q >= k) | (k < 512)
    ),
    Problem("neighbourhood", "NATTEN, Hassani et al. (2023)", (2, 16, 16, 4096, 64, 64), None, neighbours(64, 6)),
    Problem("latent heads", "DeepSeek-V2 (2024)", (1, 16, 16, 2048, 192, 128), None, causal),
    Problem("float32", "GPT-2 in float32", (2, 12, 12, 1024, 64, 64), None, causal, None, FLOAT),
)  # fmt: skip


def _make(problem: Problem) -> Callable[[bool], Built]:
    def make(quick: bool) -> Built:
        batch, heads, groups, length, width, of_values = problem.sizes
        if quick:
            batch, length = 1, 128
        elif not torch.cuda.is_available():
            batch, length = max(batch // 4, 1), length // 4
        sizes = ((heads, width), (groups, width), (groups, of_values))
        heads_of = tuple(torch.randn(batch, n, length, w, dtype=problem.dtype) for n, w in sizes)
        return Attention(problem, length).eval(), heads_of

    return make


ROWS = tuple(Row(p.name, _make(p)) for p in PROBLEMS)
