"""C++ helpers for special functions, in double: the float32 forms go through it. Loops have fixed lengths if they can.

Formulas: Abramowitz and Stegun, Handbook of Mathematical Functions, chapters 6, 7, 9 and 23.
"""

from __future__ import annotations

HELPERS: dict[str, str] = {}


def _function(name: str, args: str, body: str) -> None:
    doubles = ", ".join(f"double {a}" for a in args.split())
    floats = ", ".join(f"float {a}" for a in args.split())
    wide = ", ".join(f"(double){a}" for a in args.split())
    HELPERS[f"fuser_{name}_f64"] = f"FUSER_FN double fuser_{name}_f64({doubles}) {{\n{body}}}\n"
    HELPERS[f"fuser_{name}_f32"] = (
        f"FUSER_FN float fuser_{name}_f32({floats}) {{ return (float)fuser_{name}_f64({wide}); }}\n"
    )


_function("lgamma", "x", "  return lgamma(x);\n")

# Recurrence up to 10, then the asymptotic series 6.3.18; below 0 the reflection 6.3.7.
_function(
    "digamma",
    "x",
    """\
  if (x == 0) return __builtin_copysign(__builtin_inf(), -x);
  if (x < 0 && x == __builtin_trunc(x)) return __builtin_nan("");
  const double turn = x < 0 ? 3.141592653589793 / tan(3.141592653589793 * (x - __builtin_trunc(x))) : 0.0;
  double y = x < 0 ? 1 - x : x, sum = 0;
  while (y < 10) { sum -= 1 / y; y += 1; }
  const double z = 1 / (y * y);
  double tail = 1.0 / 12;
  tail = tail * z - 691.0 / 32760; tail = tail * z + 1.0 / 132; tail = tail * z - 1.0 / 240;
  tail = tail * z + 1.0 / 252; tail = tail * z - 1.0 / 120; tail = tail * z + 1.0 / 12;
  return sum + log(y) - 0.5 / y - z * tail - turn;
""",
)
# Hurwitz's zeta by Euler and Maclaurin (23.2.23 with an offset): ten terms, then Bernoulli's numbers.
_function(
    "zeta",
    "s q",
    """\
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
""",
)
# A first guess by Winitzki's formula, right to 2e-3; each of Halley's steps makes that thrice as many digits.
_function(
    "erfinv",
    "y",
    """\
  const double size = __builtin_fabs(y);
  if (!(size <= 1)) return __builtin_nan("");
  if (size == 1) return __builtin_copysign(__builtin_inf(), y);
  const double l = log1p(-size * size), a = 4.330746750799873 + l / 2;
  double x = __builtin_sqrt(__builtin_sqrt(a * a - l / 0.147) - a);
  for (int k = 0; k < 3; ++k) {
    const double miss = size > 0.5 ? (1 - size) - erfc(x) : erf(x) - size;
    const double step = miss / (1.1283791670955126 * exp(-x * x));
    x -= step / (1 + x * step);
  }
  return __builtin_copysign(size < 1e-150 ? size * 0.886226925452758 : x, y);
""",
)
# exp(-|x|) I(|x|): the power series 9.6.10, whose terms are positive, then the asymptotic one, 9.7.1.
_BESSEL = """\
  const double a = __builtin_fabs(x);
  const long double z = (long double)a * a / 4;
  long double sum = {first}, term = {first};
  if (a <= 30) {{
    for (int k = 1; k < 64; ++k) {{ term *= z / (k * (k + {order})); sum += term; }}
    sum *= exp(-a);
  }} else {{
    sum = term = 1;
    for (int k = 1; k < 24; ++k) {{
      term *= ((2 * k - 1) * (2 * k - 1) - {square}) / (8.0L * k * a);
      sum += term;
    }}
    sum *= 0.3989422804014327 / __builtin_sqrt(a);
  }}
  const double out = a == __builtin_inf() ? 0.0 : (double)sum;
  return {result};
"""
_function("i0e", "x", _BESSEL.format(first="1", order=0, square=0, result="out"))
_function("i1e", "x", _BESSEL.format(first="a / 2", order=1, square=4, result="x < 0 ? -out : out"))
for _name in ("i0", "i1"):
    _function(_name, "x", f"  return exp(__builtin_fabs(x)) * fuser_{_name}e_f64(x);\n")
