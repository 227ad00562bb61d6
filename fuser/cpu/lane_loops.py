"""Writes loops in explicit vectors (`lanes.py` says which); the helpers are those of `ops/lanes_cpp.py`.

A loop computes several independent vectors at a time, then single ones, the last under a mask. Masked loads read only
the lanes of their mask. A comparison of the index along the vector axis becomes a mask: all lanes below the index at
which it changes, or all from it on. Where these comparisons hold for a whole vector, as in the interior of a window,
the loop has no masks.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Container, Iterator, Sequence

import torch

from fuser.cpu.accumulators import Accumulator
from fuser.cpu.facts import storage_type
from fuser.cpu.lanes import MANY_ROWS, SHORT, WIDE, Lanes
from fuser.cpu.prefetches import prefetch_later
from fuser.cpu.rows import Rows
from fuser.cpu.vir import nodes as ir

ALONE = 64  # elements of a row between its edges for each vector taken at once
LONG = 512  # elements of a row from which its reductions prefetch: the hardware predicts neighbours of shorter rows
K, LENGTH, SOME = ir.Name("k"), ir.Name("length"), ir.Name("some")


class LaneLoop:
    """Writes the loop of `lanes` over `length` elements from the index `start` on; `k` counts those that are done."""

    def __init__(self, rows: Rows, lanes: Lanes) -> None:
        self.rows, self.lanes, self.out = rows, lanes, rows.out
        self.facts, self.plan = lanes.facts, lanes.plan

    def open(self) -> None:
        """Declare what the loop needs: scalars, pointers to first elements, constants in all lanes, and `k`."""
        lanes, rows, out = self.lanes, self.rows, self.out
        for n in lanes.scalars:
            rows.declare(n)
        for n in lanes.loads:
            row, part = self.plan.rows[n], rows.places.get(n)
            first = part.value if part is not None else ir.Name(row.buffer)[rows.index(row.address)]
            self._pointer(f"from{n}", self.facts.dtypes[row.buffer], first, const=True)
        for n in (n for n in lanes.rows if n in lanes.found):
            self._pointer(f"from{n}", lanes.float, rows.kept(n), const=True)
        for number, s in enumerate(lanes.stores):
            self._pointer(f"into{number}", self.facts.dtypes[s.buffer], rows.target(s))
        for n in lanes.fresh:
            self._pointer(f"keep{n}", lanes.float, rows.kept(n))
        needed = {*lanes.rows, *lanes.stored, *(m for n in lanes.rows for m in lanes.deps(n))}
        for n in sorted((needed | {a.reduce.row for a in lanes.own}) - set(lanes.rows)):
            dtype = self.plan.rows[n].dtype
            out.let(lanes.types[dtype], f"t{n}_all", ir.Splat(dtype, rows.ref(n)))
        out.var("i64", "k", 0)

    def _pointer(self, name: str, dtype: torch.dtype, first: ir.Value, const: bool = False) -> None:
        self.out.add(ir.Let(f"{storage_type(dtype)}* const", name, ir.Unary("&", first), const))

    # -- loops ---------------------------------------------------------------------------------------------------------
    def whole_nest(self) -> None:
        """The loop of a pointwise nest."""
        lanes, hint = self.lanes, self.facts.along.hint
        self.open()
        if lanes.inside and not (lanes.heavy and hint < 2 * ALONE):
            self._around()
            return
        self.whole(lanes.vectors, LENGTH)
        if lanes.vectors > 1 and hint < SHORT and len(lanes.rows) < MANY_ROWS:
            if lanes.may_repeat:
                self._rest_again()
            else:
                self.whole(1, LENGTH)
        with self.out.block(ir.For("k", None, LENGTH, lanes.width)):
            self._mask_of_rest()
            self._body(1, SOME)

    def _rest_again(self) -> None:
        """Single vectors for the rest of a row that fills one; the last takes elements again in place of a mask."""
        lanes, out = self.lanes, self.out
        last = LENGTH - lanes.width
        with out.block(ir.If(ir.Name("FUSER_LANES") <= LENGTH)), out.block(ir.For("k", None, LENGTH, lanes.width)):
            out.set(K, ir.Select(K < last, K, last))
            self._body(1, None)

    def _around(self) -> None:
        """Several vectors at a time between all edges; before and behind, single vectors under masks."""
        lanes, out = self.lanes, self.out
        vectors = min(lanes.vectors, max(1, self.facts.along.hint // ALONE))
        low: ir.Value = ir.Number(0)
        high: ir.Value = LENGTH
        for n in (n for n in lanes.rows if n in lanes.edges):
            before, place = lanes.edges[n]
            at: ir.Value = ir.Name(f"edge{n}")
            out.let("i64", f"edge{n}", place - "start")
            if before:
                high = ir.Select(at < high, at, high)
            else:
                low = ir.Select(at > low, at, low)
        out.let("i64", "low", low)
        out.let("i64", "high", high)
        with out.block(ir.While(K < LENGTH)):
            inside = ir.For("k", None, ir.Name("high"), ir.Number(vectors) * lanes.width, whole=True)
            with out.block(ir.If(ir.Name("low") <= K)), out.block(inside):
                self._body(vectors, None, lanes.inside)
            with out.block(ir.If(K < LENGTH)):
                self._mask_of_rest()
                self._body(1, SOME)
                out.set(K, K + lanes.width)

    def _mask_of_rest(self) -> None:
        self.out.let("lanes_m", "some", ir.First(self.lanes.float, LENGTH - K))

    def open_row(self) -> None:
        """Declare where the whole vectors of a pass end, several at a time and single ones, and the tail's mask."""
        lanes, out, step = self.lanes, self.out, ir.Number(self.lanes.vectors) * self.lanes.width
        out.let("i64", "whole", LENGTH // step * step)
        out.let("i64", "most", LENGTH // lanes.width * lanes.width)
        out.let("lanes_m", "some", ir.First(lanes.float, LENGTH - "most"))
        if lanes.own:
            of = lanes.float if lanes.types is WIDE else torch.bool
            out.let(lanes.types[torch.bool], "here", ir.First(of, LENGTH - "most", flags=True))

    def whole(self, vectors: int, stop: ir.Value) -> None:
        """Whole vectors, `vectors` of them at a time, up to `stop`."""
        lanes, out, step = self.lanes, self.out, ir.Number(vectors) * self.lanes.width
        with out.block(ir.For("k", None, stop, step, whole=not self.facts.is_row)):
            if vectors == lanes.vectors and lanes.own and self.facts.along.hint >= LONG:
                out.let("i64", "v0", ir.Name("start") + "k")
                out.let("i64", "count", step)
                prefetch_later(self.rows, lanes.phase)
            self._body(vectors, None)

    def tail(self) -> None:
        """The rest of a pass's row in single vectors, of which the last one is partial."""
        if self.lanes.vectors > 1:
            self.whole(1, ir.Name("most"))
        with self.out.block(ir.If(ir.Name("most") < "length")):
            self._body(1, SOME)

    # -- sums ----------------------------------------------------------------------------------------------------------
    def open_sums(self, own: Sequence[Accumulator]) -> None:
        """Declare vectors of accumulators, set to their identities."""
        of = self.lanes.float
        for a in own:
            for at in range(self.lanes.vectors):
                self.out.var(self.lanes.types[of], f"sum{a.number}_{at}", ir.Splat(of, a.identity))
                if a.notes_nans:
                    self.out.var(self.lanes.types[of], f"nan{a.number}_{at}", ir.Splat(of, a.identity))

    def close_sums(self, own: Sequence[Accumulator], again: bool = False) -> None:
        """Store the accumulators' vectors to the arrays that fold them; with `again`, reset them."""
        for a in own:
            for at in range(self.lanes.vectors):
                held = ir.Name(f"sum{a.number}_{at}")
                self.out.add(ir.Store(self.lanes.float, self._at(a.lanes, at), (held,)))
                if again:
                    self.out.set(held, ir.Splat(self.lanes.float, a.identity))

    def fold(self, a: Accumulator) -> None:
        """Fold the lanes of an array; an extreme becomes NaN if one was seen."""
        self.out.add(a.fold())
        if a.notes_nans:
            nans = [ir.Name(f"nan{a.number}_{at}") for at in range(self.lanes.vectors)]
            best = ir.Name(f"acc{a.number}")[0]
            found = functools.reduce(operator.or_, (n.differs(n) for n in nans))
            self.out.set(best, ir.Select(ir.Mask(found, any=True), ir.Number(math.nan, self.lanes.float), best))

    def _add(self, a: Accumulator, at: int, some: ir.Value | None) -> None:
        """Combine vector `at` of the reduced row into its accumulator; with `some`, the lanes of the tail."""
        of, out = self.lanes.float, self.out
        held, x = ir.Name(f"sum{a.number}_{at}"), self._name(a.reduce.row, at)
        # Lanes off in a masked load are 0 and may be added.
        if some is not None and not (a.spec.adds and a.reduce.row in self.lanes.loads):
            own = ir.Name(f"x{a.number}")
            out.let(self.lanes.types[of], own.name, ir.Select(ir.Name("here"), x, ir.Splat(of, a.identity)))
            x = own
        if a.notes_nans:  # one instruction each, which wait for less than what keeps a NaN
            nan = ir.Name(f"nan{a.number}_{at}")
            out.set(nan, ir.Select(x.differs(x), x, nan))
            out.set(held, ir.Select(ir.Binary(a.spec.extreme, x, held), x, held))
        else:
            out.set(held, ir.Op("combine", a.reduce.kind, of, (held, x)))

    # -- vectors -------------------------------------------------------------------------------------------------------
    def _body(self, vectors: int, some: ir.Value | None, true: Container[int] = ()) -> None:
        """All rows and stores of `vectors` vectors; with `some`, of one under that mask. Conditions in `true` hold."""
        lanes = self.lanes
        for n in lanes.rows:
            for at, v in enumerate(self._values(n, vectors, some, true)):
                self.out.let(lanes.types[self.plan.rows[n].dtype], f"t{n}_{at}", v)
        for k, (s, n) in enumerate(zip(lanes.stores, lanes.stored, strict=True)):
            self._store(f"into{k}", self.facts.dtypes[s.buffer], n, vectors, some)
        for n in lanes.fresh:
            self._store(f"keep{n}", lanes.float, n, vectors, some)
        for a in lanes.own:
            for at in range(vectors):
                self._add(a, at, some)

    def _name(self, n: int, at: int) -> ir.Name:
        return ir.Name(f"t{n}_{at}" if n in self.lanes.rows else f"t{n}_all")

    def _at(self, first: ir.Value, at: int) -> ir.Value:
        """The address of vector `at` of several."""
        return first + ir.Number(at) * self.lanes.width

    def _values(self, n: int, vectors: int, some: ir.Value | None, true: Container[int]) -> Iterator[ir.Value]:
        """The right-hand sides of row `n`, one for each vector."""
        lanes, row = self.lanes, self.plan.rows[n]
        for at in range(vectors):
            args = tuple(self._name(a, at) for a in row.args)
            if n in lanes.found:
                yield ir.Load(lanes.float, self._at(ir.Name(f"from{n}") + K, at), some)
            elif n in true:
                yield ir.Splat(torch.bool, ir.Number(1, torch.bool))
            elif n in lanes.edges:
                before, place = lanes.edges[n]
                count = place - "start" - K - ir.Number(at) * lanes.width
                flags = ir.First(torch.bool, count, flags=True)
                yield flags if before else flags.same(0)
            elif row.op == "load":
                held = n in lanes.masked and row.args[0] not in true
                yield self._load(n, at, args[0] if held else None, some, vectors > 1)
            elif row.op == "round_to":
                exact, tame = self.facts.is_exact(row.args[0], row.attr), row.args[0] in self.facts.tame
                yield args[0] if exact else ir.Round(row.attr, args[0], tame, vector=True)
            elif row.op == "to_dtype":
                yield _converted(row.dtype, args[0])
            else:
                kind = lanes.cell_dtype(row)
                assert kind is not None
                yield ir.Op("lanes_near" if n in self.facts.near else "lanes", row.op, kind, args)

    def _load(
        self, n: int, at: int, held: ir.Value | None, some: ir.Value | None, several: bool
    ) -> ir.Value:  # fmt: skip
        lanes, start = self.lanes, ir.Name(f"from{n}")
        if lanes.pairs and several:
            pairs = ir.Load(torch.bfloat16, self._at(start + K, at // 2 * 2), paired=True)
            return ir.Half(pairs, odd=bool(at % 2))
        dtype = self.facts.dtypes[self.plan.rows[n].buffer]
        if n in lanes.backward:
            back = lanes.width if some is None else LENGTH - K
            return ir.Load(dtype, start - K - ir.Number(at) * lanes.width, back=back)
        mask: ir.Value | None = None if held is None else ir.Mask(held)
        if some is not None:
            mask = some if mask is None else some & mask
        if n in lanes.second:
            return ir.Load(dtype, self._at(start + ir.Number(2) * K, 2 * at), mask, step=2)
        return ir.Load(dtype, self._at(start + K, at), mask)

    def _store(self, to: str, dtype: torch.dtype, n: int, vectors: int, some: ir.Value | None) -> None:
        exact, tame = self.facts.is_exact(n, dtype), n in self.facts.tame
        together = 2 if self.lanes.pairs and vectors > 1 else 1
        for at in range(0, vectors, together):
            values = tuple(self._name(n, at + k) for k in range(together))
            self.out.add(ir.Store(dtype, self._at(ir.Name(to) + K, at), values, some, exact, tame))


def _converted(target: torch.dtype, value: ir.Value) -> ir.Value:
    """Floats as flags, or flags as floats."""
    if target is torch.bool:
        return value.differs(ir.Number(0.0, torch.float32))
    one, zero = (ir.Splat(torch.float32, ir.Number(x, torch.float32)) for x in (1.0, 0.0))
    return ir.Select(value, one, zero)


__all__ = ["LaneLoop"]
