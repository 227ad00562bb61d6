"""Rows that g++ does not vectorise, or not well, and that are prepared before the loop.

- A load under a condition that is the same for all lanes: the loop reads memory, or a page of zeros.
- A load that runs backwards, in a loop over elements of several widths: a piece of it is reversed before.
- Random numbers of neighbouring indices.
"""

from __future__ import annotations

from fuser.cpu.facts import Facts, storage_type
from fuser.cpu.rows import LoopRange, Place, Rows
from fuser.cpu.vir import nodes as ir
from fuser.ir.sizes import ONE, coefficient

FEWEST_HELD = 2  # conditions from which a second loop is written for the case that all hold
SHORTEST_DRAWN = 16  # elements of the vector axis: a call draws 32 numbers at a time
MOST_DRAWN = 6  # most rows of numbers of a pass; they share the first-level cache with its inputs
LONGEST = 1024  # most elements of a loop, and the length of the page of zeros
ZEROS = f"""\
static const u64 fuser_zeros[{LONGEST}] __attribute__((aligned(64))) = {{}};
"""


def prepared(rows: Rows, phase: int, loop: LoopRange) -> dict[int, Place]:
    """Write what precedes a loop of a pass; returns where the loop finds the prepared rows."""
    facts, out, found = rows.facts, rows.out, _draw(rows, phase, loop)
    within = facts.rows_of(phase)
    for n in within:
        if not _runs_back(facts, n):
            continue
        buffer, (address,) = facts.plan.rows[n].attr
        at = rows.index_from(loop.start, address)
        part = ir.Name(f"part{n}")
        out.scratch(storage_type(facts.dtypes[buffer]), part.name, LONGEST, aligned=facts.machine.line_bytes)
        with out.block(ir.For("k", ir.Number(0), loop.count, simd=True)):
            out.set(part["k"], ir.Name(buffer)[at - "k"])
        found[n] = Place(part[loop.at], stored=True)
    loads = [n for n in within if _hangs_together(facts, n)]
    for n in facts.passes.closure(facts.plan.rows[n].args[0] for n in loads):
        rows.declare(n)
    for n in loads:
        open_part(rows, n, loop.start)
        found[n] = Place(ir.Name(f"part{n}")[loop.at], stored=True)
    return found


def conditions(facts: Facts, phase: int) -> tuple[ir.Name, ...]:
    """The lane-invariant conditions of a pass's loads, if there are several, as in a window: usually all hold."""
    if facts.checked:
        return ()
    found = dict.fromkeys(facts.plan.rows[n].args[0] for n in facts.rows_of(phase) if _hangs_together(facts, n))
    known = [n for n in found if facts.plan.rows[n].op != "const"]
    return tuple(ir.Name(f"t{n}") for n in known) if len(known) >= FEWEST_HELD else ()


def is_part(facts: Facts, n: int) -> bool:
    """Whether row `n` is a load that is prepared before the loop."""
    return _hangs_together(facts, n) or _runs_back(facts, n)


def _hangs_together(facts: Facts, n: int) -> bool:
    row = facts.plan.rows[n]
    if row.op != "load" or not row.args or facts.vector is None:
        return False
    if n in facts.guarded or n in facts.staged or n in facts.parts:
        return False
    if facts.vector.sym in facts.plan.varies[row.args[0]] or facts.step(row.address) != 1:
        return False
    return not facts.kept or not any(m in facts.kept for m in facts.passes.closure(row.args))


def _runs_back(facts: Facts, n: int) -> bool:
    """Whether row `n` is a load that runs backwards in a loop over elements of several widths."""
    row = facts.plan.rows[n]
    if row.op != "load" or row.args or n in facts.guarded:
        return False
    widths = {d.itemsize for _, d in facts.plan.buffers} | {r.dtype.itemsize for r in facts.plan.rows}
    return len(widths) > 1 and facts.step(row.address) == -1


def open_part(rows: Rows, n: int, start: str) -> None:
    """Declare the source of the masked load `n` from `start` on: memory, or a page of zeros if its condition is
    false."""
    row = rows.plan.rows[n]
    memory = ir.Cast("const void*", rows.address_from(start, row.buffer, row.address))
    source = ir.Select(rows.ref(row.args[0]), memory, ir.Name("fuser_zeros"))
    kind = f"{storage_type(rows.facts.dtypes[row.buffer])}*"
    rows.out.let(f"{kind} const", f"part{n}", ir.Cast(f"const {kind}", source))


# -- random numbers ---------------------------------------------------------------------------------------------------
def drawn_rows(facts: Facts, phase: int) -> list[int]:
    """Rows of random numbers whose indices are consecutive along the vector axis."""
    if facts.checked or facts.vector is None or facts.vector.hint < SHORTEST_DRAWN:
        return []
    found = [n for n in facts.rows_of(phase) if _is_drawn(facts, n)]
    return found if len(found) <= MOST_DRAWN else []


def _is_drawn(facts: Facts, n: int) -> bool:
    row = facts.plan.rows[n]
    if row.traits.draw is None:
        return False
    *outer, place = row.args
    index = facts.plan.rows[place]
    if index.op != "index" or any(map(facts.is_full, outer)) or any(map(facts.is_lane, outer)):
        return False
    return coefficient(index.attr, facts.along.sym) == ONE


def _draw(rows: Rows, phase: int, loop: LoopRange) -> dict[int, Place]:
    """Draw the random numbers before the loop: four words are computed at once for four elements."""
    facts, found = rows.facts, dict[int, Place]()
    for n in drawn_rows(facts, phase):
        row = facts.plan.rows[n]
        seed, stream, index = row.args
        assert row.traits.draw is not None
        numbers = ir.Name(f"drawn{n}")
        rows.out.scratch("float", numbers.name, loop.length, aligned=facts.machine.line_bytes)
        at = rows.index_from(loop.start, facts.plan.rows[index].attr, "floor")
        rows.out.add(ir.Draw(numbers, rows.ref(seed), rows.ref(stream), at, loop.count, row.traits.draw[0]))
        found[n] = Place(numbers[loop.at])
    return found


__all__ = ["LONGEST", "ZEROS", "conditions", "drawn_rows", "is_part", "open_part", "prepared"]
