"""Where the float32 rows of a plan lie, NaN apart: some functions cost less on an interval.

An interval from 0.0 has no -0.0.
"""

from __future__ import annotations

import math

import torch

from fuser.ir.loop_body import Row
from fuser.scheduler.kernel_plan import KernelPlan

Interval = tuple[float, float]
ALL: Interval = (-math.inf, math.inf)
_ROUNDED = (-math.inf, -1.0, 0.0, 1.0, math.inf)  # ends that every dtype has


def intervals(plan: KernelPlan) -> list[Interval]:
    """The interval of each row's values; `ALL` where nothing is known."""
    found: list[Interval] = []
    for row in plan.rows:
        found.append(_interval(row, found) if row.dtype is torch.float32 else ALL)
    return found


def near_rows(plan: KernelPlan) -> frozenset[int]:
    """The rows whose op has a helper for the interval of its argument."""
    lies = intervals(plan)
    return frozenset(n for n, row in enumerate(plan.rows) if _is_near(row, lies))


def _is_near(row: Row, lies: list[Interval]) -> bool:
    near = row.traits.near
    if near is None or row.dtype is not torch.float32:
        return False
    low, high = lies[row.args[0]]
    return near.low <= low and high <= near.high


def _interval(row: Row, lies: list[Interval]) -> Interval:
    args = [lies[a] for a in row.args]
    if row.op == "const":
        value = float(row.attr)
        return ALL if value == 0 or math.isnan(value) else (value, value)
    if row.op == "round_to":
        return args[0] if set(args[0]) <= set(_ROUNDED) else ALL
    if _is_near(row, lies):
        assert row.traits.near is not None
        return row.traits.near.gives
    if row.traits.within is not None:
        return row.traits.within
    if row.traits.negates:
        low, high = args[0]
        return ALL if high == 0 else (-high, -low)
    if row.traits.sign == "*" and row.args[0] == row.args[1]:
        return 0.0, math.inf
    if row.traits.chooses:
        chosen = [args[k] for k in row.traits.selects]
        return min(low for low, _ in chosen), max(high for _, high in chosen)
    return ALL


__all__ = ["ALL", "intervals", "near_rows"]
