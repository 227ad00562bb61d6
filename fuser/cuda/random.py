"""Random numbers of a tile: one block of Philox, four words, for every four neighbours."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from fuser.cuda.layout import Layout
from fuser.cuda.text import fixed_factors
from fuser.cuda.tiles import VECTOR
from fuser.ir.loop_body import Row
from fuser.ir.sizes import ONE, Expr, coefficient, expr
from fuser.lazy_dataclasses import dataclass
from fuser.scheduler.kernel_plan import KernelPlan

NEIGHBOURS = 4  # random words that one block of Philox gives
EACH = (2, "{0}")  # `OpRow.draw` if each element has a word of its own
_BITS: int = 24  # bits of a word that a number uses


@dataclass(frozen=True)
class Quads:
    """A row of random numbers whose indices are consecutive along tile dim `dim`, from `start`, divisible by 4, on."""

    dim: int
    start: Expr


def find_quads(plan: KernelPlan, layout: Layout, hint: Callable[[Expr], int]) -> dict[int, Quads]:
    """The rows whose neighbours share Philox blocks; other rows compute a block for each element."""
    found = {}
    for n, row in enumerate(plan.rows):
        quads = _quads(plan, layout, row, hint) if row.traits.draw is not None else None
        if quads is not None:
            found[n] = quads
    return found


def _quads(plan: KernelPlan, layout: Layout, row: Row, hint: Callable[[Expr], int]) -> Quads | None:
    place = plan.rows[row.args[2]]
    fixed = not any(plan.varies[a] for a in row.args[:2])
    if place.op != "index" or not fixed:
        return None
    for dim in reversed(range(len(layout.dims))):
        start = _start(layout, dim, place.attr)
        if start is not None and _in_fours(start, hint):
            return Quads(dim, start)
    return None


def _start(layout: Layout, dim: int, place: Expr) -> Expr | None:
    """The index `place` minus the part that numbers a dim's elements consecutively; None if there is no such part."""
    d, step = layout.dims[dim], ONE
    if d.block % NEIGHBOURS:
        return None
    for a in reversed(d.axes):
        if coefficient(place, a.sym) != step:
            return None
        place = place - expr(a.sym) * step
        step = step * a.size
    return place


def _in_fours(e: Expr, hint: Callable[[Expr], int]) -> bool:
    """Whether four divides every term, assuming that sizes are divisible by 16 where the example's are."""
    for moving, factor in fixed_factors(e).items():
        number = factor.as_int()
        if number is None and (not moving or hint(factor) % VECTOR):
            return False
        if number is not None and number % NEIGHBOURS:
            return False
    return True


def least_word(p: float) -> int | None:
    """The smallest word whose number is at least `p`, a float32; None if there is no such word."""
    p = float(torch.tensor(p, dtype=torch.float32))
    if math.isnan(p) or p > 1 - 2.0**-_BITS:
        return None
    least = max(math.ceil(p * (1 << _BITS)), 0)
    return least << (32 - _BITS)
