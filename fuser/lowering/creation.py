"""Tensors made of numbers, and triangles and diagonals of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fuser.errors import Unsupported
from fuser.ir.loop_body import Value, compute_dtype, ops
from fuser.ir.nodes import Index, TensorBox
from fuser.ir.sizes import Expr, floordiv
from fuser.lowering.context import LoweringContext, Operand, as_expr
from fuser.lowering.entries import lower, refuse
from fuser.lowering.pointwise import cast_loader, result_dtype
from fuser.lowering.views import Int, Ints, lower_diagonal, wrap_dim
from fuser.reasons import because


def filled(ctx: LoweringContext, size: Sequence[Int], value: Operand) -> TensorBox:
    """A tensor filled with `value`, in eager's dtype and memory order."""
    dtype = result_dtype(ctx)
    shape = [ctx.canon(as_expr(s)) for s in size]
    for s in shape:
        ctx.assume("le", 0, s)
    fill = cast_loader(ctx, value, (), dtype)
    return ctx.pointwise(shape, dtype, lambda index: fill(()), ctx.order_of_meta())


@lower("aten.full")
def lower_full(ctx: LoweringContext, size: Ints, value: Operand, **options: Any) -> TensorBox:
    """A tensor filled with `value`."""
    return filled(ctx, size, value)


@lower("aten.zeros", "aten.empty", "aten.ones")
def lower_constants(ctx: LoweringContext, size: Ints, **options: Any) -> TensorBox:
    """Zeros or ones; zeros for `empty`, whose values are arbitrary in eager."""
    return filled(ctx, size, int(ctx.op == "aten.ones"))


@lower("aten.empty_strided", "aten.empty_permuted")
def lower_empty_strided(ctx: LoweringContext, size: Ints, stride: Any, **options: Any) -> TensorBox:
    """Zeros; eager's values are arbitrary."""
    return filled(ctx, size, 0)


@lower("aten.full_like")
def lower_full_like(ctx: LoweringContext, x: TensorBox, value: Operand, **options: Any) -> TensorBox:
    """A tensor of the size of `x`, filled with `value`."""
    return filled(ctx, ctx.size_of(x), value)


@lower("aten.zeros_like", "aten.ones_like", "aten.empty_like", "aten.zero")
def lower_like(ctx: LoweringContext, x: TensorBox, **options: Any) -> TensorBox:
    """Zeros or ones in the size of `x`."""
    return filled(ctx, ctx.size_of(x), int(ctx.op == "aten.ones_like"))


@lower("aten.new_full")
def lower_new_full(ctx: LoweringContext, x: TensorBox, size: Ints, value: Operand, **options: Any) -> TensorBox:
    """A tensor filled with `value`."""
    return filled(ctx, size, value)


@lower("aten.new_zeros", "aten.new_ones", "aten.new_empty")
def lower_new(ctx: LoweringContext, x: TensorBox, size: Ints, **options: Any) -> TensorBox:
    """Zeros or ones."""
    return filled(ctx, size, int(ctx.op == "aten.new_ones"))


@lower("aten.new_empty_strided")
def lower_new_empty_strided(ctx: LoweringContext, x: TensorBox, size: Ints, stride: Any, **options: Any) -> TensorBox:
    """Zeros; eager's values are arbitrary."""
    return filled(ctx, size, 0)


@lower("aten.scalar_tensor")
def lower_scalar_tensor(ctx: LoweringContext, value: Operand, **options: Any) -> TensorBox:
    """A 0-dim tensor."""
    return filled(ctx, (), value)


# -- sequences ---------------------------------------------------------------------------------------------------------
@lower("aten.arange")
def lower_arange(ctx: LoweringContext, *bounds: Any, **options: Any) -> TensorBox:
    """start, start + step, … below end."""
    start, end, step = (0, *bounds, 1) if len(bounds) == 1 else (*bounds, 1)[:3]
    dtype = result_dtype(ctx)
    if all(isinstance(b, (int, Expr)) and not isinstance(b, bool) for b in (start, end, step)):
        return _integer_range(ctx, as_expr(start), as_expr(end), ctx.specialise(as_expr(step)), dtype)
    if not all(isinstance(b, (int, float)) for b in (start, end, step)):
        raise Unsupported("arange between numbers that are not known when the graph is registered")
    if not dtype.is_floating_point:  # eager truncates start and step, but not for the count
        return ctx.pointwise(
            tuple(as_expr(n) for n in ctx.meta.shape), dtype,
            lambda index: ops.index_expr(index[0] * int(step) + int(start), compute_dtype(dtype)),
        )  # fmt: skip

    _leave_decisions(ctx, dtype)

    def inner(index: Index) -> Value:
        i = ops.index_expr(index[0], torch.float64)
        return ops.add(ops.mul(i, float(step)), float(start))

    return ctx.pointwise(tuple(as_expr(n) for n in ctx.meta.shape), dtype, inner)


def _leave_decisions(ctx: LoweringContext, dtype: torch.dtype) -> None:
    """Unsupported if the last bits of a float range matter: in eager they depend on the machine's vectors."""
    if ctx.numerics == "eager" and dtype.is_floating_point:
        raise Unsupported("a range of floats whose last bits decide")


def _integer_range(ctx: LoweringContext, start: Expr, end: Expr, step: int, dtype: torch.dtype) -> TensorBox:
    start, end = ctx.canon(start), ctx.canon(end)
    gap = end - start if step > 0 else start - end
    if ctx.hint(gap) < 0:
        raise Unsupported("arange with bounds against the sign of its step")
    ctx.assume("le", 0, gap)
    count = floordiv(gap + (abs(step) - 1), as_expr(abs(step)))
    value = lambda index: ops.index_expr(index[0] * step + start, compute_dtype(dtype))  # noqa: E731
    return ctx.pointwise((ctx.canon(count),), dtype, value)


@lower("prims.iota")
def lower_iota(
    ctx: LoweringContext, length: Int, start: Int = 0, step: Int = 1, dtype: Any = None, device: Any = None,
    requires_grad: Any = False,
) -> TensorBox:  # fmt: skip
    """`length` numbers from `start`, `step` apart."""
    first, each, kind = as_expr(start), as_expr(step), result_dtype(ctx)
    return ctx.pointwise(
        (ctx.canon(as_expr(length)),), kind,
        lambda index: ops.index_expr(ctx.canon(index[0] * each + first), compute_dtype(kind)),
    )  # fmt: skip


def _bound(ctx: LoweringContext, value: Operand) -> Callable[[], Value]:
    """An end of a range in float64: a number, or the element of a 0-dim tensor."""
    if isinstance(value, TensorBox) and value.size:
        raise Unsupported("linspace between tensors that are not 0-dim")
    load = ctx.loader(value, (), torch.float64)
    whole = not result_dtype(ctx).is_floating_point  # eager truncates the ends first
    return lambda: ops.trunc(load(())) if whole else load(())


def _spaced(ctx: LoweringContext, start: Operand, end: Operand, steps: Int) -> tuple[Expr, Callable[[Index], Value]]:
    """The count and the values from `start` to `end`, both included, computed from the nearer end as in eager."""
    n = ctx.specialise(as_expr(steps))
    first, last = _bound(ctx, start), _bound(ctx, end)

    def inner(index: Index) -> Value:
        if n == 1:
            return first()
        gap = ops.div(ops.sub(last(), first()), float(n - 1))
        i = ops.index_expr(index[0])
        up = ops.add(ops.mul(ops.to_dtype(i, torch.float64), gap), first())
        back = ops.to_dtype(ops.index_expr(n - 1 - index[0]), torch.float64)
        down = ops.sub(last(), ops.mul(back, gap))
        return ops.where(ops.lt(i, n // 2), up, down)

    return as_expr(n), inner


@lower("aten.linspace")
def lower_linspace(ctx: LoweringContext, start: Operand, end: Operand, steps: Int, **options: Any) -> TensorBox:
    """`steps` numbers from `start` to `end`, both included."""
    dtype = result_dtype(ctx)
    _leave_decisions(ctx, dtype)
    n, inner = _spaced(ctx, start, end, steps)
    return ctx.pointwise((n,), dtype, inner)


@lower("aten.logspace")
def lower_logspace(
    ctx: LoweringContext, start: Operand, end: Operand, steps: Int, base: float = 10.0, **options: Any
) -> TensorBox:  # fmt: skip
    """Powers of `base` with evenly spaced exponents."""
    if not result_dtype(ctx).is_floating_point:
        raise Unsupported("logspace of integers: powers are truncated, so the last bit decides")
    n, inner = _spaced(ctx, start, end, steps)
    foot = _bound(ctx, base)
    return ctx.pointwise((n,), result_dtype(ctx), lambda index: ops.pow(foot(), inner(index)))


@lower("aten.eye")
def lower_eye(ctx: LoweringContext, n: Int, m: Int | None = None, **options: Any) -> TensorBox:
    """Ones on the diagonal of a matrix, else zeros."""
    dtype = result_dtype(ctx)
    size = [ctx.canon(as_expr(s)) for s in (n, n if m is None else m)]
    for s in size:
        ctx.assume("le", 0, s)
    return ctx.pointwise(size, dtype, lambda i: ops.to_dtype(ops.eq(ops.index_expr(i[1] - i[0]), 0), dtype))


# -- triangles and diagonals -------------------------------------------------------------------------------------------
@lower("aten.tril", "aten.triu")
def lower_triangle(ctx: LoweringContext, x: TensorBox, diagonal: Int = 0) -> TensorBox:
    """The elements on and below, or on and above, a diagonal; zeros elsewhere."""
    size, compare = ctx.size_of(x), "le" if ctx.op == "aten.tril" else "ge"
    load, edge = ctx.loader(x, size, x.dtype), ctx.canon(as_expr(diagonal))

    def inner(index: Index) -> Value:
        kept = ops.call(compare, ops.index_expr(index[-1] - index[-2]), ops.index_expr(edge))
        return ops.where(kept, load(index), ops.constant(0, x.dtype))

    return ctx.pointwise(size, x.dtype, inner, ctx.order_of_meta())


@lower("aten.diag_embed")
def lower_diag_embed(
    ctx: LoweringContext, x: TensorBox, offset: int = 0, dim1: int = -2, dim2: int = -1
) -> TensorBox:  # fmt: skip
    """The last dim as a diagonal of two new dims, zeros elsewhere."""
    own = ctx.size_of(x)
    rank = len(own) + 1
    a, b = wrap_dim(dim1, rank), wrap_dim(dim2, rank)
    side = ctx.canon(own[-1] + abs(offset))
    rest = iter(own[:-1])
    size = [side if d in (a, b) else next(rest) for d in range(rank)]
    load = ctx.loader(x, own, x.dtype)

    def inner(index: Index) -> Value:
        on = ops.eq(ops.index_expr(index[b] - index[a]), offset)
        along = index[a] if offset >= 0 else index[b]
        others = tuple(index[d] for d in range(rank) if d not in (a, b))
        return ops.masked(on, lambda: load((*others, along)), ops.constant(0, x.dtype))

    return ctx.pointwise(size, x.dtype, inner, ctx.order_of_meta())


@lower("aten.diag")
def lower_diag(ctx: LoweringContext, x: TensorBox, diagonal: int = 0) -> TensorBox:
    """A matrix with this diagonal, or the diagonal of a matrix."""
    if len(x.size) == 1:
        return lower_diag_embed(ctx, x, diagonal)
    return lower_diagonal(ctx, x, diagonal)


refuse(because("left_to_aten", "a table of indices is left to ATen"), "aten.tril_indices", "aten.triu_indices")
refuse(because("left_to_aten", "a matrix of powers is left to ATen"), "aten.vander")

__all__ = ["filled"]
