"""Running sums, products and extremes along a dim."""

from __future__ import annotations

from typing import Any

import torch

from fuser.errors import Unsupported
from fuser.ir.loop_body import Value, ops
from fuser.ir.nodes import Index, TensorBox
from fuser.lowering.context import LoweringContext
from fuser.lowering.entries import EVERY, lower, refuse
from fuser.lowering.pointwise import elementwise, result_dtype
from fuser.lowering.views import slice_box, wrap_dim
from fuser.reasons import because


def scanned(
    ctx: LoweringContext, kind: str, x: TensorBox, dim: int, dtype: torch.dtype, order: tuple[int, ...] | None
) -> TensorBox:  # fmt: skip
    """The scan `kind` (a row of `ops.SCANS`) of `x`, cast to `dtype`, along `dim`; of a 0-dim tensor the cast alone."""
    size, d = ctx.size_of(x), wrap_dim(dim, len(x.size))
    load = ctx.loader(x, size, dtype)
    if not size:
        return ctx.pointwise(size, dtype, load, order)
    return ctx.scan(kind, size, d, dtype, load, order)


@lower("aten.cumsum", "aten.cumprod")
def lower_cumulative(ctx: LoweringContext, x: TensorBox, dim: int, dtype: Any = None) -> TensorBox:
    """The sum or product of all values up to each index; small integers in int64."""
    kind = "sum" if ctx.op == "aten.cumsum" else "prod"
    return scanned(ctx, kind, x, dim, result_dtype(ctx), ctx.order_of_meta())


@lower("aten.logcumsumexp")
def lower_logcumsumexp(ctx: LoweringContext, x: TensorBox, dim: int) -> TensorBox:
    """The logarithm of the sum of exp of all values up to each index."""
    return scanned(ctx, "logaddexp", x, dim, result_dtype(ctx), ctx.order_of_meta())


@lower("aten.cummax", "aten.cummin", decisive=EVERY)
def lower_extremes(ctx: LoweringContext, x: TensorBox, dim: int) -> tuple[TensorBox, TensorBox]:
    """The largest or smallest value up to each index, and the last index at which it occurs."""
    kind, size = "max" if ctx.op == "aten.cummax" else "min", ctx.size_of(x)
    values = scanned(ctx, kind, x, dim, x.dtype, ctx.order_of_meta(0))
    if not size:
        return values, ctx.pointwise(size, torch.int64, lambda i: ops.constant(0, torch.int64))
    load, d = ctx.loader(x, size, x.dtype), wrap_dim(dim, len(size))

    def pair(index: Index) -> Value:
        return ops.pair(load(index), ops.index_expr(index[d]))

    return values, ctx.scan(f"arg{kind}", size, d, torch.int64, pair, ctx.order_of_meta(1))


@lower("aten.diff")
def lower_diff(
    ctx: LoweringContext, x: TensorBox, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None
) -> TensorBox:
    """Differences of neighbours along `dim`."""
    if n != 1 or prepend is not None or append is not None:
        raise Unsupported("diff with n other than 1, or with prepend or append")
    d = wrap_dim(dim, len(x.size))
    ctx.assume("lt", 0, ctx.size_of(x)[d])
    later, earlier = slice_box(ctx, x, d, 1, None), slice_box(ctx, x, d, 0, ctx.size_of(x)[d] - 1)
    name = "logical_xor" if x.dtype is torch.bool else "sub"
    return elementwise(ctx, [later, earlier], lambda a, b: ops.call(name, a, b))


refuse(because("left_to_aten", "trapezoids are left to ATen"), "aten.trapezoid", "aten.cumulative_trapezoid")

SCANS = frozenset({"aten.cumsum", "aten.cumprod", "aten.logcumsumexp", "aten.cummax", "aten.cummin"})

__all__ = ["SCANS", "scanned"]
