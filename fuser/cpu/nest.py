"""What all loop nests of a kernel plan share: where each row is computed, values, units, rows outside the loops."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Sequence, Set

import torch

from fuser.cpu.exact import exact_rows, tame_rows
from fuser.cpu.intervals import near_rows
from fuser.cpu.moves import bits_of
from fuser.cpu.quotients import factors
from fuser.cpu.records import Bindings, Partial
from fuser.cpu.text import cpp_name
from fuser.cpu.vir import nodes as ir
from fuser.cpu.vir.builder import Builder
from fuser.ir.loop_body import LOW_PRECISION, Row, is_checked, row_exprs
from fuser.ir.ranges import NO_LOOPS
from fuser.ir.sizes import INDIRECT, LOOP, ONE, Expr, Sym, coefficient, expr, product, symbol, symbols
from fuser.kernel_spec import OUT_OF_BOUNDS
from fuser.ops import CPP_TYPES
from fuser.scheduler.kernel_plan import Axis, KernelPlan, Passes, Reduce, Store, address_rows
from fuser.scheduler.nodes import row_cost

_ZEROS = ("0.0", "0", "False")
TILE_COLUMNS = 128
TILE_STRIDE = TILE_COLUMNS + 16  # the rows of a tile start in different sets of the cache
ROWS_AHEAD = 8  # distance of prefetches, in rows of a tile or of a block of columns
# Largest constant stride between lanes that g++ is shown. g++ treats loads at a constant stride as one group of
# interleaved elements, and its compile time grows with the square of the stride.
MOST_INTERLEAVED = 16
MOST_OF_A_GROUP = 4  # most stores of a group with gaps: g++ took ten seconds for 11 of 12 float16
# Most loads of less than a word that a loop gathers by vectors. A vector gather of bytes is some 20 instructions for
# eight lanes, and 64 lanes are taken at once: many of them, as windows read, are faster as scalar loads.
MOST_GATHERED = 4


class Nest:
    """Writes the functions of one plan."""

    def __init__(self, plan: KernelPlan, name: str, bindings: Bindings) -> None:
        self.plan, self.name, self.bindings = plan, name, bindings
        self.machine = bindings.machine
        self.line = self.machine.line_bytes
        self.dtypes = dict(plan.buffers)
        self.extents = {a.sym: a.size for a in plan.axes}
        self.checked = bindings.counts is not None
        self.reduced = {a.sym for a in plan.axes if a.reduced}
        self.kept = [a for a in plan.axes if not a.reduced]
        self.red_axes = [a for a in plan.axes if a.reduced]
        self.vector = next((a for a in plan.axes if a.sym == plan.vector), None)
        self.is_row = bool(self.reduced) and self.vector is not None and self.vector.reduced
        self.is_column = bool(self.reduced) and not self.is_row
        self.constant: frozenset[int] = frozenset()  # rows that do not change in a segment of the loop (segments.py)
        self.passes = plan.passes
        self.parts: dict[int, ir.Value] = {}  # masked loads of such a segment -> what they read
        self.lanes = self._choose_lanes()
        self.out = Builder()
        self.emitted: set[int] = set()  # rows available in the unit (scalars, or lane arrays of a column nest)
        self.arrays: set[int] = set()  # rows that are lane arrays
        self.kept_rows: dict[int, int] = {}  # row -> number of its row buffer
        self.hoisted: dict[int, ir.Value] = {}  # rows computed before the loops -> their stored values
        self.has_checks = any(is_checked(r) for r in plan.rows)
        self.partials: list[Partial] = []
        self.staged: dict[int, int] = {}  # transposed loads -> number of their tile
        self.tile_axis: Axis | None = None
        self.guarded = self._only_inside()
        self.pieces: dict[int, ir.Value] = {}  # loads of float16 in the open pieces -> their float32 copies
        self.results: dict[Store, ir.At] = {}  # stores of float16 in the open pieces -> their float32 (halves.py)
        self._exact: dict[torch.dtype, frozenset[int]] = {}
        self.moved: dict[int, torch.dtype] = {}  # rows that hold the bits of a 16-bit float (moves.py)
        self.hidden: set[int] = set()  # constants that the function keeps from the compiler
        self.scope = ir.Scope(self.ref, self.extents)
        self.function_name = ""

    def _choose_lanes(self) -> int:
        if self.vector is None:
            return 1
        if self.is_column:  # later passes find the block of the first in cache
            most = 256 if self.passes.loops == 1 or self.plan.split else 128
            return next((n for n in (256, 128) if n <= min(most, self.vector.hint)), 64)
        return 64 if self.vector.hint >= 64 else 16

    def is_exact(self, n: int, dtype: torch.dtype) -> bool:
        """Whether the values of row `n` are exact in the 16-bit float `dtype`."""
        if dtype not in self._exact:
            self._exact[dtype] = exact_rows(self.plan, dtype) if dtype in LOW_PRECISION else frozenset()
        return n in self._exact[dtype]

    @functools.cached_property
    def tame(self) -> frozenset[int]:
        """Rows whose NaNs have zeros in their low bits."""
        return tame_rows(self.plan)

    @functools.cached_property
    def near(self) -> frozenset[int]:
        """Rows whose arguments lie in the interval that a helper of their op is for."""
        return near_rows(self.plan)

    def hold(self, rows: frozenset[int]) -> None:
        """Take `rows` for constant in the innermost loops."""
        self.constant = rows
        self.passes = Passes(self.plan, rows)

    def is_full(self, n: int) -> bool:
        """Whether row `n` is computed inside the innermost loops."""
        return n in self.passes.full

    def is_lane(self, n: int) -> bool:
        """Whether row `n` of a column nest has one value per lane, outside the reduced loops."""
        return self.is_column and not self.is_full(n) and self.plan.vector in self.plan.varies[n]

    def store_is_full(self, s: Store) -> bool:
        """Whether a store happens inside the innermost loops."""
        return s in self.passes.full_stores

    def step(self, address: Expr) -> Expr | None:
        """The stride of an address along the vector axis, in elements; None if the address has a computed index."""
        if self.vector is None or any(s.kind == INDIRECT for s in symbols(address)):
            return None
        return coefficient(address, self.vector.sym)

    def deps(self, n: int) -> tuple[int, ...]:
        """Rows that row `n` needs."""
        return self.passes.deps[n]

    def closure(self, roots: Iterable[int], stop: Set[int] = frozenset()) -> list[int]:
        """Rows inside the innermost loops that `roots` need, in order; not looking behind `stop`."""
        return self.passes.closure(roots, stop)

    def _only_inside(self) -> set[int]:
        """Loads before the reduced loops that only these use: if the loops have no iterations, there may be no element.

        An ordered nest has no units then, so nothing is loaded.
        """
        if not self.reduced or self.plan.ordered is not None:
            return set()
        loads = {n for n, row in enumerate(self.plan.rows) if row.op == "load" and not self.is_full(n)}
        return loads.difference(*(p.outer for p in self.passes))

    def ref(self, n: int) -> ir.Value:
        """A row's value where it is used."""
        row = self.plan.rows[n]
        if row.op == "const":
            return constant(row)
        return ir.Name(f"t{n}")["l"] if n in self.arrays else ir.Name(f"t{n}")

    def kind(self, n: int) -> str:
        """The C++ type of row `n`."""
        return storage_type(self.moved[n]) if n in self.moved else CPP_TYPES[self.plan.rows[n].dtype]

    def loaded(self, n: int) -> ir.Value:
        """What the load `n` reads, as a value."""
        buffer, (address,) = self.plan.rows[n].attr
        element = self.parts.get(n) or self._element(buffer, address)
        return element if n in self.moved else ir.Decode(self.dtypes[buffer], element)

    def index(self, e: Expr, of: str = "place") -> ir.Value:
        """An index expression, lane arrays subscripted; `of`: see `cpp_expr`."""
        return ir.Offset(self._with_hidden_step(e) if of == "place" else e, of, self.scope)

    def address(self, buffer: str, e: Expr, tile: str = "") -> ir.Value:
        """A pointer to an element of a buffer."""
        return ir.Address(ir.Name(buffer), self.index(e), tile)

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

    def in_tile(self, n: int) -> ir.At:
        """Where a transposed load is staged."""
        assert self.tile_axis is not None and self.vector is not None
        t, v = self.tile_axis.sym.name, self.vector.sym.name
        return ir.Name(f"tile{self.staged[n]}")[(ir.Name(t) - "r0") * TILE_STRIDE + v - "v0"]

    def value(self, n: int) -> ir.Value:
        """The right-hand side of row `n`."""
        row = self.plan.rows[n]
        args = [self.ref(a) for a in row.args]
        if n in self.staged:
            return self.in_tile(n)
        if n in self.pieces:
            return self.pieces[n]
        if row.op == "load":
            loaded = self.loaded(n)
            if n in self.parts:
                return loaded
            if n in self.guarded:
                some = ir.Unary("!", ir.Name("empty"))
                args = [some & args[0] if args else some]
            if args and row.dtype is torch.bool:  # g++ vectorises a select of numbers, not of bools
                return ir.Select(args[0], ir.Cast("u8", loaded), ir.Cast("u8", ir.Number(0))).differs(0)
            zero = ir.Cast(self.kind(n), ir.Number(0)) if n in self.moved else ir.Number(0, row.dtype)
            return ir.Select(args[0], loaded, zero) if args else loaded
        if n in self.moved:
            args = [self._bits(a, self.moved[n]) for a in row.args]
            return ir.Select(*args) if row.traits.chooses else args[0]
        if row.traits.chooses and self._is_zero_already(row):
            return args[1]
        if row.op == "scalar":
            return ir.Slot("f", self.bindings.floats[row.attr])
        if row.op == "index":
            return self.index(row.attr, "floor")
        if row.op == "to_dtype":
            converted = ir.Convert(row.attr, row.dtype, args[0])
            return ir.Select(args[0].same(0), ir.Number(0), converted) if self._drops_fraction(row) else converted
        if row.op == "round_to":
            tame = row.args[0] in self.tame
            return args[0] if self.is_exact(row.args[0], row.attr) else ir.Round(row.attr, args[0], tame)
        if row.traits.wins and row.dtype.is_floating_point and not self.is_full(row.args[0]):
            return ir.Bound(row.traits.wins, *args)
        if row.traits.sign == "/" and row.dtype is torch.float32 and self.is_full(n):
            return self._quotient(row, *args)
        table = "near" if n in self.near else "op"
        return ir.Op(table, row.op, self.plan.rows[row.args[row.traits.typed]].dtype, tuple(args))

    def _quotient(self, row: Row, dividend: ir.Value, divisor: ir.Value) -> ir.Value:
        """A division in a loop. By a constant it is two products, if the machine has a fused multiply-add."""
        by = self.plan.rows[row.args[1]]
        found = factors(float(by.attr)) if by.op == "const" and self.machine.fma else None
        if found is None:
            return ir.Binary("/", dividend, divisor)
        high, low = (ir.Number(f, torch.float32) for f in found)
        return ir.Fma(dividend, high, dividend * low)

    def _is_zero_already(self, row: Row) -> bool:
        """Whether a select of a masked load and 0 has the load's own mask: the load is 0 there already."""
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

    def _bits(self, n: int, dtype: torch.dtype) -> ir.Value:
        row = self.plan.rows[n]
        if row.op != "const" or row.dtype is torch.bool:  # a number; or a condition
            return self.ref(n)
        return ir.Cast("u16", ir.Number(bits_of(float(row.attr), dtype)))

    def _element(self, buffer: str, address: Expr) -> ir.Value:
        """An element in memory. One of less than a word that lanes look up is gathered."""
        at, dtype = self.index(address), self.dtypes[buffer]
        if self.checked or not self._is_narrow_gather(buffer, address) or self._narrow_gathers > MOST_GATHERED:
            return ir.Name(buffer)[at]
        return ir.Gather(storage_type(dtype), ir.Name(buffer), at)

    def _is_narrow_gather(self, buffer: str, address: Expr) -> bool:
        return self.dtypes[buffer].itemsize < 4 and any(self.is_full(m) for m in address_rows(address))

    @functools.cached_property
    def _narrow_gathers(self) -> int:
        """Loads of less than a word that lanes look up."""
        loads = (r.attr for r in self.plan.rows if r.op == "load")
        return sum(self._is_narrow_gather(buffer, address) for buffer, (address,) in loads)

    def declare(self, n: int, target: ir.Value | None = None) -> None:
        """Statements that compute row `n` into `t<n>` (or assign to `target`)."""
        row = self.plan.rows[n]
        if row.op in ("const", "pair"):
            return
        value = self._wrapped(n, row) if row.op == "indirect" else self.value(n)
        if target is not None:
            self.out.set(target, value)
        else:
            self.out.let(self.kind(n), f"t{n}", value)

    def _wrapped(self, n: int, row: Row) -> ir.Value:
        """An index that a tensor holds: negative ones count from the end, those outside become 0 and are reported."""
        size, checked = row.attr
        source, zero = self.ref(row.args[0]), ir.Cast("i64", ir.Number(0))
        bound, wrapped, outside = ir.Cast("i64", self.index(size, "floor")), ir.Name(f"w{n}"), ir.Name(f"o{n}")
        self.out.let("i64", wrapped.name, source + ir.Select(source < 0, bound, zero))
        self.out.let("bool", outside.name, (wrapped < 0) | (wrapped >= bound))
        if checked:
            masked = outside & self.ref(row.args[1]) if len(row.args) > 1 else outside
            self.out.set("bad", ir.Cast("int", masked), "|")
        return ir.Select(outside, zero, wrapped)

    def target(self, s: Store) -> ir.At:
        """Where a store goes."""
        return ir.At(ir.Name(s.buffer), self.index(s.address), self.tile_of(s))

    def tile_of(self, s: Store) -> str:
        """The name of the tile that may stage a store; empty if none does."""
        return ""

    def store(self, s: Store) -> None:
        """The statement of a store."""
        dtype, n = self.dtypes[s.buffer], s.row if s.row in self.moved else self.unrounded(s)
        if s in self.results:
            self.out.set(self.results[s], self.ref(n))
            return
        value = self.ref(n) if n in self.moved else ir.Encode(dtype, self.ref(n), self.is_exact(n, dtype))
        self.out.set(self.target(s), value)

    def unrounded(self, s: Store) -> int:
        """The row to store: storing rounds, so what was rounded for it need not be, where its source is at hand."""
        row = self.plan.rows[s.row]
        if row.op != "round_to" or row.attr is not self.dtypes[s.buffer] or not self.is_full(row.args[0]):
            return s.row
        return row.args[0] if row.args[0] not in self.kept_rows and s.row not in self.kept_rows else s.row

    def open_function(self, suffix: str = "") -> None:
        """The function's head: pointers, sizes, what depends on no axis."""
        self.out, self.function_name = Builder(), self.name + suffix
        self.emitted, self.hidden = set(), set()
        self.arrays = arrays = set[int]()
        self.scope = ir.Scope(lambda n: ir.Name(f"t{n}")["l"] if n in arrays else ir.Name(f"t{n}"), self.extents)
        stored = {s.buffer for s in self.plan.stores} | {p.name for p in self.partials}
        names = [(b, d) for b, d in self.plan.buffers] + [(p.name, p.dtype) for p in self.partials]
        for buffer, dtype in names:
            kind = storage_type(dtype)
            checked = None
            if self.bindings.counts is not None:
                count = self.bindings.counts.get(buffer) or next(p.size for p in self.partials if p.name == buffer)
                scope = ir.Scope(_no_row, NO_LOOPS, self.bindings.slots)
                checked = (ir.Offset(count, "floor", scope), self.function_name)
            at = ir.Slot("ptrs", self.bindings.pointers[buffer])
            self.out.add(ir.Pointer(kind, buffer, at, buffer not in stored, checked))
        for sym in sorted(self._symbols()):
            self.out.let("i64", cpp_name(sym), ir.Slot("s", self.bindings.slots[sym]))
        for a in self.plan.axes:
            self.out.let("i64", f"n_{a.sym.name}", size(a.size))
        if self.guarded:
            none = [ir.Name(f"n_{a.sym.name}").same(0) for a in self.red_axes]
            self.out.let("bool", "empty", functools.reduce(ir.Value.__or__, none))
        if self.has_checks:
            self.out.var("int", "bad", 0)
            for row in self.plan.rows:
                if is_checked(row) and len(row.args) == 1:
                    with self.out.block(ir.If(self.index(row.attr[0], "floor") <= 0)):
                        self.out.set(STATUS, 1)
                        self.out.add(ir.Return())

    def _symbols(self) -> set[Sym]:
        own = {a.sym for a in self.plan.axes}
        exprs = [e for r in self.plan.rows for e in row_exprs(r)] + [s.address for s in self.plan.stores]
        exprs += [a.size for a in self.plan.axes] + [p.size for p in self.partials]
        return {s for e in exprs for s in symbols(e) if s.kind != INDIRECT and s not in own}

    def close_function(self) -> ir.Kernel:
        """The function's tail; returns the function."""
        if self.has_checks:
            bad: ir.Value = ir.Name("bad")
            bad = ir.Binary("&&", bad, STATUS.differs(OUT_OF_BOUNDS)) if self.checked else bad
            with self.out.block(ir.If(bad)):
                self.out.set(STATUS, 1)
        far = (ir.Let("i64", f"far{n}", ir.call("hidden", n)) for n in sorted(self.hidden))
        return ir.Kernel(self.function_name, (*far, *self.out.statements), self.checked)

    def open_units(self, digits: Iterable[tuple[str, ir.Value]]) -> None:
        """The loop over units: `digits` are (variable, size), the last running fastest."""
        self.out.open(ir.Units(tuple(digits)))

    def emit_unit_rows(self, rows: Iterable[int]) -> None:
        """Rows outside the innermost loops, if not there yet: scalars of the unit, lane arrays of a column nest."""
        lanes = []
        for n in rows:
            if n in self.emitted:
                continue
            self.emitted.add(n)
            if self.is_lane(n) and self.plan.rows[n].op not in ("const", "pair"):
                lanes.append(n)
            else:
                self.declare(n)
        self._lane_rows(lanes)

    def _lane_rows(self, rows: Sequence[int]) -> None:
        """Rows with a value for each lane, all in one loop: the compiler takes its time over every loop."""
        for n in rows:
            self.out.scratch(CPP_TYPES[self.plan.rows[n].dtype], f"t{n}", self.lanes)
        if rows:
            self.arrays.update(rows)
            self.open_lanes()
            for n in rows:
                self.declare(n, ir.Name(f"t{n}")["l"])
            self.out.close()

    def digits(self, axes: Iterable[Axis]) -> list[tuple[str, ir.Value]]:
        """The digits of a unit's number along some axes."""
        return [(a.sym.name, ir.Name(f"n_{a.sym.name}")) for a in axes]

    def open_range(self, name: str, low: ir.Value, count: int, size: str) -> None:
        """Declare a range of at most `count` indices of an axis: its first index, and the one after its last."""
        first = ir.Name(f"{name}0")
        self.out.let("i64", first.name, low)
        self.out.let("i64", f"{name}1", ir.least(first + count, size))

    def open_chunks(self, chunks: Expr, axis: Axis) -> None:
        """Declare the number of chunks of an axis, and the length of a chunk."""
        self.out.let("i64", "chunks", size(chunks))
        count, length = ir.Name("chunks"), ir.Name(f"n_{axis.sym.name}")
        self.out.let("i64", "each", ir.Select(count, (length + count - 1) // count, ir.Number(0)))

    def open_chunk(self, axis: Axis) -> None:
        """Declare the first index of a chunk, and the one after its last."""
        self.out.let("i64", "from", ir.Name("chunk") * "each")
        self.out.let("i64", "to", ir.least(ir.Name("from") + "each", f"n_{axis.sym.name}"))

    def prefetch(self, buffer: str, address: ir.Value, count: ir.Like, *how: int) -> ir.Block:
        """A loop that asks for each line of `count` elements of a buffer; of element `q`, that is at `address`."""
        step = max(1, self.machine.line_bytes // self.dtypes[buffer].itemsize)
        head = ir.For("q", ir.Number(0), ir.value(count), ir.Number(step))
        return ir.Block(head, (ir.Prefetch(address, how),))

    def simd(self, name: str, low: ir.Like, high: ir.Like) -> ir.For:
        """A vectorised loop. It names a reduction only if it has one: a needless one costs more than a short row."""
        return ir.For(name, ir.value(low), ir.value(high), simd=True, joins="|:bad" if self.checks_inside else "")

    @property
    def checks_inside(self) -> bool:
        """Whether an index is checked in an innermost loop."""
        rows = enumerate(self.plan.rows)
        return any(is_checked(r) and (self.is_full(n) or self.is_lane(n)) for n, r in rows)

    def open_lanes(self, count: ir.Like = "count") -> None:
        """A loop over the lanes of a column nest's block, or as many."""
        assert self.vector is not None
        self.out.open(self.simd("l", 0, count))
        self.out.let("i64", self.vector.sym.name, ir.Name("v0") + "l")

    def work(self) -> Expr:
        """Operations of the whole nest."""
        cost = max(1, sum(max(1, row_cost(r)) for r in self.plan.rows) // 4)
        return product(a.size for a in self.plan.axes) * cost

    def emit_constants(self) -> None:
        """Rows that vary along no axis."""
        for n, row in enumerate(self.plan.rows):
            if not self.plan.varies[n] and row.op != "reduced" and self.plan.phases[n] == 0:
                self.emitted.add(n)
                self.declare(n)

    def emit_inner(self, phase: int) -> None:
        """The body of the innermost loops of a pass: rows, row buffers, stores, accumulation."""
        available, described = self._available(phase), self.passes[phase]
        for n in self.closure(described.roots, available):
            if n in available:
                self.out.let(self.kind(n), f"t{n}", self.hoisted.get(n) or self._kept(n))
                continue
            self.declare(n)
            if n in self.kept_rows and self.passes.first(n) == phase:
                self.out.set(self._kept(n), f"t{n}")
        for s in described.stores:
            self.store(s)
        for r in described.folds:
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

    def _kept(self, n: int) -> ir.At:
        """The current point in a row buffer."""
        e = expr(0)
        for a in self.red_axes:
            e = e * symbol(f"n_{a.sym.name}") + expr(a.sym)
        return ir.Name(f"kept{self.kept_rows[n]}")[size(e) if self.is_row else size(e) * self.lanes + "l"]

    def emit_outer_stores(self, phase: int) -> None:
        """Stores outside the innermost loops."""
        stores = self.passes[phase].after
        if not stores:
            return
        self.emit_unit_rows(self.passes[phase].outer)
        if self.is_column:
            self.open_lanes()
        for s in stores:
            self.store(s)
        if self.is_column:
            self.out.close()

    def _available(self, phase: int) -> set[int]:
        """Rows inside the loops of a pass that are in memory by then."""
        return {n for n in self.kept_rows if self.passes.first(n) < phase} | set(self.hoisted)


def storage_type(dtype: torch.dtype) -> str:
    """The C++ type of elements in memory."""
    return "u8" if dtype is torch.bool else CPP_TYPES[dtype]


def constant(row: Row) -> ir.Number:
    """The constant of a `const` row."""
    text: str = row.attr
    if row.dtype is torch.bool:
        return ir.Number(text == "True", row.dtype)
    return ir.Number(float(text) if row.dtype.is_floating_point else int(text), row.dtype)


def size(e: Expr) -> ir.Value:
    """An integer expression over sizes alone."""
    return ir.Offset(e, "floor", _SIZES)


def _no_row(n: int) -> ir.Value:
    raise AssertionError(f"a size depends on the computed index t{n}")


_SIZES = ir.Scope(_no_row, NO_LOOPS)
STATUS = ir.Unary("*", ir.Name("status"))
