"""C++ for scatters and scans: nests whose inner axes run in order, one point after another.

Points that differ along kept axes write different elements, so units of kept axes run on any thread, and the vector
axis runs over the lanes of a block. The other axes run in the plan's order, so the bits are always the same.
"""

from __future__ import annotations

import dataclasses

import torch

from fuser.cpu.records import Function
from fuser.cpu.reduction import ReductionNest
from fuser.cpu.vir import nodes as ir
from fuser.cpu.vir import rewrite
from fuser.ir.sizes import Expr, expr, minimum, product
from fuser.ops import CPP_TYPES, SCANS, compute_dtype
from fuser.scheduler.kernel_plan import Store
from fuser.scheduler.nodes import Ordered


def lone_halves(kernel: ir.Kernel) -> ir.Kernel:
    """`kernel` with scalar conversions of float16: g++ does not vectorise a sequential scan."""

    def lone(v: ir.Value) -> ir.Value:
        return dataclasses.replace(v, lone=True) if isinstance(v, ir.Decode | ir.Encode) else v

    changed: ir.Kernel = rewrite.values(kernel, lone)
    return changed


class OrderedNest(ReductionNest):
    """A nest of units, then loops in order, then perhaps lanes."""

    @property
    def ordered(self) -> Ordered:
        """How the points depend on each other."""
        assert self.plan.ordered is not None
        return self.plan.ordered

    def streams(self, phase: int | None = None) -> list[Store]:
        """None: results are read again soon, or are stored in small parts."""
        return []

    def function(self) -> Function:
        """The whole function."""
        self.open_function()
        digits, units = self._digits()
        self.emit_constants()
        self.open_units(digits)
        if self.vector is not None:
            self._column_block()
        self.emit_unit_rows(self.passes[0].before)
        self.before()
        for a in self.red_axes:
            self.out.open(ir.For(a.sym.name, *self._range(a, {})))
        if self.vector is not None:
            self.before_lanes()
            self.open_lanes()
        for n in self.passes[0].inner:
            self.declare(n)
        self.put()
        if self.vector is not None:
            self.out.close()
            self.after_lanes()
        for _ in self.red_axes:
            self.out.close()
        self.out.close()
        units = units * minimum(product(a.size for a in self.red_axes), 1)
        return Function(self.close_function(), units, self.work(), expr(0))

    def _digits(self) -> tuple[list[tuple[str, ir.Value]], Expr]:
        if self.vector is not None:
            return self._column_digits()
        return self.digits(self.kept), product(a.size for a in self.kept)

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
    """The value of each point is combined with the element at its computed index."""

    def put(self, stores: bool = True, given: bool = False) -> None:
        """Combine the value with the element at its index."""
        (s,) = self.plan.stores
        dtype, value = self.dtypes[s.buffer], self.ref(s.row)
        self.out.let("i64", "place", self.index(s.address))
        target = ir.Name(s.buffer)["place"]
        if self.ordered.how:
            self.out.let(CPP_TYPES[compute_dtype(dtype)], "old", ir.Decode(dtype, target))
            value = ir.Op("combine", self.ordered.how, compute_dtype(dtype), (ir.Name("old"), value))
        self.out.set(target, ir.Encode(dtype, value))


class Scan(OrderedNest):
    """Each point stores what the values up to it make."""

    def before(self) -> None:
        spec, kind = SCANS[self.ordered.how], self.accumulator()
        start = ir.Number(spec.identity(kind), kind)
        if self.vector is None:
            self.out.var(CPP_TYPES[kind], "acc", start)
            if spec.index:
                self.out.var("i64", "at", 0)
            return
        starts: list[ir.Statement] = [ir.Set(ir.Name("accs")["l"], start)]
        self.out.scratch(CPP_TYPES[kind], "accs", self.lanes)
        if spec.index:
            self.out.scratch("i64", "ats", self.lanes)
            starts.append(ir.Set(ir.Name("ats")["l"], ir.Number(0)))
        self.out.each(self.lanes, *starts)

    def before_lanes(self) -> None:
        """What a line reads backwards or under a condition, and floats of the float16 that it reads and writes."""
        self.open_pieces(0, "v0", "l", self.lanes, "count")

    def after_lanes(self) -> None:
        """Floats become float16."""
        self.close_pieces(0, "v0", "count")

    def close_function(self) -> ir.Kernel:
        """The function's tail; returns the function, with scalar conversions unless lanes are scanned side by side."""
        kernel = super().close_function()
        return lone_halves(kernel) if self.vector is None else kernel

    def _stored(self, dtype: torch.dtype, acc: ir.Value) -> ir.Value:
        """What to store for an accumulator: storing rounds, so its conversion to a half need not."""
        return ir.Encode(dtype, ir.Convert(self.accumulator(), compute_dtype(dtype), acc))

    def value_row(self) -> int:
        """The row whose values are scanned."""
        pair = next((r for r in (self.plan.rows[s.row] for s in self.plan.stores) if r.op == "pair"), None)
        return pair.args[0] if pair is not None else self.plan.stores[0].row

    def is_place(self, s: Store) -> bool:
        """Whether a store is of the index of the extreme, and not of its value."""
        return self.plan.rows[s.row].op == "pair"

    def accumulator(self) -> torch.dtype:
        """The dtype of what goes on from point to point."""
        return SCANS[self.ordered.how].accumulate(self.plan.rows[self.value_row()].dtype)

    def put(self, stores: bool = True, given: bool = False) -> None:
        """The next step of the scan, of `x` if that is given. Results are stored but where the last one is all."""
        spec, kind = SCANS[self.ordered.how], self.accumulator()
        acc: ir.Value = ir.Name("acc") if self.vector is None else ir.Name("accs")["l"]
        at: ir.Value = ir.Name("at") if self.vector is None else ir.Name("ats")["l"]
        value, x = self.value_row(), ir.Name("x")
        if not given:
            self.out.let(CPP_TYPES[kind], "x", ir.Convert(self.plan.rows[value].dtype, kind, self.ref(value)))
        step = ir.Op("step", self.ordered.how, kind, (acc, x))
        if self.vector is None and spec.extreme:
            self._take_extreme()
        elif spec.index:
            self.out.let("bool", "better", step)
            self.out.set(acc, ir.Select(ir.Name("better"), x, acc))
            self.out.set(at, ir.Select(ir.Name("better"), self._here(), at))
        else:
            self.out.set(acc, step)
        for s in self.plan.stores if stores else ():
            if s in self.results:
                self.out.set(self.results[s], ir.Convert(kind, torch.float32, acc))
                continue
            result = at if self.is_place(s) else self._stored(self.dtypes[s.buffer], acc)
            self.out.set(ir.Name(s.buffer)[self.index(s.address)], result)

    def _here(self) -> ir.Value:
        (pair,) = {self.plan.rows[s.row] for s in self.plan.stores if self.is_place(s)}
        return self.ref(pair.args[1])

    def _take_extreme(self) -> None:
        """A new extreme is rare: a branch costs less than a choice, for which the next one waits."""
        x, acc = ir.Name("x"), ir.Name("acc")
        better: ir.Value = ir.Unary("!", ir.Binary(_LOSES[SCANS[self.ordered.how].extreme], x, acc))
        if self.accumulator().is_floating_point:  # NaN stays but for another NaN
            better = ir.Binary("&&", better, ir.Binary("||", acc.same(acc), x.differs(x)))
        with self.out.block(ir.If(better, rare=True)):
            self.out.set(acc, x)
            if SCANS[self.ordered.how].index:
                self.out.set("at", self._here())


_LOSES = {">": "<", "<": ">"}  # how a value loses, by how it wins

__all__ = ["OrderedNest", "Scan", "Scatter"]
