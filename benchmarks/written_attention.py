"""Attention as programs write it, beside the call of `scaled_dot_product_attention` that an expert would write.

Fourteen spellings (`tests/attention_spellings.py` has all that tests know), with the sizes of GPT-2's heads.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.contraction_rows import Built, Row
from tests.attention_spellings import SPELLINGS, Spelling

LENGTHS = {"cpu": (128, 512, 1024), "cuda": (512, 2048)}
DTYPES = {"cpu": (torch.float32, torch.bfloat16, torch.float16), "cuda": (torch.bfloat16, torch.float32)}
BATCH = {"cpu": 1, "cuda": 8}
HEADS, WIDTH = 12, 64
_NAMES = (
    "scale_divides", "softmax_in_float32", "scores_in_float32", "einsum_of_tokens", "batched_products",
    "causal_by_tril", "causal_by_triu", "sliding_window", "padding_filled", "alibi", "relative_positions",
    "groups_repeated", "window_of_an_eighth", "padded_and_causal",
)  # fmt: skip


def _none(q: Tensor, *others: Tensor) -> Tensor | None:
    return None


def _window(q: Tensor, width: int = 5) -> Tensor:
    at = torch.arange(q.shape[-2], device=q.device)
    apart = at[:, None] - at[None, :]
    return (apart >= 0) & (apart < width)


def _alibi(q: Tensor, *others: Tensor) -> Tensor:
    at = torch.arange(q.shape[-2], device=q.device)
    slopes = 2.0 ** -torch.arange(1, q.shape[1] + 1, device=q.device)
    return (-(at[:, None] - at).abs() * slopes[:, None, None]).to(q.dtype)


_MASKS: dict[str, Callable[..., Tensor | None]] = {
    "sliding_window": _window,
    "window_of_an_eighth": lambda q: _window(q, max(q.shape[-2] // 8, 4)),
    "padded_and_causal": lambda q, keep: _window(q, q.shape[-2]) & keep[:, None, None, :],
    "padding_filled": lambda q, keep: keep[:, None, None, :],
    "alibi": _alibi,
    "relative_positions": lambda q, bias: bias[None].to(q.dtype),
}


class Written(nn.Module):
    """`forward` is a spelling, `by_hand` the fused call; masks that depend on sizes alone are made once."""

    def __init__(self, spelling: Spelling, others: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.spelling, self.made = spelling, None
        for n, other in enumerate(others):
            self.register_buffer(f"other{n}", other)
        self.count = len(others)

    def _others(self) -> list[Tensor]:
        return [getattr(self, f"other{n}") for n in range(self.count)]

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The attention as written."""
        others = [o.to(q.dtype) if o.is_floating_point() else o for o in self._others()]
        return self.spelling.fn(q, k, v, *others)

    def by_hand(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The same by one call."""
        turned = self.spelling.layout == "bthd"
        if turned:
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if q.dim() == 3:
            q, k, v = (t[None] for t in (q, k, v))
        if self.made is None:
            self.made = _MASKS.get(self.spelling.name, _none)(q, *self._others())
        causal = self.spelling.name.startswith("causal")
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, self.made, is_causal=causal, enable_gqa=grouped)
        out = out[0] if self.spelling.layout == "ntd" else out
        return out.transpose(1, 2) if turned else out


def _make(spelling: Spelling, length: int, dtype: torch.dtype, device: str) -> Callable[[bool], Built]:
    def make(quick: bool) -> Built:
        found = spelling.make(BATCH[device], HEADS, 64 if quick else length, WIDTH, dtype)
        return Written(spelling, tuple(found[3:])).eval(), tuple(found[:3])

    return make


def rows(device: str) -> tuple[Row, ...]:
    """A row for each spelling, length and dtype."""
    table = {s.name: s for s in SPELLINGS}
    return tuple(
        Row(f"{name}, {length}, {str(dtype)[6:]}", _make(table[name], length, dtype, device))
        for dtype in DTYPES[device]
        for length in LENGTHS[device]
        for name in _NAMES
    )
