"""Which values a half holds already, so that rounding them again changes nothing."""

from __future__ import annotations

import torch

from fuser.scheduler.plan import KernelPlan

# Operators whose result is one of their arguments, zero, or one with another sign.
KEEPING = frozenset({"maximum", "minimum", "fmax", "fmin", "where", "neg", "abs", "relu", "copysign"})
DEEP = 16  # rows looked through


def is_exact(plan: KernelPlan, n: int, dtype: torch.dtype, depth: int = DEEP) -> bool:
    """Whether row `n` of a plan, a float32 value, is sure to be one that `dtype` has."""
    row = plan.rows[n]
    if row.op == "load":
        return dict(plan.buffers)[row.attr[0]] is dtype and not row.args
    if row.op == "round_to":
        return row.attr is dtype
    if row.op == "const":
        value = torch.tensor(float(row.attr), dtype=torch.float64)
        return row.dtype is torch.float32 and bool((value.to(dtype).double() == value).item())
    if row.op not in KEEPING or not depth:
        return False
    args = row.args[1:] if row.op == "where" else row.args[:1] if row.op == "copysign" else row.args
    return all(plan.rows[a].dtype is torch.float32 and is_exact(plan, a, dtype, depth - 1) for a in args)


__all__ = ["is_exact"]
