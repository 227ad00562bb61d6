"""Segments of a loop in which its conditions are constant, so that masked loads read whole vectors.

Joins, pads and rolls compare the index along the vector axis with sizes. The loop is cut at these sizes, and each
condition is computed once for a segment. A load whose condition does not hold reads a page of zeros instead.
Windows of pools do so with steps: g++ vectorises a load of every second element, but not under a condition.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from fuser.cpu.nest import Nest, size
from fuser.cpu.parts import LONGEST, open_part
from fuser.cpu.vir import nodes as ir
from fuser.ir.loop_body import Row
from fuser.ir.sizes import Expr, expr
from fuser.ops import LOGIC

SHORTEST = 256  # elements of a vector axis that is worth it
SHORTEST_OF_STEPS, MOST_STEP = 16, 4  # the same where loads under conditions take steps; and how far these may go
MOST_CUTS = 6
FARTHEST = 1 << 60
_AFTER = {"<": 0, ">=": 0, "<=": 1, ">": 1}  # where a comparison with an index on the left changes, after its bound
_SWAPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}


@dataclass(frozen=True)
class Segments:
    """Rows that are constant in a segment, in order; the indices between segments; loads under such conditions."""

    rows: tuple[int, ...]
    places: tuple[ir.Value, ...]
    loads: tuple[int, ...]
    longest: int = LONGEST

    def parts(self, nest: Nest) -> dict[int, ir.Value]:
        """What the loads read."""
        assert nest.vector is not None
        at = ir.Name(nest.vector.sym.name) - "from"
        steps = {n: _step(nest, nest.plan.rows[n].attr[1][0]) for n in self.loads}
        return {n: ir.Name(f"part{n}")[at if step == 1 else ir.Number(step) * at] for n, step in steps.items()}

    def conditions(self, nest: Nest) -> list[ir.Name]:
        """All conditions of loads with steps; none where all are neighbours."""
        if self.longest == LONGEST:
            return []
        found = dict.fromkeys(nest.plan.rows[n].args[0] for n in self.loads)
        return [ir.Name(f"t{n}") for n in found if nest.plan.rows[n].op != "const"]


def find_segments(nest: Nest) -> Segments | None:
    """The segments of a pointwise nest's loop; None if no load depends on such a condition."""
    if nest.vector is None:
        return None
    held = [r for r in nest.plan.rows if r.op == "load" and r.args]
    most = max((_step(nest, r.attr[1][0]) for r in held), default=1)
    most = most if nest.vector.hint >= SHORTEST_OF_STEPS else 1
    if nest.vector.hint < SHORTEST and most < 2:
        return None
    edges = find_edges(nest, most)
    places = dict.fromkeys(place for _, place in edges.values())
    rows: list[int] = []
    for n, row in enumerate(nest.plan.rows):
        if n in edges:
            rows.append(n)
        elif not nest.is_full(n):
            continue
        elif row.traits.sign in LOGIC and all(a in rows or not nest.is_full(a) for a in row.args):
            rows.append(n)
    known = {*rows, *(n for n in range(len(nest.plan.rows)) if most > 1 and not (nest.is_full(n) or nest.is_lane(n)))}
    loads = [n for n, row in enumerate(nest.plan.rows) if _reads_a_part(nest, row, known, most)]
    if not loads or len(places) > MOST_CUTS:
        return None
    return Segments(tuple(rows), tuple(places), tuple(loads), LONGEST // most)


def _step(nest: Nest, address: Expr) -> int:
    """How far apart neighbours are, if it is a known number of at most MOST_STEP elements; else 0."""
    found = nest.step(address)
    step = found.as_int() if found is not None else None
    return step if step is not None and 1 <= step <= MOST_STEP else 0


def _reads_a_part(nest: Nest, row: Row, known: Set[int], most: int) -> bool:
    if row.op != "load" or not row.args or row.args[0] not in known:
        return False
    return 1 <= _step(nest, row.attr[1][0]) <= most


def find_edges(nest: Nest, most: int = 1) -> dict[int, tuple[bool, ir.Value]]:
    """The rows that are such comparisons, of indices with steps of at most `most`, each with its edge."""
    full = (n for n in range(len(nest.plan.rows)) if nest.vector is not None and nest.is_full(n))
    return {n: e for n in full if (e := find_edge(nest, nest.plan.rows[n], most)) is not None}


def find_edge(nest: Nest, row: Row, most: int = 1) -> tuple[bool, ir.Value] | None:
    """Where a comparison of an index changes along the vector axis: (whether it holds before, the index); else None."""
    sign = row.traits.sign
    if sign not in _AFTER:
        return None
    for at, (own, other) in enumerate((row.args, row.args[::-1])):
        index = nest.plan.rows[own]
        if index.op != "index" or not nest.is_full(own) or nest.is_full(other) or nest.is_lane(other):
            continue
        assert nest.vector is not None
        v, e = nest.vector.sym, index.attr
        step = _step(nest, e)
        if not 1 <= step <= most:
            continue
        sign = sign if at == 0 else _SWAPPED[sign]
        first = _bound(nest, other) - size(e - expr(v) * step) + (_AFTER[sign] + step - 1)
        return sign in ("<", "<="), first if step == 1 else first // step
    return None


def _bound(nest: Nest, n: int) -> ir.Value:
    """What an index is compared with, clamped to a bound beyond all indices: sums with it do not overflow."""
    row = nest.plan.rows[n]
    if row.op == "index":
        return nest.ref(n)
    if row.op == "const":
        return ir.Number(max(-FARTHEST, min(int(row.attr), FARTHEST)))
    bound, low, high = nest.ref(n), ir.Number(-FARTHEST), ir.Number(FARTHEST)
    return ir.Select(bound < low, low, ir.Select(bound > high, high, bound))


def open_segments(nest: Nest, segments: Segments, low: str, high: str) -> None:
    """The loop over the segments from `low` to `high`; in it, `from` and `to` are where one begins and ends."""
    assert nest.vector is not None
    nest.out.open(ir.Segments(ir.Name(low), ir.Name(high), segments.longest, segments.places))
    nest.out.let("i64", nest.vector.sym.name, "from")
    indices = {a for n in segments.rows for a in nest.plan.rows[n].args if nest.is_full(a)}
    for n in sorted({*indices, *segments.rows}):
        nest.declare(n)
    for n in segments.loads:
        open_part(nest, n, nest.plan.rows[n].attr[1][0])


__all__ = ["Segments", "find_edge", "find_edges", "find_segments", "open_segments"]
