"""Accumulators of reducing nests: an array of lanes each, what goes into a lane, how sums move on, how lanes fold.

An index reduction keeps the best value of each lane and an int32 that locates it: its index, or in row nests the first
index of the loop's iteration. The lowering makes sure that indices fit.
"""

from __future__ import annotations

import math

import torch

from fuser.cpu.nest import Nest
from fuser.cpu.vir import nodes as ir
from fuser.cpu.vir.printer import INTEGERS
from fuser.ir.sizes import expr
from fuser.ops import CPP_TYPES, REDUCTIONS, ReductionRow
from fuser.scheduler.kernel_plan import Reduce

FLUSH = 256  # float32 additions per lane of a row nest before they go to a float64 total
COLUMN_FLUSH, SHORT_COLUMN_FLUSH, SHORT_COLUMN = 32, 8, 64  # the same for lanes of column nests, of up to 64 rows
SHORT_FLUSH = 16  # additions before they go to a second lane in a row nest
NO_PLACE = 2**31 - 1
LONG_ROW = 128  # elements of a row from which accumulators take several registers
LONG_BYTES = 128  # of an accumulator of a long row: on all machines, so that sums are as exact on each
MOST_PLACES = 64  # lanes that keep an index, too
SUMS_BYTES = 24 << 10  # of the accumulators of a column nest's block, which stay in the first level cache
BEYOND_CACHES = 1 << 22  # elements
SHUFFLE_HELPER = """\
#if defined(__clang__) || __GNUC__ >= 12
#define FUSER_SHUFFLE(I, a, ...) __builtin_shufflevector(a, a, __VA_ARGS__)
#else
#define FUSER_SHUFFLE(I, a, ...) __builtin_shuffle(a, (I){__VA_ARGS__})
#endif
"""


class AccumulatingNest(Nest):
    """What row and column nests do with accumulators."""

    overlaps = False  # the last lanes of a row were taken before in part, in the pass that is being written

    def _choose_lanes(self) -> int:
        """Lanes of a row nest fill one register of loaded elements, or a few registers of accumulators."""
        if not self.is_row or self.vector is None:
            return self._whole_rows() or super()._choose_lanes()
        loads = [r.attr[0] for n, r in enumerate(self.plan.rows) if r.op == "load" and self.is_full(n)]
        machine = self.machine
        room = machine.registers * machine.vector_bytes // 4
        read = max((machine.vector_bytes // self.dtypes[b].itemsize for b in loads), default=0)
        least = max(16, read if read <= self.vector.hint else 0)
        kept = [max(self.spec(r)[2].itemsize, 4 if REDUCTIONS[r.kind].index else 1) for r in self.plan.reductions]
        widest = max(kept, default=4)
        if self.vector.hint < LONG_ROW:
            return least
        places = any(REDUCTIONS[r.kind].index for r in self.plan.reductions)
        if places and self.vector.hint >= 4 * LONG_ROW:
            return max(least, min(MOST_PLACES, room // 4))
        return max(least, LONG_BYTES // widest)

    def _whole_rows(self) -> int:
        """The lanes of a column nest in chunks that takes whole rows, or the longest pieces whose sums stay in cache.

        Rows that are read from end to end lie side by side, which the hardware foresees: 0.7 of the time.
        """
        if not self.is_column or not self.plan.split or self.vector is None or self.passes.loops > 1:
            return 0
        each = sum(self.spec(r)[2].itemsize + 8 for r in self.accumulators(0))
        fits = SUMS_BYTES // max(each, 1) // 64 * 64
        hint = (self.vector.hint + 63) // 64 * 64
        return hint if 256 < hint <= fits else 0

    def spec(self, r: Reduce) -> tuple[ReductionRow, torch.dtype, torch.dtype]:
        """The table's row of a reduction, the dtype of its values and of its accumulator."""
        row = self.plan.rows[r.row]
        value = self.plan.rows[row.args[0]].dtype if row.op == "pair" else row.dtype
        spec = REDUCTIONS[r.kind]
        acc = spec.accumulate(value)
        if self._waits_for_memory() and spec.adds and acc is torch.float32:
            acc = torch.float64
        return spec, value, self._truth() if acc is torch.bool else acc

    def _waits_for_memory(self) -> bool:
        """Whether a nest is one long sum of more than caches hold: then wider additions cost nothing."""
        return self.plan.split and not self.is_column and math.prod(a.hint for a in self.red_axes) >= BEYOND_CACHES

    def _truth(self) -> torch.dtype:
        """The dtype of a lane of `any` or `all`, as wide as the values: g++ does not vectorise sums of bools."""
        rows = [r for n, r in enumerate(self.plan.rows) if r.op == "load" and self.is_full(n)]
        wide = max((r.dtype.itemsize for r in rows), default=1)
        return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[wide]

    def flushes(self, r: Reduce) -> bool:
        """Whether partial sums go to float64 totals."""
        spec, _, acc = self.spec(r)
        return spec.adds and acc is torch.float32

    def notes_nans(self, r: Reduce) -> bool:
        """Whether an extreme is one of numbers, and NaNs are noted apart: one instruction each, that wait for less."""
        spec, _, acc = self.spec(r)
        return not self.is_column and bool(spec.extreme) and not spec.index and acc.is_floating_point

    def column_flush(self) -> int:
        """Float32 additions in a lane of a column nest: fewer where there are few in all, which costs little there."""
        few = math.prod(a.hint for a in self.red_axes) <= SHORT_COLUMN
        return SHORT_COLUMN_FLUSH if few else COLUMN_FLUSH

    def total_dtype(self, r: Reduce) -> torch.dtype:
        """The dtype of a finished accumulator."""
        return torch.float64 if self.flushes(r) else self.spec(r)[2]

    def in_order(self, r: Reduce) -> bool:
        """Whether the index of an index reduction is the loop variable, so each lane sees rising indices."""
        if not REDUCTIONS[r.kind].index or len(self.red_axes) != 1:
            return False
        index = self.plan.rows[self.plan.rows[r.row].args[1]]
        return index.op == "index" and index.attr == expr(self.red_axes[0].sym)

    def counts_turns(self, r: Reduce) -> bool:
        """Whether lanes keep the first index of the iteration that gave their value, not the value's own index."""
        return not self.is_column and self.in_order(r)

    def holder(self, r: Reduce) -> Reduce:
        """The reduction in whose accumulator `r`'s value is: an extreme next to its index needs none of its own."""
        for other in self.plan.reductions:
            if REDUCTIONS[other.kind].value == r.kind and other.phase == r.phase:
                if self.plan.rows[other.row].args[0] == r.row:
                    return other
        return r

    def accumulators(self, phase: int) -> list[Reduce]:
        """The reductions of a pass that have an accumulator."""
        return [r for r in self.plan.reductions if r.phase == phase and self.holder(r) is r]

    def total(self, r: Reduce, lane: ir.Like) -> ir.Value:
        """The finished value of an accumulator: of a lane in column nests, the only one in row nests."""
        k = self.holder(r).number
        if self.flushes(r):
            return ir.Name(f"tot{k}")[lane] if self.is_column else ir.Name(f"tot{k}")
        return ir.Name(f"acc{k}")[lane if self.is_column else 0]

    def declare_accumulators(self, phase: int, low: ir.Value) -> None:
        """Lane arrays at their identities. The pass begins at `low`."""
        for r in self.accumulators(phase):
            spec, _, acc = self.spec(r)
            k = r.number
            starts: list[ir.Statement] = []

            def lanes(kind: str, name: str, start: ir.Value) -> None:
                self.out.scratch(kind, name, self.lanes)
                starts.append(ir.Set(ir.Name(name)["l"], start))  # noqa: B023

            lanes(CPP_TYPES[acc], f"acc{k}", ir.Number(spec.identity(acc), acc))
            if self.notes_nans(r):
                lanes(INTEGERS[acc.itemsize], f"nan{k}", ir.Number(0))
            if spec.index:
                first = ir.Cast("i32", low) if self.in_order(r) else ir.Number(NO_PLACE)
                lanes("i32", f"at{k}", ir.Number(0) if self.counts_turns(r) else first)
            if self.flushes(r) and self.is_column:
                lanes("double", f"tot{k}", ir.Number(0.0, torch.float64))
            elif self.flushes(r):
                lanes("float", f"mid{k}", ir.Number(0.0, torch.float32))
                self.out.var("double", f"tot{k}", ir.Number(0.0, torch.float64))
            self.out.each(self.lanes, *starts)

    def accumulate(self, r: Reduce) -> None:
        """Fold the current value into its lane."""
        if self.holder(r) is not r:
            return
        spec, value, acc = self.spec(r)
        k = r.number
        held, at, x = ir.Name(f"acc{k}")["l"], ir.Name(f"at{k}")["l"], ir.Name(f"x{k}")
        if not spec.index:
            now: ir.Value = ir.Convert(value, acc, self.ref(r.row))
            if self.overlaps and not spec.idempotent:
                now = ir.Select(ir.Name("l") < "skip", ir.Number(spec.identity(acc), acc), now)
            self.out.let(CPP_TYPES[acc], x.name, now)
            if self.notes_nans(r):
                self.out.set(held, ir.Select(ir.Binary(spec.extreme, x, held), x, held))
                self.out.set(ir.Name(f"nan{k}")["l"], x.differs(x), "|")
                return
            self.out.set(held, ir.Op("combine", r.kind, acc, (held, x)))
            return
        v, i = self.plan.rows[r.row].args
        place = ir.Name(f"start{r.phase}" if self.counts_turns(r) else f"now{k}")
        if not self.counts_turns(r):
            self.out.let("i32", place.name, ir.Cast("i32", self.ref(i)))
        self.out.let(CPP_TYPES[acc], x.name, ir.Convert(value, acc, self.ref(v)))
        if self.in_order(r):
            better = ir.Op("overtakes", r.kind, acc, (held, x))
        else:
            better = ir.Op("combine", r.kind, acc, (held, at, x, place))
        self.out.let("bool", f"better{k}", better)
        self.out.set(held, ir.Select(ir.Name(f"better{k}"), x, held))
        self.out.set(at, ir.Select(ir.Name(f"better{k}"), place, at))

    def emit_flush(self, phase: int, when: ir.Value | None = None) -> None:
        """Flush float32 partial sums: in the loop where `when` holds; without `when` after the loop, all that is left.

        Column nests add each lane to its float64 total. Row nests add lanes to lanes of sums first, so that no float32
        sum has more than a few terms, and from time to time the sum over these to the total.
        """
        mine = [r for r in self.accumulators(phase) if self.flushes(r)]
        if not mine:
            return
        lane, zero = ir.Name("l"), ir.Number(0.0, torch.float32)
        if when is not None:
            self.out.open(ir.If(when))
            self.out.set("turns", 0)
        for r in mine if self.is_column or when is not None else ():
            held = ir.Name(f"acc{r.number}")[lane]
            to_mid = ir.Set(ir.Name(f"mid{r.number}")[lane], held, "+")
            self.out.each(self.lanes, self._to_total(r, lane) if self.is_column else to_mid, ir.Set(held, zero))
        if when is not None and not self.is_column:
            self.out.set("groups", 1, "+")
            self.out.open(ir.If(ir.Name("groups").same(FLUSH // SHORT_FLUSH)))
            self.out.set("groups", 0)
        for r in mine if not self.is_column else ():
            held, mid = ir.Name(f"acc{r.number}")[lane], ir.Name(f"mid{r.number}")[lane]
            self.out.each(self.lanes, ir.Set(held, mid, "+"))
            self.fold_lanes(r)
            self.out.add(self._to_total(r, lane))
            if when is not None:
                self.out.each(self.lanes, ir.Set(mid, zero), ir.Set(held, zero))
        if when is not None:
            self.out.close()
            if not self.is_column:
                self.out.close()

    def _to_total(self, r: Reduce, lane: ir.Value) -> ir.Set:
        """Add a lane of float32 sums, or what they have been folded to, to its float64 total."""
        held = ir.Name(f"acc{r.number}")[lane if self.is_column else 0]
        return ir.Set(self.total(r, lane), ir.Cast("double", held), "+")

    def join(
        self, r: Reduce, dtype: torch.dtype, a: ir.Value, b: ir.Value, ai: ir.Value, bi: ir.Value
    ) -> ir.Statement:  # fmt: skip
        """Folds accumulator `b` (and its index) into `a`."""
        if REDUCTIONS[r.kind].index:
            better = ir.Op("combine", r.kind, dtype, (a, ai, b, bi))
            return ir.Block(ir.If(better), (ir.Set(a, b), ir.Set(ai, bi)))
        return ir.Set(a, ir.Op("combine", r.kind, dtype, (a, b)))

    def fold_lanes(self, r: Reduce) -> None:
        """Fold the lanes into lane 0."""
        spec, _, acc = self.spec(r)
        table, name = "combine", spec.value or r.kind
        if self.notes_nans(r):
            table, name = "wins", spec.extreme
        elif spec.wraps and not acc.is_floating_point and acc is not torch.bool:
            table, name = "sign", spec.wraps
        self.out.add(ir.Fold(f"acc{r.number}", acc, self.lanes, self.machine.vector_bytes, table, name))

    def emit_fold(self, phase: int, low: ir.Like = 0) -> None:
        """Row nests: fold the lanes of each accumulator. `low` is where the pass began."""
        for r in self.accumulators(phase):
            if self.flushes(r):
                continue  # flushed ones are folded already
            if REDUCTIONS[r.kind].index:
                self._fold_index(r, ir.value(low))
                continue
            self.fold_lanes(r)
            if self.notes_nans(r):
                k, acc = r.number, self.spec(r)[2]
                found, best = ir.Name(f"any{k}"), ir.Name(f"acc{k}")[0]
                self.out.var(INTEGERS[acc.itemsize], found.name, 0)
                self.out.each(self.lanes, ir.Set(found, ir.Name(f"nan{k}")["l"], "|"))
                self.out.set(best, ir.Select(found, ir.Number(math.nan, acc), best))

    def _fold_index(self, r: Reduce, low: ir.Value) -> None:
        """Fold the values, then take the smallest index among the lanes that hold the best one (any NaN is it).

        Lanes that had no value are at the identity and the turn 0: if that is best, lane 0 has it too.
        """
        k, acc = r.number, self.spec(r)[2]
        values, at, found, l = ir.Name(f"lane{k}"), ir.Name(f"at{k}"), ir.Name(f"least{k}"), ir.Name("l")
        held, best = values[l], ir.Name(f"acc{k}")[0]
        self.out.scratch(CPP_TYPES[acc], values.name, self.lanes)
        self.out.each(self.lanes, ir.Set(held, ir.Name(f"acc{k}")[l]))
        self.fold_lanes(r)
        index = at[l] + ir.Cast("i32", l) if self.counts_turns(r) else at[l]
        same = held.same(best)
        if acc.is_floating_point:
            same = same | (held.differs(held) & best.differs(best))
        self.out.var("i32", found.name, NO_PLACE)
        lanes = ir.For("l", ir.Number(0), ir.Number(self.lanes), simd=True, joins=f"min:{found.name}")
        with self.out.block(lanes):
            self.out.let("i32", "here", index)
            self.out.let("i32", "mine", ir.Select(same, ir.Name("here"), ir.Number(NO_PLACE)))
            self.out.set(found, ir.least("mine", found))
        if self.counts_turns(r):
            lane = found % self.lanes
            if self.overlaps:
                p, last = ir.Name(f"p{r.phase}"), ir.Name(f"last{r.phase}")
                lane = ir.Select(found < p - low, lane, found - (last - low))
            self.out.set(best, values[lane])  # of zeros of both signs, the first
            self.out.set(found, ir.Cast("i32", low), "+")
        self.out.set(at[0], found)
