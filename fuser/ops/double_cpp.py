"""C++ helpers: elementary functions of float64, by the schemes of float_cpp, where libmvec's are over two ulps off.

Other float64 functions are libm's, in libmvec's vector form if there is one.
"""

from __future__ import annotations

from functools import partial

from fuser.ops.float_cpp import define, horner

HELPERS: dict[str, str] = {}
_add = partial(define, HELPERS, kind="double")
_EXP = (
    0.5000000000000001, 0.16666666666666669, 0.04166666666662348, 0.008333333333330011, 0.0013888888917538296,
    0.00019841269863303223, 2.4801520792572694e-05, 2.75572680728901e-06, 2.762032742826824e-07, 2.5100569275813683e-08,
)  # fmt: skip
_EXP2 = (
    0.6931471805599453, 0.24022650695910072, 0.055504108664821625, 0.00961812910762848, 0.0013333558146406117,
    0.00015403530393370558, 1.5252733842009231e-05, 1.3215486808928519e-06, 1.0178056855501161e-07,
    7.054897189206508e-09, 4.455859112330208e-10, 2.572952812566595e-11,
)  # fmt: skip
_add("fuser_pow2_of_f64", """\
  return FUSER_BITS(double, (FUSER_BITS(u64, t) << 52) + 0x3ff0000000000000ULL);
""", "double t")  # fmt: skip
_add("fuser_scale_f64", """\
  const u64 b = FUSER_BITS(u64, t), half = FUSER_BITS(u64, t_half);
  return p * fuser_pow2_of_f64(t_half) * FUSER_BITS(double, (b - half + 1023u) << 52);
""", "double p, double t, double t_half")  # fmt: skip
_EXP_BODY = f"""\
  const double t = FUSER_FMA(c, 1.4426950408889634, 6755399441055744.0), n = t - 6755399441055744.0;
  const double h = FUSER_FMA(n, -6.93147180369123816490e-01, c), l = n * -1.90821492927058770002e-10, r = h + l;
  const double p = FUSER_FMA(r * r, {horner("r", *_EXP, double=True)}, l) + h + 1.0;
  const double e = fuser_scale_f64(p, t, FUSER_FMA(c, 0.7213475204444817, 6755399441055744.0));
"""
_add("fuser_exp_f64", f"""\
  const bool low = x < -746.0, high = x > 710.0;
  const double over = high ? 710.0 : x, c = low ? -746.0 : over;
{_EXP_BODY}\
  return e;
""")  # fmt: skip
_add("fuser_sigmoid_f64", f"""\
  const double a = -__builtin_fabs(x), c = a < -746.0 ? -746.0 : a;
{_EXP_BODY}\
  const double d = 1.0 + e, y = (x < 0.0 ? e : 1.0) / d;
  return FUSER_FMA(y, d - 1.0 - e, y);
""")  # fmt: skip
_add("fuser_exp2_f64", f"""\
  const bool low = x < -1076.0, high = x > 1025.0;
  const double over = high ? 1025.0 : x, c = low ? -1076.0 : over;
  const double t = c + 6755399441055744.0, r = c - (t - 6755399441055744.0);
  const double p = FUSER_FMA(r, {horner("r", *_EXP2, double=True)}, 1.0);
  return fuser_scale_f64(p, t, FUSER_FMA(c, 0.5, 6755399441055744.0));
""")  # fmt: skip

# Three parts of pi/2 keep the remainder of |x| < 2^30 exact to its last bit. Beyond that libm is called.
_SIN = (
    -0.16666666666666666, 0.00833333333333093, -0.0001984126983673089, 2.7557316088203675e-06, -2.5051128856786725e-08,
    1.591791417048074e-10,
)  # fmt: skip
_COS = (
    0.041666666666666664, -0.0013888888888887387, 2.480158729874837e-05, -2.7557317262753467e-07,
    2.0876144399012594e-09, -1.1382497845488828e-11,
)  # fmt: skip
_TRIG = f"""\
  const bool near = __builtin_fabs(x) < 1073741824.0;
  const double small = near ? x : 0.0, large = near ? 0.0 : x;
  const double t = FUSER_FMA(small, 0x1.45f306dc9c883p-1, 6755399441055744.0), n = t - 6755399441055744.0;
  const double h = FUSER_FMA(n, -0x1.921fb54442d18p+0, small), m = FUSER_FMA(n, -0x1.1a62633145c07p-54, h);
  const double r = small == 0.0 ? small : FUSER_FMA(n, 0x1.f1976b7ed8fbcp-110, m);
  const u64 k = FUSER_BITS(u64, t);
  const double z = r * r, s = __builtin_copysign(FUSER_FMA(r * z, {horner("z", *_SIN, double=True)}, r), r);
  const double g = 0.5 * z, w = 1.0 - g, c = w + FUSER_FMA(z * z, {horner("z", *_COS, double=True)}, 1.0 - w - g);
"""
for _name, _turn in (("sin", 0), ("cos", 1)):
    _add(f"fuser_{_name}_f64", f"""\
{_TRIG}\
  const u64 turn = k + {_turn}u;
  const double y = turn & 1u ? c : s;
  return near ? FUSER_BITS(double, FUSER_BITS(u64, y) ^ ((turn & 2u) << 62)) : {_name}(large);
""")  # fmt: skip
# The quotient's second digit comes from the rounding errors of r, the sine and the cosine.
_add("fuser_tan_f64", f"""\
{_TRIG}\
  const double r_low = FUSER_FMA(n, -0x1.1a62633145c07p-54, h - m) + FUSER_FMA(n, 0x1.f1976b7ed8fbcp-110, m - r);
  const double s_low = FUSER_FMA(r * z, {horner("z", *_SIN, double=True)}, r - s);
  const double c_low = w - c + FUSER_FMA(z * z, {horner("z", *_COS, double=True)}, 1.0 - w - g);
  const bool odd = k & 1u;
  const double a = odd ? -c : s, b = odd ? s : c, a_low = odd ? -c_low : s_low, b_low = odd ? s_low : c_low;
  const double q = a / b, low = FUSER_FMA(-q, b_low, FUSER_FMA(-q, b, a) + a_low) / b;
  const double y = q + FUSER_FMA(r_low, FUSER_FMA(q, q, 1.0), low);
  return near ? __builtin_copysign(y, y == 0.0 ? x : y) : tan(large);
""")  # fmt: skip

# The vector library handles arguments outside a function's domain one element at a time. Here it gets another argument
# inside the domain instead. The domain is tested in two forms, for the argument and for the value: from a single test,
# or an argument that is a constant, g++ would make a branch around the call, and remove the replacement.
_POSITIVE = ("__builtin_fabs(x)", "x > 0.0", "x == 0.0 ? -__builtin_inf() : x < 0.0 ? NAN : x")
_UNIT = ("__builtin_fabs(x) < 1.0000000000000002 ? x : x - __builtin_trunc(x)", "__builtin_fabs(x) <= 1.0", "NAN")
for _name, (_argument, _inside, _edge) in {
    "log": _POSITIVE,
    "log2": _POSITIVE,
    "log10": _POSITIVE,
    "log1p": (
        "x >= -0.9999999999999999 ? x : -2.0 - x", "x > -1.0", "x == -1.0 ? -__builtin_inf() : x < -1.0 ? NAN : x",
    ),
    "acosh": ("x > 0.9999999999999999 ? x : 2.0 - x", "x >= 1.0", "NAN"),
    "atanh": (
        "__builtin_fabs(x) <= 0.9999999999999999 ? x : x - __builtin_trunc(x)", "__builtin_fabs(x) < 1.0",
        "__builtin_fabs(x) == 1.0 ? x * __builtin_inf() : NAN",
    ),
    "asin": _UNIT,
    "acos": _UNIT,
    "erfc": (
        "(x >= -6.499999999999999) & (x <= 27.299999999999997) ? x : x - __builtin_trunc(x)",
        "(x > -6.5) & (x < 27.3)", "x < 0.0 ? 2.0 : x != x ? x : 0.0",
    ),
}.items():  # fmt: skip
    _add(f"fuser_{_name}_f64", f"""\
  const double value = {_name}({_argument}), edge = {_edge.replace("NAN", '__builtin_nan("")')};
  return {_inside} ? value : edge;
""")  # fmt: skip
_add("fuser_pow_f64", """\
  const double a = __builtin_fabs(x), half = 0.5 * y;
  const bool zero = a == 0.0, inside = (a > 0.0) & (a < __builtin_inf());
  const double unless_zero = FUSER_BITS(double, FUSER_BITS(u64, a) | (zero ? 0x3ff0000000000000ULL : 0ULL));
  const double value = pow(unless_zero, y), flip = y > 0.0 ? a : 1.0 / a;
  const double power = inside | (y == 0.0) ? value : flip;
  const bool whole = __builtin_floor(y) == y, odd = whole & (__builtin_floor(half) != half);
  const bool negative = FUSER_BITS(i64, x) < 0;
  const double signed_power = negative & odd ? -power : power;
  const bool undefined = (x < 0.0) & inside & !whole;
  const double y_is_nan = y != y ? y : signed_power;
  const bool unit = (x == -1.0) & (__builtin_fabs(y) == __builtin_inf());
  const double one = unit | (x == 1.0) | (y == 0.0) ? 1.0 : y_is_nan;
  return undefined & (y == y) ? __builtin_nan("") : one;
""", "double x, double y")  # fmt: skip
_add("fuser_half_erfc_f64", "  return 0.5 * fuser_erfc_f64(x);\n")
