"""Inputs of a lowering: what a kernel assumes of each, and which sizes and strides are symbols.

Sizes are symbols. Strides are those of dense memory if the example's are, else symbols with an assumed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fuser.errors import Unsupported
from fuser.ir.nodes import TensorBox, strides_of
from fuser.ir.sizes import STRIDE, Expr, expr
from fuser.kernel_spec import is_aligned, memory_order
from fuser.lazy_dataclasses import dataclass
from fuser.lowering.context import LoweringContext, Scalar
from fuser.reasons import because


@dataclass(frozen=True)
class TensorInput:
    """A tensor input: dtype, device type, sizes and strides as expressions. `aligned`: 16 divides its address.

    `checked`: the strides that a call's tensor is checked for, if those of dims of one element matter, too.
    """

    dtype: torch.dtype
    device_type: str
    size: tuple[Expr, ...]
    stride: tuple[Expr, ...]
    aligned: bool = True
    checked: tuple[Expr, ...] | None = None


@dataclass(frozen=True)
class NumberInput:
    """An int input (kind "int" or "bool"; a size symbol) or a float input ("float"; a scalar by name)."""

    kind: str
    name: str


def new_input(ctx: LoweringContext, number: int, example: Any) -> tuple[TensorInput | NumberInput, Any, Any]:
    """The record, value and meta of an input like `example`. Raises Unsupported."""
    if isinstance(example, torch.Tensor):
        return _tensor_input(ctx, number, example)
    name = f"x{number}"
    if isinstance(example, bool):  # a choice: each value has a kernel
        return NumberInput("bool", name), bool(ctx.specialise(ctx.new_symbol(name, int(example), STRIDE))), example
    if isinstance(example, int):
        return NumberInput("int", name), ctx.new_symbol(name, example, STRIDE), example
    if isinstance(example, float):
        scalar = Scalar(name, example)
        ctx.scalars.append(scalar)
        return NumberInput("float", name), scalar, example
    raise Unsupported(f"input {number} is a {type(example).__name__}: expected a tensor, an int, a float or a bool")


def _tensor_input(ctx: LoweringContext, number: int, t: torch.Tensor) -> tuple[TensorInput, TensorBox, torch.Tensor]:
    if not ctx.takes(t.dtype):
        raise Unsupported(because("dtype", f"input {number} has dtype {t.dtype}, which is not fused"))
    size = [int(n) for n in t.shape]
    stride = [int(n) for n in t.stride()]
    symbols = tuple(ctx.new_symbol(f"x{number}_{d}", n) for d, n in enumerate(size))
    dense = memory_order(size, stride)
    if t.is_contiguous() or t.numel() == 0:
        strides = strides_of(symbols)
    elif dense is not None:
        strides = strides_of(symbols, dense)
    else:
        strides = tuple(_stride(ctx, number, d, symbols[d], size[d], stride[d]) for d in range(len(size)))
        _assume_order(ctx, strides, stride)
    box = ctx.input_tensor(number, t.dtype, symbols, strides)
    meta = torch.empty_strided(size, stride, dtype=t.dtype, device="meta")
    return TensorInput(t.dtype, t.device.type, symbols, strides, is_aligned(t)), box, meta


def _assume_order(ctx: LoweringContext, strides: Sequence[Expr], example: Sequence[int]) -> None:
    """Assume the order of the dims in memory: results have the same order, as in eager.

    Strides of 0 do not determine an order, so a stride that is larger in the example is assumed to be larger.
    """
    order = sorted(range(len(example)), key=lambda d: example[d])
    first = next((d for d in order if example[d]), None)
    if first is not None:
        ctx.assume("lt", 0, strides[first])
    for a, b in zip(order, order[1:]):
        ctx.assume("lt" if example[a] < example[b] else "eq", strides[a], strides[b])


def _stride(ctx: LoweringContext, number: int, d: int, symbol: Expr, size: int, stride: int) -> Expr:
    if size > 1 and stride in (0, 1):
        if stride == 0:
            ctx.assume("lt", 0, symbol)  # an element read for the whole dim has to exist
        return expr(stride)
    return ctx.new_symbol(f"x{number}_s{d}", stride, STRIDE)
