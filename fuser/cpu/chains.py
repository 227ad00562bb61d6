"""C++ for scans along rows.

Each step of a scan waits for the one before it, so a unit runs several independent scans side by side: of neighbouring
rows, or of chunks where rows are few and long. A first pass finds the carry into each chunk. Chunks depend on sizes
alone, so the bits are the same for any number of threads.
"""

from __future__ import annotations

import functools
import math
from contextlib import AbstractContextManager

import torch

from fuser.cpu.ordered import Scan
from fuser.cpu.records import Bindings, Function, Generated, Partial
from fuser.cpu.vir import nodes as ir
from fuser.ir.sizes import Expr, expr, floordiv, minimum, product
from fuser.ops import CPP_TYPES, SCANS
from fuser.scheduler.kernel_plan import Axis, KernelPlan
from fuser.scheduler.nodes import row_cost

ACCS, ATS = ir.Name("accs"), ir.Name("ats")
SIDE_BY_SIDE = 4  # chains of a unit
SIDE_BY_SIDE_FROM = 25  # elements of a row: processors look ahead over several shorter ones by themselves
FEW_ROWS, LONG = 16, 1 << 15  # fewer and longer rows than this are cut
FILLED_COST, FILLED = 8, 256  # operations of an element from which lanes compute a block before its scan; its elements
LEAST_CHUNK, MOST_CHUNKS = 4096, 64


class ChainedScan(Scan):
    """A scan whose axis is one loop, over no lanes."""

    @classmethod
    def of(cls, plan: KernelPlan, name: str, bindings: Bindings) -> ChainedScan | None:
        """The nest of a scan along rows; None if it does not pay."""
        return cls(plan, name, bindings) if plan.reduced_axes[0].hint >= SIDE_BY_SIDE_FROM else None

    def generate(self) -> Generated:
        """One function, or where rows are cut one for what chunks add up to and one for the scan."""
        (axis,) = self.red_axes
        cut = self._is_cut(axis)
        chunks = minimum(floordiv(axis.size + (LEAST_CHUNK - 1), expr(LEAST_CHUNK)), MOST_CHUNKS) if cut else expr(1)
        if not cut:
            return Generated((self._pass("", chunks, True),), ())
        total = product(a.size for a in self.kept) * chunks
        self.partials = [Partial(f"{self.name}_p", self.accumulator(), total)]
        if self._has_index():
            self.partials.append(Partial(f"{self.name}_i", torch.int64, total))
        for p in self.partials:
            self.bindings.pointers[p.name] = len(self.bindings.pointers)
        functions = (self._pass("_partial", chunks, False), self._pass("_scan", chunks, True))
        return Generated(functions, tuple(self.partials))

    def _is_cut(self, axis: Axis) -> bool:
        """Whether to cut rows into chunks: few long rows, of sums that may be reassociated, so not of float64.

        Extremes wait for nothing: they seldom change, which the machine foresees.
        """
        if SCANS[self.ordered.how].extreme:
            return False
        shows = self.dtypes[self.plan.stores[0].buffer] is torch.float64
        return not shows and axis.hint >= LONG and math.prod(a.hint for a in self.kept) < FEW_ROWS

    def _has_index(self) -> bool:
        return SCANS[self.ordered.how].index

    def _pass(self, suffix: str, chunks: Expr, stores: bool) -> Function:
        """One function: units of chains, each from a row's or chunk's start; it stores results, or their last ones."""
        self.open_function(suffix)
        (axis,) = self.red_axes
        digits = [*self.digits(self.kept), ("chunk", ir.Name("chunks"))]
        self.emit_constants()
        self.open_chunks(chunks, axis)
        self.out.let("i64", "n", f"n_{axis.sym.name}")
        self.out.let("i64", "chains", functools.reduce(ir.Value.__mul__, (length for _, length in digits)))
        self._point(axis.sym.name, stores)
        self.out.open(ir.For("u", ir.Name("begin"), ir.Name("end")))
        first, chains, width = ir.Name("first"), ir.Name("chains"), ir.Number(SIDE_BY_SIDE)
        self.out.let("i64", "first", ir.Name("u") * width)
        self.out.let("i64", "count", ir.Select(first + width < chains, width, chains - first))
        self._starts(digits, joins=bool(self.partials) and stores)
        self._run()
        if not stores:
            with self._each_chain():
                self.out.set(ir.Name(f"{self.name}_p")[first + "j"], ACCS["j"])
                if self._has_index():
                    self.out.set(ir.Name(f"{self.name}_i")[first + "j"], ATS["j"])
        self.out.close()
        units = floordiv(product(a.size for a in self.kept) * chunks + (SIDE_BY_SIDE - 1), expr(SIDE_BY_SIDE))
        units = units * minimum(axis.size, 1)
        return Function(self.close_function(), units, self.work(), expr(0))

    def _each_chain(self) -> AbstractContextManager[None]:
        return self.out.block(ir.For("j", ir.Number(0), ir.Name("count")))

    def _fills(self) -> bool:
        """Whether the values are so costly that a vectorised loop computes a block of them before the scan."""
        cost = sum(row_cost(self.plan.rows[n]) for n in self.varying_rows([self.value_row()]))
        return cost >= FILLED_COST and not self._has_index()

    def _point(self, axis: str, stores: bool) -> None:
        """A function that takes a chain one step on: all rows that vary at all are computed in it, or before."""
        kept = tuple(("const i64", a.sym.name) for a in self.kept)
        kind, value, fills = CPP_TYPES[self.accumulator()], self.value_row(), self._fills()
        if fills:
            params = ((f"{kind}*", "xs"), *kept, ("const i64", "from"), ("const i64", "count"))
            self.out.open(ir.Routine("fill", params, inline=False))
            with self.out.block(self.simd("l", 0, "count")):
                self.out.let("i64", axis, ir.Name("from") + "l")
                for n in self.varying_rows([value]):
                    self.declare(n)
                x = ir.Convert(self.plan.rows[value].dtype, self.accumulator(), self.ref(value))
                self.out.set(ir.Name("xs")["l"], x)
            self.out.close()
        given = ((f"const {kind}", "x"),) if fills else ()
        self.out.open(ir.Routine("point", ((f"{kind}&", "acc"), ("i64&", "at"), *kept, ("const i64", axis), *given)))
        for n in self.varying_rows(self.passes[0].roots) if not fills else ():
            self.declare(n)
        self.put(stores, given=fills)
        self.out.close()

    def _starts(self, digits: list[tuple[str, ir.Value]], joins: bool) -> None:
        """Where the chains of a unit are, from where to where they run, and what they start with."""
        kind, spec, each = self.accumulator(), SCANS[self.ordered.how], ir.Name("each")
        self.out.scratch(CPP_TYPES[kind], "accs", SIDE_BY_SIDE)
        self.out.scratch("i64", "ats", SIDE_BY_SIDE, zero=True)
        for name in ("low", "high", *(f"of_{variable}" for variable, _ in digits[:-1])):
            self.out.scratch("i64", name, SIDE_BY_SIDE)
        unit, chunk, n, low, high = (ir.Name(name) for name in ("unit", "chunk", "n", "low", "high"))
        with self._each_chain():
            self.out.var("i64", "unit", ir.Name("first") + "j")
            for position, (variable, length) in reversed(list(enumerate(digits))):
                digit = unit % length if position else unit
                if variable == "chunk":
                    self.out.let("i64", "chunk", digit)
                else:
                    self.out.set(ir.Name(f"of_{variable}")["j"], digit)
                if position:
                    self.out.set(unit, length, "/")
            self.out.set(low["j"], ir.least(chunk * each, n))
            self.out.set(high["j"], ir.least(low["j"] + each, n))
            self.out.set(ACCS["j"], ir.Number(spec.identity(kind), kind))
            if joins:
                self._join_chunks(kind)

    def _join_chunks(self, kind: torch.dtype) -> None:
        """What the chunks before a chain's make."""
        here = ir.Name("first") + "j"
        with self.out.block(ir.For("c", here - "chunk", here)):
            self.out.let(CPP_TYPES[kind], "x", ir.Name(f"{self.name}_p")["c"])
            step = ir.Op("step", self.ordered.how, kind, (ACCS["j"], ir.Name("x")))
            if self._has_index():
                with self.out.block(ir.If(step)):
                    self.out.set(ACCS["j"], "x")
                    self.out.set(ATS["j"], ir.Name(f"{self.name}_i")["c"])
            else:
                self.out.set(ACCS["j"], step)

    def _run(self) -> None:
        """All chains side by side as far as the shortest goes, then each to its end; perhaps block by block."""
        fills, every = self._fills(), range(SIDE_BY_SIDE)
        kind = CPP_TYPES[self.accumulator()]
        low, length, count, done = (ir.Name(name) for name in ("low", "size", "count", "done"))
        left = ir.Name("high")["j"] - low["j"]
        self.out.scratch("i64", length.name, SIDE_BY_SIDE)
        if fills:
            longest = ir.Name("longest")
            self.out.scratch(kind, "xs", SIDE_BY_SIDE, FILLED, aligned=self.line)
            self.out.var("i64", longest.name, 0)
            with self._each_chain(), self.out.block(ir.If(left > longest)):
                self.out.set(longest, left)
            self.out.open(ir.For("b", ir.Number(0), longest, ir.Number(FILLED)))
        with self._each_chain():
            self.out.set(length["j"], left)
            if fills:
                with self.out.block(ir.If(length["j"] > FILLED)):
                    self.out.set(length["j"], FILLED)
                self.out.do("fill", ir.Name("xs")["j"], *self._kept_of("j"), low["j"], length["j"])
        self.out.var("i64", "done", 0)
        with self.out.block(ir.If(count.same(SIDE_BY_SIDE))):
            self.out.set(done, length[0])
            for j in every[1:]:
                with self.out.block(ir.If(length[j] < done)):
                    self.out.set(done, length[j])
            for j in every:
                self.out.var(kind, f"acc{j}", ACCS[j])
            for j in every:
                self.out.var("i64", f"at{j}", ATS[j])
            with self.out.block(ir.For("i", ir.Number(0), done)):
                for j in every:
                    self._step(f"acc{j}", f"at{j}", j, fills)
            for j in every:
                self.out.set(ACCS[j], f"acc{j}")
                self.out.set(ATS[j], f"at{j}")
        with self._each_chain():
            self.out.var(kind, "acc", ACCS["j"])
            self.out.var("i64", "at", ATS["j"])
            with self.out.block(ir.For("i", done, length["j"])):
                self._step("acc", "at", "j", fills)
            self.out.set(ACCS["j"], "acc")
            self.out.set(ATS["j"], "at")
            if fills:
                self.out.set(low["j"], length["j"], "+")
        if fills:
            self.out.close()

    def _kept_of(self, j: ir.Like) -> list[ir.Value]:
        return [ir.Name(f"of_{a.sym.name}")[j] for a in self.kept]

    def _step(self, acc: str, at: str, j: ir.Like, fills: bool) -> None:
        """Take chain `j` one step on, to its index `i`."""
        x = (ir.Name("xs")[j]["i"],) if fills else ()
        self.out.do("point", acc, at, *self._kept_of(j), ir.Name("low")[j] + "i", *x)


__all__ = ["ChainedScan"]
