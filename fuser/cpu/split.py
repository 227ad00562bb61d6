"""Split reductions: few results that each need much work.

Chunks write partial results, a second function combines them, again in a fixed order. Chunks depend on sizes alone, so
any number of threads gives the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from fuser.cpu.accumulators import NO_PLACE, Accumulator, accumulators, own_of
from fuser.cpu.facts import Facts, size
from fuser.cpu.frame import closed, each_unit, open_chunk, open_chunks, opened, units_of
from fuser.cpu.records import Function, Generated, Partial
from fuser.cpu.reduction import Reducing, decided, results
from fuser.cpu.rows import Rows
from fuser.cpu.vir import nodes as ir
from fuser.ir.sizes import Expr, expr, floordiv, minimum, product, symbol
from fuser.ops import CPP_TYPES

CHUNK, COLUMN_CHUNK, MOST_CHUNKS = 4096, 32, 64  # least elements of a chunk of a row, and of columns; most chunks
COMBINED = 64  # columns of a block whose partial results are combined; small, so many threads get blocks


def split(facts: Facts) -> Generated:
    """Two functions: one writes the chunks' partial results; the second combines them and runs the remaining passes."""
    axis = facts.reduced_axes[0]
    least = CHUNK if axis is facts.vector else COLUMN_CHUNK if len(facts.reduced_axes) == 1 else 1
    chunks = minimum(floordiv(axis.size + (least - 1), expr(least)), MOST_CHUNKS)
    length = product(a.size for a in facts.kept_axes) * chunks
    facts = decided(facts)
    partials: list[Partial] = []
    for a in own_of(accumulators(facts), 0):
        partials.append(Partial(f"{facts.name}_p{a.number}", a.total_dtype, length))
        if a.spec.index:
            partials.append(Partial(f"{facts.name}_i{a.number}", torch.int32, length))
    facts = facts.with_partials(partials)
    return Generated((_partial_function(facts, chunks), combine_function(facts, chunks)), facts.partials)


def _partial_at(facts: Facts, chunk: ir.Value) -> ir.Value:
    """The index of a partial result. The partial results of one chunk are contiguous."""
    results, at = product(symbol(f"n_{a.sym.name}") for a in facts.kept_axes), expr(0)
    for a in facts.kept_axes:
        at = at * symbol(f"n_{a.sym.name}") + expr(a.sym)
    return chunk * size(results) + size(at)


def _array(facts: Facts, a: Accumulator, kind: str) -> ir.Name:
    """The array of an accumulator's partial values ("p") or of their indices ("i")."""
    return ir.Name(f"{facts.name}_{kind}{a.number}")


def _partial_function(facts: Facts, chunks: Expr) -> Function:
    axis, rows = facts.reduced_axes[0], opened(facts, "_partial")
    open_chunks(rows, chunks, axis)
    digits, units = units_of(facts)
    rows.constants()
    with each_unit(rows, [*digits, ("chunk", ir.Name("chunks"))]):
        open_chunk(rows, axis)
        reducing = Reducing(rows)
        reducing.run(0, {axis.sym: (ir.Name("from"), ir.Name("to"))})
        _store_partials(rows, reducing)
    return closed(rows, units * chunks, suffix="_partial")


def _store_partials(rows: Rows, reducing: Reducing) -> None:
    facts, out = rows.facts, rows.out
    lane, at = ir.value("l" if facts.is_column else 0), _partial_at(facts, ir.Name("chunk"))
    with rows.lanes_or_unit():
        for a in own_of(reducing.accumulators, 0):
            out.set(_array(facts, a, "p")[at], a.total(lane))
            if a.spec.index:
                out.set(_array(facts, a, "i")[at], ir.Name(f"at{a.number}")[lane])


def combine_function(facts: Facts, chunks: Expr) -> Function:
    """The function that combines the partial results of all chunks and runs the remaining passes."""
    if facts.is_column:
        facts = replace(facts, lanes=min(facts.lanes, COMBINED))
    rows = opened(facts, "_combine")
    out, found = rows.out, own_of(accumulators(facts), 0)
    out.let("i64", "chunks", size(chunks))
    digits, units = units_of(facts)
    rows.constants()
    with each_unit(rows, digits):
        _declare(rows, found)
        _for_each_result(rows, found, None)
        with out.block(ir.For("c", ir.Number(0), ir.Name("chunks"))):
            _for_each_result(rows, found, _partial_at(facts, ir.Name("c")))
        results(rows, 0, Reducing(rows).total)
        for phase in range(1, len(facts.passes)):
            rows.after(phase)
    # Partial results of other threads are in remote caches, and the parallel region is open: more threads cost
    # nothing.
    work = product(a.size for a in facts.kept_axes) * chunks * (8 * len(found))
    return closed(rows, units, work, suffix="_combine")


def _declare(rows: Rows, found: Sequence[Accumulator]) -> None:
    out, lanes = rows.out, rows.facts.lanes if rows.facts.is_column else 1
    for a in found:
        kind = CPP_TYPES[a.total_dtype]
        if a.flushes and not rows.facts.is_column:
            out.var(kind, f"tot{a.number}")
        else:
            out.scratch(kind, f"{'tot' if a.flushes else 'acc'}{a.number}", lanes)
        if a.spec.index:
            out.scratch("i32", f"at{a.number}", lanes)


def _for_each_result(rows: Rows, found: Sequence[Accumulator], at: ir.Value | None) -> None:
    """Combine the partial results at index `at` into those of the unit; without `at`, set these to identities."""
    facts, out = rows.facts, rows.out
    with rows.lanes_or_unit() if facts.is_column else out.block(ir.Plain()):
        if not facts.is_column:
            out.let("i64", "l", 0)
        for a in found:
            dtype, total, place = a.total_dtype, a.total("l"), ir.Name(f"at{a.number}")["l"]
            if at is not None:
                out.add(a.join(dtype, total, _array(facts, a, "p")[at], place, _array(facts, a, "i")[at]))
                continue
            out.set(total, ir.Number(a.spec.identity(dtype), dtype))
            if a.spec.index:
                out.set(place, NO_PLACE)


__all__ = ["combine_function", "split"]
