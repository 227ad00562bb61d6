"""C++ helpers for integers: division that never traps, shifts, powers, gcd.

Division by zero gives 0, and the smallest integer divided by -1 wraps: a machine instruction for either would end the
process. Up to 32 bits the quotient is computed in floating point, where it is exact and vectorises: truncating a/b
rounded to nearest is right if the type represents |a| with a bit to spare. For 64 bits two quotients are computed, of
the dividend and of the remainder of the first; their sum is off by at most one. On machines without vectors of
conversions between 64-bit integers and doubles, such as AVX2, the processor's division is faster, three times on Zen 3.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fuser.machines import Machine
from fuser.ops.float_cpp import define

_TYPES = {"i8": "float", "i16": "float", "i32": "double", "u8": "float"}

# On magnitudes, which are at most 2^63.
_NARROW = """\
const {kind} d = (b == 0) | (b == -1) ? ({kind})1 : b, q = a / d;
    return b == -1 ? ({kind})(0 - ({unsigned})a) : b == 0 ? ({kind})0 : q;"""
_WIDE = """\
const u64 m = a < 0 ? 0ULL - (u64)a : (u64)a, size = b < 0 ? 0ULL - (u64)b : (u64)b, n = size == 0 ? 1ULL : size;
  const double inverse = 1.0 / (double)n;
  const u64 q = (u64)((double)m * inverse), rest = m - q * n;
  const i64 more = (i64)((double)(i64)rest * inverse), left = (i64)(rest - (u64)more * n);
  const u64 whole = q + (u64)more - (u64)(left < 0) + (u64)((left >= 0) & ((u64)left >= n));
  return b == 0 ? 0LL : (i64)((a < 0) != (b < 0) ? 0ULL - whole : whole);"""


HELPERS: dict[str, str | Callable[[Machine], str]] = {}


def _add(op: str, kind: str, body: str, args: str = "a b") -> None:
    """Add `fuser_<op>_<kind>`, whose parameters and result are integers of type `kind`."""
    define(HELPERS, f"fuser_{op}_{kind}", body, ", ".join(f"{kind} {a}" for a in args.split()), kind)


def _division(name: str, wide: str, quotient: str | None) -> None:
    """Add the divisions of a type; `quotient`: the floating-point type that computes the quotient, if any."""
    for op in ("trunc_div", "floor_div", "fmod", "remainder"):
        plain, vectors = (_division_of(op, name, wide, quotient, casts) for casts in (False, True))
        helper = f"fuser_{op}_{name}"
        HELPERS[helper] = vectors if plain == vectors else partial(_chosen, plain, vectors)


def _chosen(plain: str, vectors: str, machine: Machine) -> str:
    return vectors if machine.wide_casts else plain


def _division_of(op: str, name: str, wide: str, quotient: str | None, casts: bool) -> str:
    """The text of a division for machines with vectors of conversions between 64-bit integers and doubles, or none."""
    alone = name == "i64" and not casts  # scalar code
    divided = "fuser_wide_div_i64" if name == "i64" and casts else f"fuser_trunc_div_{name}"
    # g++ makes scalar code of a choice jump, which the processor cannot predict if signs differ.
    lower = "q - (i64){other}" if alone else f"{{other}} ? ({name})(q - 1) : q"
    onward = "r + (b & -(i64){other})" if alone else f"{{other}} ? ({name})(({wide})r + ({wide})b) : r"
    body = {
        "trunc_div": f"  {_quotient(name, quotient, casts)}\n",
        "floor_div": f"""\
  const {name} q = {divided}(a, b);
  const {name} r = ({name})(({wide})a - ({wide})q * ({wide})b);
  return {lower.format(other="((b != 0) & (r != 0) & ((r < 0) != (b < 0)))")};
""",
        "fmod": f"""\
  const {name} q = fuser_trunc_div_{name}(a, b);
  return b == 0 ? ({name})0 : ({name})(({wide})a - ({wide})q * ({wide})b);
""",
        "remainder": f"""\
  const {name} r = ({name})(b == 0 ? 0 : ({wide})a - ({wide}){divided}(a, b) * ({wide})b);
  return {onward.format(other="((r != 0) & ((r < 0) != (b < 0)))")};
""",
    }[op]
    return f"FUSER_FN {name} fuser_{op}_{name}({name} a, {name} b) {{\n{body}}}\n"


def _quotient(name: str, quotient: str | None, casts: bool) -> str:
    """The statements that return the quotient of `a` and `b`, truncated."""
    if name == "i64":
        native = _NARROW.format(kind="i64", unsigned="u64")
        if not casts:
            return native
        # A division by a constant is a multiplication, but the steps to a floor from it cost more than it saves.
        return f"if (__builtin_constant_p(b)) {{\n    {native}\n  }}\n  return fuser_wide_div_i64(a, b);"
    f = "f" if quotient == "float" else ""
    body = f"const {quotient} q = __builtin_trunc{f}(({quotient})a / ({quotient})(b == 0 ? ({name})1 : b));\n"
    if name != "i32":
        return body + f"  return b == 0 ? ({name})0 : ({name})(i32)q;"
    # 2^31 (of INT_MIN / -1) has to wrap.
    if casts:
        return body + "  return b == 0 ? (i32)0 : (i32)(i64)q;"
    native = _NARROW.format(kind="i32", unsigned="u32")
    body += "  return b == 0 ? (i32)0 : (i32)(q == 2147483648.0 ? -q : q);"
    return f"if (__builtin_constant_p(b)) {{\n    {native}\n  }}\n  {body}"


def _shifts(name: str, wide: str, bits: int) -> None:
    most = bits if name == "u8" else bits - 1
    right = "0" if name == "u8" else f"a >> {most}"
    left = f"""\
  const bool out = (b < 0) | (b >= {bits});
  return out ? ({name})0 : ({name})(({wide})a << (out ? ({name})0 : b));"""
    down = f"""\
  const bool out = (b < 0) | (b >= {most});
  return out ? ({name})({right}) : ({name})(a >> (out ? ({name})0 : b));"""
    if bits < 32:  # shifting out all bits of the wider type needs no selection
        own = f"u{bits}"
        left = f"  const {own} n = ({own})b < {bits} ? ({own})b : ({own}){bits};\n  return ({name})(a << n);"
        down = f"  const {own} n = ({own})b < {most} ? ({own})b : ({own}){most};\n  return ({name})(a >> n);"
    _add("lshift", name, f"{left}\n")
    _add("rshift", name, f"{down}\n")


def _loops(name: str, wide: str) -> None:
    product = "i64" if name == "i64" else "i32"
    # A fixed number of steps, one for each bit of a narrow exponent, vectorises; a loop does not.
    step = "r = n & 1 ? r * p : r;"
    steps = {"i8": 7, "u8": 8, "i16": 15}.get(name)
    power = " p *= p; n >>= 1;\n  ".join([step] * steps) if steps else f"for (; n; n >>= 1, p *= p) {step}"
    # A negative exponent gives the integer part of the real power: 1, -1 or 0.
    _add("pow", name, f"""\
  {wide} r = 1, p = ({wide})a, n = b < 0 ? 0 : ({wide})b;
  {power}
  const {name} inverse = a == 1 ? ({name})1 : ({wide})a == ({wide})-1 ? ({name})(b % 2 ? -1 : 1) : ({name})0;
  return b < 0 ? inverse : ({name})r;
""")  # fmt: skip
    HELPERS[f"fuser_abs_{name}"] = f"""\
FUSER_FN {name} fuser_abs_{name}({name} a) {{ return a < 0 ? ({name})(0 - ({wide})a) : a; }}
"""
    _add("gcd", name, f"""\
  a = fuser_abs_{name}(a);
  b = fuser_abs_{name}(b);
  while (a != 0) {{
    const {name} c = a;
    a = ({name})(b % a);
    b = c;
  }}
  return b;
""")  # fmt: skip
    _add("lcm", name, f"""\
  const {name} g = fuser_gcd_{name}(a, b);
  const {product} p = ({product})(({wide})fuser_trunc_div_{name}(a, g) * ({wide})b);
  return ({name})(p < 0 ? 0 - ({wide})p : p);
""")  # fmt: skip


_add("wide_div", "i64", f"  {_WIDE}\n")
for _name, _bits in (("i8", 8), ("i16", 16), ("i32", 32), ("i64", 64), ("u8", 8)):
    _unsigned = "u64" if _name == "i64" else "u32"
    _division(_name, _unsigned, _TYPES.get(_name))
    _shifts(_name, _unsigned, _bits)
    _loops(_name, _unsigned)
