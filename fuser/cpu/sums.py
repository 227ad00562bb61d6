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
SHORT_FLUSH = 16  # additions before they go to a second lane in a row nest
TURNS, GROUPS = ir.Name("turns"), ir.Name("groups")  # counters of a pass


def most_turns(facts: Facts) -> int:
    """Float32 additions in a lane of a nest: in columns fewer where there are few in all, which costs little there."""
    if not facts.is_column:
        return SHORT_FLUSH
    few = math.prod(a.hint for a in facts.reduced_axes) <= SHORT_COLUMN
    return SHORT_COLUMN_FLUSH if few else COLUMN_FLUSH


def open_counters(out: Builder, facts: Facts, declared: bool) -> None:
    """The counters at 0; they are `declared` if an earlier pass of the function has them."""
    for counter in (TURNS,) if facts.is_column else (TURNS, GROUPS):
        out.set(counter, 0) if declared else out.var("i64", counter.name, 0)


def count_turns(
    out: Builder, facts: Facts, mine: Sequence[Accumulator], turns: ir.Like, exactly: bool = True
) -> None:  # fmt: skip
    """Count iterations, and flush partial sums after so many of them; if not `exactly`, after as many or more."""
    most = most_turns(facts)
    if any(a.flushes for a in mine):
        out.set(TURNS, turns, "+")
        flush(out, facts, mine, TURNS.same(most) if exactly else TURNS >= most)


def flush(out: Builder, facts: Facts, of: Sequence[Accumulator], when: ir.Value | None = None) -> None:
    """Flush float32 partial sums: in the loop where `when` holds; without `when` after the loop, all that is left.

    Column nests add each lane to its float64 total. Row nests add lanes to lanes of sums first, so that no float32
    sum has more than a few terms, and from time to time the sum over these to the total.
    """
    mine, lanes, lane, zero = [a for a in of if a.flushes], facts.lanes, ir.Name("l"), ir.Number(0.0, torch.float32)
    if not mine:
        return
    if when is not None:
        out.open(ir.If(when))
        out.set(TURNS, 0)
    for a in mine if facts.is_column or when is not None else ():
        held = ir.Name(f"acc{a.number}")[lane]
        to_mid = ir.Set(ir.Name(f"mid{a.number}")[lane], held, "+")
        out.each(lanes, a.to_total(lane) if facts.is_column else to_mid, ir.Set(held, zero))
    if when is not None and not facts.is_column:
        out.set(GROUPS, 1, "+")
        with out.block(ir.If(GROUPS.same(FLUSH // SHORT_FLUSH))):
            out.set(GROUPS, 0)
            _fold(out, facts, mine, zero)
    elif not facts.is_column:
        _fold(out, facts, mine, None)
    if when is not None:
        out.close()


def _fold(out: Builder, facts: Facts, mine: Sequence[Accumulator], zero: ir.Value | None) -> None:
    """Add the sums of lanes to totals, in a row nest; they go on from `zero`, if at all."""
    lanes, lane = facts.lanes, ir.Name("l")
    for a in mine:
        held, mid = ir.Name(f"acc{a.number}")[lane], ir.Name(f"mid{a.number}")[lane]
        out.each(lanes, ir.Set(held, mid, "+"))
        out.add(a.fold(lanes, facts.machine.vector_bytes))
        out.add(a.to_total(lane))
        if zero is not None:
            out.each(lanes, ir.Set(mid, zero), ir.Set(held, zero))


__all__ = ["COLUMN_FLUSH", "SHORT_FLUSH", "TURNS", "count_turns", "flush", "open_counters"]
