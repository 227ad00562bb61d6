"""C++ for scatters and scans: nests whose inner axes run in order, one point after another.

The kept axes never meet in one place of the result, so units of them run on any thread, and neighbours of the vector
axis in the lanes of a block. Everything else is in the order of the plan's axes, so the bits are always the same.
"""

from __future__ import annotations

import torch

from fuser.cpu.records import Function
from fuser.cpu.reduction import ReductionNest
from fuser.ir.sizes import INDIRECT, Expr, expr, minimum, product, symbols
from fuser.ops import (
    CPP_TYPES,
    SCANS,
    compute_dtype,
    cpp_combine,
    cpp_constant,
    cpp_convert,
    cpp_load,
    cpp_step,
    cpp_store,
)
from fuser.scheduler.nodes import Ordered
from fuser.scheduler.plan import Store


class OrderedNest(ReductionNest):
    """A nest of units, then loops in order, then perhaps lanes."""

    @property
    def ordered(self) -> Ordered:
        """How the points depend on each other."""
        assert self.plan.ordered is not None
        return self.plan.ordered

    def streams(self, phase: int | None = None) -> list[Store]:
        """None: what is written is read again soon, or written in small parts."""
        return []

    def function(self) -> Function:
        """The whole function."""
        name = self.open_function()
        digits, units = self._digits()
        self.emit_constants()
        self.open_units(digits)
        if self.vector is not None:
            self._column_block()
        wanted = self._wanted()
        inner = self.closure(wanted)
        self.emit_unit_rows([*wanted, *(d for n in inner for d in self.deps(n))], 0)
        self.before()
        for a in self.red_axes:
            self.out.open(f"for (i64 {a.sym.name} = 0; {a.sym.name} < n_{a.sym.name}; ++{a.sym.name})")
        if self.vector is not None:
            self.before_lanes()
            self.open_lanes()
        for n in inner:
            self.declare(n)
        self.put()
        if self.vector is not None:
            self.out.close()
            self.after_lanes()
        for _ in self.red_axes:
            self.out.close()
        self.close_units(digits)
        units = units * minimum(product(a.size for a in self.red_axes), 1)
        return Function(name, self.close_function(), units, self.work(), expr(0))

    def _wanted(self) -> list[int]:
        """The rows that the stores need: values and places."""
        wanted = [s.row for s in self.plan.stores]
        return wanted + [int(x.name[1:]) for s in self.plan.stores for x in symbols(s.address) if x.kind == INDIRECT]

    def _digits(self) -> tuple[list[tuple[str, str]], Expr]:
        if self.vector is not None:
            return self._column_digits()
        return [(a.sym.name, f"n_{a.sym.name}") for a in self.kept], product(a.size for a in self.kept)

    def before(self) -> None:
        """What a unit needs before its loops."""

    def before_lanes(self) -> None:
        """What a loop over lanes needs before it."""

    def after_lanes(self) -> None:
        """What is left to do after it."""

    def put(self, stores: bool = True, given: bool = False) -> None:
        """What happens at one point, and what it stores."""
        raise NotImplementedError


class Scatter(OrderedNest):
    """The value of each point goes to the place that its rows compute."""

    def put(self, stores: bool = True, given: bool = False) -> None:
        """Combine the value with what is in its place."""
        (s,) = self.plan.stores
        dtype, value = self.dtypes[s.buffer], self.ref(s.row)
        self.out.add(f"const i64 place = {self.index(s.address)};")
        if self.ordered.how:
            old = cpp_load(dtype, f"{s.buffer}[place]")
            self.out.add(f"const {CPP_TYPES[compute_dtype(dtype)]} old = {old};")
            value = cpp_combine(self.ordered.how, compute_dtype(dtype), "old", value)
        self.out.add(f"{s.buffer}[place] = {cpp_store(dtype, value)};")


class Scan(OrderedNest):
    """Each point stores what the values up to it make."""

    def before(self) -> None:
        spec, acc = SCANS[self.ordered.how], CPP_TYPES[self.accumulator()]
        start = cpp_constant(spec.identity(self.accumulator()), self.accumulator())
        if self.vector is None:
            self.out.add(f"{acc} acc = {start};")
            self.out.add("i64 at = 0;") if spec.index else None
            return
        self.out.add(f"{acc} accs[{self.lanes}];")
        self.out.add(f"i64 ats[{self.lanes}];") if spec.index else None
        also = " ats[l] = 0;" if spec.index else ""
        self.out.add(f"for (i64 l = 0; l < {self.lanes}; ++l) {{ accs[l] = {start};{also} }}")

    def before_lanes(self) -> None:
        """What a line reads backwards or under a condition, and floats of the float16 that it reads and writes."""
        self.open_pieces(0, "v0", "l", self.lanes, "count")

    def after_lanes(self) -> None:
        """Floats become float16."""
        self.close_pieces(0, "v0", "count")

    def loaded(self, n: int) -> str:
        """What the load `n` reads, as a value."""
        return self._alone(super().loaded(n))

    def _stored(self, dtype: torch.dtype, acc: str) -> str:
        """What to store for an accumulator: storing rounds, so its conversion to a half need not."""
        return self._alone(cpp_store(dtype, cpp_convert(self.accumulator(), compute_dtype(dtype), acc)))

    def _alone(self, text: str) -> str:
        """The conversions of float16 in `text` as fits a chain, of which g++ makes no vectors."""
        if self.vector is not None:
            return text
        for way in ("load", "store"):
            text = text.replace(f"fuser_{way}_half(", f"fuser_lone_{way}_half(")
        return text

    def value_row(self) -> int:
        """The row whose values are scanned."""
        pair = next((r for r in (self.plan.rows[s.row] for s in self.plan.stores) if r.op == "pair"), None)
        return pair.args[0] if pair is not None else self.plan.stores[0].row

    def is_place(self, s: Store) -> bool:
        """Whether a store is of the place of the extreme, and not of what is scanned."""
        return self.plan.rows[s.row].op == "pair"

    def accumulator(self) -> torch.dtype:
        """The dtype of what goes on from point to point."""
        return SCANS[self.ordered.how].accumulate(self.plan.rows[self.value_row()].dtype)

    def put(self, stores: bool = True, given: bool = False) -> None:
        """The next step of the scan, of `x` if that is given. Results are stored but where the last one is all."""
        spec, kind = SCANS[self.ordered.how], self.accumulator()
        acc, at = ("acc", "at") if self.vector is None else ("accs[l]", "ats[l]")
        value = self.value_row()
        if not given:
            x = cpp_convert(self.plan.rows[value].dtype, kind, self.ref(value))
            self.out.add(f"const {CPP_TYPES[kind]} x = {x};")
        step = cpp_step(self.ordered.how, kind, acc, "x")
        if self.vector is None and spec.extreme:
            self._take_extreme()
        elif spec.index:
            self.out.add(f"const bool better = {step};")
            self.out.add(f"{acc} = better ? x : {acc};")
            self.out.add(f"{at} = better ? {self._here()} : {at};")
        else:
            self.out.add(f"{acc} = {step};")
        for s in self.plan.stores if stores else ():
            if s in self.results:
                self.out.add(f"{self.results[s]} = {cpp_convert(kind, torch.float32, acc)};")
                continue
            result = at if self.is_place(s) else self._stored(self.dtypes[s.buffer], acc)
            self.out.add(f"{s.buffer}[{self.index(s.address)}] = {result};")

    def _here(self) -> str:
        (pair,) = {self.plan.rows[s.row] for s in self.plan.stores if self.is_place(s)}
        return self.ref(pair.args[1])

    def _take_extreme(self) -> None:
        """A new extreme is rare: a branch costs less than a choice, for which the next one waits."""
        better = f"!(x {_LOSES[SCANS[self.ordered.how].extreme]} acc)"
        if self.accumulator().is_floating_point:  # NaN stays but for another NaN
            better += " && (acc == acc || x != x)"
        also = f" at = {self._here()};" if SCANS[self.ordered.how].index else ""
        self.out.add(f"if (__builtin_expect({better}, 0)) {{ acc = x;{also} }}")


_LOSES = {">": "<", "<": ">"}  # how a value loses, by how it wins

__all__ = ["OrderedNest", "Scan", "Scatter"]
