"""Chooses the memory order of intermediate results that are read many times: the order of their readers.

A table of biases, gathered for each pair of positions, is computed with its heads innermost. The scores of all windows
read it row by row, so in the producer's order each of their loads would be strided.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from fuser.ir.nodes import Buffer, Pointwise, strides_of
from fuser.ir.sizes import ZERO, Expr, Sym, coefficient, symbols
from fuser.lowering.context import LoweringContext
from fuser.scheduler.nodes import Node

AGAIN = 4  # readings per element from which the readers' order counts, not the producer's


def arrange(
    ctx: LoweringContext, nodes: list[Node], fixed: Collection[str], strides: Mapping[str, tuple[Expr, ...]]
) -> None:  # fmt: skip
    """Reorder the dims of such buffers as their readers traverse memory. `fixed` buffers stay as they are."""
    made = {n.buffer.name: n.buffer for n in nodes}
    readers: dict[str, list[Node]] = {}
    for node in nodes:
        for name in node.reads:
            readers.setdefault(name, []).append(node)
    for name, buffer in made.items():
        if name in fixed or not _is_free(buffer):
            continue
        points = math.prod(max(ctx.hint(s), 1) for s in buffer.size)
        own = readers.get(name, [])
        if any(_points(ctx, node) < AGAIN * points for node in own):
            continue
        wanted = {_order_of(ctx, node, buffer, strides) for node in own}
        order = wanted.pop() if len(wanted) == 1 else None
        if order is not None and order != (buffer.order or tuple(range(len(buffer.size)))):
            buffer.order, buffer.stride = order, strides_of(buffer.size, order)


def _is_free(buffer: Buffer) -> bool:
    """Whether a buffer has several dims and is filled by one pointwise loop nest, so that its order may change."""
    plain = len(buffer.loops) == 1 and isinstance(buffer.loops[0], Pointwise) and not buffer.table
    return plain and len(buffer.size) > 1


def _points(ctx: LoweringContext, node: Node) -> int:
    return math.prod(max(ctx.hint(size), 1) for _, size in node.domain)


def _order_of(
    ctx: LoweringContext, node: Node, buffer: Buffer, strides: Mapping[str, tuple[Expr, ...]]
) -> tuple[int, ...] | None:  # fmt: skip
    """The buffer's dims in the order of a reader's loops, outermost first; None if the order is not known."""
    if node.ordered is not None or node.contracts:
        return None
    steps = _steps(ctx, node, strides)
    found: set[tuple[int, ...]] = set()
    for row in node.rows:
        if row.op != "load" or row.buffer != buffer.name:
            continue
        nearest = []
        for e in row.indices:
            used = symbols(e)
            if any(v not in steps for v in used):
                return None  # an index that a row computes
            nearest.append(min((steps[v] for v in used), default=math.inf))
        found.add(tuple(sorted(range(len(nearest)), key=lambda d: -nearest[d])))
    return found.pop() if len(found) == 1 else None


def _steps(ctx: LoweringContext, node: Node, strides: Mapping[str, tuple[Expr, ...]]) -> dict[Sym, float]:
    """The stride of each loop variable in the tensor that the node reads along most loops.

    If it reads none along several loops, in its result; else by the loops' order.
    """
    out = {v: float(len(node.domain) - n) for n, (v, _) in enumerate(node.domain)}
    stored = sum((i * s for i, s in zip(node.store_index, node.buffer.stride)), ZERO)
    along = {v: coefficient(stored, v) for v in out}
    if all(c is not None and c != ZERO for c in along.values()):
        out = {v: float(abs(ctx.hint(c))) for v, c in along.items() if c is not None}
    best = 1
    for row in node.rows:
        if row.op != "load" or row.buffer not in strides:
            continue
        address = sum((i * s for i, s in zip(row.indices, strides[row.buffer])), ZERO)
        moved = {v: c for v, _ in node.domain if (c := coefficient(address, v)) is not None and c != ZERO}
        if len(moved) > best:
            best = len(moved)
            out |= {v: float(abs(ctx.hint(c))) for v, c in moved.items()}
            out |= {v: math.inf for v, _ in node.domain if v not in moved}
    return out


__all__ = ["arrange"]
