"""Passes of row nests: a unit's row is taken by arrays of lanes; the last array is partial."""

from __future__ import annotations

from collections.abc import Sequence

from fuser.cpu import accumulators as acc
from fuser.cpu.accumulators import Accumulator
from fuser.cpu.columns import TOGETHER_COST
from fuser.cpu.facts import Facts
from fuser.cpu.frame import open_elements
from fuser.cpu.lane_loops import LaneLoop
from fuser.cpu.lanes import Lanes
from fuser.cpu.prefetches import look_ahead, prefetch_later
from fuser.cpu.prepared import prepared, tiles
from fuser.cpu.rows import Ends, Fold, Rows
from fuser.cpu.vir import nodes as ir

MOST_VECTORS = 8  # most vectors of a lane array
GROUP = 16  # float32 additions in a lane before its sum is added to a float64 total, apart from a row's last vectors


def line(rows: Rows, own: Sequence[Accumulator], phase: int, ends: Ends, fold: Fold) -> None:
    """A pass along a row over [ends[0], ends[1])."""
    facts, out, v = rows.facts, rows.out, rows.facts.v
    if not facts.passes[phase].folds:
        with tiles(rows, phase, *ends) as taken, out.block(rows.simd(v, *taken)):
            rows.inner(phase)
        return
    ahead = look_ahead(rows, phase)
    numbers = ("v0", "count", "skip") if acc.takes_some_twice(facts, phase) else ("v0", "count")
    params = [*(("auto&", f"acc{a.number}") for a in acc.flushing(own)), *(("const i64", name) for name in numbers)]
    with out.block(ir.Routine(f"pass{phase}", tuple(params))):
        for k, buffer in enumerate(ahead):
            out.add(rows.prefetch(buffer, ir.Name(f"ahead{k}") + "v0" + "q", "count"))
        if any(a.counts_turns for a in own):
            out.let("i32", f"start{phase}", ir.Cast("i32", ir.Name("v0") - ends[0]))
        prefetch_later(rows, phase)
        unrolled = ir.For("l", ir.Number(0), ir.Name("count"), unroll=MOST_VECTORS)
        loop = unrolled if _unrolls(facts, own, phase) else rows.simd("l", 0, "count")
        with prepared(rows, phase, rows.block()), out.block(loop):
            out.let("i64", v, ir.Name("v0") + "l")
            rows.inner(phase, fold)
    _call_pass(rows, own, phase, ends)


def in_vectors(rows: Rows, lanes: Lanes) -> None:
    """A pass in explicit vectors, from the identities of its accumulators to their folded values.

    Float32 sums are added to totals in groups. Where a pass has several loops, vectors keep sums from row to row.
    """
    facts, out, loop = rows.facts, rows.out, LaneLoop(rows, lanes)
    mine, others = acc.flushing(lanes.own), [a for a in lanes.own if not a.flushes]
    around = [a for a in facts.reduced_axes if a is not facts.vector]
    kept = lanes.own if around else others
    loop.open_sums(kept)
    if around and mine:
        out.var("i64", "turns", 0)
    for axis in around:
        out.open(ir.For(axis.sym.name, ir.Number(0), ir.Name(f"n_{axis.sym.name}")))
    with tiles(rows, lanes.phase, 0, f"n_{facts.v}", vectors=True) as ends:
        open_elements(rows, *ends)
        loop.open()
        loop.open_row()
        if mine:
            _in_groups(loop, mine, bool(around))
        else:
            loop.whole(lanes.vectors, ir.Name("whole"))
            loop.tail()
    for _ in around:
        out.close()
    loop.close_sums(kept)
    if around:
        acc.flush(out, mine, goes_on=False)
    for a in others:
        loop.fold(a)


def _in_groups(loop: LaneLoop, mine: Sequence[Accumulator], around: bool) -> None:
    """Groups of whole vectors, the last one with the tail; sums are flushed after each, or if `around`, at times."""
    out, lanes = loop.out, loop.lanes
    k, length, whole, turns = map(ir.Name, ("k", "length", "whole", "turns"))
    with out.block(ir.While(k < length)):
        most = ir.Number(lanes.vectors) * lanes.width * GROUP
        out.let("i64", "stop", ir.Select(whole - k <= most, whole, k + most))
        if not around:
            loop.open_sums(mine)
        loop.whole(lanes.vectors, ir.Name("stop"))
        with out.block(ir.If(k.same(whole))):
            loop.tail()
            out.set("k", "length")
        if around:
            out.set(turns, whole // loop.facts.lanes + 1, "+")
            out.open(ir.If((turns >= acc.SHORT_FLUSH) | (k < length)))
            out.set(turns, 0)
        loop.close_sums(mine, around)
        acc.flush(out, mine, goes_on=False)
        if around:
            out.close()


def _unrolls(facts: Facts, own: Sequence[Accumulator], phase: int) -> bool:
    """Whether the loop over lanes is fully unrolled, so accumulators of several registers stay in registers.

    Where the lanes take four registers, g++ would load and store them in each iteration: 1.8 times the time of a sum.
    Costly rows do not gain from it.
    """
    if facts.checks_inside:
        return False
    return any(a.notes_nans for a in own) or facts.cost_of(phase) <= TOGETHER_COST


def _call_pass(rows: Rows, own: Sequence[Accumulator], phase: int, ends: Ends) -> None:
    """Call the pass for full arrays of lanes, in groups where sums are flushed; then for the tail."""
    facts, out, (low, high), mine = rows.facts, rows.out, ends, acc.flushing(own)
    routine, p, lanes = f"pass{phase}", ir.Name(f"p{phase}"), ir.Number(facts.lanes)
    stop, taken = high, (0,) if acc.takes_some_twice(facts, phase) else ()
    out.var("i64", p.name, low)
    if mine:
        stop = ir.Name(f"stop{phase}")
        out.open(ir.While(p + lanes <= high))
        acc.open_group(out, mine)
        out.let("i64", "room", p + ir.Number(acc.SHORT_FLUSH) * lanes)
        out.let("i64", stop.name, ir.Select(ir.Name("room") < high, ir.Name("room"), high))
    with out.block(ir.For(p.name, None, stop, lanes, whole=True)):
        out.do(routine, *(f"acc{a.number}" for a in mine), p, lanes, *taken)
    if mine:
        acc.close_group(out, mine)
        out.close()
    _call_tail(rows, mine, phase, ends)
    if mine and len(facts.reduced_axes) > 1:
        acc.count_group(out, mine)


def _call_tail(rows: Rows, mine: Sequence[Accumulator], phase: int, ends: Ends) -> None:
    """Call the pass for the tail; its sums are added to those of the row."""
    out, (low, high), lanes = rows.out, ends, ir.Number(rows.facts.lanes)
    overlaps = acc.takes_some_twice(rows.facts, phase)
    routine, p, last = f"pass{phase}", ir.Name(f"p{phase}"), ir.Name(f"last{phase}")
    sums = [a.lanes for a in mine]
    if overlaps:
        out.let("i64", last.name, ir.Select(high - low < lanes, p, high - lanes))
    with out.block(ir.If(p < high)):
        if not overlaps:
            out.do(routine, *sums, p, high - p)
            return
        with out.block(ir.If(last.same(p))):
            out.do(routine, *sums, p, high - p, 0)
        with out.block(ir.Else()):
            out.do(routine, *sums, last, lanes, p - last)


__all__ = ["in_vectors", "line"]
