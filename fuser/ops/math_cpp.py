"""C++ helpers for floating-point functions."""

from __future__ import annotations

from collections.abc import Callable

from fuser.machines import Machine
from fuser.ops.float_cpp import define

HELPERS: dict[str, str | Callable[[Machine], str]] = {}
_WIDTHS = (("float", "f", "f32", "i32"), ("double", "", "f64", "i64"))


def _both(name: str, args: str, body: str) -> None:
    """Add `fuser_<name>_f32` and `_f64`; in `body` T is the type, I its integer, {f} and {D} are the suffixes."""
    for kind, f, d, i in _WIDTHS:
        text = body.replace("{f}", f).replace("{D}", d).replace("{T}", kind).replace("{I}", i)
        define(HELPERS, f"fuser_{name}_{d}", text, ", ".join(f"{kind} {a}" for a in args.split()), kind)


# libm's own functions; better ones of the package are in `float_cpp`, `inverse_cpp` and `double_cpp`.
for _name in "asinh atan cosh erf expm1 sinh tanh".split():
    HELPERS[f"fuser_{_name}_f64"] = f"FUSER_FN double fuser_{_name}_f64(double x) {{ return {_name}(x); }}\n"
for _name in "atan2 hypot".split():
    HELPERS[f"fuser_{_name}_f64"] = (
        f"FUSER_FN double fuser_{_name}_f64(double x, double y) {{ return {_name}(x, y); }}\n"
    )
HELPERS["fuser_hypot_f32"] = """\
FUSER_FN float fuser_hypot_f32(float x, float y) { return (float)hypot((double)x, (double)y); }
"""
HELPERS["fuser_erfc_f32"] = """\
FUSER_FN float fuser_erfc_f32(float x) {
  const bool inside = (x > -4.0f) & (x < 10.5f), same = (x >= -3.9999998f) & (x <= 10.499999f);
  const float value = (float)erfc((double)(same ? x : x - __builtin_truncf(x)));
  const float edge = x < 0.0f ? 2.0f : x != x ? x : 0.0f;
  return inside ? value : edge;
}
"""
# Exact, since the remainder of `a` after whole multiples of `b` is a double: the quotient is computed in two digits of
# 40 bits, each within one unit. Vectors with a larger quotient call libm, element by element. libmvec has no such
# function: these have the names under which a compiler looks for one (the vector function ABI of x86-64).
_VECTOR_FMOD = """\
#if defined(FUSER_SIMD_MATH)
template <int N> struct fuser_doubles { typedef double type __attribute__((vector_size(8 * N))); };
#define FUSER_EACH for (int i = 0; i < N; ++i)
template <int N, typename V> static inline __attribute__((always_inline)) V fuser_fmod_lanes(V a, V b) {
  const V inverse = 1.0 / b, step = b * 0x1p40;
  V high, low, out;
  int far = 0;
  FUSER_EACH high[i] = __builtin_rint(a[i] * (inverse[i] * 0x1p-40));
  FUSER_EACH out[i] = __builtin_fma(-high[i], step[i], a[i]);
  FUSER_EACH low[i] = __builtin_rint(out[i] * inverse[i]);
  FUSER_EACH out[i] = __builtin_fma(-low[i], b[i], out[i]);
  FUSER_EACH {
    const double size = __builtin_fabs(b[i]), other = out[i] + __builtin_copysign(b[i], a[i]);
    const double r = (out[i] < 0) == (a[i] < 0) ? out[i] : other;
    out[i] = __builtin_copysign(out[i] == 0 ? 0.0 : r, a[i]);
    far |= !(__builtin_fabs(a[i]) < size * 0x1p80) | !(size > 0x1p-900) | !(size < 0x1p900);
  }
  if (__builtin_expect(far, 0)) FUSER_EACH out[i] = fmod(a[i], b[i]);
  return out;
}
// Of two floats: up to 2^28 their quotient in double is no whole number that it is not.
template <int N, typename V> static inline __attribute__((always_inline)) V fuser_fmod_float_lanes(V a, V b) {
  V out;
  int far = 0;
  FUSER_EACH {
    const double size = __builtin_fabs(b[i]), r = __builtin_fma(-__builtin_trunc(a[i] / b[i]), b[i], a[i]);
    out[i] = __builtin_copysign(r, a[i]);
    far |= !(__builtin_fabs(a[i]) < size * 0x1p28) | !(size < __builtin_inf());
  }
  if (__builtin_expect(far, 0)) FUSER_EACH out[i] = fmod(a[i], b[i]);
  return out;
}
#define FUSER_FMOD_OF(name, isa, n) \\
  static __attribute__((used)) fuser_doubles<n>::type name##_##isa( \\
      fuser_doubles<n>::type a, fuser_doubles<n>::type b) __asm__("_ZGV" #isa "N" #n "vv_" #name "_any"); \\
  static fuser_doubles<n>::type name##_##isa(fuser_doubles<n>::type a, fuser_doubles<n>::type b) { \\
    return name##_lanes<n>(a, b); \\
  }
#define FUSER_FMOD_ALL(name) \\
  FORMS \\
  static __attribute__((used)) double name##_one(double a, double b) __asm__(#name "_any"); \\
  static double name##_one(double a, double b) { return fmod(a, b); } \\
  extern "C" FUSER_VEC double name##_any(double a, double b);
#else
PLAIN#endif
"""
_PLAIN_FMOD = """\
#define FUSER_FMOD_ALL(name)
#define fuser_fmod_any(a, b) fmod(a, b)
#define fuser_fmod_float_any(a, b) fmod(a, b)
"""


def _fmod(machine: Machine) -> str:
    if not machine.vector_math:
        return _PLAIN_FMOD
    forms = " ".join(f"FUSER_FMOD_OF(name, {isa}, {n})" for isa, n in machine.vector_math)
    return _VECTOR_FMOD.replace("FORMS", forms).replace("PLAIN", _PLAIN_FMOD)


HELPERS["FUSER_FMOD_ALL"] = _fmod
HELPERS["fuser_fmod_f64"] = """\
FUSER_FMOD_ALL(fuser_fmod)
FUSER_FN double fuser_fmod_f64(double a, double b) { return fuser_fmod_any(a, b); }
"""
HELPERS["fuser_fmod_f32"] = """\
FUSER_FMOD_ALL(fuser_fmod_float)
FUSER_FN float fuser_fmod_f32(float a, float b) { return (float)fuser_fmod_float_any((double)a, (double)b); }
"""
_both("remainder", "a b", """\
  const {T} r = fuser_fmod_{D}(a, b);
  return (r != 0) & ((b < 0) != (r < 0)) ? r + b : r;
""")  # fmt: skip
_both("floor_div", "a b", """\
  const {T} r = fuser_fmod_{D}(a, b);
  {T} q = (a - r) / b;
  q = (r != 0) & ((b < 0) != (r < 0)) ? q - 1 : q;
  const {T} low = __builtin_floor{f}(q), exact = a / b;
  const {T} near = q - low > ({T})0.5 ? low + 1 : low;
  return b == 0 ? exact : q != 0 ? near : __builtin_copysign{f}(0, exact);
""")  # fmt: skip
_NORMAL = "  return (double)0.5 * (1 + fuser_erf_f64(x * (double)0.70710678118654752));\n"
define(HELPERS, "fuser_normal_cdf_f64", _NORMAL, kind="double")
define(HELPERS, "fuser_exp_down_f64", "  return fuser_exp_f64(x);\n", kind="double")
_both("nextafter", "a b", """\
  const {I} x = FUSER_BITS({I}, a);
  const {I} up = (a < b) == (a > 0) ? 1 : -1;
  const {T} tiny = __builtin_copysign{f}(FUSER_BITS({T}, ({I})1), b);
  const {T} near = a == 0 ? tiny : FUSER_BITS({T}, x + up);
  return (a != a) | (b != b) ? a + b : a == b ? b : near;
""")  # fmt: skip
for _kind, _f, _d, _ in _WIDTHS:
    HELPERS[f"fuser_frexp_fraction_{_d}"] = (
        f"FUSER_FN {_kind} fuser_frexp_fraction_{_d}({_kind} x) {{ int e; return __builtin_frexp{_f}(x, &e); }}\n"
    )
    HELPERS[f"fuser_frexp_exponent_{_d}"] = (
        f"FUSER_FN i32 fuser_frexp_exponent_{_d}({_kind} x) {{ int e = 0; __builtin_frexp{_f}(x, &e); return e; }}\n"
    )


def sum_of_logs(name: str, suffix: str, total: str, more: str = "") -> str:
    """C++ text of log(exp(a) + exp(b)): in `total`, `m` is the larger argument and `d` the other one minus `m`."""
    kind, f = ("float", "f") if suffix == "f32" else ("double", "")
    return f"""\
FUSER_FN {kind} fuser_{name}_{suffix}({kind} a, {kind} b) {{
  const double m = a > b ? a : b, d = a > b ? (double)b - a : (double)a - b{more};
  const {kind} s = ({kind}){total};
  const bool same_inf = (a == b) & (__builtin_fabs{f}(a) == __builtin_inf{f}());
  return (a != a) | (b != b) ? a + b : same_inf ? a : s;
}}
"""


# In a sequential loop libm's scalar functions are faster than vector ones.
HELPERS["fuser_logaddexp_in_order_f64"] = sum_of_logs(
    "logaddexp_in_order", "f64", "(m + __builtin_log1p(__builtin_exp(d)))"
)
_PRODUCT = """\
  const {T} v = a * fuser_LOG_{D}(b);
  return b != b ? b : a == 0 ? ({T})0 : v;
"""
_both("xlogy", "a b", _PRODUCT.replace("LOG", "log"))
_both("xlog1py", "a b", _PRODUCT.replace("LOG", "log1p"))
_both("entr", "x", """\
  const {T} v = -x * fuser_log_{D}(x);
  return x != x ? x : x > 0 ? v : x == 0 ? ({T})0 : -__builtin_inf{f}();
""")  # fmt: skip
