"""Elementwise arithmetic: tables of names first, then the operators that need a function of their own."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fuser.errors import Unsupported
from fuser.ir.loop_body import LOW_PRECISION, Value, compute_dtype, ops
from fuser.ir.nodes import Index, TensorBox
from fuser.ir.sizes import ONE, ZERO, Expr
from fuser.lowering import demands
from fuser.lowering.context import LoweringContext, Operand, Scalar
from fuser.lowering.entries import DECISIVE, EVERY, LOWERINGS, lower, refuse
from fuser.ops import OPS
from fuser.reasons import because

# ATen operator: op of the table. Computed in the result's dtype.
UNARY = {
    "abs": "abs", "neg": "neg", "sign": "sign", "sgn": "sign", "reciprocal": "reciprocal", "sqrt": "sqrt",
    "rsqrt": "rsqrt",
    "exp": "exp", "exp2": "exp2", "expm1": "expm1", "log": "log", "log2": "log2", "log10": "log10", "log1p": "log1p",
    "sin": "sin", "cos": "cos", "tan": "tan", "asin": "asin", "acos": "acos", "atan": "atan", "sinh": "sinh",
    "cosh": "cosh", "tanh": "tanh", "asinh": "asinh", "acosh": "acosh", "atanh": "atanh", "erf": "erf", "erfc": "erfc",
    "erfinv": "erfinv", "lgamma": "lgamma", "digamma": "digamma", "i0": "i0", "special_i0e": "i0e",
    "special_i1": "i1", "special_i1e": "i1e", "special_bessel_j0": "j0", "special_bessel_j1": "j1",
    "special_bessel_y0": "y0", "special_bessel_y1": "y1", "special_ndtri": "ndtri", "special_log_ndtr": "log_ndtr",
    "special_entr": "entr", "sigmoid": "sigmoid", "floor": "floor", "ceil": "ceil", "trunc": "trunc", "frac": "frac",
    "bitwise_not": "bitwise_not", "relu": "relu", "special_erfcx": "erfcx", "special_airy_ai": "airy_ai",
    "special_spherical_bessel_j0": "spherical_bessel_j0", "special_modified_bessel_i0": "i0",
    "special_modified_bessel_i1": "i1", "special_modified_bessel_k0": "k0", "special_modified_bessel_k1": "k1",
    "special_scaled_modified_bessel_k0": "k0e", "special_scaled_modified_bessel_k1": "k1e",
}  # fmt: skip
BINARY = {
    "maximum": "maximum", "minimum": "minimum", "fmax": "fmax", "fmin": "fmin", "atan2": "atan2", "hypot": "hypot",
    "bitwise_and": "bitwise_and", "bitwise_or": "bitwise_or", "bitwise_xor": "bitwise_xor", "copysign": "copysign",
    "gcd": "gcd", "lcm": "lcm", "logaddexp": "logaddexp", "logaddexp2": "logaddexp2", "heaviside": "heaviside",
    **{
        f"special_{kind}_polynomial_{letter}": f"{kind}_polynomial_{letter}"
        for kind, letters in (
            ("chebyshev", "tuvw"), ("shifted_chebyshev", "tuvw"), ("hermite", ("h", "he")), ("laguerre", "l"),
            ("legendre", "p"),
        )
        for letter in letters
    },
    "xlogy": "xlogy", "special_xlog1py": "xlog1py", "bitwise_left_shift": "lshift",
    "bitwise_right_shift": "rshift", "__lshift__": "lshift", "__rshift__": "rshift", "special_zeta": "zeta",
}  # fmt: skip
# Integers divided by zero raise in eager.
DIVIDING = {"fmod": "fmod", "remainder": "remainder"}
COMPARE = {"eq": "eq", "ne": "ne", "lt": "lt", "le": "le", "gt": "gt", "ge": "ge"}
TESTS = {"isnan": "isnan", "isinf": "isinf", "isfinite": "isfinite", "signbit": "signbit"}  # the result is bool
LOGICAL = {"logical_and": "logical_and", "logical_or": "logical_or", "logical_xor": "logical_xor"}
OF_BOOLS = {"fmax": "maximum", "fmin": "minimum", "heaviside": "maximum"}  # their equivalents for bool

Body = Callable[..., Value]


def result_dtype(ctx: LoweringContext) -> torch.dtype:
    """The dtype of the node's result in eager."""
    dtype: torch.dtype = ctx.meta.dtype
    return dtype


def elementwise(
    ctx: LoweringContext, operands: Sequence[Operand], body: Body, dtype: torch.dtype | None = None,
    compute: torch.dtype | None = None, cast: bool = False, ordered: bool = True,
) -> TensorBox:  # fmt: skip
    """`body(*values)` over the broadcast operands, all converted to `compute` (the result's dtype if None).

    `cast`: operands of other dtypes are rounded to `compute`, where eager casts them before computing. Otherwise a
    number is a float32 in 16-bit arithmetic. `ordered`: the result is stored in eager's memory order.
    """
    dtype = dtype if dtype is not None else result_dtype(ctx)
    compute = compute if compute is not None else dtype
    size = ctx.broadcast_sizes([ctx.size_of(o) for o in operands])
    wide = compute_dtype(compute)
    loaders = [cast_loader(ctx, o, size, compute) if cast else ctx.loader(o, size, wide) for o in operands]

    def inner(index: Index) -> Value:
        return body(*(load(index) for load in loaders))

    return ctx.pointwise(size, dtype, inner, ctx.order_of_meta() if ordered else None)


def cast_loader(
    ctx: LoweringContext, operand: Operand, size: Sequence[Expr], dtype: torch.dtype
) -> Callable[[Index], Value]:
    """A loader of the operand as eager casts it to `dtype`: rounded to 16 bits, unless it has that dtype."""
    if isinstance(operand, (int, float)) and dtype in LOW_PRECISION:
        rounded = float(torch.tensor(float(operand), dtype=torch.float64).to(dtype))
        return ctx.loader(rounded, size, compute_dtype(dtype))
    load = ctx.loader(operand, size, compute_dtype(dtype))
    if dtype not in LOW_PRECISION or (isinstance(operand, TensorBox) and operand.dtype is dtype):
        return load
    return lambda index: ops.round_to(load(index), dtype)


def common_dtype(ctx: LoweringContext) -> torch.dtype:
    """The dtype to which torch promotes the node's first two operands."""
    metas: list[Any] = [m for m in ctx.arg_metas if isinstance(m, (torch.Tensor, int, float, bool))][:2]
    if not any(isinstance(m, torch.Tensor) for m in metas):
        raise Unsupported("an elementwise operator without a tensor")
    return torch.result_type(metas[0], metas[1]) if len(metas) == 2 else metas[0].dtype


def is_known(value: Any) -> bool:
    """Whether an operand is a number known when the graph is registered."""
    return isinstance(value, (int, float))


def _unary(name: str) -> Callable[..., TensorBox]:
    def fn(ctx: LoweringContext, x: Operand) -> TensorBox:
        dtype = result_dtype(ctx)
        if dtype in OPS[name].inexact:
            raise Unsupported("eager's own values in float64 are accurate to 1e-6 only, and kernels' differ")
        if dtype is torch.bool and OPS[name].keeps_integers or name == "frac" and not dtype.is_floating_point:
            raise demands.refused(f"{name} of {dtype}: eager has none")
        if (OPS[name].keeps_integers and not dtype.is_floating_point) or (name == "sign" and dtype is torch.bool):
            return elementwise(ctx, [x], lambda v: v)
        return elementwise(ctx, [x], lambda v: ops.call(name, v))

    return fn


def _binary(name: str) -> Callable[..., TensorBox]:
    def fn(ctx: LoweringContext, a: Operand, b: Operand) -> TensorBox:
        if result_dtype(ctx) is torch.bool and name in OF_BOOLS:
            return elementwise(ctx, [a, b], lambda x, y: ops.call(OF_BOOLS[name], x, y), cast=True)
        if name == "heaviside":
            demands.same_dtypes(*(t for t in (a, b) if isinstance(t, TensorBox)))
        if name in ("fmax", "fmin") and result_dtype(ctx) is torch.bfloat16:
            a, b = b, a  # decides which of two zeros is returned
        return elementwise(ctx, [a, b], lambda x, y: ops.call(name, x, y), cast=True)

    return fn


def _dividing(name: str) -> Callable[..., TensorBox]:
    def fn(ctx: LoweringContext, a: Operand, b: Operand) -> TensorBox:
        return dividing(ctx, a, b, name, cast=True)

    return fn


def _compare(name: str) -> Callable[..., TensorBox]:
    def fn(ctx: LoweringContext, a: Operand, b: Operand) -> TensorBox:
        return elementwise(ctx, [a, b], lambda x, y: ops.call(name, x, y), torch.bool, common_dtype(ctx), cast=True)

    return fn


def _test(name: str) -> Callable[..., TensorBox]:
    def fn(ctx: LoweringContext, a: TensorBox) -> TensorBox:
        if a.dtype is torch.bool or (name != "signbit" and not a.dtype.is_floating_point):
            return elementwise(ctx, [a], lambda x: ops.constant(name == "isfinite", torch.bool), torch.bool, a.dtype)
        return elementwise(ctx, [a], lambda x: ops.call(name, x), torch.bool, a.dtype)

    return fn


def _logical(name: str) -> Callable[..., TensorBox]:
    def fn(ctx: LoweringContext, a: TensorBox, b: TensorBox) -> TensorBox:
        common = common_dtype(ctx)
        if all(torch.promote_types(x.dtype, common) is common for x in (a, b)):
            return elementwise(ctx, [a, b], lambda x, y: ops.call(name, x, y), torch.bool, torch.bool)
        # A 0-dim operand is cast to the common dtype first, where a nonzero value may become zero: 256 as a byte.
        return elementwise(
            ctx, [a, b], lambda x, y: ops.call(name, ops.ne(x, 0), ops.ne(y, 0)), torch.bool, common, cast=True
        )

    return fn


_MAKERS = (
    (UNARY, _unary), (BINARY, _binary), (DIVIDING, _dividing), (COMPARE, _compare), (TESTS, _test), (LOGICAL, _logical),
)  # fmt: skip
for _table, _make in _MAKERS:
    for _aten, _op in _table.items():
        if _op in OPS:
            LOWERINGS[f"aten.{_aten}"] = _make(_op)
            if OPS[_op].decides:
                DECISIVE[f"aten.{_aten}"] = EVERY
        else:
            refuse(f"the table of scalar ops has no {_op}", f"aten.{_aten}")

lower_maximum, lower_minimum = LOWERINGS["aten.maximum"], LOWERINGS["aten.minimum"]


@lower("aten.positive")
def lower_itself(ctx: LoweringContext, x: TensorBox) -> TensorBox:
    """The tensor itself, as in eager."""
    return x


@lower("aten.conj_physical", "aten._conj_physical")
def lower_conj_physical(ctx: LoweringContext, x: TensorBox) -> TensorBox:
    """A copy."""
    return elementwise(ctx, [x], lambda v: v)


@lower("aten.logical_not", decisive=EVERY)
def lower_logical_not(ctx: LoweringContext, x: TensorBox) -> TensorBox:
    """Logical not of the value as bool."""
    return elementwise(ctx, [x], lambda v: ops.logical_not(v), torch.bool, torch.bool)


# -- arithmetic --------------------------------------------------------------------------------------------------------
@lower("aten.add", "aten.sub", "aten.rsub")
def lower_add(ctx: LoweringContext, a: Operand, b: Operand, alpha: Any = 1) -> TensorBox:
    """a + alpha * b, a - alpha * b, b - alpha * a"""
    dtype = result_dtype(ctx)
    op = "add" if ctx.op == "aten.add" else "sub"
    if ctx.op == "aten.rsub":
        a, b = b, a
    cast = ctx.numerics == "eager"  # eager rounds a number to a 16-bit float before computing
    if is_known(alpha) and alpha == 1:
        return elementwise(ctx, [a, b], lambda x, y: ops.call(op, x, y), cast=cast)
    if not dtype.is_floating_point and isinstance(alpha, (Scalar, float)):
        raise Unsupported(because("eager_raises", "eager raises for a float alpha of integers"))
    if dtype.is_floating_point:  # with one rounding, as in eager's vectorised code
        fused: Callable[..., Value] = lambda x, y, s: ops.fma(y, s if op == "add" else ops.neg(s), x)  # noqa: E731
        return elementwise(ctx, [a, b, alpha], fused, cast=cast)
    return elementwise(ctx, [a, b, alpha], lambda x, y, s: ops.call(op, x, ops.mul(y, s)))


@lower("aten.mul")
def lower_mul(ctx: LoweringContext, a: Operand, b: Operand) -> TensorBox:
    """a * b"""
    return elementwise(ctx, [a, b], lambda x, y: ops.mul(x, y))


@lower("aten.div")
def lower_div(ctx: LoweringContext, a: Operand, b: Operand, rounding_mode: str | None = None) -> TensorBox:
    """Division: true, or rounded to -inf ("floor") or to zero ("trunc")."""
    if rounding_mode is None:
        return elementwise(ctx, [a, b], lambda x, y: ops.div(x, y))
    return dividing(ctx, a, b, "floor_div" if rounding_mode == "floor" else "trunc_div")


def dividing(ctx: LoweringContext, a: Operand, b: Operand, op: str, cast: bool = False) -> TensorBox:
    """An integral division. Eager raises for an integer divided by zero: the kernel reports such a call."""
    whole = not result_dtype(ctx).is_floating_point
    divisor = b.as_int() if isinstance(b, Expr) else b
    if whole and divisor is None:
        ctx.assume("ne", b, ZERO)  # type: ignore[arg-type]
    elif whole and not isinstance(divisor, TensorBox) and (not is_known(divisor) or divisor == 0):
        raise Unsupported(because("eager_raises", f"an integer divided by {divisor!r}: eager raises"))

    def body(x: Value, y: Value) -> Value:
        if whole and isinstance(b, TensorBox):
            x = ensured(x, ops.ne(y, 0))
        return ops.call(op, x, y)

    return elementwise(ctx, [a, b], body, cast=cast)


def ensured(value: Value, condition: Value) -> Value:
    """`value`. A call in which some `condition` is False is reported, and runs in eager, which raises."""
    flag = ops.where(condition, ops.constant(0, torch.int64), ops.constant(1, torch.int64))
    zero = ops.index_expr(ops.indirect(flag, ONE))
    return ops.add(value, ops.to_dtype(zero, value.dtype))


def in_unit_interval(value: Value) -> Value:
    """`value`. A call in which it is outside [0, 1], or NaN, is reported."""
    return ensured(value, ops.logical_and(ops.ge(value, 0.0), ops.le(value, 1.0)))


@lower("aten.floor_divide", decisive=EVERY)
def lower_floor_divide(ctx: LoweringContext, a: Operand, b: Operand) -> TensorBox:
    """Division rounded to -inf."""
    return lower_div(ctx, a, b, "floor")


@lower("aten.round", decisive=EVERY)
def lower_round(ctx: LoweringContext, x: Operand, decimals: int = 0) -> TensorBox:
    """To the nearest integer, ties to even; or to a number of decimals."""
    dtype = result_dtype(ctx)
    if dtype is torch.bool or decimals and not dtype.is_floating_point:
        raise demands.refused(f"round of {dtype}, to {decimals} decimals")
    if not dtype.is_floating_point:
        return elementwise(ctx, [x], lambda v: v)
    if decimals == 0:
        return elementwise(ctx, [x], lambda v: ops.round(v))
    ten = 10.0 ** abs(int(decimals))
    if decimals > 0:
        return elementwise(ctx, [x], lambda v: ops.div(ops.round(ops.mul(v, ten)), ten))
    return elementwise(ctx, [x], lambda v: ops.mul(ops.round(ops.div(v, ten)), ten))


# Exponents that eager computes by products or roots; of these, the only ones that keep the bits of eager's results.
SMALL_POWERS: dict[float, Body] = {
    1.0: lambda x: x, 2.0: lambda x: ops.mul(x, x), 3.0: lambda x: ops.mul(ops.mul(x, x), x),
}  # fmt: skip
FLOAT_POWERS: dict[float, Body] = SMALL_POWERS | {
    0.5: lambda x: ops.sqrt(x), -0.5: lambda x: ops.rsqrt(x), -1.0: lambda x: ops.reciprocal(x),
    -2.0: lambda x: ops.reciprocal(ops.mul(x, x)),
}  # fmt: skip
# For float16 eager calls pow, whose square root of -inf is inf, and of -0.0 is 0.0.
HALF_POWERS: dict[float, Body] = FLOAT_POWERS | {
    0.5: lambda x: _root(x), -0.5: lambda x: ops.reciprocal(_root(x)),
}  # fmt: skip


def _root(x: Value) -> Value:
    return ops.where(ops.eq(x, -math.inf), ops.constant(math.inf, x.dtype), ops.sqrt(ops.add(x, 0.0)))


@lower("aten.pow")
def lower_pow(ctx: LoweringContext, a: Operand, b: Operand) -> TensorBox:
    """Power; small constant exponents without calling pow."""
    whole = not result_dtype(ctx).is_floating_point
    if whole and isinstance(b, Expr):
        ctx.assume("le", ZERO, b)
    if is_known(b):
        if whole and b < 0:  # type: ignore[operator]
            raise Unsupported(because("eager_raises", "integers to a negative power: eager raises"))
        half = result_dtype(ctx) is torch.float16
        powers = SMALL_POWERS if whole else HALF_POWERS if half else FLOAT_POWERS
        known = powers.get(float(b))  # type: ignore[arg-type]
        if known is not None:
            return elementwise(ctx, [a], known)
    return elementwise(ctx, [a, b], lambda x, y: ops.pow(x, y))


@lower("aten.float_power")
def lower_float_power(ctx: LoweringContext, a: Operand, b: Operand) -> TensorBox:
    """Power in float64."""
    return lower_pow(ctx, a, b)


@lower("aten.square")
def lower_square(ctx: LoweringContext, x: Operand) -> TensorBox:
    """x * x"""
    return elementwise(ctx, [x], lambda v: ops.mul(v, v))


@lower("aten.addcmul", "aten.addcdiv")
def lower_addcmul(ctx: LoweringContext, x: Operand, a: Operand, b: Operand, value: Any = 1) -> TensorBox:
    """x + value * a * b, x + value * a / b"""
    times = ctx.op == "aten.addcmul"
    if not times and not any(isinstance(t, TensorBox) and t.dtype.is_floating_point for t in (a, b)):
        raise Unsupported(because("eager_raises", "addcdiv of integers: eager raises"))
    scaled = not (is_known(value) and value == 1)

    def body(v: Value, y: Value, z: Value, s: Value) -> Value:
        y = ops.mul(s, y) if scaled else y
        if times and y.dtype.is_floating_point:
            return ops.fma(y, z, v)
        return ops.add(v, ops.mul(y, z) if times else ops.div(y, z))

    return elementwise(ctx, [x, a, b, value], body)


@lower("prims.fma")
def lower_fma(ctx: LoweringContext, a: Operand, b: Operand, c: Operand) -> TensorBox:
    """a * b + c; the compiler contracts it if the machine can."""
    return elementwise(ctx, [a, b, c], lambda x, y, z: ops.add(ops.mul(x, y), z))


@lower("aten.lerp")
def lower_lerp(ctx: LoweringContext, a: Operand, b: Operand, weight: Operand) -> TensorBox:
    """a + weight * (b - a), computed from the nearer end."""

    def body(x: Value, y: Value, w: Value) -> Value:
        gap = ops.sub(y, x)
        near = ops.fma(w, gap, x)
        far = ops.fma(ops.neg(gap), ops.sub(ops.constant(1, w.dtype), w), y)
        return ops.where(ops.lt(ops.abs(w), 0.5), near, far)

    return elementwise(ctx, [a, b, weight], body)


@lower("aten.ldexp")
def lower_ldexp(ctx: LoweringContext, x: Operand, exponent: Operand) -> TensorBox:
    """x * 2^exponent; exact for floats and integer exponents if torch's is, else a power and a product."""
    scales = [isinstance(t, TensorBox) and t.dtype.is_floating_point for t in (x, exponent)] == [True, False]
    if not isinstance(exponent, TensorBox) or not scales or not _scales_exactly():
        return elementwise(ctx, [x, exponent], ops.ldexp)
    if exponent.dtype is torch.bool:
        raise Unsupported(because("eager_raises", "ldexp by truth values: eager raises"))
    wide = compute_dtype(result_dtype(ctx))
    size = ctx.broadcast_sizes([ctx.size_of(x), ctx.size_of(exponent)])
    load, load_exponent = ctx.loader(x, size, wide), ctx.loader(exponent, size, torch.int64)
    return ctx.pointwise(
        size, result_dtype(ctx), lambda i: _scaled(load(i), load_exponent(i), wide), ctx.order_of_meta()
    )


def _scaled(x: Value, exponent: Value, dtype: torch.dtype) -> Value:
    """x * 2^exponent in three steps, the largest last, so that only it may round. Eager's exponent has 32 bits."""
    most = -math.frexp(torch.finfo(dtype).tiny)[1] + 1  # the smallest normal number is 2^-most
    left = ops.rshift(ops.lshift(exponent, 32), 32)
    steps = []
    for _ in range(3):
        step = ops.maximum(ops.minimum(left, most), -most)
        steps.append(ops.to_dtype(step, dtype))
        left = ops.sub(left, step)
    for step in reversed(steps):
        x = ops.ldexp(x, step)
    return x


@functools.cache
def _scales_exactly() -> bool:
    """Whether torch's `ldexp` scales by integers. Older versions multiply by a power of 2, which may be infinite."""
    return float(torch.ldexp(torch.zeros(1), torch.tensor([5000]))) == 0


@lower("aten.nextafter", decisive=EVERY)
def lower_nextafter(ctx: LoweringContext, a: Operand, b: Operand) -> TensorBox:
    """The next number towards b."""
    if result_dtype(ctx) in LOW_PRECISION:
        raise Unsupported("nextafter of a 16-bit float: kernels compute in float32")
    return elementwise(ctx, [a, b], lambda x, y: ops.nextafter(x, y))


# -- functions by composition ------------------------------------------------------------------------------------------
def _factor(value: float) -> Callable[..., TensorBox]:
    return lambda ctx, x: elementwise(ctx, [x], lambda v: ops.mul(v, value))


LOWERINGS["aten.deg2rad"] = _factor(math.pi / 180)
LOWERINGS["aten.rad2deg"] = _factor(180 / math.pi)


@lower("aten.isposinf", "aten.isneginf", decisive=EVERY)
def lower_isposinf(ctx: LoweringContext, x: TensorBox) -> TensorBox:
    """Whether the element is that infinity."""
    infinite = math.inf if ctx.op == "aten.isposinf" else -math.inf
    if not x.dtype.is_floating_point:
        return elementwise(ctx, [x], lambda v: ops.constant(False, torch.bool), torch.bool, x.dtype)
    return elementwise(ctx, [x], lambda v: ops.eq(v, infinite), torch.bool, x.dtype)


@lower("aten.isreal", decisive=EVERY)
def lower_isreal(ctx: LoweringContext, x: TensorBox) -> TensorBox:
    """True"""
    return elementwise(ctx, [x], lambda v: ops.constant(True, torch.bool), torch.bool, x.dtype)


@lower("aten.isclose", decisive=EVERY)
def lower_isclose(
    ctx: LoweringContext, a: TensorBox, b: TensorBox, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> TensorBox:
    """|a - b| <= atol + |rtol * b|, or equal"""
    if not a.dtype.is_floating_point:
        raise Unsupported("isclose of integers")

    def body(x: Value, y: Value) -> Value:
        gap = ops.abs(ops.sub(x, y))
        near = ops.le(gap, ops.add(ops.abs(ops.mul(y, float(rtol))), float(atol)))
        out = ops.logical_or(ops.eq(x, y), ops.logical_and(ops.isfinite(gap), near))
        return ops.logical_or(out, ops.logical_and(ops.isnan(x), ops.isnan(y))) if equal_nan else out

    return elementwise(ctx, [a, b], body, torch.bool, a.dtype)


@lower("aten.angle", decisive=EVERY)
def lower_angle(ctx: LoweringContext, x: TensorBox) -> TensorBox:
    """0, or pi for negative numbers, or NaN for NaN."""

    def body(v: Value) -> Value:
        turned = ops.where(ops.lt(v, 0), ops.constant(math.pi, v.dtype), ops.constant(0, v.dtype))
        return ops.where(ops.isnan(v), v, turned)

    return elementwise(ctx, [x], body)


@lower("aten.sinc")
def lower_sinc(ctx: LoweringContext, x: Operand) -> TensorBox:
    """sin(pi x) / (pi x), 1 at 0"""

    def body(v: Value) -> Value:
        turn = ops.mul(v, math.pi)
        return ops.where(ops.eq(v, 0), ops.constant(1, v.dtype), ops.div(ops.sin(turn), turn))

    return elementwise(ctx, [x], body)


@lower("aten.special_ndtr")
def lower_ndtr(ctx: LoweringContext, x: Operand) -> TensorBox:
    """The normal distribution function."""

    return elementwise(ctx, [x], lambda v: ops.call("half_erfc", ops.mul(v, -math.sqrt(0.5))))


@lower("aten.polygamma")
def lower_polygamma(ctx: LoweringContext, n: int, x: TensorBox) -> TensorBox:
    """The nth derivative of digamma."""
    if n == 0:
        return elementwise(ctx, [x], lambda v: ops.digamma(v))
    if n == 1:
        return elementwise(ctx, [x], _trigamma)
    factor = math.factorial(n) * (1.0 if n % 2 else -1.0)
    return elementwise(
        ctx, [x], lambda v: ops.mul(ops.zeta(ops.constant(n + 1, v.dtype), v), factor)
    )  # fmt: skip


def _trigamma(x: Value) -> Value:
    """Below 1/2 by reflection. As in eager, the sine is not exactly zero at integers."""
    sine = ops.sin(ops.mul(x, math.pi))
    low = ops.lt(x, 0.5)
    turned = ops.div(ops.constant(math.pi**2, x.dtype), ops.mul(sine, sine))
    value = ops.call("trigamma_right", ops.where(low, ops.sub(ops.constant(1, x.dtype), x), x))
    return ops.where(low, ops.sub(turned, value), value)


@lower("aten.mvlgamma")
def lower_mvlgamma(ctx: LoweringContext, x: TensorBox, p: int) -> TensorBox:
    """log of the multivariate gamma function: a sum of p log gammas"""
    if x.dtype is torch.bool:
        raise demands.refused("mvlgamma of bools")

    def body(v: Value) -> Value:
        total = ops.lgamma(ops.add(v, 0.5 - p / 2))
        for j in range(1, p):
            total = ops.add(total, ops.lgamma(ops.add(v, 0.5 - p / 2 + j / 2)))
        return ops.add(total, p * (p - 1) * math.log(math.pi) / 4)

    return elementwise(ctx, [x], body)


@lower("aten.frexp", decisive=EVERY)
def lower_frexp(ctx: LoweringContext, x: TensorBox) -> tuple[TensorBox, TensorBox]:
    """A fraction in [1/2, 1) and a power of two whose product is `x`."""
    size = ctx.size_of(x)
    load = ctx.loader(x, size, compute_dtype(x.dtype))
    return (
        ctx.pointwise(size, x.dtype, lambda i: ops.frexp_fraction(load(i)), ctx.order_of_meta(0)),
        ctx.pointwise(size, torch.int32, lambda i: ops.frexp_exponent(load(i)), ctx.order_of_meta(1)),
    )


refuse(because("left_to_aten", "no scalar code for this function: left to ATen"), "aten.igamma", "aten.igammac")
refuse(because("dtype", "its result is complex"), "aten.complex", "aten.polar", "aten.view_as_complex", "aten._fft_r2c")
refuse(
    because("no_tensor", "it returns a Python number"),
    "aten.equal", "aten.allclose", "aten.item", "aten._local_scalar_dense",
    "aten.is_nonzero",
)  # fmt: skip
