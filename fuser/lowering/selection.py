"""Elementwise operators that select, copy or cast: where, clamp, masked_fill, fill, dtype changes."""

from __future__ import annotations

import math
from typing import Any

import torch

from fuser.errors import Unsupported
from fuser.ir.loop_body import Value, compute_dtype, ops
from fuser.ir.nodes import Index, TensorBox
from fuser.lowering.context import LoweringContext, Operand
from fuser.lowering.entries import lower, refuse
from fuser.lowering.known_shapes import AUTOCASTS
from fuser.lowering.pointwise import cast_loader, elementwise, result_dtype
from fuser.reasons import because


def select(ctx: LoweringContext, condition: TensorBox, a: Operand, b: Operand) -> TensorBox:
    """a where condition, else b, both cast to the result's dtype."""
    dtype = result_dtype(ctx)
    size = ctx.broadcast_sizes([ctx.size_of(o) for o in (condition, a, b)])
    cond = ctx.loader(condition, size, torch.bool)
    left, right = (cast_loader(ctx, o, size, dtype) for o in (a, b))
    return ctx.pointwise(size, dtype, lambda i: ops.where(cond(i), left(i), right(i)), ctx.order_of_meta())


@lower("aten.where")
def lower_where(ctx: LoweringContext, condition: TensorBox, a: Operand, b: Operand) -> TensorBox:
    """a where condition, else b"""
    return select(ctx, condition, a, b)


@lower("aten.masked_fill")
def lower_masked_fill(ctx: LoweringContext, x: TensorBox, mask: TensorBox, value: Operand) -> TensorBox:
    """`value`, a number or a 0-dim tensor, where mask, else x"""
    dtype = result_dtype(ctx)
    if isinstance(value, (int, float)) and not math.isinf(value) and dtype.is_floating_point:
        if abs(value) > torch.finfo(dtype).max:
            raise Unsupported(because("eager_raises", f"{value} does not fit into {dtype}: eager raises"))
    return select(ctx, mask, value, x)


@lower("aten.fill")
def lower_fill(ctx: LoweringContext, x: TensorBox, value: Operand) -> TensorBox:
    """A tensor filled with `value`."""
    dtype, size = result_dtype(ctx), ctx.size_of(x)
    return ctx.pointwise(size, dtype, cast_loader(ctx, value, size, dtype), ctx.order_of_meta())


@lower("aten.clamp")
def lower_clamp(ctx: LoweringContext, x: Operand, low: Operand | None = None, high: Operand | None = None) -> TensorBox:
    """min(max(x, low), high), NaN kept"""
    dtype = result_dtype(ctx)
    limits = [_limit(dtype, o, at) for at, o in enumerate((low, high)) if o is not None]

    def body(v: Value, *values: Value) -> Value:
        rest = list(values)
        if low is not None:
            v = ops.maximum(rest.pop(0), v)  # of equal values the last is returned: eager keeps the zero of x
        return ops.minimum(rest.pop(0), v) if high is not None else v

    return elementwise(ctx, [x, *limits], body, cast=True)


def _limit(dtype: torch.dtype, limit: Operand, at: int) -> Operand:
    """The limit that eager uses. One that does not fit wraps, saturates or raises, depending on torch's version."""
    if type(limit) is not int or dtype.is_floating_point:
        return limit
    info = torch.iinfo(dtype)
    if info.min <= limit <= info.max:
        return limit
    try:
        found = torch.tensor([(info.min, info.max)[at]], dtype=dtype).clamp(*((limit, None), (None, limit))[at])
    except RuntimeError as e:
        raise Unsupported(because("eager_raises", str(e))) from None
    return int(found)


@lower("aten.clamp_min")
def lower_clamp_min(ctx: LoweringContext, x: Operand, low: Operand) -> TensorBox:
    """max(x, low)"""
    return lower_clamp(ctx, x, low)


@lower("aten.clamp_max")
def lower_clamp_max(ctx: LoweringContext, x: Operand, high: Operand) -> TensorBox:
    """min(x, high)"""
    return lower_clamp(ctx, x, None, high)


@lower("aten.nan_to_num", decisive=(0,))
def lower_nan_to_num(
    ctx: LoweringContext, x: TensorBox, nan: Any = None, posinf: Any = None, neginf: Any = None
) -> TensorBox:
    """NaN and the infinities replaced: by 0 and the largest finite numbers by default."""
    dtype = result_dtype(ctx)
    if not dtype.is_floating_point:
        return elementwise(ctx, [x], lambda v: v)
    info = torch.finfo(dtype)
    limits = ((nan, 0.0), (posinf, info.max), (neginf, info.min))
    given = [default if value is None else value for value, default in limits]

    def body(v: Value, n: Value, p: Value, m: Value) -> Value:
        finite = ops.where(ops.eq(v, -math.inf), m, ops.where(ops.eq(v, math.inf), p, v))
        return ops.where(ops.isnan(v), n, finite)  # tests the original value: a replacement is not replaced again

    return elementwise(ctx, [x, *given], body, cast=True)


@lower("aten._to_copy", "prims.convert_element_type", "aten.to", "aten.clone", "aten.type_as", "aten.contiguous",
       "aten.lift_fresh_copy", *AUTOCASTS)  # fmt: skip
def lower_copy(ctx: LoweringContext, x: TensorBox, *args: Any, **kwargs: Any) -> TensorBox:
    """A copy in the dtype of eager's result. A user's cast is rounded even if the value stays in a register."""
    if ctx.meta is ctx.arg_metas[0]:
        return x  # eager returns its argument
    dtype = result_dtype(ctx)
    size = ctx.size_of(x)
    load = ctx.loader(x, size, compute_dtype(dtype))
    return ctx.pointwise(size, dtype, lambda i: ops.round_to(load(i), dtype), ctx.order_of_meta())


@lower("aten.copy")
def lower_functional_copy(
    ctx: LoweringContext, x: TensorBox, source: TensorBox, non_blocking: Any = False
) -> TensorBox:
    """`source` with the size and dtype of `x`."""
    size = ctx.size_of(x)
    load = ctx.loader(source, size, compute_dtype(x.dtype))
    return ctx.pointwise(size, x.dtype, lambda i: ops.round_to(load(i), x.dtype), ctx.order_of_meta())


@lower("aten.dropout", "aten.alpha_dropout", "aten.feature_dropout", "aten.feature_alpha_dropout")
def lower_dropout(ctx: LoweringContext, x: TensorBox, p: float, train: Any) -> TensorBox:
    """The tensor itself outside of training."""
    if train is not False:
        raise Unsupported(because("random", "dropout in training draws random numbers"))
    return x


@lower("aten.native_dropout")
def lower_native_dropout(ctx: LoweringContext, x: TensorBox, p: float, train: Any) -> tuple[TensorBox, TensorBox]:
    """Outside of training: a copy, and a mask of ones."""
    if train is not False:
        raise Unsupported(because("random", "dropout in training draws random numbers"))
    size = ctx.size_of(x)
    ones = ctx.pointwise(size, ctx.meta[1].dtype, lambda i: ops.constant(1, ctx.meta[1].dtype), ctx.order_of_meta(1))
    return ctx.pointwise(size, x.dtype, ctx.loader(x, size, x.dtype), ctx.order_of_meta(0)), ones


@lower("aten.rrelu_with_noise_functional")
def lower_rrelu(
    ctx: LoweringContext, x: TensorBox, noise: TensorBox, low: Operand = 1 / 8, high: Operand = 1 / 3,
    training: Any = False, generator: Any = None,
) -> tuple[TensorBox, TensorBox]:  # fmt: skip
    """Outside of training: x, times the mean of both slopes below 0; the noise is unchanged."""
    if training is not False:
        raise Unsupported(because("random", "rrelu in training draws random numbers"))
    size, wide = ctx.size_of(x), compute_dtype(x.dtype)
    load, a, b = ctx.loader(x, size, wide), ctx.loader(low, (), wide), ctx.loader(high, (), wide)

    def inner(i: Index) -> Value:
        v, slope = load(i), ops.div(ops.add(a(()), b(())), 2.0)
        return ops.where(ops.gt(v, 0), v, ops.mul(v, slope))

    return ctx.pointwise(size, x.dtype, inner, ctx.order_of_meta(0)), noise


@lower("aten.native_dropout_backward")
def lower_native_dropout_backward(ctx: LoweringContext, grad: TensorBox, mask: TensorBox, scale: Operand) -> TensorBox:
    """grad * mask * scale"""
    if mask.dtype not in (torch.bool, grad.dtype):  # eager promotes, torch's shape function does not
        raise Unsupported(f"a dropout's mask of {mask.dtype} for a gradient of {grad.dtype}")
    return elementwise(ctx, [grad, mask, scale], lambda g, m, s: ops.mul(g, ops.mul(m, s)))


refuse(
    because("random", "it draws random numbers"),
    "aten.bernoulli", "aten.rand_like", "aten.randn_like", "aten.randint_like",
    "aten.rand", "aten.randn", "aten.randint", "aten.randperm", "aten.multinomial", "aten.normal", "aten.uniform",
    "aten.exponential", "aten._fused_dropout",
)  # fmt: skip
