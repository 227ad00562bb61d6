"""What is around an inner loop: tiles of large results, parts of masked loads, float16 as float32, random numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from fuser.cpu import parts
from fuser.cpu.facts import Facts
from fuser.cpu.halves import has_halves, pieces
from fuser.cpu.rows import LoopRange, Rows
from fuser.cpu.streams import staged
from fuser.cpu.vir import nodes as ir

TILE = 1024  # elements of a loop whose results may be staged in the first level cache


def is_prepared(facts: Facts, phase: int) -> bool:
    """Whether a loop of a pass wants pieces that are written before it."""
    return has_halves(facts, phase) or bool(parts.drawn_rows(facts, phase))


@contextmanager
def prepared(rows: Rows, phase: int, loop: LoopRange, vectors: bool = False, narrow: bool = True) -> Iterator[None]:
    """Around a loop of a pass. `vectors`: it is written in explicit vectors, too, which read memory themselves.

    `narrow`: see `pieces`.
    """
    with staged(rows, phase, loop):
        if vectors:
            yield
            return
        with rows.found(parts.prepared(rows, phase, loop)):
            with pieces(rows, phase, loop, narrow) if has_halves(rows.facts, phase) else nullcontext():
                yield


@contextmanager
def tiles(rows: Rows, phase: int, low: ir.Like, high: ir.Like, vectors: bool = False) -> Iterator[None]:
    """A loop over tiles of a range, each from `w0` to `w1`, around a loop over the lanes' axis in each."""
    v, w0, w1 = ir.Name(rows.facts.v), ir.Name("w0"), ir.Name("w1")
    with rows.out.block(ir.For("w0", ir.value(low), ir.value(high), ir.Number(TILE))):
        rows.out.let("i64", "w1", ir.least(w0 + TILE, high))
        with prepared(rows, phase, LoopRange("w0", v - w0, TILE, w1 - w0), vectors):
            yield


__all__ = ["is_prepared", "prepared", "tiles"]
