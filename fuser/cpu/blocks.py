"""C++ for scans along rows, a block of a row at a time.

What is scanned is computed in lanes, as in any other loop. Then a helper of `ops/scans_cpp.py` scans the block, several
values at once, and lanes store it. That takes sums whose order does not show, and extremes with their places.
"""

from __future__ import annotations

import dataclasses

import torch

from fuser.cpu.chains import ChainedScan
from fuser.cpu.records import Bindings, Function
from fuser.cpu.vir import nodes as ir
from fuser.cpu.vir.printer import SCANNED
from fuser.ir.sizes import LOOP, ONE, Expr, coefficient, expr, product, substitute, symbol
from fuser.ops import CPP_TYPES, SCANS
from fuser.scheduler.kernel_plan import Axis, KernelPlan, Store, address_rows

BLOCK = 512  # elements of a row: a block of computed values fits into the first level cache
LONG = 1 << 18  # elements of a row that is cut into chunks, whose totals are added up first
SHORTEST = 16  # elements of a row; several shorter ones are taken side by side
YS, PLACES = ir.Name("ys"), ir.Name("places")  # a block's results before they are stored


class BlockedScan(ChainedScan):
    """A scan along one row for each unit, or along a chunk of it."""

    @classmethod
    def of(cls, plan: KernelPlan, name: str, bindings: Bindings) -> BlockedScan | None:
        """The nest of a scan over no lanes, whose one axis becomes the lanes'; None if blocks do not fit it."""
        (axis,) = plan.reduced_axes
        nest = cls(dataclasses.replace(plan, vector=axis.sym), name, bindings)
        return nest if axis.hint >= SHORTEST and nest.element() is not None else None

    def element(self) -> torch.dtype | None:
        """What blocks consist of; None where the helpers have no such scan, or its order would show."""
        spec, dtype = SCANS[self.ordered.how], self.plan.rows[self.value_row()].dtype
        if spec.extreme:
            return dtype if dtype in SCANNED else torch.int32
        if dtype is torch.float32 and spec.helper:
            return None if self.dtypes[self.plan.stores[0].buffer] is torch.float64 else dtype
        return torch.int64 if spec.adds and not dtype.is_floating_point else None

    def _is_cut(self, axis: Axis) -> bool:
        """As of chains; products never: two chunks' may be 0 and infinite where their product is neither."""
        return SCANS[self.ordered.how].adds and axis.hint >= LONG and super()._is_cut(axis)

    def _choose_lanes(self) -> int:
        return BLOCK

    def _pass(self, suffix: str, chunks: Expr, stores: bool) -> Function:
        """One function: each unit is a row or a chunk of one."""
        self.open_function(suffix)
        (axis,) = self.red_axes
        cut = bool(self.partials)
        digits = self.digits(self.kept)
        self.emit_constants()
        if cut:
            self.open_chunks(chunks, axis)
            digits.append(("chunk", ir.Name("chunks")))
        self.open_units(digits)
        self.emit_unit_rows(self.passes[0].before)
        self._start(cut and stores)
        low, high = self._range(axis, {axis.sym: (ir.Name("from"), ir.Name("to"))} if cut else {})
        if cut:
            self.open_chunk(axis)
        with self.out.block(ir.For("v0", low, high, ir.Number(BLOCK))):
            self.open_count(BLOCK, high)
            self._block(stores)
        if not stores:
            self.out.set(ir.Name(f"{self.name}_p")["u"], "acc")
        self.out.close()
        units = product(a.size for a in self.kept) * chunks
        return Function(self.close_function(), units, self.work(), expr(0))

    def _start(self, joins: bool) -> None:
        kind = torch.float64 if self.accumulator().is_floating_point else torch.int64
        if self._is_extreme():
            kind = self.element() or kind
        self.out.var(CPP_TYPES[kind], "acc", ir.Number(SCANS[self.ordered.how].identity(self.accumulator()), kind))
        if self._is_extreme():
            self.out.var("i64", "place", 0)
        if joins:
            before = ir.Name(f"{self.name}_p")["c"]
            with self.out.block(ir.For("c", ir.Name("u") - "chunk", ir.Name("u"))):
                self.out.set("acc", ir.Op("step", self.ordered.how, kind, (ir.Name("acc"), before)))

    def _is_extreme(self) -> bool:
        return bool(SCANS[self.ordered.how].extreme)

    def _block(self, stores: bool) -> None:
        """Compute, scan and store one block."""
        element = self.element()
        assert element is not None
        kind, value = CPP_TYPES[element], self.value_row()
        source = self._line(value)
        is_line = source is not None
        if not is_line:
            self.open_pieces(0, "v0", "l", BLOCK, "count")
        if value in self.pieces:
            source = ir.Name(f"piece{value}")
        if source is None:
            source = ir.Name("xs")
            self.out.scratch(kind, "xs", BLOCK, aligned=self.line)
            self._open_block()
            for n in self.passes[0].inner:
                self.declare(n)
            self.out.set(source["l"], ir.Convert(self.plan.rows[value].dtype, element, self.ref(value)))
            self.out.close()
        goals = {self.is_place(s): s for s in self.plan.stores} if stores else {}
        to = {place: self._target(s, element) for place, s in goals.items()}
        count, acc, how = ir.Name("count"), ir.Name("acc"), self.ordered.how
        block = ir.ScanBlock(how, element, source, count, acc, to.get(False), not stores)
        if self._is_extreme():
            at = ir.Name("place"), ir.Name("v0"), to.get(True)
            block = dataclasses.replace(block, place=at[0], base=at[1], places=at[2])
        self.out.add(block)
        for place, s in goals.items():
            if to[place] in (YS, PLACES) and s not in self.results:
                self._copy(s, torch.int64 if place else element, to[place])
        if not stores:
            self.results.clear()
        if not is_line:
            self.close_pieces(0, "v0", "count")

    def _open_block(self) -> None:
        self.out.open(self.simd("l", 0, "count"))
        self.out.let("i64", self.red_axes[0].sym.name, ir.Name("v0") + "l")

    def _line(self, n: int) -> ir.Value | None:
        """A pointer to the values to scan if they are contiguous in memory as they are; None if they are computed."""
        row = self.plan.rows[n]
        if row.op != "load" or row.args or n in self.guarded:
            return None
        buffer, (address,) = row.attr
        return self._memory(buffer, address, self.element())

    def _memory(self, buffer: str, address: Expr, dtype: torch.dtype | None) -> ir.Value | None:
        axis = self.red_axes[0].sym
        plain = not any(map(self.is_full, address_rows(address)))
        if self.checked or self.dtypes[buffer] is not dtype or coefficient(address, axis) != ONE or not plain:
            return None
        return self.address(buffer, substitute(address, {axis: symbol("v0", LOOP)}))

    def _target(self, s: Store, element: torch.dtype) -> ir.Value:
        """Where a block's results go: to memory straight away, or to where lanes convert them."""
        if s in self.results:  # floats that become float16
            return self.results[s].array
        dtype, own = (torch.int64, PLACES) if self.is_place(s) else (element, YS)
        straight = self._memory(s.buffer, s.address, dtype)
        if straight is None:
            self.out.scratch(CPP_TYPES[dtype], own.name, BLOCK, aligned=self.line)
        return straight or own

    def _copy(self, s: Store, dtype: torch.dtype, made: ir.Value) -> None:
        """Store a block's results that are not where they belong."""
        self._open_block()
        result = ir.Convert(dtype, self.plan.rows[s.row].dtype, made["l"])
        self.out.set(ir.Name(s.buffer)[self.index(s.address)], ir.Encode(self.dtypes[s.buffer], result))
        self.out.close()


__all__ = ["BlockedScan"]
