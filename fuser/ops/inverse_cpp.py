"""C++ helpers: inverse trigonometric and all hyperbolic functions of float32, by the schemes of float_cpp.

They are computed in float32 without branches, within two ulps for every argument, which was tested. The polynomials
were found with mpmath in 40 digits: least squares of the result's relative error at Chebyshev's points, weighted again
until the errors were level; each coefficient was rounded to float32 before the next was fitted.
"""

from __future__ import annotations

from functools import partial

from fuser.ops import float_cpp
from fuser.ops.float_cpp import define, horner

HELPERS: dict[str, str] = {}
_add = partial(define, HELPERS)
# (asin(s) / s - 1) / z by z = s^2, z <= 1/4: 4.9e-9 of asin.
_ASIN = (0.16666752, 0.07495307, 0.04546964, 0.024181498, 0.04216512)
# (atan(t) / t - 1) / z by z = t^2, z <= 1: 2.6e-9 of atan.
_ATAN = (
    -0.333333, 0.19998536, -0.14264125, 0.10951638, -0.084019855, 0.057934247, -0.031155923, 0.010903411,
    -0.0017912235,
)  # fmt: skip
# (sinh(x) / x - 1) / z by z = x^2, z <= 1: 3.0e-10 of sinh.
_SINH = (0.16666667, 0.0083333105, 0.00019842896, 2.7822132e-06)

# pi/2 is 1.57079637 less 4.371139e-8. From 1/2 on asin a is pi/2 - 2 asin(sqrt((1 - a) / 2)), where the square root is
# NaN outside the domain.
_ARC = f"""\
  const float a = __builtin_fabsf(x);
  const bool far = a > 0.5f;
  const float half = 0.5f * (1.0f - a), z = far ? half : x * x, s = far ? __builtin_sqrtf(half) : a;
  const float p = s * z * {horner("z", *_ASIN)}, r = s + p;
"""
_add("fuser_asin_f32", f"""\
{_ARC}\
  const float h = FUSER_FMAF(-2.0f, s, 1.57079637f), l = FUSER_FMAF(-2.0f, s, 1.57079637f - h);
  const float beyond = h - (FUSER_FMAF(2.0f, p, 4.371139e-8f) - l);
  return __builtin_copysignf(far ? beyond : r, x);
""")  # fmt: skip
_add("fuser_acos_f32", f"""\
{_ARC}\
  const float near = 1.57079637f - (__builtin_copysignf(r, x) + 4.371139e-8f);
  const float left = 3.14159274f - FUSER_FMAF(2.0f, r, 8.742278e-8f), right = 2.0f * r;
  const float beyond = x < 0.0f ? left : right;
  return far ? beyond : near;
""")  # fmt: skip
_add("fuser_atan_f32", f"""\
  const float a = __builtin_fabsf(x), inverse = 1.0f / a, t = a > 1.0f ? inverse : a, z = t * t;
  const float r = FUSER_FMAF(t * z, {horner("z", *_ATAN)}, t);
  return __builtin_copysignf(a > 1.0f ? 1.57079637f - (r + 4.371139e-8f) : r, x);
""")  # fmt: skip
# The angle r from the nearer axis, and the angle of that axis: 0, pi/2 or pi.
_add("fuser_atan2_f32", f"""\
  const float a = __builtin_fabsf(x), b = __builtin_fabsf(y);
  const bool steep = b > a, left = (i32)FUSER_BITS(u32, x) < 0;
  const float low = steep ? a : b, high = steep ? b : a, q = low / high, same = high == 0.0f ? 0.0f : 1.0f;
  const float t = low == high ? same : q, z = t * t;
  const float r = FUSER_FMAF(t * z, {horner("z", *_ATAN)}, t), turned = steep != left ? -r : r;
  const float level = left ? 3.14159274f : 0.0f, level_low = left ? 8.742278e-8f : 0.0f;
  const float axis = steep ? 1.57079637f : level, axis_low = steep ? 4.371139e-8f : level_low;
  return __builtin_copysignf(axis + (turned - axis_low), y);
""", "float y, float x")  # fmt: skip

# log(1 + x + l), where l is much smaller than x.
_add("fuser_log1p_sum_f32", f"""\
{float_cpp.LOG1P_SPLIT.replace("{low}", " + l")}\
  return fuser_log_edges_f32(u, FUSER_FMAF(e, 0.693145752f, FUSER_FMAF(e, 1.4286068e-6f, f + q)));
""", "float x, float l")  # fmt: skip
# log(a + s) with s the square root of a^2 + 1; s - 1 is a^2 / (1 + s). From 2^30 on it is log(2 a).
_add("fuser_asinh_f32", """\
  const float a = __builtin_fabsf(x);
  const bool far = a > 1073741824.0f;
  const float c = far ? 0.0f : a, w = c * c, r = w / (1.0f + __builtin_sqrtf(w + 1.0f)), h = a + r;
  const float y = fuser_log1p_sum_f32(h, far ? 0.0f : a - h + r);
  return __builtin_copysignf(y + (far ? 0.6931472f : 0.0f), x);
""")  # fmt: skip
# log(1 + t + s) with t = x - 1 and s the square root of t (t + 2).
_add("fuser_acosh_f32", """\
  const bool far = x > 1073741824.0f;
  const float t = x - 1.0f, c = far ? 1.0f : t, q = FUSER_FMAF(c, c, 2.0f * c), s = __builtin_sqrtf(q);
  const float near = c + s, lost = FUSER_FMAF(-s, s, q) * (0.5f / (s + 0x1p-99f));
  const float y = fuser_log1p_sum_f32(far ? x : near, far ? 0.0f : s - near + c + lost);
  const float value = y + (far ? 0.6931472f : 0.0f);
  return x < 1.0f ? __builtin_nanf("") : value;
""")  # fmt: skip
# Half of log(1 + 2 a / (1 - a)).
_add("fuser_atanh_f32", """\
  const float a = __builtin_fabsf(x), d = 1.0f - a, inverse = 1.0f / d, h = 2.0f * a * inverse;
  const float l = (FUSER_FMAF(-h, d, 2.0f * a) - h * (1.0f - d - a)) * inverse;
  return __builtin_copysignf(0.5f * fuser_log1p_sum_f32(h, a < 1.0f ? l : 0.0f), x);
""")  # fmt: skip
# Half of e^a, a >= 0: 2^n is 2^(n - 2) times 4, as 2^128 is not a float.
_add("fuser_half_exp_f32", f"""\
  const float c = a > 89.5f ? 89.5f : a;
{float_cpp.REDUCE.format(x="c")}\
  return {horner("r", *float_cpp.EXP)} * FUSER_BITS(float, (FUSER_BITS(u32, t) << 23) + 0x3e800000u) * 2.0f;
""", "float a")  # fmt: skip
_add("fuser_sinh_f32", f"""\
  const float a = __builtin_fabsf(x), z = x * x, e = fuser_half_exp_f32(a);
  const float small = FUSER_FMAF(a * z, {horner("z", *_SINH)}, a);
  return __builtin_copysignf(a < 1.0f ? small : e - 0.25f / e, x);
""")  # fmt: skip
_add("fuser_cosh_f32", "  const float e = fuser_half_exp_f32(__builtin_fabsf(x));\n  return e + 0.25f / e;\n")
