"""What all loop nests of a kernel plan share: which row lives where, how values are spelled, units, unit rows."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Sequence, Set

import torch

from fuser.cpu.checked import checked_pointer
from fuser.cpu.exact import exact_rows, tame_rows
from fuser.cpu.moves import bits_of
from fuser.cpu.passes import Passes, address_rows
from fuser.cpu.quotients import factors
from fuser.cpu.records import SIGNATURE, Bindings, Partial
from fuser.cpu.text import Lines, cpp_expr, cpp_name
from fuser.ir.loop_body import LOW_PRECISION, Row, is_checked, row_exprs
from fuser.ir.sizes import INDIRECT, LOOP, ONE, Expr, Sym, coefficient, expr, product, symbol, symbols
from fuser.kernel_spec import OUT_OF_BOUNDS
from fuser.ops import CPP_TYPES, cpp_cell, cpp_constant, cpp_convert, cpp_load, cpp_round, cpp_store
from fuser.scheduler.nodes import row_cost
from fuser.scheduler.plan import Axis, KernelPlan, Reduce, Store

_ZEROS = ("0.0", "0", "False")
TILE_COLUMNS = 128
TILE_STRIDE = TILE_COLUMNS + 16  # so that the rows of a tile do not all lie in the same sets of the cache
ROWS_AHEAD = 8  # rows of a tile or a block of columns that are asked for before their turn
# Largest constant distance between neighbouring lanes that g++ sees. It takes the loads of one array that are a
# constant distance apart for a group of interleaved elements, in time that grows with the square of the distance.
MOST_INTERLEAVED = 16
MOST_OF_A_GROUP = 4  # most stores of such a group that lacks some: g++ took ten seconds for 11 of 12 float16
# Most loads of less than a word that a loop gathers by vectors. A vector gather of bytes is some 20 instructions for
# eight lanes, and 64 lanes are taken at once: many of them, as windows read, are faster as scalar loads.
MOST_GATHERED = 4


class Nest:
    """Writes the functions of one plan."""

    def __init__(self, plan: KernelPlan, name: str, bindings: Bindings) -> None:
        self.plan, self.name, self.bindings = plan, name, bindings
        self.machine = bindings.machine
        self.aligned = f"__attribute__((aligned({self.machine.line_bytes})))"
        self.dtypes = dict(plan.buffers)
        self.extents = {a.sym: a.size for a in plan.axes}
        self.checked = bindings.counts is not None
        self.reduced = {a.sym for a in plan.axes if a.reduced}
        self.kept = [a for a in plan.axes if not a.reduced]
        self.red_axes = [a for a in plan.axes if a.reduced]
        self.vector = next((a for a in plan.axes if a.sym == plan.vector), None)
        self.is_row = bool(self.reduced) and self.vector is not None and self.vector.reduced
        self.is_column = bool(self.reduced) and not self.is_row
        self.inside = self.reduced | ({plan.vector} if plan.vector is not None and not self.is_column else set())
        self.constant: frozenset[int] = frozenset()  # rows that do not change in a segment of the loop (segments.py)
        self.passes = Passes(plan, self.inside, self.constant)
        self.parts: dict[int, str] = {}  # masked loads of such a segment -> what they read
        self.lanes = self._choose_lanes()
        self.out = Lines()
        self.emitted: set[int] = set()  # rows available in the unit (scalars, or lane arrays of a column nest)
        self.arrays: set[int] = set()  # rows that are lane arrays
        self.kept_rows: dict[int, int] = {}  # row -> number of its row buffer
        self.hoisted: dict[int, str] = {}  # rows computed before the loops -> where each lies
        self.has_checks = any(is_checked(r) for r in plan.rows)
        self.partials: list[Partial] = []
        self.staged: dict[int, int] = {}  # transposed loads -> number of their tile
        self.tile_axis: Axis | None = None
        self.guarded = self._only_inside()
        self.pieces: dict[int, str] = {}  # loads of float16 that are converted at the moment -> where each lies
        self.results: dict[Store, str] = {}  # stores that will be (halves.py)
        self._exact: dict[torch.dtype, frozenset[int]] = {}
        self.moved: dict[int, torch.dtype] = {}  # rows that are the bits of a half (moves.py)
        self.streamed: dict[Store, str] = {}  # stores that go through a tile at the moment -> where in it (streams.py)
        self.hidden: set[int] = set()  # constants that the function keeps from the compiler
        self.head = 0  # the line of the function where they go

    def _choose_lanes(self) -> int:
        if self.vector is None:
            return 1
        if self.is_column:  # later passes find the block of the first in cache
            most = 256 if self.n_passes == 1 or self.plan.split else 128
            return next((n for n in (256, 128) if n <= min(most, self.vector.hint)), 64)
        return 64 if self.vector.hint >= 64 else 16

    def is_exact(self, n: int, dtype: torch.dtype) -> bool:
        """Whether row `n` is sure to be a value that `dtype` has, which is a half."""
        if dtype not in self._exact:
            self._exact[dtype] = exact_rows(self.plan, dtype) if dtype in LOW_PRECISION else frozenset()
        return n in self._exact[dtype]

    @functools.cached_property
    def tame(self) -> frozenset[int]:
        """Rows whose NaNs have zeros in their low bits."""
        return tame_rows(self.plan)

    def hold(self, rows: frozenset[int]) -> None:
        """Take `rows` for constant in the innermost loops."""
        self.constant = rows
        self.passes = Passes(self.plan, self.inside, rows)

    def is_full(self, n: int) -> bool:
        """Whether row `n` lives inside the innermost loops."""
        return n in self.passes.full

    def is_lane(self, n: int) -> bool:
        """Whether row `n` of a column nest has one value per lane, outside the reduced loops."""
        return self.is_column and not self.is_full(n) and self.plan.vector in self.plan.varies[n]

    def store_is_full(self, s: Store) -> bool:
        """Whether a store happens inside the innermost loops."""
        return s in self.passes.full_stores

    def step(self, address: Expr) -> Expr | None:
        """How far apart in memory neighbours along the vector axis are; None where a computed index is part of it."""
        if self.vector is None or any(s.kind == INDIRECT for s in symbols(address)):
            return None
        return coefficient(address, self.vector.sym)

    def deps(self, n: int) -> tuple[int, ...]:
        """Rows that row `n` needs."""
        return self.passes.deps[n]

    def closure(self, roots: Iterable[int], stop: Set[int] = frozenset()) -> list[int]:
        """Rows inside the innermost loops that `roots` need, in order; not looking behind `stop`."""
        return self.passes.closure(roots, stop)

    def roots(self, phase: int) -> list[int]:
        """Rows that the pass of `phase` must produce inside the loops."""
        return self.passes.roots(phase)

    @property
    def n_passes(self) -> int:
        """Passes over the innermost loops."""
        return self.passes.count

    def _only_inside(self) -> set[int]:
        """Loads before the reduced loops that serve nothing outside: without a turn there may be no element."""
        pending = [m for s in self.plan.stores if not self.store_is_full(s) for m in (s.row, *address_rows(s.address))]
        outside: set[int] = set()
        while pending:
            n = pending.pop()
            if n not in outside:
                outside.add(n)
                pending += self.deps(n)
        loads = {n for n, row in enumerate(self.plan.rows) if row.op == "load" and not self.is_full(n)}
        return loads - outside if self.reduced else set()

    def ref(self, n: int) -> str:
        """How a row's value is written where it is used."""
        row = self.plan.rows[n]
        if row.op == "const":
            return constant_text(row)
        return f"t{n}[l]" if n in self.arrays else f"t{n}"

    def kind(self, n: int) -> str:
        """The C++ type of row `n`."""
        return storage_type(self.moved[n]) if n in self.moved else CPP_TYPES[self.plan.rows[n].dtype]

    def loaded(self, n: int) -> str:
        """What the load `n` reads, as a value."""
        buffer, (address,) = self.plan.rows[n].attr
        text = self.parts.get(n) or self._element(buffer, address)
        return text if n in self.moved else cpp_load(self.dtypes[buffer], text)

    def index(self, e: Expr, of: str = "place") -> str:
        """An index expression, lane arrays subscripted; `of`: see `cpp_expr`."""
        if of == "place":
            e = self._with_hidden_step(e)
        name = lambda s: self.ref(int(s.name[1:])) if s.kind == INDIRECT else cpp_name(s)  # noqa: E731
        return cpp_expr(e, name, of, self.extents)

    def _with_hidden_step(self, address: Expr) -> Expr:
        """`address` with a name for a large constant distance between neighbouring lanes."""
        if self.vector is None:
            return address
        own = (self.vector.sym,)
        step = next((c for monomial, c in address.terms if monomial == own), 0)
        if abs(step) <= MOST_INTERLEAVED and abs(step) not in self._gapped_steps:
            return address
        self.hidden.add(abs(step))
        name = symbol(f"far{abs(step)}", LOOP)
        return address + expr(self.vector.sym) * ((name if step > 0 else -name) - step)

    @functools.cached_property
    def _gapped_steps(self) -> frozenset[int]:
        """Distances between neighbouring lanes of many stores that leave some elements between them out."""
        assert self.vector is not None
        own = (self.vector.sym,)
        steps = [(s.buffer, abs(c)) for s in self.plan.stores for monomial, c in s.address.terms if monomial == own]
        counts = Counter(steps)
        return frozenset(step for (_, step), n in counts.items() if MOST_OF_A_GROUP < n < step)

    def value(self, n: int) -> str:
        """The right-hand side of row `n`."""
        row = self.plan.rows[n]
        args = [self.ref(a) for a in row.args]
        if n in self.staged:
            assert self.tile_axis is not None and self.vector is not None
            t, v = self.tile_axis.sym.name, self.vector.sym.name
            return f"tile{self.staged[n]}[({t} - r0) * {TILE_STRIDE} + {v} - v0]"
        if n in self.pieces:
            return self.pieces[n]
        if row.op == "load":
            text = self.loaded(n)
            if n in self.parts:
                return text
            if n in self.guarded:
                args = [f"(!empty & {args[0]})" if args else "!empty"]
            if args and row.dtype is torch.bool:  # g++ makes vectors of a choice between numbers, not between bools
                return f"({args[0]} ? (u8){text} : (u8)0) != 0"
            zero = f"({self.kind(n)})0" if n in self.moved else cpp_constant(0, row.dtype)
            return f"{args[0]} ? {text} : {zero}" if args else text
        if n in self.moved:
            args = [self._bits(a, self.moved[n]) for a in row.args]
            return f"{args[0]} ? {args[1]} : {args[2]}" if row.traits.chooses else args[0]
        if row.traits.chooses and self._is_zero_already(row):
            return args[1]
        if row.op == "scalar":
            return f"f[{self.bindings.floats[row.attr]}]"
        if row.op == "index":
            return self.index(row.attr, "floor")
        if row.op == "to_dtype":
            text = cpp_convert(row.attr, row.dtype, args[0])
            return f"{args[0]} == 0 ? 0 : {text}" if self._drops_fraction(row) else text
        if row.op == "round_to":
            tame = row.args[0] in self.tame
            return args[0] if self.is_exact(row.args[0], row.attr) else cpp_round(row.attr, args[0], tame)
        if row.traits.wins and row.dtype.is_floating_point and not self.is_full(row.args[0]):
            return f"FUSER_BOUND({args[0]}, {row.traits.wins}, {args[1]})"
        if row.traits.sign == "/" and row.dtype is torch.float32 and self.is_full(n):
            return self._quotient(row, *args)
        return cpp_cell(row.op, self.plan.rows[row.args[row.traits.typed]].dtype, *args)

    def _quotient(self, row: Row, dividend: str, divisor: str) -> str:
        """A division in a loop: by a constant it is two products, if the machine adds one of them without rounding."""
        by = self.plan.rows[row.args[1]]
        found = factors(float(by.attr)) if by.op == "const" and self.machine.fma else None
        if found is None:
            return f"{dividend} / {divisor}"
        high, low = (cpp_constant(f, torch.float32) for f in found)
        return f"FUSER_FMAF({dividend}, {high}, {dividend} * {low})"

    def _is_zero_already(self, row: Row) -> bool:
        """Whether a choice between a load and 0 is the load's own, which is 0 where its condition does not hold."""
        load, other = (self.plan.rows[a] for a in row.args[1:])
        return load.op == "load" and load.args == row.args[:1] and other.op == "const" and other.attr in _ZEROS

    def _drops_fraction(self, row: Row) -> bool:
        """Whether a number may lose its fraction by integers: g++ 12 takes that for `trunc`, which keeps -0.0."""
        if not row.dtype.is_floating_point or self.plan.rows[row.args[0]].dtype.is_floating_point:
            return False
        pending, seen = [row.args[0]], set[int]()
        while pending:
            n = pending.pop()
            now = self.plan.rows[n]
            if n in seen or now.dtype.is_floating_point or now.dtype is torch.bool:
                continue
            if now.op == "to_dtype" and self.plan.rows[now.args[0]].dtype.is_floating_point:
                return True
            seen.add(n)
            pending += now.args
        return False

    def _bits(self, n: int, dtype: torch.dtype) -> str:
        row = self.plan.rows[n]
        if row.op != "const" or row.dtype is torch.bool:  # a number; or a condition
            return self.ref(n)
        return f"(u16){bits_of(float(row.attr), dtype)}"

    def _element(self, buffer: str, address: Expr) -> str:
        """An element in memory. One of less than a word that lanes look up is gathered."""
        at, dtype = self.index(address), self.dtypes[buffer]
        if self.checked or not self._is_narrow_gather(buffer, address) or self._narrow_gathers > MOST_GATHERED:
            return f"{buffer}[{at}]"
        return f"fuser_gather_{storage_type(dtype)}({buffer}, {at})"

    def _is_narrow_gather(self, buffer: str, address: Expr) -> bool:
        return self.dtypes[buffer].itemsize < 4 and any(self.is_full(m) for m in address_rows(address))

    @functools.cached_property
    def _narrow_gathers(self) -> int:
        """Loads of less than a word that lanes look up."""
        loads = (r.attr for r in self.plan.rows if r.op == "load")
        return sum(self._is_narrow_gather(buffer, address) for buffer, (address,) in loads)

    def declare(self, n: int, target: str | None = None) -> None:
        """Statements that compute row `n` into `t<n>` (or assign to `target`)."""
        row = self.plan.rows[n]
        if row.op in ("const", "pair"):
            return
        left = target or f"const {self.kind(n)} t{n}"
        if row.op == "indirect":
            self._declare_indirect(n, row, left)
            return
        self.out.add(f"{left} = {self.value(n)};")

    def _declare_indirect(self, n: int, row: Row, left: str) -> None:
        size, checked = row.attr
        source, bound = self.ref(row.args[0]), self.index(size, "floor")
        self.out.add(f"const i64 w{n} = {source} + ({source} < 0 ? (i64)({bound}) : (i64)0);")
        self.out.add(f"const bool o{n} = (w{n} < 0) | (w{n} >= (i64)({bound}));")
        if checked:
            masked = f" & {self.ref(row.args[1])}" if len(row.args) > 1 else ""
            self.out.add(f"bad |= (int)(o{n}{masked});")
        self.out.add(f"{left} = o{n} ? (i64)0 : w{n};")

    def store(self, s: Store) -> None:
        """The statement of a store."""
        place = self.streamed.get(s) or f"{s.buffer}[{self.index(s.address)}]"
        dtype, n = self.dtypes[s.buffer], s.row if s.row in self.moved else self.unrounded(s)
        if s in self.results:
            self.out.add(f"{self.results[s]} = {self.ref(n)};")
            return
        value = self.ref(n) if n in self.moved else cpp_store(dtype, self.ref(n), self.is_exact(n, dtype))
        self.out.add(f"{place} = {value};")

    def unrounded(self, s: Store) -> int:
        """The row to store: storing rounds, so what was rounded for it need not be, where its source is at hand."""
        row = self.plan.rows[s.row]
        if row.op != "round_to" or row.attr is not self.dtypes[s.buffer] or not self.is_full(row.args[0]):
            return s.row
        return row.args[0] if row.args[0] not in self.kept_rows and s.row not in self.kept_rows else s.row

    def open_function(self, suffix: str = "") -> str:
        """The function's head: pointers, sizes, what depends on no axis."""
        self.out = Lines()
        self.emitted, self.arrays = set(), set()
        name = self.name + suffix
        if self.checked:
            self.out.add(f'extern "C" {{ i64 {name}_bounds[3] = {{}}; }}')
        self.out.open(f'extern "C" void {name}({SIGNATURE})')
        self.hidden, self.head = set(), len(self.out.lines)
        stored = {s.buffer for s in self.plan.stores} | {p.name for p in self.partials}
        names = [(b, d) for b, d in self.plan.buffers] + [(p.name, p.dtype) for p in self.partials]
        for buffer, dtype in names:
            kind = storage_type(dtype)
            const = "" if buffer in stored else "const "
            at = self.bindings.pointers[buffer]
            if self.bindings.counts is not None:
                count = self.bindings.counts.get(buffer) or next(p.size for p in self.partials if p.name == buffer)
                self.out.add(checked_pointer(const + kind, buffer, at, count, self.bindings.slots, name))
                continue
            self.out.add(f"{const}{kind}* __restrict {buffer} = ({const}{kind}*)ptrs[{at}];")
        for sym in sorted(self._symbols()):
            self.out.add(f"const i64 {cpp_name(sym)} = s[{self.bindings.slots[sym]}];")
        for a in self.plan.axes:
            self.out.add(f"const i64 n_{a.sym.name} = {cpp_expr(a.size)};")
        if self.guarded:
            none = " | ".join(f"(n_{a.sym.name} == 0)" for a in self.red_axes)
            self.out.add(f"const bool empty = {none};")
        if self.has_checks:
            self.out.add("int bad = 0;")
            for row in self.plan.rows:
                if is_checked(row) and len(row.args) == 1:
                    self.out.add(f"if (({self.index(row.attr[0], 'floor')}) <= 0) {{ *status = 1; return; }}")
        return name

    def _symbols(self) -> set[Sym]:
        own = {a.sym for a in self.plan.axes}
        exprs = [e for r in self.plan.rows for e in row_exprs(r)] + [s.address for s in self.plan.stores]
        exprs += [a.size for a in self.plan.axes] + [p.size for p in self.partials]
        return {s for e in exprs for s in symbols(e) if s.kind != INDIRECT and s not in own}

    def close_function(self) -> str:
        """The function's tail; returns the text."""
        if self.has_checks:
            first = f" && *status != {OUT_OF_BOUNDS}" if self.checked else ""
            self.out.add(f"if (bad{first}) *status = 1;")
        self.out.close()
        self.out.lines[self.head : self.head] = [f"  const i64 far{n} = hidden({n});" for n in sorted(self.hidden)]
        return self.out.text()

    def open_units(self, digits: Sequence[tuple[str, str]]) -> None:
        """The loop over units: `digits` are (variable, size), the last running fastest."""
        self.out.add("i64 unit = begin;")
        for at, (variable, size) in reversed(list(enumerate(digits))):
            last = at == 0
            text = f"i64 {variable} = unit;" if last else f"i64 {variable} = unit % ({size}); unit /= {size};"
            self.out.add(text)
        self.out.open("for (i64 u = begin; u < end; ++u)")

    def close_units(self, digits: Sequence[tuple[str, str]]) -> None:
        """Step to the next unit."""
        text = ""
        for at, (variable, size) in enumerate(digits):
            text = f"++{variable};" if at == 0 else f"if (++{variable} == ({size})) {{ {variable} = 0; {text} }}"
        if text:
            self.out.add(text)
        self.out.close()

    def emit_unit_rows(self, roots: Iterable[int], phase: int) -> None:
        """Rows outside the innermost loops that `roots` need: scalars of the unit, lane arrays of a column nest."""
        wanted: set[int] = set()
        pending = list(roots)
        while pending:
            n = pending.pop()
            if n in wanted:
                continue
            wanted.add(n)
            pending += self.deps(n)
        lanes = []
        for n in sorted(wanted):
            row = self.plan.rows[n]
            if n in self.emitted or self.is_full(n) or self.plan.phases[n] > phase or row.op == "reduced":
                continue
            self.emitted.add(n)
            if self.is_lane(n) and row.op not in ("const", "pair"):
                lanes.append(n)
            else:
                self.declare(n)
        self._lane_rows(lanes)

    def _lane_rows(self, rows: Sequence[int]) -> None:
        """Rows with a value for each lane, all in one loop: the compiler takes its time over every loop."""
        for n in rows:
            self.out.add(f"{CPP_TYPES[self.plan.rows[n].dtype]} t{n}[{self.lanes}];")
        if rows:
            self.arrays.update(rows)
            self.open_lanes()
            for n in rows:
                self.declare(n, f"t{n}[l]")
            self.out.close()

    def pragma(self) -> str:
        """The vectorisation pragma. To reduce what the loop leaves alone would cost more than a short row."""
        return "#pragma omp simd reduction(|:bad)" if self.checks_inside else "#pragma omp simd"

    @property
    def checks_inside(self) -> bool:
        """Whether an index is checked in an innermost loop."""
        rows = enumerate(self.plan.rows)
        return any(is_checked(r) and (self.is_full(n) or self.is_lane(n)) for n, r in rows)

    def open_lanes(self, count: str = "count") -> None:
        """A loop over the lanes of a column nest's block, or as many."""
        assert self.vector is not None
        self.out.add(self.pragma())
        self.out.open(f"for (i64 l = 0; l < {count}; ++l)")
        self.out.add(f"const i64 {self.vector.sym.name} = v0 + l;")

    def work(self) -> Expr:
        """Operations of the whole nest."""
        cost = max(1, sum(max(1, row_cost(r)) for r in self.plan.rows) // 4)
        return product(a.size for a in self.plan.axes) * cost

    def outer_roots(self, phase: int) -> list[int]:
        """Rows that stores outside the innermost loops need in this phase."""
        out = []
        for s in self.plan.stores:
            if s.phase == phase and not self.store_is_full(s):
                out += [s.row, *address_rows(s.address)]
        return out

    def emit_constants(self) -> None:
        """Rows that vary along no axis."""
        for n, row in enumerate(self.plan.rows):
            if not self.plan.varies[n] and row.op != "reduced" and self.plan.phases[n] == 0:
                self.emitted.add(n)
                self.declare(n)

    def emit_inner(self, phase: int, loads_kept: bool = True) -> None:
        """The body of the innermost loops of a pass: rows, row buffers, stores, accumulation."""
        available = self._available(phase)
        for n in self.closure(self.roots(phase), available):
            if n in available:
                kept = self.hoisted.get(n) or f"kept{self.kept_rows[n]}[{self.kept_at()}]"
                self.out.add(f"const {self.kind(n)} t{n} = {kept};")
                continue
            self.declare(n)
            if n in self.kept_rows and self.first_pass(n) == phase:
                self.out.add(f"kept{self.kept_rows[n]}[{self.kept_at()}] = t{n};")
        for s in self.plan.stores:
            if s.phase == phase and self.store_is_full(s):
                self.store(s)
        for r in self.plan.reductions:
            if r.phase == phase:
                self.accumulate(r)

    def accumulate(self, r: Reduce) -> None:
        """Fold the current value of a reduction into its accumulator; reducing nests say how."""
        raise NotImplementedError

    def lines_read(self, rows: Iterable[int]) -> list[tuple[str, Expr]]:
        """Buffers, and where in them, that loads among `rows` read line by line along the vector axis."""
        out: dict[tuple[str, Expr], None] = {}
        for n in rows if not self.checked else ():
            row = self.plan.rows[n]
            if row.op == "load" and not row.args and self.step(row.attr[1][0]) == ONE:
                out[(row.attr[0], row.attr[1][0])] = None
        return list(out)

    def first_pass(self, n: int) -> int:
        """The first pass whose loops compute row `n`."""
        return self.passes.first(n)

    def kept_at(self) -> str:
        """The place of the current point in a row buffer."""
        e = expr(0)
        for a in self.red_axes:
            e = e * symbol(f"n_{a.sym.name}") + expr(a.sym)
        return cpp_expr(e) if self.is_row else f"({cpp_expr(e)}) * {self.lanes} + l"

    def emit_outer_stores(self, phase: int) -> None:
        """Stores outside the innermost loops."""
        stores = [s for s in self.plan.stores if s.phase == phase and not self.store_is_full(s)]
        if not stores:
            return
        self.emit_unit_rows(self.outer_roots(phase), phase)
        if self.is_column:
            self.open_lanes()
        for s in stores:
            self.store(s)
        if self.is_column:
            self.out.close()

    def _available(self, phase: int) -> set[int]:
        """Rows inside the loops of a pass that are in memory by then."""
        return {n for n in self.kept_rows if self.first_pass(n) < phase} | set(self.hoisted)

    def closure_deps(self, phase: int) -> list[int]:
        """Rows outside the loops that the pass needs."""
        available = self._available(phase)
        inner = self.closure(self.roots(phase), available)
        stores = [s for s in self.plan.stores if s.phase == phase and self.store_is_full(s)]
        direct = [n for s in stores for n in address_rows(s.address)]
        return [d for n in inner if n not in available for d in self.deps(n)] + self.roots(phase) + direct


def storage_type(dtype: torch.dtype) -> str:
    """The C++ type of elements in memory."""
    return "u8" if dtype is torch.bool else CPP_TYPES[dtype]


def constant_text(row: Row) -> str:
    """The C++ constant of a `const` row."""
    text: str = row.attr
    if row.dtype is torch.bool:
        return cpp_constant(text == "True", row.dtype)
    return cpp_constant(float(text) if row.dtype.is_floating_point else int(text), row.dtype)
