"""Reductions over any set of dims."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fuser.errors import Unsupported
from fuser.ir.loop_body import Value, compute_dtype, ops
from fuser.ir.nodes import Index, TensorBox
from fuser.ir.sizes import ONE, ZERO, Expr, expr, product
from fuser.lowering.context import LoweringContext
from fuser.lowering.pointwise import result_dtype
from fuser.lowering.registry import lower

Dims = Sequence[int] | int | None


def normal_dims(dims: Dims, rank: int) -> list[int]:
    """Dims as sorted non-negative numbers; all of them for None or none."""
    if dims is None:
        return list(range(rank))
    dims = [dims] if isinstance(dims, int) else list(dims)
    return sorted({d % rank for d in dims}) if dims and rank else list(range(rank))


def reduce(
    ctx: LoweringContext, kind: str, x: TensorBox, dims: Dims, keepdim: bool, dtype: torch.dtype,
    value: Callable[[Value, Index], Value] | None = None, compute: torch.dtype | None = None,
) -> TensorBox:  # fmt: skip
    """`kind` of `value(element, index)` over `dims`; the result's memory has `dtype`."""
    size = ctx.size_of(x)
    reduced = normal_dims(dims, len(size))
    kept = [d for d in range(len(size)) if d not in reduced]
    compute = compute_dtype(compute if compute is not None else dtype)
    load = ctx.loader(x, size, compute)

    def inner(index: Index, rindex: Index) -> Value:
        full: list[Expr] = [ZERO] * len(size)
        for d, i in zip(kept, index):
            full[d] = i
        for d, i in zip(reduced, rindex):
            full[d] = i
        v = load(tuple(full))
        return value(v, tuple(full)) if value is not None else v

    out = ctx.reduction(kind, [size[d] for d in kept], [size[d] for d in reduced], dtype, inner)
    return keep_dims(out, reduced, len(size)) if keepdim else out


def keep_dims(x: TensorBox, reduced: Sequence[int], rank: int) -> TensorBox:
    """A view of a reduction's result with its reduced dims as size 1."""
    sizes = list(x.size)
    kept = [d for d in range(rank) if d not in reduced]
    size = tuple(sizes[kept.index(d)] if d in kept else ONE for d in range(rank))
    return x.viewed(size, lambda index: tuple(index[d] for d in kept))


def count(ctx: LoweringContext, x: TensorBox, dims: Dims) -> Expr:
    """How many elements are reduced into one."""
    size = ctx.size_of(x)
    return product(size[d] for d in normal_dims(dims, len(size)))


@lower("aten.sum")
def lower_sum(
    ctx: LoweringContext, x: TensorBox, dims: Dims = None, keepdim: bool = False, dtype: Any = None
) -> TensorBox:
    """Sum; integers add up in int64."""
    return reduce(ctx, "sum", x, dims, keepdim, result_dtype(ctx))


@lower("aten.mean")
def lower_mean(
    ctx: LoweringContext, x: TensorBox, dims: Dims = None, keepdim: bool = False, dtype: Any = None
) -> TensorBox:
    """Sum divided by the number of elements."""
    dtype = result_dtype(ctx)
    wide = compute_dtype(dtype)
    total = reduce(ctx, "sum", x, dims, keepdim, wide)
    return divided(ctx, total, count(ctx, x, dims), dtype)


def divided(ctx: LoweringContext, x: TensorBox, n: Expr, dtype: torch.dtype) -> TensorBox:
    """x / n"""
    size = ctx.size_of(x)
    load = ctx.loader(x, size, compute_dtype(dtype))
    return ctx.pointwise(size, dtype, lambda i: ops.div(load(i), ops.index_expr(ctx.canon(n), compute_dtype(dtype))))


@lower("aten.amax")
def lower_amax(ctx: LoweringContext, x: TensorBox, dims: Dims = (), keepdim: bool = False) -> TensorBox:
    """Largest element, NaN if there is one."""
    return reduce(ctx, "max", x, dims, keepdim, result_dtype(ctx))


@lower("aten.amin")
def lower_amin(ctx: LoweringContext, x: TensorBox, dims: Dims = (), keepdim: bool = False) -> TensorBox:
    """Smallest element, NaN if there is one."""
    return reduce(ctx, "min", x, dims, keepdim, result_dtype(ctx))


@lower("aten._softmax", "aten._log_softmax")
def lower_softmax(ctx: LoweringContext, x: TensorBox, dim: int, half_to_float: bool = False) -> TensorBox:
    """exp(x - max) / sum, or x - max - log(sum), along `dim`."""
    return softmax(ctx, x, dim, result_dtype(ctx), ctx.op == "aten._log_softmax")


@lower("aten.softmax", "aten.log_softmax")
def lower_softmax_int(ctx: LoweringContext, x: TensorBox, dim: int, dtype: Any = None) -> TensorBox:
    """Softmax with a cast of its input to `dtype`."""
    return softmax(ctx, x, dim, result_dtype(ctx), ctx.op == "aten.log_softmax")


def softmax(ctx: LoweringContext, x: TensorBox, dim: int, dtype: torch.dtype, log: bool) -> TensorBox:
    """Three loops over `dim`: largest, sum of exponentials, result."""
    wide = compute_dtype(dtype)
    size = ctx.size_of(x)
    if not size:
        return ctx.pointwise((), dtype, lambda i: ops.constant(0.0 if log else 1.0, wide))
    largest = reduce(ctx, "max", x, dim, True, wide)
    load, load_max = ctx.loader(x, size, wide), ctx.loader(largest, size, wide)
    if log:
        terms = ctx.pointwise(size, wide, lambda i: ops.sub(load(i), load_max(i)))
        load_term = ctx.loader(terms, size, wide)
        total = reduce(ctx, "sum", terms, dim, True, wide, lambda v, _: ops.exp(v))
        load_total = ctx.loader(total, size, wide)
        return ctx.pointwise(size, dtype, lambda i: ops.sub(load_term(i), ops.log(load_total(i))), ctx.order_of_meta())
    powers = ctx.pointwise(size, wide, lambda i: ops.exp(ops.sub(load(i), load_max(i))))
    load_power = ctx.loader(powers, size, wide)
    load_total = ctx.loader(reduce(ctx, "sum", powers, dim, True, wide), size, wide)
    return ctx.pointwise(size, dtype, lambda i: ops.div(load_power(i), load_total(i)), ctx.order_of_meta())


def moments(
    ctx: LoweringContext, x: TensorBox, dims: Dims, wide: torch.dtype, correction: float = 0
) -> tuple[TensorBox, TensorBox]:
    """Variance (sum of squares over count - correction) and mean along `dims`, dims kept; two passes."""
    size = ctx.size_of(x)
    n = count(ctx, x, dims)
    mean = divided(ctx, reduce(ctx, "sum", x, dims, True, wide), n, wide)
    load_mean = ctx.loader(mean, size, wide)

    def square(v: Value, index: Index) -> Value:
        d = ops.sub(v, load_mean(index))
        return ops.mul(d, d)

    total = reduce(ctx, "sum", x, dims, True, wide, square)
    own = ctx.size_of(total)
    load = ctx.loader(total, own, wide)

    def finish(index: Index) -> Value:
        scale = ops.index_expr(ctx.canon(n), wide)
        if correction:
            # As eager has it: no fewer than zero degrees of freedom.
            scale = ops.maximum(ops.sub(scale, float(correction)), 0.0)
        return ops.div(load(index), scale)

    return ctx.pointwise(own, wide, finish), mean


@lower("aten.native_layer_norm")
def lower_layer_norm(
    ctx: LoweringContext,
    x: TensorBox,
    shape: Sequence[Any],
    weight: TensorBox | None,
    bias: TensorBox | None,
    eps: float,
) -> tuple[TensorBox, TensorBox, TensorBox]:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dims; mean and rstd as further results."""
    size = ctx.size_of(x)
    dtype = ctx.meta[0].dtype
    wide = compute_dtype(dtype)
    dims = list(range(len(size) - len(shape), len(size)))
    var, mean = moments(ctx, x, dims, wide)
    own = ctx.size_of(var)
    load_var = ctx.loader(var, own, wide)
    rstd = ctx.pointwise(own, ctx.meta[2].dtype, lambda i: ops.rsqrt(ops.add(load_var(i), float(eps))))
    loads = [ctx.loader(t, size, wide) for t in (x, mean, rstd)]
    affine = [ctx.loader(t, size, wide) if t is not None else None for t in (weight, bias)]

    def inner(index: Index) -> Value:
        v, m, r = (load(index) for load in loads)
        v = ops.mul(ops.sub(v, m), r)
        if affine[0] is not None:
            v = ops.mul(v, affine[0](index))
        return ops.add(v, affine[1](index)) if affine[1] is not None else v

    out = ctx.pointwise(size, dtype, inner)
    if ctx.meta[1].dtype != wide:
        raise Unsupported("layer_norm with statistics in another dtype")
    return out, mean, rstd


__all__ = ["count", "divided", "expr", "keep_dims", "moments", "normal_dims", "reduce", "softmax"]
