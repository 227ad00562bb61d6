"""Facts about float32 rows before they are rounded: which are exact in 16 bits, and which NaNs they can be."""

from __future__ import annotations

import math
from collections.abc import Callable, Set

import torch

from fuser.ir.loop_body import Row
from fuser.scheduler.kernel_plan import KernelPlan

SMALL = frozenset({torch.bool, torch.int8, torch.uint8})  # whole numbers of at most eight bits
WHOLE = SMALL | {torch.int16, torch.int32, torch.int64}


def exact_rows(plan: KernelPlan, dtype: torch.dtype) -> frozenset[int]:
    """The float32 rows of a plan that are exact in the 16-bit float `dtype`: rounding does not change them."""
    return _found(plan, lambda row, found: _is_exact(plan, row, dtype, found))


def _found(plan: KernelPlan, holds: Callable[[Row, Set[int]], bool]) -> frozenset[int]:
    """The float32 rows of which something holds, where it does of those before."""
    found: set[int] = set()
    for n, row in enumerate(plan.rows):
        if row.dtype is torch.float32 and holds(row, found):
            found.add(n)
    return frozenset(found)


def _is_exact(plan: KernelPlan, row: Row, dtype: torch.dtype, found: Set[int]) -> bool:
    if row.op == "load":
        return dict(plan.buffers)[row.attr[0]] is dtype
    if row.op == "round_to":
        # Not the other way round: the largest float16, rounded to bfloat16, is no float16 any more.
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
    """Whether a row is 1, 2, 4, ... or one of them negated.

    A product of a bfloat16 with it has no more bits and overflows where the bfloat16 does. With a smaller power of two
    it could lose bits below the smallest number.
    """
    return row.op == "const" and abs(float(row.attr)) >= 1 and math.frexp(abs(float(row.attr)))[0] == 0.5


def _chosen(row: Row) -> set[int]:
    """The arguments of an operator that selects one of them as its result."""
    return {row.args[k] for k in row.traits.selects}


def tame_rows(plan: KernelPlan) -> frozenset[int]:
    """The float32 rows of a plan whose NaNs, if any, have zeros in their low 16 bits.

    Adding up to 0x8000 to such a NaN's bits does not carry: rounded to bfloat16 like a number, it stays that NaN. NaNs
    of bfloat16 are such, as are those that processors make of no NaN (0x7fc00000 or 0xffc00000), and an operator
    with a NaN for an argument gives that one with its quiet bit set (`OpRow.plain_nan`; so do the package's
    elementary functions, whose powers of two have a mantissa of 0). NaNs of float32, of half (whose ten bits reach
    down to bit 13), of float64 and of approximated functions may have any bits.
    """
    return _found(plan, lambda row, found: _is_tame(plan, row, found))


def _is_tame(plan: KernelPlan, row: Row, found: Set[int]) -> bool:
    if row.op == "load":
        return dict(plan.buffers)[row.attr[0]] is torch.bfloat16
    if row.op == "const":
        return True
    if row.op == "round_to":
        return row.attr is torch.bfloat16 or row.args[0] in found
    if row.op == "to_dtype":
        return row.attr in WHOLE
    if row.traits.selects:
        return found >= _chosen(row)
    return row.traits.plain_nan and found >= set(row.args)


__all__ = ["exact_rows", "tame_rows"]
