"""Segments of a loop in which its conditions are constant, so that masked loads read whole vectors.

Joins, pads and rolls compare the index along the vector axis with sizes. The loop is cut at these sizes, and each
condition is computed once for a segment. A load whose condition does not hold reads a page of zeros instead.
Windows of pools do so with steps: g++ vectorises a load of every second element, but not under a condition.
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
from fuser.ir.sizes import ZERO, Expr, evaluate, expr, symbols
from fuser.lazy_dataclasses import dataclass
from fuser.ops import OPS

SHORTEST = 8  # elements of a vector axis that is worth it
SHORTEST_OF_STEPS, MOST_STEP = 16, 4  # the same where loads under conditions take steps; and how far these may go
MOST_CUTS = 6
MOST_CUTS_AROUND = 24  # of a loop with many values chosen by conditions; g++ vectorises loads under masks without cuts
# Values other than 0 that loads have where a condition of a segment does not hold. g++ writes a loop for each of a few
# such conditions; of more it vectorises none. A load under a mask costs less than what a short segment begins with.
MANY_FILLS, FEW_FILLS = 4, 2
MANY_LOADS = 4
MANY_CONDITIONS = 4  # of values and loads, from which a loop is written without them, too
SHORT_OF_FILLS, SHORT_OF_LOADS = 80, 40  # elements of a vector axis that stays whole then
FARTHEST = 1 << 60
_AFTER = {"<": 0, ">=": 0, "<=": 1, ">": 1}  # where a comparison with an index on the left changes, after its bound
_PYTHON: dict[str, Callable[..., Any]] = {  # of signs
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "&": operator.and_, "|": operator.or_,
    "!": operator.not_,
}  # fmt: skip
_SWAPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}


@dataclass(frozen=True)
class Segments:
    """Rows that are constant in a segment, in order; the indices between segments; loads under such conditions.

    places: where the loop finds these loads. usual: conditions, and what they are in most of the loop. The loop is
    written for these once more: g++ vectorises no loads with steps under conditions, and no loop with many conditions.
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
    most = max((_step(facts, r.attr[1][0]) for r in held), default=1)
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
    """The conditions in the loop that choose between two values of which neither is a constant."""
    rows = facts.plan.rows
    found = [r for n, r in enumerate(rows) if r.op == "where" and facts.is_full(n)]
    return {r.args[0] for r in found if all(rows[a].op != "const" for a in r.args[1:])}


def _usual(facts: Facts, constant: Sequence[int]) -> dict[int, bool]:
    """The conditions among the rows that are `constant` in a segment, if they are many, as in the middle of the loop.

    The sizes are those of the example; what depends on others is left out.
    """
    rows = facts.plan.rows
    deciding = {r.args[0] for n, r in enumerate(rows) if r.op in ("load", "where") and r.args and facts.is_full(n)}
    known = _in_the_middle(facts)
    usual = {n: bool(known[n]) for n in constant if n in deciding and n in known}
    return usual if len(usual) >= MANY_CONDITIONS else {}


def _in_the_middle(facts: Facts) -> dict[int, int]:
    """What indices, and comparisons of them, are in the middle of all loops, in the sizes of the example."""
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
    """Whether what varies along the loop by its arguments alone does not where those of `rows` do not."""
    if not row.args or not all(a in rows or not facts.is_full(a) for a in row.args):
        return False
    if row.op == "load":  # of one element, on one side of an edge
        return facts.step(row.attr[1][0]) == ZERO
    return row.op in OPS and row.traits.draw is None


def _part(facts: Facts, n: int) -> ir.Value:
    """What a load reads in a segment."""
    at, step = ir.Name(facts.v) - "from", _step(facts, facts.plan.rows[n].attr[1][0])
    return ir.Name(f"part{n}")[at if step == 1 else ir.Number(step) * at]


def _step(facts: Facts, address: Expr) -> int:
    """How far apart neighbours are, if it is a known number of at most MOST_STEP elements; else 0."""
    found = facts.step(address)
    step = found.as_int() if found is not None else None
    return step if step is not None and 1 <= step <= MOST_STEP else 0


def _reads_a_part(facts: Facts, row: Row, known: Set[int], most: int) -> bool:
    if row.op != "load" or not row.args or row.args[0] not in known:
        return False
    return 1 <= _step(facts, row.attr[1][0]) <= most


def find_edges(facts: Facts, most: int = 1) -> dict[int, tuple[bool, ir.Value]]:
    """The rows that are such comparisons, of indices with steps of at most `most`, each with its edge."""
    full = (n for n in range(len(facts.plan.rows)) if facts.vector is not None and facts.is_full(n))
    return {n: e for n in full if (e := find_edge(facts, facts.plan.rows[n], most)) is not None}


def find_edge(facts: Facts, row: Row, most: int = 1) -> tuple[bool, ir.Value] | None:
    """Where a comparison of an index changes along the vector axis: (whether it holds before, the index); else None."""
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
    """What an index is compared with, clamped to a bound beyond all indices: sums with it do not overflow."""
    row = facts.plan.rows[n]
    if row.op == "index":
        return facts.scalar(n)
    if row.op == "const":
        return ir.Number(max(-FARTHEST, min(int(row.attr), FARTHEST)))
    bound, low, high = facts.scalar(n), ir.Number(-FARTHEST), ir.Number(FARTHEST)
    return ir.Select(bound < low, low, ir.Select(bound > high, high, bound))


def has_fills(facts: Facts) -> bool:
    """Whether so many values depend on conditions outside of the loop, or up to an edge, that explicit vectors are
    faster."""
    held = {*_constant_rows(facts, find_edges(facts, MOST_STEP))}
    found = {r.args[0] for n, r in enumerate(facts.plan.rows) if facts.is_full(n) and _fills(facts, r, held)}
    return len(found) >= (FEW_FILLS if facts.machine.masks else MANY_FILLS)


def _fills(facts: Facts, row: Row, held: Set[int]) -> bool:
    if row.op != "where" or (row.args[0] not in held and facts.is_full(row.args[0])):
        return False
    values = [facts.plan.rows[a] for a in row.args[1:]]
    return any(v.op == "const" and v.attr not in ("0.0", "-0.0", "0", "False") for v in values)


def stays_whole(facts: Facts, segments: Segments | None, filled: bool) -> bool:
    """Whether the loop is rather written in one piece, with masks for what segments would keep apart.

    `filled`: what `has_fills` says.
    """
    if facts.vector is None:
        return False
    masked = [r for n, r in enumerate(facts.plan.rows) if r.op == "load" and r.args and facts.is_full(n)]
    steps = any(_step(facts, r.attr[1][0]) > 1 for r in masked)
    if segments is None or steps:
        return False
    if filled:
        return facts.vector.hint < (SHORT_OF_FILLS if facts.machine.masks else SHORT_OF_LOADS)
    return facts.machine.masks and len(masked) >= MANY_LOADS and facts.vector.hint < SHORT_OF_LOADS


@contextmanager
def each_segment(rows: Rows, segments: Segments, low: ir.Like, high: ir.Like) -> Iterator[None]:
    """The loop over the segments from `low` to `high`; in it, `from` and `to` are where one begins and ends."""
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
