"""Rows of exact ops: arithmetic, comparisons, bits, selection. Their results have eager's bits."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from fuser.ops.table import ALL, BOOL, FLOATS, INTS, SAME, OpRow

NUMBERS = (*FLOATS, *INTS)
WHOLE = (*INTS, *BOOL)


def by(
    floats: str | None = None, ints: str | None = None, bools: str | None = None
) -> Callable[[torch.dtype], str | None]:
    """A cell by family of dtypes."""
    return lambda d: floats if d.is_floating_point else bools if d is torch.bool else ints


def by_width(single: str, double: str) -> Callable[[torch.dtype], str | None]:
    """A cell by width of floats."""
    return lambda d: single if d is torch.float32 else double


def in_lanes(floats: str | None = None, flags: str | None = None) -> Callable[[torch.dtype], str | None]:
    """Vector templates for float32 and flags; for float64, if the scalar cell also works for vectors."""
    doubles = floats if floats == SAME else None
    return lambda d: {torch.float32: floats, torch.float64: doubles, torch.bool: flags}.get(d)


_BOTH = in_lanes(SAME, SAME)
_ALIKE = in_lanes(SAME)

_TRITON_ADD = ("({0} + {1})", "({0} + {1})", "({0} | {1})")
_TRITON_MUL = ("({0} * {1})", "({0} * {1})", "({0} & {1})")
_TRITON_MAX = ("tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)", "tl.maximum({0}, {1})", "({0} | {1})")
_TRITON_MIN = ("tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)", "tl.minimum({0}, {1})", "({0} & {1})")

_TRITON_DIV = by_width("tl.div_rn({0}, {1})", "({0} / {1})")  # Triton's / in float32 is 2 ulps off
_TRITON_NEG = "({0} * -1.0)"  # Triton's unary minus is 0 - x, which gives another zero


def _wrap(sign: str) -> str:
    return f"({{T}})(({{U}}){{0}} {sign} ({{U}}){{1}})"


# Eager raises for an integer divided by zero; the cells of divisions give 0, so a lowering has to know the divisor.
ARITHMETIC = (
    OpRow(
        "add", 2, torch.add, by("{0} + {1}", _wrap("+"), "{0} | {1}"), by(*_TRITON_ADD), sign="+", plain_nan=True,
        keeps_zero=True, lanes=_ALIKE,
    ),
    OpRow(
        "sub", 2, torch.sub, by("{0} - {1}", _wrap("-")), "({0} - {1})", NUMBERS, sign="-", plain_nan=True,
        lanes=_ALIKE,
    ),
    OpRow(
        "mul", 2, torch.mul, by("{0} * {1}", _wrap("*"), "{0} & {1}"), by(*_TRITON_MUL), sign="*", plain_nan=True,
        keeps_zero=True, lanes=_ALIKE,
    ),
    OpRow(
        "div", 2, torch.div, "{0} / {1}", _TRITON_DIV, FLOATS, cost=4, sign="/", plain_nan=True, lanes=_ALIKE,
        fast="({0} / {1})",
    ),
    OpRow(
        "floor_div", 2, torch.floor_divide, "fuser_floor_div_{D}({0}, {1})",
        lambda d: f"fuser_floor_div_{'int' if d in INTS else d.itemsize * 8}({{0}}, {{1}})", NUMBERS,
        cost=30, jumps=True, steep=True,
    ),
    OpRow(
        "trunc_div", 2, lambda a, b: torch.div(a, b, rounding_mode="trunc"),
        by("__builtin_trunc{f}({0} / {1})", "fuser_trunc_div_{D}({0}, {1})"),
        lambda d: "fuser_trunc_div_int({0}, {1})" if d in INTS else f"fuser_trunc({_TRITON_DIV(d)})", NUMBERS,
        cost=6, jumps=True, steep=True,
        lanes=in_lanes("FUSER_LANES_ROUND({0} / {1}, 3)"),
    ),
    OpRow(
        "remainder", 2, torch.remainder, "fuser_remainder_{D}({0}, {1})",
        by("fuser_remainder_float({0}, {1})", "fuser_remainder_int({0}, {1})"), NUMBERS,
        cost=30, ulps=0.5, jumps=True, steep=True,
    ),
    OpRow(
        "fmod", 2, torch.fmod, "fuser_fmod_{D}({0}, {1})",
        by("libdevice.fmod({0}, {1})", "fuser_fmod_int({0}, {1})"), NUMBERS,
        cost=30, ulps=0.5, jumps=True, steep=True,
    ),
    OpRow(
        "neg", 1, torch.neg, by("-{0}", "({T})(0 - ({U}){0})"), by(_TRITON_NEG, "(-{0})"), NUMBERS, selects=(0,),
        negates=True, lanes=_ALIKE,
    ),
    OpRow(
        "abs", 1, torch.abs,
        lambda d: "{0}" if d is torch.uint8 else by("__builtin_fabs{f}({0})", "fuser_abs_{D}({0})")(d),
        lambda d: "{0}" if d is torch.uint8 else "tl.abs({0})", NUMBERS, selects=(0,), keeps_zero=True,
        within=(0.0, math.inf), lanes=in_lanes("fuser_lanes_abs({0})"),
    ),
    OpRow(
        "sign", 1, torch.sign, "({T})(({0} > 0) - ({0} < 0))",
        "(({0} > 0).to({T}) - ({0} < 0).to({T}))", NUMBERS, cost=2, jumps=True, steep=True,
        lanes=in_lanes("fuser_lanes_number({0} < 0.0f) - fuser_lanes_number({0} > 0.0f)"),
    ),
    OpRow(
        "reciprocal", 1, torch.reciprocal, "1 / {0}", by_width("tl.div_rn(1.0, {0})", "(1.0 / {0})"), FLOATS, cost=4,
        plain_nan=True, lanes=in_lanes("1.0f / {0}"), fast="(1.0 / {0})",
    ),
    OpRow(
        "sqrt", 1, torch.sqrt, "__builtin_sqrt{f}({0})", by_width("tl.sqrt_rn({0})", "tl.sqrt({0})"), FLOATS,
        cost=5, domain=(0.0, 9.0), ulps=0.5, plain_nan=True, lanes=in_lanes("FUSER_LANES_SQRT({0})"),
        fast="tl.sqrt({0})",  # rounded correctly: eager's vector form is one ulp off at places
    ),
    OpRow(  # {0} * {1} + {2}, rounded once: eager's kernels say so as well
        "fma", 3, lambda a, b, c: torch.addcmul(c, a, b),
        by_width("FUSER_FMAF({0}, {1}, {2})", "__builtin_fma({0}, {1}, {2})"), "tl.fma({0}, {1}, {2})", FLOATS,
        cost=1, ulps=0.5, plain_nan=True, lanes=in_lanes("FUSER_LANES_FMA({0}, {1}, {2})"),
    ),
    OpRow("gcd", 2, torch.gcd, "fuser_gcd_{D}({0}, {1})", None, INTS, cost=60),
    OpRow("lcm", 2, torch.lcm, "fuser_lcm_{D}({0}, {1})", None, INTS, cost=60),
)  # fmt: skip

ROUNDING = tuple(
    OpRow(
        name, 1, eval, cell, triton, FLOATS, jumps=True, steep=True, keeps_integers=True, lanes=in_lanes(lanes)
    )
    for name, eval, cell, triton, lanes in (
        ("floor", torch.floor, "__builtin_floor{f}({0})", "tl.floor({0})", "FUSER_LANES_ROUND({0}, 1)"),
        ("ceil", torch.ceil, "__builtin_ceil{f}({0})", "tl.ceil({0})", "FUSER_LANES_ROUND({0}, 2)"),
        ("round", torch.round, "__builtin_rint{f}({0})", "libdevice.nearbyint({0})", "FUSER_LANES_ROUND({0}, 0)"),
        ("trunc", torch.trunc, "__builtin_trunc{f}({0})", "fuser_trunc({0})", "FUSER_LANES_ROUND({0}, 3)"),
        (
            "frac", torch.frac, "{0} - __builtin_trunc{f}({0})", "({0} - fuser_trunc({0}))",
            "{0} - FUSER_LANES_ROUND({0}, 3)",
        ),
    )
)

# Ties give the second argument of maximum and minimum, the first of fmax and fmin: the sign of a zero follows eager.
EXTREMES = (
    OpRow(
        "maximum", 2, torch.maximum, by("FUSER_EXTREME({0}, >, {1})", "{0} > {1} ? {0} : {1}", "{0} | {1}"),
        by(*_TRITON_MAX), cost=2, selects=(0, 1), wins=">", lanes=in_lanes("fuser_lanes_maximum({0}, {1})"),
    ),
    OpRow(
        "minimum", 2, torch.minimum, by("FUSER_EXTREME({0}, <, {1})", "{0} < {1} ? {0} : {1}", "{0} & {1}"),
        by(*_TRITON_MIN), cost=2, selects=(0, 1), wins="<", lanes=in_lanes("fuser_lanes_minimum({0}, {1})"),
    ),
    OpRow(
        "fmax", 2, torch.fmax, by("({0} >= {1}) | ({1} != {1}) ? {0} : {1}", "{0} > {1} ? {0} : {1}"),
        "tl.maximum({0}, {1})", NUMBERS, cost=2, selects=(0, 1), lanes=_ALIKE,
    ),
    OpRow(
        "fmin", 2, torch.fmin, by("({0} <= {1}) | ({1} != {1}) ? {0} : {1}", "{0} < {1} ? {0} : {1}"),
        "tl.minimum({0}, {1})", NUMBERS, cost=2, selects=(0, 1), lanes=_ALIKE,
    ),
    OpRow(
        "relu", 1, torch.relu, "{0} < 0 ? ({T})0 : {0}", "tl.where({0} < 0, 0, {0})", NUMBERS, selects=(0,),
        lanes=in_lanes("{0} < 0.0f ? (lanes_f){{}} : {0}"),
    ),
)  # fmt: skip

_INF = "__builtin_inf{f}()"
FLOAT_BITS = (
    OpRow("isnan", 1, torch.isnan, "{0} != {0}", "({0} != {0})", FLOATS, "bool", lanes=_ALIKE),
    OpRow(
        "isinf", 1, torch.isinf, f"__builtin_fabs{{f}}({{0}}) == {_INF}", "(tl.abs({0}) == float('inf'))",
        FLOATS, "bool", lanes=in_lanes("fuser_lanes_abs({0}) == __builtin_inff()"),
    ),
    OpRow(
        "isfinite", 1, torch.isfinite, f"__builtin_fabs{{f}}({{0}}) < {_INF}", "(tl.abs({0}) < float('inf'))",
        FLOATS, "bool", lanes=in_lanes("fuser_lanes_abs({0}) < __builtin_inff()"),
    ),
    OpRow(
        "signbit", 1, torch.signbit,
        by("FUSER_BITS({I}, {0}) < 0", "{0} < 0"),
        lambda d: f"({{0}}.to(tl.int{8 * d.itemsize}, bitcast=True) < 0)" if d.is_floating_point else "({0} < 0)",
        NUMBERS, "bool", lanes=in_lanes("(lanes_i){0} < 0"),
    ),
    OpRow(
        "frexp_fraction", 1, lambda x: torch.frexp(x).mantissa, "fuser_frexp_fraction_{D}({0})", None, FLOATS, cost=8,
        jumps=True,
    ),
    OpRow(
        "frexp_exponent", 1, lambda x: torch.frexp(x).exponent, "fuser_frexp_exponent_{D}({0})", None, FLOATS,
        torch.int32, cost=8,
    ),
    OpRow(
        "copysign", 2, torch.copysign, "__builtin_copysign{f}({0}, {1})", "libdevice.copysign({0}, {1})", FLOATS,
        jumps=True, selects=(0,), lanes=in_lanes("fuser_lanes_copysign({0}, {1})"),
    ),
    OpRow(
        "nextafter", 2, torch.nextafter, "fuser_nextafter_{D}({0}, {1})", "libdevice.nextafter({0}, {1})", FLOATS,
        cost=8, jumps=True, steep=True,
    ),
    OpRow(
        "heaviside", 2, torch.heaviside, "{0} == 0 ? {1} : ({T})({0} > 0)",
        "tl.where({0} == 0, {1}, ({0} > 0).to({T}))", NUMBERS, cost=3, jumps=True, steep=True,
        lanes=in_lanes("{0} == 0.0f ? {1} : 0.0f - fuser_lanes_number({0} > 0.0f)"),
    ),
)  # fmt: skip

COMPARISONS = tuple(
    OpRow(
        name, 2, eval, f"{{0}} {sign} {{1}}", f"({{0}} {sign} {{1}})", ALL, "bool", sign=sign, steep=True, lanes=_ALIKE
    )
    for name, eval, sign in (
        ("eq", torch.eq, "=="),
        ("ne", torch.ne, "!="),
        ("lt", torch.lt, "<"),
        ("le", torch.le, "<="),
        ("gt", torch.gt, ">"),
        ("ge", torch.ge, ">="),
    )
)

LOGICAL = (
    *(
        OpRow(
            name, 2, eval, f"({{0}} != 0) {sign} ({{1}} != 0)", f"(({{0}} != 0) {sign} ({{1}} != 0))", ALL, "bool",
            sign=sign, lanes=_BOTH,
        )
        for name, eval, sign in (
            ("logical_and", torch.logical_and, "&"),
            ("logical_or", torch.logical_or, "|"),
            ("logical_xor", torch.logical_xor, "^"),
        )
    ),
    OpRow(
        "logical_not", 1, torch.logical_not, by("{0} == 0", "{0} == 0", "!{0}"), "({0} == 0)", ALL, "bool", sign="!",
        lanes=in_lanes("{0} == 0.0f", "{0} == 0"),
    ),
    *(
        OpRow(
            name, 2, eval, by(None, f"({{T}})({{0}} {sign} {{1}})", f"{{0}} {sign} {{1}}"),
            f"({{0}} {sign} {{1}})", WHOLE, sign=sign, lanes=in_lanes(None, SAME),
        )
        for name, eval, sign in (
            ("bitwise_and", torch.bitwise_and, "&"),
            ("bitwise_or", torch.bitwise_or, "|"),
            ("bitwise_xor", torch.bitwise_xor, "^"),
        )
    ),
    OpRow(
        "bitwise_not", 1, torch.bitwise_not, by(None, "({T})~{0}", "!{0}"), by(None, "(~{0})", "({0} == 0)"), WHOLE,
        sign="~", lanes=in_lanes(None, "{0} == 0"),
    ),
    OpRow("lshift", 2, torch.bitwise_left_shift, "fuser_lshift_{D}({0}, {1})", "fuser_lshift({0}, {1})", INTS, cost=3),
    OpRow("rshift", 2, torch.bitwise_right_shift, "fuser_rshift_{D}({0}, {1})", "fuser_rshift({0}, {1})", INTS, cost=3),
)  # fmt: skip

SELECTION = (
    # g++ vectorises logic, but not a selection between bools.
    OpRow(
        "where", 3, torch.where, by("{0} ? {1} : {2}", "{0} ? {1} : {2}", "({0} & {1}) | (!{0} & {2})"),
        "tl.where({0}, {1}, {2})", signature="btt", selects=(1, 2), lanes=_BOTH,
    ),
)

ROWS = (*ARITHMETIC, *ROUNDING, *EXTREMES, *FLOAT_BITS, *COMPARISONS, *LOGICAL, *SELECTION)
