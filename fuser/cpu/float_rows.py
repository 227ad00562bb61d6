"""Facts about a plan's float rows: which are exact in 16 bits, which NaNs they may hold, and their intervals.

It also finds the 16-bit floats that a kernel only moves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Set

import torch

from fuser.ir.loop_body import Row, indirect_rows
from fuser.scheduler.kernel_plan import KernelPlan

SMALL = frozenset({torch.bool, torch.int8, torch.uint8})  # whole numbers of at most eight bits
WHOLE = SMALL | {torch.int16, torch.int32, torch.int64}


def exact_rows(plan: KernelPlan, dtype: torch.dtype) -> frozenset[int]:
    """The float32 rows of a plan that are exact in the 16-bit float `dtype`: rounding does not change them."""
    return _found(plan, lambda row, found: _is_exact(plan, row, dtype, found))


def _found(plan: KernelPlan, holds: Callable[[Row, Set[int]], bool]) -> frozenset[int]:
    """The float32 rows for which `holds`, given the rows found before."""
    found: set[int] = set()
    for n, row in enumerate(plan.rows):
        if row.dtype is torch.float32 and holds(row, found):
            found.add(n)
    return frozenset(found)


def _is_exact(plan: KernelPlan, row: Row, dtype: torch.dtype, found: Set[int]) -> bool:
    if row.op == "load":
        return dict(plan.buffers)[row.buffer] is dtype
    if row.op == "round_to":
        # The reverse does not hold: the largest float16, rounded to bfloat16, is not a float16 any more.
        narrower = dtype is torch.bfloat16 and row.attr is torch.float16
        return row.attr is dtype or (narrower and row.args[0] in found)
    if row.op == "to_dtype":
        return row.attr in SMALL
    if row.op == "const":
        value = torch.tensor(float(row.attr), dtype=torch.float64)
        return bool((value.to(dtype).double() == value).item())
    if row.traits.sign == "*" and dtype is torch.bfloat16:
        a, b = row.args
        return (_doubles(plan.rows[a]) and b in found) or (_doubles(plan.rows[b]) and a in found)
    return bool(row.traits.selects) and found >= _chosen(row)


def _doubles(row: Row) -> bool:
    """Whether a row is the constant 1, 2, 4, ... or its negative.

    A product of a bfloat16 with it has no more bits, and overflows in float32 where it would in bfloat16. With a
    smaller power of two it could lose bits below the smallest number.
    """
    return row.op == "const" and abs(float(row.attr)) >= 1 and math.frexp(abs(float(row.attr)))[0] == 0.5


def _chosen(row: Row) -> set[int]:
    """The arguments among which an operator selects its result."""
    return {row.args[k] for k in row.traits.selects}


def tame_rows(plan: KernelPlan) -> frozenset[int]:
    """The float32 rows of a plan whose NaNs, if any, have zeros in their low 16 bits.

    Adding up to 0x8000 to such a NaN's bits does not carry: rounded to bfloat16 like a number, it stays that NaN. NaNs
    of bfloat16 are of this kind, as are the default NaNs of processors (0x7fc00000 or 0xffc00000). An operator with a
    NaN argument returns that NaN with its quiet bit set (`OpRow.plain_nan`; so do the package's elementary functions,
    whose powers of two have a mantissa of 0). NaNs of float32, of float16 (whose ten bits reach down to bit 13), of
    float64 and of approximated functions may have any bits.
    """
    return _found(plan, lambda row, found: _is_tame(plan, row, found))


def _is_tame(plan: KernelPlan, row: Row, found: Set[int]) -> bool:
    if row.op == "load":
        return dict(plan.buffers)[row.buffer] is torch.bfloat16
    if row.op == "const":
        return True
    if row.op == "round_to":
        return row.attr is torch.bfloat16 or row.args[0] in found
    if row.op == "to_dtype":
        return row.attr in WHOLE
    if row.traits.selects:
        return found >= _chosen(row)
    return row.traits.plain_nan and found >= set(row.args)


# -- intervals of rows, NaN apart: some functions cost less on an interval --------------------------------------------
Interval = tuple[float, float]  # an interval from 0.0 holds no -0.0
ALL: Interval = (-math.inf, math.inf)
_ROUNDED = (-math.inf, -1.0, 0.0, 1.0, math.inf)  # bounds that every dtype represents


def intervals(plan: KernelPlan) -> list[Interval]:
    """The interval of each row's values; `ALL` where nothing is known."""
    found: list[Interval] = []
    for row in plan.rows:
        found.append(_interval(row, found) if row.dtype is torch.float32 else ALL)
    return found


def near_rows(plan: KernelPlan) -> frozenset[int]:
    """The rows whose op has a helper for an interval that contains its argument."""
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


# -- 16-bit floats that a kernel only moves: they are copied as bits, without conversions -----------------------------
_OTHER = {torch.float16: torch.bfloat16, torch.bfloat16: torch.float16}
HALVES = tuple(_OTHER)


def moved_rows(plan: KernelPlan) -> dict[int, torch.dtype]:
    """Rows that are only loaded, selected and stored, each with the 16-bit float whose bits it holds."""
    dtypes = dict(plan.buffers)
    found: dict[int, torch.dtype] = {}
    for n, row in enumerate(plan.rows):
        kinds = {found.get(a) for a in _sources(plan, n)}
        if row.op == "load":
            kinds = {dtypes[row.buffer]}
        if len(kinds) == 1 and (kind := kinds.pop()) in HALVES and row.attr is not _OTHER.get(kind):
            found[n] = kind
    stores = [s.row for s in plan.stores if found.get(s.row) is not dtypes[s.buffer]]
    rows = range(len(plan.rows))
    while unfit := [n for n in (*stores, *(a for n in rows for a in _unfit(plan, n, found))) if n in found]:
        for n in unfit:
            found.pop(n, None)
    return found


def _sources(plan: KernelPlan, n: int) -> list[int]:
    """The rows, except constants, of which row `n` copies one unchanged; none if it computes."""
    row = plan.rows[n]
    args = row.args[1:] if row.traits.chooses else row.args if row.op == "round_to" else ()
    return [a for a in args if plan.rows[a].op != "const"]


def _unfit(plan: KernelPlan, n: int, found: dict[int, torch.dtype]) -> list[int]:
    """Rows of `found` that row `n` shows to be not only moved: rows it computes with, or itself."""
    sources = _sources(plan, n)
    if n in found and any(found.get(a) is not found[n] for a in sources):
        return [n]
    row = plan.rows[n]
    return [a for a in (*row.args, *indirect_rows(row)) if a in found and (n not in found or a not in sources)]


def bits_of(value: float, dtype: torch.dtype) -> int:
    """The bits of a number rounded to a 16-bit float."""
    return int(torch.tensor(value, dtype=torch.float64).to(dtype).view(torch.int16).item()) & 0xFFFF


__all__ = ["bits_of", "exact_rows", "moved_rows", "near_rows", "tame_rows"]
