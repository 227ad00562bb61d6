"""Gradients of pools: each element gathers from the few windows that contain it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fuser.errors import Unsupported
from fuser.ir.loop_body import Value, compute_dtype, ops
from fuser.ir.nodes import Index, TensorBox
from fuser.ir.sizes import ZERO, Expr, floordiv, mod
from fuser.lowering.context import LoweringContext
from fuser.lowering.entries import EVERY, lower, refuse_in_order
from fuser.lowering.pointwise import result_dtype
from fuser.lowering.pooling import (
    Sliding,
    n_dims,
    number_in_int8,
    offset_number,
    places,
    same_places,
    sliding,
    window_number,
)
from fuser.reasons import because


def _windows(
    ctx: LoweringContext, w: Sliding, at: Sequence[Expr]
) -> Iterator[tuple[tuple[Expr, ...], tuple[Expr, ...], Value]]:
    """The windows that may contain the element `at`, its index within each, and the condition that it is contained."""
    candidates = [list(_along(ctx, w, d, a)) for d, a in enumerate(at)]
    for chosen in itertools.product(*candidates):
        inside: Value | None = None
        for _, _, conditions in chosen:
            for condition in conditions:
                own = condition()
                inside = own if inside is None else ops.logical_and(inside, own)
        assert inside is not None
        yield tuple(c[0] for c in chosen), tuple(c[1] for c in chosen), inside


Candidate = tuple[Expr, Expr, list[Callable[[], Value]]]


def _along(ctx: LoweringContext, w: Sliding, d: int, at: Expr) -> Iterator[Candidate]:
    """Along dim `d`: windows that may contain `at`, its index within each, and the conditions that it is contained."""
    kernel, stride, gap = w.kernel[d], ctx.canon(w.stride[d]), w.dilation[d]
    moved = at + w.padding[d]
    for step in range(-(-kernel // w.stride[d]) if gap == 1 else kernel):
        if gap == 1:  # `step` windows before the last one that begins at or before it
            window, place = floordiv(moved, stride) - step, mod(moved, stride) + step * w.stride[d]
        else:  # the window in which its index is `step`
            window, place = floordiv(moved - step * gap, stride), ctx.canon(step)
        conditions = [_holds(ops.lt, window, w.count[d])]
        if step:
            conditions.append(_holds(ops.ge, window, ZERO))
        if gap > 1 and w.stride[d] > 1:
            conditions.append(_holds(ops.eq, window * w.stride[d], moved - step * gap))
        if gap == 1 and (step + 1) * w.stride[d] > kernel:
            conditions.append(_holds(ops.lt, place, ctx.canon(kernel)))
        yield window, place, conditions


def _holds(compare: Callable[[Any, Any], Value], a: Expr, b: Expr) -> Callable[[], Value]:
    return lambda: compare(ops.index_expr(a), ops.index_expr(b))


# A function of (an element's index, a window, the element's index in it, whether it is contained).
Taken = Callable[[Index, Sequence[Expr], Sequence[Expr], Value], Value]


def _gathered(
    ctx: LoweringContext, size: Sequence[Expr], w: Sliding, taken: Taken, divisor: int | None = None
) -> TensorBox:  # fmt: skip
    """For each element of a tensor of these sizes, the sum of `taken` over the windows that may contain it.

    It is divided by `divisor`, if there is one.
    """
    n, dtype = len(w.kernel), result_dtype(ctx)

    def inner(index: Index) -> Value:
        total: Value | None = None
        for here, place, inside in _windows(ctx, w, index[-n:]):
            value = taken(index, here, place, inside)
            total = value if total is None else ops.add(total, value)
        assert total is not None
        return total if divisor is None else ops.div(total, divisor)

    return ctx.pointwise(tuple(size), dtype, inner, ctx.order_of_meta())


@lower("aten.avg_pool2d_backward", "aten.avg_pool3d_backward", "fuser.avg_pool2d_backward")
def lower_avg_pool_backward(
    ctx: LoweringContext, grad: TensorBox, x: TensorBox, kernel: Sequence[int], stride: Any, padding: Any, ceil: Any,
    include_pad: Any, divisor: int | None,
) -> TensorBox:  # fmt: skip
    """Each window's gradient divided by the number of its elements, summed."""
    n, wide = n_dims(ctx), compute_dtype(result_dtype(ctx))
    w = sliding(ctx, ctx.size_of(x), n, kernel, stride, padding, 1, ceil, backward=True)
    load = ctx.loader(grad, ctx.size_of(grad), wide)
    same = same_places(w, bool(include_pad), divisor)

    def of_window(index: Index, here: Sequence[Expr]) -> Value:
        own = load((*index[:-n], *here))
        return own if same is not None else ops.div(own, places(ctx, w, here, bool(include_pad), divisor, wide))

    def taken(index: Index, here: Sequence[Expr], which: Sequence[Expr], inside: Value) -> Value:
        return ops.masked(inside, lambda: of_window(index, here), 0)

    return _gathered(ctx, ctx.size_of(x), w, taken, same)


_OF_MAXIMA = "aten.max_pool2d_with_indices_backward", "aten.max_pool3d_with_indices_backward"
_IN_ORDER = because("left_to_aten", "a gradient is scattered to the indices of the maxima, and ATen adds them in order")
refuse_in_order(_IN_ORDER, *_OF_MAXIMA)


@lower(*_OF_MAXIMA, decisive=EVERY)
def lower_max_pool_backward(
    ctx: LoweringContext, grad: TensorBox, x: TensorBox, kernel: Sequence[int], stride: Any, padding: Any,
    dilation: Any, ceil: Any, indices: TensorBox,
) -> TensorBox:  # fmt: skip
    """The sum of the gradients of the windows whose largest element this is."""
    if ctx.target.ordered:
        raise Unsupported(_IN_ORDER)
    w = sliding(ctx, ctx.size_of(x), n_dims(ctx), kernel, stride, padding, dilation, ceil, backward=True)
    if any(g != 1 for g in w.dilation):
        raise Unsupported("the gradient of windows with gaps")
    return _of_maxima(ctx, ctx.size_of(x), w, grad, indices, lambda at, _: ops.index_expr(window_number(w, at)))


@lower("fuser.max_pool_offsets_backward", decisive=EVERY)
def lower_max_pool_offsets_backward(
    ctx: LoweringContext, grad: TensorBox, offsets: TensorBox, size: Sequence[Any], kernel: Sequence[int],
    stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], ceil: bool, channels_last: bool,
) -> TensorBox:  # fmt: skip
    """The same, given the number of each largest element within its window."""
    whole = tuple(ctx.canon(s) for s in size)
    w = sliding(ctx, whole, len(kernel), kernel, stride, padding, dilation, ceil, backward=True)
    return _of_maxima(ctx, whole, w, grad, offsets, lambda _, which: number_in_int8(offset_number(w, which)))


def _of_maxima(
    ctx: LoweringContext, size: Sequence[Expr], w: Sliding, grad: TensorBox, found: TensorBox,
    number: Callable[[Sequence[Expr], Sequence[Expr]], Value],
) -> TensorBox:  # fmt: skip
    """For each element, the gradients of the windows where `found` is number(its index, its index in the window)."""
    n, wide = len(w.kernel), compute_dtype(result_dtype(ctx))
    load = ctx.loader(grad, ctx.size_of(grad), wide)
    place = ctx.loader(found, ctx.size_of(found), found.dtype)

    def taken(index: Index, here: Sequence[Expr], which: Sequence[Expr], inside: Value) -> Value:
        at = (*index[:-n], *here)
        own = ops.masked(inside, lambda: place(at), -1)
        mine = ops.eq(own, number(index[-n:], which))
        return ops.masked(mine, lambda: load(at), 0)

    return _gathered(ctx, size, w, taken)
