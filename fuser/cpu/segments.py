"""Segments of a loop in which conditions are constant, so that masked loads read whole vectors.

Joins, pads and rolls compare the index along the vector axis with sizes. The loop is cut at these sizes, and each
condition is computed once for a segment. A load whose condition is false reads a page of zeros instead. Pooling
windows do so with strided loads: g++ vectorises a load of every second element, but not under a condition.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence, Set
from contextlib import contextmanager

import torch

from fuser.cpu.conditions import LONGEST, MOST_STEP, find_edges, open_part, step_of
from fuser.cpu.facts import Facts
from fuser.cpu.rows import Rows
from fuser.cpu.vir import nodes as ir
from fuser.ir.loop_body import Row, loads_in, outcome
from fuser.ir.sizes import evaluate, symbols
from fuser.lazy_dataclasses import dataclass
from fuser.ops import OPS

SHORTEST = 8  # fewest elements of the vector axis
SHORTEST_OF_STEPS = 16  # the same for strided loads under conditions
MOST_CUTS = 6  # of a loop, which is written once for each segment
MOST_CUTS_AROUND = 24  # of a loop with many selects by conditions; g++ vectorises masked loads without cuts
# Selects of values other than 0 by conditions of a segment. g++ makes a loop for each combination of a few such
# conditions, and vectorises none for more. A masked load costs less than the overhead of a short segment.
MANY_FILLS, FEW_FILLS = 4, 2
MANY_LOADS = 4  # under conditions, from which a loop over a short row stays whole, with masks
MANY_CONDITIONS = 4  # of selects and loads, from which a second loop is written for their usual values
SHORT_OF_FILLS, SHORT_OF_LOADS = 80, 40  # elements of a vector axis up to which such a loop is not cut


@dataclass(frozen=True)
class Segments:
    """Rows that are constant in a segment, in order; the indices at which segments are cut; loads under conditions.

    usual: conditions, and their values in most of the loop. A second loop is written for these values: g++ vectorises
    no strided loads under conditions, and no loop with many conditions.
    """

    rows: tuple[int, ...]
    cuts: tuple[ir.Value, ...]
    loads: tuple[int, ...]
    longest: int
    usual: dict[ir.Name, bool]


def find_segments(facts: Facts) -> Segments | None:
    """The segments of a pointwise nest's loop; None if no load depends on such a condition."""
    if facts.vector is None:
        return None
    held = [r for r in loads_in(facts.plan.rows) if r.args]
    most = max((step_of(facts, r.address) for r in held), default=1)
    most = most if facts.vector.hint >= SHORTEST_OF_STEPS else 1
    if facts.vector.hint < SHORTEST and most < 2:
        return None
    edges = find_edges(facts, most)
    cuts = dict.fromkeys(place for _, place in edges.values())
    rows = _constant_rows(facts, edges)
    outside = filter(facts.is_outside, range(len(facts.plan.rows)))
    known = {*rows, *(outside if most > 1 else ())}
    loads = [n for n, row in enumerate(facts.plan.rows) if _reads_a_part(facts, row, known, most)]
    stepping = {facts.plan.rows[n].args[0]: True for n in loads if most > 1}
    usual = stepping or _usual(facts, rows)
    around = not stepping and len(_choosing(facts) & usual.keys()) >= MANY_CONDITIONS
    around = around and facts.vector.hint >= 2 * len(cuts)
    if not loads or len(cuts) > (MOST_CUTS_AROUND if around else MOST_CUTS):
        return None
    return Segments(
        tuple(rows), tuple(cuts), tuple(loads), LONGEST // most,
        {ir.Name(f"t{n}"): holds for n, holds in usual.items() if facts.plan.rows[n].op != "const"},
    )  # fmt: skip


def _choosing(facts: Facts) -> set[int]:
    """The conditions in the loop that select between two values of which neither is a constant."""
    rows = facts.plan.rows
    found = [r for n, r in enumerate(rows) if r.traits.chooses and facts.is_full(n)]
    return {r.args[0] for r in found if all(rows[a].op != "const" for a in r.args[1:])}


def _usual(facts: Facts, constant: Sequence[int]) -> dict[int, bool]:
    """The values of segment-constant conditions in the middle of the loop, if there are many such conditions.

    The example's sizes are used; conditions that depend on other sizes are left out.
    """
    rows = facts.plan.rows
    takes = (r for n, r in enumerate(rows) if facts.is_full(n) and (r.traits.chooses or (r.op == "load" and r.args)))
    deciding = {r.args[0] for r in takes}
    known = _in_the_middle(facts)
    usual = {n: bool(known[n]) for n in constant if n in deciding and n in known}
    return usual if len(usual) >= MANY_CONDITIONS else {}


def _in_the_middle(facts: Facts) -> dict[int, int]:
    """The values of indices and their comparisons in the middle of all loops, for the example's sizes."""
    places = {a.sym: a.hint // 2 for a in facts.plan.axes}
    places |= {s: a.hint for a in facts.plan.axes if (s := a.size.as_symbol()) is not None}
    known: dict[int, int] = {}
    for n, row in enumerate(facts.plan.rows):
        args = [known.get(a) for a in row.args]
        if row.op == "index" and symbols(row.attr) <= places.keys():
            known[n] = evaluate(row.attr, places)
        elif row.op == "const" and row.dtype is torch.int64:
            known[n] = int(row.attr)
        elif (holds := outcome(row, args)) is not None:
            known[n] = holds
    return known


def _constant_rows(facts: Facts, edges: Container[int]) -> list[int]:
    """The rows of the loop that are constant between edges."""
    rows: list[int] = []
    for n, row in enumerate(facts.plan.rows):
        if n in edges or (facts.is_full(n) and _is_constant(facts, row, rows)):
            rows.append(n)
    return rows


def _is_constant(facts: Facts, row: Row, rows: Sequence[int]) -> bool:
    """Whether a row that varies along the loop only through its arguments is constant where the rows `rows` are."""
    if not row.args or not all(a in rows or not facts.is_full(a) for a in row.args):
        return False
    if row.op == "load":  # of one element; the load is constant between edges
        return facts.step(row.address) == 0
    return row.op in OPS and row.traits.draw is None


def _reads_a_part(facts: Facts, row: Row, known: Set[int], most: int) -> bool:
    if row.op != "load" or not row.args or row.args[0] not in known:
        return False
    return 1 <= step_of(facts, row.address) <= most


def has_fills(facts: Facts) -> bool:
    """Whether so many selects depend on conditions outside the loop, or up to an edge, that vectors are faster."""
    held = {*_constant_rows(facts, find_edges(facts, MOST_STEP))}
    found = {r.args[0] for n, r in enumerate(facts.plan.rows) if facts.is_full(n) and _fills(facts, r, held)}
    return len(found) >= (FEW_FILLS if facts.machine.masks else MANY_FILLS)


def _fills(facts: Facts, row: Row, held: Set[int]) -> bool:
    if not row.traits.chooses or (row.args[0] not in held and facts.is_full(row.args[0])):
        return False
    values = [facts.plan.rows[a] for a in row.args[1:]]
    return any(v.op == "const" and v.attr not in ("0.0", "-0.0", "0", "False") for v in values)


def stays_whole(facts: Facts, filled: bool) -> bool:
    """Whether a loop that has segments is better not cut, but written with masks. `filled`: what `has_fills` says."""
    masked = [r for n, r in enumerate(facts.plan.rows) if r.op == "load" and r.args and facts.is_full(n)]
    if any(step_of(facts, r.address) > 1 for r in masked):
        return False
    if filled:
        return facts.along.hint < (SHORT_OF_FILLS if facts.machine.masks else SHORT_OF_LOADS)
    return facts.machine.masks and len(masked) >= MANY_LOADS and facts.along.hint < SHORT_OF_LOADS


@contextmanager
def each_segment(rows: Rows, segments: Segments, low: ir.Like, high: ir.Like) -> Iterator[None]:
    """The loop over the segments of [low, high); inside it, `from` and `to` bound a segment."""
    facts, plan = rows.facts, rows.plan
    with rows.out.block(ir.Segments(ir.value(low), ir.value(high), segments.longest, segments.cuts)):
        rows.out.let("i64", facts.v, "from")
        indices = {a for n in segments.rows for a in plan.rows[n].args if facts.is_full(a)}
        for n in sorted({*indices, *segments.rows}):
            rows.declare(n)
        at = ir.Name(facts.v) - "from"
        with rows.found({n: open_part(rows, n, facts.v, at) for n in segments.loads}):
            yield


__all__ = ["Segments", "each_segment", "find_segments", "has_fills", "stays_whole"]
