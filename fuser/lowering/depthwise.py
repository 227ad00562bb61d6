"""Depthwise convolutions: the sum over a window of elements times weights, fused with what follows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from fuser.ir.loop_body import Value, compute_dtype, ops
from fuser.ir.nodes import Index, TensorBox
from fuser.lowering.context import LoweringContext
from fuser.lowering.entries import lower
from fuser.lowering.pointwise import result_dtype
from fuser.lowering.pooling import read, sliding


@lower("fuser.depthwise")
def lower_depthwise(
    ctx: LoweringContext, x: TensorBox, weight: TensorBox, bias: TensorBox | None, stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int],
) -> TensorBox:  # fmt: skip
    """Each channel of (batch, channels, ...) convolved with its own weights (..., channels).

    Weights are stored once, channels side by side and wide: each is read for many elements.
    """
    n, dtype = len(stride), result_dtype(ctx)
    wide, size = compute_dtype(dtype), ctx.size_of(x)
    kernel = [ctx.specialise(s) for s in ctx.size_of(weight)[:-1]]
    w = sliding(ctx, size, n, kernel, stride, padding, dilation)
    load, given = ctx.loader(x, size, wide), ctx.loader(weight, ctx.size_of(weight), wide)
    table = ctx.table(ctx.size_of(weight), wide, given)
    weights = ctx.loader(table, ctx.size_of(table), wide)
    shift = None if bias is None else ctx.loader(bias, ctx.size_of(bias), wide)

    def inner(index: Index) -> Value:
        first, channel = index[:2], index[1]
        total: Value | None = None
        for step, (where, inside) in zip(itertools.product(*map(range, w.kernel)), w.places(index[2:])):
            factor = weights((*map(ctx.canon, step), channel))
            term = ops.mul(read(load, (*first, *where), inside(), 0), factor)
            total = term if total is None else ops.add(total, term)
        assert total is not None
        return total if shift is None else ops.add(total, shift((channel,)))

    return ctx.pointwise((*size[:2], *w.count), dtype, inner, ctx.order_of_meta())
