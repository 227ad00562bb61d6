"""C++ helpers for special functions: polynomials and rational functions per interval, selected without branches.

Each is written twice: in double (`_f64`), and for float32 (`_f32`) in double with fewer terms; only ndtri's float32
form is in float. Besides its polynomial, a function computes only a few operations, so that loops of it vectorise.
Formulas: Abramowitz and Stegun, Handbook of Mathematical Functions, chapters 6, 7, 9 and 23.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fuser.ops.fits import FITS
from fuser.ops.float_cpp import define, horner
from fuser.ops.math_cpp import sum_of_logs

HELPERS: dict[str, str] = {}
_add = partial(define, HELPERS, kind="double")


def fit(name: str, x: str, mid: str = "") -> str:
    """C++ text of a polynomial of `FITS` in double; with `mid`, of its short form."""
    return horner(x, *FITS[name + mid], double=True)


_add("fuser_exp_mid", f"""\
  const double over = x > 700.0 ? 700.0 : x, c = over < -700.0 ? -700.0 : over;
  const double t = FUSER_FMA(c, 1.4426950408889634, 6755399441055744.0), n = t - 6755399441055744.0;
  const double r = FUSER_FMA(n, -0.6931471805599453, c);
  return {fit("EXP_MID", "r")} * FUSER_BITS(double, (FUSER_BITS(u64, t) << 52) + 0x3ff0000000000000ULL);
""")  # fmt: skip
# For normal numbers: x = 2^e m with m from sqrt(1/2) to sqrt(2).
_add("fuser_log_normal", f"""\
  const u64 b = FUSER_BITS(u64, x) - 0x3fe6a09e667f3bcdULL;
  const double e = FUSER_BITS(double, ((b + (1024ULL << 52)) >> 52) | 0x4330000000000000ULL) - 4503599627371520.0;
  const double m = FUSER_BITS(double, (b & 0xfffffffffffffULL) + 0x3fe6a09e667f3bcdULL), s = (m - 1.0) / (m + 1.0);
  const double z = s * s;
  return FUSER_FMA(e, 0.6931471805599453, s * {fit("LOG_MID", "z")});
""")  # fmt: skip
_add("fuser_log_mid", """\
  const double y = fuser_log_normal(x);
  const double edge = x == 0.0 ? -__builtin_inf() : x < 0.0 ? __builtin_nan("") : x;
  return (x > 0.0) & (x < __builtin_inf()) ? y : edge;
""")  # fmt: skip


# In float32 by short polynomials in double: m + log(1 + e^d), d <= 0. e^d is 0 long before its exponent wraps.
for _name, _wide, _power, _scale in (
    ("logaddexp", "fuser_log1p_f64(fuser_exp_f64(d))", "d", ""),
    (
        "logaddexp2", "fuser_log1p_f64(fuser_exp2_f64(d)) * 1.4426950408889634074", "d * 0.6931471805599453",
        " * 1.4426950408889634",
    ),
):  # fmt: skip
    HELPERS[f"fuser_{_name}_f64"] = sum_of_logs(_name, "f64", f"(m + {_wide})")
    HELPERS[f"fuser_{_name}_f32"] = sum_of_logs(
        _name, "f32", f"FUSER_FMA(e, {fit('LOG1P_MID', 'e')}{_scale}, m)", f", e = fuser_exp_mid({_power})"
    )


def double_pair(helpers: dict[str, str], name: str, body: Callable[[str], str]) -> None:
    """Add `fuser_<name>_f64` and, by way of `_mid`, `_f32`; `body` gets the suffix of its fits' names."""
    for suffix, mid in (("f64", ""), ("mid", "_MID")):
        exp, log = ("fuser_exp_mid", "fuser_log_mid") if mid else ("fuser_exp_f64", "fuser_log_f64")
        text = body(mid).replace("{exp}", exp).replace("{log}", log).replace("{mid}", suffix)
        define(helpers, f"fuser_{name}_{suffix}", text, kind="double")
    define(helpers, f"fuser_{name}_f32", f"  return (float)fuser_{name}_mid((double)x);\n")


# Up to 8 a polynomial replaces the power series, all coefficients positive; above 8 the series 9.7.1.
def _bessel(order: int, scaled: bool) -> Callable[[str], str]:
    def body(mid: str) -> str:
        small = fit(f"I{order}", "z", mid)
        growth = "({exp}(a) + (a - a))" if mid else "{exp}(a)"  # infinity times 0 is NaN, in eager too
        return f"""\
  const double a = __builtin_fabs(x), b = a < 8.0 ? a : 8.0, z = b * b;
  const double u = FUSER_FMA(16.0, 1.0 / (a < 8.0 ? 8.0 : a), -1.0);
  const double small = {small}, large = {fit(f"I{order}_TAIL", "u", mid)} / __builtin_sqrt(a);
  const double out = {"a < 8.0 ? {exp}(-b) * SMALL : large" if scaled else f"a < 8.0 ? SMALL : {growth} * large"};
  return {"x < 0 ? -out : out" if order else "out"};
""".replace("SMALL", "(b * small)" if order else "small")

    return body


for _order in (0, 1):
    double_pair(HELPERS, f"i{_order}", _bessel(_order, scaled=False))
    double_pair(HELPERS, f"i{_order}e", _bessel(_order, scaled=True))

# By w = -log(1 - x^2), or its square root if that is large. (The vector library's log is slow for negative numbers.)
_add("fuser_erfinv_f64", f"""\
  const double square = (1.0 - x) * (1.0 + x), w = -fuser_log_f64(__builtin_fabs(square)), s = __builtin_sqrt(w);
  const double t = FUSER_FMA(w, 0.32, -1.0), u = (s - 4.255) * 0.5698005698005698;
  const double p = w < 6.25 ? {fit("ERFINV", "t")} : {fit("ERFINV_TAIL", "u")};
  const double edge = __builtin_fabs(x) == 1.0 ? __builtin_copysign(__builtin_inf(), x) : __builtin_nan("");
  return square > 0 ? x * p : edge;
""")  # fmt: skip
define(HELPERS, "fuser_erfinv_f32", f"""\
  const double y = x, square = FUSER_FMA(-y, y, 1.0), w = -fuser_log_normal(square), s = __builtin_sqrt(w);
  const double t = FUSER_FMA(w, 0.4, -1.0), u = FUSER_FMA(s, 1.12743891797001646, -3.521030061059766);
  const double p = w < 5.0 ? {fit("ERFINV_MID", "t")} : {fit("ERFINV_TAIL_MID", "u")};
  const float value = (float)(y * p);
  const float edge = __builtin_fabsf(x) == 1.0f ? __builtin_copysignf(__builtin_inff(), x) : __builtin_nanf("");
  return __builtin_fabsf(x) < 1.0f ? value : edge;
""")  # fmt: skip


# Of |x|: a rational function up to 3, or 8 (of y + 1 below 1), then Stirling's series 6.1.41; below 0 the reflection
# 6.1.17.
def _lgamma(mid: str) -> str:
    bound = "8.0" if mid else "3.0"
    return f"""\
  const double y = __builtin_fabs(x), d = y - __builtin_rint(y), l = {{log}}(y);
  const bool low = y < 1.0, near = y < {bound};
  const double b = near ? y : {bound}, v = low ? b + 1.0 : b, one = low ? b : b - 1.0, two = low ? b - 1.0 : b - 2.0;
  const double small = one * two * {fit("LGAMMA_P", "v", mid)} / {fit("LGAMMA_Q", "v", mid)} + 0.0;
  const double r = 1.0 / (near ? {bound} : y), z = r * r;
  const double large = FUSER_FMA(y - 0.5, l - 1.0, FUSER_FMA(r, {fit("LGAMMA_TAIL", "z", mid)}, 0.4189385332046727));
  const double here = near ? small - (low & (x > 0) ? l : 0.0) : large;
  const double s = __builtin_fabs(d * {fit("SIN_PI", "d * d", mid)});
  const double there = -{{log}}((low ? s : y * s) * 0.3183098861837907) - here;
  const double at = x < 0 ? there : here;
  return (d == 0) & (x <= 0) | (y == __builtin_inf()) ? __builtin_inf() : at;
"""


double_pair(HELPERS, "lgamma", _lgamma)


# The zero, 1.46..., is in two parts. From 8 on the series 6.3.18; below 0 the reflection 6.3.7.
def _digamma(mid: str) -> str:
    return f"""\
  const bool left = x < 0;
  const double y = left ? 1.0 - x : x, d = x - __builtin_rint(x);
  const bool low = y < 1.0, near = y < 8.0;
  const double b = near ? y : 8.0, v = low ? b + 1.0 : b;
  const double zero = v - 1.4616321449683622 - 9.549995429965697e-17;
  const double small = zero * {fit("DIGAMMA_P", "v", mid)} / {fit("DIGAMMA_Q", "v", mid)} - (low ? 1.0 / b : 0.0);
  const double c = near ? 8.0 : y, r = 1.0 / c, z = r * r;
  const double l = {"fuser_log_normal" if mid else "fuser_log_f64"}(c);
  const double large = l - FUSER_FMA(z, {fit("DIGAMMA_TAIL", "z", mid)}, 0.5 * r);
  const double q = d * d, s = d * {fit("SIN_PI", "q", mid)};
  const double h = 0.5 - __builtin_fabs(d), g = h * h, c0 = h * {fit("SIN_PI", "g", mid)};
  const double turn = left ? 3.141592653589793 * c0 / s : 0.0;
  const double at = y == __builtin_inf() ? y : (near ? small : large) - turn;
  const double edge = left ? __builtin_nan("") : __builtin_copysign(__builtin_inf(), -x);
  return (d == 0) & (x <= 0) | (x == -__builtin_inf()) ? edge : at;
"""


double_pair(HELPERS, "digamma", _digamma)


# From 1/2 on: 6.4.6 up to a large argument, then 6.4.12.
def _trigamma_right(mid: str) -> str:
    steps = 6 if mid else 10
    bernoulli = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6)
    series = horner("z", *(bernoulli[:3] if mid else bernoulli), double=True)
    terms = " + ".join(f"1.0 / ((x + {k}.0) * (x + {k}.0))" for k in range(steps))
    return f"""\
  const double y = x + {steps}.0, r = 1.0 / y, z = r * r;
  const double sum = {terms};
  return x >= 0.5 ? sum + FUSER_FMA(r * z, {series}, FUSER_FMA(0.5, z, r)) : __builtin_nan("");
"""


double_pair(HELPERS, "trigamma_right", _trigamma_right)

# Hurwitz's zeta by the Euler-Maclaurin formula (23.2.23 with an offset): ten terms, then Bernoulli numbers.
_ZETA = """\
  if (s == 1) return __builtin_inf();
  if (s < 1) return __builtin_nan("");
  if (q <= 0 && q == __builtin_floor(q)) return __builtin_inf();
  if (s == __builtin_inf() && q <= 1) return q == 1 ? 1.0 : s;
  if ((q <= 0 && s != __builtin_floor(s)) || !(s < __builtin_inf() && q < __builtin_inf())) return __builtin_nan("");
  const double bernoulli[] = {1.0 / 12, -1.0 / 720, 1.0 / 30240, -1.0 / 1209600, 1.0 / 47900160,
    -691.0 / 1307674368000.0, 1.0 / 74724249600.0, -3617.0 / 10670622842880000.0};
  double sum = 0;
  for (int n = 0; n < 10 || q < 10; ++n) { sum += pow(q, -s); q += 1; }
  double power = pow(q, -s), factor = s;
  if (power == 0) return sum;
  sum += power * q / (s - 1) + power / 2;
  power /= q;
  for (int k = 0; k < 8; ++k) {
    sum += bernoulli[k] * factor * power;
    factor *= (s + 2 * k + 1) * (s + 2 * k + 2);
    power /= q * q;
  }
  return sum;
"""
_add("fuser_zeta_f64", _ZETA, "double s, double q")
define(
    HELPERS, "fuser_zeta_f32", "  return (float)fuser_zeta_f64((double)s, (double)q);\n", "float s, float q"
)
