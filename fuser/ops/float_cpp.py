"""C++ helpers: elementary functions of float32, inline, without branches or calls, within about one ulp.

Each follows the textbook scheme: split off a power of two (or a multiple of pi/2) exactly, evaluate a short minimax
polynomial of the remainder, and combine the two with care for the last bit. The polynomials were fitted for these
intervals; each coefficient was rounded to float32 before the next was fitted. Inlined, they cost less than a call of a
vector library, which spills every register for each 16 elements. They give the same bits in a vector loop, its tail and
scalar code.
"""

from __future__ import annotations

from functools import partial
from typing import Any

HELPERS: dict[str, str] = {}


def define(helpers: dict[str, Any], name: str, body: str, args: str = "", kind: str = "float") -> None:
    """Add the C++ helper `name`, which returns a `kind`; without `args` it has one parameter of that type, `x`."""
    helpers[name] = f"FUSER_FN {kind} {name}({args or f'{kind} x'}) {{\n{body}}}\n"


def horner(x: str, *coefficients: float | str, double: bool = False) -> str:
    """C++ text of the polynomial with these coefficients, lowest degree first."""
    fma, suffix = ("FUSER_FMA", "") if double else ("FUSER_FMAF", "f")
    terms = [c if isinstance(c, str) else f"{c}{suffix}" for c in coefficients]
    text = terms[-1]
    for term in reversed(terms[:-1]):
        text = f"{fma}({x}, {text}, {term})"
    return text


_add = partial(define, HELPERS)
EXP = (1.0, 1.0, 0.49999994, 0.16666521, 0.041668262, 0.008368671, 0.0013821038)
_EXPM1 = (0.5, 0.16666667, 0.04166648, 0.008333208, 0.0013933566, 0.0001994427)
_EXP2 = (0.6931472, 0.2402265, 0.055503577, 0.00961806, 0.0013392067, 0.00015464141)
_TANH = (-0.333333, 0.13331936, -0.053784627, 0.020797929, -0.005896697)
_LOG = (
    0.33333337, -0.24999824, 0.19999513, -0.16679488, 0.14306135, -0.12196053, 0.107396625, -0.12847537, 0.12054127,
)  # fmt: skip

# x = n ln 2 + r: adding 1.5 * 2^23 rounds to the integer n and leaves it in the low bits of t. The high part of ln 2
# has few enough bits for the first product to be exact.
_ROUND = """\
  const float t = FUSER_FMAF({x}, 1.442695f, 12582912.0f), n = t - 12582912.0f;
"""
_REST = "  const float r = FUSER_FMAF(n, -1.4286068e-6f, FUSER_FMAF(n, -0.693145752f, {x}));\n"
REDUCE = _ROUND + _REST
# If e^r - 1 must keep its relative error, r is h + l.
_SPLIT = _ROUND + "  const float h = FUSER_FMAF(n, -0.693145752f, {x}), l = n * -1.4286068e-6f, r = h + l;\n"
# 2^n with n in the low bits of t, if the result is normal. (Adding n to a result's exponent would corrupt a NaN.)
_add("fuser_pow2_of", "  return FUSER_BITS(float, (FUSER_BITS(u32, t) << 23) + 0x3f800000u);\n", "float t")
# p 2^n for every n that a result can need: two factors of about half the exponent; only the second product rounds.
_add("fuser_scale_f32", """\
  const i32 k = FUSER_BITS(i32, t) - 0x4b400000, half = k >> 1;
  return p * FUSER_BITS(float, (u32)(half + 127) << 23) * FUSER_BITS(float, (u32)(k - half + 127) << 23);
""", "float p, float t")  # fmt: skip
_add("fuser_exp_f32", f"""\
  const bool low = x < -104.0f, high = x > 89.0f;
  const float over = high ? 89.0f : x, c = low ? -104.0f : over;
{REDUCE.format(x="c")}\
  return fuser_scale_f32({horner("r", *EXP)}, t);
""")  # fmt: skip
# For arguments between -87 and 88: neither overflow nor denormals.
_add("fuser_exp_near_f32", REDUCE.format(x="x") + f"  return {horner('r', *EXP)} * fuser_pow2_of(t);\n")
# For arguments up to 0: 2^n is 2^(n + 64), which is normal, times 2^-64, which rounds.
_add("fuser_exp_below_f32", f"""\
  const float c = x < -104.0f ? -104.0f : x;
{REDUCE.format(x="c")}\
  return {horner("r", *EXP)} * FUSER_BITS(float, (FUSER_BITS(u32, t) << 23) + 0x5f800000u) * 0x1p-64f;
""")  # fmt: skip
# The same, with 0 for denormals, which would slow down the multiplication: 2^-127 becomes 0.
_add("fuser_exp_down_f32", f"""\
  const float c = x < -88.03f ? -88.03f : x;
{REDUCE.format(x="c")}\
  return {horner("r", *EXP)} * fuser_pow2_of(t);
""")  # fmt: skip
_add("fuser_exp2_f32", f"""\
  const bool low = x < -151.0f, high = x > 129.0f;
  const float over = high ? 129.0f : x, c = low ? -151.0f : over;
  const float t = c + 12582912.0f, r = c - (t - 12582912.0f);
  const float p = FUSER_FMAF(r, {horner("r", *_EXP2)}, 1.0f);
  return fuser_scale_f32(p, t);
""")  # fmt: skip
# 2^n (e^r - 1) + (2^n - 1), computed from half of 2^n, so that 2^128 never occurs.
_add("fuser_expm1_f32", f"""\
  const bool low = x < -20.0f, high = x > 89.0f;
  const float over = high ? 89.0f : x, c = low ? -20.0f : over;
{_SPLIT.format(x="c")}\
  const float p = FUSER_FMAF(r * r, {horner("r", *_EXPM1)}, l) + h;
  const float s = FUSER_BITS(float, (FUSER_BITS(u32, t) << 23) + 0x3f000000u);
  return __builtin_copysignf(2.0f * FUSER_FMAF(s, p, s - 0.5f), x);
""")  # fmt: skip
# An odd polynomial up to 0.6; above, 1 - 2e/(1 + e) with e = e^(-2|x|).
_add("fuser_tanh_f32", f"""\
  const float a = -2.0f * __builtin_fabsf(x), c = a < -20.0f ? -20.0f : a, z = x * x;
  const float small = FUSER_FMAF(x, z * {horner("z", *_TANH)}, x), e = fuser_exp_near_f32(c);
  return __builtin_copysignf(c > -1.2f ? small : 1.0f - 2.0f * e / (1.0f + e), x);
""")  # fmt: skip
_add("fuser_sigmoid_f32", """\
  const float e = fuser_exp_below_f32(-__builtin_fabsf(x));
  return (x < 0.0f ? e : 1.0f) / (1.0f + e);
""")  # fmt: skip
# The normal distribution function, with the absolute error of 1 + erf. For |x|, half of erfc is e to the power of a
# polynomial whose leading coefficient is negative, so that it decreases without bound.
_NORMAL = (
    -0.7978853, -0.3182991, -0.036386825, 0.0048948964, -9.407396e-05, -0.0001294024, 2.7369723e-05, -1.9713068e-06,
)  # fmt: skip
_add("fuser_normal_cdf_f32", f"""\
  const float a = __builtin_fabsf(x), h = 0.5f * fuser_exp_down_f32(a * {horner("a", *_NORMAL)});
  return x > 0.0f ? 1.0f - h : h;
""")  # fmt: skip

# x = 2^e (1 + f) with 1 + f in [2/3, 4/3): then log(1 + f) = f + q. Ranges are tested on bits: g++ folds a comparison
# of floats into one of `clamp` before it, and does not vectorise the result.
_LOG_SPLIT = """\
  const bool small = FUSER_BITS(i32, x) < 0x800000;
  const u32 b = FUSER_BITS(u32, small ? x * 8388608.0f : x) - 0x3f2aaaabu;
  const float e = (float)((i32)b >> 23) - (small ? 23.0f : 0.0f);
  const float f = FUSER_BITS(float, (b & 0x7fffffu) + 0x3f2aaaabu) - 1.0f;
"""
_LOG_Q = f"  const float q = f * f * FUSER_FMAF(f, {horner('f', *_LOG)}, -0.5f);\n"
_add("fuser_log_edges_f32", """\
  const float edge = x == 0.0f ? -__builtin_inff() : x < 0.0f ? __builtin_nanf("") : x;
  return FUSER_BITS(u32, x) - 1u < 0x7f7fffffu ? y : edge;
""", "float x, float y")  # fmt: skip
_add("fuser_log_f32", f"""\
{_LOG_SPLIT}\
{_LOG_Q}\
  return fuser_log_edges_f32(x, FUSER_FMAF(e, 0.693145752f, FUSER_FMAF(e, 1.4286068e-6f, f + q)));
""")  # fmt: skip
for _name, _scale, _low, _sum in (
    ("log2", "1.442695f", "1.925963e-8f", "e + h + (h - (e + h - e) + m)"),
    ("log10", "0.4342945f", "-1.010305e-8f", "FUSER_FMAF(e, 0.30103f, FUSER_FMAF(e, -1.4320989e-8f, h + m))"),
):
    _add(f"fuser_{_name}_f32", f"""\
{_LOG_SPLIT}\
{_LOG_Q}\
  const float h = f * {_scale}, l = FUSER_FMAF(f, {_scale}, -h) + f * {_low};
  const float m = FUSER_FMAF(q, {_scale}, l);
  return fuser_log_edges_f32(x, {_sum});
""")  # fmt: skip
# u = 1 + x rounded; the rounding error is added to f.
LOG1P_SPLIT = (
    """\
  const float u = 1.0f + x, lost = (x < 1.0f ? x - (u - 1.0f) : 1.0f - (u - x)){low};
  const u32 b = FUSER_BITS(u32, u) - 0x3f2aaaabu;
  const i32 k = (i32)b >> 23;
  const float e = (float)k, s = FUSER_BITS(float, (u32)(127 - (k > 64 ? 64 : k)) << 23);
  const float f = FUSER_FMAF(lost, s, FUSER_BITS(float, (b & 0x7fffffu) + 0x3f2aaaabu) - 1.0f);
"""
    + _LOG_Q
)
_add("fuser_log1p_f32", f"""\
{LOG1P_SPLIT.replace("{low}", "")}\
  const float y = FUSER_FMAF(e, 0.693145752f, FUSER_FMAF(e, 1.4286068e-6f, f + q));
  return __builtin_copysignf(fuser_log_edges_f32(u, y), x);
""")  # fmt: skip
# For arguments from 0 to 1, where u is only halved above 4/3: the same bits.
_add("fuser_log1p_unit_f32", f"""\
  const float u = 1.0f + x, lost = x - (u - 1.0f);
  const bool halved = FUSER_BITS(i32, u) >= 0x3faaaaab;
  const float s = halved ? 0.5f : 1.0f, e = halved ? 1.0f : 0.0f;
  const float f = FUSER_FMAF(lost, s, FUSER_FMAF(u, s, -1.0f));
{_LOG_Q}\
  return FUSER_FMAF(e, 0.693145752f, FUSER_FMAF(e, 1.4286068e-6f, f + q));
""")  # fmt: skip

_ERF_SMALL = (0.12837917, -0.3761263, 0.11283618, -0.026855126, 0.005190734, -0.00080307614, 7.920368e-05)
_ERF_LARGE = (
    0.00018846603, -1.1295803, -0.63321656, -0.108421884, 0.025210192, -0.0042052306, 0.00044146288, -2.1696991e-05,
)  # fmt: skip
_add("fuser_erf_f32", f"""\
  const float a = __builtin_fabsf(x), t = a > 3.95f ? 3.95f : a, z = x * x;
  const float small = FUSER_FMAF(x, {horner("z", *_ERF_SMALL)}, x);
  const float large = 1.0f - fuser_exp_near_f32({horner("t", *_ERF_LARGE)});
  return a < 1.0f ? small : __builtin_copysignf(large, x);
""")  # fmt: skip
# erfc(a) e^(a^2) (a + 3) by t = (a - 3) / (a + 3), 0 <= a <= 10.4: 7.6e-9 (mpmath, least squares at Chebyshev's points,
# weighted again until the errors were level).
_ERFC_FAR = (
    1.0740069, -0.8833945, 0.59022784, -0.31046626, 0.11953349, -0.02683731, -0.0012402759, 0.0030709081,
    -0.00046962756, -0.00031449695,
)  # fmt: skip
# Half of erfc: below 3/4 by erf; above with e^(-a^2), the square in two parts, and 2^n as in exp_below.
_add("fuser_half_erfc_f32", f"""\
  const float a = __builtin_fabsf(x), c = a > 10.5f ? 10.5f : a, z = x * x, h = c * c, l = FUSER_FMAF(c, c, -h);
  const float small = FUSER_FMAF(x, {horner("z", *_ERF_SMALL)}, x), q = 1.0f / (c + 3.0f), v = (c - 3.0f) * q;
{REDUCE.format(x="-h").replace("float r =", "float s =")}\
  const float r = s - l, e = r * {horner("r", *EXP[1:])}, g = q * {horner("v", *_ERFC_FAR)};
  const float power = FUSER_BITS(float, (FUSER_BITS(u32, t) << 23) + 0x5f800000u);
  const float far = FUSER_FMAF(g, e, g) * power * 0x1p-65f, other = x < 0.0f ? 1.0f - far : far;
  return a < 0.75f ? FUSER_FMAF(-0.5f, small, 0.5f) : other;
""")  # fmt: skip

# The remainder of x modulo pi/2 is computed in double. From 2^50 on, where the quotient would not be exact, x is an
# integer m times 2^27, 2^54 or 2^79, whose remainder modulo 2 pi is known to 106 bits. These three were chosen so that
# their products with m stay below 2^50.02, and the product's rounding adds at most 1/8 to the remainder: the
# polynomials are valid up to 0.92.
_BUCKETS = (
    ("1125899906842624.0f", "0x1p-27", "-0x1.bcb4a23e73336p-1", "-0x1.4cc11b4920ae8p-57"),
    ("151115727451828646838272.0f", "0x1p-54", "0x1.0392366c0e65cp+1", "-0x1.af1dbc98e2e42p-56"),
    ("5070602400912917605986812821504.0f", "0x1p-79", "-0x1.082d219bb0225p-1", "0x1.29b05b18df9e2p-56"),
)

FIRST_BUCKET = _BUCKETS[0][0]


def _buckets() -> str:
    text, s, h, l = "", "1.0", "1.0", "0.0"
    for i, (bound, scale, high, low) in enumerate(_BUCKETS):
        text += f"  const bool b{i} = a >= {bound};\n"
        text += f"  const double s{i} = b{i} ? {scale} : {s}, h{i} = b{i} ? {high} : {h}, l{i} = b{i} ? {low} : {l};\n"
        s, h, l = f"s{i}", f"h{i}", f"l{i}"
    return (
        text + f"  const double m = (double)x * {s}, p = m * {h}, lost = FUSER_FMA(-m, {l}, FUSER_FMA(-m, {h}, p));\n"
    )


_add("fuser_quadrant", f"""\
  const float a = __builtin_fabsf(x);
{_buckets()}\
  const double t = FUSER_FMA(p, 0x1.45f306dc9c883p-1, 6755399441055744.0), n = t - 6755399441055744.0;
  const double r = FUSER_FMA(n, -0x1.1a62633145c07p-54, FUSER_FMA(n, -0x1.921fb54442d18p+0, p));
  *k = (u32)FUSER_BITS(u64, t);
  return r - lost;
""", "float x, u32* k", "double")  # fmt: skip
# For |r| <= 0.92, by z = r^2 (mpmath, least squares at Chebyshev's points, weighted again until the errors were level):
# (sin(r) / r - 1) / z, 2.5e-10 of sin; (cos(r) - 1 + z / 2) / z^2, 6.2e-10 of cos.
_SIN = (-0.16666667, 0.008333364, -0.00019845663, 2.752959e-06)
_COS = (0.041666612, -0.0013885917, 2.4295729e-05)
_add("fuser_turned_f32", f"""\
  const float z = r * r, s = __builtin_copysignf(FUSER_FMAF(r * z, {horner("z", *_SIN)}, r), r);
  const float c = FUSER_FMAF(z * z, {horner("z", *_COS)}, FUSER_FMAF(-0.5f, z, 1.0f)), y = (turn & 1u) != 0u ? c : s;
  return FUSER_BITS(float, FUSER_BITS(u32, y) ^ ((turn & 2u) << 30));
""", "float r, u32 turn")  # fmt: skip
for _name, _turn in (("sin", 0), ("cos", 1)):
    _add(f"fuser_{_name}_f32", f"""\
  u32 k;
  const float r = (float)fuser_quadrant(x, &k);
  return fuser_turned_f32(r, k + {_turn}u);
""")  # fmt: skip
# The same in double, as the quotient requires.
_SIN_DOUBLE = (
    0.9999999999790946, -0.16666666543008007, 0.008333321630601418, -0.00019837391681096523, 2.703200650377624e-06,
)  # fmt: skip
_COS_DOUBLE = (
    0.9999999997707291, -0.49999998643526616, 0.04166653826420817, -0.0013884632414539405, 2.4224696432178566e-05,
)  # fmt: skip
_SIN_COS = f"""\
  u32 k;
  const double r = fuser_quadrant(x, &k), z = r * r;
  const double s = r * {horner("z", *_SIN_DOUBLE, double=True)}, c = {horner("z", *_COS_DOUBLE, double=True)};
"""
_add("fuser_tan_f32", _SIN_COS + "  return (float)(k & 1u ? -c / s : s / c);\n")

# |x|^y = 2^(y log2|x|) in double, where the logarithm's error of 2^-49 keeps a float accurate almost to half an ulp.
_LOG2_ODD = (
    2.885390081777928, 0.9617966939235576, 0.5770780174619049, 0.4121983764502204, 0.32061786411249854,
    0.2614034336517348, 0.24334989629499668,
)  # fmt: skip
_EXP2_DOUBLE = (
    0.6931471805599517, 0.24022650695701311, 0.055504108664295684, 0.009618129187153835, 0.001333355825585959,
    0.0001540343624222197, 1.5252642390347443e-05, 1.3259404941892608e-06, 1.0211470091072646e-07,
)  # fmt: skip
_add("fuser_pow_magnitude_f32", f"""\
  const bool small = FUSER_BITS(i32, a) < 0x800000;
  const u32 b = FUSER_BITS(u32, small ? a * 8388608.0f : a) - 0x3f3504f3u;
  const float e = (float)((i32)b >> 23) - (small ? 23.0f : 0.0f);
  const double m = (double)FUSER_BITS(float, (b & 0x7fffffu) + 0x3f3504f3u), s = (m - 1.0) / (m + 1.0), z = s * s;
  const double log2 = FUSER_FMA(s, {horner("z", *_LOG2_ODD, double=True)}, (double)e);
  const double edge = a == 0.0f ? -__builtin_inf() : (double)a;
  const double v = (double)y * (FUSER_BITS(u32, a) - 1u < 0x7f7fffffu ? log2 : edge);
  const double low = v < -160.0 ? -160.0 : v, c = low > 160.0 ? 160.0 : low;
  const double t = c + 6755399441055744.0, r = c - (t - 6755399441055744.0);
  const double p = FUSER_FMA(r, {horner("r", *_EXP2_DOUBLE, double=True)}, 1.0);
  return (float)(p * FUSER_BITS(double, (FUSER_BITS(u64, t) + 1023ULL) << 52));
""", "float a, float y")  # fmt: skip
_add("fuser_pow_f32", """\
  const float power = fuser_pow_magnitude_f32(__builtin_fabsf(x), y), half = 0.5f * y;
  const bool whole = __builtin_floorf(y) == y, odd = whole & (__builtin_floorf(half) != half);
  const bool negative = (i32)FUSER_BITS(u32, x) < 0;
  const float signed_power = negative & odd ? -power : power;
  const bool undefined = (FUSER_BITS(u32, x) - 0x80000001u < 0x7f7fffffu) & !whole;
  const float y_is_nan = y != y ? y : signed_power;
  const bool unit = (FUSER_BITS(u32, x) == 0xbf800000u) & (__builtin_fabsf(y) == __builtin_inff());
  const float one = unit | (FUSER_BITS(u32, x) == 0x3f800000u) | (y == 0.0f) ? 1.0f : y_is_nan;
  return undefined & (y == y) ? __builtin_nanf("") : one;
""", "float x, float y")  # fmt: skip
