"""Pointwise nests over rows of a few elements with operands broadcast along rows: lanes run over many rows at once.

`x[n, 3] * w[3]` is a loop along all of `x`, in which `w` is periodic. Rows of the plan that vary along the short axis
alone are computed into a table for a whole number of rows, which every block of the loop reads from its start.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from fuser.cpu.facts import Facts
from fuser.ir.loop_body import map_exprs, row_exprs
from fuser.ir.sizes import ZERO, Expr, Sym, coefficient, expr, floordiv, maximum, mod, rows_in, substitute, symbols
from fuser.lazy_dataclasses import dataclass
from fuser.scheduler.kernel_plan import Axis, KernelPlan
from fuser.scheduler.plan import FEW, phases_of

LONGEST = 64  # elements of a row; longer rows fill vectors by themselves
WHOLE = 32  # the same for rows that are a whole number of vectors
FEWEST = 16  # fewest rows that are worth a table
TABLE = 512  # elements of a table, about: it is computed quickly and stays in the first-level cache
MOST = 4  # most tables


@dataclass(frozen=True)
class _Pair:
    """Two axes; a step of the outer one moves by one whole row of the inner one."""

    outer: Axis
    inner: Axis

    def joins(self, e: Expr) -> bool:
        """Whether an address runs along both axes as along one."""
        outer, inner = coefficient(e, self.outer.sym), coefficient(e, self.inner.sym)
        return outer is not None and inner is not None and outer != ZERO and outer == inner * self.inner.size

    def goes_round(self, e: Expr) -> bool:
        """Whether an address does not vary along the outer axis, so it is periodic."""
        return self.outer.sym not in symbols(e)


def going_round(facts: Facts) -> Facts | None:
    """The facts of a nest whose short rows are taken as one, its tables as hoisted rows; None for other nests."""
    plan = facts.plan
    if facts.checked or plan.ordered is not None or plan.reductions:
        return None
    if any(row.op == "indirect" or any(map(rows_in, row_exprs(row))) for row in plan.rows):
        return None
    for pair in _pairs(plan, facts.machine.vector_bytes // 4):
        tables = _tables(plan, pair)
        if 0 < len(tables) <= MOST:
            return replace(facts, plan=_flat(plan, pair), hoisted=tables, around=pair.inner.size)
    return None


def _pairs(plan: KernelPlan, lanes: int) -> Iterable[_Pair]:
    few = [a for a in plan.axes if 1 < a.hint < (LONGEST if a.hint % lanes else WHOLE)]
    short = [a for a in few if all(_is_nearest(s.address, a, plan.axes) for s in plan.stores)]
    return (_Pair(o, v) for v in short for o in plan.axes if o is not v and o.hint >= FEWEST)


def _is_nearest(address: Expr, axis: Axis, axes: Iterable[Axis]) -> bool:
    """Whether results are contiguous along the axis, except for axes of a few elements, whose sizes plans fix.

    Along the channels of images, lanes would be a plane apart.
    """
    steps = {a.sym: c.as_int() for a in axes if (c := coefficient(address, a.sym)) is not None and c != ZERO}
    own = steps.get(axis.sym)
    nearer = [a for a in axes if (step := steps.get(a.sym)) is not None and (own is None or step < own)]
    return all(a.hint < FEW for a in nearer)


def _tables(plan: KernelPlan, pair: _Pair) -> tuple[int, ...]:
    """The rows that become tables: those that vary along the inner axis alone and that other rows need.

    Empty if a row varies along the two axes in another way, or if a table would hold conditions: comparisons of an
    index are better masks of lanes, or cuts between segments.
    """
    both, alone = {pair.outer.sym, pair.inner.sym}, {pair.inner.sym}
    if not plan.stores or not all(pair.joins(s.address) and both <= plan.varies[s.row] for s in plan.stores):
        return ()
    needed: set[int] = set()
    for n, row in enumerate(plan.rows):
        along = plan.varies[n] & both
        if along == both:
            if not all(map(pair.joins, row_exprs(row))):
                return ()
            needed.update(row.args)
        elif along == alone:
            if plan.varies[n] != alone or not all(map(pair.goes_round, row_exprs(row))):
                return ()
        elif along:
            return ()
    tables = tuple(n for n in sorted(needed) if plan.varies[n] == alone and plan.rows[n].op != "const")
    return () if any(plan.rows[n].dtype is torch.bool for n in tables) else tables


def _flat(plan: KernelPlan, pair: _Pair) -> KernelPlan:
    """The plan with one axis in place of the pair; lanes run along it."""
    flat = Sym(f"a{len(plan.axes) + max(int(a.sym.name[1:]) for a in plan.axes)}", pair.inner.sym.kind)
    along = {pair.outer.sym: ZERO, pair.inner.sym: expr(flat)}
    around = {pair.inner.sym: mod(expr(flat), pair.inner.size)}

    def moved(e: Expr) -> Expr:
        return substitute(e, along if pair.outer.sym in symbols(e) else around)

    size, hint = pair.outer.size * pair.inner.size, pair.outer.hint * pair.inner.hint
    axes = [a for a in plan.axes if a not in (pair.outer, pair.inner)]
    axes.append(Axis(flat, size, reduced=False, hint=hint))
    rows = tuple(map_exprs(row, moved) if row_exprs(row) else row for row in plan.rows)
    phases, varies = phases_of(axes, rows, [])
    stores = tuple(replace(s, address=moved(s.address)) for s in plan.stores)
    return replace(plan, axes=tuple(axes), vector=flat, rows=rows, phases=phases, varies=varies, stores=stores)


def table_length(around: Expr) -> Expr:
    """The elements of a table: a whole number of rows."""
    return maximum(around * maximum(floordiv(expr(TABLE), around), 1), 1)


__all__ = ["going_round", "table_length"]
