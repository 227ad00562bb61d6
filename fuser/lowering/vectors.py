"""Products of vectors of three elements along a dim of a tensor."""

from __future__ import annotations

from fuser.errors import Unsupported
from fuser.ir.loop_body import Value, compute_dtype, ops
from fuser.ir.nodes import Index, TensorBox
from fuser.ir.sizes import ONE, expr
from fuser.lowering.context import LoweringContext
from fuser.lowering.entries import lower
from fuser.lowering.joining import Load, Piece, at_dim, joined
from fuser.lowering.pointwise import result_dtype
from fuser.lowering.views import wrap_dim
from fuser.reasons import because

_THREE = expr(3)


@lower("aten.linalg_cross")
def lower_linalg_cross(ctx: LoweringContext, a: TensorBox, b: TensorBox, dim: int = -1) -> TensorBox:
    """The cross product of the vectors along `dim`, of broadcast operands."""
    if a.dtype is not b.dtype:
        raise Unsupported(because("eager_raises", f"a cross product of {a.dtype} and {b.dtype}: eager raises"))
    dtype = result_dtype(ctx)
    wide = compute_dtype(dtype)
    size = ctx.broadcast_sizes([ctx.size_of(a), ctx.size_of(b)])
    d = wrap_dim(dim, len(size))
    if not ctx.is_equal(size[d], _THREE):
        raise Unsupported(because("eager_raises", f"a cross product of vectors of {size[d]} elements: eager raises"))
    left, right = ctx.loader(a, size, wide), ctx.loader(b, size, wide)
    pieces = [Piece(ONE, _component(left, right, d, k)) for k in range(3)]
    return joined(ctx, pieces, d, size, dtype)


def _component(left: Load, right: Load, dim: int, k: int) -> Load:
    """Component `k` of the cross product: the difference of the products of the other two components."""

    def of(load: Load, n: int) -> Load:
        return at_dim(load, dim, lambda _: expr(n % 3))

    def component(index: Index) -> Value:
        first = ops.mul(of(left, k + 1)(index), of(right, k + 2)(index))
        return ops.sub(first, ops.mul(of(left, k + 2)(index), of(right, k + 1)(index)))

    return component


@lower("aten.cross")
def lower_cross(ctx: LoweringContext, a: TensorBox, b: TensorBox, dim: int | None = None) -> TensorBox:
    """The cross product along `dim`, or along the first dim of three elements."""
    return lower_linalg_cross(ctx, a, b, _first_of_three(ctx, a) if dim is None else dim)


def _first_of_three(ctx: LoweringContext, x: TensorBox) -> int:
    for d, size in enumerate(ctx.size_of(x)):
        if ctx.is_equal(size, _THREE):
            return d
        ctx.assume("ne", size, _THREE)
    raise Unsupported(because("eager_raises", "a cross product without a dim of 3 elements: eager raises"))


__all__ = ["lower_cross", "lower_linalg_cross"]
