"""C++ helpers for conversions: float16 and bfloat16 in memory, floats to integers as on x86."""

from __future__ import annotations

from collections.abc import Callable

from fuser.machines import Machine

# One instruction, if the compiler has a builtin for it. The bits are those of the other helper.
_LONE_LOAD = """\
FUSER_FN float fuser_lone_load_half(u16 h) {
#if !defined(__clang__)
  typedef short eight __attribute__((vector_size(16)));
  return __builtin_ia32_vcvtph2ps((eight){(short)h})[0];
#else
  return fuser_load_half(h);
#endif
}
"""
_LONE_STORE = """\
FUSER_FN u16 fuser_lone_store_half(float x) {
#if !defined(__clang__)
  typedef float four __attribute__((vector_size(16)));
  const u16 h = (u16)__builtin_ia32_vcvtps2ph((four){x}, 0)[0];
  return (u16)(x != x ? (h & 0x8000u) | 0x7e00u : h);
#else
  return fuser_store_half(x);
#endif
}
"""
_PLAIN_LOAD = "FUSER_FN float fuser_lone_load_half(u16 h) { return fuser_load_half(h); }\n"
_PLAIN_STORE = "FUSER_FN u16 fuser_lone_store_half(float x) { return fuser_store_half(x); }\n"

HELPERS: dict[str, str | Callable[[Machine], str]] = {
    "fuser_load_bfloat16": """\
FUSER_FN float fuser_load_bfloat16(u16 h) { return FUSER_BITS(float, (u32)h << 16); }
""",
    # Round to nearest even; a NaN becomes the quiet NaN, as in eager.
    "fuser_store_bfloat16": """\
FUSER_FN u16 fuser_store_bfloat16(float x) {
  const u32 b = FUSER_BITS(u32, x);
  const u32 r = (b + 0x7fffu + ((b >> 16) & 1u)) >> 16;
  return (u16)(x != x ? 0x7fc0u : r);
}
""",
    # For values that a bfloat16 represents exactly.
    "fuser_store_exact_bfloat16": """\
FUSER_FN u16 fuser_store_exact_bfloat16(float x) {
  return (u16)(x != x ? 0x7fc0u : FUSER_BITS(u32, x) >> 16);
}
""",
    # x rounded to bfloat16 or float16, as a float: the result of a store and a load, in fewer steps.
    "fuser_round_bfloat16": """\
FUSER_FN float fuser_round_bfloat16(float x) {
  const u32 b = FUSER_BITS(u32, x);
  const u32 r = (b + 0x7fffu + ((b >> 16) & 1u)) & 0xffff0000u;
  return FUSER_BITS(float, x != x ? 0x7fc00000u : r);
}
""",
    # For an x that is not NaN, or a NaN with zeros in its low 16 bits, where the addition does not carry out of them.
    "fuser_round_tame_bfloat16": """\
FUSER_FN float fuser_round_tame_bfloat16(float x) {
  const u32 b = FUSER_BITS(u32, x);
  return FUSER_BITS(float, (b + 0x7fffu + ((b >> 16) & 1u)) & 0xffff0000u);
}
""",
    # A NaN keeps its sign and upper bits and becomes quiet, as in hardware conversions to float16.
    "fuser_round_half": """\
FUSER_FN float fuser_round_half(float x) {
  const u32 all = FUSER_BITS(u32, x), b = all & 0x7fffffffu, sign = all & 0x80000000u;
  const float tiny = (FUSER_BITS(float, b) + 0.5f) - 0.5f;
  const u32 normal = (b + 0xfffu + ((b >> 13) & 1u)) & 0xffffe000u;
  const u32 finite = b < 0x38800000u ? FUSER_BITS(u32, tiny) : normal;
  const u32 r = (normal >= 0x47800000u ? 0x7f800000u : finite) | sign;
  return FUSER_BITS(float, x != x ? (all | 0x400000u) & 0xffffe000u : r);
}
""",
    # Shift the fields in place and re-bias the exponent; the subtraction normalises denormals exactly.
    "fuser_load_half": """\
FUSER_FN float fuser_load_half(u16 h) {
  const u32 sign = (u32)(h & 0x8000u) << 16, fields = (u32)(h & 0x7fffu) << 13;
  const u32 normal = fields + (fields >= 0x0f800000u ? 0x70000000u : 0x38000000u);
  const float tiny = FUSER_BITS(float, fields + 0x38800000u) - FUSER_BITS(float, 0x38800000u);
  const u32 b = fields < 0x00800000u ? FUSER_BITS(u32, tiny) : normal;
  return FUSER_BITS(float, b | sign);
}
""",
    # In loops that are not vectorised.
    "fuser_lone_load_half": lambda machine: _LONE_LOAD if machine.half_casts else _PLAIN_LOAD,
    "fuser_lone_store_half": lambda machine: _LONE_STORE if machine.half_casts else _PLAIN_STORE,
    # Below 2^-14, adding 0.5 leaves the float16 denormal, rounded to nearest even, in the low bits.
    "fuser_store_half": """\
FUSER_FN u16 fuser_store_half(float x) {
  const u32 all = FUSER_BITS(u32, x), b = all & 0x7fffffffu, sign = (all >> 16) & 0x8000u;
  const float shifted = FUSER_BITS(float, b) + 0.5f;
  const u32 tiny = FUSER_BITS(u32, shifted) - 0x3f000000u;
  const u32 normal = (b - 0x38000000u + 0xfffu + ((b >> 13) & 1u)) >> 13;
  const u32 finite = b < 0x38800000u ? tiny : normal;
  const u32 large = b > 0x7f800000u ? 0x7e00u | ((b >> 13) & 0x3ffu) : 0x7c00u;
  return (u16)((b >= 0x47800000u ? large : finite) | sign);
}
""",
}

# Out of range and NaN give the smallest integer, as cvtt* does. The float is clamped, not the integer: g++ would thread
# jumps between a selection of integers and a clamp before it, and does not vectorise loops with such jumps.
for _wide in ("i32", "i64"):
    for _name, _float in (("f32", "float"), ("f64", "double")):
        _limit = ("2147483648.0" if _wide == "i32" else "9223372036854775808.0") + ("f" if _name == "f32" else "")
        # A double between limit - 1 and limit truncates to limit - 1, which fits.
        _from = "-2147483649.0" if (_wide, _name) == ("i32", "f64") else None
        _above = f"x > {_from}" if _from else f"x >= -{_limit}"
        HELPERS[f"fuser_{_wide}_from_{_name}"] = f"""\
FUSER_FN {_wide} fuser_{_wide}_from_{_name}({_float} x) {{
  const {_float} above = {_above} ? x : -{_limit};
  return ({_wide})(above < {_limit} ? above : -{_limit});
}}
"""
