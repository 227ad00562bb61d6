"""C++ helpers for orthogonal polynomials whose degree is an argument: recurrences with the same steps as eager's.

Formulas: Abramowitz and Stegun, Handbook of Mathematical Functions, chapter 22.
"""

from __future__ import annotations

from fuser.ops.float_cpp import define

HELPERS: dict[str, str] = {}
# Degrees are truncated to integers; an invalid degree gives 0, as in eager.
_DEGREE = """\
  if (!(n > -1 && n < ({T})9e18)) return 0;
  const i64 k = (i64)n;
"""


def _polynomial(name: str, body: str) -> None:
    for kind, d in (("float", "f32"), ("double", "f64")):
        text = (_DEGREE + body).replace("{T}", kind).replace("{FMA}", "FUSER_FMAF" if d == "f32" else "FUSER_FMA")
        # beyond this degree eager's recurrences have overflowed
        text = text.replace("{LIMIT}", "128" if d == "f32" else "512")
        define(HELPERS, f"fuser_{name}_{d}", text, f"{kind} x, {kind} n", kind)


# The four kinds of Chebyshev polynomials: the value at 1 and its magnitude at -1, the trigonometric form and the degree
# from which it is used inside (-1, 1), and the polynomial of degree 1.
_KINDS = {
    "t": ("1", "1", "cos(k * a)", 6, "y"),
    "u": ("k + 1", "k + 1", "sin((k + 1) * a) / sin(a)", 8, "y + y"),
    "v": ("1", "k + k + 1", "cos((k + 0.5) * a) / cos(a / 2)", 8, "y + y - 1"),
    "w": ("k + k + 1", "1", "sin((k + 0.5) * a) / sin(a / 2)", 8, "y + y + 1"),
}
_CHEBYSHEV = """\
  const {{T}} y = {y};
  if (y == 1) return {right};
  if (y == -1) return k % 2 == 0 ? {left} : -({left});
  if (k > {many} && __builtin_fabs(y) < 1) {{
    const double a = acos({wide});
    return {angles};
  }}
  if (k == 0) return 1;
  {{T}} p = 1, q = {first};
  for (i64 j = 2; j <= k && q == q; ++j) {{ const {{T}} r = {{FMA}}(y + y, q, -p); p = q; q = r; }}
  return q;
"""
for _letter, (_right, _left, _angles, _many, _first) in _KINDS.items():
    for _prefix, _y, _wide in (("", "x", "(double)x"), ("shifted_", "x + x - 1", "2.0 * x - 1")):
        _polynomial(
            f"{_prefix}chebyshev_polynomial_{_letter}",
            _CHEBYSHEV.format(
                y=_y, wide=_wide, right=_right, left=_left, angles=_angles, first=_first,
                many=4 if _prefix + _letter == "shifted_w" else _many,
            ),
        )

_RECURRENCE = """\
{edge}  if (k == 0) return 1;
  {{T}} p = 1, q = {first};
  for (i64 j = 1; j < k && q == q; ++j) {{ const {{T}} r = {next}; p = q; q = r; }}
  return q;
"""
_OVERFLOWN = '  if (k > {LIMIT}) return ({T})__builtin_nan("");\n'
for _name, _edge, _first, _next in (
    ("hermite_polynomial_h", _OVERFLOWN, "x + x", "{FMA}(x + x, q, -((j + j) * p))"),
    ("hermite_polynomial_he", _OVERFLOWN, "x", "{FMA}(x, q, -(j * p))"),
    (
        "laguerre_polynomial_l", "  if (x == 0) return 1;\n", "1 - x",
        "{FMA}(j + j + (1 - x), q, -(j * p)) / (j + 1)",
    ),
    (
        "legendre_polynomial_p", "  if (__builtin_fabs(x) == 1) return x > 0 || k % 2 == 0 ? 1 : -1;\n", "x",
        "{FMA}((j + j + 1) * x, q, -(j * p)) / (j + 1)",
    ),
):  # fmt: skip
    _polynomial(_name, _RECURRENCE.format(edge=_edge, first=_first, next=_next))
