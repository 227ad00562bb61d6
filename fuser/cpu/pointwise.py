"""Pointwise nests: units are (kept axes x blocks of the vector axis); transposed reads go through tiles."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch

from fuser.cpu.bits import Bits
from fuser.cpu.conditions import Way, way_of
from fuser.cpu.facts import Facts, size, whole_lines
from fuser.cpu.float_rows import moved_rows
from fuser.cpu.frame import blocks_of, closed, digits_of, each_unit, open_elements, open_range, opened
from fuser.cpu.lane_loops import LaneLoop
from fuser.cpu.lanes import Lanes
from fuser.cpu.prefetches import prefetch_rows
from fuser.cpu.prepared import tiles
from fuser.cpu.records import Function
from fuser.cpu.rounds import going_round, table_length
from fuser.cpu.rows import Place, Rows
from fuser.cpu.segments import Segments, each_segment, find_segments, has_fills, stays_whole
from fuser.cpu.transposes import TILE_COLUMNS, TILE_ROWS, fill_tiles, in_tiles, transposed
from fuser.cpu.vir import nodes as ir
from fuser.ir.sizes import ZERO, Expr, expr, product
from fuser.lazy_dataclasses import dataclass
from fuser.scheduler.kernel_plan import Axis
from fuser.scheduler.nodes import row_cost

HOIST_COST = 4  # operations from which a row is hoisted out of the loops
LEAST_TURNS, MOST_HOISTED = 8, 4  # fewest iterations of these loops; most hoisted rows, each an array on the stack
BLOCK = 4096  # elements of the vector axis in one unit of a pointwise nest
FEWEST_HELD = 2  # shared conditions from which a second loop is written for the case that all hold


@dataclass(frozen=True)
class Choice:
    """How the innermost loop is written: its segments, and explicit vectors if any, beside the plain loop.

    `plain`: the choice for the plain loop, if vectors take the whole loop and the plain loop is cut into segments.
    """

    facts: Facts
    segments: Segments | None = None
    vectors: Lanes | Bits | None = None
    plain: Choice | None = None


def chosen(facts: Facts) -> Choice:
    """The choice for a pointwise nest, with all its decisions in the facts."""
    flat = going_round(facts)
    if flat is not None:
        return Choice(flat)
    staged = transposed(facts)
    facts = replace(facts, staged=tuple(staged), tiled=next(iter(staged.values()), None))
    inner = [a for a in facts.kept_axes if a is not facts.vector]
    if facts.checked:
        return Choice(replace(facts, hoisted=_hoisted(facts, inner)))
    segments = find_segments(facts) if facts.tiled is None else None
    filled = has_fills(facts)
    if segments is not None:
        cut = replace(facts, constant=frozenset(segments.rows), parts=frozenset(segments.loads))
        whole = Lanes.of(facts, filled=True) if stays_whole(facts, filled) else None
        if whole is not None:
            return Choice(facts, None, whole, Choice(cut, segments))
        facts = cut
    else:
        facts = replace(facts, hoisted=_hoisted(facts, inner))
    moved = moved_rows(facts.plan)
    floats = [n for n, r in enumerate(facts.plan.rows) if r.dtype is torch.float32 and r.op != "const"]
    if any(facts.is_full(n) and n not in moved for n in floats):
        lanes = Lanes.of(facts, filled=filled)
        if lanes is not None:
            return Choice(facts, segments, lanes)
    facts = replace(facts, moved=moved)
    return Choice(facts, segments, Bits.of(facts) if segments is None else None)


def _hoisted(facts: Facts, outer: Sequence[Axis]) -> tuple[int, ...]:
    """Costly rows that vary along the vector axis alone: they are computed once for a block, not in every iteration."""
    if facts.vector is None or math.prod(a.hint for a in outer) < LEAST_TURNS:
        return ()
    alone = {n for n, along in enumerate(facts.plan.varies) if along == {facts.vector.sym}}
    roots = {facts.unrounded(s) for s in facts.plan.stores if s in facts.passes.full_stores}
    roots |= {d for n in range(len(facts.plan.rows)) if n not in alone for d in facts.passes.deps[n]}
    found = []
    for n in sorted(roots & alone):
        behind = [facts.plan.rows[m] for m in facts.passes.closure([n])]
        costly = sum(row_cost(r) for r in behind) >= HOIST_COST
        if costly and not any(r.op in ("indirect", "pair") for r in (*behind, facts.plan.rows[n])):
            found.append(n)
    return tuple(found[:MOST_HOISTED])


def whole(facts: Facts) -> Function:
    """The single function of the plan."""
    choice = chosen(facts)
    facts, tiled = choice.facts, choice.facts.tiled
    rows = opened(facts)
    rows.made |= facts.constant
    outer = [a for a in facts.kept_axes if a is not facts.vector and a is not tiled]
    digits, units = digits_of(outer), product(a.size for a in outer)
    block = _block_length(rows)
    for axis, length, name in ((tiled, expr(TILE_ROWS), "band"), (facts.vector, block, "block")):
        if axis is not None:
            digit, count = blocks_of(axis, length, name)
            digits, units = [*digits, digit], units * count
    rows.constants()
    scratch = _tables(rows, block)
    with each_unit(rows, digits):
        if facts.vector is not None:
            open_range(rows, "v", ir.Name("block") * size(block), size(block), f"n_{facts.v}")
        with rows.found(_compute_hoisted(rows) | in_tiles(facts)):
            with _each_row_of_tiles(rows, tiled) if tiled is not None else nullcontext():
                rows.outside(sorted({*facts.passes[0].before, *facts.passes[0].outer}))
                if facts.vector is not None:
                    with tiles(rows, 0, "v0", "v1", choice.vectors is not None) as ends:
                        _segment_loop(rows, choice, *ends)
                rows.after(0)
    return closed(rows, units, scratch=scratch)


def _block_length(rows: Rows) -> Expr:
    """The elements of the vector axis in one unit."""
    if rows.facts.around is not None:
        return table_length(rows.facts.around)
    return expr(BLOCK if rows.facts.tiled is None else TILE_COLUMNS)


def _tables(rows: Rows, block: Expr) -> Expr:
    """Declare the arrays of hoisted rows; those of periodic rows are in scratch memory, whose bytes it returns."""
    facts, each = rows.facts, block * 8 + 64
    for k, n in enumerate(facts.hoisted):
        if facts.around is None:
            rows.out.scratch(facts.array_kind(n), f"lane{n}", BLOCK if facts.tiled is None else TILE_COLUMNS)
            continue
        rows.in_scratch(facts.array_kind(n), f"lane{n}", ir.Number(k) * whole_lines(each))
    if facts.hoisted:
        rows.out.var("i64", "ready", -1)
    return ZERO if facts.around is None else (each + 64) * len(facts.hoisted)


def _compute_hoisted(rows: Rows) -> dict[int, Place]:
    """Compute the hoisted rows of a block, unless the last unit had the same block; returns where they are.

    The tables of periodic rows (`rounds.py`) serve all blocks.
    """
    facts, out = rows.facts, rows.out
    if not facts.hoisted:
        return {}
    v, low, high = ir.Name(facts.v), ir.value("v0"), ir.value("v1")
    test = ir.Name("block").differs("ready")
    if facts.around is not None:
        test, low = ir.Name("ready") < 0, ir.Number(0)
        high = ir.least(size(table_length(facts.around)), f"n_{facts.v}")
    inside = facts.passes.closure(facts.hoisted)
    rows.outside(facts.passes.outside(d for n in inside for d in facts.passes.deps[n]))
    with out.block(ir.If(test)):
        out.set("ready", "block")
        with out.block(ir.For(v.name, low, high, simd=True)):
            for n in inside:
                rows.declare(n)
            for n in facts.hoisted:
                out.set(ir.Name(f"lane{n}")[v - low], rows.ref(n))
    return {n: Place(facts.in_array(n, ir.Name(f"lane{n}")[v - "v0"])) for n in facts.hoisted}


@contextmanager
def _each_row_of_tiles(rows: Rows, tiled: Axis) -> Iterator[None]:
    """Fill the tiles of transposed reads, then loop over their rows."""
    open_range(rows, "r", ir.Name("band") * TILE_ROWS, TILE_ROWS, f"n_{tiled.sym.name}")
    fill_tiles(rows)
    with rows.out.block(ir.For(tiled.sym.name, ir.Name("r0"), ir.Name("r1"))):
        prefetch_rows(rows, tiled)
        yield


def _segment_loop(rows: Rows, choice: Choice, low: ir.Like, high: ir.Like) -> None:
    segments = choice.segments
    if segments is None:
        _loop(rows, choice, low, high)
        return
    with each_segment(rows, segments, low, high):
        _loop(rows, choice, "from", "to")


def _loop(rows: Rows, choice: Choice, low: ir.Like, high: ir.Like) -> None:
    """The loop in explicit vectors, if there is one, and the plain loop for other machines."""
    out, vectors = rows.out, choice.vectors
    if vectors is not None:
        with out.block(ir.Only(vectors.macro)), out.block(ir.Plain()):
            open_elements(rows, low, high)
            if isinstance(vectors, Lanes):
                LaneLoop(rows, vectors).whole_nest()
            else:
                vectors.emit(rows)
    with out.block(ir.Otherwise()) if vectors is not None else nullcontext():
        if choice.plain is not None:
            with rows.of(choice.plain.facts):
                _segment_loop(rows, choice.plain, low, high)
            return
        usual = choice.segments.usual if choice.segments is not None else _shared_conditions(rows.facts)
        if usual:  # g++ vectorises a loop with constant conditions; it would not jump out of one over them
            tests = [c if holds else c.same(0) for c, holds in usual.items()]
            with out.block(ir.If(functools.reduce(operator.and_, tests))):
                for c, holds in usual.items():
                    out.let("bool", c.name, ir.Number(holds, torch.bool))
                _plain_loop(rows, low, high)
        with out.block(ir.Else()) if usual else nullcontext():
            _plain_loop(rows, low, high)


def _shared_conditions(facts: Facts) -> dict[ir.Name, bool]:
    """The conditions that all lanes share, if there are several, as in a window; usually all hold."""
    loads = [n for n in facts.rows_of(0) if way_of(facts, n) is Way.PART and not facts.checked]
    found = dict.fromkeys(facts.plan.rows[n].args[0] for n in loads)
    known = [n for n in found if facts.plan.rows[n].op != "const"]
    return {ir.Name(f"t{n}"): True for n in known} if len(known) >= FEWEST_HELD else {}


def _plain_loop(rows: Rows, low: ir.Like, high: ir.Like) -> None:
    with rows.out.block(rows.simd(rows.facts.v, low, high)):
        rows.inner(0)


__all__ = ["chosen", "whole"]
