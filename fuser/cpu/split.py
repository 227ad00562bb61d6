"""Split reductions, where few results need much work.

Chunks write partial results, a second function combines them, again in a fixed order. Chunks depend on sizes alone, so
any number of threads gives the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from fuser.cpu.accumulators import NO_PLACE
from fuser.cpu.nest import size
from fuser.cpu.records import Function, Generated, Partial
from fuser.cpu.reduction import ReductionNest
from fuser.cpu.vir import nodes as ir
from fuser.ir.sizes import Expr, expr, floordiv, minimum, product, symbol
from fuser.ops import CPP_TYPES, REDUCTIONS
from fuser.scheduler.kernel_plan import Axis, Reduce

CHUNK, COLUMN_CHUNK, MOST_CHUNKS = 4096, 32, 64


class SplitNest(ReductionNest):
    """Two functions."""

    def split(self) -> Generated:
        """Two functions: chunks write partial results; the second combines them and goes on."""
        axis = self.red_axes[0]
        least = CHUNK if axis is self.vector else COLUMN_CHUNK if len(self.red_axes) == 1 else 1
        chunks = minimum(floordiv(axis.size + (least - 1), expr(least)), MOST_CHUNKS)
        results = product(a.size for a in self.kept)
        for r in self.accumulators(0):
            spec = REDUCTIONS[r.kind]
            self.partials.append(Partial(f"{self.name}_p{r.number}", self.total_dtype(r), results * chunks))
            if spec.index:
                self.partials.append(Partial(f"{self.name}_i{r.number}", torch.int32, results * chunks))
        for p in self.partials:
            self.bindings.pointers[p.name] = len(self.bindings.pointers)
        first = self._partial_function(axis, chunks)
        second = self._combine_function(chunks)
        return Generated((first, second), tuple(self.partials))

    def _result_at(self) -> ir.Value:
        e = expr(0)
        for a in self.kept:
            e = e * symbol(f"n_{a.sym.name}") + expr(a.sym)
        return size(e)

    def _partial_at(self, chunk: ir.Value) -> ir.Value:
        """The index of a partial result. The results of one chunk are contiguous."""
        results = product(symbol(f"n_{a.sym.name}") for a in self.kept)
        return chunk * size(results) + self._result_at()

    def _partial_function(self, axis: Axis, chunks: Expr) -> Function:
        self.open_function("_partial")
        self.open_chunks(chunks, axis)
        digits, units = self._split_digits()
        digits = [*digits, ("chunk", ir.Name("chunks"))]
        self.emit_constants()
        self.open_units(digits)
        if self.is_column:
            self._column_block()
        decided = self._open_undecided()
        self.open_chunk(axis)
        self._turns = False
        self.emit_pass(0, {axis.sym: (ir.Name("from"), ir.Name("to"))})
        if not self.is_column:
            self.emit_fold(0, "from" if axis is self.vector else 0)
        self._store_partials()
        if decided:
            self.out.close()
        self.out.close()
        return Function(self.close_function(), units * chunks, self.work(), expr(0))

    def _open_undecided(self) -> bool:
        """Whether a chunk is skipped if the one before it has a NaN, which is the extreme of all values.

        It copies that chunk's results, if the same call made them. The code that follows is for all other chunks.
        """
        found = self.accumulators(0)
        if self.is_column or self.has_checks or not found:
            return False
        if not all(REDUCTIONS[r.kind].index and self.total_dtype(r).is_floating_point for r in found):
            return False
        chunk = ir.Name("chunk")
        before, here = self._partial_at(chunk - 1), self._partial_at(chunk)
        values = [ir.Name(f"{self.name}_p{r.number}") for r in found]
        nan = functools.reduce(ir.Value.__and__, (p[before].differs(p[before]) for p in values))
        with self.out.block(ir.If(ir.Binary("&&", (ir.Name("u") > "begin") & (chunk > 0), nan))):
            for p in (*values, *(ir.Name(f"{self.name}_i{r.number}") for r in found)):
                self.out.set(p[here], p[before])
        self.out.open(ir.Else())
        return True

    def _split_digits(self) -> tuple[list[tuple[str, ir.Value]], Expr]:
        if self.is_column:
            return self._column_digits()
        return self.digits(self.kept), product(a.size for a in self.kept)

    def _store_partials(self) -> None:
        if self.is_column:
            self.open_lanes()
        lane = ir.value("l" if self.is_column else 0)
        at = self._partial_at(ir.Name("chunk"))
        for r in self.accumulators(0):
            self.out.set(ir.Name(f"{self.name}_p{r.number}")[at], self.total(r, lane))
            if REDUCTIONS[r.kind].index:
                self.out.set(ir.Name(f"{self.name}_i{r.number}")[at], ir.Name(f"at{r.number}")[lane])
        if self.is_column:
            self.out.close()

    def _combine_function(self, chunks: Expr) -> Function:
        self.open_function("_combine")
        self.out.let("i64", "chunks", size(chunks))
        digits, units = self._split_digits()
        self.emit_constants()
        self.open_units(digits)
        if self.is_column:
            self._column_block()
        lanes = self.lanes if self.is_column else 1
        for r in self.accumulators(0):
            dtype, k = self.total_dtype(r), r.number
            if self.flushes(r) and not self.is_column:
                self.out.var(CPP_TYPES[dtype], f"tot{k}")
            else:
                self.out.scratch(CPP_TYPES[dtype], f"tot{k}" if self.flushes(r) else f"acc{k}", lanes)
            if REDUCTIONS[r.kind].index:
                self.out.scratch("i32", f"at{k}", lanes)
        for start in (True, False):
            if not start:
                self.out.open(ir.For("c", ir.Number(0), ir.Name("chunks")))
            if self.is_column:
                self.open_lanes()
            else:
                self.out.open(ir.Plain())
                self.out.let("i64", "l", 0)
            for r in self.accumulators(0):
                self._combine_one(r, start)
            self.out.close()
        self.out.close()
        self.emit_results(0)
        for phase in range(1, len(self.passes)):
            self.emit_outer_stores(phase)
        self.out.close()
        return Function(self.close_function(), units, results_work(self.kept, chunks), expr(0))

    def _combine_one(self, r: Reduce, start: bool) -> None:
        dtype, k = self.total_dtype(r), r.number
        spec = REDUCTIONS[r.kind]
        total, place = self.total(r, "l"), ir.Name(f"at{k}")["l"]
        if start:
            self.out.set(total, ir.Number(spec.identity(dtype), dtype))
            if spec.index:
                self.out.set(place, NO_PLACE)
            return
        at = self._partial_at(ir.Name("c"))
        one, its = (ir.Name(f"{self.name}_{kind}{k}")[at] for kind in "pi")
        self.out.add(self.join(r, dtype, total, one, place, its))


def results_work(kept: Sequence[Axis], chunks: Expr) -> Expr:
    """Operations of the combining function."""
    return product(a.size for a in kept) * chunks
