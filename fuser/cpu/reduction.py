"""Reducing nests.

- *row*: the vector axis is reduced; a unit is one result, its passes run over the reduced axes, each accumulator is an
  array of lanes that is folded at the end in a fixed order.
- *column*: the vector axis is kept; a unit is a block of neighbouring results, one in each lane.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fuser.cpu.nest import ROWS_AHEAD, STREAM_TILE, Nest, storage_type
from fuser.cpu.records import Function
from fuser.cpu.text import cpp_expr
from fuser.ir.sizes import (
    INDIRECT,
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
from fuser.ops import CPP_TYPES, NO_INDEX, REDUCTIONS, ReductionRow, cpp_combine, cpp_constant, cpp_convert
from fuser.scheduler.nodes import row_cost
from fuser.scheduler.plan import Axis, Reduce

FLUSH = 256  # float32 additions per lane of a row nest before they go to a float64 total
COLUMN_FLUSH = 32  # the same for the lanes of a column nest
SHORT_FLUSH = 16  # additions before they go to a second lane in a row nest
KEEP_COST = 8  # operations from which a value is kept for a later pass rather than computed again
KEEP_BYTES = 1 << 19  # most row-buffer bytes of one unit in the example
NO_TURN = 2**31 - 1
_VALUE_OF = {"argmax": "max", "argmin": "min"}
_WRAPPING = {"sum": "+", "prod": "*"}
_INTEGERS = {1: "i8", 2: "i16", 4: "i32", 8: "i64"}
SHUFFLE_HELPER = """\
#if defined(__clang__) || __GNUC__ >= 12
#define FUSER_SHUFFLE(I, a, ...) __builtin_shufflevector(a, a, __VA_ARGS__)
#else
#define FUSER_SHUFFLE(I, a, ...) __builtin_shuffle(a, (I){__VA_ARGS__})
#endif
"""


class ReductionNest(Nest):
    """Row and column nests."""

    def choose_kept_rows(self) -> None:
        """Costly rows that a later pass needs again get a row buffer."""
        hint = 1
        for a in self.red_axes:
            hint *= a.hint
        per_unit = 8 * hint * (self.lanes if self.is_column else 1)
        earlier: set[int] = set()
        for phase in range(self.n_passes):
            mine = set(self.closure(self.roots(phase)))
            again = mine & earlier
            fresh = mine - earlier
            frontier = {d for n in fresh for d in self.deps(n) if d in again}
            frontier |= {r for r in self.roots(phase) if r in again}
            for n in sorted(frontier):
                costly = sum(row_cost(self.plan.rows[m]) for m in self.closure([n])) >= KEEP_COST
                fits = per_unit * (len(self.kept_rows) + 1) <= KEEP_BYTES
                if costly and fits and self.plan.rows[n].op not in ("load", "indirect", "pair"):
                    self.kept_rows.setdefault(n, len(self.kept_rows))
            earlier |= mine

    def spec(self, r: Reduce) -> tuple[ReductionRow, torch.dtype, torch.dtype]:
        """The table's row of a reduction, the dtype of its values and of its accumulator."""
        row = self.plan.rows[r.row]
        value = self.plan.rows[row.args[0]].dtype if row.op == "pair" else row.dtype
        spec = REDUCTIONS[r.kind]
        acc = spec.accumulate(value)
        if self.plan.split and not self.is_column and r.kind == "sum" and acc is torch.float32:
            acc = torch.float64  # one long sum waits for memory, not for arithmetic
        return spec, value, acc

    def flushes(self, r: Reduce) -> bool:
        """Whether partial sums go to float64 totals."""
        return r.kind == "sum" and self.spec(r)[2] is torch.float32

    def total_dtype(self, r: Reduce) -> torch.dtype:
        """The dtype of a finished accumulator."""
        return torch.float64 if self.flushes(r) else self.spec(r)[2]

    def counts_turns(self, r: Reduce) -> bool:
        """Whether lanes remember the turn they took their value in, an int32, and not its index."""
        if not self.spec(r)[0].index or self.is_column or len(self.red_axes) != 1:
            return False
        index = self.plan.rows[self.plan.rows[r.row].args[1]]
        return index.op == "index" and index.attr == expr(self.red_axes[0].sym)

    def total(self, r: Reduce, lane: str) -> str:
        """The finished value of an accumulator: of a lane in column nests, the only one in row nests."""
        if self.flushes(r):
            return f"tot{r.number}[{lane}]" if self.is_column else f"tot{r.number}"
        return f"acc{r.number}[{lane if self.is_column else 0}]"

    def declare_accumulators(self, phase: int) -> None:
        """Lane arrays at their identities."""
        for r in self.plan.reductions:
            if r.phase != phase:
                continue
            spec, _, acc = self.spec(r)
            k = r.number
            self.out.add(f"{CPP_TYPES[acc]} acc{k}[{self.lanes}];")
            start = f"acc{k}[l] = {cpp_constant(spec.identity(acc), acc)};"
            if spec.index:
                self.out.add(f"i64 at{k}[{self.lanes}];")
                start += f" at{k}[l] = {NO_INDEX}LL;"
            if self.counts_turns(r):
                self.out.add(f"i32 when{k}[{self.lanes}];")
                start += f" when{k}[l] = {NO_TURN};"
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
        spec, value, acc = self.spec(r)
        k = r.number
        if spec.index:
            v, i = self.plan.rows[r.row].args
            turns = self.counts_turns(r)
            at, now = (f"when{k}[l]", f"turn{r.phase}") if turns else (f"at{k}[l]", self.ref(i))
            self.out.add(f"const {CPP_TYPES[acc]} x{k} = {cpp_convert(value, acc, self.ref(v))};")
            self.out.add(f"const bool better{k} = {cpp_combine(r.kind, acc, f'acc{k}[l]', at, f'x{k}', now)};")
            self.out.add(f"acc{k}[l] = better{k} ? x{k} : acc{k}[l];")
            self.out.add(f"{at} = better{k} ? {now} : {at};")
            return
        self.out.add(f"const {CPP_TYPES[acc]} x{k} = {cpp_convert(value, acc, self.ref(r.row))};")
        self.out.add(f"acc{k}[l] = {cpp_combine(r.kind, acc, f'acc{k}[l]', f'x{k}')};")

    def emit_flush(self, phase: int, last: bool) -> None:
        """Move float32 partial sums on: every so many turns inside the loop, and what is left after it.

        Column nests add each lane to its float64 total. Row nests add lanes to lanes of sums first, so that no float32
        sum has more than a few terms, and from time to time the sum over these to the total.
        """
        mine = [r for r in self.plan.reductions if r.phase == phase and self.flushes(r)]
        if not mine:
            return
        each = f"for (i64 l = 0; l < {self.lanes}; ++l)"
        if not last:
            self.out.open(f"if (++turns % {COLUMN_FLUSH if self.is_column else SHORT_FLUSH} == 0)")
        for r in mine:
            k = r.number
            if self.is_column:
                self.out.add(f"{each} {{ tot{k}[l] += (double)acc{k}[l]; acc{k}[l] = 0.0f; }}")
            elif not last:
                self.out.add(f"{each} {{ mid{k}[l] += acc{k}[l]; acc{k}[l] = 0.0f; }}")
        if not self.is_column:
            self.out.open(f"if (turns == {FLUSH})" if not last else "")
            if not last:
                self.out.add("turns = 0;")
            for r in mine:
                k = r.number
                self.out.add(f"{each} acc{k}[l] += mid{k}[l];")
                self.fold_lanes(r)
                self.out.add(f"tot{k} += (double)acc{k}[0];")
                if not last:
                    self.out.add(f"{each} acc{k}[l] = mid{k}[l] = 0.0f;")
            self.out.close()
        if not last:
            self.out.close()

    def join(self, r: Reduce, dtype: torch.dtype, a: str, b: str, ai: str = "", bi: str = "") -> str:
        """Statements that fold accumulator `b` (and its index) into `a`."""
        if REDUCTIONS[r.kind].index:
            return f"if ({cpp_combine(r.kind, dtype, a, ai, b, bi)}) {{ {a} = {b}; {ai} = {bi}; }}"
        return f"{a} = {cpp_combine(r.kind, dtype, a, b)};"

    def fold_lanes(self, r: Reduce) -> None:
        """Fold the lanes into lane 0, halving, in vectors: the fixed order of a tree."""
        k, acc = r.number, self.spec(r)[2]
        kind = _VALUE_OF.get(r.kind, r.kind)
        size = min(64, self.lanes * acc.itemsize)
        width = size // acc.itemsize
        names = [f"a{i}" for i in range(self.lanes // width)]
        element = "u8" if acc is torch.bool else CPP_TYPES[acc]
        sign = _WRAPPING.get(kind, "") if not acc.is_floating_point and acc is not torch.bool else ""
        if sign:  # integers wrap in unsigned vectors: their scalar cells have casts that vectors do not take
            element = element.replace("i", "u")

        def joined(a: str, b: str) -> str:
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
        for r in self.plan.reductions:
            if r.phase != phase or self.flushes(r):
                continue  # flushed ones are folded already
            if self.spec(r)[0].index:
                self._fold_index(r, low)
            else:
                self.fold_lanes(r)

    def _fold_index(self, r: Reduce, low: str) -> None:
        """Fold the values, then take the smallest index among the lanes that hold the best one (any NaN is it)."""
        k, acc = r.number, self.spec(r)[2]
        self.out.add(f"{CPP_TYPES[acc]} lane{k}[{self.lanes}];")
        self.out.add(f"for (i64 l = 0; l < {self.lanes}; ++l) lane{k}[l] = acc{k}[l];")
        self.fold_lanes(r)
        self.out.add(f"i64 least{k} = {NO_INDEX}LL;")
        self.out.add(f"#pragma omp simd reduction(min:least{k})")
        self.out.open(f"for (i64 l = 0; l < {self.lanes}; ++l)")
        index = f"at{k}[l]"
        if self.counts_turns(r):
            index = f"when{k}[l] == {NO_TURN} ? {NO_INDEX}LL : {low} + (i64)when{k}[l] * {self.lanes} + l"
        best = f"acc{k}[0]"
        same = f"lane{k}[l] == {best}"
        if acc.is_floating_point:
            same = f"({same}) | ((lane{k}[l] != lane{k}[l]) & ({best} != {best}))"
        self.out.add(f"const i64 here = {index}, mine = ({same}) ? here : {NO_INDEX}LL;")
        self.out.add(f"least{k} = mine < least{k} ? mine : least{k};")
        self.out.close()
        self.out.add(f"at{k}[0] = least{k};")

    def emit_results(self, phase: int) -> None:
        """Declare the `reduced` rows of a finished pass."""
        for n, row in enumerate(self.plan.rows):
            if row.op != "reduced" or self.plan.reductions[row.attr].phase != phase:
                continue
            r = self.plan.reductions[row.attr]
            index = REDUCTIONS[r.kind].index
            lane = "l" if self.is_column else "0"
            value = f"at{r.number}[{lane}]" if index else self.total(r, lane)
            text = cpp_convert(torch.int64 if index else self.total_dtype(r), row.dtype, value)
            self.emitted.add(n)
            if self.is_column:
                self.out.add(f"{CPP_TYPES[row.dtype]} t{n}[{self.lanes}];")
                self.out.add(f"for (i64 l = 0; l < count; ++l) t{n}[l] = {text};")
                self.arrays.add(n)
            else:
                self.out.add(f"const {CPP_TYPES[row.dtype]} t{n} = {text};")

    def declare_kept(self) -> Expr:
        """Pointers to the row buffers in scratch memory; returns the bytes of all."""
        offset = expr(0)
        size = product(a.size for a in self.red_axes) * (self.lanes if self.is_column else 1) * 8 + 64
        for n, k in self.kept_rows.items():
            kind = CPP_TYPES[self.plan.rows[n].dtype]
            at = f"{k} * (({cpp_expr(size)} + 63) / 64 * 64)"
            self.out.add(f"{kind}* __restrict kept{k} = ({kind}*)(scratch + {at});")
            offset = offset + size + 64
        return offset

    def emit_pass(self, phase: int, bounds: dict[Sym, tuple[str, str]] | None = None) -> None:
        """One pass over the reduced axes (or the part of them that `bounds` gives)."""
        reductions = [r for r in self.plan.reductions if r.phase == phase]
        self.emit_unit_rows(self.closure_deps(phase), phase)
        if not reductions and not self.roots(phase):
            return
        self.declare_accumulators(phase)
        flush = any(self.flushes(r) for r in reductions)
        if flush:
            self.out.add("i64 turns = 0;") if not self._turns_declared() else self.out.add("turns = 0;")
        bounds = bounds or {}
        loops = [a for a in self.red_axes if a is not self.vector]
        for a in loops:
            lo, hi = bounds.get(a.sym, ("0", f"n_{a.sym.name}"))
            self.out.open(f"for (i64 {a.sym.name} = {lo}; {a.sym.name} < {hi}; ++{a.sym.name})")
        if self.is_column:
            streams = bool(self.streams(phase))
            self._prefetch_columns(phase, loops)
            if streams:
                self.open_streams(phase, "v0", "l", self.lanes)
            self.open_lanes()
            self.emit_inner(phase)
            self.out.close()
            if streams:
                self.close_streams(phase, "count")
            if flush:
                self.emit_flush(phase, False)
        else:
            self._vector_pass(phase, bool(reductions), flush, bounds)
        for _ in loops:
            self.out.close()
        if flush:
            self.emit_flush(phase, True)

    def _turns_declared(self) -> bool:
        declared = getattr(self, "_turns", False)
        self._turns = True
        return declared

    def _vector_pass(self, phase: int, reduces: bool, flush: bool, bounds: dict[Sym, tuple[str, str]]) -> None:
        assert self.vector is not None
        v = self.vector.sym.name
        lo, hi = bounds.get(self.vector.sym, ("0", f"n_{v}"))
        streams = bool(self.streams(phase))
        if not reduces:
            if streams:
                self.out.open(f"for (i64 w0 = {lo}; w0 < {hi}; w0 += {STREAM_TILE})")
                self.out.add(f"const i64 w1 = w0 + {STREAM_TILE} < {hi} ? w0 + {STREAM_TILE} : {hi};")
                self.open_streams(phase, "w0", f"{v} - w0", STREAM_TILE)
                lo, hi = "w0", "w1"
            self.out.add(self.pragma())
            self.out.open(f"for (i64 {v} = {lo}; {v} < {hi}; ++{v})")
            self.emit_inner(phase)
            self.out.close()
            if streams:
                self.close_streams(phase, "w1 - w0")
                self.out.close()
            return
        ahead = self._look_ahead(phase)
        self.out.open(f"auto pass{phase} = [&](const i64 v0, const i64 count) __attribute__((always_inline))")
        for k, step in enumerate(ahead):
            self.out.add(f"for (i64 q = 0; q < count; q += {step}) __builtin_prefetch(ahead{k} + v0 + q);")
        if any(r.phase == phase and self.counts_turns(r) for r in self.plan.reductions):
            self.out.add(f"const i32 turn{phase} = (i32)((v0 - ({lo})) / {self.lanes});")
        self._prefetch(phase)
        if streams:
            self.open_streams(phase, "v0", "l", self.lanes)
        self.out.add(self.pragma())
        self.out.open("for (i64 l = 0; l < count; ++l)")
        self.out.add(f"const i64 {v} = v0 + l;")
        self.emit_inner(phase)
        self.out.close()
        if streams:
            self.close_streams(phase, "count")
        self.out.close("};")
        self.out.add(f"i64 p{phase} = {lo};")
        self.out.open(f"for (; p{phase} + {self.lanes} <= {hi}; p{phase} += {self.lanes})")
        self.out.add(f"pass{phase}(p{phase}, {self.lanes});")
        if flush:
            self.emit_flush(phase, False)
        self.out.close()
        self.out.add(f"if (p{phase} < {hi}) pass{phase}(p{phase}, {hi} - p{phase});")
        if flush and len(self.red_axes) > 1:
            self.emit_flush(phase, False)

    def _prefetch(self, phase: int) -> None:
        """Ask for memory during the costliest pass: what later passes write, and what the next unit will read first.

        Between the passes over a row that lies in cache, memory would otherwise idle.
        """
        assert self.vector is not None
        if self.plan.split or phase != self._costliest_pass():
            return
        v = self.vector.sym
        wanted = []
        for s in self.plan.stores:
            if s.phase > phase and s in self.streams():
                wanted.append((s.buffer, s.address, 1))
        if self.kept and phase > 0:
            unit = self.kept[-1].sym
            for n in self.closure(self.roots(0)):
                row = self.plan.rows[n]
                if row.op == "load" and not row.args and unit in symbols(row.attr[1][0]):
                    wanted.append((row.attr[0], substitute(row.attr[1][0], {unit: expr(unit) + 1}), 0))
        for buffer, address, write in dict.fromkeys(wanted):
            if coefficient(address, v) != ONE or any(s.kind == INDIRECT for s in symbols(address)):
                continue
            at = self.index(substitute(address, {v: symbol("v0", LOOP) + symbol("q", LOOP)}))
            step = max(1, 64 // self.dtypes[buffer].itemsize)
            unless = "if (!stream) " if write else ""
            self.out.add(
                f"{unless}for (i64 q = 0; q < count; q += {step}) __builtin_prefetch({buffer} + ({at}), {write});"
            )

    def _prefetch_columns(self, phase: int, loops: Sequence[Axis]) -> None:
        """Ask for what is read next, which no hardware foresees: rows of a block lie far from each other.

        Where there is one pass, that is some rows ahead; otherwise the next block, during the costliest later pass.
        """
        if not loops or phase != (0 if self.n_passes == 1 else max(1, self._costliest_pass())):
            return
        assert self.vector is not None
        v, a = self.vector.sym, loops[-1].sym
        outer = next((a.sym for a in reversed(self.kept) if a is not self.vector), None)
        for buffer, address in self.lines_read(self.closure(self.roots(0))):
            line = {v: symbol("v0", LOOP) + symbol("q", LOOP)}
            if self.n_passes == 1:
                at = self.index(substitute(address, {**line, a: expr(a) + ROWS_AHEAD}))
            else:
                turn = coefficient(address, outer) if outer is not None else None
                other_row = f"{cpp_expr(turn)} - v0" if turn is not None else "0"
                onward = f"(v0 + {self.lanes} < n_{v.name} ? {self.lanes} : {other_row})"
                at = f"{self.index(substitute(address, line))} + {onward}"
            step = max(1, 64 // self.dtypes[buffer].itemsize)
            self.out.add(f"for (i64 q = 0; q < count; q += {step}) __builtin_prefetch({buffer} + ({at}), 0, 2);")

    def _look_ahead(self, phase: int) -> list[int]:
        """Pointers to the rows that tensors of indices name for the next unit; for each, the elements of a line."""
        assert self.vector is not None
        if self.plan.split or phase == 0 or phase != self._costliest_pass() or len(self.kept) != 1:
            return []
        v = self.vector.sym
        steps: list[int] = []
        for n in self.closure(self.roots(0)):
            row = self.plan.rows[n]
            if row.op != "load" or row.args or coefficient(row.attr[1][0], v) != ONE:
                continue
            found = [int(s.name[1:]) for s in symbols(row.attr[1][0]) if s.kind == INDIRECT]
            if not found or any(self.is_full(m) for m in found):
                continue
            buffer, (address,) = row.attr
            kind, k, unit = storage_type(self.dtypes[buffer]), len(steps), self.kept[0].sym.name
            self.out.add(f"const {kind}* ahead{k} = {buffer};")
            self.out.open("if (u + 1 < end)")
            self.out.add(f"const i64 next = {unit} + 1;")
            self.out.open("")
            self.out.add(f"const i64 {unit} = next;")
            for m in self._varying_rows(found):
                self.declare(m)
            self.out.add(f"ahead{k} = {buffer} + ({self.index(substitute(address, {v: expr(0)}))});")
            self.out.close()
            self.out.close()
            steps.append(max(1, 64 // self.dtypes[buffer].itemsize))
        return steps

    def _varying_rows(self, roots: Sequence[int]) -> list[int]:
        """The rows behind `roots` that vary with the unit, in order."""
        seen: set[int] = set()
        pending = list(roots)
        while pending:
            n = pending.pop()
            if n not in seen and self.plan.varies[n]:
                seen.add(n)
                pending += self.deps(n)
        return sorted(seen)

    def _costliest_pass(self) -> int:
        """The pass with the most operations for each element among those that reduce."""

        def cost(phase: int) -> int:
            mine = [n for n in self.closure(self.roots(phase)) if self.first_pass(n) == phase]
            return sum(row_cost(self.plan.rows[n]) for n in mine)

        return max((r.phase for r in self.plan.reductions), key=lambda p: (cost(p), -p))

    def whole(self) -> Function:
        """The single function of an unsplit plan."""
        return self._column() if self.is_column else self._row()

    def _row(self) -> Function:
        self.choose_kept_rows()
        name = self.open_function()
        scratch = self.declare_kept()
        digits = [(a.sym.name, f"n_{a.sym.name}") for a in self.kept]
        self.emit_constants()
        self.open_units(digits)
        self._turns = False
        self._all_passes()
        self.close_units(digits)
        return Function(name, self.close_function(), product(a.size for a in self.kept), self.work(), scratch)

    def _all_passes(self) -> None:
        for phase in range(max(self.n_passes, self.plan.n_phases)):
            self.emit_pass(phase)
            if not self.is_column:
                self.emit_fold(phase)
            self.emit_results(phase)
            self.emit_outer_stores(phase)

    def _column(self) -> Function:
        self.choose_kept_rows()
        assert self.vector is not None
        name = self.open_function()
        scratch = self.declare_kept()
        digits, units = self._column_digits()
        self.emit_constants()
        self.open_units(digits)
        self._column_block()
        self._turns = False
        self._all_passes()
        self.close_units(digits)
        return Function(name, self.close_function(), units, self.work(), scratch)

    def _column_digits(self) -> tuple[list[tuple[str, str]], Expr]:
        assert self.vector is not None
        outer = [a for a in self.kept if a is not self.vector]
        blocks = f"(n_{self.vector.sym.name} + {self.lanes - 1}) / {self.lanes}"
        digits = [(a.sym.name, f"n_{a.sym.name}") for a in outer] + [("block", blocks)]
        return digits, product(a.size for a in outer) * floordiv(self.vector.size + (self.lanes - 1), expr(self.lanes))

    def _column_block(self) -> None:
        assert self.vector is not None
        n = f"n_{self.vector.sym.name}"
        self.out.add(f"const i64 v0 = block * {self.lanes}, count = v0 + {self.lanes} < {n} ? {self.lanes} : {n} - v0;")
