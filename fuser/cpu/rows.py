"""Writes the rows of one function: their values, where each value is kept, stores, and loops."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from fuser.cpu.facts import Facts, size, storage_type
from fuser.cpu.float_rows import bits_of
from fuser.cpu.vir import nodes as ir
from fuser.cpu.vir.builder import Builder
from fuser.ir.loop_body import Row
from fuser.ir.sizes import LOOP, Expr, expr, rows_in, substitute, symbol
from fuser.lazy_dataclasses import dataclass
from fuser.scheduler.kernel_plan import Reduce, Store

Ends = tuple[ir.Value, ir.Value]  # the first index of a loop, and the one after its last
Fold = Callable[[Reduce], None]  # writes how a reduction takes its value at one point
_ZEROS = ("0.0", "0", "False")


@dataclass(frozen=True)
class Place:
    """The value that loops use for a row instead of computing it; `stored`: it is still encoded as in memory."""

    value: ir.Value
    stored: bool = False


@dataclass(frozen=True)
class LoopRange:
    """A loop over `count` elements, at most `length`, from the variable `start` on; `at` is its index from 0."""

    start: str
    at: ir.Value
    length: int
    count: ir.Value


class Rows:
    """Writes the statements of one function for the rows of a plan.

    made: rows already computed outside the loops; arrays: those of them with a value for each lane. places: rows that
    loops read from a prepared place; results: buffers for results that are not stored to memory directly.
    """

    def __init__(self, facts: Facts) -> None:
        self.facts, self.plan, self.out = facts, facts.plan, Builder()
        self.made: set[int] = set()
        self.arrays: set[int] = set()
        self.places: dict[int, Place] = {}
        self.results: dict[Store, ir.At] = {}
        lanes = facts.vector.sym if facts.vector is not None else None
        extents = {a.sym: a.size for a in self.plan.axes}
        self.scope = ir.Scope(_names(self.arrays), extents, None, lanes, facts.scattered_steps)

    @contextmanager
    def found(self, places: Mapping[int, Place], results: Mapping[Store, ir.At] | None = None) -> Iterator[None]:
        """Inside, loops read rows at `places` and write results to `results`."""
        before = self.places, self.results
        self.places, self.results = {**self.places, **places}, {**self.results, **(results or {})}
        yield
        self.places, self.results = before

    @contextmanager
    def of(self, facts: Facts) -> Iterator[None]:
        """Inside, rows are written with `facts`, which differ in the rows that are constant in a segment."""
        before = self.facts, self.made
        self.facts, self.made = facts, self.made | facts.constant
        yield
        self.facts, self.made = before

    # -- values --------------------------------------------------------------------------------------------------------
    def ref(self, n: int) -> ir.Value:
        """A row's value at its use."""
        return self.facts.in_array(n, ir.Name(f"t{n}")["l"]) if n in self.arrays else self.facts.scalar(n)

    def index(self, e: Expr, of: str = "place") -> ir.Value:
        """An index expression; computed indices in lane arrays are subscripted. `of`: see `cpp_expr`."""
        return ir.Offset(e, of, self.scope)

    def address(self, buffer: str, e: Expr) -> ir.Value:
        """A pointer to an element of a buffer."""
        return ir.Address(ir.Name(buffer), self.index(e))

    def index_from(self, start: str, e: Expr, of: str = "place") -> ir.Value:
        """An index expression at the first element of a loop along lanes, whose index there is the variable `start`."""
        return self.index(substitute(e, {self.facts.along.sym: symbol(start, LOOP)}), of)

    def address_from(self, start: str, buffer: str, e: Expr, tile: str = "") -> ir.Value:
        """A pointer to the element of a buffer at that index."""
        return ir.Address(ir.Name(buffer), self.index_from(start, e), tile)

    def element(self, n: int) -> ir.Value:
        """The element in memory that the load `n` reads."""
        row = self.plan.rows[n]
        dtype, at = self.facts.dtypes[row.buffer], self.index(row.address)
        if dtype.itemsize < 4 and any(map(self._is_of_lanes, rows_in(row.address))):
            return ir.Gather(storage_type(dtype), ir.Name(row.buffer), at)
        return ir.Name(row.buffer)[at]

    def _is_of_lanes(self, n: int) -> bool:
        """Whether row `n` is computed inside the innermost loops, with other values in other lanes."""
        vector = self.facts.vector
        return self.facts.is_full(n) and (vector is None or vector.sym in self.plan.varies[n])

    def decoded(self, n: int, element: ir.Value) -> ir.Value:
        """The value of the load `n`, given the element."""
        return element if n in self.facts.moved else ir.Decode(self.facts.dtypes[self.plan.rows[n].buffer], element)

    def value(self, n: int) -> ir.Value:
        """The right-hand side of row `n`."""
        row, place, facts = self.plan.rows[n], self.places.get(n), self.facts
        if place is not None:
            return self.decoded(n, place.value) if place.stored else place.value
        args = [self.ref(a) for a in row.args]
        if row.op == "load":
            return self._loaded(n, row, args)
        if n in facts.moved:
            args = [self._bits(a, facts.moved[n]) for a in row.args]
            return ir.Select(*args) if row.traits.chooses else args[0]
        if row.traits.chooses and self._is_zero_already(row):
            return args[1]
        if row.op == "scalar":
            return ir.Slot("f", facts.bindings.floats[row.attr])
        if row.op == "index":
            return self.index(row.attr, "floor")
        if row.op == "to_dtype":
            converted = ir.Convert(row.attr, row.dtype, args[0])
            return ir.Select(args[0].same(0), ir.Number(0), converted) if self._drops_fraction(row) else converted
        if row.op == "round_to":
            tame = row.args[0] in facts.tame
            return args[0] if facts.is_exact(row.args[0], row.attr) else ir.Round(row.attr, args[0], tame)
        if row.traits.wins and row.dtype.is_floating_point and not facts.is_full(row.args[0]):
            return ir.Bound(row.traits.wins, *args)
        if row.traits.sign == "/" and row.dtype is torch.float32 and facts.is_full(n):
            return ir.Binary("/", *args)
        table = "near" if n in facts.near else "op"
        return ir.Op(table, row.op, self.plan.rows[row.args[row.traits.typed]].dtype, tuple(args))

    def _loaded(self, n: int, row: Row, args: list[ir.Value]) -> ir.Value:
        loaded = self.decoded(n, self.element(n))
        if n in self.facts.guarded:
            some = ir.Unary("!", ir.Name("empty"))
            args = [some & args[0] if args else some]
        if args and row.dtype is torch.bool:  # g++ vectorises a select of numbers, not of bools
            return ir.Select(args[0], ir.Cast("u8", loaded), ir.Cast("u8", ir.Number(0))).differs(0)
        moved = n in self.facts.moved
        zero = ir.Cast(self.facts.kind(n), ir.Number(0)) if moved else ir.Number(0, row.dtype)
        return ir.Select(args[0], loaded, zero) if args else loaded

    def _is_zero_already(self, row: Row) -> bool:
        """Whether `row` selects between a masked load and 0 by the load's own mask: the load is 0 there already."""
        load, other = (self.plan.rows[a] for a in row.args[1:])
        return load.op == "load" and load.args == row.args[:1] and other.op == "const" and other.attr in _ZEROS

    def _drops_fraction(self, row: Row) -> bool:
        """Whether an integer computed from a float becomes a float: g++ 12 makes that `trunc`, which keeps -0.0."""
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
        if row.op != "const" or row.dtype is torch.bool:  # a number, not a condition
            return self.ref(n)
        return ir.Cast("u16", ir.Number(bits_of(float(row.attr), dtype)))

    # -- statements ----------------------------------------------------------------------------------------------------
    def declare(self, n: int, target: ir.Value | None = None) -> None:
        """Statements that compute row `n` into `t<n>` (or assign to `target`)."""
        row = self.plan.rows[n]
        if row.op in ("const", "pair"):
            return
        value = self._wrapped(n, row) if row.op == "indirect" and n not in self.places else self.value(n)
        if target is not None:
            self.out.set(target, value)
        else:
            self.out.let(self.facts.kind(n), f"t{n}", value)

    def _wrapped(self, n: int, row: Row) -> ir.Value:
        """Declare an index from a tensor: negative ones count from the end; out-of-bounds ones are 0 and reported."""
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
        """The destination of a store."""
        return ir.At(ir.Name(s.buffer), self.index(s.address), self.facts.tile_of(s))

    def store(self, s: Store) -> None:
        """Write the statement of a store."""
        facts, moved = self.facts, s.row in self.facts.moved
        dtype, n = facts.dtypes[s.buffer], s.row if moved else facts.unrounded(s)
        if s in self.results:
            self.out.set(self.results[s], self.ref(n))
            return
        value = self.ref(n) if n in facts.moved else ir.Encode(dtype, self.ref(n), facts.is_exact(n, dtype))
        self.out.set(self.target(s), value)

    def inner(self, phase: int, fold: Fold | None = None, known: Container[int] = ()) -> None:
        """Write the body of a pass's innermost loops: rows, row buffers, stores, and `fold` for each reduction.

        `known`: rows that are declared before the loop.
        """
        facts, described = self.facts, self.facts.passes[phase]
        first = {n: facts.passes.first(n) for n in facts.kept}
        with self.found({n: Place(facts.in_array(n, self.kept(n))) for n in facts.kept if first[n] < phase}):
            for n in facts.computed(phase):
                if n not in known:
                    self.declare(n)
                if first.get(n) == phase:
                    self.out.set(self.kept(n), f"t{n}")
        for s in described.stores:
            self.store(s)
        if fold is not None:
            for r in described.folds:
                fold(r)

    def kept(self, n: int) -> ir.At:
        """The current element of a row buffer."""
        e, facts = expr(0), self.facts
        for a in facts.reduced_axes:
            e = e * symbol(f"n_{a.sym.name}") + expr(a.sym)
        return ir.Name(f"kept{facts.kept.index(n)}")[size(e) if facts.is_row else size(e) * facts.lanes + "l"]

    def constants(self) -> None:
        """Declare the rows that vary along no axis."""
        for n, row in enumerate(self.plan.rows):
            if not self.plan.varies[n] and row.op != "reduced" and self.plan.phases[n] == 0:
                self.made.add(n)
                self.declare(n)

    def outside(self, rows: Iterable[int]) -> None:
        """Declare rows outside the innermost loops that are not declared yet: scalars, or lane arrays in column
        nests."""
        lanes = []
        for n in rows:
            if n in self.made:
                continue
            self.made.add(n)
            if self.facts.is_lane(n) and self.plan.rows[n].op not in ("const", "pair"):
                lanes.append(n)
            else:
                self.declare(n)
        self._lane_rows(lanes)

    def _lane_rows(self, rows: Sequence[int]) -> None:
        """Compute rows with a value for each lane in one loop: the compiler's time grows with the number of loops."""
        for n in rows:
            self.array(n)
        if rows:
            with self.lanes():
                for n in rows:
                    self.declare(n, ir.Name(f"t{n}")["l"])

    def array(self, n: int) -> None:
        """Declare the lane array of row `n`."""
        self.out.scratch(self.facts.array_kind(n), f"t{n}", self.facts.lanes)
        self.arrays.add(n)

    def after(self, phase: int) -> None:
        """Write a pass's stores outside the innermost loops."""
        stores = self.facts.passes[phase].after
        if not stores:
            return
        self.outside(self.facts.passes[phase].outer)
        with self.lanes_or_unit():
            for s in stores:
                self.store(s)

    def in_scratch(self, kind: str, name: str, at: ir.Value) -> None:
        """Declare a pointer into the function's scratch memory, `at` bytes from its start."""
        self.out.add(ir.Pointer(kind, name, ir.Name("scratch") + at, const=False))

    # -- loops ---------------------------------------------------------------------------------------------------------
    def simd(self, name: str, low: ir.Like, high: ir.Like, checks: bool = True) -> ir.For:
        """A vectorised loop. It names a reduction clause only if needed: one costs more than a short row.

        `checks`: whether it checks the indices that innermost loops check.
        """
        joins = "|:bad" if checks and self.facts.checks_inside else ""
        return ir.For(name, ir.value(low), ir.value(high), simd=True, joins=joins)

    def block(self) -> LoopRange:
        """The loop over a block's lanes, as `lanes` writes it."""
        return LoopRange("v0", ir.Name("l"), self.facts.lanes, ir.Name("count"))

    @contextmanager
    def lanes(self, count: ir.Like = "count", checks: bool = True) -> Iterator[None]:
        """A loop over the lanes of a column nest's block, or over `count` of them. `checks`: see `simd`."""
        with self.out.block(self.simd("l", 0, count, checks)):
            self.out.let("i64", self.facts.v, ir.Name("v0") + "l")
            yield

    @contextmanager
    def lanes_or_unit(self) -> Iterator[None]:
        """A loop over lanes in a column nest; no loop in others."""
        if not self.facts.is_column:
            yield
            return
        with self.lanes():
            yield

    def prefetch(self, buffer: str, address: ir.Value, count: ir.Like, *how: int) -> ir.Block:
        """A loop that prefetches each cache line of `count` elements of a buffer; `address` is that of element `q`."""
        step = max(1, self.facts.machine.line_bytes // self.facts.dtypes[buffer].itemsize)
        head = ir.For("q", ir.Number(0), ir.value(count), ir.Number(step))
        return ir.Block(head, (ir.Prefetch(address, how),))


def _names(arrays: set[int]) -> Callable[[int], ir.Value]:
    """The function that gives a computed index's value. It references only the set, which lives as long as the code."""
    return lambda n: ir.Name(f"t{n}")["l"] if n in arrays else ir.Name(f"t{n}")


__all__ = ["Ends", "Fold", "LoopRange", "Place", "Rows"]
