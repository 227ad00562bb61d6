"""Expands cells of the table to Triton text; types, constants, conversions, loads and stores of storage dtypes.

Nothing here imports Triton. Cells see compute dtypes: float16 and bfloat16 are computed in float32.
"""

from __future__ import annotations

import functools
import math

import torch

from fuser.ops.cells import FLOAT8, LOW, atom, cell_of, compute_dtype, wrap_int
from fuser.ops.table import Cell, OpRow, ReductionRow

TRITON_TYPES: dict[torch.dtype, str] = {
    torch.float32: "tl.float32", torch.float64: "tl.float64", torch.int8: "tl.int8", torch.int16: "tl.int16",
    torch.int32: "tl.int32", torch.int64: "tl.int64", torch.uint8: "tl.uint8", torch.bool: "tl.int1",
    torch.float16: "tl.float16", torch.bfloat16: "tl.bfloat16",
}  # fmt: skip
_NARROW = (*LOW, *FLOAT8)
# The pointer type of a dtype in a kernel's signature. Bools and 8-bit floats are stored as bytes.
TRITON_POINTERS: dict[torch.dtype, str] = {
    torch.float32: "*fp32", torch.float64: "*fp64", torch.int8: "*i8", torch.int16: "*i16", torch.int32: "*i32",
    torch.int64: "*i64", torch.uint8: "*u8", torch.bool: "*u8", torch.float16: "*fp16", torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*u8", torch.float8_e5m2: "*u8",
}  # fmt: skip


def triton_text(row: OpRow | ReductionRow, cell: Cell, dtype: torch.dtype, args: tuple[str, ...]) -> str:
    """The Triton of `cell`, a cell of `row`, for `args` of compute dtype `dtype`; Unsupported if there is none."""
    return cell_of(row, cell, dtype, "Triton").format(*map(atom, args), T=TRITON_TYPES[dtype])


def triton_number(value: bool | int | float, dtype: torch.dtype) -> str:
    """`value` as Python text of a constant of compute dtype `dtype`; out-of-range values convert as in eager."""
    if dtype is torch.bool:
        return "1" if value else "0"
    if dtype.is_floating_point:
        number = float(value)
        if math.isnan(number) or math.isinf(number):
            return f"float('{number}')"
        return repr(number)
    return str(wrap_int(value, dtype))


def triton_constant(value: bool | int | float, dtype: torch.dtype) -> str:
    """`value` as a scalar tensor of compute dtype `dtype`."""
    if dtype.is_floating_point and value == 0 and math.copysign(1.0, value) < 0:  # a constant -0.0 becomes 0.0
        return f"(tl.full([], 0.0, {TRITON_TYPES[dtype]}) * -1.0)"
    return f"tl.full([], {triton_number(value, dtype)}, {TRITON_TYPES[dtype]})"


def triton_load(dtype: torch.dtype, text: str) -> str:
    """The compute value of `text`, a stored element of `dtype`."""
    if dtype in FLOAT8:
        return f"fuser_load_{_name(dtype)}({text})"
    if dtype in LOW:
        return f"{text}.to(tl.float32)"
    if dtype is torch.bool:
        return f"({text} != 0)"
    compute_dtype(dtype)
    return text


def triton_store(dtype: torch.dtype, text: str) -> str:
    """The element to store in a tensor of `dtype` for the compute value `text`."""
    if dtype in _NARROW:
        return _narrowed(dtype, text)
    if dtype is torch.bool:
        return f"{text}.to(tl.uint8)"
    compute_dtype(dtype)
    return text


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _narrowed(dtype: torch.dtype, text: str) -> str:
    """`text`, a float32 value, as eager stores it in 16 or 8 bits. Overflow of 8 bits depends on torch's version."""
    if dtype in FLOAT8:
        suffix = "_or_nan" if dtype is torch.float8_e4m3fn and not _saturates() else ""
        return f"fuser_store_{_name(dtype)}{suffix}({text})"
    return f"{text}.to({TRITON_TYPES[dtype]})"


@functools.cache
def _saturates() -> bool:
    """Whether this torch converts larger values to the largest float8_e4m3fn, not to NaN."""
    return not bool(torch.tensor(1e9).to(torch.float8_e4m3fn).float().isnan())


def triton_convert(source: torch.dtype, target: torch.dtype, text: str) -> str:
    """`text`, of compute dtype `source`, as eager converts it to `target`.

    If `target` is narrower than float32 the result stays in float32, rounded to the precision of `target`.
    """
    source = compute_dtype(source)
    compute = compute_dtype(target)
    name = atom(text)
    if compute is torch.bool:
        text = f"({name} != 0)" if source is not torch.bool else text
    elif source.is_floating_point and compute.itemsize < 4 and not compute.is_floating_point:
        text = f"{name}.to(tl.int32).to({TRITON_TYPES[compute]})"
    elif source is not compute:
        text = f"{name}.to({TRITON_TYPES[compute]})"
    return triton_load(target, _narrowed(target, text)) if target in _NARROW else text
