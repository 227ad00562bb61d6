"""Loops over float16 that g++ vectorises: a piece of elements is converted before the loop and after it.

g++ does not vectorise the float16 conversion instructions, and emulates them with a dozen others each. So a piece of
the input is converted to float32 in the first-level cache before the loop, and results are converted from there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fuser.cpu.conditions import Way, edges_of, way_of
from fuser.cpu.facts import Facts
from fuser.cpu.rows import LoopRange, Place, Rows
from fuser.cpu.vir import nodes as ir
from fuser.scheduler.kernel_plan import Store

MOST_PIECES = 6  # more would not fit into the first level cache


def half_loads(facts: Facts, phase: int) -> list[int]:
    """Loads of float16 in a pass that are contiguous along the vector axis."""
    return [n for n in facts.rows_of(phase) if not facts.checked and _reads_halves(facts, n)]


def half_stores(facts: Facts, phase: int) -> list[Store]:
    """Stores of float16 in a pass that are contiguous along the vector axis."""
    mine = [s for s in facts.passes[phase].stores if s.row not in facts.moved and not facts.checked]
    return [s for s in mine if facts.dtypes[s.buffer] is torch.float16 and facts.step(s.address) == 1]


def has_halves(facts: Facts, phase: int) -> bool:
    """Whether a pass converts float16 in pieces before and after its loop."""
    return 0 < len(half_loads(facts, phase)) + len(half_stores(facts, phase)) <= MOST_PIECES


def _reads_halves(facts: Facts, n: int) -> bool:
    row = facts.plan.rows[n]
    if row.op != "load" or n in facts.moved or facts.dtypes[row.buffer] is not torch.float16:
        return False
    way = way_of(facts, n)
    if way is None or (way is Way.SELECT and not edges_of(facts, row.args[0])):
        return False
    return way is Way.BACK or facts.step(row.address) == 1


@contextmanager
def pieces(rows: Rows, phase: int, loop: LoopRange, narrow: bool) -> Iterator[None]:
    """Around a loop of a pass, which reads float16 as float32. Float16 results are converted after it if `narrow`."""
    facts, out, found = rows.facts, rows.out, dict[int, Place]()
    length, aligned = -(-loop.length // 16) * 16, facts.machine.line_bytes  # whole vectors
    for n in half_loads(facts, phase):
        piece, part, row = ir.Name(f"piece{n}"), rows.places.get(n), facts.plan.rows[n]
        out.scratch("float", piece.name, length, aligned=aligned)
        at = ir.Name(f"part{n}") if part is not None else rows.address_from(loop.start, row.buffer, row.address)
        if row.args and part is None:
            _declare_bounds(rows, n, loop)
            out.add(ir.Widen(piece, at, loop.count, ir.Name(f"low{n}"), ir.Name(f"high{n}")))
        else:
            out.add(ir.Widen(piece, at, loop.count))
        found[n] = Place(piece[loop.at])
    stores = {s: ir.Name(f"result{phase}_{k}") for k, s in enumerate(half_stores(facts, phase))}
    for result in stores.values():
        out.scratch("float", result.name, length, aligned=aligned)
    with rows.found(found, {s: result[loop.at] for s, result in stores.items()}):
        yield
    for s, result in stores.items() if narrow else ():
        to = rows.address_from(loop.start, s.buffer, s.address, facts.tile_of(s))
        out.add(ir.Narrow(to, result, loop.count))


def _declare_bounds(rows: Rows, n: int, loop: LoopRange) -> None:
    out = rows.out
    out.var("i64", f"low{n}", 0)
    out.var("i64", f"high{n}", loop.count)
    edge = ir.Name("edge")
    for before, place in edges_of(rows.facts, rows.plan.rows[n].args[0]):
        side = ir.Name(f"high{n}" if before else f"low{n}")
        with out.block(ir.Plain()):
            out.let("i64", edge.name, place - loop.start)
            out.set(side, ir.Select(edge < side if before else edge > side, edge, side))


__all__ = ["half_loads", "half_stores", "has_halves", "pieces"]
