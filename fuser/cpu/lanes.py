"""Loops in explicit vectors: for values rounded to 16 bits, float16 in memory, or bfloat16 throughout.

So are loops of elementary float32 functions, whose operations form a dependence chain, and rows of float32 or 16-bit
floats with a tail. Passes over short rows are written so too: sums stay in registers from the first element of a row
to the last, where g++ would load and store them around the tail.

The vector helpers are those of `ops/lanes_cpp.py`.
The loop computes several independent vectors at a time, then single ones, the last under a mask. Masked loads read
only the lanes of their mask. A comparison of the index along the vector axis becomes a mask: all lanes below the index
at which it changes, or all from it on. Where these comparisons hold for a whole vector, as in the interior of a
window, the loop has no masks.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Container, Iterator, Sequence

import torch

from fuser.cpu.accumulators import Accumulator
from fuser.cpu.facts import Facts, storage_type
from fuser.cpu.prefetches import prefetch_later
from fuser.cpu.rows import Rows
from fuser.cpu.segments import find_edges
from fuser.cpu.vir import nodes as ir
from fuser.cpu.vir.builder import Builder
from fuser.ir.loop_body import Row
from fuser.ir.sizes import ONE, expr
from fuser.ops import LOW, has_lanes
from fuser.scheduler.kernel_plan import Store
from fuser.scheduler.nodes import row_cost

VECTORS, FEWER = 4, 2
MANY_ROWS = 60
COSTLY = 9  # operations of a function that alone is worth explicit vectors
LANES = ir.Name("FUSER_LANES")  # elements of a vector
SHORT = 256  # elements of a row, of which the tail takes much of the time of g++'s loops
SHORTEST = 4  # elements of a row: fewer fill no vector
ALONE = 64  # elements of a row between its edges for each vector taken at once
LONG = 512  # elements of a row from which its reductions prefetch: the hardware predicts neighbours of shorter rows
GROUP = 16  # float32 additions in a lane before its sum is added to a float64 total, apart from a row's last vectors
DTYPES = (torch.float32, torch.bool, *LOW)  # dtypes that vectors load and store
SECOND = (torch.float32, *LOW)  # dtypes of loads with stride 2
TYPES = {torch.float32: "lanes_f", torch.bool: "lanes_i"}
WIDE = {torch.float64: "lanes_d", torch.bool: "lanes_l"}  # vector types of passes in float64


class LaneLoop:
    """The innermost loop of a pointwise nest or a pass of a row nest, in explicit vectors if it `fits`."""

    macro = "FUSER_LANES"  # this macro is not 0 where there are such vectors

    def __init__(self, facts: Facts, phase: int | None = None, own: Sequence[Accumulator] = ()) -> None:
        """`phase`: the pass of a row nest, with its accumulators `own`; None for the loop of a pointwise nest."""
        self.facts, self.plan, self.phase, self.own = facts, facts.plan, phase, own
        self.found: set[int] = set() if phase is None else {n for n in facts.kept if facts.passes.first(n) < phase}
        self.full = [s for s in self.plan.stores if s in facts.passes.full_stores and phase in (None, s.phase)]
        self.stored = [facts.unrounded(s) for s in self.full]
        self.edges = find_edges(facts, 2) if phase is None else {}
        roots = [*self.stored, *(a.reduce.row for a in own)]
        inside = facts.passes.closure(roots, {*self.edges, *self.found})
        along = None if phase is None or facts.vector is None else facts.vector.sym
        self.scalars = [n for n in inside if along is not None and along not in self.plan.varies[n]]
        self.rows = [n for n in inside if n not in self.scalars]
        self.fresh = [n for n in self.rows if n in facts.kept and n not in self.found]
        self.loads = [n for n in self.rows if self.plan.rows[n].op == "load" and n not in self.found]
        self.masked = {n for n in self.loads if self.plan.rows[n].args and n not in facts.parts}
        used = {facts.dtypes[self.plan.rows[n].attr[0]] for n in self.loads}
        used |= {facts.dtypes[s.buffer] for s in self.full}
        wide = phase is not None and torch.float64 in {self.plan.rows[n].dtype for n in self.rows}
        self.types = WIDE if wide else TYPES
        self.float, self.lanes = (torch.float64, LANES // 2) if wide else (torch.float32, LANES)
        steps = {n: facts.step(self.plan.rows[n].attr[1][0]) for n in self.loads}
        self.backward = {n for n, step in steps.items() if step == expr(-1)}
        self.dtypes = used
        self.inside = _inside(self.plan.rows, self.rows, self.edges)
        self.in_order = bool(self.masked or self.backward or any(n in self.edges for n in self.rows))
        twos = [n for n, step in steps.items() if step == expr(2)]
        self.second = {n for n in twos if facts.dtypes[self.plan.rows[n].attr[0]] in SECOND}
        plain = not (self.in_order or self.second or facts.kept)
        self.pairs = used == {torch.bfloat16} and plain  # bfloat16 pairs, whose lanes are not in order
        lone = self.masked or self.backward or self.dtypes == {torch.bfloat16}
        halves = torch.float16 in self.dtypes or (torch.bfloat16 in self.dtypes and lone)
        self.heavy = halves or any(map(self._rounds, self.rows)) or self._is_costly()
        self.vectors = (VECTORS if len(self.rows) < MANY_ROWS else FEWER) if self.heavy else 1
        if own:
            self.vectors = max(1, facts.lanes * self.float.itemsize // facts.machine.vector_bytes)
            self.pairs = self.pairs and self.vectors % 2 == 0

    def fits(self, filled: bool = False) -> bool:
        """Whether vectors pay, and every row, load and store has a vector form.

        `filled`: many values are chosen by conditions that hold for the whole loop, or up to an edge.
        """
        facts = self.facts
        if not facts.machine.lanes or facts.vector is None or facts.vector.hint < SHORTEST:
            return False
        if facts.checks_inside or facts.staged or facts.hoisted:
            return False
        pays = self.heavy or filled or self._is_ragged()
        if not (self._is_plain_pass() if self.phase is not None else pays):
            return False
        return all(map(self._store_fits, self.full, self.stored)) and all(map(self._row_fits, self.rows))

    def _is_plain_pass(self) -> bool:
        """Whether a pass uses floats of one width, and if it reduces, stages no result."""
        facts = self.facts
        plain = all(a.dtype is self.float and not a.spec.index for a in self.own)
        staged = self.own and self.phase is not None and facts.streams_of(self.phase)
        outside = facts.checked or facts.plan.split or any(n in facts.kept for n in self.scalars)
        if self.types is WIDE:
            used = {m for n in self.rows for m in self._deps(n)}
            plain = plain and self.dtypes <= {torch.float64} and not self.backward
            plain = plain and all(n in self.rows or self.plan.rows[n].dtype is torch.float64 for n in used)
        return plain and not staged and not outside

    def _is_costly(self) -> bool:
        """Whether inlined elementary functions dominate the time: operations of one vector wait for each other."""
        rows = [self.plan.rows[n] for n in self.rows]
        costly = [r for r in rows if row_cost(r) >= COSTLY]
        return bool(costly) and all(r.traits.inline for r in costly)

    def _is_ragged(self) -> bool:
        """Whether rows that are not cut into segments end in a tail, which explicit vectors take under a mask."""
        facts = self.facts
        one_piece = not (self.in_order or facts.constant) and len(facts.kept_axes) > 1
        if facts.vector is None or not one_piece:
            return False
        return facts.vector.hint < SHORT and facts.vector.hint % (facts.machine.vector_bytes // 4) != 0

    def _rounds(self, n: int) -> bool:
        row = self.plan.rows[n]
        return row.op == "round_to" and not self.facts.is_exact(row.args[0], row.attr)

    def _store_fits(self, s: Store, n: int) -> bool:
        dtype = self.facts.dtypes[s.buffer]
        same = (dtype is torch.bool) == (self.plan.rows[n].dtype is torch.bool)
        known = self.plan.rows[n].dtype in self.types and dtype in (*DTYPES, self.float)
        return same and known and self.facts.step(s.address) == ONE

    def _row_fits(self, n: int) -> bool:
        row = self.plan.rows[n]
        if n in self.edges:
            return True
        if n in self.found:
            return row.dtype is self.float
        if row.dtype not in self.types or (n in self.fresh and row.dtype is not self.float):
            return False
        if any(self.plan.rows[a].dtype not in self.types for a in row.args):
            return False
        if row.op == "load":
            buffer, (address,) = row.attr
            if n in self.facts.guarded or self.facts.dtypes[buffer] not in (*DTYPES, self.float):
                return False
            return self.facts.step(address) == ONE or n in self.second or (n in self.backward and not row.args)
        if row.op == "round_to":
            return row.attr in LOW
        return (row.op == "to_dtype" and self.types is TYPES) or self._cell_dtype(row) is not None

    def _cell_dtype(self, row: Row) -> torch.dtype | None:
        """The dtype of a row's explicit-vector cell; None if there is no cell."""
        kinds = [self.plan.rows[a].dtype for a in row.args[row.traits.typed :]]
        kind = kinds[0] if kinds else row.dtype
        if any(k is not kind for k in kinds):
            return None
        return kind if has_lanes(row.op, kind) else None

    def emit(self, rows: Rows, flush: Callable[[], None] | None = None) -> None:
        """The loop over `length` elements from `start` on; `flush`, if given, writes parts of it and flushes sums."""
        out = rows.out
        for n in self.scalars:
            rows.declare(n)

        def pointer(name: str, dtype: torch.dtype, first: ir.Value, const: bool = False) -> None:
            out.add(ir.Let(f"{storage_type(dtype)}* const", name, ir.Unary("&", first), const))

        for n in self.loads:
            buffer, (address,) = self.plan.rows[n].attr
            part = rows.places.get(n)
            first = part.value if part is not None else ir.Name(buffer)[rows.index(address)]
            pointer(f"from{n}", self.facts.dtypes[buffer], first, True)
        for n in (n for n in self.rows if n in self.found):
            pointer(f"from{n}", self.float, rows.kept(n), True)
        for number, s in enumerate(self.full):
            pointer(f"into{number}", self.facts.dtypes[s.buffer], rows.target(s))
        for n in self.fresh:
            pointer(f"keep{n}", self.float, rows.kept(n))
        needed = {*self.rows, *self.stored, *(m for n in self.rows for m in self._deps(n))}
        for n in sorted((needed | {a.reduce.row for a in self.own}) - set(self.rows)):
            dtype = self.plan.rows[n].dtype
            out.let(self.types[dtype], f"t{n}_all", ir.Splat(dtype, rows.ref(n)))
        out.var("i64", "k", 0)
        k, length, step = ir.Name("k"), ir.Name("length"), ir.Number(self.vectors) * self.lanes
        if self.phase is None and self.inside and not (self.heavy and self.facts.along.hint < 2 * ALONE):
            self._around(out, length)
            return
        if self.phase is None:
            self._whole(rows, self.vectors, length)
            if self.vectors > 1 and self.facts.along.hint < SHORT and len(self.rows) < MANY_ROWS:
                self._whole(rows, 1, length)
            with out.block(ir.For("k", None, length, self.lanes)):
                out.let("lanes_m", "some", ir.First(self.float, length - k))
                self._body(out, 1, ir.Name("some"))
            return
        out.let("i64", "whole", length // step * step)
        out.let("i64", "most", length // self.lanes * self.lanes)
        out.let("lanes_m", "some", ir.First(self.float, length - "most"))
        if self.own:
            of = self.float if self.types is WIDE else torch.bool
            out.let(self.types[torch.bool], "here", ir.First(of, length - "most", flags=True))
        if flush is None:
            self._whole(rows, self.vectors, ir.Name("whole"))
            self._tail(rows)
            return
        with out.block(ir.While(k < length)):
            rest = ir.Name("whole") - k
            out.let("i64", "stop", ir.Select(rest <= step * GROUP, ir.Name("whole"), k + step * GROUP))
            flush()

    def _around(self, out: Builder, length: ir.Value) -> None:
        """Several vectors at a time between all edges; before and behind, single vectors under masks."""
        vectors = min(self.vectors, max(1, self.facts.along.hint // ALONE))
        low: ir.Value = ir.Number(0)
        high = length
        for n in (n for n in self.rows if n in self.edges):
            before, place = self.edges[n]
            at: ir.Value = ir.Name(f"edge{n}")
            out.let("i64", f"edge{n}", place - "start")
            if before:
                high = ir.Select(at < high, at, high)
            else:
                low = ir.Select(at > low, at, low)
        out.let("i64", "low", low)
        out.let("i64", "high", high)
        k = ir.Name("k")
        with out.block(ir.While(k < length)):
            inside = ir.For("k", None, ir.Name("high"), ir.Number(vectors) * self.lanes, whole=True)
            with out.block(ir.If(ir.Name("low") <= k)), out.block(inside):
                self._body(out, vectors, None, self.inside)
            with out.block(ir.If(k < length)):
                out.let("lanes_m", "some", ir.First(self.float, length - k))
                self._body(out, 1, ir.Name("some"))
                out.set(k, k + self.lanes)

    def row(self, rows: Rows) -> None:
        """Whole vectors up to `stop`; after the last one, the row's tail, too."""
        out = rows.out
        self._whole(rows, self.vectors, ir.Name("stop"))
        with out.block(ir.If(ir.Name("k").same("whole"))):
            self._tail(rows)
            out.set("k", "length")

    def _whole(self, rows: Rows, vectors: int, stop: ir.Value) -> None:
        out, step = rows.out, ir.Number(vectors) * self.lanes
        with out.block(ir.For("k", None, stop, step, whole=self.phase is None)):
            if self.phase is not None and vectors == self.vectors and self.own and self.facts.along.hint >= LONG:
                out.let("i64", "v0", ir.Name("start") + "k")
                out.let("i64", "count", step)
                prefetch_later(rows, self.phase)
            self._body(out, vectors, None)

    def _tail(self, rows: Rows) -> None:
        """Single vectors; the last one is partial."""
        out = rows.out
        if self.vectors > 1:
            self._whole(rows, 1, ir.Name("most"))
        with out.block(ir.If(ir.Name("most") < "length")):
            self._body(out, 1, ir.Name("some"))

    def _deps(self, n: int) -> Sequence[int]:
        """Rows that row `n` needs as vectors."""
        row = self.plan.rows[n]
        plain = n in self.edges or n in self.found or (row.op == "load" and n not in self.masked)
        return () if plain else row.args

    def _body(self, out: Builder, vectors: int, some: ir.Value | None, true: Container[int] = ()) -> None:
        """All rows and stores of `vectors` vectors; with `some`, of one under that mask. Conditions in `true` hold."""
        for n in self.rows:
            for at, v in enumerate(self._values(n, vectors, some, true)):
                out.let(self.types[self.plan.rows[n].dtype], f"t{n}_{at}", v)
        for k, (s, n) in enumerate(zip(self.full, self.stored, strict=True)):
            self._store(out, ir.Name(f"into{k}") + "k", self.facts.dtypes[s.buffer], n, vectors, some)
        for n in self.fresh:
            self._store(out, ir.Name(f"keep{n}") + "k", self.float, n, vectors, some)
        for a in self.own:
            for at in range(vectors):
                held, x = ir.Name(f"sum{a.number}_{at}"), self._name(a.reduce.row, at)
                # Lanes off in a masked load are 0 and may be added.
                if some is not None and not (a.spec.adds and a.reduce.row in self.loads):
                    x = ir.Select(ir.Name("here"), x, ir.Splat(self.float, a.identity))
                    out.let(self.types[self.float], f"x{a.number}", x)
                    x = ir.Name(f"x{a.number}")
                if a.notes_nans:  # one instruction each, which wait for less than what keeps a NaN
                    nan = ir.Name(f"nan{a.number}_{at}")
                    out.set(nan, ir.Select(x.differs(x), x, nan))
                    out.set(held, ir.Select(ir.Binary(a.spec.extreme, x, held), x, held))
                else:
                    out.set(held, ir.Op("combine", a.reduce.kind, self.float, (held, x)))

    def open_sums(self, out: Builder, own: Sequence[Accumulator]) -> None:
        """Declare vectors of accumulators, set to their identities."""
        for a in own:
            for at in range(self.vectors):
                out.var(self.types[self.float], f"sum{a.number}_{at}", ir.Splat(self.float, a.identity))
                if a.notes_nans:
                    out.var(self.types[self.float], f"nan{a.number}_{at}", ir.Splat(self.float, a.identity))

    def close_sums(self, out: Builder, own: Sequence[Accumulator], again: bool = False) -> None:
        """Store the accumulators' vectors to the arrays that fold them; with `again`, reset them."""
        for a in own:
            for at in range(self.vectors):
                held = ir.Name(f"sum{a.number}_{at}")
                out.add(ir.Store(self.float, a.lanes + ir.Number(at) * self.lanes, (held,)))
                if again:
                    out.set(held, ir.Splat(self.float, a.identity))

    def fold(self, out: Builder, a: Accumulator) -> None:
        """Fold the lanes of an array; an extreme becomes NaN if one was seen."""
        out.add(a.fold())
        if a.notes_nans:
            nans, best = [ir.Name(f"nan{a.number}_{at}") for at in range(self.vectors)], ir.Name(f"acc{a.number}")[0]
            found = functools.reduce(operator.or_, (n.differs(n) for n in nans))
            out.set(best, ir.Select(ir.Mask(found, any=True), ir.Number(math.nan, self.float), best))

    def _name(self, n: int, at: int) -> ir.Value:
        return ir.Name(f"t{n}_{at}" if n in self.rows else f"t{n}_all")

    def _values(self, n: int, vectors: int, some: ir.Value | None, true: Container[int] = ()) -> Iterator[ir.Value]:
        """The right-hand sides of row `n`, one for each vector."""
        row = self.plan.rows[n]
        for at in range(vectors):
            args = tuple(self._name(a, at) for a in row.args)
            if n in self.found:
                yield ir.Load(self.float, ir.Name(f"from{n}") + "k" + ir.Number(at) * self.lanes, some)
            elif n in true:
                yield ir.Splat(torch.bool, ir.Number(1, torch.bool))
            elif n in self.edges:
                before, place = self.edges[n]
                count = place - "start" - "k" - ir.Number(at) * self.lanes
                lanes = ir.First(torch.bool, count, flags=True)
                yield lanes if before else lanes.same(0)
            elif row.op == "load":
                held = n in self.masked and row.args[0] not in true
                yield self._load(n, at, args[0] if held else None, some, vectors > 1)
            elif row.op == "round_to":
                exact, tame = self.facts.is_exact(row.args[0], row.attr), row.args[0] in self.facts.tame
                yield args[0] if exact else ir.Round(row.attr, args[0], tame, vector=True)
            elif row.op == "to_dtype":
                yield _convert(self.plan.rows[row.args[0]].dtype, row.dtype, args[0])
            else:
                kind = self._cell_dtype(row)
                assert kind is not None
                yield ir.Op("lanes_near" if n in self.facts.near else "lanes", row.op, kind, args)

    def _load(
        self, n: int, at: int, held: ir.Value | None, some: ir.Value | None, several: bool
    ) -> ir.Value:  # fmt: skip
        start = ir.Name(f"from{n}")
        if self.pairs and several:
            pairs = ir.Load(torch.bfloat16, start + "k" + ir.Number(at // 2 * 2) * self.lanes, paired=True)
            return ir.Half(pairs, odd=bool(at % 2))
        dtype = self.facts.dtypes[self.plan.rows[n].attr[0]]
        if n in self.backward:
            lanes = self.lanes if some is None else ir.Name("length") - "k"
            return ir.Load(dtype, start - "k" - ir.Number(at) * self.lanes, back=lanes)
        mask: ir.Value | None = None if held is None else ir.Mask(held)
        if some is not None:
            mask = some if mask is None else some & mask
        if n in self.second:
            place = start + ir.Number(2) * ir.Name("k") + ir.Number(2 * at) * self.lanes
            return ir.Load(dtype, place, mask, step=2)
        return ir.Load(dtype, start + "k" + ir.Number(at) * self.lanes, mask)

    def _store(
        self, out: Builder, to: ir.Value, dtype: torch.dtype, n: int, vectors: int, some: ir.Value | None
    ) -> None:  # fmt: skip
        exact, tame = self.facts.is_exact(n, dtype), n in self.facts.tame
        together = 2 if self.pairs and vectors > 1 else 1
        for at in range(0, vectors, together):
            values = tuple(self._name(n, at + k) for k in range(together))
            out.add(ir.Store(dtype, to + ir.Number(at) * self.lanes, values, some, exact, tame))


def _inside(rows: Sequence[Row], within: Sequence[int], edges: Container[int]) -> frozenset[int]:
    """The conditions among the rows `within` that hold between all edges; empty without edges."""
    found: set[int] = set()
    for n in within:
        if n in edges or (rows[n].op == "logical_and" and all(a in found for a in rows[n].args)):
            found.add(n)
    return frozenset(found)


def _convert(source: torch.dtype, target: torch.dtype, value: ir.Value) -> ir.Value:
    if source is target:
        return value
    if target is torch.bool:
        return value.differs(ir.Number(0.0, torch.float32))
    one, zero = (ir.Splat(torch.float32, ir.Number(x, torch.float32)) for x in (1.0, 0.0))
    return ir.Select(value, one, zero)
