"""C++ for scans along rows.

Each step of a scan waits for the one before it, so a unit runs several independent scans side by side: of neighbouring
rows, or of chunks where rows are few and long. A first pass finds the carry into each chunk. Chunks depend on sizes
alone, so the bits are the same for any number of threads.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from fuser.cpu.facts import Facts
from fuser.cpu.frame import Digits, closed, digits_of, open_chunks, opened
from fuser.cpu.ordered import Scan, step
from fuser.cpu.records import Function, Generated, Partial
from fuser.cpu.rows import Rows
from fuser.cpu.vir import nodes as ir
from fuser.cpu.vir.builder import Builder
from fuser.ir.sizes import Expr, expr, floordiv, minimum, product
from fuser.scheduler.nodes import row_cost

ACCS, ATS, J = ir.Name("accs"), ir.Name("ats"), ir.Name("j")
SIDE_BY_SIDE = 4  # chains of a unit
SIDE_BY_SIDE_FROM = 25  # elements of a row: processors overlap several shorter rows by themselves
FEW_ROWS, LONG = 16, 1 << 15  # rows are cut if there are fewer and they are longer
FILLED_COST, FILLED = 8, 256  # element's operations from which lanes compute blocks; a block's elements
LEAST_CHUNK, MOST_CHUNKS = 4096, 64  # elements of a chunk; chunks of a row
Pass = Callable[[Scan, str, Expr, bool], Function]  # of the scan, a suffix, chunks, whether it stores


def chained(facts: Facts) -> Generated | None:
    """The functions of a scan along rows, without a vector axis; None if it does not pay. Extremes are `blocked`."""
    scan = Scan.of(facts)
    if scan.axis.hint < SIDE_BY_SIDE_FROM:
        return None
    return in_chunks(scan, is_cut(scan), _pass)


def in_chunks(scan: Scan, cut: bool, write: Pass) -> Generated:
    """One function; where rows are cut, one for the chunks' totals and one for the scan."""
    size = scan.axis.size
    chunks = minimum(floordiv(size + (LEAST_CHUNK - 1), expr(LEAST_CHUNK)), MOST_CHUNKS) if cut else expr(1)
    if not cut:
        return Generated((write(scan, "", chunks, True),))
    total = product(a.size for a in scan.facts.kept_axes) * chunks
    scan = Scan.of(scan.facts.with_partials([Partial(f"{scan.facts.name}_p", scan.dtype, total)]))
    functions = (write(scan, "_partial", chunks, False), write(scan, "_scan", chunks, True))
    return Generated(functions, scan.facts.partials)


def is_cut(scan: Scan) -> bool:
    """Whether to cut rows into chunks: few long rows, of sums that may be reassociated, so not of float64."""
    facts = scan.facts
    shows = facts.dtypes[facts.plan.stores[0].buffer] is torch.float64
    return not shows and scan.axis.hint >= LONG and math.prod(a.hint for a in facts.kept_axes) < FEW_ROWS


def _pass(scan: Scan, suffix: str, chunks: Expr, stores: bool) -> Function:
    """One function: each unit is several chains, each from the start of a row or chunk; it `stores` results or
    totals."""
    facts = scan.facts
    rows = opened(facts, suffix)
    digits = [*digits_of(facts.kept_axes), ("chunk", ir.Name("chunks"))]
    rows.constants()
    open_chunks(rows, chunks, scan.axis)
    out, chains = rows.out, _Chains(rows.out, scan)
    out.let("i64", "n", f"n_{scan.axis.sym.name}")
    out.let("i64", "chains", functools.reduce(operator.mul, (length for _, length in digits)))
    _point(rows, scan, stores)
    first, count, width = ir.Name("first"), ir.Name("chains"), ir.Number(SIDE_BY_SIDE)
    with out.block(ir.For("u", ir.Name("begin"), ir.Name("end"))):
        out.let("i64", "first", ir.Name("u") * width)
        out.let("i64", "count", ir.Select(first + width < count, width, count - first))
        chains.starts(digits, joins=bool(facts.partials) and stores)
        chains.run()
        if not stores:
            with chains.each():
                out.set(ir.Name(f"{facts.name}_p")[first + J], ACCS[J])
    units = floordiv(product(a.size for a in facts.kept_axes) * chunks + (SIDE_BY_SIDE - 1), expr(SIDE_BY_SIDE))
    return closed(rows, units * minimum(scan.axis.size, 1), suffix=suffix, sequential=True)


def _fills(scan: Scan) -> bool:
    """Whether the values are costly enough that a vectorised loop computes a block of them before the scan."""
    cost = sum(row_cost(scan.facts.plan.rows[n]) for n in scan.facts.passes.varying([scan.value]))
    return cost >= FILLED_COST


def _point(rows: Rows, scan: Scan, stores: bool) -> None:
    """The routine that takes a chain one step; rows that vary are computed in it, or before it."""
    facts, out, fills, axis = rows.facts, rows.out, _fills(scan), scan.axis.sym.name
    kept = tuple(("const i64", a.sym.name) for a in facts.kept_axes)
    if fills:
        params = ((f"{scan.kind}*", "xs"), *kept, ("const i64", "from"), ("const i64", "count"))
        with out.block(ir.Routine("fill", params, inline=False)), out.block(rows.simd("l", 0, "count")):
            out.let("i64", axis, ir.Name("from") + "l")
            for n in facts.passes.varying([scan.value]):
                rows.declare(n)
            out.set(ir.Name("xs")["l"], ir.Convert(scan.value_dtype, scan.dtype, rows.ref(scan.value)))
    given = ((f"const {scan.kind}", "x"),) if fills else ()
    params = ((f"{scan.kind}&", "acc"), ("i64&", "at"), *kept, ("const i64", axis), *given)
    with out.block(ir.Routine("point", params)):
        for n in facts.passes.varying(facts.passes[0].roots) if not fills else ():
            rows.declare(n)
        step(rows, scan, stores, given=fills)


class _Chains:
    """The chains of a unit, side by side."""

    def __init__(self, out: Builder, scan: Scan) -> None:
        self.out, self.scan, self.fills = out, scan, _fills(scan)

    def each(self) -> AbstractContextManager[None]:
        """A loop over the chains."""
        return self.out.block(ir.For("j", ir.Number(0), ir.Name("count")))

    def starts(self, digits: Digits, joins: bool) -> None:
        """Declare where the chains of a unit are, their ranges and their initial values."""
        out = self.out
        out.scratch(self.scan.kind, "accs", SIDE_BY_SIDE)
        out.scratch("i64", "ats", SIDE_BY_SIDE, zero=True)
        for name in ("low", "high", *(f"of_{variable}" for variable, _ in digits[:-1])):
            out.scratch("i64", name, SIDE_BY_SIDE)
        unit, chunk, n, low, high = (ir.Name(name) for name in ("unit", "chunk", "n", "low", "high"))
        with self.each():
            out.var("i64", "unit", ir.Name("first") + J)
            for position, (variable, length) in reversed(list(enumerate(digits))):
                digit = unit % length if position else unit
                if variable == "chunk":
                    out.let("i64", "chunk", digit)
                else:
                    out.set(ir.Name(f"of_{variable}")[J], digit)
                if position:
                    out.set(unit, length, "/")
            out.set(low[J], ir.least(chunk * "each", n))
            out.set(high[J], ir.least(low[J] + "each", n))
            out.set(ACCS[J], self.scan.identity)
            if joins:  # the total of the chunks before a chain
                here = ir.Name("first") + J
                with out.block(ir.For("c", here - "chunk", here)):
                    out.let(self.scan.kind, "x", ir.Name(f"{self.scan.facts.name}_p")["c"])
                    out.set(ACCS[J], self.scan.join(ACCS[J], ir.Name("x")))

    def run(self) -> None:
        """Run all chains side by side as far as the shortest, then each to its end; in blocks if values are
        precomputed."""
        out, kind, low, length, done = self.out, self.scan.kind, *map(ir.Name, ("low", "size", "done"))
        out.scratch("i64", length.name, SIDE_BY_SIDE)
        with self._each_block() if self.fills else nullcontext():
            with self.each():
                out.set(length[J], ir.Name("high")[J] - low[J])
                if self.fills:
                    with out.block(ir.If(length[J] > FILLED)):
                        out.set(length[J], FILLED)
                    out.do("fill", ir.Name("xs")[J], *self._kept_of(J), low[J], length[J])
            out.var("i64", "done", 0)
            with out.block(ir.If(ir.Name("count").same(SIDE_BY_SIDE))):
                self._together(length, done)
            with self.each():
                out.var(kind, "acc", ACCS[J])
                out.var("i64", "at", ATS[J])
                with out.block(ir.For("i", done, length[J])):
                    self._step("acc", "at", J)
                out.set(ACCS[J], "acc")
                out.set(ATS[J], "at")
                if self.fills:
                    out.set(low[J], length[J], "+")

    @contextmanager
    def _each_block(self) -> Iterator[None]:
        """Blocks of computed values of all chains, up to the end of the longest."""
        out, longest, left = self.out, ir.Name("longest"), ir.Name("high")[J] - ir.Name("low")[J]
        out.scratch(self.scan.kind, "xs", SIDE_BY_SIDE, FILLED, aligned=self.scan.facts.machine.line_bytes)
        out.var("i64", longest.name, 0)
        with self.each(), out.block(ir.If(left > longest)):
            out.set(longest, left)
        with out.block(ir.For("b", ir.Number(0), longest, ir.Number(FILLED))):
            yield

    def _together(self, length: ir.Name, done: ir.Name) -> None:
        """Run all chains together, up to the end of the shortest."""
        out, every = self.out, range(SIDE_BY_SIDE)
        out.set(done, length[0])
        for j in every[1:]:
            with out.block(ir.If(length[j] < done)):
                out.set(done, length[j])
        for j in every:
            out.var(self.scan.kind, f"acc{j}", ACCS[j])
        for j in every:
            out.var("i64", f"at{j}", ATS[j])
        with out.block(ir.For("i", ir.Number(0), done)):
            for j in every:
                self._step(f"acc{j}", f"at{j}", j)
        for j in every:
            out.set(ACCS[j], f"acc{j}")
            out.set(ATS[j], f"at{j}")

    def _kept_of(self, j: ir.Like) -> list[ir.Value]:
        return [ir.Name(f"of_{a.sym.name}")[j] for a in self.scan.facts.kept_axes]

    def _step(self, acc: str, at: str, j: ir.Like) -> None:
        """Take chain `j` one step, at its index `i`."""
        x = (ir.Name("xs")[j]["i"],) if self.fills else ()
        self.out.do("point", acc, at, *self._kept_of(j), ir.Name("low")[j] + "i", *x)


__all__ = ["chained", "in_chunks", "is_cut"]
