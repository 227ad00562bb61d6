"""Sums over windows of channels: an iteration computes several neighbours, and loads what they share once.

A window of 3x3 reads each element for nine results. Four results beside each other read 18 elements in place of 36, and
convert as many to float32. Each result is computed by the same operations in the same order. Average pools of 64 images
of 64x56x56 take 0.024 ms on an H200 in place of 0.029 (bfloat16), their gradients 0.032 in place of 0.051 (float32
0.074, 0.141). Convolutions have a second operand for each place, which takes registers: depthwise ones took 1.2 to 1.8
times as long so, and stay as they are.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Sequence

import torch

from fuser.ir.loop_body import Row, indirect_rows, loads_in
from fuser.ir.ranges import is_nonnegative
from fuser.ir.sizes import ONE, ZERO, Expr, coefficient, expr, floordiv, mod, substitute
from fuser.lowering.context import LoweringContext
from fuser.scheduler.choices import MOST_ROWS, Stores, copies
from fuser.scheduler.kernel_plan import Axis

COUNTS = 4, 2  # results of an iteration
SHARED = 0.7  # most loads, as a share of those of single results
FEWEST = 1 << 20  # results, so that programs of more of them fill a device


def compute_several(
    ctx: LoweringContext, axes: list[Axis], rows: list[Row], stores: Stores
) -> tuple[list[Axis], list[Row], Stores]:
    """A nest whose iterations compute several neighbours along an axis; the given one where that saves too little.

    Their number divides the axis's size in all calls: it becomes a guard.
    """
    vector = next((a for a in axes if all(coefficient(e, a.sym) == ONE for _, e, _ in stores)), None)
    if vector is None or math.prod(a.hint for a in axes) < FEWEST:
        return axes, rows, stores
    read = _read_most(rows, vector, ctx.target.neighbours)
    for count in COUNTS if read else ():
        axis = _shared_along([a for a in axes if a is not vector and a.hint % count == 0], read, count)
        if axis is None or count * len(rows) > MOST_ROWS:
            continue
        ctx.assume("eq", mod(axis.size, expr(count)), ZERO)
        rows, stores = copies(rows, stores, axis.sym, _places(axis, count), functools.partial(_holds, axis, count))
        fewer = Axis(axis.sym, floordiv(axis.size, expr(count)), reduced=False, hint=axis.hint // count)
        return [fewer if a is axis else a for a in axes], rows, stores
    return axes, rows, stores


def _read_most(rows: Sequence[Row], vector: Axis, many: int) -> list[Expr]:
    """The addresses of the tensor of which a nest reads `many` elements for each result, if it is the only one and if
    they are contiguous; else none."""
    loads = {(r.buffer, r.address): None for r in loads_in(rows) if not indirect_rows(r)}
    often = [name for name, n in Counter(name for name, _ in loads).items() if n >= many]
    found = [address for name, address in loads if name in often]
    alone = len(often) == 1 and all(coefficient(e, vector.sym) == ONE for e in found)
    return found if alone else []


def _shared_along(axes: Sequence[Axis], read: Sequence[Expr], count: int) -> Axis | None:
    """The axis along which `count` neighbours share most loads; None if they share too few along each."""
    loads = {a: len({substitute(e, {a.sym: p}) for e in read for p in _places(a, count)}) for a in axes}
    best = min(loads, key=lambda a: loads[a], default=None)
    return best if best is not None and loads[best] <= SHARED * count * len(read) else None


def _places(axis: Axis, count: int) -> list[Expr]:
    return [expr(axis.sym) * count + n for n in range(count)]


def _holds(axis: Axis, count: int, rows: Sequence[Row], row: Row) -> bool:
    """Whether a comparison of indices holds in all iterations, as that of inner neighbours with an edge does.

    `count` iterations of the given axis are one of the new axis, which ends at size / count - 1.
    """
    sides = [_index(rows[a]) for a in row.args]
    sign = row.traits.sign
    if len(sides) != 2 or None in sides or sign not in ("<", "<=", ">", ">="):
        return False
    less, more = sides if sign in ("<", "<=") else sides[::-1]
    gap = more - less - (sign in ("<", ">"))  # type: ignore[operator]
    step = coefficient(gap, axis.sym)
    if step is None or step not in (expr(count), expr(-count)):
        return False
    at_least = gap - step * expr(axis.sym) - (axis.size - count if step == expr(-count) else ZERO)
    return is_nonnegative(at_least)


def _index(row: Row) -> Expr | None:
    if row.op == "index":
        return row.attr  # type: ignore[no-any-return]
    return expr(int(row.attr)) if row.op == "const" and row.dtype is torch.int64 else None
