"""Triton helpers that cells call, by name: `@triton.jit` functions as text. A source includes those that it names.

Functions of NVIDIA's libdevice compute the same as CUDA's own maths functions, which eager calls. The hardware's
approximations are used where later rounding hides their error.
"""

from __future__ import annotations

import re

from fuser.ops import random

_WORD = re.compile(r"\bfuser_\w+")

_CAPABILITY = "FUSER_CAPABILITY = tl.constexpr(0)  # of the device: compile_worker.py puts it in; 0: any, or none\n"


# Triton's integer division truncates, as in C.
_FLOOR = """\
    d = tl.where(b == 0, 1, b).to(b.dtype)
    q = a // d
    r = a - q * d
    off = (r != 0) & ((r < 0) != (d < 0))
"""
_SHIFT = """\
    bits: tl.constexpr = a.dtype.primitive_bitwidth
    far = (b < 0) | (b >= bits)
    near = tl.where(far, 0, b).to(b.dtype)
"""
# 8-bit floats are stored as bytes. Hopper converts as eager does, except on overflow. All other devices, and the
# interpreter, use the bits: a number is loaded as a float16 whose exponent is 8 too small (0x7f is NaN), ...
_LOAD_E4M3FN = """\
    if FUSER_CAPABILITY >= 90:
        return q.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        low = q.to(tl.int16) & 127
        half = (low << 7) | ((q.to(tl.int16) & 128) << 8)
        value = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        return tl.where(low == 127, float('nan'), value)
"""
# ... and rounded to nearest, ties to even, by adding to the bits; for denormals, by adding a float that has no bits
# below the last one that is kept.
_STORE_FLOAT8 = """\
    if FUSER_CAPABILITY >= 90:
        {prepared}
        rounded = x.to(tl.{type}).to(tl.uint8, bitcast=True)
        {fixed}
        return rounded.to(tl.uint8)
    else:
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
        low = bits & 0x7fffffff
        small = (low.to(tl.float32, bitcast=True) + {unit}).to(tl.int32, bitcast=True) - {unit_bits}
        normal = (low - {bias} + {half} + ((low >> {drop}) & 1)) >> {drop}
        number = tl.where(low < {least}, small, tl.minimum(normal, {top}))
        return (tl.where(low > 0x7f800000, 127, number) | ((bits >> 24) & 128)).to(tl.uint8)
"""
_E4M3FN = {
    "type": "float8e4nv", "unit": "16384.0", "unit_bits": "0x46800000", "bias": "0x3c000000", "half": "0x7ffff",
    "drop": 20, "least": "0x3c800000", "fixed": "",
}  # fmt: skip
_E5M2 = {
    "type": "float8e5", "unit": "128.0", "unit_bits": "0x43000000", "bias": "0x38000000", "half": "0xfffff",
    "drop": 21, "least": "0x38800000", "top": 124, "prepared": "",
    "fixed": "rounded = tl.where(x >= 61440.0, 124, tl.where(x <= -61440.0, 252, rounded))",
}  # fmt: skip
# Not on the bytes: Triton 3.6 duplicates the conversion, and if both results are changed and converted back, the second
# is lost.
_OR_NAN = "x = tl.where(tl.abs(x) > 464.0, float('nan'), x)"
# Of up to 128 argument sets, the last one whose first program is at or before this program.
_FIND_MEMBER = """\
    first = tl.load(table + tl.arange(0, 128))
    return tl.sum((first <= pid).to(tl.int32), 0) - 1
"""
# tanh: an odd polynomial up to 0.6; above, 1 - 2 / (e^2x + 1).
_TANH = """\
    z = x * x
    p = 0.020797929 + z * -0.005896697
    p = -0.053784627 + z * p
    p = 0.13331936 + z * p
    p = -0.333333 + z * p
    small = x + x * z * p
    large = 1.0 - 2.0 / (tl.exp2(2.8853900817779268 * x) + 1.0)
    return tl.where(z < 0.36, small, large)
"""
# tanh to 17 bits, for results that are rounded to 12 or 9. libdevice's exp2 is the hardware's.
_TANH_FAST = """\
    z = x * x
    small = x + x * z * (-0.3333333 + z * 0.1333333)
    large = 1.0 - libdevice.fast_dividef(2.0, libdevice.exp2(2.8853900817779268 * x) + 1.0)
    return tl.where(z < 0.04, small, large)
"""
# erf to 1.5e-7 (Abramowitz and Stegun, 7.1.26), and its series near zero.
_ERF_FAST = """\
    z = x * x
    t = libdevice.fast_dividef(1.0, 1.0 + 0.3275911 * tl.abs(x))
    p = -1.453152027 + t * 1.061405429
    p = 1.421413741 + t * p
    p = -0.284496736 + t * p
    p = t * (0.254829592 + t * p)
    large = 1.0 - p * libdevice.exp2(-1.4426950408889634 * z)
    small = x * (1.1283791671 + z * (-0.3761263890 + z * 0.1128379167))
    return tl.where(z < 0.09, small, tl.where(x < 0, -large, large))
"""
# The normal distribution function: the same polynomial, halved; in the tail nothing cancels.
_NORMAL_CDF_FAST = """\
    t = libdevice.fast_dividef(1.0, 1.0 + 0.23164189 * tl.abs(x))
    p = -0.7265760135 + t * 0.5307027145
    p = 0.7107068705 + t * p
    p = -0.142248368 + t * p
    p = t * (0.127414796 + t * p)
    tail = p * libdevice.exp2(-0.7213475204444817 * (x * x))
    return tl.where(x < 0, tail, 1.0 - tail)
"""

# A zero quotient has the sign that the division gives: Triton turns the constant -0.0 into 0.0.
_FLOOR_DIV = """\
    r = libdevice.fmod(a, b)
    q = {quotient}
    q = tl.where((r != 0) & ((b < 0) != (r < 0)), q - 1, q)
    low = tl.floor(q)
    near = tl.where(q - low > 0.5, low + 1, low)
    exact = a / b
    return tl.where(b == 0, exact, tl.where(q != 0, near, libdevice.copysign(q, exact)))
"""
_INTEGER = {
    "floor_div_int": (_FLOOR, "tl.where(b == 0, 0, q - off.to(q.dtype))"),
    "remainder_int": (_FLOOR, "tl.where(b == 0, 0, tl.where(off, r + d, r))"),
    "trunc_div_int": (_FLOOR, "tl.where(b == 0, 0, q)"),
    "fmod_int": (_FLOOR, "tl.where(b == 0, 0, r)"),
    "lshift": (_SHIFT, "tl.where(far, 0, a << near)"),
    "rshift": (_SHIFT, "tl.where(far, tl.where(a < 0, -1, 0).to(a.dtype), a >> near)"),
}
TRITON_HELPERS: dict[str, str] = dict(random.TRITON_HELPERS)


def _add(head: str, body: str) -> None:
    """Add the helper with the signature `head`."""
    TRITON_HELPERS[head.partition("(")[0]] = f"@triton.jit\ndef {head}:\n{body}"


_add("fuser_find_member(table, pid)", _FIND_MEMBER)
for _name, (_body, _result) in _INTEGER.items():
    _add(f"fuser_{_name}(a, b)", f"{_body}    return {_result}.to(a.dtype)\n")
_add("fuser_trunc(x)", "    return tl.where(x < 0, tl.ceil(x), tl.floor(x))\n")
for _bits, _quotient in ((32, "tl.div_rn(a - r, b)"), (64, "(a - r) / b")):
    _add(f"fuser_floor_div_{_bits}(a, b)", _FLOOR_DIV.format(quotient=_quotient))
_add("fuser_remainder_float(a, b)", """\
    r = libdevice.fmod(a, b)
    return tl.where((r != 0) & ((b < 0) != (r < 0)), r + b, r)
""")  # fmt: skip
_add("fuser_tanh(x)", _TANH)
_add("fuser_tanh_fast(x)", _TANH_FAST)
_add("fuser_erf_fast(x)", _ERF_FAST)
_add("fuser_normal_cdf_fast(x)", _NORMAL_CDF_FAST)
_add("fuser_sigmoid(x)", "    return tl.div_rn(1.0, 1.0 + libdevice.exp(-x))\n")
for _name, _sum in (
    ("logaddexp", "libdevice.log1p(libdevice.exp(low - high))"),
    ("logaddexp2", "libdevice.log1p(libdevice.exp2(low - high)) * 1.4426950408889634"),
):
    _add(f"fuser_{_name}(a, b)", f"""\
    high = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    low = tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)
    same = (a == b) & (tl.abs(a) == float('inf'))
    return tl.where(same, a, high + {_sum})
""")  # fmt: skip
for _name, _log in (("xlogy", "log"), ("xlog1py", "log1p")):
    _text = f"    return tl.where(b != b, b, tl.where(a == 0, 0.0, a * libdevice.{_log}(b)))\n"
    _add(f"fuser_{_name}(a, b)", _text)
_add("fuser_entr(x)", """\
    y = tl.where(x == 0, 0.0, float('-inf'))
    return tl.where(x != x, x, tl.where(x > 0, -x * libdevice.log(x), y))
""")  # fmt: skip
_add("fuser_load_float8_e4m3fn(q)", _LOAD_E4M3FN)
_add("fuser_store_float8_e4m3fn(x)", _STORE_FLOAT8.format(**_E4M3FN, top=126, prepared=""))
_add("fuser_store_float8_e4m3fn_or_nan(x)", _STORE_FLOAT8.format(**_E4M3FN, top=127, prepared=_OR_NAN))
_add("fuser_store_float8_e5m2(x)", _STORE_FLOAT8.format(**_E5M2))
# The bits are the upper byte of a float16.
_add("fuser_load_float8_e5m2(q)", "    return (q.to(tl.int16) << 8).to(tl.float16, bitcast=True).to(tl.float32)\n")
for _name, _text in (
    ("sum", "a + b"), ("prod", "a * b"), ("logaddexp", "fuser_logaddexp(a, b)"),
    ("max", "tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)"),
    ("min", "tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)"),
):  # fmt: skip
    _add(f"fuser_combine_{_name}(a, b)", f"    return {_text}\n")
# Whether a value is better, or equal at a lower index. NaN is better than any number and equal to NaN.
for _name, _sign in (("argmax", ">"), ("argmin", "<")):
    _add(f"fuser_better_{_name}(v, i, w, j)", f"""\
    same = (w == v) | ((w != w) & (v != v))
    return (w {_sign} v) | ((w != w) & (v == v)) | (same & (j < i))
""")  # fmt: skip
    _add(f"fuser_combine_{_name}(v, i, w, j)", f"""\
    better = fuser_better_{_name}(v, i, w, j)
    return tl.where(better, w, v), tl.where(better, j, i)
""")  # fmt: skip


def triton_prelude(source: str) -> str:
    """Text of the helpers that `source` calls and of those that they call, each once, dependences first."""
    done: dict[str, None] = {}

    def visit(name: str) -> None:
        if name not in done:
            for need in dict.fromkeys(_WORD.findall(TRITON_HELPERS[name])):
                if need != name:
                    visit(need)
            done[name] = None

    for name in dict.fromkeys(w for w in _WORD.findall(source) if w in TRITON_HELPERS):
        visit(name)
    text = "".join(f"{TRITON_HELPERS[name]}\n\n" for name in done)
    return f"{_CAPABILITY}\n\n{text}" if "FUSER_CAPABILITY" in text else text
