"""C++ for scans along rows, a block of a row at a time.

The values to scan are computed in lanes, as in any other loop. Then a helper of `ops/scans_cpp.py` scans the block,
several values at once, and lanes store the results. This is for sums that may be reassociated, and extremes with their
indices.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from dataclasses import replace

import torch

from fuser.cpu import chains
from fuser.cpu.facts import Facts
from fuser.cpu.frame import closed, digits_of, each_unit, open_chunk, open_chunks, open_count, opened
from fuser.cpu.ordered import Scan
from fuser.cpu.prepared import prepared
from fuser.cpu.records import Function, Generated
from fuser.cpu.rows import Rows
from fuser.cpu.vir import nodes as ir
from fuser.cpu.vir.calls import SCANNED
from fuser.ir.sizes import ONE, Expr, coefficient, minimum, product, rows_in
from fuser.lazy_dataclasses import dataclass
from fuser.ops import CPP_TYPES
from fuser.scheduler.kernel_plan import Store

BLOCK = 512  # elements of a row: a block of computed values fits into the first level cache
LONG = 1 << 18  # elements of a row that is cut into chunks, whose totals are added up first
SHORTEST = 16  # elements of a row; several shorter rows are scanned side by side
YS, PLACES = ir.Name("ys"), ir.Name("places")  # a block's results before they are stored
ACC, COUNT, V0 = ir.Name("acc"), ir.Name("count"), ir.Name("v0")


def blocked(facts: Facts) -> Generated | None:
    """The functions of a scan without a vector axis, vectorised along its one axis; None if blocks do not fit it."""
    (axis,) = facts.reduced_axes
    scan = Scan.of(replace(facts, plan=replace(facts.plan, vector=axis.sym), lanes=BLOCK))
    if axis.hint < SHORTEST or _element(scan) is None:
        return None
    # Products are never cut: the products of two chunks may be 0 and infinite although the whole product is neither.
    cut = scan.spec.adds and axis.hint >= LONG and chains.is_cut(scan)
    return chains.in_chunks(scan, cut, _pass)


def _element(scan: Scan) -> torch.dtype | None:
    """The element type of a block; None if the helpers have no such scan, or it may not be reassociated."""
    spec, dtype, facts = scan.spec, scan.value_dtype, scan.facts
    if spec.extreme:
        return dtype if dtype in SCANNED else torch.int32
    if dtype is torch.float32 and spec.helper:
        return None if facts.dtypes[facts.plan.stores[0].buffer] is torch.float64 else dtype
    return torch.int64 if spec.adds and not dtype.is_floating_point else None


def _pass(scan: Scan, suffix: str, chunks: Expr, stores: bool) -> Function:
    """One function: each unit is a row or a chunk of one."""
    facts, cut, axis = scan.facts, bool(scan.facts.partials), scan.axis
    element = _element(scan)
    assert element is not None
    rows = opened(facts, suffix)
    out, block = rows.out, _Block(rows, scan, element, stores)
    rows.constants()
    digits, low, high = digits_of(facts.kept_axes), ir.value(0), ir.value(f"n_{axis.sym.name}")
    if cut:
        open_chunks(rows, chunks, axis)
        digits.append(("chunk", ir.Name("chunks")))
        low, high = ir.value("from"), ir.value("to")
    with each_unit(rows, digits):
        rows.outside(facts.passes[0].before)
        _start(rows, scan, element, cut and stores)
        if cut:
            open_chunk(rows, axis)
        with out.block(ir.For("v0", low, high, ir.Number(BLOCK))):
            open_count(rows, BLOCK, high)
            block.emit()
        if not stores:
            out.set(ir.Name(f"{facts.name}_p")["u"], "acc")
    # An empty axis has no units: values that are constant along it would be read, and may not exist.
    units = product(a.size for a in facts.kept_axes) * chunks * minimum(axis.size, 1)
    return closed(rows, units, suffix=suffix)


def _start(rows: Rows, scan: Scan, element: torch.dtype, joins: bool) -> None:
    kind = torch.float64 if scan.dtype.is_floating_point else torch.int64
    if scan.spec.extreme:
        kind = element
    rows.out.var(CPP_TYPES[kind], "acc", ir.Number(scan.identity.number, kind))
    if scan.spec.extreme:
        rows.out.var("i64", "place", 0)
    if joins:
        before = ir.Name(f"{rows.facts.name}_p")["c"]
        with rows.out.block(ir.For("c", ir.Name("u") - "chunk", ir.Name("u"))):
            rows.out.set("acc", scan.join(ACC, before, kind))


@dataclass(frozen=True)
class _Block:
    """One block of a row: computed, scanned and stored. Its elements have the dtype `element`."""

    rows: Rows
    scan: Scan
    element: torch.dtype
    stores: bool

    @functools.cached_property
    def line(self) -> tuple[str, Expr] | None:
        """The buffer and offset of the values to scan, if they are contiguous in memory in their dtype; else None."""
        row = self.rows.plan.rows[self.scan.value]
        if row.op != "load" or row.args or self.scan.value in self.rows.facts.guarded:
            return None
        line = row.buffer, row.address
        return line if self._is_memory(*line, self.element) else None

    def _is_memory(self, buffer: str, address: Expr, dtype: torch.dtype) -> bool:
        """Whether a block of `dtype` is contiguous in a buffer."""
        facts = self.rows.facts
        plain = not any(map(facts.is_full, rows_in(address)))
        same = not facts.checked and facts.dtypes[buffer] is dtype
        return same and coefficient(address, self.scan.axis.sym) == ONE and plain

    def emit(self) -> None:
        """Statements for one block, from `v0` on."""
        rows, out, scan, spec = self.rows, self.rows.out, self.scan, self.scan.spec
        pieces = prepared(rows, 0, rows.block(), narrow=self.stores)
        with pieces if self.line is None else nullcontext():
            source = self._source()
            goals = {scan.is_place(s): s for s in rows.plan.stores} if self.stores else {}
            to = {place: self._target(s) for place, s in goals.items()}
            block = ir.ScanBlock(scan.how, self.element, source, COUNT, ACC, to.get(False), not self.stores)
            if spec.extreme:
                block = replace(block, place=ir.Name("place"), base=V0, places=to.get(True))
            out.add(block)
            for place, s in goals.items():
                if to[place] in (YS, PLACES) and s not in rows.results:
                    self._copy(s, torch.int64 if place else self.element, to[place])

    def _source(self) -> ir.Value:
        """The values to scan; they are computed into a buffer if they are not in one."""
        rows, out, value = self.rows, self.rows.out, self.scan.value
        if self.line is not None:
            return rows.address_from("v0", *self.line)
        found = rows.places.get(value)
        if found is not None and not found.stored:
            return ir.Name(f"piece{value}")
        xs = ir.Name("xs")
        out.scratch(CPP_TYPES[self.element], "xs", BLOCK, aligned=rows.facts.machine.line_bytes)
        with rows.lanes():
            for n in rows.facts.passes[0].inner:
                rows.declare(n)
            out.set(xs["l"], ir.Convert(self.scan.value_dtype, self.element, rows.ref(value)))
        return xs

    def _target(self, s: Store) -> ir.Value:
        """Where a block's results are written: to memory directly, or to a buffer from which lanes convert them."""
        rows = self.rows
        if s in rows.results:  # float32 that is stored as float16
            return rows.results[s].array
        dtype, own = (torch.int64, PLACES) if self.scan.is_place(s) else (self.element, YS)
        if self._is_memory(s.buffer, s.address, dtype):
            return rows.address_from("v0", s.buffer, s.address)
        rows.out.scratch(CPP_TYPES[dtype], own.name, BLOCK, aligned=rows.facts.machine.line_bytes)
        return own

    def _copy(self, s: Store, dtype: torch.dtype, made: ir.Value) -> None:
        """Store a block's results from their buffer."""
        rows = self.rows
        with rows.lanes():
            result = ir.Convert(dtype, rows.plan.rows[s.row].dtype, made["l"])
            rows.out.set(ir.Name(s.buffer)[rows.index(s.address)], ir.Encode(rows.facts.dtypes[s.buffer], result))


__all__ = ["blocked"]
