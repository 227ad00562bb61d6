"""Activation functions and their gradients, written as eager's own kernels compute them."""

from __future__ import annotations

import math
from typing import Any

import torch

from fuser.errors import Unsupported
from fuser.ir.loop_body import Value, compute_dtype, ops
from fuser.ir.nodes import Index, TensorBox
from fuser.ir.sizes import ONE, ZERO, expr
from fuser.lowering import demands
from fuser.lowering.context import LoweringContext, Operand
from fuser.lowering.entries import lower
from fuser.lowering.pointwise import elementwise, result_dtype
from fuser.lowering.selection import lower_clamp
from fuser.reasons import because


def number(value: float, like: Value) -> Value:
    """A constant of the dtype of `like`."""
    return ops.constant(value, like.dtype)


def logistic(v: Value) -> Value:
    """1 / (1 + exp(-v))"""
    return ops.div(number(1, v), ops.add(ops.exp(ops.neg(v)), 1.0))


def one_minus(v: Value) -> Value:
    """1 - v"""
    return ops.sub(number(1, v), v)


# -- silu, gelu, mish --------------------------------------------------------------------------------------------------
def silu(v: Value) -> Value:
    """v / (1 + exp(-v))"""
    return ops.div(v, ops.add(ops.exp(ops.neg(v)), 1.0))


@lower("aten.silu")
def lower_silu(ctx: LoweringContext, x: Operand) -> TensorBox:
    """x * sigmoid(x)"""
    return elementwise(ctx, [x], silu)


@lower("aten.silu_backward")
def lower_silu_backward(ctx: LoweringContext, grad: Operand, x: Operand) -> TensorBox:
    """grad * s * (1 + x * (1 - s)), s the sigmoid of x"""

    def body(g: Value, v: Value) -> Value:
        s = logistic(v)
        return ops.mul(ops.mul(g, s), ops.add(ops.mul(v, one_minus(s)), 1.0))

    return elementwise(ctx, [grad, x], body)


BETA, KAPPA = math.sqrt(2) * (2 / math.sqrt(math.pi)) * 0.5, 0.044715  # gelu with approximate='tanh'


def _tanh_argument(v: Value) -> Value:
    cubic = ops.mul(ops.mul(ops.mul(v, v), v), KAPPA)
    return ops.mul(ops.add(v, cubic), BETA)


def gelu(v: Value) -> Value:
    """v times the normal distribution function at v"""
    return ops.mul(v, ops.normal_cdf(v))


def gelu_tanh(v: Value) -> Value:
    """`gelu` with tanh instead of erf: (1 + tanh u) / 2 is 1 / (1 + exp(-2u))."""
    cubic = ops.add(ops.mul(ops.mul(v, v), -2 * BETA * KAPPA), -2 * BETA)
    return ops.div(v, ops.add(ops.exp(ops.mul(v, cubic)), 1.0))


@lower("aten.gelu")
def lower_gelu(ctx: LoweringContext, x: Operand, approximate: str = "none") -> TensorBox:
    """Gaussian error linear unit, exact or by tanh."""
    return elementwise(ctx, [x], gelu_tanh if approximate == "tanh" else gelu)


@lower("aten.gelu_backward")
def lower_gelu_backward(ctx: LoweringContext, grad: Operand, x: Operand, approximate: str = "none") -> TensorBox:
    """grad times the derivative of gelu"""

    def exact(g: Value, v: Value) -> Value:
        area = ops.normal_cdf(v)
        density = ops.mul(ops.exp(ops.mul(ops.mul(v, v), -0.5)), 1 / math.sqrt(2 * math.pi))
        return ops.mul(g, ops.add(area, ops.mul(v, density)))

    def by_tanh(g: Value, v: Value) -> Value:
        t = ops.tanh(_tanh_argument(v))
        left = ops.mul(ops.add(t, 1.0), 0.5)
        slope = ops.mul(ops.add(ops.mul(ops.mul(v, v), 3 * KAPPA), 1.0), BETA)
        right = ops.mul(ops.mul(ops.mul(v, 0.5), one_minus(ops.mul(t, t))), slope)
        return ops.mul(g, ops.add(left, right))

    return elementwise(ctx, [grad, x], by_tanh if approximate == "tanh" else exact)


@lower("aten.mish")
def lower_mish(ctx: LoweringContext, x: Operand) -> TensorBox:
    """x * tanh(log(1 + exp(x)))"""
    return elementwise(ctx, [x], lambda v: ops.mul(v, ops.tanh(soft_maximum(v))))


@lower("aten.mish_backward")
def lower_mish_backward(ctx: LoweringContext, grad: Operand, x: Operand) -> TensorBox:
    """grad * (t + x * s * (1 - t * t)), t = tanh(log(1 + exp(x))), s the sigmoid of x"""

    def body(g: Value, v: Value) -> Value:
        t = ops.tanh(soft_maximum(v))
        return ops.mul(g, ops.add(t, ops.mul(ops.mul(v, logistic(v)), one_minus(ops.mul(t, t)))))

    return elementwise(ctx, [grad, x], body)


# -- with a kink -------------------------------------------------------------------------------------------------------
@lower("aten.relu6")
def lower_relu6(ctx: LoweringContext, x: Operand) -> TensorBox:
    """Between 0 and 6."""
    return lower_hardtanh(ctx, x, 0, 6)


@lower("aten.hardtanh")
def lower_hardtanh(ctx: LoweringContext, x: Operand, low: Operand = -1, high: Operand = 1) -> TensorBox:
    """Between `low` and `high`."""
    if isinstance(low, (int, float)) and isinstance(high, (int, float)) and low > high:
        raise Unsupported(because("eager_raises", "eager's function raises ValueError: the limits are in no order"))
    return lower_clamp(ctx, x, low, high)


@lower("aten.hardtanh_backward", decisive=(1,))
def lower_hardtanh_backward(ctx: LoweringContext, grad: Operand, x: Operand, low: Operand, high: Operand) -> TensorBox:
    """grad inside the limits"""

    def body(g: Value, v: Value, a: Value, b: Value) -> Value:
        if ctx.target.masks_kinks:
            return ops.where(ops.logical_and(ops.gt(v, a), ops.lt(v, b)), g, number(0, g))
        return ops.where(ops.logical_or(ops.le(v, a), ops.ge(v, b)), number(0, g), g)

    return elementwise(ctx, [grad, x, low, high], body)


@lower("aten.leaky_relu")
def lower_leaky_relu(ctx: LoweringContext, x: Operand, slope: Operand = 0.01) -> TensorBox:
    """x, times `slope` where it is not positive"""
    return elementwise(ctx, [x, slope], lambda v, s: ops.where(ops.gt(v, 0), v, ops.mul(v, s)))


@lower("aten.leaky_relu_backward", decisive=(1,))
def lower_leaky_relu_backward(
    ctx: LoweringContext, grad: Operand, x: Operand, slope: Operand, is_result: bool
) -> TensorBox:
    """grad, times `slope` where x is not positive"""
    return elementwise(ctx, [grad, x, slope], lambda g, v, s: ops.where(ops.gt(v, 0), g, ops.mul(g, s)))


@lower("aten.rrelu")
def lower_rrelu(
    ctx: LoweringContext, x: Operand, lower_end: float = 1 / 8, upper: float = 1 / 3, training: Any = False, *_: Any
) -> TensorBox:
    """Leaky relu with the mean slope, outside of training."""
    if training is not False:
        raise Unsupported(because("random", "rrelu in training draws random numbers"))
    return lower_leaky_relu(ctx, x, (lower_end + upper) / 2)


@lower("aten.threshold", decisive=(0,))
def lower_threshold(ctx: LoweringContext, x: Operand, threshold: Operand, value: Operand) -> TensorBox:
    """`value` up to the threshold, x above"""
    return elementwise(ctx, [x, threshold, value], lambda v, t, o: ops.where(ops.le(v, t), o, v), cast=True)


@lower("aten.threshold_backward", decisive=(1,))
def lower_threshold_backward(ctx: LoweringContext, grad: Operand, x: Operand, threshold: Operand) -> TensorBox:
    """grad above the threshold"""
    return elementwise(
        ctx, [grad, x, threshold], lambda g, v, t: ops.where(ops.le(v, t), number(0, g), g), cast=True
    )  # fmt: skip


@lower("aten.prelu", "aten._prelu_kernel")
def lower_prelu(ctx: LoweringContext, x: TensorBox, weight: TensorBox) -> TensorBox:
    """x, times the weight of its channel where it is not positive"""
    demands.same_dtypes(x, weight)
    size, own = ctx.size_of(x), ctx.size_of(weight)
    if ctx.op == "aten.prelu" and len(own) == 1 and len(size) > 1:
        # One weight serves all channels, or each index of dim 1 has its own.
        rank = len(size)
        shape = tuple(own[0] if d == 1 else ONE for d in range(rank))
        weight = weight.viewed(shape, lambda i: (i[1],))
    elif ctx.op == "aten.prelu" and len(own) == 1:
        weight = weight.viewed((), lambda i: (ZERO,))
    return elementwise(ctx, [x, weight], lambda v, w: ops.where(ops.gt(v, 0), v, ops.mul(w, v)))


@lower("aten.hardshrink", decisive=(0,))
def lower_hardshrink(ctx: LoweringContext, x: Operand, limit: Operand = 0.5) -> TensorBox:
    """0 within the limit, x outside"""

    def body(v: Value, a: Value) -> Value:
        return ops.where(ops.logical_and(ops.ge(v, ops.neg(a)), ops.le(v, a)), number(0, v), v)

    return elementwise(ctx, [x, limit], body, cast=True)


@lower("aten.softshrink")
def lower_softshrink(ctx: LoweringContext, x: Operand, limit: Operand = 0.5) -> TensorBox:
    """x moved towards 0 by the limit"""

    def body(v: Value, a: Value) -> Value:
        inside = ops.mul(v, 0.0)  # keeps NaN
        below = ops.where(ops.lt(v, ops.neg(a)), ops.add(v, a), inside)
        return ops.where(ops.gt(v, a), ops.sub(v, a), below)

    return elementwise(ctx, [x, limit], body)


@lower("aten.hardshrink_backward", "aten.softshrink_backward", decisive=(1,))
def lower_shrink_backward(ctx: LoweringContext, grad: Operand, x: Operand, limit: Operand) -> TensorBox:
    """grad outside the limit"""

    def body(g: Value, v: Value, a: Value) -> Value:
        if ctx.target.masks_kinks:
            return ops.where(ops.logical_or(ops.lt(v, ops.neg(a)), ops.gt(v, a)), g, number(0, g))
        return ops.where(ops.logical_and(ops.ge(v, ops.neg(a)), ops.le(v, a)), number(0, g), g)

    return elementwise(ctx, [grad, x, limit], body, cast=True)


def _six(v: Value) -> Value:
    return ops.minimum(number(6, v), ops.maximum(number(0, v), ops.add(v, 3.0)))


def hardsigmoid(v: Value) -> Value:
    """(v + 3) / 6 between 0 and 1"""
    return ops.div(_six(v), 6.0)


def hardswish(v: Value) -> Value:
    """v * hardsigmoid(v)"""
    return ops.div(ops.mul(v, _six(v)), 6.0)


@lower("aten.hardsigmoid")
def lower_hardsigmoid(ctx: LoweringContext, x: Operand) -> TensorBox:
    """(x + 3) / 6 between 0 and 1"""
    return elementwise(ctx, [x], hardsigmoid)


@lower("aten.hardswish")
def lower_hardswish(ctx: LoweringContext, x: Operand) -> TensorBox:
    """x * hardsigmoid(x)"""
    return elementwise(ctx, [x], hardswish)


@lower("aten.hardsigmoid_backward", decisive=(1,))
def lower_hardsigmoid_backward(ctx: LoweringContext, grad: Operand, x: Operand) -> TensorBox:
    """grad / 6 between -3 and 3"""

    def body(g: Value, v: Value) -> Value:
        inside = ops.logical_and(ops.gt(v, -3.0), ops.lt(v, 3.0))
        return ops.where(inside, ops.mul(g, 1 / 6), number(0, g))

    return elementwise(ctx, [grad, x], body)


@lower("aten.hardswish_backward", decisive=(1,))
def lower_hardswish_backward(ctx: LoweringContext, grad: Operand, x: Operand) -> TensorBox:
    """0 up to -3, grad from 3, grad * (x / 3 + 1/2) between"""

    def body(g: Value, v: Value) -> Value:
        between = ops.mul(g, ops.add(ops.div(v, 3.0), 0.5))
        if ctx.target.masks_kinks:
            return ops.where(ops.le(v, -3.0), number(0, g), ops.where(ops.ge(v, 3.0), g, between))
        return ops.where(ops.le(v, -3.0), number(0, g), ops.where(ops.lt(v, 3.0), between, g))

    return elementwise(ctx, [grad, x], body)


# -- elu and its kin ---------------------------------------------------------------------------------------------------
def _elu(ctx: LoweringContext, x: Operand, negative: Any, positive: Any, scale: Any) -> TensorBox:
    def body(v: Value, n: Value, p: Value, s: Value) -> Value:
        return ops.where(ops.lt(v, 0), ops.mul(ops.expm1(ops.mul(v, s)), n), ops.mul(v, p))

    return elementwise(ctx, [x, negative, positive, scale], body)


@lower("aten.elu")
def lower_elu(ctx: LoweringContext, x: Operand, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> TensorBox:
    """scale * x, scale * alpha * (exp(input_scale * x) - 1) below 0"""
    return _elu(ctx, x, known(alpha) * known(scale), scale, input_scale)


def known(value: Any) -> float:
    """A number known when the graph is registered; Unsupported otherwise."""
    if not isinstance(value, (int, float)):
        raise Unsupported("a coefficient that is not known when the graph is registered")
    return float(value)


SELU_ALPHA, SELU_SCALE = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946


@lower("aten.selu")
def lower_selu(ctx: LoweringContext, x: Operand) -> TensorBox:
    """elu with the constants that keep mean and variance"""
    return _elu(ctx, x, SELU_ALPHA * SELU_SCALE, SELU_SCALE, 1)


@lower("aten.celu")
def lower_celu(ctx: LoweringContext, x: Operand, alpha: Any = 1.0) -> TensorBox:
    """x, alpha * (exp(x / alpha) - 1) below 0"""
    if known(alpha) == 0:
        raise Unsupported(because("eager_raises", "celu with alpha 0: eager raises"))
    return _elu(ctx, x, alpha, 1, 1 / known(alpha))


@lower("aten.elu_backward", decisive=(5,))
def lower_elu_backward(
    ctx: LoweringContext, grad: Operand, alpha: Any, scale: Any, input_scale: Any, is_result: bool, x: Operand
) -> TensorBox:
    """grad times the derivative of elu, at its argument or its result"""
    negative, positive, inner = known(alpha) * known(scale), known(scale), known(input_scale)

    def body(g: Value, v: Value) -> Value:
        if is_result:
            below = ops.mul(ops.mul(g, inner), ops.add(v, negative))
        else:
            below = ops.mul(ops.mul(g, inner * negative), ops.exp(ops.mul(v, inner)))
        if ctx.target.masks_kinks:
            return ops.where(ops.gt(v, 0), ops.mul(g, positive), below)
        return ops.where(ops.le(v, 0), below, ops.mul(g, positive))

    return elementwise(ctx, [grad, x], body)


# -- softplus, log sigmoid, logit --------------------------------------------------------------------------------------
def soft_maximum(v: Value) -> Value:
    """log(1 + exp(v)) as max(v, 0) + log(1 + exp(-|v|)), which neither overflows nor needs a logarithm beyond 2"""
    return ops.add(ops.maximum(v, 0.0), ops.log1p(ops.exp(ops.neg(ops.abs(v)))))


@lower("aten.softplus")
def lower_softplus(ctx: LoweringContext, x: Operand, beta: Operand = 1, threshold: Operand = 20) -> TensorBox:
    """log(1 + exp(beta * x)) / beta, x where beta * x is above the threshold"""

    def body(v: Value, b: Value, t: Value) -> Value:
        scaled = ops.mul(v, b)
        return ops.where(ops.gt(scaled, t), v, ops.div(soft_maximum(scaled), b))

    return elementwise(ctx, [x, beta, threshold], body)


@lower("aten.softplus_backward", decisive=(1,))
def lower_softplus_backward(
    ctx: LoweringContext, grad: Operand, x: Operand, beta: Operand, threshold: Operand
) -> TensorBox:
    """grad * z / (1 + z), z = exp(beta * x); grad above the threshold"""

    def body(g: Value, v: Value, b: Value, t: Value) -> Value:
        scaled = ops.mul(v, b)
        z = ops.exp(scaled)
        return ops.where(ops.gt(scaled, t), g, ops.div(ops.mul(g, z), ops.add(z, 1.0)))

    return elementwise(ctx, [grad, x, beta, threshold], body)


def log_sigmoid(v: Value) -> Value:
    """min(v, 0) - log(1 + exp(-|v|))"""
    return ops.sub(ops.minimum(v, 0.0), ops.log1p(ops.exp(ops.neg(ops.abs(v)))))


@lower("aten.log_sigmoid")
def lower_log_sigmoid(ctx: LoweringContext, x: Operand) -> TensorBox:
    """log(sigmoid(x))"""
    return elementwise(ctx, [x], log_sigmoid)


@lower("aten.log_sigmoid_forward")
def lower_log_sigmoid_forward(ctx: LoweringContext, x: TensorBox) -> tuple[TensorBox, TensorBox]:
    """log(sigmoid(x)) and exp(-|x|)"""
    dtype, size = ctx.meta[0].dtype, ctx.size_of(x)
    load = ctx.loader(x, size, compute_dtype(dtype))
    out = ctx.pointwise(size, dtype, lambda i: log_sigmoid(load(i)), ctx.order_of_meta(0))
    if ctx.meta[1].shape != ctx.meta[0].shape:
        return out, ctx.pointwise([expr(0)], ctx.meta[1].dtype, lambda i: ops.constant(0, dtype))
    return out, ctx.pointwise(size, dtype, lambda i: ops.exp(ops.neg(ops.abs(load(i)))), ctx.order_of_meta(1))


@lower("aten.log_sigmoid_backward")
def lower_log_sigmoid_backward(ctx: LoweringContext, grad: Operand, x: Operand, buffer: Operand) -> TensorBox:
    """grad / (1 + exp(x)), by way of exp(-|x|)"""

    def body(g: Value, v: Value) -> Value:
        z = ops.exp(ops.neg(ops.abs(v)))
        part = ops.div(z, ops.add(z, 1.0))
        return ops.mul(g, ops.where(ops.lt(v, 0), one_minus(part), part))

    return elementwise(ctx, [grad, x], body)


@lower("aten.logit")
def lower_logit(ctx: LoweringContext, x: Operand, eps: Any = None) -> TensorBox:
    """log(x / (1 - x)), with x clamped to [eps, 1 - eps] if eps is given"""

    def body(v: Value) -> Value:
        y = ops.log(ops.div(v, one_minus(v)))
        if eps is None:
            return y
        # The values at the ends are constants: g++ would turn a selection inside the logarithm's argument into
        # branches.
        low = torch.tensor(known(eps), dtype=v.dtype)
        ends = [torch.log(end / (1 - end)).item() for end in (low, torch.tensor(1.0 - known(eps), dtype=v.dtype))]
        return ops.where(
            ops.lt(v, known(eps)), number(ends[0], v), ops.where(ops.gt(v, 1.0 - known(eps)), number(ends[1], v), y)
        )  # fmt: skip

    return elementwise(ctx, [x], body)


@lower("aten.logit_backward")
def lower_logit_backward(ctx: LoweringContext, grad: Operand, x: Operand, eps: Any = None) -> TensorBox:
    """grad / (x * (1 - x)) inside the limits; outside 0, or NaN without limits"""
    low = 0.0 if eps is None else known(eps)

    def body(g: Value, v: Value) -> Value:
        beyond = number(math.nan if eps is None else 0.0, g)
        slope = ops.div(g, ops.mul(v, one_minus(v)))
        if ctx.target.masks_kinks:
            return ops.where(ops.logical_and(ops.ge(v, low), ops.le(v, 1.0 - low)), slope, beyond)
        return ops.where(ops.logical_or(ops.lt(v, low), ops.gt(v, 1.0 - low)), beyond, slope)

    return elementwise(ctx, [grad, x], body)


@lower("aten.sigmoid_backward")
def lower_sigmoid_backward(ctx: LoweringContext, grad: Operand, y: Operand) -> TensorBox:
    """grad * (1 - y) * y"""
    return elementwise(ctx, [grad, y], lambda g, v: ops.mul(ops.mul(g, one_minus(v)), v))


@lower("aten.tanh_backward")
def lower_tanh_backward(ctx: LoweringContext, grad: Operand, y: Operand) -> TensorBox:
    """grad * (1 - y * y)"""
    return elementwise(ctx, [grad, y], lambda g, v: ops.mul(g, one_minus(ops.mul(v, v))))


# -- glu ---------------------------------------------------------------------------------------------------------------
def halves(ctx: LoweringContext, x: TensorBox, dim: int) -> tuple[int, TensorBox, TensorBox]:
    """The two halves of `x` along `dim`, as views."""
    size = ctx.size_of(x)
    dim %= len(size)
    ctx.assume("eq", size[dim] % 2, ZERO)
    half = size[dim] // 2
    shape = tuple(half if d == dim else s for d, s in enumerate(size))

    def second(i: Index) -> Index:
        return tuple(e + half if d == dim else e for d, e in enumerate(i))

    return dim, x.viewed(shape, lambda i: i), x.viewed(shape, second)


@lower("aten.glu")
def lower_glu(ctx: LoweringContext, x: TensorBox, dim: int = -1) -> TensorBox:
    """a * sigmoid(b), the halves of x along `dim`"""
    _, a, b = halves(ctx, x, dim)
    return elementwise(ctx, [a, b], lambda u, v: ops.mul(u, logistic(v)))


@lower("aten.glu_backward")
def lower_glu_backward(ctx: LoweringContext, grad: TensorBox, x: TensorBox, dim: int) -> TensorBox:
    """Gradients of both halves, concatenated along `dim`."""
    dim, a, b = halves(ctx, x, dim)
    dtype, size = result_dtype(ctx), ctx.size_of(a)
    wide = compute_dtype(dtype)
    out = ctx.empty(ctx.size_of(x), dtype, ctx.order_of_meta())
    g, u, v = (ctx.loader(t, size, wide) for t in (grad, a, b))
    half = size[dim]

    def right(i: Index) -> Value:
        s = logistic(v(i))
        return ops.mul(ops.mul(ops.mul(one_minus(s), s), g(i)), u(i))

    ctx.into_slice(out, size, lambda i: ops.mul(logistic(v(i)), g(i)), lambda i: i)
    ctx.into_slice(out, size, right, lambda i: tuple(e + half if d == dim else e for d, e in enumerate(i)))
    return out
