"""Passes of column nests: each lane of a block of neighbouring columns is one result; rows are taken in order."""

from __future__ import annotations

from collections.abc import Container, Sequence

from fuser.cpu.accumulators import Accumulator, count_rows
from fuser.cpu.facts import Facts
from fuser.cpu.halves import half_loads
from fuser.cpu.prefetches import prefetch_columns, prefetches_columns
from fuser.cpu.prepared import prepared
from fuser.cpu.rows import Ends, Fold, Rows
from fuser.cpu.vir import nodes as ir
from fuser.ir.loop_body import is_checked
from fuser.scheduler.kernel_plan import Axis

ROWS_TOGETHER = 4  # rows of a column pass that are added before accumulators are written
TOGETHER_COST = 16  # most operations of a row for that


def one_row(rows: Rows, own: Sequence[Accumulator], phase: int, loops: Sequence[Axis], fold: Fold) -> None:
    """One row of a block of columns."""
    facts, count = rows.facts, ir.Name("count")
    prefetch_columns(rows, phase, loops)
    known = looked_up_once(facts, phase)
    for n in known:
        rows.declare(n)
    with prepared(rows, phase, rows.block()):
        whole = (count + 15) // 16 * 16 if _reads_pieces_only(facts, phase) else count
        with rows.lanes(whole, checks_in_lanes(facts, known)):
            rows.inner(phase, fold, known)
    count_rows(rows.out, own, 1)


def looked_up_once(facts: Facts, phase: int) -> dict[int, None]:
    """If a pass looks up a bounds-checked index for each of its rows: what it computes for a row, not for each lane.

    g++ takes nothing out of a loop that reports an index, and gathers where lanes are neighbours.
    """
    assert facts.vector is not None
    same = [n for n in facts.rows_of(phase) if facts.is_full(n) and facts.vector.sym not in facts.plan.varies[n]]
    return dict.fromkeys(same) if any(is_checked(facts.plan.rows[n]) for n in same) else {}


def checks_in_lanes(facts: Facts, known: Container[int]) -> bool:
    """Whether a loop over lanes checks indices, once those of the rows `known` are checked."""
    return facts.checks_inside and not all(n in known for n, r in enumerate(facts.plan.rows) if is_checked(r))


def _reads_pieces_only(facts: Facts, phase: int) -> bool:
    """Whether a pass may round its loop up to whole vectors: it reads only padded pieces, and writes nothing."""
    loads = {n for n in facts.rows_of(phase) if facts.plan.rows[n].op == "load"}
    looks_up = any(r.op == "indirect" for r in facts.plan.rows)
    plain = not (facts.has_checks or facts.passes[phase].stores or facts.kept or looks_up)
    return plain and phase == 0 and bool(loads) and loads == set(half_loads(facts, phase))


def takes_rows_together(facts: Facts, own: Sequence[Accumulator], phase: int, loops: Sequence[Axis]) -> bool:
    """Whether a column pass adds up several rows in registers before it writes its accumulators to memory.

    It pays for sums of cheap rows in a pass without stores. g++ does not vectorise several selects.
    """
    if not loops or not own or not all(a.spec.adds for a in own) or facts.checks_inside:
        return False
    if facts.passes[phase].stores or half_loads(facts, phase):
        return False
    keeps = any(n in facts.kept and facts.passes.first(n) == phase for n in facts.computed(phase))
    return facts.cost_of(phase) <= TOGETHER_COST and not keeps


def rows_together(
    rows: Rows, own: Sequence[Accumulator], phase: int, loops: Sequence[Axis], ends: Ends, fold: Fold
) -> None:  # fmt: skip
    """All rows of a block of columns, several at a time."""
    facts, out, point = rows.facts, rows.out, f"point{phase}"
    a, row = loops[-1].sym.name, ir.Name(f"r{phase}")
    with out.block(ir.Routine(point, (("const i64", "l"), ("const i64", a)))):
        out.let("i64", facts.v, ir.Name("v0") + "l")
        rows.inner(phase, fold)
    out.var("i64", row.name, ends[0])
    for together in (ROWS_TOGETHER, 1):
        with out.block(ir.For(row.name, None, ends[1], ir.Number(together), whole=True)):
            if prefetches_columns(facts, phase, loops):
                with out.block(ir.For(a, row, row + together)):
                    prefetch_columns(rows, phase, loops)
            with out.block(rows.simd("l", 0, "count")):
                for n in range(together):
                    out.do(point, "l", row + n)
            count_rows(out, own, together, exactly=False)


__all__ = ["TOGETHER_COST", "checks_in_lanes", "looked_up_once", "one_row", "rows_together", "takes_rows_together"]
