"""Scheduler nodes: the loops of the buffers, with indices in a comparable form.

A node is one loop nest of one buffer, with its own loop variables. Known facts are substituted, loops of size 1 are
dropped, and a variable that appears under `//` and `%` is split in two, so that most indices are sums of `variable *
stride`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import field

import torch

from fuser.ir.loop_body import LoopBody, Row, loads_in, map_exprs, prune_with, row_exprs
from fuser.ir.nodes import Buffer, Loops, Reduction, Scan, Scatter
from fuser.ir.ranges import simplify_divmod
from fuser.ir.sizes import (
    LOOP,
    ONE,
    ZERO,
    Call,
    Expr,
    Sym,
    atoms,
    divide_exactly,
    substitute,
    symbol,
)  # fmt: skip
from fuser.lazy_dataclasses import dataclass
from fuser.lowering.context import LoweringContext
from fuser.ops import OPS, REDUCTIONS


@dataclass(frozen=True)
class Ordered:
    """How a node's points depend on each other: a "scatter" that combines by `how`, or a "scan" of the kind `how`."""

    kind: str
    how: str


@dataclass(eq=False)
class Node:
    """One loop nest of one buffer. `domain` lists (variable, size), the reduced ones last.

    The last `n_reduced` loops of an *ordered* node, a scatter or a scan, run in order, one point after another.
    """

    name: str
    buffer: Buffer
    domain: list[tuple[Sym, Expr]]
    n_reduced: int
    kind: str  # "" for pointwise, else the reduction
    rows: list[Row]
    result: int
    store_index: tuple[Expr, ...]
    identity_store: bool
    reads: set[str] = field(default_factory=set)
    position: int = 0
    ordered: Ordered | None = None

    @property
    def is_reduction(self) -> bool:
        """Whether the node is a reduction."""
        return bool(self.kind)

    @property
    def contracts(self) -> bool:
        """Whether the node is a contraction, whose operands are read from memory."""
        return bool(self.kind) and REDUCTIONS[self.kind].contracts

    @property
    def kept(self) -> list[tuple[Sym, Expr]]:
        """The loops that are not reduced."""
        return self.domain[: len(self.domain) - self.n_reduced] if self.n_reduced else list(self.domain)

    @property
    def reduced(self) -> list[tuple[Sym, Expr]]:
        """The reduced loops."""
        return self.domain[len(self.domain) - self.n_reduced :] if self.n_reduced else []

    def sizes(self) -> dict[Sym, Expr]:
        """Size by loop variable."""
        return dict(self.domain)

    def cost(self) -> int:
        """Approximate number of simple operations per point, without loads."""
        return sum(row_cost(r) for r in self.rows)

    def size_of_code(self) -> int:
        """Approximate number of instructions a compiler sees: one per row, several for a function expanded inline."""
        return sum(max(1, row_cost(r) // 2) for r in self.rows)

    def update_reads(self) -> None:
        """Recompute `reads` after rows changed."""
        self.reads = {r.buffer for r in loads_in(self.rows)}


def scanned_rows(node: Node) -> tuple[Row, ...]:
    """The rows that compute a scan's values, without their indices; the last one is the value."""
    row = node.rows[node.result]
    return prune_with(node.rows, row.args[0] if row.op == "pair" else node.result, ())[0].rows


_FREE_ROWS = frozenset({"load", "const", "scalar", "index", "indirect", "reduced"})


def row_cost(row: Row) -> int:
    """Approximate number of simple operations of one evaluation of the row."""
    if row.op in _FREE_ROWS:
        return 0
    spec = OPS.get(row.op)
    return spec.cost if spec is not None else 1


def make_nodes(ctx: LoweringContext, buffers: list[Buffer], empty: Collection[str] = ()) -> list[Node]:
    """The nodes of `buffers`, in order, normalised.

    Buffers in `empty` have no elements at any call, and perhaps no address, so loads of them become the constant 0. No
    result uses that 0.
    """
    out: list[Node] = []
    for buffer in buffers:
        buffer.size = tuple(ctx.canon(s) for s in buffer.size)
        buffer.stride = tuple(ctx.canon(s) for s in buffer.stride)
        for n, loops in enumerate(buffer.loops):
            node = _make_node(ctx, buffer, loops, n)
            if not node.reads.isdisjoint(empty):
                node.rows = [_nothing(r.dtype) if r.op == "load" and r.buffer in empty else r for r in node.rows]
                node.update_reads()
            node.position = len(out)
            out.append(node)
    return out


def _ordered_last(
    domain: list[tuple[Sym, Expr]], store: tuple[Expr, ...]
) -> tuple[list[tuple[Sym, Expr]], int]:  # fmt: skip
    """A scatter's loops, those whose points may write the same element last; and the number of these.

    Different values of a variable that is a store index by itself never write the same element.
    """
    alone = {e.as_symbol() for e in store}
    apart = [d for d in domain if d[0] in alone]
    return [*apart, *(d for d in domain if d[0] not in alone)], len(domain) - len(apart)


def _make_node(ctx: LoweringContext, buffer: Buffer, loops: Loops, n: int) -> Node:
    body: LoopBody = loops.body
    ordered, n_ordered = None, 0
    domain = [(Sym(f"i{k}", LOOP), ctx.canon(size)) for k, size in enumerate(loops.domain)]
    rows = [map_exprs(r, ctx.canon) if row_exprs(r) else r for r in body.rows]
    store = tuple(ctx.canon(e) for e in loops.store_index)
    if isinstance(loops, Scatter):
        domain, n_ordered = _ordered_last(domain, store)
        ordered = Ordered("scatter", loops.combine)
    elif isinstance(loops, Scan):
        ordered, n_ordered = Ordered("scan", loops.kind), 1
    node = Node(
        name=buffer.name if n == 0 else f"{buffer.name}.{n}",
        buffer=buffer,
        domain=domain,
        n_reduced=loops.n_reduced if isinstance(loops, Reduction) else n_ordered,
        kind=loops.kind if isinstance(loops, Reduction) else "",
        rows=rows,
        result=body.result,
        store_index=store,
        identity_store=len(buffer.loops) == 1 and ordered is None,
        ordered=ordered,
    )
    normalise(node)
    node.update_reads()
    return node


def _nothing(dtype: torch.dtype) -> Row:
    """A constant zero of a dtype, spelled as `ops.constant` spells it."""
    kind = float if dtype.is_floating_point else bool if dtype is torch.bool else int
    return Row("const", (), dtype, repr(kind(0)))


def normalise(node: Node) -> None:
    """Drop loops of size 1, simplify divisions, and split variables that appear under `//` and `%`."""
    ones = {v: ZERO for v, size in node.domain if size == ONE}
    if ones:
        kept_before = len(node.kept)
        node.n_reduced -= sum(1 for v, _ in node.domain[kept_before:] if v in ones)
        node.domain = [(v, s) for v, s in node.domain if v not in ones]
        replace_variables(node, ones)
    if node.kind and not node.n_reduced:
        _reduce_one(node)
    for _ in range(8):
        simplify(node)
        split = _find_split(node)
        if split is None:
            return
        split_variable(node, *split)


def _reduce_one(node: Node) -> None:
    """Make a reduction over loops of size 1 alone pointwise: its value, in the accumulator's dtype."""
    row, value = REDUCTIONS[node.kind], node.rows[node.result]
    if value.op == "pair":
        node.result = value.args[1]
    elif value.dtype is not row.accumulate(value.dtype):
        node.rows.append(Row("to_dtype", (node.result,), row.accumulate(value.dtype), value.dtype))
        node.result = len(node.rows) - 1
    elif row.adds and value.dtype.is_floating_point:  # 0.0 + -0.0 is 0.0
        zero = Row("const", (), value.dtype, "0.0")
        node.rows += [zero, Row("add", (len(node.rows), node.result), value.dtype)]
        node.result = len(node.rows) - 1
    node.kind, node.n_reduced = "", 0


def replace_variables(node: Node, mapping: Mapping[Sym, Expr]) -> None:
    """Substitute loop variables in every index of the node."""
    node.rows = [map_exprs(r, lambda e: substitute(e, mapping)) if row_exprs(r) else r for r in node.rows]
    node.store_index = tuple(substitute(e, mapping) for e in node.store_index)


def simplify(node: Node) -> None:
    """Simplify divisions and remainders by the loop bounds."""
    sizes = node.sizes()
    node.rows = [map_exprs(r, lambda e: simplify_divmod(e, sizes)) if row_exprs(r) else r for r in node.rows]
    node.store_index = tuple(simplify_divmod(e, sizes) for e in node.store_index)


def _calls(e: Expr) -> list[Call]:
    out = []
    for a in atoms(e):
        if isinstance(a, Call):
            out.append(a)
            out += _calls(a.args[0])
    return out


def _find_split(node: Node) -> tuple[Sym, Expr] | None:
    """A variable `v` of size `q*d` and the divisor `d`, where some index uses `v // d` or `v % d`; else None."""
    sizes = node.sizes()
    exprs = [e for r in node.rows for e in row_exprs(r)]
    for e in (*exprs, *node.store_index):
        for c in _calls(e):
            if c.fn not in ("floordiv", "mod"):
                continue
            v = c.args[0].as_symbol()
            if v is None or v not in sizes or c.args[1] == ONE:
                continue
            quotient = divide_exactly(sizes[v], c.args[1])
            if quotient is not None and quotient != ONE:
                return v, c.args[1]
    return None


def split_variable(node: Node, v: Sym, inner: Expr) -> None:
    """Replace loop `v` by two loops: `v = hi * inner + lo`."""
    hi, lo = Sym(f"{v.name}h", LOOP), Sym(f"{v.name}l", LOOP)
    size = node.sizes()[v]
    outer = divide_exactly(size, inner)
    assert outer is not None
    at = [s for s, _ in node.domain].index(v)
    if at >= len(node.kept):
        node.n_reduced += 1
    node.domain[at : at + 1] = [(hi, outer), (lo, inner)]
    replace_variables(node, {v: symbol(hi.name, LOOP) * inner + symbol(lo.name, LOOP)})
