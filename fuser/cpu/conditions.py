"""The conditions of loads: how a loop takes each load, and where its condition changes along the lanes' axis.

A load without a condition, or under one that is the same in all lanes, reads whole vectors. A comparison of the index
along the lanes' axis changes at an edge: loops are cut there (`segments.py`), conversions begin and end there
(`halves.py`), and explicit vectors have a mask up to there (`lane_loops.py`, `bits.py`). Under any other condition
each lane selects between the element and 0 (`rows.py`).
"""

from __future__ import annotations

from enum import Enum

import torch

from fuser.cpu.facts import Facts, size, storage_type
from fuser.cpu.rows import Place, Rows
from fuser.cpu.vir import nodes as ir
from fuser.ir.loop_body import Row, is_both
from fuser.ir.sizes import Expr, expr

MOST_STEP = 4  # largest stride of a load under a condition that reads memory or zeros
FARTHEST = 1 << 60  # beyond all indices
LONGEST = 1024  # most elements of a loop, and the length of the page of zeros
ZEROS = f"""\
static const u64 fuser_zeros[{LONGEST}] __attribute__((aligned(64))) = {{}};
"""
Edge = tuple[bool, ir.Value]  # (before, index): a condition holds below the index, or from it on
_FAR = ir.Number(4 * FARTHEST, torch.int64)
_AFTER = {"<": 0, ">=": 0, "<=": 1, ">": 1}  # with the index on the left: from the bound to where it changes
_SWAPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}


class Way(Enum):
    """How a loop takes a load: as it stands, reversed before, from memory or zeros, by a select in each lane."""

    PLAIN, BACK, PART, SELECT = range(4)


def way_of(facts: Facts, n: int) -> Way | None:
    """How a loop takes row `n`; None if it is no load, or one before the loops, from a tile, or of a segment."""
    row = facts.plan.rows[n]
    if row.op != "load" or n in facts.guarded or n in facts.staged or n in facts.parts:
        return None
    if not row.args:
        return Way.BACK if _runs_back(facts, row) else Way.PLAIN
    return Way.PART if _is_shared(facts, row) else Way.SELECT


def _runs_back(facts: Facts, row: Row) -> bool:
    """Whether a load runs backwards in a loop over elements of several widths: g++ does not vectorise it."""
    if facts.step(row.address) != -1:
        return False
    return len({d.itemsize for _, d in facts.plan.buffers} | {r.dtype.itemsize for r in facts.plan.rows}) > 1


def _is_shared(facts: Facts, row: Row) -> bool:
    """Whether the lanes of a contiguous load share its condition, which waits for no row buffer."""
    if facts.vector is None or facts.vector.sym in facts.plan.varies[row.args[0]] or facts.step(row.address) != 1:
        return False
    return not facts.kept or not any(m in facts.kept for m in facts.passes.closure(row.args))


def open_part(rows: Rows, n: int, start: str, at: ir.Value) -> Place:
    """Declare the source of the masked load `n` from `start` on: memory, or a page of zeros if its condition is false.

    Returns where the loop finds the load; `at` is its index from 0.
    """
    row, facts, part = rows.plan.rows[n], rows.facts, ir.Name(f"part{n}")
    memory = ir.Cast("const void*", rows.address_from(start, row.buffer, row.address))
    source = ir.Select(rows.ref(row.args[0]), memory, ir.Name("fuser_zeros"))
    kind, step = f"{storage_type(facts.dtypes[row.buffer])}*", facts.step(row.address)
    rows.out.let(f"{kind} const", part.name, ir.Cast(f"const {kind}", source))
    return Place(part[at if step == 1 else ir.Number(step or 0) * at], stored=True)


# -- edges ------------------------------------------------------------------------------------------------------------
def step_of(facts: Facts, address: Expr) -> int:
    """The stride of an address along the lanes' axis, if it is a known number from 1 to MOST_STEP; else 0."""
    step = facts.step(address)
    return step if step is not None and 1 <= step <= MOST_STEP else 0


def find_edges(facts: Facts, most: int = 1) -> dict[int, Edge]:
    """The rows that compare an index of stride at most `most` with a loop-invariant value, each with its edge."""
    full = (n for n in range(len(facts.plan.rows)) if facts.vector is not None and facts.is_full(n))
    return {n: e for n in full if (e := _edge(facts, facts.plan.rows[n], most)) is not None}


def _edge(facts: Facts, row: Row, most: int = 1) -> Edge | None:
    """Where a comparison of an index changes along the lanes' axis; None for other rows."""
    sign = row.traits.sign
    if sign not in _AFTER:
        return None
    for at, (own, other) in enumerate((row.args, row.args[::-1])):
        index = facts.plan.rows[own]
        if index.op != "index" or not facts.is_full(own) or not facts.is_outside(other):
            continue
        step = step_of(facts, index.attr)
        if not 1 <= step <= most:
            continue
        sign = sign if at == 0 else _SWAPPED[sign]
        first = _bound(facts, other) - size(index.attr - expr(facts.along.sym) * step) + (_AFTER[sign] + step - 1)
        return sign in ("<", "<="), first if step == 1 else first // step
    return None


def _bound(facts: Facts, n: int) -> ir.Value:
    """The bound of a comparison, clamped to a value beyond all indices so that sums with it do not overflow."""
    row = facts.plan.rows[n]
    if row.op == "index":
        return facts.scalar(n)
    if row.op == "const":
        return ir.Number(max(-FARTHEST, min(int(row.attr), FARTHEST)))
    bound, low, high = facts.scalar(n), ir.Number(-FARTHEST), ir.Number(FARTHEST)
    return ir.Select(bound < low, low, ir.Select(bound > high, high, bound))


def edges_of(facts: Facts, condition: int) -> list[Edge]:
    """The edges between which a condition holds; empty if it has other parts, too.

    A part that does not depend on the lanes' axis has an edge beyond all indices.
    """
    found: list[Edge] = []
    pending = [condition]
    while pending:
        n = pending.pop()
        row = facts.plan.rows[n]
        edge = _edge(facts, row)
        if edge is not None:
            found.append(edge)
        elif facts.is_outside(n):
            found.append((True, ir.Select(facts.scalar(n), _FAR, ir.Unary("-", _FAR))))
        elif facts.is_full(n) and is_both(row):
            pending += row.args
        else:
            return []
    return found


__all__ = ["LONGEST", "MOST_STEP", "ZEROS", "Edge", "Way", "edges_of", "find_edges", "open_part", "step_of", "way_of"]
