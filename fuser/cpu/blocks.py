"""C++ for scans along rows, a block of a row at a time.

What is scanned is computed in lanes, as in any other loop. Then a helper of `ops/scans_cpp.py` scans the block, several
values at once, and lanes store it. That takes sums whose order does not show, and extremes with their places.
"""

from __future__ import annotations

import dataclasses

import torch

from fuser.cpu.chains import ChainedScan
from fuser.cpu.records import Bindings, Function
from fuser.cpu.text import cpp_expr
from fuser.ir.sizes import INDIRECT, LOOP, ONE, Expr, coefficient, expr, product, substitute, symbol, symbols
from fuser.ops import CPP_TYPES, SCANS, cpp_constant, cpp_convert, cpp_step, cpp_store
from fuser.scheduler.plan import Axis, KernelPlan, Store

BLOCK = 512  # elements of a row: what is computed of them lies in the first level cache
LONG = 1 << 18  # elements of a row that is cut: what comes before each chunk is added up first
SHORTEST = 16  # elements of a row; several shorter ones are taken side by side
OWN = ("ys", "places")  # a block's results before they are stored
_SUFFIX = {torch.float32: "f32", torch.float64: "f64", torch.int64: "i64", torch.int32: "i32"}


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
            return dtype if dtype in _SUFFIX else torch.int32
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
        name = self.open_function(suffix)
        (axis,) = self.red_axes
        cut = bool(self.partials)
        digits = [(a.sym.name, f"n_{a.sym.name}") for a in self.kept]
        self.emit_constants()
        if cut:
            self.out.add(f"const i64 chunks = {cpp_expr(chunks)};")
            self.out.add(f"const i64 each = chunks ? (n_{axis.sym.name} + chunks - 1) / chunks : 0;")
            digits.append(("chunk", "chunks"))
        self.open_units(digits)
        inner = self.closure(self._wanted())
        self.emit_unit_rows([*self._wanted(), *(d for n in inner for d in self.deps(n))], 0)
        self._start(cut and stores)
        low, high = ("from", "to") if cut else ("0", f"n_{axis.sym.name}")
        if cut:
            self.out.add("const i64 from = chunk * each;")
            self.out.add(f"const i64 to = from + each < n_{axis.sym.name} ? from + each : n_{axis.sym.name};")
        self.out.open(f"for (i64 v0 = {low}; v0 < {high}; v0 += {BLOCK})")
        self.out.add(f"const i64 count = v0 + {BLOCK} < {high} ? {BLOCK} : {high} - v0;")
        self._block(inner, stores)
        self.out.close()
        if not stores:
            self.out.add(f"{self.name}_p[u] = acc;")
        self.close_units(digits)
        units = product(a.size for a in self.kept) * chunks
        return Function(name, self.close_function(), units, self.work(), expr(0))

    def _start(self, joins: bool) -> None:
        kind = torch.float64 if self.accumulator().is_floating_point else torch.int64
        if self._is_extreme():
            kind = self.element() or kind
        start = cpp_constant(SCANS[self.ordered.how].identity(self.accumulator()), kind)
        self.out.add(f"{CPP_TYPES[kind]} acc = {start};")
        self.out.add("i64 place = 0;") if self._is_extreme() else None
        if joins:
            step = cpp_step(self.ordered.how, kind, "acc", f"{self.name}_p[c]")
            self.out.add(f"for (i64 c = u - chunk; c < u; ++c) acc = {step};")

    def _is_extreme(self) -> bool:
        return bool(SCANS[self.ordered.how].extreme)

    def _block(self, inner: list[int], stores: bool) -> None:
        """Compute, scan and store one block."""
        element = self.element()
        assert element is not None
        kind, value = CPP_TYPES[element], self.value_row()
        source = self._line(value)
        is_line = source is not None
        if not is_line:
            self.open_pieces(0, "v0", "l", BLOCK, "count")
        if value in self.pieces:
            source = f"piece{value}"
        if source is None:
            source = "xs"
            self.out.add(f"{kind} xs[{BLOCK}] {self.aligned};")
            self._open_block()
            for n in inner:
                self.declare(n)
            row = self.plan.rows[value]
            self.out.add(f"xs[l] = {cpp_convert(row.dtype, element, self.ref(value))};")
            self.out.close()
        goals = {self.is_place(s): s for s in self.plan.stores} if stores else {}
        to = {place: self._target(s, element, source) for place, s in goals.items()}
        arguments = f"{source}, count, acc, {to.get(False, f'({kind}*)0')}"
        if self._is_extreme():
            arguments += f", place, v0, {to.get(True, '(i64*)0')}"
        name = f"fuser_{'scan' if stores else 'total'}_{SCANS[self.ordered.how].helper}_{_SUFFIX[element]}"
        self.out.add(f"{name}({arguments});")
        for place, s in goals.items():
            if to[place] in OWN and s not in self.results:
                self._copy(s, torch.int64 if place else element, to[place])
        if not stores:
            self.results.clear()
        if not is_line:
            self.close_pieces(0, "v0", "count")

    def _open_block(self) -> None:
        self.out.add(self.pragma())
        self.out.open("for (i64 l = 0; l < count; ++l)")
        self.out.add(f"const i64 {self.red_axes[0].sym.name} = v0 + l;")

    def _line(self, n: int) -> str | None:
        """Where the values to scan lie side by side in memory as they are; None if they are computed."""
        row = self.plan.rows[n]
        if row.op != "load" or row.args or n in self.guarded:
            return None
        buffer, (address,) = row.attr
        return self._memory(buffer, address, self.element())

    def _memory(self, buffer: str, address: Expr, dtype: torch.dtype | None) -> str | None:
        axis = self.red_axes[0].sym
        plain = not any(x.kind == INDIRECT and self.is_full(int(x.name[1:])) for x in symbols(address))
        if self.checked or self.dtypes[buffer] is not dtype or coefficient(address, axis) != ONE or not plain:
            return None
        return f"{buffer} + ({self.index(substitute(address, {axis: symbol('v0', LOOP)}))})"

    def _target(self, s: Store, element: torch.dtype, source: str) -> str:
        """Where a block's results go: to memory straight away, or to where lanes convert them."""
        if s in self.results:  # floats that become float16
            return self.results[s].partition("[")[0]
        own = "places" if self.is_place(s) else "ys"
        dtype = torch.int64 if self.is_place(s) else element
        straight = self._memory(s.buffer, s.address, dtype)
        if straight is None:
            self.out.add(f"{CPP_TYPES[dtype]} {own}[{BLOCK}] {self.aligned};")
        return straight or own

    def _copy(self, s: Store, dtype: torch.dtype, made: str) -> None:
        """Store a block's results that are not where they belong."""
        self._open_block()
        own = self.dtypes[s.buffer]
        result = cpp_store(own, cpp_convert(dtype, self.plan.rows[s.row].dtype, f"{made}[l]"))
        self.out.add(f"{s.buffer}[{self.index(s.address)}] = {result};")
        self.out.close()


__all__ = ["BlockedScan"]
