"""Attention forward on the CPU: scores of a few rows of queries at a time, which never leave the inner caches.

A unit is some rows of queries of one head. It goes over the keys in blocks, which it packs as `cpu/packed.py` packs
weights: keys for scores, values for results. Per step of rows: products give float32 scores; these are scaled and
masked; their exponentials, rounded to the operands' dtype as ATen rounds them, are multiplied by the values. Between
blocks of keys results are scaled to the largest score so far (Milakov and Gimelshein 2018; Dao et al. 2022).
"""

from __future__ import annotations

import torch

from fuser import config
from fuser.cpu import packed
from fuser.cpu.dots import DTYPES
from fuser.cpu.routines import Routines
from fuser.reasons import served_by

MOST_WIDTH = 512  # of a head: a unit keeps its results in float32


def why_not(dtype: torch.dtype, width: int) -> str | None:
    """None if a kernel computes attention of this dtype and width of heads here, else the reason."""
    return f"heads of {width} elements are wide" if width > MOST_WIDTH else packed.why_not(dtype, width)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, mask: torch.Tensor | None, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result, in the memory order of q, and logarithms of sums; operands as in `attention.library.attend`."""
    batch, heads, rows, width = q.shape
    q, k, v = (t if t.stride(3) == 1 else t.contiguous() for t in (q, k, v))
    out = torch.empty_like(q)
    logs = q.new_empty((batch, rows, heads), dtype=torch.float32).transpose(1, 2)
    around: tuple[torch.Tensor, ...] = ()
    if mask is not None:
        mask = mask if mask.dtype in DTYPES else mask.to(q.dtype)
        mask = mask if mask.stride(-1) in (0, 1) else mask.contiguous()
        around = (mask.expand(batch, heads, rows, k.shape[2]),)
    handle = ATTENTION.handle(config.isa, q.dtype, None, causal, None if mask is None else mask.dtype)
    factor = width**-0.5 if scale is None else float(scale)
    made: tuple[torch.Tensor, torch.Tensor] = handle(factor, q, k, v, out, logs, *around)
    return made


served_by(attend, "library", "one kernel of the package does all of attention")


def _on_aten(
    causal: bool, dtype: torch.dtype | None, scale: float, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    out: torch.Tensor, logs: torch.Tensor, mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    found: tuple[torch.Tensor, torch.Tensor] = op(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    return found


ATTENTION = Routines("attention_cpp", _on_aten)

__all__ = ["ATTENTION", "attend", "why_not"]
