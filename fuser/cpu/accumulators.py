"""Accumulators of reducing nests: an array of lanes each, what goes into a lane, how sums move on, how lanes fold.

An index reduction keeps the best value of each lane and the place where it was, an int32: its index, or in row nests
the turn of the loop. The lowering sees to it that indices fit.
"""

from __future__ import annotations

import math

import torch

from fuser.cpu.nest import Nest
from fuser.ir.sizes import expr
from fuser.ops import CPP_TYPES, REDUCTIONS, ReductionRow, cpp_combine, cpp_constant, cpp_convert, cpp_overtakes
from fuser.scheduler.plan import Reduce

FLUSH = 256  # float32 additions per lane of a row nest before they go to a float64 total
COLUMN_FLUSH, SHORT_COLUMN_FLUSH, SHORT_COLUMN = 32, 8, 64  # the same for lanes of column nests, of up to 64 rows
SHORT_FLUSH = 16  # additions before they go to a second lane in a row nest
NO_PLACE = 2**31 - 1
LONG_ROW = 128  # elements of a row from which accumulators take several registers
LONG_BYTES = 128  # of an accumulator of a long row: on all machines, so that sums are as exact on each
MOST_PLACES = 64  # lanes that remember a place, too
BEYOND_CACHES = 1 << 22  # elements
_INTEGERS = {1: "i8", 2: "i16", 4: "i32", 8: "i64"}
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
        """In row nests arrays of lanes are a register of what is read, or a few of what adds up: so they stay there."""
        if not self.is_row or self.vector is None:
            return super()._choose_lanes()
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
        """What any and all keep in a lane, as wide as what is compared: g++ makes no vectors of bools that add up."""
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
        """Whether each lane of an index reduction sees its values by rising index, which is the loop's variable."""
        if not REDUCTIONS[r.kind].index or len(self.red_axes) != 1:
            return False
        index = self.plan.rows[self.plan.rows[r.row].args[1]]
        return index.op == "index" and index.attr == expr(self.red_axes[0].sym)

    def counts_turns(self, r: Reduce) -> bool:
        """Whether lanes remember where the turn of the loop began in which they took their value, and not its index."""
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

    def total(self, r: Reduce, lane: str) -> str:
        """The finished value of an accumulator: of a lane in column nests, the only one in row nests."""
        k = self.holder(r).number
        if self.flushes(r):
            return f"tot{k}[{lane}]" if self.is_column else f"tot{k}"
        return f"acc{k}[{lane if self.is_column else 0}]"

    def declare_accumulators(self, phase: int, low: str) -> None:
        """Lane arrays at their identities. The pass begins at `low`."""
        for r in self.accumulators(phase):
            spec, _, acc = self.spec(r)
            k = r.number
            self.out.add(f"{CPP_TYPES[acc]} acc{k}[{self.lanes}];")
            start = f"acc{k}[l] = {cpp_constant(spec.identity(acc), acc)};"
            if self.notes_nans(r):
                self.out.add(f"{_INTEGERS[acc.itemsize]} nan{k}[{self.lanes}];")
                start += f" nan{k}[l] = 0;"
            if spec.index:
                first = "0" if self.counts_turns(r) else f"(i32)({low})" if self.in_order(r) else str(NO_PLACE)
                self.out.add(f"i32 at{k}[{self.lanes}];")
                start += f" at{k}[l] = {first};"
            if self.flushes(r) and self.is_column:
                self.out.add(f"double tot{k}[{self.lanes}];")
                start += f" tot{k}[l] = 0.0;"
            elif self.flushes(r):
                self.out.add(f"float mid{k}[{self.lanes}];")
                self.out.add(f"double tot{k} = 0.0;")
                start += f" mid{k}[l] = 0.0f;"
            self.out.add(f"for (i64 l = 0; l < {self.lanes}; ++l) {{ {start} }}")

    def accumulate(self, r: Reduce) -> None:
        """Fold the current value into its lane."""
        if self.holder(r) is not r:
            return
        spec, value, acc = self.spec(r)
        k = r.number
        if not spec.index:
            now = cpp_convert(value, acc, self.ref(r.row))
            if self.overlaps and not spec.idempotent:
                now = f"l < skip ? {cpp_constant(spec.identity(acc), acc)} : {now}"
            self.out.add(f"const {CPP_TYPES[acc]} x{k} = {now};")
            if self.notes_nans(r):
                self.out.add(f"acc{k}[l] = x{k} {spec.extreme} acc{k}[l] ? x{k} : acc{k}[l];")
                self.out.add(f"nan{k}[l] |= x{k} != x{k};")
                return
            self.out.add(f"acc{k}[l] = {cpp_combine(r.kind, acc, f'acc{k}[l]', f'x{k}')};")
            return
        v, i = self.plan.rows[r.row].args
        now = f"start{r.phase}" if self.counts_turns(r) else f"now{k}"
        if now == f"now{k}":
            self.out.add(f"const i32 {now} = (i32){self.ref(i)};")
        self.out.add(f"const {CPP_TYPES[acc]} x{k} = {cpp_convert(value, acc, self.ref(v))};")
        if self.in_order(r):
            better = cpp_overtakes(r.kind, acc, f"acc{k}[l]", f"x{k}")
        else:
            better = cpp_combine(r.kind, acc, f"acc{k}[l]", f"at{k}[l]", f"x{k}", now)
        self.out.add(f"const bool better{k} = {better};")
        self.out.add(f"acc{k}[l] = better{k} ? x{k} : acc{k}[l];")
        self.out.add(f"at{k}[l] = better{k} ? {now} : at{k}[l];")

    def emit_flush(self, phase: int, when: str = "") -> None:
        """Move float32 partial sums on: in the loop `when` that holds; at its end, without, what is left.

        Column nests add each lane to its float64 total. Row nests add lanes to lanes of sums first, so that no float32
        sum has more than a few terms, and from time to time the sum over these to the total.
        """
        mine = [r for r in self.accumulators(phase) if self.flushes(r)]
        if not mine:
            return
        each = f"for (i64 l = 0; l < {self.lanes}; ++l)"
        if self.is_column:
            if when:
                self.out.open(f"if ({when})")
                self.out.add("turns = 0;")
            for r in mine:
                k = r.number
                self.out.add(f"{each} {{ tot{k}[l] += (double)acc{k}[l]; acc{k}[l] = 0.0f; }}")
            if when:
                self.out.close()
            return
        if when:
            self.out.open(f"if ({when})")
            self.out.add("turns = 0;")
            for r in mine:
                k = r.number
                self.out.add(f"{each} {{ mid{k}[l] += acc{k}[l]; acc{k}[l] = 0.0f; }}")
            self.out.open(f"if (++groups == {FLUSH // SHORT_FLUSH})")
            self.out.add("groups = 0;")
        for r in mine:
            k = r.number
            self.out.add(f"{each} acc{k}[l] += mid{k}[l];")
            self.fold_lanes(r)
            self.out.add(f"tot{k} += (double)acc{k}[0];")
            if when:
                self.out.add(f"{each} acc{k}[l] = mid{k}[l] = 0.0f;")
        if when:
            self.out.close()
            self.out.close()

    def join(self, r: Reduce, dtype: torch.dtype, a: str, b: str, ai: str = "", bi: str = "") -> str:
        """Statements that fold accumulator `b` (and its index) into `a`."""
        if REDUCTIONS[r.kind].index:
            return f"if ({cpp_combine(r.kind, dtype, a, ai, b, bi)}) {{ {a} = {b}; {ai} = {bi}; }}"
        return f"{a} = {cpp_combine(r.kind, dtype, a, b)};"

    def fold_lanes(self, r: Reduce) -> None:
        """Fold the lanes into lane 0, halving, in vectors: the fixed order of a tree."""
        k, (spec, _, acc) = r.number, self.spec(r)
        kind = spec.value or r.kind
        size = min(self.machine.vector_bytes, self.lanes * acc.itemsize)
        width = size // acc.itemsize
        names = [f"a{i}" for i in range(self.lanes // width)]
        element = "u8" if acc is torch.bool else CPP_TYPES[acc]
        sign = spec.wraps if not acc.is_floating_point and acc is not torch.bool else ""
        if sign:  # integers wrap in unsigned vectors: their scalar cells have casts that vectors do not take
            element = element.replace("i", "u")

        def joined(a: str, b: str) -> str:
            if self.notes_nans(r):
                return f"{b} {spec.extreme} {a} ? {b} : {a}"
            return f"{a} {sign} {b}" if sign else cpp_combine(kind, acc, a, b)

        self.out.open("")
        self.out.add(f"typedef {element} vec __attribute__((vector_size({size}), aligned({acc.itemsize}), may_alias));")
        self.out.add(f"typedef {_INTEGERS[acc.itemsize]} indices __attribute__((vector_size({size})));")
        self.out.add("vec " + ", ".join(f"{n} = ((const vec*)acc{k})[{i}]" for i, n in enumerate(names)) + ";")
        while len(names) > 1:
            half = len(names) // 2
            for i in range(half):
                self.out.add(f"{names[i]} = {joined(names[i], names[i + half])};")
            names = names[:half]
        while width > 1:
            width //= 2
            rotated = ", ".join(str((i + width) % (size // acc.itemsize)) for i in range(size // acc.itemsize))
            self.out.add(f"{{ const vec b = FUSER_SHUFFLE(indices, a0, {rotated});")
            self.out.add(f"  a0 = {joined('a0', 'b')}; }}")
        self.out.add(f"acc{k}[0] = a0[0];")
        self.out.close()

    def emit_fold(self, phase: int, low: str = "0") -> None:
        """Row nests: fold the lanes of each accumulator. `low` is where the pass began."""
        for r in self.accumulators(phase):
            if self.flushes(r):
                continue  # flushed ones are folded already
            if REDUCTIONS[r.kind].index:
                self._fold_index(r, low)
                continue
            self.fold_lanes(r)
            if self.notes_nans(r):
                k, acc = r.number, self.spec(r)[2]
                self.out.add(f"{_INTEGERS[acc.itemsize]} any{k} = 0;")
                self.out.add(f"for (i64 l = 0; l < {self.lanes}; ++l) any{k} |= nan{k}[l];")
                self.out.add(f"acc{k}[0] = any{k} ? {cpp_constant(math.nan, acc)} : acc{k}[0];")

    def _fold_index(self, r: Reduce, low: str) -> None:
        """Fold the values, then take the smallest index among the lanes that hold the best one (any NaN is it).

        Lanes that had no value are at the identity and the turn 0: if that is best, lane 0 has it too.
        """
        k, acc = r.number, self.spec(r)[2]
        self.out.add(f"{CPP_TYPES[acc]} lane{k}[{self.lanes}];")
        self.out.add(f"for (i64 l = 0; l < {self.lanes}; ++l) lane{k}[l] = acc{k}[l];")
        self.fold_lanes(r)
        best, index = f"acc{k}[0]", f"at{k}[l]"
        if self.counts_turns(r):
            index = f"at{k}[l] + (i32)l"
        same = f"lane{k}[l] == {best}"
        if acc.is_floating_point:
            same = f"({same}) | ((lane{k}[l] != lane{k}[l]) & ({best} != {best}))"
        self.out.add(f"i32 least{k} = {NO_PLACE};")
        self.out.add(f"#pragma omp simd reduction(min:least{k})")
        self.out.open(f"for (i64 l = 0; l < {self.lanes}; ++l)")
        self.out.add(f"const i32 here = {index}, mine = ({same}) ? here : {NO_PLACE};")
        self.out.add(f"least{k} = mine < least{k} ? mine : least{k};")
        self.out.close()
        if self.counts_turns(r):
            lane = f"least{k} % {self.lanes}"
            if self.overlaps:
                p, last = f"p{r.phase} - ({low})", f"last{r.phase} - ({low})"
                lane = f"least{k} < {p} ? {lane} : least{k} - ({last})"
            self.out.add(f"{best} = lane{k}[{lane}];")  # of zeros of both signs, the first
            self.out.add(f"least{k} += (i32)({low});")
        self.out.add(f"at{k}[0] = least{k};")
