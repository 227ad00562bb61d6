"""Backward operators of norms and losses. Those of activations are in `activations`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fuser.errors import Unsupported
from fuser.ir.loop_body import Value, compute_dtype, ops
from fuser.ir.nodes import Index, TensorBox
from fuser.ir.sizes import Expr, product
from fuser.lowering import demands
from fuser.lowering.context import LoweringContext, Operand
from fuser.lowering.entries import lower
from fuser.lowering.losses import MEAN
from fuser.lowering.norms import Loader, by_channel, inverse_root, lies_by_channel, over_channels, reads_columns
from fuser.lowering.pointwise import elementwise, result_dtype
from fuser.lowering.reductions import number_of, reduce, reduce_to_result

Gradients = tuple[TensorBox | None, ...]


def sum_over(ctx: LoweringContext, like: TensorBox, dims: Sequence[int], value: Loader, result: int) -> TensorBox:
    """The node's result `result`: `value` summed over `dims` of the size of `like`; unsummed if there are none."""
    if not dims:
        return ctx.pointwise(ctx.size_of(like), ctx.meta[result].dtype, value, ctx.order_of_meta(result))
    return reduce_to_result(ctx, "sum", like, dims, lambda _, i: value(i), result=result)


def mean_over(ctx: LoweringContext, like: TensorBox, dims: Sequence[int], value: Loader, wide: torch.dtype) -> Loader:
    """A loader, over the size of `like`, of the mean of `value` over `dims`."""
    size = ctx.size_of(like)
    load = ctx.loader(reduce(ctx, "sum", like, dims, wide, lambda _, i: value(i), keepdim=True), size, wide)
    n = product(size[d] for d in dims)
    return lambda i: ops.div(load(i), number_of(ctx, n, wide))


def times(a: Loader, b: Loader | None) -> Loader:
    """The product of two loaders."""
    return a if b is None else lambda i: ops.mul(a(i), b(i))


def normalised(load: Loader, mean: Loader | None, rstd: Loader) -> Loader:
    """(x - mean) * rstd"""
    return lambda i: ops.mul(ops.sub(load(i), mean(i)) if mean is not None else load(i), rstd(i))


def input_gradient(
    ctx: LoweringContext, x: TensorBox, dims: Sequence[int], grad: Loader, unit: Loader, rstd: Loader, centred: bool,
    dtype: torch.dtype, order: tuple[int, ...] | None,
) -> TensorBox:  # fmt: skip
    """rstd * (g - mean(g) - u * mean(g * u)): `grad` is g, weight included, `unit` is u, the normalised input."""
    wide = compute_dtype(dtype)
    mean_grad = mean_over(ctx, x, dims, grad, wide) if centred else None
    mean_both = mean_over(ctx, x, dims, times(grad, unit), wide)

    def inner(i: Index) -> Value:
        g = grad(i)
        g = ops.sub(g, mean_grad(i)) if mean_grad is not None else g
        return ops.mul(rstd(i), ops.sub(g, ops.mul(unit(i), mean_both(i))))

    return ctx.pointwise(ctx.size_of(x), dtype, inner, order)


# -- norms over the last dims ------------------------------------------------------------------------------------------
def _over_last(
    ctx: LoweringContext, grad: TensorBox, x: TensorBox, shape: Sequence[Any], mean: TensorBox | None, rstd: TensorBox,
    weight: TensorBox | None, mask: Sequence[bool],
) -> Gradients:  # fmt: skip
    ctx.broadcast_sizes([ctx.size_of(t) for t in (x, grad, mean, rstd, weight) if t is not None])  # learn equal sizes
    size, wide = ctx.size_of(x), compute_dtype(x.dtype)
    outer, last = list(range(len(size) - len(shape))), list(range(len(size) - len(shape), len(size)))
    g, load, load_rstd = (ctx.loader(t, size, wide) for t in (grad, x, rstd))
    unit = normalised(load, ctx.loader(mean, size, wide) if mean is not None else None, load_rstd)
    scaled = times(g, ctx.loader(weight, size, wide) if weight is not None else None)
    out: list[TensorBox | None] = [None] * len(mask)
    if mask[0]:
        order = ctx.order_of_meta(0)
        out[0] = input_gradient(ctx, x, last, scaled, unit, load_rstd, mean is not None, ctx.meta[0].dtype, order)
    if mask[1] and weight is not None:
        out[1] = sum_over(ctx, x, outer, times(g, unit), 1)
    if len(mask) > 2 and mask[2]:
        out[2] = sum_over(ctx, x, outer, g, 2)
    return tuple(out)


@lower("aten.native_layer_norm_backward")
def lower_layer_norm_backward(
    ctx: LoweringContext, grad: TensorBox, x: TensorBox, shape: Sequence[Any], mean: TensorBox, rstd: TensorBox,
    weight: TensorBox | None, bias: TensorBox | None, mask: Sequence[bool],
) -> Gradients:  # fmt: skip
    """Gradients of input, weight and bias; None where not requested."""
    mask = (mask[0], mask[1] and weight is not None, mask[2] and bias is not None)
    return _over_last(ctx, grad, x, shape, mean, rstd, weight, mask)


@lower("aten._fused_rms_norm_backward")
def lower_rms_norm_backward(
    ctx: LoweringContext, grad: TensorBox, x: TensorBox, shape: Sequence[Any], rstd: TensorBox,
    weight: TensorBox | None, mask: Sequence[bool],
) -> Gradients:  # fmt: skip
    """Gradients of input and weight; None where not requested."""
    return _over_last(ctx, grad, x, shape, None, rstd, weight, mask)


# -- norms of channels -------------------------------------------------------------------------------------------------
@lower("aten.native_batch_norm_backward")
def lower_batch_norm_backward(
    ctx: LoweringContext, grad: TensorBox, x: TensorBox, weight: TensorBox | None, running_mean: TensorBox | None,
    running_var: TensorBox | None, saved_mean: TensorBox | None, saved_rstd: TensorBox | None, train: bool,
    eps: Operand, mask: Sequence[bool],
) -> Gradients:  # fmt: skip
    """Gradients of input, weight and bias, with the batch's statistics in training, else with the running ones."""
    size, wide = ctx.size_of(x), compute_dtype(x.dtype)
    dims = [d for d in range(len(size)) if d != 1]
    mean, rstd = (saved_mean, saved_rstd) if train else (running_mean, None)
    if not train and running_var is not None:
        rstd = inverse_root(ctx, running_var, eps, compute_dtype(running_var.dtype))
    load_mean, load_rstd = over_channels(ctx, mean, size[1], wide), over_channels(ctx, rstd, size[1], wide)
    if load_mean is None or load_rstd is None:
        raise Unsupported("the gradient of batch norm without statistics")
    g, load = ctx.loader(grad, size, wide), ctx.loader(x, size, wide)
    unit = normalised(load, load_mean, load_rstd)
    factor = times(load_rstd, over_channels(ctx, weight, size[1], wide))
    # The sum of g * weight is the sum of g times the weight, so two sums give all gradients. Their errors are equal in
    # each element of a channel, and add up in the gradient of an earlier bias: so they are in float64, as in eager's
    # CPU kernel.
    summed = torch.float64 if x.dtype is torch.float32 and ctx.target.wide_sums else wide
    sums = [channel_sums(ctx, x, dims, widened(value, summed), summed) for value in (g, times(g, unit))]
    loads = [ctx.loader(t, size[1:2], wide) for t in sums]
    out: list[TensorBox | None] = [None, None, None]
    if mask[0]:
        count = product(size[d] for d in dims)

        def inner(i: Index) -> Value:
            n = number_of(ctx, count, wide)
            mean_grad, mean_both = (ops.div(load_sum((i[1],)), n) for load_sum in loads)
            return ops.mul(ops.sub(ops.sub(g(i), mean_grad), ops.mul(unit(i), mean_both)), factor(i))

        value = inner if train else times(g, factor)
        out[0] = ctx.pointwise(size, ctx.meta[0].dtype, value, ctx.order_of_meta(0))
    for result, load_sum in ((1, loads[1]), (2, loads[0])):
        if mask[result]:
            out[result] = ctx.pointwise(size[1:2], ctx.meta[result].dtype, load_sum)
    return tuple(out)


@lower("aten.native_group_norm_backward")
def lower_group_norm_backward(
    ctx: LoweringContext, grad: TensorBox, x: TensorBox, mean: TensorBox, rstd: TensorBox, weight: TensorBox | None,
    n: Any, c: Any, hw: Any, groups: int, mask: Sequence[bool],
) -> Gradients:  # fmt: skip
    """Gradients of input, weight and bias, from two sums for each channel of each sample."""
    size, wide = ctx.size_of(x), compute_dtype(x.dtype)
    each = ctx.specialise(size[1]) // groups
    rest = list(range(2, len(size)))
    own = (size[0], ctx.canon(groups))
    for t in (mean, rstd):
        demands.has_size(ctx, t, own, "a statistic of groups")
    order = ctx.order_of_meta(0) if mask[0] else None
    by_channels = lies_by_channel(ctx, order, each) or reads_columns(ctx, each, size)

    def of_group(load: Loader) -> Loader:
        if by_channels:
            return by_channel(ctx, load, size, each, wide)
        return lambda i: load((i[0], i[1] // each))

    load_mean, load_rstd = (of_group(ctx.loader(t, own, wide)) for t in (mean, rstd))
    g, load = ctx.loader(grad, size, wide), ctx.loader(x, size, wide)
    load_weight = over_channels(ctx, weight, size[1], wide)
    unit = normalised(load, load_mean, load_rstd)
    sums = [channel_sums(ctx, x, rest, value, wide) for value in (g, times(g, unit))]
    loads = [ctx.loader(t, size[:2], wide) for t in sums]
    out: list[TensorBox | None] = [None, None, None]
    if mask[0]:
        means = [of_group(_group_mean(ctx, t, load_weight, groups, each, size[2:], wide)) for t in sums]

        def inner(i: Index) -> Value:
            v = times(g, load_weight)(i)
            m, both = (load(i) for load in means)
            return ops.mul(load_rstd(i), ops.sub(ops.sub(v, m), ops.mul(unit(i), both)))

        out[0] = ctx.pointwise(size, ctx.meta[0].dtype, inner, order)
    for result, value in ((1, loads[1]), (2, loads[0])):
        if mask[result]:
            out[result] = sum_over(ctx, sums[0], [0], value, result)
    return tuple(out)


def widened(value: Loader, dtype: torch.dtype) -> Loader:
    """`value` converted to `dtype`."""
    return lambda i: ops.to_dtype(value(i), dtype)


def channel_sums(
    ctx: LoweringContext, x: TensorBox, dims: Sequence[int], value: Loader, wide: torch.dtype
) -> TensorBox:
    """`value` summed over `dims`; over all dims after the channels, one number per channel of each sample."""
    if not dims:
        return ctx.pointwise(ctx.size_of(x), wide, value)
    return reduce(ctx, "sum", x, dims, wide, lambda _, i: value(i))


def _group_mean(
    ctx: LoweringContext, sums: TensorBox, weight: Loader | None, groups: int, each: int, rest: Sequence[Expr],
    wide: torch.dtype,
) -> Loader:  # fmt: skip
    """A loader by (sample, group) of the mean over a group of weight * (sum of its channel)."""
    samples = ctx.size_of(sums)[0]
    shape = (samples, ctx.canon(groups), ctx.canon(each))
    grouped = sums.viewed(shape, lambda i: (i[0], i[1] * each + i[2]))

    def value(v: Value, i: Index) -> Value:
        return ops.mul(v, weight((i[0], i[1] * each + i[2]))) if weight is not None else v

    load = ctx.loader(reduce(ctx, "sum", grouped, 2, wide, value), shape[:2], wide)
    n = product([ctx.canon(each), *rest])
    return lambda i: ops.div(load(i), number_of(ctx, n, wide))


# -- losses ------------------------------------------------------------------------------------------------------------
def loss_gradient(
    ctx: LoweringContext, grad: TensorBox, operands: Sequence[Operand], body: Callable[..., Value], reduction: int
) -> TensorBox:
    """grad * body(operands), divided by the number of elements for a mean."""
    wide = compute_dtype(result_dtype(ctx))
    n = product(ctx.broadcast_sizes([ctx.size_of(o) for o in operands]))

    def inner(g: Value, *values: Value) -> Value:
        g = ops.div(g, number_of(ctx, n, wide)) if reduction == MEAN else g
        return ops.mul(body(*values), g)

    return elementwise(ctx, [grad, *operands], inner)


@lower("aten.mse_loss_backward")
def lower_mse_loss_backward(
    ctx: LoweringContext, grad: TensorBox, x: TensorBox, y: TensorBox, reduction: int
) -> TensorBox:
    """2 * (x - y) * grad"""
    return loss_gradient(ctx, grad, [x, y], lambda a, b: ops.mul(ops.sub(a, b), 2.0), reduction)


@lower("aten.smooth_l1_loss_backward", "aten.huber_loss_backward")
def lower_smooth_l1_loss_backward(
    ctx: LoweringContext, grad: TensorBox, x: TensorBox, y: TensorBox, reduction: int, limit: Operand
) -> TensorBox:
    """The difference within the limits, else the limit; divided by the limit for smooth_l1."""
    huber = ctx.op == "aten.huber_loss_backward"

    def body(a: Value, b: Value, k: Value) -> Value:
        d = ops.sub(a, b)
        most = k if huber else ops.constant(1, d.dtype)
        inside = d if huber else ops.div(d, k)
        return ops.where(ops.le(d, ops.neg(k)), ops.neg(most), ops.where(ops.ge(d, k), most, inside))

    return loss_gradient(ctx, grad, [x, y, limit], body, reduction)


@lower("aten.soft_margin_loss_backward")
def lower_soft_margin_loss_backward(
    ctx: LoweringContext, grad: TensorBox, x: TensorBox, y: TensorBox, reduction: int
) -> TensorBox:
    """-y * z / (1 + z) * grad, z = exp(-y * x)"""

    def body(a: Value, b: Value) -> Value:
        z = ops.exp(ops.mul(ops.neg(b), a))
        return ops.div(ops.mul(ops.neg(b), z), ops.add(z, 1.0))

    return loss_gradient(ctx, grad, [x, y], body, reduction)


@lower("aten.binary_cross_entropy_backward")
def lower_binary_cross_entropy_backward(
    ctx: LoweringContext, grad: TensorBox, x: TensorBox, y: TensorBox, weight: TensorBox | None = None,
    reduction: int = MEAN,
) -> TensorBox:  # fmt: skip
    """grad * (x - y) / (x * (1 - x)), with the divisor at least 1e-12"""

    def body(a: Value, b: Value, *w: Value) -> Value:
        area = ops.mul(ops.sub(ops.constant(1, a.dtype), a), a)
        out = ops.div(ops.sub(a, b), ops.maximum(area, 1e-12))
        return ops.mul(out, w[0]) if w else out

    return loss_gradient(ctx, grad, [x, y] if weight is None else [x, y, weight], body, reduction)


@lower("aten._prelu_kernel_backward", decisive=(1,))
def lower_prelu_backward(
    ctx: LoweringContext, grad: TensorBox, x: TensorBox, weight: TensorBox
) -> tuple[TensorBox, TensorBox]:
    """grad, times the weight where x is not positive; and the weight's gradient, x * grad there and 0 elsewhere"""
    size = ctx.broadcast_sizes([ctx.size_of(t) for t in (grad, x, weight)])
    dtype = ctx.meta[0].dtype
    g, v, w = (ctx.loader(t, size, compute_dtype(dtype)) for t in (grad, x, weight))
    to_x = ctx.pointwise(
        size, dtype, lambda i: ops.where(ops.gt(v(i), 0), g(i), ops.mul(w(i), g(i))), ctx.order_of_meta(0)
    )
    to_weight = ctx.pointwise(
        size, ctx.meta[1].dtype,
        lambda i: ops.where(ops.gt(v(i), 0), ops.constant(0, v(i).dtype), ops.mul(v(i), g(i))), ctx.order_of_meta(1),
    )  # fmt: skip
    return to_x, to_weight
