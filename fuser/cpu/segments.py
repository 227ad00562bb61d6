"""Segments of a loop in which conditions are constant, so that masked loads read whole vectors.

Joins, pads and rolls compare the index along the vector axis with sizes. The loop is cut at these sizes, and each
condition is computed once for a segment. A load whose condition is false reads a page of zeros instead. Pooling
windows do so with strided loads: g++ vectorises a load of every second element, but not under a condition.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch

from fuser.cpu.facts import Facts, size
from fuser.cpu.parts import LONGEST, open_part
from fuser.cpu.rows import Place, Rows
from fuser.cpu.vir import nodes as ir
from fuser.ir.loop_body import Row
from fuser.ir.sizes import Expr, evaluate, expr, symbols
from fuser.lazy_dataclasses import dataclass
from fuser.ops import OPS

SHORTEST = 8  # fewest elements of the vector axis
SHORTEST_OF_STEPS, MOST_STEP = 16, 4  # the same for strided loads under conditions; their largest stride
MOST_CUTS = 6
MOST_CUTS_AROUND = 24  # of a loop with many selects by conditions; g++ vectorises masked loads without cuts
# Selects of values other than 0 by conditions of a segment. g++ makes a loop for each combination of a few such
# conditions, and vectorises none for more. A masked load costs less than the overhead of a short segment.
MANY_FILLS, FEW_FILLS = 4, 2
MANY_LOADS = 4
MANY_CONDITIONS = 4  # of selects and loads, from which a second loop is written for their usual values
SHORT_OF_FILLS, SHORT_OF_LOADS = 80, 40  # elements of a vector axis up to which such a loop is not cut
FARTHEST = 1 << 60
_AFTER = {"<": 0, ">=": 0, "<=": 1, ">": 1}  # with the index on the left: from the bound to where it changes
_PYTHON: dict[str, Callable[..., Any]] = {  # by sign
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "&": operator.and_, "|": operator.or_,
    "!": operator.not_,
}  # fmt: skip
_SWAPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}


@dataclass(frozen=True)
class Segments:
    """Rows that are constant in a segment, in order; the indices at which segments are cut; loads under conditions.

    places: where the loop finds these loads. usual: conditions, and their values in most of the loop. A second loop is
    written for these values: g++ vectorises no strided loads under conditions, and no loop with many conditions.
    """

    rows: tuple[int, ...]
    cuts: tuple[ir.Value, ...]
    loads: tuple[int, ...]
    longest: int
    places: dict[int, Place]
    usual: dict[ir.Name, bool]


def find_segments(facts: Facts) -> Segments | None:
    """The segments of a pointwise nest's loop; None if no load depends on such a condition."""
    if facts.vector is None:
        return None
    held = [r for r in facts.plan.rows if r.op == "load" and r.args]
    most = max((_step(facts, r.address) for r in held), default=1)
    most = most if facts.vector.hint >= SHORTEST_OF_STEPS else 1
    if facts.vector.hint < SHORTEST and most < 2:
        return None
    edges = find_edges(facts, most)
    cuts = dict.fromkeys(place for _, place in edges.values())
    rows = _constant_rows(facts, edges)
    outside = (n for n in range(len(facts.plan.rows)) if not (facts.is_full(n) or facts.is_lane(n)))
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
        {n: Place(_part(facts, n), stored=True) for n in loads},
        {ir.Name(f"t{n}"): holds for n, holds in usual.items() if facts.plan.rows[n].op != "const"},
    )  # fmt: skip


def _choosing(facts: Facts) -> set[int]:
    """The conditions in the loop that select between two values of which neither is a constant."""
    rows = facts.plan.rows
    found = [r for n, r in enumerate(rows) if r.op == "where" and facts.is_full(n)]
    return {r.args[0] for r in found if all(rows[a].op != "const" for a in r.args[1:])}


def _usual(facts: Facts, constant: Sequence[int]) -> dict[int, bool]:
    """The values of segment-constant conditions in the middle of the loop, if there are many such conditions.

    The example's sizes are used; conditions that depend on other sizes are left out.
    """
    rows = facts.plan.rows
    deciding = {r.args[0] for n, r in enumerate(rows) if r.op in ("load", "where") and r.args and facts.is_full(n)}
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
        elif row.traits.sign in _PYTHON and None not in args:
            known[n] = int(_PYTHON[row.traits.sign](*args))
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


def _part(facts: Facts, n: int) -> ir.Value:
    """The value of a load in a segment, from its part."""
    at, step = ir.Name(facts.v) - "from", _step(facts, facts.plan.rows[n].address)
    return ir.Name(f"part{n}")[at if step == 1 else ir.Number(step) * at]


def _step(facts: Facts, address: Expr) -> int:
    """The stride of an address along the lanes' axis, if it is a known number from 1 to MOST_STEP; else 0."""
    step = facts.step(address)
    return step if step is not None and 1 <= step <= MOST_STEP else 0


def _reads_a_part(facts: Facts, row: Row, known: Set[int], most: int) -> bool:
    if row.op != "load" or not row.args or row.args[0] not in known:
        return False
    return 1 <= _step(facts, row.address) <= most


def find_edges(facts: Facts, most: int = 1) -> dict[int, tuple[bool, ir.Value]]:
    """The rows that compare an index of stride at most `most` with a loop-invariant value, each with its edge."""
    full = (n for n in range(len(facts.plan.rows)) if facts.vector is not None and facts.is_full(n))
    return {n: e for n in full if (e := find_edge(facts, facts.plan.rows[n], most)) is not None}


def find_edge(facts: Facts, row: Row, most: int = 1) -> tuple[bool, ir.Value] | None:
    """Where a comparison of an index changes along the vector axis: (whether it holds before, the index), or None."""
    sign = row.traits.sign
    if sign not in _AFTER:
        return None
    for at, (own, other) in enumerate((row.args, row.args[::-1])):
        index = facts.plan.rows[own]
        if index.op != "index" or not facts.is_full(own) or facts.is_full(other) or facts.is_lane(other):
            continue
        v, e = facts.along.sym, index.attr
        step = _step(facts, e)
        if not 1 <= step <= most:
            continue
        sign = sign if at == 0 else _SWAPPED[sign]
        first = _bound(facts, other) - size(e - expr(v) * step) + (_AFTER[sign] + step - 1)
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


def has_fills(facts: Facts) -> bool:
    """Whether so many selects depend on conditions outside the loop, or up to an edge, that vectors are faster."""
    held = {*_constant_rows(facts, find_edges(facts, MOST_STEP))}
    found = {r.args[0] for n, r in enumerate(facts.plan.rows) if facts.is_full(n) and _fills(facts, r, held)}
    return len(found) >= (FEW_FILLS if facts.machine.masks else MANY_FILLS)


def _fills(facts: Facts, row: Row, held: Set[int]) -> bool:
    if row.op != "where" or (row.args[0] not in held and facts.is_full(row.args[0])):
        return False
    values = [facts.plan.rows[a] for a in row.args[1:]]
    return any(v.op == "const" and v.attr not in ("0.0", "-0.0", "0", "False") for v in values)


def stays_whole(facts: Facts, filled: bool) -> bool:
    """Whether a loop that has segments is better not cut, but written with masks. `filled`: what `has_fills` says."""
    masked = [r for n, r in enumerate(facts.plan.rows) if r.op == "load" and r.args and facts.is_full(n)]
    if any(_step(facts, r.address) > 1 for r in masked):
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
        for n in segments.loads:
            open_part(rows, n, facts.v)
        yield


__all__ = ["Segments", "each_segment", "find_edge", "find_edges", "find_segments", "has_fills", "stays_whole"]
