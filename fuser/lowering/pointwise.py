"""Elementwise operators: tables of names first, then those that need a line of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fuser.errors import Unsupported
from fuser.ir.loop_body import Value, compute_dtype, ops
from fuser.ir.nodes import Index, TensorBox
from fuser.lowering.context import LoweringContext, Operand
from fuser.lowering.registry import LOWERINGS, lower

# operator of ATen: op of the table. Computed in the dtype of the result.
UNARY = {
    "abs": "abs", "neg": "neg", "sign": "sign", "sgn": "sign", "reciprocal": "reciprocal",
    "sqrt": "sqrt", "rsqrt": "rsqrt",
    "exp": "exp", "exp2": "exp2", "expm1": "expm1", "log": "log", "log2": "log2", "log10": "log10", "log1p": "log1p",
    "sin": "sin", "cos": "cos", "tan": "tan", "asin": "asin", "acos": "acos", "atan": "atan", "sinh": "sinh",
    "cosh": "cosh", "tanh": "tanh", "asinh": "asinh", "acosh": "acosh", "atanh": "atanh", "erf": "erf", "erfc": "erfc",
    "erfinv": "erfinv", "lgamma": "lgamma", "digamma": "digamma", "i0": "i0", "special_i0e": "i0e",
    "special_i1": "i1", "special_i1e": "i1e", "special_bessel_j0": "j0", "special_bessel_j1": "j1",
    "special_bessel_y0": "y0", "special_bessel_y1": "y1", "special_ndtri": "ndtri", "special_log_ndtr": "log_ndtr",
    "special_entr": "entr", "sigmoid": "sigmoid", "floor": "floor", "ceil": "ceil", "trunc": "trunc", "frac": "frac",
    "bitwise_not": "bitwise_not", "relu": "relu", "positive": "positive",
}  # fmt: skip
BINARY = {
    "mul": "mul", "maximum": "maximum", "minimum": "minimum", "fmax": "fmax", "fmin": "fmin", "atan2": "atan2",
    "hypot": "hypot", "fmod": "fmod", "remainder": "remainder", "bitwise_and": "bitwise_and",
    "bitwise_or": "bitwise_or", "bitwise_xor": "bitwise_xor", "__and__": "bitwise_and", "__or__": "bitwise_or",
    "__xor__": "bitwise_xor", "copysign": "copysign", "nextafter": "nextafter", "gcd": "gcd", "lcm": "lcm",
    "logaddexp": "logaddexp", "logaddexp2": "logaddexp2", "heaviside": "heaviside", "xlogy": "xlogy",
    "special_xlog1py": "xlog1py", "ldexp": "ldexp", "bitwise_left_shift": "lshift", "bitwise_right_shift": "rshift",
    "__lshift__": "lshift", "__rshift__": "rshift", "special_zeta": "zeta",
}  # fmt: skip
COMPARE = {"eq": "eq", "ne": "ne", "lt": "lt", "le": "le", "gt": "gt", "ge": "ge"}
TESTS = {"isnan": "isnan", "isinf": "isinf", "isfinite": "isfinite", "signbit": "signbit"}  # result is bool
LOGICAL = {"logical_and": "logical_and", "logical_or": "logical_or", "logical_xor": "logical_xor"}

Body = Callable[..., Value]


def result_dtype(ctx: LoweringContext) -> torch.dtype:
    """The dtype that eager gives the node."""
    dtype: torch.dtype = ctx.meta.dtype
    return dtype


def elementwise(
    ctx: LoweringContext, operands: Sequence[Operand], body: Body, dtype: torch.dtype | None = None,
    compute: torch.dtype | None = None,
) -> TensorBox:  # fmt: skip
    """`body(*values)` over the broadcast operands, all converted to `compute` (the result's dtype if None)."""
    dtype = dtype if dtype is not None else result_dtype(ctx)
    compute = compute_dtype(compute if compute is not None else dtype)
    size = ctx.broadcast_sizes([ctx.size_of(o) for o in operands])
    loaders = [ctx.loader(o, size, compute) for o in operands]

    def inner(index: Index) -> Value:
        return body(*(load(index) for load in loaders))

    return ctx.pointwise(size, dtype, inner, ctx.order_of_meta())


def common_dtype(ctx: LoweringContext, *numbers: int) -> torch.dtype:
    """The dtype to which torch promotes the node's operands."""
    metas = [m for m in ctx.arg_metas if isinstance(m, (torch.Tensor, int, float, bool))]
    dtype: torch.dtype | None = None
    first = metas[0]
    for other in metas[1:2]:
        return torch.result_type(first, other)
    dtype = first.dtype if isinstance(first, torch.Tensor) else None
    if dtype is None:
        raise Unsupported("an elementwise operator without a tensor")
    return dtype


def _unary(name: str) -> Callable[..., TensorBox]:
    def fn(ctx: LoweringContext, x: Operand) -> TensorBox:
        dtype = result_dtype(ctx)
        if name == "positive" or (name in ("floor", "ceil", "trunc", "frac") and not dtype.is_floating_point):
            return elementwise(ctx, [x], lambda v: v)
        return elementwise(ctx, [x], lambda v: ops.call(name, v))

    return fn


def _binary(name: str) -> Callable[..., TensorBox]:
    return lambda ctx, a, b: elementwise(ctx, [a, b], lambda x, y: ops.call(name, x, y))


def _compare(name: str) -> Callable[..., TensorBox]:
    def fn(ctx: LoweringContext, a: Operand, b: Operand) -> TensorBox:
        return elementwise(ctx, [a, b], lambda x, y: ops.call(name, x, y), torch.bool, common_dtype(ctx))

    return fn


def _test(name: str) -> Callable[..., TensorBox]:
    def fn(ctx: LoweringContext, a: TensorBox) -> TensorBox:
        if name != "signbit" and not a.dtype.is_floating_point:
            return elementwise(ctx, [a], lambda x: ops.constant(name == "isfinite", torch.bool), torch.bool, a.dtype)
        return elementwise(ctx, [a], lambda x: ops.call(name, x), torch.bool, a.dtype)

    return fn


def _logical(name: str) -> Callable[..., TensorBox]:
    return lambda ctx, a, b: elementwise(ctx, [a, b], lambda x, y: ops.call(name, x, y), torch.bool, torch.bool)


for _table, _make in ((UNARY, _unary), (BINARY, _binary), (COMPARE, _compare), (TESTS, _test), (LOGICAL, _logical)):
    for _aten, _op in _table.items():
        LOWERINGS[f"aten.{_aten}"] = _make(_op)


@lower("aten.logical_not")
def lower_logical_not(ctx: LoweringContext, x: TensorBox) -> TensorBox:
    """Not, of the value as bool."""
    return elementwise(ctx, [x], lambda v: ops.logical_not(v), torch.bool, torch.bool)


def _scaled(alpha: Operand, y: Value) -> Value:
    return y if isinstance(alpha, (int, float)) and alpha == 1 else ops.mul(y, ops.constant(alpha, y.dtype))  # type: ignore[arg-type]


@lower("aten.add")
def lower_add(ctx: LoweringContext, a: Operand, b: Operand, alpha: Any = 1) -> TensorBox:
    """a + alpha * b"""
    return _add_sub(ctx, "add", a, b, alpha)


@lower("aten.sub")
def lower_sub(ctx: LoweringContext, a: Operand, b: Operand, alpha: Any = 1) -> TensorBox:
    """a - alpha * b"""
    return _add_sub(ctx, "sub", a, b, alpha)


@lower("aten.rsub")
def lower_rsub(ctx: LoweringContext, a: Operand, b: Operand, alpha: Any = 1) -> TensorBox:
    """b - alpha * a"""
    return _add_sub(ctx, "sub", b, a, alpha)


def _add_sub(ctx: LoweringContext, op: str, a: Operand, b: Operand, alpha: Any) -> TensorBox:
    if not isinstance(alpha, (int, float)):
        raise Unsupported("alpha that is not a number known when the graph is registered")
    if result_dtype(ctx) is torch.bool:
        return elementwise(ctx, [a, b], lambda x, y: ops.call("logical_or", x, y))
    return elementwise(ctx, [a, b], lambda x, y: ops.call(op, x, _scaled(alpha, y)))


@lower("aten.div", "aten.true_divide", "aten.divide")
def lower_div(ctx: LoweringContext, a: Operand, b: Operand, rounding_mode: str | None = None) -> TensorBox:
    """Division: true, or rounded to -inf ("floor") or to zero ("trunc")."""
    if rounding_mode is None:
        return elementwise(ctx, [a, b], lambda x, y: ops.div(x, y))
    check_integer_divisor(ctx, b)
    op = "floor_div" if rounding_mode == "floor" else "trunc_div"
    return elementwise(ctx, [a, b], lambda x, y: ops.call(op, x, y))


def check_integer_divisor(ctx: LoweringContext, b: Operand) -> None:
    """Eager raises for an integer divided by zero: only a known divisor is safe."""
    if not result_dtype(ctx).is_floating_point and not (isinstance(b, (int, float)) and b != 0):
        raise Unsupported("integer division by a tensor: eager raises for zero divisors")


@lower("aten.floor_divide")
def lower_floor_divide(ctx: LoweringContext, a: Operand, b: Operand) -> TensorBox:
    """Division rounded to -inf."""
    return lower_div(ctx, a, b, "floor")


@lower("aten.pow")
def lower_pow(ctx: LoweringContext, a: Operand, b: Operand) -> TensorBox:
    """Power; small constant exponents without a call."""
    if isinstance(b, (int, float)) and not isinstance(b, bool):
        special: dict[float, Body] = {
            2.0: lambda x: ops.mul(x, x), 3.0: lambda x: ops.mul(ops.mul(x, x), x), 1.0: lambda x: x,
        }  # fmt: skip
        if result_dtype(ctx).is_floating_point:
            special |= {0.5: lambda x: ops.sqrt(x), -0.5: lambda x: ops.rsqrt(x), -1.0: lambda x: ops.reciprocal(x),
                        -2.0: lambda x: ops.reciprocal(ops.mul(x, x))}  # fmt: skip
        if float(b) in special:
            return elementwise(ctx, [a], special[float(b)])
    return elementwise(ctx, [a, b], lambda x, y: ops.pow(x, y))


@lower("aten.where")
def lower_where(ctx: LoweringContext, condition: TensorBox, a: Operand, b: Operand) -> TensorBox:
    """a where condition, else b"""
    dtype = result_dtype(ctx)
    size = ctx.broadcast_sizes([ctx.size_of(o) for o in (condition, a, b)])
    cond = ctx.loader(condition, size, torch.bool)
    left, right = (ctx.loader(o, size, compute_dtype(dtype)) for o in (a, b))
    return ctx.pointwise(size, dtype, lambda i: ops.where(cond(i), left(i), right(i)), ctx.order_of_meta())


@lower("aten.clamp", "aten.clip")
def lower_clamp(ctx: LoweringContext, x: Operand, low: Operand | None = None, high: Operand | None = None) -> TensorBox:
    """min(max(x, low), high), NaN kept"""
    operands = [x] + [o for o in (low, high) if o is not None]

    def body(v: Value, *limits: Value) -> Value:
        rest = list(limits)
        if low is not None:
            v = ops.maximum(v, rest.pop(0))
        return ops.minimum(v, rest.pop(0)) if high is not None else v

    return elementwise(ctx, operands, body)


@lower("aten.clamp_min")
def lower_clamp_min(ctx: LoweringContext, x: Operand, low: Operand) -> TensorBox:
    """max(x, low)"""
    return elementwise(ctx, [x, low], lambda v, y: ops.maximum(v, y))


@lower("aten.clamp_max")
def lower_clamp_max(ctx: LoweringContext, x: Operand, high: Operand) -> TensorBox:
    """min(x, high)"""
    return elementwise(ctx, [x, high], lambda v, y: ops.minimum(v, y))


@lower("aten._to_copy", "prims.convert_element_type", "aten.to", "aten.clone", "aten.type_as", "aten.contiguous")
def lower_copy(ctx: LoweringContext, x: TensorBox, *args: Any, **kwargs: Any) -> TensorBox:
    """A copy, in the dtype that eager gives it; a user's cast is rounded even where the value is used directly."""
    if ctx.meta is ctx.arg_metas[0]:
        return x  # eager returns its argument
    dtype = result_dtype(ctx)
    size = ctx.size_of(x)
    load = ctx.loader(x, size, compute_dtype(dtype))
    return ctx.pointwise(size, dtype, lambda i: ops.round_to(load(i), dtype), ctx.order_of_meta())


@lower("aten.silu")
def lower_silu(ctx: LoweringContext, x: Operand) -> TensorBox:
    """x * sigmoid(x)"""
    return elementwise(ctx, [x], lambda v: ops.div(v, ops.add(ops.exp(ops.neg(v)), 1.0)))


@lower("aten.gelu")
def lower_gelu(ctx: LoweringContext, x: Operand, approximate: str = "none") -> TensorBox:
    """Gaussian error linear unit, exact or by tanh."""
    if approximate == "tanh":

        def by_tanh(v: Value) -> Value:
            cubic = ops.mul(ops.mul(ops.mul(v, v), v), 0.044715)
            inner = ops.mul(ops.add(v, cubic), 0.7978845608028654)
            return ops.mul(ops.mul(v, 0.5), ops.add(ops.tanh(inner), 1.0))

        return elementwise(ctx, [x], by_tanh)
    return elementwise(
        ctx, [x], lambda v: ops.mul(ops.mul(v, 0.5), ops.add(ops.erf(ops.mul(v, 0.7071067811865476)), 1.0))
    )
