"""Random numbers of a seed."""

from __future__ import annotations

import torch

from fuser.ir.loop_body import Value, ops
from fuser.ir.nodes import Index, TensorBox
from fuser.ir.sizes import expr
from fuser.lowering.context import LoweringContext
from fuser.lowering.registry import lower


@lower("fuser.uniform_like")
def lower_uniform_like(ctx: LoweringContext, seed: TensorBox, stream: int, like: TensorBox) -> TensorBox:
    """float32 in [0, 1) in the size of `like`, of the seed, the stream and the place in logical order."""
    size, load = ctx.size_of(like), ctx.loader(seed, (), torch.int64)

    def inner(index: Index) -> Value:
        place = expr(0)
        for i, n in zip(index, size, strict=True):
            place = place * n + i
        return ops.call("philox_uniform", load(()), stream, ops.index_expr(place))

    return ctx.pointwise(size, torch.float32, inner)
