"""Indices found by comparisons: binary search in sorted tensors, and masks that consume elements in order."""

from __future__ import annotations

from typing import Any

import torch

from fuser.errors import Unsupported
from fuser.ir.loop_body import Value, compute_dtype, ops
from fuser.ir.nodes import Index, TensorBox
from fuser.ir.sizes import ZERO, Expr
from fuser.lowering.context import LoweringContext
from fuser.lowering.entries import EVERY, ask_elsewhere, lower
from fuser.lowering.indexing import looked_at, place
from fuser.lowering.pointwise import cast_loader, result_dtype
from fuser.lowering.reshape import reshape_box
from fuser.lowering.views import expand_box
from fuser.reasons import because

MOST_STEPS = 20  # each halves the range: lists of up to a million


def searched(
    ctx: LoweringContext, bounds: TensorBox, x: Any, right: bool, sorter: TensorBox | None = None
) -> TensorBox:  # fmt: skip
    """How many of the sorted `bounds` (along their last dim) are below each element of `x`, or equal if `right`.

    The number of steps is a constant of the kernel, which serves all lists up to twice as long. The steps ask the
    elements that eager asks: NaN at the end of a list, or a list that is not sorted, then gives eager's index.
    """
    dtype = bounds.dtype
    if isinstance(x, TensorBox) and x.dtype is not dtype or isinstance(x, float) and not dtype.is_floating_point:
        raise Unsupported(because("dtype", "the values searched for and the sorted ones have different dtypes"))
    if dtype is torch.bool:
        raise Unsupported(because("eager_raises", "searchsorted over bools: eager raises unless it is empty"))
    own, size, wide = ctx.size_of(bounds), ctx.size_of(x), compute_dtype(dtype)
    if len(own) != 1 and len(own) != len(size):
        raise Unsupported(
            because("eager_raises", "searchsorted with leading dims that differ: eager raises")
        )
    n = own[-1]
    steps = ctx.hint(n).bit_length()
    if steps > MOST_STEPS:
        raise Unsupported(f"a search in more than {1 << MOST_STEPS} values")
    ctx.assume("lt", n, 1 << steps)
    ctx.assume("le", (1 << steps) >> 1, n)
    for a, b in zip(own[:-1], size):
        if not ctx.is_equal(a, b):
            raise Unsupported("sorted values whose leading sizes differ from those searched for")
    load, bound = cast_loader(ctx, x, size, dtype), ctx.loader(bounds, own, wide)
    order = ctx.loader(sorter, own, torch.int64) if sorter is not None else None

    def value_at(index: Index, at: Value) -> Value:
        row = index[: len(own) - 1]
        where = ops.indirect(at, n, checked=False)
        return bound((*row, where if order is None else place(order((*row, where)), n, wraps=False)))

    def inner(index: Index) -> Value:
        wanted, found, left = load(index), ops.constant(0, torch.int64), ops.index_expr(n)
        for _ in range(steps):
            half = ops.rshift(left, 1)
            middle = ops.add(found, half)
            other = value_at(index, ops.minimum(middle, ops.sub(ops.index_expr(n), 1)))
            stop = ops.gt(other, wanted) if right else ops.ge(other, wanted)
            above = ops.logical_and(ops.gt(left, 0), ops.logical_not(stop))
            found = ops.where(above, ops.add(middle, 1), found)
            left = ops.where(above, ops.sub(ops.sub(left, half), 1), half)
        return found

    return ctx.pointwise(size, result_dtype(ctx), inner)


@lower("aten.searchsorted", decisive=EVERY)
def lower_searchsorted(
    ctx: LoweringContext, bounds: TensorBox, x: Any, out_int32: Any = False, right: Any = False,
    side: str | None = None, sorter: TensorBox | None = None,
) -> TensorBox:  # fmt: skip
    """The index at which each element can be inserted into a sorted list."""
    return searched(ctx, bounds, x, right is True or side == "right", sorter)


@lower("aten.bucketize", decisive=EVERY)
def lower_bucketize(
    ctx: LoweringContext, x: Any, bounds: TensorBox, out_int32: Any = False, right: Any = False
) -> TensorBox:
    """The bucket between `bounds` that each element belongs to."""
    if len(ctx.size_of(bounds)) != 1:
        raise Unsupported(because("eager_raises", "bucketize with boundaries that are not 1-d: eager raises"))
    return searched(ctx, bounds, x, right is True)


@lower("aten.masked_scatter")
def lower_masked_scatter(ctx: LoweringContext, x: TensorBox, mask: TensorBox, source: TensorBox) -> TensorBox:
    """`x` with the elements where mask holds replaced by those of `source`, in order."""
    if not ctx.arg_metas[2].is_contiguous():
        raise Unsupported("masked_scatter of elements that are not stored in row-major order: eager copies them first")
    size = ctx.broadcast_sizes([ctx.size_of(x), ctx.size_of(mask)])
    wide = expand_box(ctx, mask, size)
    count, given = ctx.numel(wide), ctx.numel(source)
    ctx.assume("lt", 0, given)  # no element can be read from an empty tensor, even under a mask
    load_flat = ctx.loader(reshape_box(ctx, wide, [count]), (count,), torch.bool)
    taken = ctx.scan("sum", (count,), 0, torch.int64, lambda i: ops.to_dtype(load_flat(i), torch.int64))
    holds, load = ctx.loader(wide, size, torch.bool), ctx.loader(x, size, x.dtype)
    number = ctx.loader(taken, (count,), torch.int64)
    new = cast_loader(ctx, reshape_box(ctx, source, [given]), (given,), x.dtype)

    def inner(index: Index) -> Value:
        along: Expr = ZERO
        for i, s in zip(index, size):
            along = along * s + i
        mine = holds(index)
        next_one = ops.where(mine, ops.sub(number((along,)), 1), ops.constant(0, torch.int64))
        at = place(next_one, given)
        return ops.where(mine, looked_at(ctx, source, new((at,)), given, at), load(index))

    return ctx.pointwise(size, x.dtype, inner, ctx.order_of_meta())


ask_elsewhere(lambda: "scans have a generator on the CPU only", "aten.masked_scatter")

__all__ = ["searched"]
