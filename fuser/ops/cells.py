"""Expands cells of the table to C++ text; types, constants, conversions, loads and stores of the storage dtypes."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping

import torch

from fuser.errors import Unsupported
from fuser.ops.table import Cell, OpRow, ReductionRow, ScanRow
from fuser.reasons import because

# The C++ type of a dtype in memory and, except for 16-bit floats, in a register. Kernels begin with the typedefs.
CPP_TYPES: dict[torch.dtype, str] = {
    torch.float32: "float", torch.float64: "double", torch.int8: "i8", torch.int16: "i16", torch.int32: "i32",
    torch.int64: "i64", torch.uint8: "u8", torch.bool: "bool", torch.float16: "u16", torch.bfloat16: "u16",
}  # fmt: skip
CPP_TYPEDEFS = """\
typedef signed char i8; typedef unsigned char u8; typedef short i16; typedef unsigned short u16;
typedef int i32; typedef unsigned int u32; typedef long long i64; typedef unsigned long long u64;
"""
LOW = {torch.float16: "half", torch.bfloat16: "bfloat16"}
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)  # stored on GPUs only
_SUFFIX = {**CPP_TYPES, torch.float32: "f32", torch.float64: "f64"}  # of helpers' names
_BITS = {torch.int8: 8, torch.int16: 16, torch.int32: 32, torch.int64: 64, torch.uint8: 8}
_ATOM = re.compile(r"[A-Za-z_]\w*|[\d.][\w.]*")


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values stored as `dtype` are computed: float32 for 16-bit and 8-bit floats, else itself.

    Raises Unsupported for a dtype without cells (complex, quantised, uint16 and wider).
    """
    if dtype in LOW or dtype in FLOAT8:
        return torch.float32
    if dtype not in CPP_TYPES:
        raise Unsupported(
            because("dtype", f"dtype {dtype} is not computed by kernels: expected one of {_names(CPP_TYPES)}")
        )
    return dtype


def _names(dtypes: Mapping[torch.dtype, str]) -> str:
    return ", ".join(str(d).removeprefix("torch.") for d in dtypes)


def atom(text: str) -> str:
    """`text`, in parentheses unless it is one name or one unsigned number."""
    return text if _ATOM.fullmatch(text) else f"({text})"


def cpp_text(row: OpRow | ReductionRow | ScanRow, cell: Cell, dtype: torch.dtype, args: tuple[str, ...]) -> str:
    """The C++ of `cell`, a cell of `row`, for `args` of compute dtype `dtype`; Unsupported if there is none."""
    return cell_of(row, cell, dtype, "C++").format(
        *map(atom, args),
        T=CPP_TYPES[dtype],
        U="u64" if dtype is torch.int64 else "u32",
        I={torch.float32: "i32", torch.float64: "i64"}.get(dtype, ""),
        D=_SUFFIX[dtype],
        f="f" if dtype is torch.float32 else "",
        bits=_BITS.get(dtype, 0),
    )


def cell_of(row: OpRow | ReductionRow | ScanRow, cell: Cell, dtype: torch.dtype, language: str) -> str:
    """The template of a row's `cell` for `dtype`; Unsupported, which names the language, if there is none."""
    if callable(cell):
        cell = cell(dtype)
    if cell is None or dtype not in row.dtypes:
        raise Unsupported(because("dtype", f"{row.name} has no {language} cell for {dtype}"))
    return cell


def _float_text(value: float, dtype: torch.dtype) -> str:
    double = dtype is torch.float64
    if not double and math.isfinite(value):
        try:
            value = struct.unpack("f", struct.pack("f", value))[0]
        except OverflowError:
            value = math.copysign(math.inf, value)
    suffix = "" if double else "f"
    if math.isnan(value):
        return f'__builtin_nan{suffix}("")'
    if math.isinf(value):
        return f"{'-' if value < 0 else ''}__builtin_inf{suffix}()"
    short = repr(value)
    # Short decimals stay readable. They are exact in float32, too, since they come from a float32 value as a double.
    return (short if len(short) <= 8 else value.hex()) + suffix


def wrap_int(value: int | float, dtype: torch.dtype) -> int:
    """`value` modulo the range of the integer `dtype`, as in eager; infinity and NaN become the smallest int64."""
    bits = _BITS[dtype]
    if isinstance(value, float):
        value = int(value) if math.isfinite(value) else -(1 << 63)
    value = int(value) & ((1 << bits) - 1)
    return value - (1 << bits) if dtype is not torch.uint8 and value >> (bits - 1) else value


def cpp_constant(value: bool | int | float, dtype: torch.dtype) -> str:
    """`value` as a C++ constant of compute dtype `dtype`, exact to the bit; out-of-range values convert as in eager."""
    if dtype is torch.bool:
        return "true" if value else "false"
    if dtype.is_floating_point:
        compute_dtype(dtype)
        try:
            return _float_text(float(value), dtype)
        except OverflowError:
            return _float_text(math.copysign(math.inf, value), dtype)
    if dtype not in _BITS:
        compute_dtype(dtype)
    number = wrap_int(value, dtype)
    if dtype is not torch.int64 and dtype is not torch.int32:
        return f"({CPP_TYPES[dtype]}){number}" if number >= 0 else f"({CPP_TYPES[dtype]})({number})"
    suffix = "LL" if dtype is torch.int64 else ""
    if number == -(1 << (_BITS[dtype] - 1)):
        return f"({CPP_TYPES[dtype]})({number + 1}{suffix} - 1)"
    if dtype is torch.int64:
        return f"(i64){number}LL" if number >= 0 else f"(i64)({number}LL)"
    return str(number)


def cpp_load(dtype: torch.dtype, text: str) -> str:
    """The compute value of `text`, an expression for a stored element of `dtype` (bools are loaded as u8)."""
    if dtype in LOW:
        return f"fuser_load_{LOW[dtype]}({text})"
    if dtype is torch.bool:
        return f"({atom(text)} != 0)"
    compute_dtype(dtype)
    return text


def cpp_store(dtype: torch.dtype, text: str, exact: bool = False) -> str:
    """The element to store for the compute value `text` of a tensor of `dtype`; `exact`: it is exact in `dtype`."""
    if exact and dtype is torch.bfloat16:
        return f"fuser_store_exact_bfloat16({text})"
    if dtype in LOW:
        return f"fuser_store_{LOW[dtype]}({text})"
    compute_dtype(dtype)
    return text


def cpp_round(dtype: torch.dtype, text: str, tame: bool = False) -> str:
    """The float32 value `text` rounded to the 16-bit float `dtype`; `tame`: low 16 bits of a NaN are zero."""
    kind = "tame_bfloat16" if tame and dtype is torch.bfloat16 else LOW[dtype]
    return f"fuser_round_{kind}({text})"


def cpp_convert(source: torch.dtype, target: torch.dtype, text: str) -> str:
    """`text`, of compute dtype `source`, as eager converts it to `target`.

    If `target` is float16 or bfloat16 the result stays in float32, rounded to the precision of `target`.
    """
    source = compute_dtype(source)
    compute = compute_dtype(target)
    name = atom(text)
    if compute is torch.bool:
        text = f"({name} != 0)" if source is not torch.bool else text
    elif source.is_floating_point and not compute.is_floating_point:
        wide = "i64" if compute is torch.int64 else "i32"
        text = f"fuser_{wide}_from_{_SUFFIX[source]}({text})"
        text = text if CPP_TYPES[compute] == wide else f"({CPP_TYPES[compute]}){text}"
    elif source is torch.bool and compute.is_floating_point:  # g++ 12 does not vectorise a cast
        text = f"({name} ? {cpp_constant(1.0, compute)} : {cpp_constant(0.0, compute)})"
    elif source is not compute:
        text = f"({CPP_TYPES[compute]}){name}"
    return f"fuser_round_{LOW[target]}({text})" if target in LOW else text
