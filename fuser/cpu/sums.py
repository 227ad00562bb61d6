"""How float32 partial sums move on: no lane adds up more than a few terms before they go to a float64 total."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from fuser.cpu.accumulators import Accumulator
from fuser.cpu.facts import Facts
from fuser.cpu.vir import nodes as ir
from fuser.cpu.vir.builder import Builder

FLUSH = 256  # float32 additions per lane of a row nest before they go to a float64 total
COLUMN_FLUSH, SHORT_COLUMN_FLUSH, SHORT_COLUMN = 32, 8, 64  # the same for lanes of column nests, of up to 64 rows
SHORT_FLUSH = 16  # additions in a row nest before they go to a second lane: a group of turns
WIDE_ROW = 1024  # elements of a row from which lanes are folded as float64: the fold is no longer what takes the time
COUNTER = ir.Name("turns")  # of a pass: rows of columns since the last flush, or groups of turns in a row nest


def most_turns(facts: Facts) -> int:
    """Float32 additions in a lane of a column nest: fewer where there are few in all, which costs little there."""
    few = math.prod(a.hint for a in facts.reduced_axes) <= SHORT_COLUMN
    return SHORT_COLUMN_FLUSH if few else COLUMN_FLUSH


def open_counter(out: Builder, declared: bool) -> None:
    """The counter at 0; it is `declared` if an earlier pass of the function has it."""
    out.set(COUNTER, 0) if declared else out.var("i64", COUNTER.name, 0)


def flushing(of: Sequence[Accumulator]) -> list[Accumulator]:
    """Those of float32 sums that go to float64 totals."""
    return [a for a in of if a.flushes]


def count_rows(out: Builder, of: Sequence[Accumulator], rows: ir.Like, exactly: bool = True) -> None:
    """Count rows of a column nest, and flush sums after so many of them; if not `exactly`, after as many or more."""
    mine = flushing(of)
    if not mine:
        return
    most = most_turns(mine[0].facts)
    out.set(COUNTER, rows, "+")
    with out.block(ir.If(COUNTER.same(most) if exactly else COUNTER >= most)):
        out.set(COUNTER, 0)
        flush(out, mine)


def flush(out: Builder, of: Sequence[Accumulator], goes_on: bool = True) -> None:
    """Add float32 sums to float64 totals: of each lane in a column nest, over all lanes in a row nest.

    `goes_on`: the sums begin anew.
    """
    lane, zero = ir.Name("l"), ir.Number(0.0, torch.float32)
    for a in flushing(of):
        empty = ir.Set(a.lanes[lane], zero)
        if a.facts.is_column:
            out.each(a.facts.lanes, a.to_total(lane), empty)
            continue
        wide = a.facts.along.hint >= WIDE_ROW
        out.add(a.fold(wide))
        if not wide:
            out.add(a.to_total(lane))
        if goes_on:
            out.each(a.facts.lanes, empty)


# -- row nests: groups of turns ---------------------------------------------------------------------------------------
def open_group(out: Builder, mine: Sequence[Accumulator]) -> None:
    """Arrays for the sums of a few turns. They are declared here, so the compiler keeps them in registers."""
    for a in mine:
        held = ir.Name(f"acc{a.number}")
        out.scratch(a.kind, held.name, a.facts.lanes)
        out.each(a.facts.lanes, ir.Set(held["l"], a.identity))


def close_group(out: Builder, mine: Sequence[Accumulator]) -> None:
    """Add the sums of a few turns to those of the row, so that no float32 sum has more than a few terms."""
    for a in mine:
        out.each(a.facts.lanes, ir.Set(a.lanes["l"], ir.Name(f"acc{a.number}")["l"], "+"))
    count_group(out, mine)


def count_group(out: Builder, mine: Sequence[Accumulator]) -> None:
    """Count a group of turns; after so many of them, the sums go to totals."""
    out.set(COUNTER, 1, "+")
    with out.block(ir.If(COUNTER.same(FLUSH // SHORT_FLUSH))):
        out.set(COUNTER, 0)
        flush(out, mine)


__all__ = ["COLUMN_FLUSH", "SHORT_FLUSH", "close_group", "count_group", "count_rows", "flush", "flushing",
           "open_counter", "open_group"]  # fmt: skip
