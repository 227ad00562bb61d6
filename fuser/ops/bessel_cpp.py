"""C++ helpers for Bessel functions and those of the normal distribution, in double: float32 forms go through it.

Formulas: Abramowitz and Stegun, Handbook of Mathematical Functions, chapters 7, 9 and 26.
"""

from __future__ import annotations

HELPERS: dict[str, str] = {}


def _function(name: str, body: str) -> None:
    HELPERS[f"fuser_{name}_f64"] = f"FUSER_FN double fuser_{name}_f64(double x) {{\n{body}}}\n"
    HELPERS[f"fuser_{name}_f32"] = (
        f"FUSER_FN float fuser_{name}_f32(float x) {{ return (float)fuser_{name}_f64((double)x); }}\n"
    )


# The maths library's; eager has no values at infinity.
for _name in ("j0", "j1"):
    _function(_name, f"  return x - x == 0 ? {_name}(x) : __builtin_nan(\"\");\n")
for _name in ("y0", "y1"):
    _function(
        _name,
        f"""\
  if (x == 0) return -__builtin_inf();
  return x > 0 && x < __builtin_inf() ? {_name}(x) : __builtin_nan("");
""",
    )
_function(
    "spherical_bessel_j0",
    """\
  const double a = __builtin_fabs(x), z = x * x;
  if (a == __builtin_inf()) return 0;
  if (a >= 0.5) return sin(x) / x;
  double sum = 1;
  for (int k = 8; k > 0; --k) sum = 1 - z / ((2 * k) * (2 * k + 1)) * sum;
  return sum;
""",
)
# exp(x) K(x): up to 1 the power series 9.6.11 and 9.6.13; then the integral 9.6.24 by the trapezoidal rule, which is
# right to exp(-40) for these steps, as its integrand is smooth and ends as exp(-exp).
_K0 = """\
    const long double z = (long double)x * x / 4, l = -log(x / 2) - 0.577215664901532860607L;
    long double term = 1, sum = l, harmonic = 0;
    for (int k = 1; k < 16; ++k) { term *= z / (k * k); harmonic += 1.0L / k; sum += term * (l + harmonic); }
"""
_K1 = """\
    const long double z = (long double)x * x / 4, l = log(x / 2) + 0.577215664901532860607L;
    long double term = x / 2.0L, sum = 1 / (long double)x + term * (l - 0.5L), harmonic = 0;
    for (int k = 1; k < 16; ++k) {
      term *= z / (k * (k + 1)); harmonic += 1.0L / k;
      sum += term * (l - harmonic - 0.5L / (k + 1));
    }
"""
for _order, _series, _weight in (("0", _K0, "1"), ("1", _K1, "(1 + 2 * s * s)")):
    _function(
        f"k{_order}e",
        f"""\
  if (x == 0) return __builtin_inf();
  if (!(x > 0)) return __builtin_nan("");
  if (x <= 1) {{
{_series}    return (double)(sum * exp(x));
  }}
  if (x == __builtin_inf()) return 0;
  const double h = x < 10.5 ? 0.2 : 0.65 / __builtin_sqrt(x);
  double sum = 0.5;
  for (int k = 1; k < 26; ++k) {{
    const double s = sinh(k * h / 2);
    sum += exp(x * s * s * -2) * {_weight};
  }}
  return sum * h;
""",
    )
    _function(f"k{_order}", f"  return x < 1000 || x != x ? exp(-x) * fuser_k{_order}e_f64(x) : 0;\n")
# exp(x^2) erfc(x): the square with its rounding error up to 5, then Laplace's continued fraction 7.1.14.
_function(
    "erfcx",
    """\
  if (x != x) return x;
  if (x < -27) return __builtin_inf();
  const double a = __builtin_fabs(x);
  double value;
  if (a < 5) {
    const double square = x * x, rest = FUSER_FMA(x, x, -square);
    value = exp(square) * (1 + rest) * erfc(a);
  } else {
    double tail = a;
    for (int k = 40; k > 0; --k) tail = a + k / (2 * tail);
    value = 0.5641895835477562869 / tail;
  }
  return x < 0 ? 2 * exp(x * x) * (1 + FUSER_FMA(x, x, -(x * x))) - value : value;
""",
)
_function(
    "log_ndtr",
    """\
  const double t = x * 0.7071067811865476;
  return x < -1 ? log(fuser_erfcx_f64(-t) / 2) - t * t : log1p(-erfc(t) / 2);
""",
)
# In the middle by the inverse of erf; in the tails a first guess by 26.2.23, right to 4.5e-4, and Halley's steps.
_function(
    "ndtri",
    """\
  if (x == 0) return -__builtin_inf();
  if (x == 1) return __builtin_inf();
  if (!(x > 0 && x < 1)) return __builtin_nan("");
  if (x > 0.25 && x < 0.75) return 1.4142135623730951 * fuser_erfinv_f64(2 * x - 1);
  const double p = x < 0.5 ? x : 1 - x, t = __builtin_sqrt(-2 * log(p));
  double z = t - (2.515517 + t * (0.802853 + t * 0.010328)) / (1 + t * (1.432788 + t * (0.189269 + t * 0.001308)));
  for (int k = 0; k < 2; ++k) {
    const double miss = (erfc(z * 0.7071067811865476) / 2 - p) / (0.3989422804014327 * exp(-z * z / 2));
    z += miss / (1 - miss * z / 2);
  }
  return x < 0.5 ? -z : z;
""",
)
