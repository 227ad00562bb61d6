"""C++ for scatters and scans: nests whose inner axes run in order, one point after the other.

Points that differ along kept axes write different elements, so units of kept axes run on any thread, and the vector
axis runs over the lanes of a block. The other axes run in the plan's order, so the bits are always the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch

from fuser.cpu.columns import checks_in_lanes, looked_up_once
from fuser.cpu.facts import Facts
from fuser.cpu.frame import closed, each_unit, opened, units_of
from fuser.cpu.prepared import prepared
from fuser.cpu.records import Function
from fuser.cpu.reduction import decided
from fuser.cpu.rows import Rows
from fuser.cpu.vir import nodes as ir
from fuser.ir.loop_body import Row
from fuser.ir.sizes import minimum, product
from fuser.lazy_dataclasses import dataclass
from fuser.ops import CPP_TYPES, SCANS, ScanRow, compute_dtype
from fuser.scheduler.kernel_plan import Axis, Store


def how_of(facts: Facts) -> str:
    """The operation of an ordered nest: a name in the table of scans or scatters."""
    assert facts.plan.ordered is not None
    return facts.plan.ordered.how


def _in_order(rows: Rows, put: Callable[[], None], before: Callable[[], None] | None = None) -> Function:
    """The whole function: units, loops in order, then lanes if there is a vector axis; `put` writes one point's work.

    `before` writes what a unit computes before its loops; with it, lanes may load backwards, and float16 as float32.
    """
    facts, out = rows.facts, rows.out
    digits, units = units_of(facts)
    rows.constants()
    with each_unit(rows, digits):
        rows.outside(facts.passes[0].before)
        if before is not None:
            before()
        for a in facts.reduced_axes:
            out.open(ir.For(a.sym.name, ir.Number(0), ir.Name(f"n_{a.sym.name}")))
        known = looked_up_once(facts, 0) if facts.vector is not None else {}
        for n in known:
            rows.declare(n)
        with _lanes(rows, before is not None, checks_in_lanes(facts, known)):
            for n in facts.passes[0].inner:
                if n not in known:
                    rows.declare(n)
            put()
        for _ in facts.reduced_axes:
            out.close()
    units = units * minimum(product(a.size for a in facts.reduced_axes), 1)
    return closed(rows, units, sequential=before is not None and facts.vector is None)


@contextmanager
def _lanes(rows: Rows, prepares: bool, checks: bool) -> Iterator[None]:
    if rows.facts.vector is None:
        yield
    else:
        with prepared(rows, 0, rows.block()) if prepares else nullcontext(), rows.lanes(checks=checks):
            yield


# -- scatters ---------------------------------------------------------------------------------------------------------
def scatter(facts: Facts) -> Function:
    """The function of a scatter: the value of each point is combined with the element at its computed index."""
    rows = opened(decided(facts))
    return _in_order(rows, lambda: _combine(rows))


def _combine(rows: Rows) -> None:
    (s,) = rows.plan.stores
    dtype, value, how = rows.facts.dtypes[s.buffer], rows.ref(s.row), how_of(rows.facts)
    rows.out.let("i64", "place", rows.index(s.address))
    target = ir.Name(s.buffer)["place"]
    if how:
        rows.out.let(CPP_TYPES[compute_dtype(dtype)], "old", ir.Decode(dtype, target))
        value = ir.Op("combine", how, compute_dtype(dtype), (ir.Name("old"), value))
    rows.out.set(target, ir.Encode(dtype, value))


# -- scans ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Scan:
    """A scan: each point stores the combination of the values up to it.

    how, spec: its row of the table. value: the row whose values are scanned; dtype: of the carry. pair: the row of a
    value and its index, where indices are results.
    """

    facts: Facts
    how: str
    spec: ScanRow
    value: int
    dtype: torch.dtype
    pair: Row | None

    @staticmethod
    def of(facts: Facts) -> Scan:
        """The scan of a plan."""
        stores, rows, how = facts.plan.stores, facts.plan.rows, how_of(facts)
        pair = next((r for r in (rows[s.row] for s in stores) if r.op == "pair"), None)
        value = pair.args[0] if pair is not None else stores[0].row
        return Scan(facts, how, SCANS[how], value, SCANS[how].accumulate(rows[value].dtype), pair)

    @property
    def kind(self) -> str:
        """The C++ type of the carry."""
        return CPP_TYPES[self.dtype]

    @property
    def value_dtype(self) -> torch.dtype:
        """The dtype of the scanned values."""
        return self.facts.plan.rows[self.value].dtype

    @property
    def axis(self) -> Axis:
        """The axis of a scan along rows."""
        (axis,) = self.facts.reduced_axes
        return axis

    @functools.cached_property
    def identity(self) -> ir.Number:
        """The initial carry."""
        return ir.Number(self.spec.identity(self.dtype), self.dtype)

    def is_place(self, s: Store) -> bool:
        """Whether a store is of the index of the extreme, not of its value."""
        return self.facts.plan.rows[s.row].op == "pair"

    def join(self, acc: ir.Value, x: ir.Value, dtype: torch.dtype | None = None) -> ir.Op:
        """The next carry; for an index scan, whether `x` is taken."""
        return ir.Op("step", self.how, dtype or self.dtype, (acc, x))


def scan(facts: Facts) -> Function:
    """The function of a scan in the plan's order; with a vector axis, neighbours are scanned side by side in lanes."""
    found = Scan.of(decided(facts))
    rows = opened(found.facts)
    return _in_order(rows, lambda: step(rows, found), lambda: _start(rows, found))


def _start(rows: Rows, scan: Scan) -> None:
    out, lanes = rows.out, rows.facts.lanes
    if rows.facts.vector is None:
        out.var(scan.kind, "acc", scan.identity)
        if scan.spec.index:
            out.var("i64", "at", 0)
        return
    starts: list[ir.Statement] = [ir.Set(ir.Name("accs")["l"], scan.identity)]
    out.scratch(scan.kind, "accs", lanes)
    if scan.spec.index:
        out.scratch("i64", "ats", lanes)
        starts.append(ir.Set(ir.Name("ats")["l"], ir.Number(0)))
    out.each(lanes, *starts)


def step(rows: Rows, scan: Scan, stores: bool = True, given: bool = False) -> None:
    """The next step of the scan; `given`: `x` is already declared. `stores`: results are stored."""
    out, one, x = rows.out, rows.facts.vector is None, ir.Name("x")
    acc: ir.Value = ir.Name("acc") if one else ir.Name("accs")["l"]
    at: ir.Value = ir.Name("at") if one else ir.Name("ats")["l"]
    if not given:
        out.let(scan.kind, "x", ir.Convert(scan.value_dtype, scan.dtype, rows.ref(scan.value)))
    if one and scan.spec.extreme:
        _take_extreme(rows, scan)
    elif scan.spec.index:
        out.let("bool", "better", scan.join(acc, x))
        out.set(acc, ir.Select(ir.Name("better"), x, acc))
        out.set(at, ir.Select(ir.Name("better"), _here(rows, scan), at))
    else:
        out.set(acc, scan.join(acc, x))
    for s in rows.plan.stores if stores else ():
        if s in rows.results:
            out.set(rows.results[s], ir.Convert(scan.dtype, torch.float32, acc))
            continue
        # Storing rounds, so the conversion to a 16-bit float is skipped.
        dtype = rows.facts.dtypes[s.buffer]
        result = at if scan.is_place(s) else ir.Encode(dtype, ir.Convert(scan.dtype, compute_dtype(dtype), acc))
        out.set(ir.Name(s.buffer)[rows.index(s.address)], result)


def _here(rows: Rows, scan: Scan) -> ir.Value:
    assert scan.pair is not None
    return rows.ref(scan.pair.args[1])


def _take_extreme(rows: Rows, scan: Scan) -> None:
    """A new extreme is rare: a branch costs less than a select, which lengthens the dependence chain."""
    x, acc = ir.Name("x"), ir.Name("acc")
    better: ir.Value = ir.Unary("!", ir.Binary(_LOSES[scan.spec.extreme], x, acc))
    if scan.dtype.is_floating_point:  # NaN stays, except that a new NaN replaces it
        better = ir.Binary("&&", better, ir.Binary("||", acc.same(acc), x.differs(x)))
    with rows.out.block(ir.If(better, rare=True)):
        rows.out.set(acc, x)
        if scan.spec.index:
            rows.out.set("at", _here(rows, scan))


_LOSES = {">": "<", "<": ">"}  # how a value loses, by how it wins

__all__ = ["Scan", "how_of", "scan", "scatter", "step"]
