"""C++ helpers for Bessel functions and functions of the normal distribution, in the style of special_cpp.

Formulas: Abramowitz and Stegun, Handbook of Mathematical Functions, chapters 7, 9 and 26.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fuser.ops import special_cpp
from fuser.ops.fits import FITS
from fuser.ops.float_cpp import define, horner
from fuser.ops.special_cpp import double_pair, fit

HELPERS: dict[str, str] = dict(special_cpp.HELPERS)  # which helpers here call
_add = partial(define, HELPERS)


# In float64 by the maths library; eager has no values at infinity.
for _name in ("j0", "j1"):
    _add(f"fuser_{_name}_f64", f'  return x - x == 0 ? {_name}(x) : __builtin_nan("");\n', kind="double")
for _name in ("y0", "y1"):
    _add(f"fuser_{_name}_f64", f"""\
  if (x == 0) return -__builtin_inf();
  return x > 0 && x < __builtin_inf() ? {_name}(x) : __builtin_nan("");
""", kind="double")  # fmt: skip
# In float32: up to 8 by x^2; from 8 on by 9.2.5 and 9.2.6, with x reduced modulo pi/2.
_NEAR = """\
  const double a = __builtin_fabsf(x), b = a < 8.0 ? a : 8.0, c = a < 8.0 ? 8.0 : a;
  const double t = FUSER_FMA(b * b, 0.03125, -1.0);
"""
_FAR = f"""\
  u32 k;
  const double r = fuser_quadrant((float)c, &k), rr = r * r, i = 8.0 / c, v = i * i;
  const double s0 = r * {fit("SIN", "rr")}, c0 = {fit("COS", "rr")};
  const u64 turn = k;
  const double s1 = turn & 1u ? c0 : s0, c1 = turn & 1u ? -s0 : c0;
  const double sine = turn & 2u ? -s1 : s1, cosine = turn & 2u ? -c1 : c1;
  const double scale = __builtin_sqrt(i * 0.039788735772973836), plus = sine + cosine, minus = sine - cosine;
"""


def _hankel(order: int) -> str:
    return f"  const double p = {fit(f'HANKEL_P{order}', 'v')}, q = i * {fit(f'HANKEL_Q{order}', 'v')};\n"


_J = {0: "p * plus - q * minus", 1: "p * minus + q * plus"}
_Y = {0: "p * minus + q * plus", 1: "q * minus - p * plus"}
for _order in (0, 1):
    _small = fit(f"J{_order}", "t")
    _add(f"fuser_j{_order}_f32", f"""\
{_NEAR}\
  const double near = {"b * " if _order else ""}{_small};
{_FAR}\
{_hankel(_order)}\
  const float y = (float)(a < 8.0 ? near : scale * ({_J[_order]}));
  return x - x == 0 ? {"__builtin_copysignf(1.0f, x) * y" if _order else "y"} : __builtin_nanf("");
""")  # fmt: skip
    _log = "double l = 0.6366197723675814 * fuser_log_normal(b > 0 ? b : 1.0)"
    _rest = fit(f"Y{_order}", "t")
    _near = f"FUSER_FMA(l, j, {_rest})" if _order == 0 else f"b * FUSER_FMA(l, j, {_rest}) - 0.6366197723675814 / b"
    _add(f"fuser_y{_order}_f32", f"""\
{_NEAR}\
  const {_log}, j = {_small}, near = {_near};
{_FAR}\
{_hankel(_order)}\
  const float y = (float)(a < 8.0 ? near : scale * ({_Y[_order]}));
  const float edge = x == 0 ? -__builtin_inff() : __builtin_nanf("");
  return (x > 0) & (x < __builtin_inff()) ? y : edge;
""")  # fmt: skip
for _type, _d, _f in (("float", "f32", "f"), ("double", "f64", "")):
    _add(f"fuser_spherical_bessel_j0_{_d}", f"""\
  const {_type} a = __builtin_fabs{_f}(x), b = a == __builtin_inf{_f}() ? 1 : a, y = fuser_sin_{_d}(b) / b;
  return a == __builtin_inf{_f}() ? 0 : a == 0 ? 1 : y;
""", kind=_type)  # fmt: skip


# exp(x) K(x): up to 1 by the series 9.6.11 and 9.6.13, whose terms are positive except for log(x / 2) + gamma < 0.
def _modified(order: int, scaled: bool) -> Callable[[str], str]:
    def body(mid: str) -> str:
        i, rest = fit(f"K{order}_I", "z", mid), fit(f"K{order}_REST", "z", mid)
        small = f"FUSER_FMA(z, {rest}, -l * {i})" if order == 0 else f"FUSER_FMA(z, l * {i} - {rest}, 1.0) / b"
        return f"""\
  const bool near = x < 1.0;
  const double b = near ? x : 1.0, u = 1.0 / (near ? 1.0 : x), z = b * b;
  const double l = {"fuser_log_normal" if mid else "fuser_log_f64"}(__builtin_fabs(x)) - 0.11593151565841245;
  const double small = {small}, root = __builtin_sqrt(u);
  const double large = root * ({fit(f"K{order}_P", "u", mid)} / {fit(f"K{order}_Q", "u", mid)});
  const double y = {"near ? small * {exp}(b) : large" if scaled else "near ? small : large * {exp}(-x)"};
  const double edge = x == 0 ? __builtin_inf() : __builtin_nan("");
  return x > 0 ? y : edge;
"""

    return body


for _order in (0, 1):
    double_pair(HELPERS, f"k{_order}", _modified(_order, scaled=False))
    double_pair(HELPERS, f"k{_order}e", _modified(_order, scaled=True))


# Of |x|. exp(x^2) uses the square together with its rounding error.
def _erfcx_of(mid: str, clamped: str) -> str:
    return f"""\
  const double a = {clamped}, far = a < 1e20 ? a : 1e20, t = (far - 4.0) / (far + 4.0);
  const double e = 0.5 * {fit("ERFCX", "t", mid)} / (0.5 + a);
"""


double_pair(
    HELPERS,
    "erfcx",
    lambda mid: (
        _erfcx_of(mid, "__builtin_fabs(x)")
        + """\
  const double low = x < -27.0 ? -27.0 : x, c = x < 0 ? low : 0.0, square = c * c, rest = FUSER_FMA(c, c, -square);
  const double g = 2 * {exp}(square);
  return x < 0 ? (g < __builtin_inf() ? FUSER_FMA(g, rest, g) : g) - e : e;
"""
    ),
)
double_pair(
    HELPERS,
    "log_ndtr",
    lambda mid: (
        _erfcx_of(mid, "0.7071067811865476 * __builtin_fabs(x)")
        + """\
  const double c = x > 40.0 ? 40.0 : x, square = c * c, rest = x > 0 ? FUSER_FMA(c, c, -square) : 0.0;
  const double g = {exp}(-0.5 * (x > 0 ? square : 0.0)), q = FUSER_FMA(g, -0.5 * rest, g) * (0.5 * e);
  return x > 0 ? LOG1P(-q) : LOG(0.5 * e) - 0.5 * square;
""".replace("LOG1P", "(double)fuser_log1p_f32" if mid else "fuser_log1p_f64").replace("LOG", "{log}")
    ),
)
# The inverse of erf at 2 x - 1, which is also accurate near x = 0. In float64 ATen's is faster outside (0, 1).
_add("fuser_ndtri_f32", f"""\
  const float square = 4.0f * x * (1.0f - x), w = -fuser_log_f32(square), s = __builtin_sqrtf(w);
  const float t = FUSER_FMAF(w, 0.4f, -1.0f), v = (1.0f / s - 0.2721505f) * 5.7122256f;
  const float far = s * {horner("v", *FITS["NDTRI_FAR_SINGLE"])};
  const float p = w < 5.0f ? {horner("t", *FITS["NDTRI_SINGLE"])} : far;
  const float edge = x == 1 ? __builtin_inff() : x == 0 ? -__builtin_inff() : __builtin_nanf("");
  return square > 0 ? FUSER_FMAF(2.0f, x, -1.0f) * p : edge;
""")  # fmt: skip
