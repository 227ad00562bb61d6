"""Scatters: a copy of the tensor, then a loop that runs in order and so gives the same bits each time.

If nothing else reads the tensor written to, and it was itself made by scatters, they go on in the same memory: a chain
of k scatters costs the scatters, not k copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fuser.errors import Unsupported
from fuser.ir.loop_body import Value, compute_dtype, ops
from fuser.ir.nodes import Index, TensorBox
from fuser.ir.sizes import ZERO, Expr
from fuser.lowering import demands
from fuser.lowering.atomics import Target, target, why_not_atomic
from fuser.lowering.context import LoweringContext, Operand
from fuser.lowering.entries import ask_elsewhere, lower, refuse
from fuser.lowering.indexing import Indexed, index_tensor, place
from fuser.lowering.pointwise import cast_loader, result_dtype
from fuser.lowering.reshape import reshape_box
from fuser.lowering.selection import select
from fuser.lowering.views import unsqueeze_box, wrap_dim
from fuser.ops import REDUCTIONS
from fuser.reasons import because

# Eager's names of reductions, as rows of `ops.REDUCTIONS`.
COMBINE = {"sum": "sum", "add": "sum", "prod": "prod", "multiply": "prod", "amax": "max", "amin": "min"}


def combined(how: str) -> str:
    """The row of `ops.REDUCTIONS` for eager's name of a reduction. Unsupported if there is none."""
    if how not in COMBINE:
        raise Unsupported(f"a scatter that combines by {how!r}")
    return COMBINE[how]


# -- an index of the values' size --------------------------------------------------------------------------------------
class Spread:
    """The loop of scatter(x, dim, index): how it runs over its index and writes into `x`."""

    def __init__(self, ctx: LoweringContext, x: TensorBox, dim: int, index: TensorBox) -> None:
        self.own = ctx.size_of(x)
        self.dim = wrap_dim(dim, len(self.own))
        self.flat = index if index.size else unsqueeze_box(ctx, index_tensor(index), 0)
        self.size = ctx.size_of(index_tensor(self.flat))
        if len(self.size) != len(self.own):
            raise Unsupported("an index with a different number of dims")
        for d, (a, b) in enumerate(zip(self.size, self.own)):
            if d != self.dim:
                ctx.assume("le", a, b)
        self.load = ctx.loader(self.flat, self.size, torch.int64)

    def at(self, index: Index) -> tuple[Expr, ...]:
        """The index of the store for the element at `index`, inside an `inner_fn`."""
        to = place(self.load(index), self.own[self.dim], wraps=False)
        return (*index[: self.dim], to, *index[self.dim + 1 :])

    def source(self, ctx: LoweringContext, src: Operand, dtype: torch.dtype) -> Callable[[Index], Value]:
        """A loader of the values: the first part of a tensor, or a number."""
        if not isinstance(src, TensorBox):
            return cast_loader(ctx, src, self.size, dtype)
        if not src.size:
            src = unsqueeze_box(ctx, src, 0)
        size = ctx.size_of(src)
        if len(size) != len(self.size):
            raise Unsupported("a source with a different number of dims")
        for a, b in zip(self.size, size):
            ctx.assume("le", a, b)
        return cast_loader(ctx, src, size, dtype)


def scattered(
    ctx: LoweringContext, x: TensorBox, dim: int, index: TensorBox, src: Operand, combine: str, fresh: bool = False
) -> TensorBox:  # fmt: skip
    """`src` scattered into `x`; if `fresh`, the old values at the written indices are ignored."""
    if not x.size:  # as a vector of one element
        return reshape_box(ctx, scattered(ctx, unsqueeze_box(ctx, x, 0), dim, index, src, combine, fresh), [])
    how = Spread(ctx, x, dim, index)
    load = how.source(ctx, src, x.dtype)
    out = target(ctx, x, combine)
    if fresh and combine:
        start = REDUCTIONS[combine].identity(x.dtype)
        out.put(how.size, lambda i: (ops.constant(start, x.dtype), how.at(i)), combine=False)
    out.put(how.size, lambda i: (load(i), how.at(i)))
    return out.result()


@lower("aten.scatter")
def lower_scatter(
    ctx: LoweringContext, x: TensorBox, dim: int, index: TensorBox, src: Operand, reduce: str | None = None
) -> TensorBox:  # fmt: skip
    """`src`, or a number, written at `index` along `dim`."""
    return scattered(ctx, x, dim, index, src, combined(reduce) if reduce is not None else "")


@lower("aten.scatter_add")
def lower_scatter_add(ctx: LoweringContext, x: TensorBox, dim: int, index: TensorBox, src: TensorBox) -> TensorBox:
    """`src` added at `index` along `dim`."""
    return scattered(ctx, x, dim, index, src, "sum")


@lower("aten.scatter_reduce")
def lower_scatter_reduce(
    ctx: LoweringContext, x: TensorBox, dim: int, index: TensorBox, src: TensorBox, reduce: str,
    include_self: bool = True,
) -> TensorBox:  # fmt: skip
    """`src` combined with the elements at `index` along `dim`."""
    return scattered(ctx, x, dim, index, src, combined(reduce), not include_self)


# -- an index along one dim --------------------------------------------------------------------------------------------
def along(
    ctx: LoweringContext, x: TensorBox, dim: int, index: TensorBox, value: Callable[[Index], Value], combine: str,
    wraps: bool, size: Sequence[Expr] | None = None, start: float | None = None,
) -> TensorBox:  # fmt: skip
    """`value(i)` for each i of `size` (or of `x` with the index's length in `dim`), at index[i[dim]] along `dim`."""
    demands.is_vector(index)
    own = ctx.size_of(x)
    if not own:
        if size:
            raise Unsupported("a source of some dims for a tensor of none")
        ctx.assume("eq", ctx.numel(index), 1)
        one = unsqueeze_box(ctx, x, 0)
        made = along(ctx, one, 0, index, lambda i: value(()), combine, wraps, None, start)
        return reshape_box(ctx, made, [])
    flat = reshape_box(ctx, index_tensor(index), [ctx.numel(index)])
    count = ctx.numel(flat)
    load = ctx.loader(flat, (count,), torch.int64)
    domain = (*own[:dim], count, *own[dim + 1 :])
    if size is not None:
        if len(size) != len(own) or not all(ctx.is_equal(a, b) for a, b in zip(size, domain)):
            raise Unsupported(f"a source of size {tuple(size)} for places of size {domain}")

    def at(i: Index) -> tuple[Expr, ...]:
        return (*i[:dim], place(load((i[dim],)), own[dim], wraps), *i[dim + 1 :])

    out = target(ctx, x, combine)
    if start is not None:
        out.put(domain, lambda i: (ops.constant(start, x.dtype), at(i)), combine=False)
    out.put(domain, lambda i: (value(i), at(i)))
    return out.result()


@lower("aten.index_add")
def lower_index_add(
    ctx: LoweringContext, x: TensorBox, dim: int, index: TensorBox, source: TensorBox, alpha: Operand = 1
) -> TensorBox:  # fmt: skip
    """alpha * source added at the indices `index` along `dim`."""
    demands.same_dtypes(x, source)
    size, d = ctx.size_of(source), wrap_dim(dim, len(x.size))
    load, factor = cast_loader(ctx, source, size, x.dtype), cast_loader(ctx, alpha, (), x.dtype)
    plain = isinstance(alpha, int) and alpha == 1

    def value(i: Index) -> Value:
        return load(i) if plain else ops.mul(load(i), factor(()))

    return along(ctx, x, d, index, value, "sum", wraps=False, size=size)


@lower("aten.index_copy")
def lower_index_copy(ctx: LoweringContext, x: TensorBox, dim: int, index: TensorBox, source: TensorBox) -> TensorBox:
    """`source` written at the indices `index` along `dim`."""
    demands.same_dtypes(x, source)
    size = ctx.size_of(source)
    load = cast_loader(ctx, source, size, x.dtype)
    return along(ctx, x, wrap_dim(dim, len(x.size)), index, load, "", wraps=False, size=size)


@lower("aten.index_reduce")
def lower_index_reduce(
    ctx: LoweringContext, x: TensorBox, dim: int, index: TensorBox, source: TensorBox, reduce: str,
    include_self: bool = True,
) -> TensorBox:  # fmt: skip
    """`source` combined with the elements at the indices `index` along `dim`."""
    demands.same_dtypes(x, source)
    size, how = ctx.size_of(source), combined(reduce)
    load = cast_loader(ctx, source, size, x.dtype)
    start = None if include_self else REDUCTIONS[how].identity(x.dtype)
    return along(ctx, x, wrap_dim(dim, len(x.size)), index, load, how, wraps=False, size=size, start=start)


@lower("aten.index_fill")
def lower_index_fill(ctx: LoweringContext, x: TensorBox, dim: int, index: TensorBox, value: Operand) -> TensorBox:
    """A number written at the indices `index` along `dim`."""
    fill = cast_loader(ctx, value, (), x.dtype)
    return along(ctx, x, wrap_dim(dim, len(x.size)), index, lambda i: fill(()), "", wraps=True)


# -- x[i, :, j, …] = values --------------------------------------------------------------------------------------------
@lower("aten.index_put", "aten._unsafe_index_put")
def lower_index_put(
    ctx: LoweringContext, x: TensorBox, indices: Sequence[Any], values: TensorBox, accumulate: Any = False
) -> TensorBox:
    """`values` written at x[indices], or added there. A single mask makes it a selection."""
    demands.same_dtypes(x, values)
    mask = indices[0] if len(indices) == 1 else None
    if isinstance(mask, TensorBox) and mask.dtype is torch.bool and len(mask.size) <= len(x.size):
        return _put_where(ctx, x, mask, values, accumulate)
    how = Indexed(ctx, x, indices)
    load = cast_loader(ctx, values, how.size, x.dtype)
    ctx.broadcast_sizes([how.size, ctx.size_of(values)])
    out = target(ctx, x, "sum" if accumulate else "")
    out.put(how.size, lambda i: (load(i), how.at(i)))
    return out.result()


def _put_where(
    ctx: LoweringContext, x: TensorBox, mask: TensorBox, values: TensorBox, accumulate: Any
) -> TensorBox:  # fmt: skip
    """`values` where the mask holds: equal for all elements of the mask, so a selection without counting."""
    size, dims, given = ctx.size_of(x), len(mask.size), ctx.size_of(values)
    rest = size[dims:]
    row = given[max(len(given) - len(rest), 0) :]
    before = given[: len(given) - len(row)]
    if not all(ctx.is_equal(s, 1) for s in before):
        raise Unsupported(because("data_size", "which value goes to which masked element depends on data"))
    if len(before) > 1 and (accumulate or rest):
        raise Unsupported("values of more dims than what the mask takes")
    for a, b in zip(ctx.size_of(mask), size):
        if not ctx.is_equal(a, b):
            raise Unsupported("a mask that does not have the size of the indexed dims")
    if not all(ctx.is_equal(s, 1) or ctx.is_equal(s, n) for s, n in zip(reversed(row), reversed(rest))):
        raise Unsupported(because("eager_raises", "values that do not broadcast to the masked elements: eager raises"))
    for _ in rest:
        mask = unsqueeze_box(ctx, mask, len(mask.size))
    first = (ZERO,) * len(before)
    box = TensorBox(values.storage, values.view).viewed(row, lambda i: (*first, *i))
    if not accumulate:
        return select(ctx, mask, box, x)
    holds, load = ctx.loader(mask, size, torch.bool), ctx.loader(x, size, compute_dtype(x.dtype))
    more = cast_loader(ctx, box, size, x.dtype)
    add = "logical_or" if x.dtype is torch.bool else "add"
    return ctx.pointwise(
        size, x.dtype, lambda i: ops.where(holds(i), ops.call(add, load(i), more(i)), load(i)), ctx.order_of_meta()
    )  # fmt: skip


@lower("aten.put")
def lower_put(
    ctx: LoweringContext, x: TensorBox, index: TensorBox, source: TensorBox, accumulate: Any = False
) -> TensorBox:
    """`source` written at these element numbers of `x`, in row-major order."""
    demands.same_dtypes(x, source)
    count, size = ctx.numel(x), ctx.size_of(index_tensor(index, (torch.int64,)))
    flat = reshape_box(ctx, x, [count])
    load = cast_loader(ctx, reshape_box(ctx, source, size), size, x.dtype)
    where = ctx.loader(index, size, torch.int64)
    out = Target(ctx, [count], x.dtype, ctx.loader(flat, [count], x.dtype), "sum" if accumulate else "")
    out.put(size, lambda i: (load(i), (place(where(i), count),)))
    return reshape_box(ctx, out.result(), ctx.size_of(x))


@lower("aten.embedding_dense_backward")
def lower_embedding_backward(
    ctx: LoweringContext, grad: TensorBox, indices: TensorBox, rows: int | Expr, padding_idx: int | Expr,
    scale_grad_by_freq: Any,
) -> TensorBox:  # fmt: skip
    """grad[i] added to row indices[i] of zeros, except for the row `padding_idx`."""
    if scale_grad_by_freq is not False:
        raise Unsupported("an embedding's gradient scaled by frequency")
    n, count, own = len(indices.size), ctx.canon(rows), ctx.size_of(grad)
    load = ctx.loader(grad, own, grad.dtype)
    where = ctx.loader(index_tensor(indices), own[:n], torch.int64)
    padding, size = ctx.specialise(padding_idx), (count, own[-1])
    out = Target(ctx, size, result_dtype(ctx), lambda i: ops.constant(0, grad.dtype), "sum")

    def put(i: Index) -> tuple[Value, Sequence[Expr]]:
        row, value = where(i[:n]), load(i)
        if padding >= 0:
            value = ops.where(ops.eq(row, padding), ops.constant(0, grad.dtype), value)
        return value, (place(row, count, wraps=False), i[-1])

    out.put(own, put)
    return out.result()


ask_elsewhere(
    why_not_atomic, "aten.scatter", "aten.scatter_add", "aten.scatter_reduce", "aten.index_add", "aten.index_copy",
    "aten.index_reduce", "aten.index_fill", "aten.index_put", "aten._unsafe_index_put", "aten.put",
    "aten.embedding_dense_backward",
)  # fmt: skip
refuse(
    because("writes", "it adds up overlapping windows: left to ATen"),
    "aten.unfold_backward",
    "aten.col2im",
    "aten.as_strided_scatter",
)

__all__ = ["along", "scattered"]
