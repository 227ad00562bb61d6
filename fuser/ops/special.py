"""Rows of transcendental and special functions, accurate to a few units in the last place."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch

from fuser.errors import Unsupported
from fuser.ops.pointwise import by_width, in_lanes
from fuser.ops.table import FLOATS, INTS, Cell, Near, OpRow
from fuser.reasons import because

_POSITIVE, _UNIT = (0.0, math.inf), (0.0, 1.0)


def _unary(
    name: str, eval: Callable[..., torch.Tensor], domain: tuple[float, float] = (-4.0, 4.0), triton: Cell = None,
    cost: int = 20, ulps: float = 2.0, **traits: Any,
) -> OpRow:  # fmt: skip
    """The row of a function with its own helper for each width."""
    triton = triton or f"libdevice.{name}({{0}})"
    return OpRow(
        name, 1, eval, f"fuser_{name}_{{D}}({{0}})", triton, FLOATS, cost=cost, domain=domain, ulps=ulps, **traits
    )  # fmt: skip


def _own(*args: Any, **traits: Any) -> OpRow:
    """The row of a function whose helpers are straight-line code of the package, for scalars and for vectors."""
    return _in_vectors(_unary(*args, plain_nan=True, inline=True, **traits))


def _in_vectors(row: OpRow) -> OpRow:
    return dataclasses.replace(row, lanes=in_lanes(f"fuser_lanes_{row.name}_f32({{0}})"))


_EXP2 = "libdevice.exp2({0} * 1.4426950408889634)"
ELEMENTARY = (
    OpRow(
        "rsqrt", 1, torch.rsqrt, "1 / __builtin_sqrt{f}({0})", by_width("tl.rsqrt({0})", "(1.0 / tl.sqrt({0}))"),
        FLOATS, cost=8, domain=(0.0, 9.0), ulps=2.0, lanes=in_lanes("1.0f / FUSER_LANES_SQRT({0})"),
    ),
    _own(
        "exp", torch.exp, (-90.0, 90.0), cost=10, exponential=True, within=_POSITIVE, fast=_EXP2,
        near=Near(-math.inf, 0.0, "exp_below_f32", _UNIT),
    ),
    _own(  # for arguments of at most 0, or NaN
        "exp_down", torch.exp, (-87.0, 0.0), "libdevice.exp({0})", 9, exponential=True, within=_UNIT, fast=_EXP2
    ),
    _own(
        "exp2", torch.exp2, (-130.0, 130.0), by_width("tl.exp2({0})", "libdevice.exp2({0})"), 10, within=_POSITIVE
    ),
    _own("expm1", torch.expm1, (-20.0, 90.0), cost=12),
    _own("log", torch.log, (0.0, 9.0), cost=10, fast="tl.log({0})"),
    _own("log2", torch.log2, (0.0, 9.0), cost=10, fast="tl.log2({0})"),
    _own("log10", torch.log10, (0.0, 9.0)),
    _own("log1p", torch.log1p, (-1.0, 9.0), cost=12, near=Near(0.0, 1.0, "log1p_unit_f32", (0.0, 0.6931472))),
    _in_vectors(_unary("sin", torch.sin, (-90.0, 90.0), inline=True)),
    _in_vectors(_unary("cos", torch.cos, (-90.0, 90.0), inline=True)),
    _unary("tan", torch.tan, (-90.0, 90.0)),
    _own("asin", torch.asin, (-1.0, 1.0)),
    _own("acos", torch.acos, (-1.0, 1.0)),
    _own("atan", torch.atan),
    _own("sinh", torch.sinh, (-90.0, 90.0)),
    _own("cosh", torch.cosh, (-90.0, 90.0)),
    _own(
        "tanh", torch.tanh, (-10.0, 10.0), by_width("fuser_tanh({0})", "libdevice.tanh({0})"), 15,
        fast="fuser_tanh_fast({0})",
    ),
    _own("asinh", torch.asinh, (-90.0, 90.0)),
    _own("acosh", torch.acosh, (1.0, 90.0)),
    _own("atanh", torch.atanh, (-1.0, 1.0)),
    _own(
        "sigmoid", torch.sigmoid, (-90.0, 90.0), by_width("fuser_sigmoid({0})", "(1.0 / (1.0 + libdevice.exp(-{0})))"),
        14, within=_UNIT, fast="libdevice.fast_dividef(1.0, 1.0 + libdevice.exp2({0} * -1.4426950408889634))",
    ),
    _own("erf", torch.erf, (-5.0, 5.0), fast="fuser_erf_fast({0})"),
    _unary("erfc", torch.erfc, (-5.0, 11.0)),
    _own(  # with the absolute error of 1 + erf, as gelu needs
        "normal_cdf", torch.special.ndtr, (0.0, 8.0), "(0.5 + 0.5 * libdevice.erf(0.7071067811865476 * {0}))",
        within=_UNIT, fast="fuser_normal_cdf_fast({0})",
    ),
    # Of rounded arguments, as in ndtr, where a tail's digits are lost: at most 4.5 ulps.
    _own(
        "half_erfc", lambda x: 0.5 * torch.erfc(x), (-4.0, 11.0), "(0.5 * libdevice.erfc({0}))", 25, 5.0
    ),
)  # fmt: skip
BINARY = (
    OpRow(
        "pow", 2, torch.pow, "fuser_pow_{D}({0}, {1})",
        lambda d: "libdevice.pow({0}, {1})" if d.is_floating_point else None, (*FLOATS, *INTS), cost=40, ulps=2.0,
    ),
    *(
        OpRow(
            name, 2, eval, f"fuser_{name}_{{D}}({{0}}, {{1}})", triton, FLOATS, cost=cost, ulps=2.0, text=text
        )
        for name, eval, triton, cost, text in (
            ("hypot", torch.hypot, "libdevice.hypot({0}, {1})", 15, ""),
            ("logaddexp", torch.logaddexp, "fuser_logaddexp({0}, {1})", 30, "special_cpp"),
            ("logaddexp2", torch.logaddexp2, "fuser_logaddexp2({0}, {1})", 30, "special_cpp"),
            ("xlogy", torch.xlogy, "fuser_xlogy({0}, {1})", 14, ""),
            ("xlog1py", torch.special.xlog1py, "fuser_xlog1py({0}, {1})", 16, ""),
        )
    ),
    OpRow(
        "atan2", 2, torch.atan2, "fuser_atan2_{D}({0}, {1})", "libdevice.atan2({0}, {1})", FLOATS, cost=30, ulps=2.0,
        jumps=True, lanes=in_lanes("fuser_lanes_atan2_f32({0}, {1})"),
    ),
    OpRow(
        "ldexp", 2, torch.ldexp, "{0} * fuser_exp2_{D}({1})", "({0} * libdevice.exp2({1}))", FLOATS, cost=12, ulps=2.0,
    ),
)  # fmt: skip
_sp = torch.special


def _trigamma_right(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x >= 0.5, torch.polygamma(1, x), torch.nan)


SPECIAL = (
    _unary("entr", _sp.entr, (0.0, 9.0), "fuser_entr({0})"),
    *(
        OpRow(
            name, 1, eval, f"fuser_{name}_{{D}}({{0}})", triton, FLOATS, cost=cost, domain=domain, ulps=4.0,
            text="special_cpp",
        )
        for name, eval, triton, cost, domain in (
            ("lgamma", torch.lgamma, "libdevice.lgamma({0})", 80, (0.0, 30.0)),
            ("digamma", torch.digamma, None, 60, (0.0, 30.0)),
            ("trigamma_right", _trigamma_right, None, 60, (0.5, 30.0)),
            ("erfinv", torch.erfinv, "libdevice.erfinv({0})", 40, (-1.0, 1.0)),
            ("i0", _sp.i0, "libdevice.cyl_bessel_i0({0})", 40, (-60.0, 60.0)),
            ("i0e", _sp.i0e, None, 40, (-60.0, 60.0)),
            ("i1", _sp.i1, "libdevice.cyl_bessel_i1({0})", 40, (-60.0, 60.0)),
            ("i1e", _sp.i1e, None, 40, (-60.0, 60.0)),
        )
    ),
    OpRow(
        "zeta", 2, _sp.zeta, "fuser_zeta_{D}({0}, {1})", None, FLOATS, cost=300, domain=(1.1, 20.0), ulps=8.0,
        text="special_cpp",  # a sum of powers, each of which the vector library gives to 4 ulps
    ),
)  # fmt: skip


def _ndtri(dtype: torch.dtype) -> str:
    if dtype is torch.float64:  # three polynomials take 0.66 of ATen's time within (0, 1), and 3.3 times of it outside
        raise Unsupported(
            because("slower", "ATen's ndtri is faster than a kernel's in float64, as it is done at once outside (0, 1)")
        )
    return "fuser_ndtri_{D}({0})"


# Eager's float64 is off by up to 1e-6 between 2 and 20, where its two formulas meet; kernels give the exact value.
_MEETING = (torch.float64,)
BESSEL = (
    *(
        OpRow(
            name, 1, eval, f"fuser_{name}_{{D}}({{0}})", None, FLOATS, cost=cost, domain=domain, ulps=8.0,
            text="bessel_cpp", inexact=inexact,
        )
        for name, eval, cost, domain, inexact in (
            ("j0", _sp.bessel_j0, 65, (-60.0, 60.0), _MEETING),
            ("j1", _sp.bessel_j1, 65, (-60.0, 60.0), _MEETING),
            ("y0", _sp.bessel_y0, 100, (0.0, 60.0), _MEETING),
            ("y1", _sp.bessel_y1, 100, (0.0, 60.0), _MEETING),
            ("spherical_bessel_j0", _sp.spherical_bessel_j0, 35, (-60.0, 60.0), ()),
            ("k0", _sp.modified_bessel_k0, 55, (0.0, 60.0), ()),
            ("k1", _sp.modified_bessel_k1, 55, (0.0, 60.0), ()),
            ("k0e", _sp.scaled_modified_bessel_k0, 55, (0.0, 60.0), ()),
            ("k1e", _sp.scaled_modified_bessel_k1, 55, (0.0, 60.0), ()),
            ("erfcx", _sp.erfcx, 50, (-5.0, 60.0), ()),
            ("log_ndtr", _sp.log_ndtr, 90, (-60.0, 9.0), ()),
        )
    ),
    OpRow("ndtri", 1, _sp.ndtri, _ndtri, None, FLOATS, cost=40, domain=_UNIT, ulps=8.0, text="bessel_cpp"),
)  # fmt: skip
_FAMILIES = (
    *(f"{kind}_polynomial_{letter}" for kind in ("chebyshev", "shifted_chebyshev") for letter in "tuvw"),
    "hermite_polynomial_h", "hermite_polynomial_he", "laguerre_polynomial_l", "legendre_polynomial_p",
)  # fmt: skip
# The degree is the second argument. Recurrences are eager's, and lose digits where eager's do.
POLYNOMIALS = tuple(
    OpRow(
        name, 2, getattr(_sp, name), f"fuser_{name}_{{D}}({{0}}, {{1}})", None, FLOATS, cost=60, ulps=8.0, jumps=True,
        text="polynomials_cpp",
    )
    for name in _FAMILIES
)  # fmt: skip
ROWS = (*ELEMENTARY, *BINARY, *SPECIAL, *BESSEL, *POLYNOMIALS)
