"""Reducing nests.

- *row*: the vector axis is reduced; a unit is one result, its passes run over the reduced axes, each accumulator is an
  array of lanes that is folded at the end in a fixed order.
- *column*: the vector axis is kept; a unit is a block of neighbouring results, one in each lane.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from fuser.cpu.accumulators import SHORT_FLUSH, AccumulatingNest
from fuser.cpu.nest import ROWS_AHEAD, size, storage_type
from fuser.cpu.records import Function
from fuser.cpu.streams import StreamingNest
from fuser.cpu.vir import nodes as ir
from fuser.ir.sizes import (
    LOOP,
    ONE,
    Expr,
    Sym,
    coefficient,
    expr,
    floordiv,
    product,
    substitute,
    symbol,
    symbols,
)
from fuser.ops import CPP_TYPES, REDUCTIONS
from fuser.scheduler.kernel_plan import Axis, address_rows
from fuser.scheduler.nodes import row_cost

Bounds = dict[Sym, tuple[ir.Value, ir.Value]]  # of reduced axes that a pass takes in part: from where to where
KEEP_COST = 8  # operations from which a value is kept for a later pass rather than computed again
ROWS_TOGETHER = 4  # of a column pass, while accumulators stay in registers
TOGETHER_COST = 16  # operations of a row up to which they are
MOST_VECTORS = 8  # that lanes take
KEEP_BYTES = 1 << 19  # most row-buffer bytes of one unit in the example


class ReductionNest(AccumulatingNest, StreamingNest):
    """Row and column nests."""

    def choose_kept_rows(self) -> None:
        """Costly rows that a later pass needs again get a row buffer."""
        hint = 1
        for a in self.red_axes:
            hint *= a.hint
        per_unit = 8 * hint * (self.lanes if self.is_column else 1)
        earlier: set[int] = set()
        for p in self.passes:
            mine = set(p.inner)
            again = mine & earlier
            fresh = mine - earlier
            frontier = {d for n in fresh for d in self.deps(n) if d in again}
            frontier |= {r for r in p.roots if r in again}
            for n in sorted(frontier):
                behind = [self.plan.rows[m] for m in self.closure([n])]
                costly = sum(map(row_cost, behind)) >= KEEP_COST or any(r.op == "indirect" for r in behind)
                plain = self.plan.rows[n].op in ("load", "indirect", "pair")
                fits = per_unit * (len(self.kept_rows) + 1) <= KEEP_BYTES
                if fits and (self._is_scattered(n) if plain else costly):
                    self.kept_rows.setdefault(n, len(self.kept_rows))
            earlier |= mine

    def _is_scattered(self, n: int) -> bool:
        """Whether neighbouring lanes of a column nest load row `n` from addresses that are not contiguous."""
        row = self.plan.rows[n]
        if row.op != "load" or not self.is_column or self.vector is None:
            return False
        step = coefficient(row.attr[1][0], self.vector.sym)
        return step is None or step.as_int() not in (0, 1)

    def emit_results(self, phase: int) -> None:
        """Declare the `reduced` rows of a finished pass."""
        of_lanes: list[ir.Statement] = []
        for n in self.passes[phase].results:
            row = self.plan.rows[n]
            r = self.plan.reductions[row.attr]
            index = REDUCTIONS[r.kind].index
            lane = "l" if self.is_column else 0
            value = ir.Name(f"at{r.number}")[lane] if index else self.total(r, lane)
            result = ir.Convert(torch.int32 if index else self.total_dtype(r), row.dtype, value)
            self.emitted.add(n)
            if self.is_column:
                self.out.scratch(CPP_TYPES[row.dtype], f"t{n}", self.lanes)
                of_lanes.append(ir.Set(ir.Name(f"t{n}")["l"], result))
                self.arrays.add(n)
            else:
                self.out.let(CPP_TYPES[row.dtype], f"t{n}", result)
        if of_lanes:
            self.out.each("count", *of_lanes)

    def declare_kept(self) -> Expr:
        """Pointers to the row buffers in scratch memory; returns the bytes of all."""
        offset = expr(0)
        each = product(a.size for a in self.red_axes) * (self.lanes if self.is_column else 1) * 8 + 64
        for n, k in self.kept_rows.items():
            at = ir.Number(k) * ((size(each) + 63) // 64 * 64)
            self.out.add(ir.Pointer(CPP_TYPES[self.plan.rows[n].dtype], f"kept{k}", ir.Name("scratch") + at, False))
            offset = offset + each + 64
        return offset

    def emit_pass(self, phase: int, bounds: Bounds | None = None) -> None:
        """One pass over the reduced axes (or the part of them that `bounds` gives)."""
        reductions = self.passes[phase].folds
        self.emit_unit_rows(self.passes[phase].before)
        if not self.passes[phase].roots:
            return
        bounds = bounds or {}
        low = self._range(self.red_axes[0], bounds)[0] if len(self.red_axes) == 1 else ir.Number(0)
        self.declare_accumulators(phase, low)
        flush = any(self.flushes(r) for r in reductions)
        if flush:
            declared = self._turns_declared()
            for counter in ("turns",) if self.is_column else ("turns", "groups"):
                self.out.set(counter, 0) if declared else self.out.var("i64", counter, 0)
        loops = [a for a in self.red_axes if a is not self.vector]
        each_row = self.is_column and self._takes_rows_together(phase, loops)
        for a in loops[:-1] if each_row else loops:
            self.out.open(ir.For(a.sym.name, *self._range(a, bounds)))
        if each_row:
            self._rows_together(phase, loops, self._range(loops[-1], bounds))
        elif self.is_column:
            self._column_pass(phase, loops, flush)
        else:
            self._vector_pass(phase, bool(reductions), flush, bounds)
        for _ in loops[:-1] if each_row else loops:
            self.out.close()
        if flush:
            self.emit_flush(phase)

    def _range(self, a: Axis, bounds: Bounds) -> tuple[ir.Value, ir.Value]:
        return bounds.get(a.sym) or (ir.Number(0), ir.Name(f"n_{a.sym.name}"))

    def _column_pass(self, phase: int, loops: Sequence[Axis], flush: bool) -> None:
        """One row of a block of columns."""
        self._prefetch_columns(phase, loops)
        count = ir.Name("count")
        with self.pieces_of(phase, "v0", "l", self.lanes, count):
            self.open_lanes((count + 15) // 16 * 16 if self._reads_pieces_only(phase) else count)
            self.emit_inner(phase)
            self.out.close()
        if flush:
            self._count_turns(phase, 1, self.column_flush())

    def _count_turns(self, phase: int, turns: ir.Like, most: int, exactly: bool = True) -> None:
        """Count iterations, and flush partial sums after `most` of them; if not `exactly`, after `most` or more."""
        count = ir.Name("turns")
        if any(self.flushes(r) for r in self.accumulators(phase)):
            self.out.set(count, turns, "+")
            self.emit_flush(phase, count.same(most) if exactly else count >= most)

    def _reads_pieces_only(self, phase: int) -> bool:
        """Whether a pass may go on to whole vectors: it reads and writes nothing but pieces, which have room."""
        rows = self.rows_of(phase)
        loads = {n for n in rows if self.plan.rows[n].op == "load"}
        looks_up = any(r.op == "indirect" for r in self.plan.rows)
        plain = not (self.has_checks or self.passes[phase].stores or self.kept_rows or looks_up)
        return plain and phase == 0 and bool(loads) and loads == set(self.half_loads(phase))

    def _takes_rows_together(self, phase: int, loops: Sequence[Axis]) -> bool:
        """Whether a column pass adds up several rows before it writes its accumulators, which are in memory.

        It pays for sums of cheap rows if the pass stores nothing. g++ does not vectorise several selects.
        """
        reductions = self.accumulators(phase)
        if not loops or not reductions or not all(REDUCTIONS[r.kind].adds for r in reductions) or self.checks_inside:
            return False
        if self.passes[phase].stores or self.half_loads(phase):
            return False
        rows = self.closure(self.passes[phase].roots, self._available(phase))
        keeps = any(n in self.kept_rows and self.passes.first(n) == phase for n in rows)
        return self._cost_of(phase) <= TOGETHER_COST and not keeps

    def _rows_together(self, phase: int, loops: Sequence[Axis], bounds: tuple[ir.Value, ir.Value]) -> None:
        assert self.vector is not None
        a, row = loops[-1].sym.name, ir.Name(f"r{phase}")
        with self.out.block(ir.Routine(f"point{phase}", (("const i64", "l"), ("const i64", a)))):
            self.out.let("i64", self.vector.sym.name, ir.Name("v0") + "l")
            self.emit_inner(phase)
        self.out.var("i64", row.name, bounds[0])
        for rows in (ROWS_TOGETHER, 1):
            self.out.open(ir.For(row.name, None, bounds[1], ir.Number(rows), whole=True))
            if self._prefetches_columns(phase, loops):
                with self.out.block(ir.For(a, row, row + rows)):
                    self._prefetch_columns(phase, loops)
            with self.out.block(self.simd("l", 0, "count")):
                for n in range(rows):
                    self.out.do(f"point{phase}", "l", row + n)
            self._count_turns(phase, rows, self.column_flush(), exactly=False)
            self.out.close()

    def _turns_declared(self) -> bool:
        declared = getattr(self, "_turns", False)
        self._turns = True
        return declared

    def _vector_pass(self, phase: int, reduces: bool, flush: bool, bounds: Bounds) -> None:
        assert self.vector is not None
        v = self.vector.sym.name
        lo, hi = self._range(self.vector, bounds)
        if not reduces and (self.streams(phase) or self.has_halves(phase)):
            with self.tiles_of(phase, v, lo, hi), self.out.block(self.simd(v, "w0", "w1")):
                self.emit_inner(phase)
            return
        if not reduces:
            with self.out.block(self.simd(v, lo, hi)):
                self.emit_inner(phase)
            return
        ahead = self._look_ahead(phase)
        self.overlaps = self._takes_some_twice(phase)
        skip = ("skip",) if self.overlaps else ()
        params = tuple(("const i64", name) for name in ("v0", "count", *skip))
        self.out.open(ir.Routine(f"pass{phase}", params))
        for k, buffer in enumerate(ahead):
            self.out.add(self.prefetch(buffer, ir.Name(f"ahead{k}") + "v0" + "q", "count"))
        if any(self.counts_turns(r) for r in self.accumulators(phase)):
            self.out.let("i32", f"start{phase}", ir.Cast("i32", ir.Name("v0") - lo))
        self._prefetch(phase)
        unrolled = ir.For("l", ir.Number(0), ir.Name("count"), unroll=MOST_VECTORS)
        loop = unrolled if self._unrolls(phase) else self.simd("l", 0, "count")
        with self.pieces_of(phase, "v0", "l", self.lanes, "count"), self.out.block(loop):
            self.out.let("i64", v, ir.Name("v0") + "l")
            self.emit_inner(phase)
        self.out.close()
        self._call_pass(phase, lo, hi, flush)

    def _call_pass(self, phase: int, lo: ir.Value, hi: ir.Value, flush: bool) -> None:
        """Call the pass for full arrays of lanes, then for the tail; partial sums are flushed in between."""
        routine, p, lanes = f"pass{phase}", ir.Name(f"p{phase}"), ir.Number(self.lanes)
        none, turns, stop = (0,) if self.overlaps else (), ir.Name("turns"), hi
        several = len(self.red_axes) > 1
        self.out.var("i64", p.name, lo)
        if flush:  # around the loop, not in it: so the accumulators stay in registers
            stop = ir.Name(f"stop{phase}")
            self.out.open(ir.While(p + lanes <= hi))
            self.out.let("i64", "begun", p)
            taken = turns if several else ir.Number(0)
            self.out.let("i64", "room", ir.Name("begun") + (ir.Number(SHORT_FLUSH) - taken) * lanes)
            self.out.let("i64", stop.name, ir.Select(ir.Name("room") < hi, ir.Name("room"), hi))
        with self.out.block(ir.For(p.name, None, stop, lanes, whole=True)):
            self.out.do(routine, p, lanes, *none)
        if flush:
            if several:
                self._count_turns(phase, (p - "begun") // lanes, SHORT_FLUSH)
            else:
                self.emit_flush(phase, p + lanes <= hi)
            self.out.close()
        last = ir.Name(f"last{phase}")
        if self.overlaps:
            self.out.let("i64", last.name, ir.Select(hi - lo < lanes, p, hi - lanes))
        with self.out.block(ir.If(p < hi)):
            if not self.overlaps:
                self.out.do(routine, p, hi - p)
            else:
                with self.out.block(ir.If(last.same(p))):
                    self.out.do(routine, p, hi - p, 0)
                with self.out.block(ir.Else()):
                    self.out.do(routine, last, lanes, p - last)
        if flush and several:
            self._count_turns(phase, 1, SHORT_FLUSH)

    def _unrolls(self, phase: int) -> bool:
        """Whether the loop over lanes becomes one piece, which keeps accumulators of several registers in these.

        Where the lanes take four registers, g++ would load and store them in each turn: 1.8 times the time of a sum.
        Costly rows do not gain from it.
        """
        if self.checks_inside:
            return False
        notes = any(self.notes_nans(r) for r in self.accumulators(phase))
        return notes or self._cost_of(phase) <= TOGETHER_COST

    def _cost_of(self, phase: int) -> int:
        """Operations of the rows that a pass computes."""
        rows = self.closure(self.passes[phase].roots, self._available(phase))
        return sum(row_cost(self.plan.rows[n]) for n in rows)

    def _takes_some_twice(self, phase: int) -> bool:
        """Whether the tail of a row is a full array of lanes that overlaps the one before it.

        Lanes that were taken before are left out; extremes may take them twice. A pass with stores does not overlap: it
        may write what it reads.
        """
        assert self.vector is not None
        whole = self.vector.hint % self.lanes == 0 or self.vector.hint < self.lanes
        return not whole and not self.passes[phase].stores

    def _prefetch(self, phase: int) -> None:
        """Ask for memory during the costliest pass: what later passes write, and what the next unit will read first.

        Memory would be idle between the passes over a row in the cache.
        """
        assert self.vector is not None
        if self.checked or not self.machine.prefetches or self.plan.split or phase != self._costliest_pass:
            return
        v = self.vector.sym
        wanted = []
        for s in self.plan.stores:
            if s.phase > phase and s in self.streams():
                wanted.append((s.buffer, s.address, 1))
        if self.kept and phase > 0:
            unit = self.kept[-1].sym
            for n in self.passes[0].inner:
                row = self.plan.rows[n]
                if row.op == "load" and not row.args and unit in symbols(row.attr[1][0]):
                    wanted.append((row.attr[0], substitute(row.attr[1][0], {unit: expr(unit) + 1}), 0))
        for buffer, address, write in dict.fromkeys(wanted):
            if self.step(address) != ONE:
                continue
            at = self.address(buffer, substitute(address, {v: symbol("v0", LOOP) + symbol("q", LOOP)}))
            loop = self.prefetch(buffer, at, "count", write)
            self.out.add(ir.Block(ir.If(ir.Unary("!", ir.Name("stream"))), (loop,)) if write else loop)

    def _reads_on(self, loops: Sequence[Axis]) -> bool:
        """Whether a block holds whole rows that follow each other in memory, which the hardware foresees."""
        assert self.vector is not None
        if self.passes.loops > 1 or self.vector.hint > self.lanes:
            return False
        a, rows = loops[-1].sym, self.passes[0].inner
        return all(coefficient(e, a) == self.vector.size for _, e in self.lines_read(rows) if a in symbols(e))

    def _prefetches_columns(self, phase: int, loops: Sequence[Axis]) -> bool:
        wanted = self.machine.prefetches and bool(loops) and not self._reads_on(loops)
        return wanted and phase == (0 if self.passes.loops == 1 else max(1, self._costliest_pass))

    def _prefetch_columns(self, phase: int, loops: Sequence[Axis]) -> None:
        """Prefetch what is read next. Rows of a block are far apart, so the hardware does not.

        Where there is one pass, that is some rows ahead; otherwise the next block, during the costliest later pass.
        """
        if not self._prefetches_columns(phase, loops):
            return
        assert self.vector is not None
        v, a = self.vector.sym, loops[-1].sym
        outer = next((a.sym for a in reversed(self.kept) if a is not self.vector), None)
        for buffer, address in self.lines_read(self.passes[0].inner):
            line = {v: symbol("v0", LOOP) + symbol("q", LOOP)}
            if self.passes.loops == 1:
                at = self.index(substitute(address, {**line, a: expr(a) + ROWS_AHEAD}))
            else:
                turn = coefficient(address, outer) if outer is not None else None
                other_row = size(turn) - "v0" if turn is not None else ir.Number(0)
                onward = ir.Select(ir.Name("v0") + self.lanes < f"n_{v.name}", ir.Number(self.lanes), other_row)
                at = self.index(substitute(address, line)) + onward
            self.out.add(self.prefetch(buffer, ir.Address(ir.Name(buffer), at), "count", 0, 2))

    def _look_ahead(self, phase: int) -> list[str]:
        """Pointers to the rows that tensors of indices name for the next unit; the buffer of each."""
        assert self.vector is not None
        if self.checked or not self.machine.prefetches or self.plan.split or len(self.kept) != 1:
            return []
        if phase == 0 or phase != self._costliest_pass:
            return []
        v = self.vector.sym
        ahead: list[str] = []
        for n in self.passes[0].inner:
            row = self.plan.rows[n]
            if row.op != "load" or row.args or coefficient(row.attr[1][0], v) != ONE:
                continue
            found = address_rows(row.attr[1][0])
            if not found or any(self.is_full(m) for m in found):
                continue
            buffer, (address,) = row.attr
            to, unit = ir.Name(f"ahead{len(ahead)}"), self.kept[0].sym.name
            self.out.var(f"const {storage_type(self.dtypes[buffer])}*", to.name, buffer)
            self.out.open(ir.If(ir.Name("u") + 1 < "end"))
            self.out.let("i64", "next", ir.Name(unit) + 1)
            self.out.open(ir.Plain())
            self.out.let("i64", unit, "next")
            for m in self.varying_rows(found):
                self.declare(m)
            self.out.set(to, self.address(buffer, substitute(address, {v: expr(0)})))
            self.out.close()
            self.out.close()
            ahead.append(buffer)
        return ahead

    def varying_rows(self, roots: Sequence[int]) -> list[int]:
        """The rows behind `roots` that vary along an axis, in order."""
        seen: set[int] = set()
        pending = list(roots)
        while pending:
            n = pending.pop()
            if n not in seen and self.plan.varies[n]:
                seen.add(n)
                pending += self.deps(n)
        return sorted(seen)

    @functools.cached_property
    def _costliest_pass(self) -> int:
        """The pass with the most operations for each element among those that reduce."""

        def cost(phase: int) -> int:
            mine = [n for n in self.passes[phase].inner if self.passes.first(n) == phase]
            return sum(row_cost(self.plan.rows[n]) for n in mine)

        return max((r.phase for r in self.plan.reductions), key=lambda p: (cost(p), -p))

    def whole(self) -> Function:
        """The single function of an unsplit plan."""
        return self._column() if self.is_column else self._row()

    def _row(self) -> Function:
        self.choose_kept_rows()
        self.open_function()
        scratch = self.declare_kept()
        self.emit_constants()
        self.open_units(self.digits(self.kept))
        self._turns = False
        self._all_passes()
        self.out.close()
        return Function(self.close_function(), product(a.size for a in self.kept), self.work(), scratch)

    def _all_passes(self) -> None:
        for phase in range(len(self.passes)):
            self.emit_pass(phase)
            if not self.is_column:
                self.emit_fold(phase)
            self.emit_results(phase)
            self.emit_outer_stores(phase)

    def _column(self) -> Function:
        self.choose_kept_rows()
        assert self.vector is not None
        self.open_function()
        scratch = self.declare_kept()
        digits, units = self._column_digits()
        self.emit_constants()
        self.open_units(digits)
        self._column_block()
        self._turns = False
        self._all_passes()
        self.out.close()
        return Function(self.close_function(), units, self.work(), scratch)

    def _column_digits(self) -> tuple[list[tuple[str, ir.Value]], Expr]:
        assert self.vector is not None
        return self._column_digits_of([a for a in self.kept if a is not self.vector])

    def _column_digits_of(self, outer: Sequence[Axis]) -> tuple[list[tuple[str, ir.Value]], Expr]:
        """Digits of a unit along some axes, then blocks of columns; and how many units there are."""
        assert self.vector is not None
        blocks = (ir.Name(f"n_{self.vector.sym.name}") + (self.lanes - 1)) // self.lanes
        digits = [*self.digits(outer), ("block", blocks)]
        return digits, product(a.size for a in outer) * floordiv(self.vector.size + (self.lanes - 1), expr(self.lanes))

    def _column_block(self) -> None:
        assert self.vector is not None
        self.out.let("i64", "v0", ir.Name("block") * self.lanes)
        self.open_count(self.lanes, ir.Name(f"n_{self.vector.sym.name}"))

    def open_count(self, most: int, high: ir.Value) -> None:
        """Declare `count`, the number of indices from `v0` below `high`, at most `most`."""
        v0 = ir.Name("v0")
        self.out.let("i64", "count", ir.Select(v0 + most < high, ir.Number(most), high - v0))
