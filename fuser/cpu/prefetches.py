"""Prefetches of memory that the hardware does not predict."""

from __future__ import annotations

from collections.abc import Sequence

from fuser.cpu.facts import Facts, size, storage_type
from fuser.cpu.rows import Rows
from fuser.cpu.vir import nodes as ir
from fuser.ir.sizes import LOOP, ONE, Expr, Sym, coefficient, expr, rows_in, substitute, symbol, symbols
from fuser.scheduler.kernel_plan import Axis

ROWS_AHEAD = 8  # distance of prefetches, in rows of a tile or of a block of columns
PIECE = 4096  # elements of a row's piece up to which the next piece is prefetched


def _line(facts: Facts) -> dict[Sym, Expr]:
    """The substitution for element `q` of a contiguous run along the lanes' axis."""
    return {facts.along.sym: symbol("v0", LOOP) + symbol("q", LOOP)}


def prefetch_rows(rows: Rows, tiled: Axis) -> None:
    """Prefetch rows of a tile some rows ahead: they are too short for the hardware to predict the next one."""
    facts = rows.facts
    if not facts.machine.prefetches:
        return
    t = tiled.sym
    ahead = {**_line(facts), t: expr(t) + ROWS_AHEAD}
    for buffer, address in facts.lines_read([n for n in range(len(facts.plan.rows)) if n not in facts.staged]):
        if t in symbols(address):
            at = rows.address(buffer, substitute(address, ahead))
            rows.out.add(rows.prefetch(buffer, at, ir.Name("v1") - "v0", 0, 2))


def prefetch_later(rows: Rows, phase: int) -> None:
    """Prefetch during the costliest pass: the lines that later passes write, and those that the next unit reads first.

    The memory would be idle between the passes over a row in the cache.
    """
    facts = rows.facts
    if not facts.machine.prefetches or facts.plan.split or phase != facts.costliest_pass:
        return
    wanted = [(s.buffer, s.address, 1) for s in facts.streams if s.phase > phase]
    if facts.kept_axes and phase > 0:
        unit = facts.kept_axes[-1].sym
        for n in facts.passes[0].inner:
            row = facts.plan.rows[n]
            if row.op == "load" and not row.args and unit in symbols(row.address):
                wanted.append((row.buffer, substitute(row.address, {unit: expr(unit) + 1}), 0))
    if phase == 0:
        wanted += _next_pieces(facts)
    for buffer, address, write in dict.fromkeys(wanted):
        if facts.step(address) != 1:
            continue
        at = rows.address(buffer, substitute(address, _line(facts)))
        loop = rows.prefetch(buffer, at, "count", write)
        rows.out.add(ir.Block(ir.If(ir.Unary("!", ir.Name("stream"))), (loop,)) if write else loop)


def _next_pieces(facts: Facts) -> list[tuple[str, Expr, int]]:
    """If a row consists of short pieces that are far apart, such as a channel's planes: the next piece of each load.

    The hardware predicts the lines of one piece, but not where the next one begins.
    """
    outer = [a for a in facts.reduced_axes if a is not facts.vector]
    if not outer or facts.along.hint > PIECE:
        return []
    a, found = outer[-1].sym, []
    for buffer, address in facts.lines_read(facts.passes[0].inner):
        if a in symbols(address) and coefficient(address, a) not in (None, facts.along.size):
            found.append((buffer, substitute(address, {a: expr(a) + 1}), 0))
    return found


def _reads_on(facts: Facts, loops: Sequence[Axis]) -> bool:
    """Whether a block holds whole rows that are contiguous in memory, which the hardware predicts."""
    if facts.passes.loops > 1 or facts.along.hint > facts.lanes:
        return False
    a, rows = loops[-1].sym, facts.passes[0].inner
    return all(coefficient(e, a) == facts.along.size for _, e in facts.lines_read(rows) if a in symbols(e))


def prefetches_columns(facts: Facts, phase: int, loops: Sequence[Axis]) -> bool:
    """Whether a pass over columns prefetches: the only pass, or the costliest of the later ones."""
    wanted = facts.machine.prefetches and bool(loops) and not _reads_on(facts, loops)
    return wanted and phase == (0 if facts.passes.loops == 1 else max(1, facts.costliest_pass))


def prefetch_columns(rows: Rows, phase: int, loops: Sequence[Axis]) -> None:
    """Prefetch the next columns' data. Rows of a block are far apart, so the hardware does not predict them.

    With one pass, that is some rows ahead; otherwise the next block, during the costliest later pass.
    """
    facts = rows.facts
    if not prefetches_columns(facts, phase, loops):
        return
    v, a, line = facts.along.sym, loops[-1].sym, _line(facts)
    outer = next((a.sym for a in reversed(facts.kept_axes) if a is not facts.vector), None)
    for buffer, address in facts.lines_read(facts.passes[0].inner):
        if facts.passes.loops == 1:
            at = rows.index(substitute(address, {**line, a: expr(a) + ROWS_AHEAD}))
        else:
            turn = coefficient(address, outer) if outer is not None else None
            other_row = size(turn) - "v0" if turn is not None else ir.Number(0)
            onward = ir.Select(ir.Name("v0") + facts.lanes < f"n_{v.name}", ir.Number(facts.lanes), other_row)
            at = rows.index(substitute(address, line)) + onward
        rows.out.add(rows.prefetch(buffer, ir.Address(ir.Name(buffer), at), "count", 0, 2))


def look_ahead(rows: Rows, phase: int) -> list[str]:
    """Declare pointers to the rows that index tensors select for the next unit; returns the buffer of each."""
    facts, out, ahead = rows.facts, rows.out, list[str]()
    if not facts.machine.prefetches or facts.plan.split or len(facts.kept_axes) != 1:
        return []
    if phase == 0 or phase != facts.costliest_pass:
        return []
    v = facts.along.sym
    for n in facts.passes[0].inner:
        row = facts.plan.rows[n]
        if row.op != "load" or row.args or coefficient(row.address, v) != ONE:
            continue
        found = rows_in(row.address)
        if not found or any(map(facts.is_full, found)):
            continue
        to, unit = ir.Name(f"ahead{len(ahead)}"), facts.kept_axes[0].sym.name
        out.var(f"const {storage_type(facts.dtypes[row.buffer])}*", to.name, row.buffer)
        with out.block(ir.If(ir.Name("u") + 1 < "end")):
            out.let("i64", "next", ir.Name(unit) + 1)
            with out.block(ir.Plain()):
                out.let("i64", unit, "next")
                for m in facts.passes.varying(found):
                    rows.declare(m)
                out.set(to, rows.address(row.buffer, substitute(row.address, {v: expr(0)})))
        ahead.append(row.buffer)
    return ahead


__all__ = ["look_ahead", "prefetch_columns", "prefetch_later", "prefetch_rows", "prefetches_columns"]
