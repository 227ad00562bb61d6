"""Preparations around an inner loop, of what g++ does not vectorise in it, or not well.

- Large results go through tiles (`streams.py`), float16 is converted to float32 in pieces (`halves.py`).
- A load under a condition that is the same for all lanes reads memory, or a page of zeros (`conditions.py`).
- A piece of a load that runs backwards is reversed.
- Random numbers of neighbouring indices are drawn together.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from fuser.cpu.conditions import LONGEST, Way, open_part, way_of
from fuser.cpu.facts import Facts, storage_type
from fuser.cpu.halves import has_halves, pieces
from fuser.cpu.rows import LoopRange, Place, Rows
from fuser.cpu.streams import staged
from fuser.cpu.vir import nodes as ir
from fuser.ir.sizes import ONE, coefficient

Range = tuple[ir.Like, ir.Like]  # first index, and the one after the last
TILE = 1024  # elements of a loop whose results may be staged in the first-level cache
SHORTEST_DRAWN = 16  # elements of the vector axis: a call draws 32 numbers at a time
MOST_DRAWN = 6  # most rows of numbers of a pass; they share the first-level cache with its inputs


@contextmanager
def prepared(rows: Rows, phase: int, loop: LoopRange, vectors: bool = False, narrow: bool = True) -> Iterator[None]:
    """Around a loop of a pass: prepare its inputs and store its results; if it is in `vectors`, only stage results.

    `narrow`: see `pieces`.
    """
    with staged(rows, phase, loop):
        if vectors or rows.facts.checked:
            yield
            return
        with rows.found(_draw(rows, phase, loop) | _loads(rows, phase, loop)):
            with pieces(rows, phase, loop, narrow) if has_halves(rows.facts, phase) else nullcontext():
                yield


@contextmanager
def tiles(rows: Rows, phase: int, low: ir.Like, high: ir.Like, vectors: bool = False) -> Iterator[Range]:
    """Around a loop over the lanes' axis: its range. Where something is prepared, the loop runs tile by tile."""
    facts, v, w0, w1 = rows.facts, ir.Name(rows.facts.v), ir.Name("w0"), ir.Name("w1")
    wanted = not vectors and (has_halves(facts, phase) or _drawn_rows(facts, phase))
    if not wanted and not facts.streams_of(phase):
        yield low, high
        return
    with rows.out.block(ir.For("w0", ir.value(low), ir.value(high), ir.Number(TILE))):
        rows.out.let("i64", "w1", ir.least(w0 + TILE, high))
        with prepared(rows, phase, LoopRange("w0", v - w0, TILE, w1 - w0), vectors):
            yield w0, w1


def _loads(rows: Rows, phase: int, loop: LoopRange) -> dict[int, Place]:
    """Prepare the loads of a pass; returns where the loop finds them."""
    facts, found = rows.facts, dict[int, Place]()
    ways = {n: way_of(facts, n) for n in facts.rows_of(phase)}
    for n in (n for n, way in ways.items() if way is Way.BACK):
        found[n] = _turned(rows, n, loop)
    shared = [n for n, way in ways.items() if way is Way.PART]
    for n in facts.passes.closure(facts.plan.rows[n].args[0] for n in shared):
        rows.declare(n)
    return found | {n: open_part(rows, n, loop.start, loop.at) for n in shared}


def _turned(rows: Rows, n: int, loop: LoopRange) -> Place:
    """Reverse a piece of a load that runs backwards."""
    row, part, out = rows.plan.rows[n], ir.Name(f"part{n}"), rows.out
    at = rows.index_from(loop.start, row.address)
    kind, aligned = storage_type(rows.facts.dtypes[row.buffer]), rows.facts.machine.line_bytes
    out.scratch(kind, part.name, LONGEST, aligned=aligned)
    with out.block(ir.For("k", ir.Number(0), loop.count, simd=True)):
        out.set(part["k"], ir.Name(row.buffer)[at - "k"])
    return Place(part[loop.at], stored=True)


# -- random numbers ---------------------------------------------------------------------------------------------------
def _drawn_rows(facts: Facts, phase: int) -> list[int]:
    """Rows of random numbers whose indices are consecutive along the vector axis."""
    if facts.checked or facts.vector is None or facts.vector.hint < SHORTEST_DRAWN:
        return []
    found = [n for n in facts.rows_of(phase) if _is_drawn(facts, n)]
    return found if len(found) <= MOST_DRAWN else []


def _is_drawn(facts: Facts, n: int) -> bool:
    row = facts.plan.rows[n]
    if row.traits.draw is None:
        return False
    *outer, place = row.args
    index = facts.plan.rows[place]
    if index.op != "index" or not all(map(facts.is_outside, outer)):
        return False
    return coefficient(index.attr, facts.along.sym) == ONE


def _draw(rows: Rows, phase: int, loop: LoopRange) -> dict[int, Place]:
    """Draw the random numbers before the loop: four words are computed at once for four elements."""
    facts, found = rows.facts, dict[int, Place]()
    for n in _drawn_rows(facts, phase):
        row = facts.plan.rows[n]
        seed, stream, index = row.args
        assert row.traits.draw is not None
        numbers = ir.Name(f"drawn{n}")
        rows.out.scratch("float", numbers.name, loop.length, aligned=facts.machine.line_bytes)
        at = rows.index_from(loop.start, facts.plan.rows[index].attr, "floor")
        rows.out.add(ir.Draw(numbers, rows.ref(seed), rows.ref(stream), at, loop.count, row.traits.draw[0]))
        found[n] = Place(numbers[loop.at])
    return found


__all__ = ["prepared", "tiles"]
