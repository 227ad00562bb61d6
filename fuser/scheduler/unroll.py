"""Writes out reductions over a few points as arithmetic.

A sum over the two heads that share a key wastes a tile along the reduced axis: nearly all lanes would be masked off. A
later reader at another index, such as a rotation, would need a kernel of its own. As arithmetic the sum is inlined.

Loops that compute what is summed line up with a reduction, but not with arithmetic, which reads each point by an index
of its own. So it has to have room for all of these values: else they would be stored, `n` times the sum's bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence

import torch

from fuser.ir.loop_body import (
    Recorder,
    Row,
    compute_dtype,
    indirect_rows,
    loads_in,
    map_exprs,
    renumber_expr,
    row_exprs,
)
from fuser.ir.sizes import Expr, Sym, expr, product, substitute, symbols
from fuser.ops import REDUCTIONS
from fuser.scheduler import inline
from fuser.scheduler.nodes import Node
from fuser.targets import Target

MOST_ROWS = 64  # that all copies of a body may have


def unroll_short(nodes: Sequence[Node], target: Target, stored: Collection[str]) -> None:
    """Make reductions over at most `unrolls` strided points, or over all `components`, pointwise loops.

    `stored`: the names of the buffers that are written to memory in any case.
    """
    makers = {n.buffer.name: n for n in nodes if n.identity_store and not n.kind and n.buffer.name not in stored}
    for node in nodes:
        if _is_short(node, target.unrolls, target.components) and _has_room(node, makers, inline.MOST_ROWS):
            _unroll(node)


def _is_short(node: Node, apart: int, components: int) -> bool:
    n = product(size for _, size in node.reduced).as_int()
    if not node.kind or not REDUCTIONS[node.kind].pointwise or n is None:
        return False
    if not 1 < n <= max(apart, components) or n * len(node.rows) > MOST_ROWS or not node.kept:
        return False
    reduced = {v for v, _ in node.reduced}
    neighbours = (r.indices[-1] for r in loads_in(node.rows) if r.indices)
    return n <= (components if any(symbols(e) & reduced for e in neighbours) else apart)


def _has_room(node: Node, makers: Mapping[str, Node], most: int) -> bool:
    """Whether what computes the values of a reduction fits into its arithmetic of `most` rows, once for each point."""
    n = product(size for _, size in node.reduced).as_int() or 1
    rows, seen, pending = len(node.rows), set[str](), [*node.reads]
    while pending and n * rows <= most:
        name = pending.pop()
        if name in makers and name not in seen:
            seen.add(name)
            rows += len(makers[name].rows)
            pending += makers[name].reads
    return n * rows <= most


def _unroll(node: Node) -> None:
    out = Recorder()
    spec = REDUCTIONS[node.kind]
    acc = spec.accumulate(node.rows[node.result].dtype)
    total = -1
    for point in itertools.product(*(range(size.as_int() or 0) for _, size in node.reduced)):
        value = _converted(out, _copied(out, node, {v: expr(k) for (v, _), k in zip(node.reduced, point)}), acc)
        if total < 0 and spec.adds and acc.is_floating_point:  # 0.0 + -0.0 is 0.0
            total = out.add_row(Row("const", (), acc, "0.0")).row
        pair = (value, total) if spec.extreme else (total, value)
        total = value if total < 0 else out.add_row(Row(spec.pointwise, pair, acc)).row
    node.result = _converted(out, total, compute_dtype(node.buffer.dtype))
    node.rows, node.domain = out.rows, node.kept
    node.kind, node.n_reduced = "", 0
    node.update_reads()


def _copied(out: Recorder, node: Node, at: dict[Sym, Expr]) -> int:
    """Add the node's rows for one point of the reduced loops. Returns the row of its value there."""
    number: dict[int, int] = {}

    def moved(e: Expr) -> Expr:
        return substitute(renumber_expr(e, number), at)

    for n, row in enumerate(node.rows):
        if row_exprs(row) or indirect_rows(row):
            row = map_exprs(row, moved)
        number[n] = out.add_row(Row(row.op, tuple(number[a] for a in row.args), row.dtype, row.attr)).row
    return number[node.result]


def _converted(out: Recorder, n: int, dtype: torch.dtype) -> int:
    source = out.rows[n].dtype
    return n if source is dtype else out.add_row(Row("to_dtype", (n,), dtype, source)).row


__all__ = ["unroll_short"]
