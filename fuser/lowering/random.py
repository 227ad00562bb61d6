"""Random numbers as functions of a seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fuser.ir.loop_body import Value, ops
from fuser.ir.nodes import Index, TensorBox
from fuser.ir.sizes import Expr, expr
from fuser.lowering.context import LoweringContext
from fuser.lowering.entries import lower
from fuser.lowering.pointwise import in_unit_interval
from fuser.ops.random import normal_of


@lower("fuser.uniform_like")
def lower_uniform_like(ctx: LoweringContext, seed: TensorBox, stream: int, like: TensorBox) -> TensorBox:
    """float32 in [0, 1) of the size of `like`, a function of the seed, the stream and the row-major element number."""
    size, load = ctx.size_of(like), ctx.loader(seed, (), torch.int64)
    return ctx.pointwise(
        size, torch.float32, lambda index: ops.call("philox_uniform", load(()), stream, _place(index, size))
    )


@lower("fuser.normal_like")
def lower_normal_like(ctx: LoweringContext, seed: TensorBox, stream: int, like: TensorBox) -> TensorBox:
    """Standard normal float32 of the size of `like`, a function of the seed, the stream and the element number."""
    size, load = ctx.size_of(like), ctx.loader(seed, (), torch.int64)

    def inner(index: Index) -> Value:
        place = _place(index, size)
        first, second = (ops.call(name, load(()), stream, place) for name in ("philox_even", "philox_odd"))
        odd = ops.call("ne", ops.call("bitwise_and", place, 1), 0)
        value: Value = normal_of(_call, first, second, odd)
        return value

    return ctx.pointwise(size, torch.float32, inner)


@lower("fuser.probabilities")
def lower_probabilities(ctx: LoweringContext, p: TensorBox) -> TensorBox:
    """`p`; a call with an element outside [0, 1] is reported."""
    size, load = ctx.size_of(p), ctx.loader(p, ctx.size_of(p), p.dtype)
    return ctx.pointwise(size, p.dtype, lambda index: in_unit_interval(load(index)))


def _call(name: str, *args: Any) -> Value:
    return ops.where(*args) if name == "where" else ops.call(name, *args)


def _place(index: Index, size: Sequence[Expr]) -> Value:
    place = expr(0)
    for i, n in zip(index, size, strict=True):
        place = place * n + i
    return ops.index_expr(place)
