"""Transposed reads of pointwise nests: a band of each operand is read along its own rows, into a tile."""

from __future__ import annotations

from fuser.cpu.facts import Facts, size, storage_type
from fuser.cpu.rows import Place, Rows
from fuser.cpu.transposes import EDGES, MOST_APART, TILE_ROWS, TILE_STRIDE
from fuser.cpu.vir import nodes as ir
from fuser.ir.loop_body import indirect_rows
from fuser.ir.sizes import LOOP, ONE, coefficient, expr, substitute, symbol
from fuser.scheduler.kernel_plan import Axis

R0, R1, V0, V1 = map(ir.Name, ("r0", "r1", "v0", "v1"))  # a tile's rows and columns


def transposed(facts: Facts) -> dict[int, Axis]:
    """Loads that run along another axis than the vector axis, with that axis, if it is one for all; else none."""
    if facts.vector is None or facts.checked:
        return {}
    others = [a for a in facts.kept_axes if a is not facts.vector]
    along: dict[int, Axis] = {}
    for n, row in enumerate(facts.plan.rows):
        if row.op != "load" or row.args or indirect_rows(row):
            continue
        address = row.attr[1][0]
        c = coefficient(address, facts.vector.sym)
        if c is None or c.as_int() in (0, 1, -1):
            continue
        axis = next((a for a in others if coefficient(address, a.sym) == ONE), None)
        if axis is not None:
            along[n] = axis
    return along if len({a.sym for a in along.values()}) == 1 else {}


def in_tiles(facts: Facts) -> dict[int, Place]:
    """Where transposed loads are staged."""
    return {n: Place(_in_tile(facts, k)) for k, n in enumerate(facts.staged)}


def _in_tile(facts: Facts, k: int) -> ir.At:
    assert facts.tiled is not None
    return ir.Name(f"tile{k}")[(ir.Name(facts.tiled.sym.name) - R0) * TILE_STRIDE + facts.v - V0]


def fill_tiles(rows: Rows) -> None:
    """Read a band of each transposed operand along its own rows."""
    facts, out = rows.facts, rows.out
    assert facts.tiled is not None
    for k, n in enumerate(facts.staged):
        kind, begin = facts.kind(n), ir.value(V0)
        out.scratch(kind, f"tile{k}", TILE_ROWS * TILE_STRIDE, aligned=facts.machine.line_bytes)
        if storage_type(facts.dtypes[facts.plan.rows[n].attr[0]]) == kind:
            begin = _fill_blocks(rows, n, k)
        with out.block(ir.For(facts.v, begin, V1)), out.block(ir.For(facts.tiled.sym.name, R0, R1)):
            out.set(_in_tile(facts, k), rows.decoded(n, rows.element(n)))


def _fill_blocks(rows: Rows, n: int, k: int) -> ir.Value:
    """Read what makes whole blocks of tile `k` by registers; returns where the vector axis goes on from."""
    facts, out, (buffer, (address,)) = rows.facts, rows.out, rows.plan.rows[n].attr
    assert facts.tiled is not None
    width = facts.dtypes[buffer].itemsize
    count, step, last, end, columns = (ir.Name(f"{name}{k}") for name in ("rows", "step", "last", "end", "columns"))
    edge, length = EDGES[width], ir.Name(f"n_{facts.v}")
    out.let("i64", step.name, size(coefficient(address, facts.along.sym) or expr(0)))
    # Rows are rounded up to whole blocks if the elements that are read past them are inside the buffer.
    out.let("i64", count.name, (R1 - R0 + (edge - 1)) // edge * edge)
    past = ir.Select(step > 0, (count - (R1 - R0) + step - 1) // step, length)
    out.let("i64", last.name, length - past)
    out.let("i64", end.name, ir.least(last, V1))
    blocks = ir.Select(end > V0, (end - V0) // edge * edge, ir.Number(0))
    apart = ir.Name(f"apart{k}")
    out.let("bool", apart.name, step.same(R1 - R0) & (step > 1) & (step <= MOST_APART))
    out.let("i64", columns.name, ir.Select(apart, V1 - V0, blocks))
    origin = {facts.tiled.sym: symbol("r0", LOOP), facts.along.sym: symbol("v0", LOOP)}
    corner, to = rows.address(buffer, substitute(address, origin)), ir.Name(f"tile{k}")
    out.add(ir.Block(ir.If(apart), (ir.Transpose(width, corner, step, to, None, columns),)))
    out.add(ir.Block(ir.Else(), (ir.Transpose(width, corner, step, to, count, columns),)))
    return V0 + columns


__all__ = ["fill_tiles", "in_tiles", "transposed"]
