"""Row reductions that also accumulate column sums: a norm's gradients in one pass over memory.

A unit is a chunk of rows. Its column sums are in scratch memory, where the last pass over each row adds to them; every
few rows they are added to totals of the chunk. A second function combines the totals of all chunks in a fixed order.
Chunks depend on sizes alone, so any number of threads gives the same bits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace

import torch

from fuser.cpu.accumulators import COLUMN_FLUSH
from fuser.cpu.facts import Facts, size, whole_lines
from fuser.cpu.frame import closed, each_unit, open_range, opened
from fuser.cpu.records import Bindings, Function, Generated, Partial
from fuser.cpu.reduction import Reducing, decided, kept_rows, row_buffers, whole_pass
from fuser.cpu.split import combine_function
from fuser.cpu.vir import nodes as ir
from fuser.ir.loop_body import Row, row_exprs
from fuser.ir.sizes import ZERO, Expr, expr, floordiv, maximum, minimum, product, rows_in
from fuser.ops import CPP_TYPES, REDUCTIONS
from fuser.scheduler.kernel_plan import KernelPlan, Reduce, Store
from fuser.scheduler.plan import phases_of
from fuser.scheduler.together import Joined

# Rows of a chunk, and the number of chunks up to which chunks are that short. A chunk's totals cost as much as two
# rows.
ROW_CHUNKS = ((16, 32), (64, 64))
LEAST_CHUNKS = 16  # chunks of the example from which plans are joined: fewer leave threads without work
SUMS_BYTES = 1 << 18  # most bytes of the column sums, which stay in the second-level cache beside a row


def fits(joined: Joined) -> bool:
    """Whether two plans are joined: many rows, and sums of floats whose columns fit into a cache."""
    plan = joined.plan
    if any(map(_looks_up, (plan, joined.down))) or not all(_is_plain_sum(plan, r) for r in joined.columns):
        return False
    rows = math.prod(a.hint for a in plan.axes if not a.reduced)
    columns = math.prod(a.hint for a in plan.reduced_axes)
    held = sum(plan.rows[r.row].dtype.itemsize for r in joined.columns)
    return rows >= ROW_CHUNKS[0][0] * LEAST_CHUNKS and columns * held <= SUMS_BYTES


def _looks_up(plan: KernelPlan) -> bool:
    """Whether a plan has computed indices, which may be out of range."""
    addresses = [*(e for row in plan.rows for e in row_exprs(row)), *(s.address for s in plan.stores)]
    return any(row.op == "indirect" for row in plan.rows) or any(map(rows_in, addresses))


def _is_plain_sum(plan: KernelPlan, r: Reduce) -> bool:
    spec, dtype = REDUCTIONS[r.kind], plan.rows[r.row].dtype
    return spec.adds and bool(spec.pointwise) and dtype.is_floating_point and spec.accumulate(dtype) is dtype


# -- the plan ---------------------------------------------------------------------------------------------------------
def _walking(joined: Joined, name: str) -> tuple[KernelPlan, tuple[str, ...]]:
    """The plan along rows, whose last pass adds to the column sums, and the scratch buffers of these."""
    plan, column = joined.plan, ZERO
    for a in plan.reduced_axes:
        column = column * a.size + expr(a.sym)
    rows, stores, buffers = list(plan.rows), list(plan.stores), list(plan.buffers)
    for r in joined.columns:
        buffer, dtype = f"{name}_c{r.number}", plan.rows[r.row].dtype
        rows.append(Row("load", (), dtype, (buffer, (column,))))
        rows.append(Row(REDUCTIONS[r.kind].pointwise, (len(rows) - 1, r.row), dtype, None))
        stores.append(Store(buffer, column, len(rows) - 1, max(plan.passes.loops - 1, plan.phases[r.row])))
        buffers.append((buffer, dtype))
    phases, varies = phases_of(plan.axes, rows, [r.row for r in plan.reductions])
    made = replace(plan, rows=tuple(rows), stores=tuple(stores), buffers=tuple(buffers), phases=phases, varies=varies)
    return made, tuple(b for b, _ in buffers[len(plan.buffers) :])


# -- code -------------------------------------------------------------------------------------------------------------
def walked(joined: Joined, name: str, bindings: Bindings) -> Generated:
    """Two functions: the first goes over chunks of rows, the second combines the totals of all chunks."""
    plan, sums = _walking(joined, name)
    n, columns = (product(a.size for a in plan.axes if a.reduced is side) for side in (False, True))
    counts = (minimum(floordiv(n + (least - 1), expr(least)), most) for least, most in ROW_CHUNKS)
    chunks = functools.reduce(maximum, counts)
    partials = [Partial(f"{name}_p{r.number}", torch.float64, columns * chunks) for r in joined.columns]
    facts = decided(Facts(plan, name, bindings).with_partials(partials))
    down = decided(Facts(replace(joined.down, split=True), name, bindings).with_partials(partials))
    walk = _Walk(replace(facts, kept=kept_rows(facts)), sums, chunks)
    return Generated((walk.function(), combine_function(down, chunks)), tuple(partials))


class _Walk:
    """Writes the function that goes over the rows. `sums`: buffers of the column sums, in the order of the partials."""

    def __init__(self, facts: Facts, sums: tuple[str, ...], chunks: Expr) -> None:
        self.facts, self.sums, self.chunks, self.rows = facts, sums, chunks, opened(facts, "_rows")

    def function(self) -> Function:
        """The complete function."""
        rows, out, many = self.rows, self.rows.out, self.facts.kept_axes
        out.let("i64", "chunks", size(self.chunks))
        out.let("i64", "many", size(product(a.size for a in many)))
        out.let("i64", "columns", size(product(a.size for a in self.facts.reduced_axes)))
        out.let("i64", "each", ir.Select(ir.Name("chunks"), (ir.Name("many") + "chunks" - 1) // "chunks", ir.Number(0)))
        scratch = self._sum_buffers(row_buffers(rows))
        rows.constants()
        with each_unit(rows, [("chunk", ir.Name("chunks"))]):
            open_range(rows, "row", ir.Name("chunk") * "each", ir.Name("each"), "many")
            with out.block(ir.For("block", ir.Name("row0"), ir.Name("row1"), ir.Number(COLUMN_FLUSH))):
                self._block()
        return closed(rows, self.chunks, scratch=scratch, suffix="_rows")

    def _sum_buffers(self, before: Expr) -> Expr:
        """Declare pointers to the column sums, `before` bytes into scratch memory; returns the bytes up to their
        end."""
        columns = product(a.size for a in self.facts.reduced_axes)
        for buffer in self.sums:
            dtype = self.facts.dtypes[buffer]
            self.rows.in_scratch(CPP_TYPES[dtype], buffer, whole_lines(before))
            before = before + columns * dtype.itemsize + 64
        return before

    def _each_column(self, make: Callable[[int], ir.Statement]) -> None:
        for k in range(len(self.sums)):
            with self.rows.out.block(ir.For("l", ir.Number(0), ir.Name("columns"), simd=True)):
                self.rows.out.add(make(k))

    def _sum(self, k: int) -> ir.Value:
        return ir.Name(self.sums[k])["l"]

    def _total(self, k: int) -> ir.Value:
        return ir.Name(self.facts.partials[k].name)[ir.Name("chunk") * "columns" + "l"]

    def _before(self, k: int) -> ir.Value:
        return ir.Select(ir.Name("begins"), ir.Number(0.0, torch.float64), self._total(k))

    def _block(self) -> None:
        """Rows whose values are added in the dtype of the sums: few enough for float32."""
        out, row = self.rows.out, ir.Name("row")
        out.let("i64", "stop", ir.least(ir.Name("block") + COLUMN_FLUSH, "row1"))
        self._each_column(lambda k: ir.Set(self._sum(k), ir.Number(0.0, self.facts.dtypes[self.sums[k]])))
        with out.block(ir.For(row.name, ir.Name("block"), ir.Name("stop"))):
            self._row(row)
        out.let("bool", "begins", ir.Name("block").same("row0"))
        self._each_column(lambda k: ir.Set(self._total(k), self._before(k) + ir.Cast("double", self._sum(k))))

    def _row(self, row: ir.Value) -> None:
        """All passes over one row."""
        rows, (outermost, *others) = self.rows, self.facts.kept_axes
        for a in reversed(others):
            length = ir.Name(f"n_{a.sym.name}")
            rows.out.let("i64", a.sym.name, row % length)
            row = row // length
        rows.out.let("i64", outermost.sym.name, row)
        reducing = Reducing(rows)
        for phase in range(len(self.facts.passes)):
            whole_pass(rows, reducing, phase)


__all__ = ["fits", "walked"]
