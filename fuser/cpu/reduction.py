"""Reducing nests: passes over the reduced axes of a unit.

- *row* (`lines.py`): the vector axis is reduced; a unit is one result, its passes run over the reduced axes, each
  accumulator is an array of lanes that is folded at the end in a fixed order.
- *column* (`columns.py`): the vector axis is kept; a unit is a block of neighbouring results, one in each lane.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch

from fuser.cpu import accumulators as acc
from fuser.cpu import batches, columns, lines
from fuser.cpu.accumulators import Accumulator, flush, flushing, open_counter
from fuser.cpu.facts import Facts, size, whole_lines
from fuser.cpu.frame import Digits, closed, each_unit, opened, units_of
from fuser.cpu.lanes import Lanes
from fuser.cpu.records import Function
from fuser.cpu.rows import Ends, Rows
from fuser.cpu.vir import nodes as ir
from fuser.ir.sizes import Expr, Sym, coefficient, expr, product
from fuser.ops import CPP_TYPES, REDUCTIONS
from fuser.scheduler.kernel_plan import Axis, Reduce
from fuser.scheduler.nodes import row_cost

Bounds = dict[Sym, Ends]  # the ranges of reduced axes that a pass takes only in part
Total = Callable[[Reduce], tuple[torch.dtype, ir.Value]]  # the dtype and the value of a finished reduction
KEEP_COST = 8  # operations from which a value is kept for a later pass rather than computed again
KEEP_BYTES = 1 << 19  # most row-buffer bytes of one unit in the example
LONG_ROW = 128  # elements of a row from which accumulators take several registers
LONG_BYTES = 128  # of an accumulator of a long row; the same on all machines, so sums are equally exact
MOST_PLACES = 64  # most lanes that keep an index, too
SUMS_BYTES = 24 << 10  # of the accumulators of a column nest's block, which stay in the first-level cache


# -- decisions --------------------------------------------------------------------------------------------------------
def decided(facts: Facts) -> Facts:
    """The facts of a reducing or ordered nest, with its number of lanes."""
    return replace(facts, lanes=_lanes_of_rows(facts) if facts.is_row else _lanes_of_columns(facts))


def _lanes_of_rows(facts: Facts) -> int:
    """The lanes of a row nest: one register of loaded elements, or a few registers of accumulators."""
    loads = [r.buffer for n, r in enumerate(facts.plan.rows) if r.op == "load" and facts.is_full(n)]
    machine, hint = facts.machine, facts.along.hint
    room = machine.registers * machine.vector_bytes // 4
    read = max((machine.vector_bytes // facts.dtypes[b].itemsize for b in loads), default=0)
    least = max(16, read if read <= hint else 0)
    if hint < LONG_ROW:
        return least
    reductions = facts.plan.reductions
    places = [REDUCTIONS[r.kind].index for r in reductions]
    if any(places) and hint >= 4 * LONG_ROW:
        return max(least, min(MOST_PLACES, room // 4))
    kept = (max(acc.dtypes_of(facts, r)[1].itemsize, 4 if index else 1) for r, index in zip(reductions, places))
    return max(least, LONG_BYTES // max(kept, default=4))


def _lanes_of_columns(facts: Facts) -> int:
    whole = _whole_rows(facts)
    if whole or facts.vector is None:
        return whole or 1
    if not facts.is_column:
        return 64 if facts.vector.hint >= 64 else 16
    # Later passes find the first pass's block in cache.
    most = 256 if facts.passes.loops == 1 or facts.plan.split else 128
    return next((n for n in (256, 128) if n <= min(most, facts.vector.hint)), 64)


def _whole_rows(facts: Facts) -> int:
    """The lanes of a split column nest that takes whole rows, if their sums stay in cache; else 0.

    Whole rows are contiguous, which the hardware predicts: it takes 0.7 of the time.
    """
    if not facts.plan.split or facts.vector is None or facts.passes.loops > 1:
        return 0
    own = acc.own_of(acc.accumulators(facts), 0)
    fits = SUMS_BYTES // max(sum(a.dtype.itemsize + 8 for a in own), 1) // 64 * 64
    hint = (facts.vector.hint + 63) // 64 * 64
    return hint if 256 < hint <= fits else 0


def kept_rows(facts: Facts) -> tuple[int, ...]:
    """Costly rows that a later pass needs again: they get a row buffer."""
    per_unit = 8 * math.prod(a.hint for a in facts.reduced_axes) * (facts.lanes if facts.is_column else 1)
    earlier, kept = set[int](), dict[int, None]()
    for p in facts.passes:
        mine = set(p.inner)
        again, fresh = mine & earlier, mine - earlier
        frontier = {d for n in fresh for d in facts.passes.deps[n] if d in again}
        frontier |= {r for r in p.roots if r in again}
        for n in sorted(frontier):
            fits = per_unit * (len(kept) + 1) <= KEEP_BYTES
            if fits and _pays(facts, n):
                kept[n] = None
        earlier |= mine
    return tuple(kept)


def _pays(facts: Facts, n: int) -> bool:
    """Whether it pays to keep a row rather than to recompute it."""
    if facts.plan.rows[n].op in ("load", "indirect", "pair"):
        return _is_scattered(facts, n)
    behind = [facts.plan.rows[m] for m in facts.passes.closure([n])]
    return sum(map(row_cost, behind)) >= KEEP_COST or any(r.op == "indirect" for r in behind)


def _is_scattered(facts: Facts, n: int) -> bool:
    """Whether neighbouring lanes of a column nest load row `n` from addresses that are not contiguous."""
    row = facts.plan.rows[n]
    if row.op != "load" or not facts.is_column or facts.vector is None:
        return False
    step = coefficient(row.address, facts.vector.sym)
    return step is None or step.as_int() not in (0, 1)


# -- code -------------------------------------------------------------------------------------------------------------
def whole(facts: Facts) -> Function:
    """The single function of an unsplit plan."""
    facts = decided(facts)
    facts = replace(facts, kept=kept_rows(facts))
    rows = opened(facts)
    digits, units = units_of(facts)
    if batches.pays(facts):
        rows.constants()
        return closed(rows, units, scratch=_in_batches(rows, digits))
    scratch = row_buffers(rows)
    rows.constants()
    with each_unit(rows, digits):
        reducing = Reducing(rows)
        for phase in range(len(facts.passes)):
            whole_pass(rows, reducing, phase)
    return closed(rows, units, scratch=scratch)


def whole_pass(rows: Rows, reducing: Reducing, phase: int) -> None:
    """A pass over a unit, and the rows and stores after it."""
    reducing.run(phase)
    results(rows, phase, reducing.total)
    rows.after(phase)


def _in_batches(rows: Rows, digits: Digits) -> Expr:
    """The passes over batches of rows; returns the bytes of their row buffers."""
    facts, length = rows.facts, product(a.size for a in rows.facts.reduced_axes)
    row = size(length * 8 + 64)
    whole = (length + batches.BYTES // batches.bytes_of(facts)) * 8 + 64 * (batches.ROWS + 1)

    def buffers() -> None:
        for k, n in enumerate(facts.kept):
            at = ir.Number(k) * whole_lines(whole) + batches.R * (row // 64 * 64)
            rows.in_scratch(facts.array_kind(n), f"kept{k}", at)

    batch, reducing = batches.Batch(rows, digits, buffers), Reducing(rows)
    with batch.each():
        for phase, described in enumerate(facts.passes):
            if phase and batch.takes_apart(described.before):
                with batch.over(simd=True):
                    rows.outside(described.before)
            with batch.over():
                reducing.counts = False
                whole_pass(rows, reducing, phase)
    return expr(len(facts.kept)) * (whole + 64)


def row_buffers(rows: Rows) -> Expr:
    """Declare pointers to the row buffers in scratch memory; returns their total bytes."""
    facts = rows.facts
    each = product(a.size for a in facts.reduced_axes) * (facts.lanes if facts.is_column else 1) * 8 + 64
    for k, n in enumerate(facts.kept):
        rows.in_scratch(facts.array_kind(n), f"kept{k}", ir.Number(k) * whole_lines(each))
    return expr(len(facts.kept)) * (each + 64)


def results(rows: Rows, phase: int, total: Total) -> None:
    """Declare the `reduced` rows of a finished pass."""
    facts, of_lanes = rows.facts, list[ir.Statement]()
    for n in facts.passes[phase].results:
        row = rows.plan.rows[n]
        source, value = total(rows.plan.reductions[row.attr])
        result = ir.Convert(source, row.dtype, value)
        rows.made.add(n)
        if facts.is_column:
            rows.array(n)
            of_lanes.append(ir.Set(ir.Name(f"t{n}")["l"], result))
        else:
            rows.out.let(CPP_TYPES[row.dtype], f"t{n}", result)
    if of_lanes:
        rows.out.each("count", *of_lanes)


class Reducing:
    """The passes over the reduced axes of one function, and their accumulators."""

    def __init__(self, rows: Rows) -> None:
        self.rows, self.facts, self.out = rows, rows.facts, rows.out
        self.accumulators = acc.accumulators(rows.facts)
        self.counts = False  # whether the counter of sums is declared

    def total(self, r: Reduce) -> tuple[torch.dtype, ir.Value]:
        """The dtype and the value of a finished reduction; of an index reduction, the index."""
        a, lane = self.accumulators[r.number], "l" if self.facts.is_column else 0
        if a.spec.index:
            return torch.int32, ir.Name(f"at{r.number}")[lane]
        return a.total_dtype, a.total(lane)

    def accumulate(self, r: Reduce) -> None:
        """Combine the current value of a reduction into its lane."""
        a = self.accumulators[r.number]
        if not a.shares:
            values = self.facts.plan.rows[r.row].args if a.spec.index else (r.row,)
            acc.accumulate(self.out, a, [self.rows.ref(n) for n in values])

    def run(self, phase: int, bounds: Bounds | None = None) -> None:
        """One pass over the reduced axes, or over the part of them in `bounds`, up to the fold of its lanes."""
        facts, described, bounds = self.facts, self.facts.passes[phase], bounds or {}
        self.rows.outside(described.before)
        if not described.roots:
            return
        axes = facts.reduced_axes
        low = _range(axes[0], bounds)[0] if len(axes) == 1 else ir.Number(0)
        own = acc.own_of(self.accumulators, phase)
        starts = [acc.declare(self.out, a, low) for a in own]
        vectors = Lanes.of(facts, phase, own) if facts.is_row else None
        if vectors is not None:
            with self.out.block(ir.Only(vectors.macro)), self.out.block(ir.Plain()):
                lines.in_vectors(self.rows, vectors)
        with self.out.block(ir.Otherwise()) if vectors else nullcontext():
            with self.out.block(ir.Plain()) if vectors and own else nullcontext():
                for each in starts:
                    self.out.each(acc.taken(facts) if flushing(own) else facts.lanes, *each)
                if flushing(own):
                    open_counter(self.out, self.counts and vectors is None)
                    self.counts |= vectors is None  # else it is declared in a block of its own
                self._plain(phase, own, bounds)
                for a in own:
                    if not (facts.is_column or a.flushes):  # flushed ones are folded already
                        acc.fold(self.out, a, low)

    def _plain(self, phase: int, own: Sequence[Accumulator], bounds: Bounds) -> None:
        """The loops of a pass, which the compiler vectorises."""
        facts, axes = self.facts, self.facts.reduced_axes
        loops = [a for a in axes if a is not facts.vector]
        together = facts.is_column and columns.takes_rows_together(facts, own, phase, loops)
        around = loops[:-1] if together else loops
        for axis in around:
            self.out.open(ir.For(axis.sym.name, *_range(axis, bounds)))
        if together:
            columns.rows_together(self.rows, own, phase, loops, _range(loops[-1], bounds), self.accumulate)
        elif facts.is_column:
            columns.one_row(self.rows, own, phase, loops, self.accumulate)
        else:
            lines.line(self.rows, own, phase, _range(facts.along, bounds), self.accumulate)
        for _ in around:
            self.out.close()
        flush(self.out, own, facts.is_column)


def _range(a: Axis, bounds: Bounds) -> Ends:
    return bounds.get(a.sym) or (ir.Number(0), ir.Name(f"n_{a.sym.name}"))


__all__ = ["Reducing", "decided", "kept_rows", "results", "row_buffers", "whole", "whole_pass"]
