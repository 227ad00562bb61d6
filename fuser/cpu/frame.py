"""Head and tail of a function, and the loop over its units: rows of results, blocks of columns, chunks of long rows."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from fuser.cpu.facts import Facts, no_row, size, storage_type
from fuser.cpu.records import Function
from fuser.cpu.rows import Rows
from fuser.cpu.streams import may_stream
from fuser.cpu.text import cpp_name
from fuser.cpu.vir import nodes as ir
from fuser.ir.loop_body import is_checked, row_exprs
from fuser.ir.ranges import NO_LOOPS
from fuser.ir.sizes import INDIRECT, ZERO, Expr, IntLike, Sym, expr, floordiv, product, symbols
from fuser.kernel_spec import OUT_OF_BOUNDS
from fuser.scheduler.kernel_plan import Axis

STATUS = ir.Unary("*", ir.Name("status"))
Digits = list[tuple[str, ir.Value]]  # variables of a unit's number and how many values each has; the last is fastest


def opened(facts: Facts, suffix: str = "") -> Rows:
    """Open a new function: pointers, sizes, and values that depend on no axis."""
    rows, plan = Rows(facts), facts.plan
    out = rows.out
    _pointers(rows, facts.name + suffix)
    for sym in sorted(_symbols(facts)):
        out.let("i64", cpp_name(sym), ir.Slot("s", facts.bindings.slots[sym]))
    for a in plan.axes:
        out.let("i64", f"n_{a.sym.name}", size(a.size))
    if facts.guarded:
        none = [ir.Name(f"n_{a.sym.name}").same(0) for a in facts.reduced_axes]
        out.let("bool", "empty", functools.reduce(operator.or_, none))
    if facts.has_checks:
        out.var("int", "bad", 0)
        for row in plan.rows:
            if is_checked(row) and len(row.args) == 1:
                with out.block(ir.If(rows.index(row.attr[0], "floor") <= 0)):
                    out.set(STATUS, 1)
                    out.add(ir.Return())
    if facts.streams:
        may_stream(rows)
    return rows


def _pointers(rows: Rows, function: str) -> None:
    facts = rows.facts
    counts, partials = facts.bindings.counts, {p.name: p for p in facts.partials}
    stored = {s.buffer for s in facts.plan.stores} | set(partials)
    for buffer, dtype in (*facts.plan.buffers, *((p.name, p.dtype) for p in facts.partials)):
        if buffer not in facts.bindings.pointers:  # in scratch memory, which the function divides itself
            continue
        checked = None
        if counts is not None:
            count = counts.get(buffer) or partials[buffer].size
            checked = (ir.Offset(count, "floor", ir.Scope(no_row, NO_LOOPS, facts.bindings.slots)), function)
        at = ir.Slot("ptrs", facts.bindings.pointers[buffer])
        rows.out.add(ir.Pointer(storage_type(dtype), buffer, at, buffer not in stored, checked))


def _symbols(facts: Facts) -> set[Sym]:
    """The sizes and strides that a function needs as variables."""
    own, plan = {a.sym for a in facts.plan.axes}, facts.plan
    exprs = [e for r in plan.rows for e in row_exprs(r)] + [s.address for s in plan.stores]
    exprs += [a.size for a in plan.axes] + [p.size for p in facts.partials]
    return {s for e in exprs for s in symbols(e) if s.kind != INDIRECT and s not in own}


def closed(
    rows: Rows, units: Expr, work: Expr | None = None, scratch: Expr = ZERO, suffix: str = "", sequential: bool = False
) -> Function:  # fmt: skip
    """Close the function that `opened` began. `work` is the nest's unless given."""
    facts, out = rows.facts, rows.out
    if facts.streams:
        out.add(ir.Block(ir.If(ir.Name("stream")), (ir.StreamEnd(),)))
    if facts.has_checks:
        bad: ir.Value = ir.Name("bad")
        bad = ir.Binary("&&", bad, STATUS.differs(OUT_OF_BOUNDS)) if facts.checked else bad
        with out.block(ir.If(bad)):
            out.set(STATUS, 1)
    code = ir.Kernel(facts.name + suffix, tuple(out.statements), facts.checked, sequential)
    return Function(code, units, facts.work() if work is None else work, scratch)


# -- units ------------------------------------------------------------------------------------------------------------
def digits_of(axes: Iterable[Axis]) -> Digits:
    """The digits of a unit's number, one for each of `axes`."""
    return [(a.sym.name, ir.Name(f"n_{a.sym.name}")) for a in axes]


def blocks_of(a: Axis, length: IntLike, name: str) -> tuple[tuple[str, ir.Value], Expr]:
    """The digit `name` of blocks of an axis, and how many blocks there are."""
    each = expr(length)
    count = (ir.Name(f"n_{a.sym.name}") + size(each - 1)) // size(each)
    return (name, count), floordiv(a.size + (each - 1), each)


def units_of(facts: Facts, axes: Sequence[Axis] | None = None) -> tuple[Digits, Expr]:
    """The digits of a unit along the kept axes (and of its block of columns), and the number of units.

    `axes`: the axes to use in place of the kept ones; the lanes' axis is not among them.
    """
    axes = [a for a in facts.kept_axes if not facts.in_blocks or a is not facts.vector] if axes is None else axes
    digits, units = digits_of(axes), product(a.size for a in axes)
    if facts.in_blocks:
        digit, blocks = blocks_of(facts.along, facts.lanes, "block")
        return [*digits, digit], units * blocks
    return digits, units


@contextmanager
def each_unit(rows: Rows, digits: Digits) -> Iterator[None]:
    """The loop over units; where units are blocks of columns, it declares `v0` and `count`."""
    with rows.out.block(ir.Units(tuple(digits))):
        if rows.facts.in_blocks:
            rows.out.let("i64", "v0", ir.Name("block") * rows.facts.lanes)
            open_count(rows, rows.facts.lanes, ir.Name(f"n_{rows.facts.v}"))
        yield


def open_count(rows: Rows, most: int, high: ir.Value) -> None:
    """Declare `count`, the number of indices from `v0` below `high`, at most `most`."""
    v0 = ir.Name("v0")
    rows.out.let("i64", "count", ir.Select(v0 + most < high, ir.Number(most), high - v0))


def open_range(rows: Rows, name: str, low: ir.Value, count: ir.Like, size: str) -> None:
    """Declare a range of at most `count` indices of an axis: its first index, and the one after its last."""
    first = ir.Name(f"{name}0")
    rows.out.let("i64", first.name, low)
    rows.out.let("i64", f"{name}1", ir.least(first + count, size))


def open_elements(rows: Rows, low: ir.Like, high: ir.Like) -> None:
    """Declare the range of a loop in explicit vectors: its first index `start`, and its `length`."""
    rows.out.let("i64", "start", low)
    rows.out.let("i64", "length", ir.value(high) - "start")
    rows.out.let("i64", rows.facts.v, "start")


def open_chunks(rows: Rows, chunks: Expr, axis: Axis) -> None:
    """Declare the number of chunks of an axis, and the length of a chunk."""
    rows.out.let("i64", "chunks", size(chunks))
    count, length = ir.Name("chunks"), ir.Name(f"n_{axis.sym.name}")
    rows.out.let("i64", "each", ir.Select(count, (length + count - 1) // count, ir.Number(0)))


def open_chunk(rows: Rows, axis: Axis) -> None:
    """Declare the first index of a chunk, and the one after its last."""
    rows.out.let("i64", "from", ir.Name("chunk") * "each")
    rows.out.let("i64", "to", ir.least(ir.Name("from") + "each", f"n_{axis.sym.name}"))


__all__ = ["Digits", "blocks_of", "closed", "digits_of", "each_unit", "open_chunk", "open_chunks", "open_count",
           "open_elements", "open_range", "opened", "units_of"]  # fmt: skip
