"""Along which axes of memory a kernel's loops read and store.

On a target whose tiles have two dims, operands along rows and along columns are both read in runs. What decides where a
reduction meets them: results stored across its rows, operands read along two axes, and rows that are few and long.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import field

import torch

from fuser.ir.loop_body import loads_in
from fuser.ir.sizes import ONE, ZERO, Expr, Sym, coefficient, expr, floordiv, minimum, product, substitute, symbols
from fuser.lazy_dataclasses import dataclass
from fuser.lowering.context import LoweringContext
from fuser.scheduler.align import Axes, Matching
from fuser.scheduler.nodes import Node

SEVERAL = 16  # times as many columns count as few if several tensors are read


@dataclass(frozen=True)
class Memory:
    """How buffers and inputs are stored, by name; `outputs` are stored in any case."""

    strides: Mapping[str, tuple[Expr, ...]]
    dtypes: Mapping[str, torch.dtype]
    outputs: Collection[str] = ()


@dataclass(eq=False)
class Kernel:
    """Nodes that share one loop nest. `order` is the kernel's position in the sequence of launches."""

    order: int
    axes: Axes = field(default_factory=Axes)
    reduced: set[Sym] = field(default_factory=set)
    nodes: list[Node] = field(default_factory=list)
    maps: dict[str, dict[Sym, Expr]] = field(default_factory=dict)  # node name -> variable -> expression over axes
    produced: dict[str, Node] = field(default_factory=dict)
    reads: set[str] = field(default_factory=set)
    after: set[str] = field(default_factory=set)  # buffers that need this kernel's reductions to be complete
    n_rows: int = 0  # rows, where a costly function counts as several; see `Node.size_of_code`

    def copy(self) -> Kernel:
        """A copy that more nodes may join; the nodes themselves are shared."""
        maps = {name: dict(mapping) for name, mapping in self.maps.items()}
        return Kernel(
            self.order, self.axes.copy(), set(self.reduced), [*self.nodes], maps, dict(self.produced), set(self.reads),
            set(self.after), self.n_rows,
        )  # fmt: skip


# Elements of a reduced row, and of the whole nest, beyond which scattered stores cost more than a launch. On an H200,
# layer norms of transposed bfloat16 tensors with a kernel for the stores, and without: 64x196 rows of 768 0.028 and
# 0.054 ms, 16x1024 rows of 384 0.016 and 0.038, 64x784 rows of 192 0.024 and 0.037; of stores alone, 8x4096 rows of 320
# 0.018 and 0.019, 64x784 rows of 192 0.017 and 0.014, 64x3136 rows of 96 0.039 and 0.026.
_TURNED_ROW, _TURNED = 256, 1 << 20
RUN = 16  # contiguous elements from which contiguity matters


def turns(ctx: LoweringContext, kernel: Kernel, node: Node, matching: Matching, memory: Memory) -> bool:
    """Whether `node` is stored along another axis than those along which the kernel's reductions read.

    A loop that reads rows would store single elements, far apart; a separate kernel transposes tiles.
    """
    name = node.buffer.name
    known = name in memory.outputs or (name in memory.strides and node.reads & kernel.after)
    if node.is_reduction or not known:
        return False
    axes = matching.axes
    n = {a: ctx.hint(axes.size[a]) for a in axes.order}
    if not _has_long_rows(split_set(kernel.reduced, matching), n):
        return False
    own = {v: matching.expression(v) for v, _ in node.domain}
    stored = _runs_along(ctx, _address(node.store_index, memory.strides[name], own), n)
    if stored is None:
        return False
    return bool(_read_along(ctx, kernel, matching, memory, n) - {None, stored})


def _has_long_rows(reduced: Collection[Sym], n: Mapping[Sym, int]) -> bool:
    return math.prod(n[a] for a in reduced) > _TURNED_ROW and math.prod(n.values()) >= _TURNED


def stores_across(ctx: LoweringContext, kernel: Kernel, node: Node, matching: Matching, memory: Memory) -> bool:
    """Whether `node` reduces rows of what the kernel reads, and an output of the kernel is contiguous across rows."""
    n = {a: ctx.hint(matching.axes.size[a]) for a in matching.axes.order}
    reduced = {matching.variables[p][0] for v, _ in node.reduced for p in matching.variable_digits(v)}
    read = _read_along(ctx, kernel, matching, memory, n) - {None}
    if not read or not read <= reduced or not _has_long_rows(reduced, n):
        return False
    splits = matching.axis_splits
    for other in kernel.nodes:
        if other.buffer.name in memory.outputs and not other.is_reduction:
            places = {v: substitute(e, splits) for v, e in kernel.maps[other.name].items()}
            stored = _runs_along(ctx, _address(other.store_index, memory.strides[other.buffer.name], places), n)
            if stored is not None and stored not in reduced:
                return True
    return False


def mixes(ctx: LoweringContext, kernel: Kernel, matching: Matching, memory: Memory) -> bool:
    """Whether a kernel reads large operands along different axes, as the sum of a matrix and a transposed one does.

    With tiles of two dims it does so as fast as memory allows. A reduction of what it stores reads rows again, which
    costs less than a reduction of such tiles: 0.027 ms in place of 0.080 for a layer norm of 64x196 rows of 768.
    """
    n = {a: ctx.hint(matching.axes.size[a]) for a in matching.axes.order}
    return math.prod(n.values()) >= _TURNED and len(_read_along(ctx, kernel, matching, memory, n) - {None}) > 1


def _read_along(
    ctx: LoweringContext, kernel: Kernel, matching: Matching, memory: Memory, n: Mapping[Sym, int]
) -> set[Sym | None]:  # fmt: skip
    """The axes along which a kernel's large operands are contiguous; None is there for those that are not."""
    read = set()
    for _, name, address in _loads(kernel, memory, matching.axis_splits):
        if name not in kernel.produced and _is_large(address, n):
            read.add(_runs_along(ctx, address, n))
    return read


def _loads(kernel: Kernel, memory: Memory, splits: Mapping[Sym, Expr]) -> Iterator[tuple[Node, str, Expr]]:
    """Each load of a kernel: its node, the tensor, and the address in the kernel's axes, which `splits` cuts."""
    for node in kernel.nodes:
        for name, address in _loads_of(kernel, node, memory, splits):
            yield node, name, address


def _loads_of(
    kernel: Kernel, node: Node, memory: Memory, splits: Mapping[Sym, Expr]
) -> Iterator[tuple[str, Expr]]:  # fmt: skip
    own = kernel.maps[node.name]
    places = {v: substitute(e, splits) for v, e in own.items()} if splits else own
    for row in node.rows:
        if row.op == "load" and row.buffer in memory.strides:
            yield row.buffer, _address(row.indices, memory.strides[row.buffer], places)


def _address(index: tuple[Expr, ...], stride: tuple[Expr, ...], places: Mapping[Sym, Expr]) -> Expr:
    return sum((substitute(i, places) * s for i, s in zip(index, stride)), ZERO)


def _runs_along(ctx: LoweringContext, address: Expr, n: Mapping[Sym, int]) -> Sym | None:
    """The axis along which an address is contiguous, if at least RUN elements are, with axes that continue it."""
    steps = {a: ctx.hint(c) for a in n if (c := coefficient(address, a)) is not None and c != ZERO}
    first = next((a for a, step in steps.items() if step == 1 and n[a] > 1), None)
    run, last = 1, first
    while last is not None and run < RUN:
        run *= n[last]
        last = next((a for a, step in steps.items() if step == run and n[a] > 1), None)
    return first if run >= RUN else None


def split_set(axes: set[Sym], matching: Matching) -> set[Sym]:
    """The axes that a matching cut these axes into."""
    out: set[Sym] = set()
    for a in axes:
        out.update(matching.axis_digits(expr(a)) or [])
    return out


def few_long_rows(ctx: LoweringContext, kernel: Kernel, node: Node, matching: Matching, memory: Memory) -> bool:
    """Whether a kernel's rows are few and long, if `node` joins. Sizes with another answer get another kernel."""
    size, target, few = kernel.axes.size, ctx.target, ctx.target.few_rows
    row = product(size[a] for a in kernel.axes.order if a in kernel.reduced)
    rows = product(size[a] for a in kernel.axes.order if a not in kernel.reduced)
    columns, itemsize = _columns(kernel, memory) if target.columns(1) else (None, 1)
    if target.columns(1) and target.square_tiles and columns in (None, *kernel.reduced):
        columns, itemsize = _crossed(ctx, kernel, node, matching, memory) or (columns, itemsize)
    if columns is None or columns in kernel.reduced:
        if ctx.is_less(row, target.long_row):
            return False
        at_once = minimum(rows, target.rows_at_once) if target.rows_at_once else ZERO
        return not ctx.is_less(at_once * row, target.cached + 1) or ctx.is_less(rows, few)
    block, several = target.columns(itemsize), target.long_column and _reads_several(kernel, memory)
    if ctx.is_less(*((row, target.long_column) if several else (row * minimum(size[columns], block), target.long_row))):
        return False
    others = product(size[a] for a in kernel.axes.order if a not in kernel.reduced and a != columns)
    if several:
        few *= SEVERAL
    elif target.column_bytes:
        few *= 2 if ctx.is_less(rows * row, target.cached + 1) else 4
    return ctx.is_less(others * floordiv(size[columns] + (block - 1), expr(block)), few)


def _reads_several(kernel: Kernel, memory: Memory) -> bool:
    """Whether a kernel's loops read several tensors along the reduced axes and another axis."""
    kept = set(kernel.axes.order) - kernel.reduced
    read = ((name, symbols(address)) for _, name, address in _loads(kernel, memory, {}))
    return len({name for name, own in read if own & kernel.reduced and own & kept} - set(kernel.produced)) > 1


def _crossed(
    ctx: LoweringContext, kernel: Kernel, node: Node, matching: Matching, memory: Memory
) -> tuple[Sym, int] | None:  # fmt: skip
    """The kept axis along which a large operand of a kernel with `node` is contiguous, and its bytes per element.

    A plan of square tiles then runs along it, even if what is reduced lies along a reduced axis.
    """
    if matching.axis_splits:
        return None
    n = {a: ctx.hint(kernel.axes.size[a]) for a in kernel.axes.order}
    own = {v: matching.expression(v) for v, _ in node.domain}
    joining = [(r.buffer, _address(r.indices, memory.strides[r.buffer], own))
               for r in loads_in(node.rows) if r.buffer in memory.strides]  # fmt: skip
    for name, address in (*((name, e) for _, name, e in _loads(kernel, memory, {})), *joining):
        along = _runs_along(ctx, address, n) if name not in kernel.produced else None
        if along is not None and along not in kernel.reduced and _is_large(address, n):
            return along, memory.dtypes[name].itemsize
    return None


def _is_large(address: Expr, n: Mapping[Sym, int]) -> bool:
    """Whether an operand has at least an eighth of the nest's elements."""
    return 8 * math.prod(size for a, size in n.items() if a in symbols(address)) >= math.prod(n.values())


def _columns(kernel: Kernel, memory: Memory) -> tuple[Sym | None, int]:
    """The kept axis along which the first reduced tensor is contiguous, if any, and the tensor's bytes per element.

    Of a value that the kernel computes it is the axis of all tensors that the value is read from, if it is one.
    """

    def reduced(loads: Iterable[tuple[str, Expr]]) -> list[tuple[str, Sym | None]]:
        found = [(n, e) for n, e in loads if any(coefficient(e, a) != ZERO for a in kernel.reduced)]
        return [(n, next((a for a in kernel.axes.order if coefficient(e, a) == ONE), None)) for n, e in found]

    for node in kernel.nodes:
        if node.is_reduction:
            found = reduced(_from_memory(kernel, node, memory))
            if len({along for _, along in found}) != 1:
                found = reduced(_loads_of(kernel, node, memory, {}))
            if found:
                name, along = found[0]
                return along, memory.dtypes[name].itemsize
    return None, 1


def _from_memory(kernel: Kernel, node: Node, memory: Memory) -> Iterator[tuple[str, Expr]]:
    """The tensors that a node reads, and their addresses; of values that the kernel computes, what these are read from.

    The strides of such a value say nothing about memory: a row-major copy of channels-last images is no copy there.
    """
    for name, address in _loads_of(kernel, node, memory, {}):
        maker = kernel.produced.get(name)
        if maker is None or maker is node:
            yield name, address
        elif not maker.is_reduction:
            yield from _from_memory(kernel, maker, memory)


__all__ = ["Kernel", "Memory", "few_long_rows", "mixes", "split_set", "stores_across", "turns"]
