"""Random numbers of neighbours, drawn before a loop: a block of four words is computed once for four elements."""

from __future__ import annotations

from fuser.cpu.facts import Facts
from fuser.cpu.rows import Place, Rows, Stretch
from fuser.cpu.vir import nodes as ir
from fuser.ir.sizes import LOOP, ONE, coefficient, substitute, symbol

SHORTEST = 16  # elements of the vector axis: a call draws 32 numbers at a time
MOST = 6  # rows of numbers of a pass, which are in the first-level cache with what it reads


def drawn_rows(facts: Facts, phase: int) -> list[int]:
    """Rows of random numbers whose places follow each other along the vector axis."""
    if facts.checked or facts.vector is None or facts.vector.hint < SHORTEST:
        return []
    found = [n for n in facts.rows_of(phase) if _is_line(facts, n)]
    return found if len(found) <= MOST else []


def _is_line(facts: Facts, n: int) -> bool:
    row = facts.plan.rows[n]
    if row.traits.draw is None:
        return False
    *outer, place = row.args
    index = facts.plan.rows[place]
    if index.op != "index" or any(map(facts.is_full, outer)) or any(map(facts.is_lane, outer)):
        return False
    return coefficient(index.attr, facts.along.sym) == ONE


def drawn(rows: Rows, phase: int, loop: Stretch) -> dict[int, Place]:
    """Draw the numbers of a loop of a pass; returns where it finds them."""
    facts, found = rows.facts, dict[int, Place]()
    for n in drawn_rows(facts, phase):
        row = facts.plan.rows[n]
        seed, stream, index = row.args
        assert row.traits.draw is not None
        numbers = ir.Name(f"drawn{n}")
        rows.out.scratch("float", numbers.name, loop.length, aligned=facts.machine.line_bytes)
        first = substitute(facts.plan.rows[index].attr, {facts.along.sym: symbol(loop.start, LOOP)})
        at = rows.index(first, "floor")
        rows.out.add(ir.Draw(numbers, rows.ref(seed), rows.ref(stream), at, loop.count, row.traits.draw[0]))
        found[n] = Place(numbers[loop.at])
    return found


__all__ = ["drawn", "drawn_rows"]
