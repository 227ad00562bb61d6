"""Writes out short axes of reducing nests: losses of boxes and points, sums over elements that share a weight.

As in `scheduler.choices`, an axis is written out if some load is not contiguous from the axis's end to the next
iteration. Values reduced along it are first combined by arithmetic; along a kept axis each index gets its own
reduction.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fuser.ir.loop_body import Recorder, Row, loads_in, map_exprs, renumber_expr, row_exprs
from fuser.ir.sizes import ONE, SIZE, ZERO, Expr, Sym, coefficient, expr, substitute, symbols
from fuser.lowering.context import LoweringContext
from fuser.ops import REDUCTIONS
from fuser.scheduler.choices import MOST_ROWS, Stores, assume_few, beside, fixed, runs_on, settled
from fuser.scheduler.kernel_plan import Axis

Reductions = list[tuple[str, int, torch.dtype]]


def write_out_reducing(
    ctx: LoweringContext, axes: Sequence[Axis], rows: list[Row], stores: Stores, reductions: Reductions
) -> tuple[Sym | None, list[Row], Stores, Reductions]:
    """The written-out axis, and rows, stores and reductions without it; None and the given ones if there is none."""
    for axis in axes:
        n = axis.hint
        if not 1 < n <= ctx.target.written_out or n * len(rows) > MOST_ROWS or not _is_free(axis, rows, reductions):
            continue
        if axis.reduced and sum(a.reduced for a in axes) == 1:  # the generators handle short rows
            continue
        numbers = {s: expr(ctx.hints[s]) for s in symbols(axis.size)}
        own, addressed = fixed(numbers, rows, stores)
        others = {a.sym: substitute(a.size, numbers) for a in axes if a is not axis}
        runs = _runs(own, addressed, axis.sym)
        outer = beside(ctx, others, expr(n), 0, runs) if runs else None
        if outer is None and runs:
            assume_few(ctx, [a.size for a in axes], others, expr(n), own, runs, axis.sym)
        if outer is None or runs_on(own, outer, axis.sym, n):
            continue
        for s, number in numbers.items():
            ctx.assume("eq", expr(s), number)
        return axis.sym, *_Copies(own, addressed, reductions, axis, n).made()
    return None, rows, stores, reductions


def _is_free(axis: Axis, rows: Sequence[Row], reductions: Reductions) -> bool:
    """Whether every reduction can be repeated for each index along an axis, or be combined along it."""
    for kind, value, _ in reductions:
        spec = REDUCTIONS[kind]
        if spec.index or spec.contracts:
            return False
        if axis.reduced and not (spec.pointwise and rows[value].dtype.is_floating_point):
            return False
    return True


def _runs(rows: Sequence[Row], stores: Stores, axis: Sym) -> Stores:
    """The addresses that vary along `axis` and others, if all of them are contiguous along `axis`; else none."""
    loads = [(r.buffer, r.address, 0) for r in loads_in(rows)]
    varying = [(b, e, n) for b, e, n in (*loads, *stores) if {s for s in symbols(e) if s.kind != SIZE} > {axis}]
    varying = [(b, e, n) for b, e, n in varying if coefficient(e, axis) != ZERO]
    return varying if varying and all(coefficient(e, axis) == ONE for _, e, _ in varying) else []


class _Copies:
    """Rows, stores and reductions for each index along an axis. Rows equal for all indices occur once."""

    def __init__(self, rows: list[Row], stores: Stores, reductions: Reductions, axis: Axis, places: int) -> None:
        self.rows, self.stores, self.old, self.axis = rows, stores, reductions, axis
        self.out, self.reductions = Recorder(), list[tuple[str, int, torch.dtype]]()
        self.number: list[dict[int, int]] = [{} for _ in range(places)]

    def made(self) -> tuple[list[Row], Stores, Reductions]:
        """The copied rows, stores and reductions."""
        for n, row in enumerate(self.rows):
            for place, number in enumerate(self.number):
                number[n] = self._reduced(row, place) if row.op == "reduced" else self._copied(row, place)
        kept: dict[tuple[str, Expr, int], None] = {}
        for buffer, e, r in self.stores:
            for place, number in enumerate(self.number):
                kept[buffer, self._moved(e, place), number[r]] = None
        return self.out.rows, list(kept), self.reductions

    def _moved(self, e: Expr, place: int) -> Expr:
        return substitute(renumber_expr(e, self.number[place]), {self.axis.sym: expr(place)})

    def _copied(self, row: Row, place: int) -> int:
        if row_exprs(row):
            row = map_exprs(row, lambda e: self._moved(e, place))
        return settled(self.out, Row(row.op, tuple(self.number[place][a] for a in row.args), row.dtype, row.attr))

    def _reduced(self, row: Row, place: int) -> int:
        kind, value, dtype = self.old[row.attr]
        found = self._combined(kind, value) if self.axis.reduced else self.number[place][value]
        new = (kind, found, dtype)
        if new not in self.reductions:
            self.reductions.append(new)
        return self.out.add_row(Row("reduced", (), row.dtype, self.reductions.index(new))).row

    def _combined(self, kind: str, value: int) -> int:
        """The row that combines the values at all indices. Of equal extremes the first stays."""
        spec, (first, *rest) = REDUCTIONS[kind], [number[value] for number in self.number]
        total = first
        for n in rest:
            pair = (n, total) if spec.extreme else (total, n)
            total = self.out.add_row(Row(spec.pointwise, pair, self.out.rows[first].dtype)).row
        return total


__all__ = ["write_out_reducing"]
