"""Gradients of poolings: each element gathers from the windows that it lies in, of which there are few."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fuser.errors import Unsupported
from fuser.ir.loop_body import Value, compute_dtype, ops
from fuser.ir.nodes import Index, TensorBox
from fuser.ir.sizes import Expr, floordiv, mod
from fuser.lowering.context import LoweringContext
from fuser.lowering.pointwise import result_dtype
from fuser.lowering.pooling import Sliding, n_dims, places, sliding, window_number
from fuser.lowering.registry import EVERY, lower, refuse_in_order
from fuser.reasons import because


def _windows(ctx: LoweringContext, w: Sliding, at: Sequence[Expr]) -> Iterator[tuple[tuple[Expr, ...], Value]]:
    """The windows that the element `at` may lie in, and whether it does."""
    steps = [-(-k // s) for k, s in zip(w.kernel, w.stride)]
    moved = [a + p for a, p in zip(at, w.padding)]
    for step in itertools.product(*map(range, steps)):
        here = tuple(floordiv(m, ctx.canon(s)) - k for m, s, k in zip(moved, w.stride, step))
        inside: Value | None = None
        for d, (i, k) in enumerate(zip(here, step)):
            for own in _conditions(ctx, w, d, i, k, moved[d]):
                inside = own if inside is None else ops.logical_and(inside, own)
        assert inside is not None
        yield here, inside


def _conditions(ctx: LoweringContext, w: Sliding, d: int, window: Expr, step: int, moved: Expr) -> Iterator[Value]:
    """What must hold for window `window` of dim `d`, `step` before the last one that does not begin behind."""
    yield ops.lt(ops.index_expr(window), ops.index_expr(w.count[d]))
    if step:
        yield ops.ge(ops.index_expr(window), 0)
    if (step + 1) * w.stride[d] > w.kernel[d]:
        into = mod(moved, ctx.canon(w.stride[d])) + step * w.stride[d]
        yield ops.lt(ops.index_expr(into), ops.index_expr(ctx.canon(w.kernel[d])))


def _gathered(
    ctx: LoweringContext, x: TensorBox, w: Sliding, taken: Callable[[Index, Sequence[Expr], Value], Value]
) -> TensorBox:  # fmt: skip
    """For each element of `x` the sum of what it takes from its windows: of (index, window, whether it lies there)."""
    n, dtype = len(w.kernel), result_dtype(ctx)

    def inner(index: Index) -> Value:
        total: Value | None = None
        for here, inside in _windows(ctx, w, index[-n:]):
            value = taken(index, here, inside)
            total = value if total is None else ops.add(total, value)
        assert total is not None
        return total

    return ctx.pointwise(ctx.size_of(x), dtype, inner, ctx.order_of_meta())


@lower("aten.avg_pool2d_backward", "aten.avg_pool3d_backward")
def lower_avg_pool_backward(
    ctx: LoweringContext, grad: TensorBox, x: TensorBox, kernel: Sequence[int], stride: Any, padding: Any, ceil: Any,
    include_pad: Any, divisor: int | None,
) -> TensorBox:  # fmt: skip
    """Each window's gradient over the number of its places."""
    n, wide = n_dims(ctx), compute_dtype(result_dtype(ctx))
    w = sliding(ctx, x, n, kernel, stride, padding, 1, ceil, backward=True)
    load = ctx.loader(grad, ctx.size_of(grad), wide)

    def taken(index: Index, here: Sequence[Expr], inside: Value) -> Value:
        count = places(ctx, w, here, bool(include_pad), divisor, wide)
        return ops.masked(inside, lambda: ops.div(load((*index[:-n], *here)), count), 0)

    return _gathered(ctx, x, w, taken)


_OF_MAXIMA = "aten.max_pool2d_with_indices_backward", "aten.max_pool3d_with_indices_backward"
_IN_ORDER = because("left_to_aten", "a gradient is scattered to the indices of the maxima, and ATen adds them in order")
refuse_in_order(_IN_ORDER, *_OF_MAXIMA)


@lower(*_OF_MAXIMA, decisive=EVERY)
def lower_max_pool_backward(
    ctx: LoweringContext, grad: TensorBox, x: TensorBox, kernel: Sequence[int], stride: Any, padding: Any,
    dilation: Any, ceil: Any, indices: TensorBox,
) -> TensorBox:  # fmt: skip
    """The gradients of the windows whose largest element it is."""
    if ctx.target.ordered:
        raise Unsupported(_IN_ORDER)
    n, wide = n_dims(ctx), compute_dtype(result_dtype(ctx))
    w = sliding(ctx, x, n, kernel, stride, padding, dilation, ceil, backward=True)
    if any(g != 1 for g in w.dilation):
        raise Unsupported("the gradient of windows with gaps")
    load = ctx.loader(grad, ctx.size_of(grad), wide)
    place = ctx.loader(indices, ctx.size_of(indices), indices.dtype)

    def taken(index: Index, here: Sequence[Expr], inside: Value) -> Value:
        at = (*index[:-n], *here)
        own = ops.masked(inside, lambda: place(at), -1)
        mine = ops.eq(own, ops.index_expr(window_number(w, index[-n:])))
        return ops.masked(mine, lambda: load(at), 0)

    return _gathered(ctx, x, w, taken)
