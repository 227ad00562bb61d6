"""Preparations around an inner loop: tiles of large results, masked loads, float16 as float32, random numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from fuser.cpu import parts
from fuser.cpu.halves import has_halves, pieces
from fuser.cpu.rows import LoopRange, Rows
from fuser.cpu.streams import staged
from fuser.cpu.vir import nodes as ir

Range = tuple[ir.Like, ir.Like]  # first index, and the one after the last
TILE = 1024  # elements of a loop whose results may be staged in the first-level cache


@contextmanager
def prepared(rows: Rows, phase: int, loop: LoopRange, vectors: bool = False, narrow: bool = True) -> Iterator[None]:
    """Around a loop of a pass: prepare its inputs and store its results; if it is in `vectors`, only stage results.

    `narrow`: see `pieces`.
    """
    with staged(rows, phase, loop):
        if vectors or rows.facts.checked:
            yield
            return
        with rows.found(parts.prepared(rows, phase, loop)):
            with pieces(rows, phase, loop, narrow) if has_halves(rows.facts, phase) else nullcontext():
                yield


@contextmanager
def tiles(rows: Rows, phase: int, low: ir.Like, high: ir.Like, vectors: bool = False) -> Iterator[Range]:
    """Around a loop over the lanes' axis: its range. Where something is prepared, the loop runs tile by tile."""
    facts, v, w0, w1 = rows.facts, ir.Name(rows.facts.v), ir.Name("w0"), ir.Name("w1")
    wanted = not vectors and (has_halves(facts, phase) or parts.drawn_rows(facts, phase))
    if not wanted and not facts.streams_of(phase):
        yield low, high
        return
    with rows.out.block(ir.For("w0", ir.value(low), ir.value(high), ir.Number(TILE))):
        rows.out.let("i64", "w1", ir.least(w0 + TILE, high))
        with prepared(rows, phase, LoopRange("w0", v - w0, TILE, w1 - w0), vectors):
            yield w0, w1


__all__ = ["prepared", "tiles"]
