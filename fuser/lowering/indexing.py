"""Gathers. An index out of range is reported by the kernel; eager then runs and raises its own error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fuser.errors import Unsupported
from fuser.ir.loop_body import Value, ops
from fuser.ir.nodes import Index, TensorBox
from fuser.ir.sizes import ONE, ZERO, Expr
from fuser.lowering import demands
from fuser.lowering.context import LoweringContext, Operand
from fuser.lowering.entries import lower
from fuser.lowering.pointwise import cast_loader, result_dtype
from fuser.lowering.reshape import reshape_box
from fuser.lowering.views import unsqueeze_box, wrap_dim
from fuser.reasons import because

Load = Callable[[Index], Value]


def place(value: Value, size: Expr, wraps: bool = True, checked: bool = True) -> Expr:
    """`value` as an index into a dim of `size`. Below 0 it counts from the end, or is out of range if not `wraps`."""
    value = ops.to_dtype(value, torch.int64)
    if not wraps:
        value = ops.where(ops.lt(value, 0), ops.index_expr(size), value)
    return ops.indirect(value, size, checked)


def index_tensor(index: Any, dtypes: Sequence[torch.dtype] = (torch.int64, torch.int32)) -> TensorBox:
    """`index`, if it is a tensor of indices. Unsupported for a mask, whose number of elements depends on data."""
    if not isinstance(index, TensorBox):
        raise Unsupported(f"an index of type {type(index).__name__}")
    if index.dtype in (torch.bool, torch.uint8):
        raise Unsupported(because("data_size", "an index by a mask: the size of its result depends on data"))
    if index.dtype not in dtypes:
        raise Unsupported(because("dtype", f"an index of dtype {index.dtype}"))
    return index


def looked_at(ctx: LoweringContext, x: TensorBox, value: Value, size: Expr, at: Expr) -> Value:
    """`value`, read at index `at` of a dim of `size` of `x`, made to depend on `at` so that its bounds check is kept.

    The address depends on `at` in an input without strides of 0. A computed tensor may be inlined, as any expression.
    """
    buffer = x.storage.buffer
    if buffer.input_number >= 0 and ctx.hint(size) > 1 and all(ctx.hint(s) > 0 for s in buffer.stride):
        return value
    return ops.where(ops.lt(ops.index_expr(at), ops.index_expr(size)), value, ops.constant(0, x.dtype))


def selected(
    ctx: LoweringContext, x: TensorBox, size: Sequence[Expr], dim: int, place_at: Callable[[Index], Expr],
    at: Callable[[Index], Index],
) -> TensorBox:  # fmt: skip
    """A tensor of `size`: `x` at the index at(index) with place_at(index) in `dim`."""
    along = ctx.size_of(x)[dim]
    ctx.assume("lt", 0, along)  # eager refuses any index into an empty dim
    load = ctx.loader(x, ctx.size_of(x), x.dtype)

    def inner(index: Index) -> Value:
        own = list(at(index))
        own[dim] = place_at(index)
        return looked_at(ctx, x, load(tuple(own)), along, own[dim])

    return ctx.pointwise(size, x.dtype, inner, ctx.order_of_meta())


@lower("aten.embedding")
def lower_embedding(
    ctx: LoweringContext, weight: TensorBox, indices: TensorBox, padding_idx: Any = -1, scale: Any = False,
    sparse: Any = False,
) -> TensorBox:  # fmt: skip
    """Row indices[i] of `weight` for each i."""
    rows, width = ctx.size_of(weight)
    own = ctx.size_of(index_tensor(indices))
    where, n = ctx.loader(indices, own, torch.int64), len(own)
    return selected(
        ctx, weight, (*own, width), 0, lambda index: place(where(index[:n]), rows, wraps=False),
        lambda index: (ZERO, index[-1]),
    )  # fmt: skip


@lower("aten.index_select")
def lower_index_select(ctx: LoweringContext, x: TensorBox, dim: int, index: TensorBox) -> TensorBox:
    """The elements at `index` along `dim`, in that order."""
    own = ctx.size_of(x)
    scalar = not own
    if scalar:
        x, own = unsqueeze_box(ctx, x, 0), (ONE,)
    d = wrap_dim(dim, len(own))
    demands.is_vector(index)
    flat = reshape_box(ctx, index_tensor(index), [ctx.numel(index)])
    count = ctx.numel(flat)
    where = ctx.loader(flat, (count,), torch.int64)
    if scalar:
        ctx.assume("eq", count, 1)
    size = () if scalar else (*own[:d], count, *own[d + 1 :])

    def at(index: Index) -> Index:
        return (ZERO,) if scalar else index

    return selected(ctx, x, size, d, lambda index: place(where((at(index)[d],)), own[d], wraps=False), at)


def _of_nothing(ctx: LoweringContext, index: Any, dtype: torch.dtype) -> TensorBox | None:
    """The result for an index without elements, for any dtype of the index and any source; None for other indices."""
    if not isinstance(index, TensorBox):
        return None
    empty = next((s for s in ctx.size_of(index) if ctx.hint(s) == 0), None)
    if empty is None:
        return None
    ctx.is_equal(empty, ZERO)
    return ctx.pointwise(ctx.size_of(index), dtype, lambda i: ops.constant(0, dtype), ctx.order_of_meta())


@lower("aten.gather")
def lower_gather(
    ctx: LoweringContext, x: TensorBox, dim: int, index: TensorBox, sparse_grad: Any = False
) -> TensorBox:  # fmt: skip
    """`x` at each index of `index`, with index[i] along `dim`."""
    nothing = _of_nothing(ctx, index, x.dtype)
    return nothing if nothing is not None else _gathered(ctx, x, wrap_dim(dim, len(x.size)), index_tensor(index))


def _gathered(ctx: LoweringContext, x: TensorBox, dim: int, index: TensorBox) -> TensorBox:
    size = ctx.size_of(index)
    x = x if x.size else unsqueeze_box(ctx, x, 0)
    flat = index if index.size else unsqueeze_box(ctx, index, 0)
    own, wide = ctx.size_of(x), ctx.size_of(flat)
    for d, (a, b) in enumerate(zip(wide, own)):
        if d != dim:
            ctx.assume("le", a, b)
    where = ctx.loader(index, size, torch.int64)

    def at(i: Index) -> Index:
        return i if size else (ZERO,)

    return selected(ctx, x, size, dim, lambda i: place(where(i), own[dim], wraps=False), at)


@lower("aten.take")
def lower_take(ctx: LoweringContext, x: TensorBox, index: TensorBox) -> TensorBox:
    """The elements of `x` at these positions in row-major order."""
    nothing = _of_nothing(ctx, index, x.dtype)
    if nothing is not None:
        return nothing
    count = ctx.numel(x)
    flat = reshape_box(ctx, x, [count])
    size = ctx.size_of(index_tensor(index, (torch.int64,)))
    where = ctx.loader(index, size, torch.int64)
    return selected(ctx, flat, size, 0, lambda i: place(where(i), count), lambda i: (ZERO,))


@lower("aten.take_along_dim")
def lower_take_along_dim(
    ctx: LoweringContext, x: TensorBox, index: TensorBox, dim: int | None = None
) -> TensorBox:  # fmt: skip
    """`gather`, after both are expanded to a common size outside of `dim`; over all elements if `dim` is None.

    Along a dim, eager takes indices modulo its size.
    """
    if dim is None:
        x, index = reshape_box(ctx, x, [ctx.numel(x)]), reshape_box(ctx, index_tensor(index), [ctx.numel(index)])
        return _gathered(ctx, x, 0, index)
    d = wrap_dim(dim, len(x.size))
    own, wide = list(ctx.size_of(x)), list(ctx.size_of(index_tensor(index)))
    common = ctx.broadcast_sizes([tuple(ONE if k == d else s for k, s in enumerate(size)) for size in (own, wide)])
    size = (*common[:d], ctx.canon(wide[d]), *common[d + 1 :])
    ctx.assume("lt", 0, own[d])
    where = ctx.loader(index, size, torch.int64)
    load = ctx.loader(x, (*common[:d], ctx.canon(own[d]), *common[d + 1 :]), x.dtype)

    def inner(i: Index) -> Value:
        at = ops.remainder(where(i), ops.index_expr(own[d]))
        return load((*i[:d], place(at, own[d], checked=False), *i[d + 1 :]))

    return ctx.pointwise(size, x.dtype, inner, ctx.order_of_meta())


# -- x[i, :, j, …] -----------------------------------------------------------------------------------------------------
class Indexed:
    """How `x[indices]` reads `x`: the result's size, and the index into `x` of each of its elements."""

    def __init__(self, ctx: LoweringContext, x: TensorBox, indices: Sequence[Any], clamps: bool = False) -> None:
        own = ctx.size_of(x)
        if len(indices) > len(own):
            raise Unsupported(f"{len(indices)} indices for {len(own)} dims")
        self.own, self.clamps = own, clamps
        self.dims = [d for d, i in enumerate(indices) if i is not None]
        tensors = [index_tensor(indices[d]) for d in self.dims]
        self.common = ctx.broadcast_sizes([ctx.size_of(t) for t in tensors])
        self.loads = [ctx.loader(t, self.common, torch.int64) for t in tensors]
        for d in self.dims:
            ctx.assume("lt", 0, own[d])  # eager refuses any index into an empty dim
        adjacent = self.dims == list(range(self.dims[0], self.dims[-1] + 1))
        self.first = self.dims[0] if adjacent else 0
        self.rest = [d for d in range(len(own)) if d not in self.dims]
        kept = [own[d] for d in self.rest]
        self.size = (*kept[: self.first], *self.common, *kept[self.first :])

    def at(self, index: Index) -> Index:
        """The index into the tensor, inside an `inner_fn`."""
        n = len(self.common)
        among = index[self.first : self.first + n]
        full: list[Expr] = [ZERO] * len(self.own)
        for d, i in zip(self.rest, (*index[: self.first], *index[self.first + n :])):
            full[d] = i
        for d, load in zip(self.dims, self.loads):
            full[d] = self._along(load(among), self.own[d])
        return tuple(full)


    def _along(self, value: Value, size: Expr) -> Expr:
        if self.clamps:  # clamp an index that is out of range
            last = ops.index_expr(size - 1)
            value = ops.maximum(ops.minimum(value, last), ops.index_expr(-size))
        return place(value, size, checked=not self.clamps)


@lower("aten.index", "aten._unsafe_index")
def lower_index(ctx: LoweringContext, x: TensorBox, indices: Sequence[Any]) -> TensorBox:
    """x[indices], where None selects a whole dim and index tensors are broadcast together."""
    how = Indexed(ctx, x, indices)
    load = ctx.loader(x, ctx.size_of(x), x.dtype)

    def inner(index: Index) -> Value:
        at = how.at(index)
        value = load(at)
        for d in how.dims:
            value = looked_at(ctx, x, value, how.own[d], at[d])
        return value

    out = ctx.pointwise(how.size, x.dtype, inner, ctx.order_of_meta())
    if any(isinstance(i, TensorBox) and not i.size for i in indices):
        ctx.perhaps_views.add(out.storage.buffer.name)
    return out


@lower("aten._unsafe_masked_index")
def lower_masked_index(
    ctx: LoweringContext, x: TensorBox, mask: TensorBox, indices: Sequence[Any], fill: Operand
) -> TensorBox:
    """x[indices], with clamped indices, where `mask` holds, else `fill`."""
    how = Indexed(ctx, x, indices, clamps=True)
    size = ctx.broadcast_sizes([how.size, ctx.size_of(mask)])
    load, holds = ctx.loader(x, ctx.size_of(x), x.dtype), ctx.loader(mask, size, torch.bool)
    other = cast_loader(ctx, fill, size, x.dtype)

    ahead = len(size) - len(how.size)
    kept = [d if ctx.is_equal(how.size[d], size[ahead + d]) else None for d in range(len(how.size))]

    def inner(index: Index) -> Value:
        own = tuple(ZERO if d is None else index[ahead + d] for d in kept)
        return ops.masked(holds(index), lambda: load(how.at(own)), other(index))

    return ctx.pointwise(size, x.dtype, inner, ctx.order_of_meta())


@lower("aten.one_hot")
def lower_one_hot(ctx: LoweringContext, x: TensorBox, num_classes: int | Expr = -1) -> TensorBox:
    """1 at each element's class along a new last dim, else 0."""
    classes = ctx.canon(num_classes)
    if ctx.hint(classes) < 0:
        raise Unsupported(because("data_size", "a one_hot without a number of classes: its size depends on data"))
    ctx.assume("lt", 0, classes)
    size = ctx.size_of(x)
    load = ctx.loader(x, size, torch.int64)

    def inner(index: Index) -> Value:
        hot = place(load(index[:-1]), classes, wraps=False)
        return ops.to_dtype(ops.eq(ops.index_expr(index[-1]), ops.index_expr(hot)), torch.int64)

    return ctx.pointwise((*size, classes), result_dtype(ctx), inner)  # eager scatters into a row-major tensor


__all__ = ["Indexed", "index_tensor", "looked_at", "place", "selected"]
