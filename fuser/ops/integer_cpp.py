"""C++ helpers for integers: division that never traps, shifts, powers, gcd.

Dividing by zero gives 0 and the smallest integer divided by -1 wraps: a machine instruction for either would end the
process. Up to 32 bits the quotient is taken in floating point, where it is exact and vectorises: truncating a/b
rounded to nearest is right as long as the type holds |a| with a bit to spare. Of 64 bits the quotient is taken twice,
of the dividend and of what the first leaves, and is then off by one at most.
"""

from __future__ import annotations

_TYPES = {"i8": "float", "i16": "float", "i32": "double", "u8": "float"}

# By magnitudes, which are at most 2^63.
_NARROW = """\
const i64 d = (b == 0) | (b == -1) ? 1LL : b, q = a / d;
    return b == -1 ? (i64)(0ULL - (u64)a) : b == 0 ? 0LL : q;"""
_WIDE = """\
const u64 m = a < 0 ? 0ULL - (u64)a : (u64)a, size = b < 0 ? 0ULL - (u64)b : (u64)b, n = size == 0 ? 1ULL : size;
  const double inverse = 1.0 / (double)n;
  const u64 q = (u64)((double)m * inverse), rest = m - q * n;
  const i64 more = (i64)((double)(i64)rest * inverse), left = (i64)(rest - (u64)more * n);
  const u64 whole = q + (u64)more - (u64)(left < 0) + (u64)((left >= 0) & ((u64)left >= n));
  return b == 0 ? 0LL : (i64)((a < 0) != (b < 0) ? 0ULL - whole : whole);"""


def _division(name: str, quotient: str | None) -> dict[str, str]:
    if quotient:
        f = "f" if quotient == "float" else ""
        # The i32 quotient 2^31 (of INT_MIN / -1) has to wrap, so it goes through i64.
        via = "i64" if name == "i32" else "i32"
        body = f"const {quotient} q = __builtin_trunc{f}(({quotient})a / ({quotient})(b == 0 ? ({name})1 : b));\n"
        body += f"  return b == 0 ? ({name})0 : ({name})({via})q;"
    else:
        # A division by a number is a multiplication, but what makes a floor of it costs more than it saves.
        body = f"if (__builtin_constant_p(b)) {{\n    {_NARROW}\n  }}\n  return fuser_wide_div_i64(a, b);"
    wide = "u64" if name == "i64" else "u32"
    floored = "fuser_wide_div_i64" if name == "i64" else f"fuser_trunc_div_{name}"
    return {
        f"fuser_trunc_div_{name}": f"""\
FUSER_FN {name} fuser_trunc_div_{name}({name} a, {name} b) {{
  {body}
}}
""",
        f"fuser_floor_div_{name}": f"""\
FUSER_FN {name} fuser_floor_div_{name}({name} a, {name} b) {{
  const {name} q = {floored}(a, b);
  const {name} r = ({name})(({wide})a - ({wide})q * ({wide})b);
  return (b != 0) & (r != 0) & ((r < 0) != (b < 0)) ? ({name})(q - 1) : q;
}}
""",
        f"fuser_fmod_{name}": f"""\
FUSER_FN {name} fuser_fmod_{name}({name} a, {name} b) {{
  const {name} q = fuser_trunc_div_{name}(a, b);
  return b == 0 ? ({name})0 : ({name})(({wide})a - ({wide})q * ({wide})b);
}}
""",
        f"fuser_remainder_{name}": f"""\
FUSER_FN {name} fuser_remainder_{name}({name} a, {name} b) {{
  const {name} r = ({name})(b == 0 ? 0 : ({wide})a - ({wide}){floored}(a, b) * ({wide})b);
  return (r != 0) & ((r < 0) != (b < 0)) ? ({name})(({wide})r + ({wide})b) : r;
}}
""",
    }


def _shifts(name: str, bits: int) -> dict[str, str]:
    wide = "u64" if name == "i64" else "u32"
    most = bits if name == "u8" else bits - 1
    right = "0" if name == "u8" else f"a >> {most}"
    left = f"""\
  const bool out = (b < 0) | (b >= {bits});
  return out ? ({name})0 : ({name})(({wide})a << (out ? ({name})0 : b));"""
    down = f"""\
  const bool out = (b < 0) | (b >= {most});
  return out ? ({name})({right}) : ({name})(a >> (out ? ({name})0 : b));"""
    if bits < 32:  # what is shifted out is out, with the bits of the wider type that have room for it
        own = f"u{bits}"
        left = f"  const {own} n = ({own})b < {bits} ? ({own})b : ({own}){bits};\n  return ({name})(a << n);"
        down = f"  const {own} n = ({own})b < {most} ? ({own})b : ({own}){most};\n  return ({name})(a >> n);"
    return {
        f"fuser_lshift_{name}": f"FUSER_FN {name} fuser_lshift_{name}({name} a, {name} b) {{\n{left}\n}}\n",
        f"fuser_rshift_{name}": f"FUSER_FN {name} fuser_rshift_{name}({name} a, {name} b) {{\n{down}\n}}\n",
    }


def _loops(name: str) -> dict[str, str]:
    wide = "u64" if name == "i64" else "u32"
    product = "i64" if name == "i64" else "i32"
    # As many steps as a narrow exponent has bits, one after another, become vectors; a loop does not.
    step = "r = n & 1 ? r * p : r;"
    steps = {"i8": 7, "u8": 8, "i16": 15}.get(name)
    power = " p *= p; n >>= 1;\n  ".join([step] * steps) if steps else f"for (; n; n >>= 1, p *= p) {step}"
    return {
        # A negative exponent gives the integer part of the real power: 1, -1 or 0.
        f"fuser_pow_{name}": f"""\
FUSER_FN {name} fuser_pow_{name}({name} a, {name} b) {{
  {wide} r = 1, p = ({wide})a, n = b < 0 ? 0 : ({wide})b;
  {power}
  const {name} inverse = a == 1 ? ({name})1 : ({wide})a == ({wide})-1 ? ({name})(b % 2 ? -1 : 1) : ({name})0;
  return b < 0 ? inverse : ({name})r;
}}
""",
        f"fuser_abs_{name}": f"""\
FUSER_FN {name} fuser_abs_{name}({name} a) {{ return a < 0 ? ({name})(0 - ({wide})a) : a; }}
""",
        f"fuser_gcd_{name}": f"""\
FUSER_FN {name} fuser_gcd_{name}({name} a, {name} b) {{
  a = fuser_abs_{name}(a);
  b = fuser_abs_{name}(b);
  while (a != 0) {{
    const {name} c = a;
    a = ({name})(b % a);
    b = c;
  }}
  return b;
}}
""",
        f"fuser_lcm_{name}": f"""\
FUSER_FN {name} fuser_lcm_{name}({name} a, {name} b) {{
  const {name} g = fuser_gcd_{name}(a, b);
  const {product} p = ({product})(({wide})fuser_trunc_div_{name}(a, g) * ({wide})b);
  return ({name})(p < 0 ? 0 - ({wide})p : p);
}}
""",
    }


HELPERS: dict[str, str] = {
    "fuser_wide_div_i64": f"FUSER_FN i64 fuser_wide_div_i64(i64 a, i64 b) {{\n  {_WIDE}\n}}\n",
}
for _name, _bits in (("i8", 8), ("i16", 16), ("i32", 32), ("i64", 64), ("u8", 8)):
    HELPERS.update(_division(_name, _TYPES.get(_name)))
    HELPERS.update(_shifts(_name, _bits))
    HELPERS.update(_loops(_name))
