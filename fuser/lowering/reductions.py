"""Reductions over any set of dims."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fuser.errors import Unsupported
from fuser.ir.loop_body import LOW_PRECISION, Value, compute_dtype, ops
from fuser.ir.nodes import Index, TensorBox
from fuser.ir.sizes import ONE, ZERO, Expr, product
from fuser.lowering import demands
from fuser.lowering.context import LoweringContext, Scalar
from fuser.lowering.entries import EVERY, lower, refuse
from fuser.lowering.pointwise import elementwise, lower_maximum, lower_minimum, result_dtype
from fuser.lowering.views import keep_few
from fuser.reasons import because

Dims = Sequence[int] | int | None
Element = Callable[[Value, Index], Value]


def normal_dims(dims: Dims, rank: int) -> list[int]:
    """Dims as sorted non-negative numbers; all dims for None or an empty list."""
    if dims is None:
        return list(range(rank))
    dims = [dims] if isinstance(dims, int) else list(dims)
    for d in dims:
        if not -max(rank, 1) <= d < max(rank, 1):  # torch's own shape function of softmax accepts any
            raise Unsupported(f"dim {d} of a tensor with {rank} dims")
    return sorted({d % rank for d in dims}) if dims and rank else list(range(rank))


def reduce(
    ctx: LoweringContext, kind: str, x: TensorBox, dims: Dims, dtype: torch.dtype, value: Element | None = None,
    compute: torch.dtype | None = None, order: tuple[int, ...] | None = None, *, keepdim: bool = False,
) -> TensorBox:  # fmt: skip
    """`kind` of `value(element, index)` over `dims`; the result is stored in `dtype`, elements are in `compute`."""
    reduced = normal_dims(dims, len(x.size))
    if len(reduced) == 1:
        keep_few(ctx, x, reduced[0])
    size = ctx.size_of(x)
    kept = [d for d in range(len(size)) if d not in reduced]
    load = ctx.loader(x, size, compute_dtype(compute if compute is not None else dtype))

    def inner(index: Index, rindex: Index) -> Value:
        at = dict(zip((*kept, *reduced), (*index, *rindex)))
        full = tuple(at[d] for d in range(len(size)))
        v = load(full)
        return value(v, full) if value is not None else v

    shape = [ONE if d in reduced else size[d] for d in range(len(size))] if keepdim else [size[d] for d in kept]
    return ctx.reduction(
        kind, shape, [size[d] for d in reduced], dtype, inner, kept if keepdim else None, order
    )  # fmt: skip


def reduce_to_result(
    ctx: LoweringContext, kind: str, x: TensorBox, dims: Dims, value: Element | None = None,
    compute: torch.dtype | None = None, finish: Callable[[Value], Value] | None = None, result: int | None = None,
    *, keepdim: bool = False,
) -> TensorBox:  # fmt: skip
    """The node's result: a reduction, then `finish` in the wide dtype, in eager's dtype and memory order."""
    meta = ctx.meta if result is None else ctx.meta[result]
    order = ctx.order_of_meta(result)
    rounds = ctx.numerics == "eager" and meta.dtype in LOW_PRECISION
    compute = compute if compute is not None else meta.dtype
    wide = compute_dtype(meta.dtype)
    if kind in ("sum", "prod") and not wide.is_floating_point:
        wide = torch.int64  # integers are summed in int64, whatever dtype eager returns
    if kind == "prod" and wide is torch.float32 and ctx.target.wide_sums:
        wide = compute = torch.float64  # otherwise the order decides whether a product that becomes 0 overflows first
    if finish is None and not rounds and wide is compute_dtype(meta.dtype):
        return reduce(ctx, kind, x, dims, meta.dtype, value, compute, order, keepdim=keepdim)
    total = reduce(ctx, kind, x, dims, wide, value, compute, order, keepdim=keepdim)
    load = ctx.loader(total, ctx.size_of(total), wide)
    return ctx.pointwise(
        ctx.size_of(total), meta.dtype, lambda i: finish(load(i)) if finish is not None else load(i), order
    )


def count(ctx: LoweringContext, x: TensorBox, dims: Dims) -> Expr:
    """The number of elements that are reduced into one."""
    size = ctx.size_of(x)
    return product(size[d] for d in normal_dims(dims, len(size)))


def need_elements(ctx: LoweringContext, x: TensorBox, dims: Dims) -> None:
    """Guard that the reduced dims are not empty: eager raises there."""
    size = ctx.size_of(x)
    for d in normal_dims(dims, len(size)):
        ctx.assume("lt", ZERO, size[d])


def number_of(ctx: LoweringContext, n: Expr, dtype: torch.dtype) -> Value:
    """A size as a value of a float dtype."""
    n = ctx.canon(n)
    known = n.as_int()
    return ops.constant(known, dtype) if known is not None else ops.index_expr(n, dtype)


# -- sums --------------------------------------------------------------------------------------------------------------
@lower("aten.sum")
def lower_sum(
    ctx: LoweringContext, x: TensorBox, dims: Dims = None, keepdim: bool = False, dtype: Any = None
) -> TensorBox:
    """Sum; integers are summed in int64."""
    return reduce_to_result(ctx, "sum", x, dims, keepdim=keepdim)


@lower("aten.mean")
def lower_mean(
    ctx: LoweringContext, x: TensorBox, dims: Dims = None, keepdim: bool = False, dtype: Any = None
) -> TensorBox:
    """Sum divided by the number of elements."""
    n, wide = count(ctx, x, dims), compute_dtype(result_dtype(ctx))
    return reduce_to_result(
        ctx, "sum", x, dims, finish=lambda v: ops.div(v, number_of(ctx, n, wide)), keepdim=keepdim
    )  # fmt: skip


@lower("aten.nansum")
def lower_nansum(
    ctx: LoweringContext, x: TensorBox, dims: Dims = None, keepdim: bool = False, dtype: Any = None
) -> TensorBox:
    """Sum of the elements that are not NaN."""
    return reduce_to_result(ctx, "sum", x, dims, lambda v, _: _without_nan(v), keepdim=keepdim)


def _without_nan(v: Value) -> Value:
    return ops.where(ops.isnan(v), ops.constant(0, v.dtype), v) if v.dtype.is_floating_point else v


@lower("aten.nanmean")
def lower_nanmean(
    ctx: LoweringContext, x: TensorBox, dims: Dims = None, keepdim: bool = False, dtype: Any = None
) -> TensorBox:
    """Mean of the elements that are not NaN."""
    dtype = result_dtype(ctx)
    wide = compute_dtype(dtype)
    total = reduce(ctx, "sum", x, dims, wide, lambda v, _: _without_nan(v), keepdim=keepdim)
    number = reduce(
        ctx, "sum", x, dims, torch.int64,
        lambda v, _: ops.to_dtype(ops.logical_not(ops.isnan(v)), torch.int64), compute=wide, keepdim=keepdim,
    )  # fmt: skip
    return elementwise(ctx, [total, number], lambda a, b: ops.div(a, b), dtype)


@lower("aten.count_nonzero", decisive=EVERY)
def lower_count_nonzero(ctx: LoweringContext, x: TensorBox, dims: Dims = None) -> TensorBox:
    """The number of elements that differ from zero."""
    return reduce_to_result(
        ctx, "sum", x, dims, lambda v, _: ops.to_dtype(ops.ne(v, 0), torch.int64), x.dtype
    )  # fmt: skip


@lower("aten.prod")
def lower_prod(
    ctx: LoweringContext, x: TensorBox, dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> TensorBox:
    """Product, over one dim or all."""
    return reduce_to_result(ctx, "prod", x, dim, keepdim=keepdim)


@lower("aten.trace")
def lower_trace(ctx: LoweringContext, x: TensorBox) -> TensorBox:
    """Sum of the diagonal of a matrix."""
    rows, columns = ctx.size_of(x)
    n = rows if ctx.hint(rows) <= ctx.hint(columns) else columns
    ctx.assume("le", n, rows)
    ctx.assume("le", n, columns)
    return reduce_to_result(ctx, "sum", x.viewed((n,), lambda i: (i[0], i[0])), None)


_KINDS = {  # rows of the table of reductions
    "aten.any": "any", "aten.all": "all", "aten.amax": "max", "aten.amin": "min", "aten.max": "max", "aten.min": "min",
    "aten.argmax": "argmax", "aten.argmin": "argmin",
}  # fmt: skip


# -- any, all ----------------------------------------------------------------------------------------------------------
@lower("aten.any", "aten.all", decisive=EVERY)
def lower_any_all(ctx: LoweringContext, x: TensorBox, dims: Dims = None, keepdim: bool = False) -> TensorBox:
    """Whether any element, or every one, is not zero. Of no dims: each element by itself, unlike other reductions."""
    kind, order = _KINDS[ctx.op], ctx.order_of_meta()
    dtype = result_dtype(ctx)  # uint8 for uint8
    if dims is not None and not isinstance(dims, int) and not dims:
        return elementwise(ctx, [x], lambda v: ops.to_dtype(v, dtype), dtype, compute=torch.bool)
    out = reduce(ctx, kind, x, dims, torch.bool, compute=torch.bool, order=order, keepdim=keepdim)
    return out if dtype is torch.bool else elementwise(ctx, [out], lambda v: ops.to_dtype(v, dtype), dtype)


# -- extremes ----------------------------------------------------------------------------------------------------------
@lower("aten.amax", "aten.amin")
def lower_amax(ctx: LoweringContext, x: TensorBox, dims: Dims = (), keepdim: bool = False) -> TensorBox:
    """Largest or smallest element; NaN if there is one."""
    need_elements(ctx, x, dims)
    return reduce_to_result(ctx, _KINDS[ctx.op], x, dims, keepdim=keepdim)


@lower("aten.max", "aten.min", decisive=EVERY)
def lower_max(ctx: LoweringContext, x: TensorBox, other: Any = None, keepdim: bool = False) -> Any:
    """The extreme of all elements; of two tensors; or along a dim, with its index."""
    kind = _KINDS[ctx.op]
    if isinstance(other, TensorBox):
        return (lower_maximum if kind == "max" else lower_minimum)(ctx, x, other)
    need_elements(ctx, x, other)
    if other is None:
        return reduce_to_result(ctx, kind, x, None)
    values = reduce_to_result(ctx, kind, x, other, result=0, keepdim=keepdim)
    return values, index_of(ctx, f"arg{kind}", x, other, keepdim, 1)


@lower("aten.aminmax")
def lower_aminmax(ctx: LoweringContext, x: TensorBox, dim: int | None = None, keepdim: bool = False) -> Any:
    """Smallest and largest element."""
    need_elements(ctx, x, dim)
    kinds = enumerate(("min", "max"))
    return tuple(reduce_to_result(ctx, kind, x, dim, result=n, keepdim=keepdim) for n, kind in kinds)


def index_of(
    ctx: LoweringContext, kind: str, x: TensorBox, dim: int | None, keepdim: bool, result: int | None = None
) -> TensorBox:
    """The index of the extreme element along `dim`, or in the flattened tensor; the first of equal ones."""
    size = ctx.size_of(x)
    dims = normal_dims(dim, len(size))
    ctx.assume("lt", product(size[d] for d in dims), 1 << 31)  # kernels may store indices in 32 bits

    def pair(v: Value, index: Index) -> Value:
        at = ZERO
        for d in dims:
            at = at * size[d] + index[d]
        return ops.pair(v, ops.index_expr(at))

    order = ctx.order_of_meta(result)
    compute = torch.uint8 if x.dtype is torch.bool else compute_dtype(x.dtype)
    return reduce(ctx, kind, x, dims, torch.int64, pair, compute, order, keepdim=keepdim)


@lower("aten.argmax", "aten.argmin", decisive=EVERY)
def lower_argmax(ctx: LoweringContext, x: TensorBox, dim: int | None = None, keepdim: bool = False) -> TensorBox:
    """Index of the largest or smallest element."""
    if x.dtype is torch.bool:
        raise demands.refused("the index of an extreme of bools")
    need_elements(ctx, x, dim)
    return index_of(ctx, _KINDS[ctx.op], x, dim, keepdim)


# -- variance ----------------------------------------------------------------------------------------------------------
def moments(
    ctx: LoweringContext, x: TensorBox, dims: Dims, wide: torch.dtype, correction: float = 0, keepdim: bool = True,
) -> tuple[TensorBox, TensorBox]:  # fmt: skip
    """Variance (sum of squares over count - correction) and mean along `dims`, dims kept; two passes."""
    n = count(ctx, x, dims)
    mean = divided(ctx, reduce(ctx, "sum", x, dims, wide, keepdim=True), n, wide)
    load_mean = ctx.loader(mean, ctx.size_of(x), wide)

    def square(v: Value, index: Index) -> Value:
        d = ops.sub(v, load_mean(index))
        return ops.mul(d, d)

    total = reduce(ctx, "sum", x, dims, wide, square, keepdim=True)
    return divided(ctx, total, n, wide, correction), mean


def shifted_moments(
    ctx: LoweringContext, x: TensorBox, dims: Dims, wide: torch.dtype, correction: float = 0
) -> tuple[TensorBox, TensorBox]:
    """`moments` in one pass over memory, for a dtype `wide` of twice the precision of `x`.

    Sums x - first and its square. The first element is one of the n, so its squared distance from the mean is at most n
    variances, and cancellation costs at most a factor of n of the wide precision.
    """
    n, size = count(ctx, x, dims), ctx.size_of(x)
    load, over = ctx.loader(x, size, wide), set(normal_dims(dims, len(size)))

    def first(index: Index) -> Value:
        some = ops.gt(number_of(ctx, n, wide), 0.0)
        start = tuple(ZERO if d in over else e for d, e in enumerate(index))
        return ops.masked(some, lambda: load(start), 0.0)

    def square(v: Value, index: Index) -> Value:
        d = ops.sub(v, first(index))
        return ops.mul(d, d)

    sums = reduce(ctx, "sum", x, dims, wide, lambda v, i: ops.sub(v, first(i)), keepdim=True)
    squares = reduce(ctx, "sum", x, dims, wide, square, keepdim=True)
    own = ctx.size_of(sums)
    load_sum, load_squares = ctx.loader(sums, own, wide), ctx.loader(squares, own, wide)

    def mean(i: Index) -> Value:
        number = number_of(ctx, n, wide)
        several = ops.add(first(i), ops.div(load_sum(i), number))
        return ops.where(ops.eq(number, 1.0), first(i), several)  # a single element may be infinite

    def total(i: Index) -> Value:
        s = load_sum(i)
        return ops.maximum(ops.sub(load_squares(i), ops.div(ops.mul(s, s), number_of(ctx, n, wide))), 0.0)

    return divided(ctx, ctx.pointwise(own, wide, total), n, wide, correction), ctx.pointwise(own, wide, mean)


def divided(ctx: LoweringContext, x: TensorBox, n: Expr, dtype: torch.dtype, correction: float = 0) -> TensorBox:
    """x / (n - correction), with at least zero degrees of freedom, as in eager"""
    size = ctx.size_of(x)
    load = ctx.loader(x, size, compute_dtype(dtype))

    def inner(index: Index) -> Value:
        scale = number_of(ctx, n, compute_dtype(dtype))
        if correction:
            scale = ops.maximum(ops.sub(scale, float(correction)), 0.0)
        return ops.div(load(index), scale)

    return ctx.pointwise(size, dtype, inner)


def _correction(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Dims, float, bool]:
    """Dims, correction and keepdim from the arguments of any overload of var, std, var_mean or std_mean."""
    names = ("unbiased",) if args and isinstance(args[0], bool) else ("dim", "unbiased", "keepdim")
    given = {**dict(zip(names, args)), **kwargs}
    correction = given.get("correction")
    if correction is None:
        correction = 1.0 if given.get("unbiased", True) else 0.0
    if isinstance(correction, (Scalar, Expr)):
        raise Unsupported("a correction that is not known when the graph is registered")
    return given.get("dim"), float(correction), bool(given.get("keepdim", False))


@lower("aten.var", "aten.std", "aten.var_mean", "aten.std_mean")
def lower_var(ctx: LoweringContext, x: TensorBox, *args: Any, **kwargs: Any) -> Any:
    """Variance or standard deviation, with the mean if requested."""
    dims, correction, keepdim = _correction(args, kwargs)
    if correction < 0:  # the variance of no elements is NaN, whatever the divisor
        need_elements(ctx, x, dims)
    pair = isinstance(ctx.meta, (tuple, list))
    wide = compute_dtype(ctx.meta[0].dtype if pair else ctx.meta.dtype)
    if x.dtype is torch.float32 and ctx.target.wide_sums:  # in float64, as in eager's kernel
        var, mean = shifted_moments(ctx, x, dims, torch.float64, correction)
    else:
        var, mean = moments(ctx, x, dims, wide, correction)
    root = ctx.op in ("aten.std", "aten.std_mean")
    first = squeezed(ctx, var, x, dims, keepdim, (lambda v: ops.sqrt(v)) if root else None, 0 if pair else None)
    return (first, squeezed(ctx, mean, x, dims, keepdim, None, 1)) if pair else first


def squeezed(
    ctx: LoweringContext, x: TensorBox, source: TensorBox, dims: Dims, keepdim: bool,
    fn: Callable[[Value], Value] | None, result: int | None,
) -> TensorBox:  # fmt: skip
    """The node's result from a reduction of `source` with dims kept: `fn` of it, without the dims if not `keepdim`."""
    meta = ctx.meta if result is None else ctx.meta[result]
    rank = len(ctx.size_of(source))
    reduced = normal_dims(dims, rank)
    if not keepdim:
        kept = [d for d in range(rank) if d not in reduced]
        at = {d: n for n, d in enumerate(kept)}
        x = x.viewed(
            tuple(ctx.size_of(x)[d] for d in kept), lambda i: tuple(i[at[d]] if d in at else ZERO for d in range(rank))
        )
    size = ctx.size_of(x)
    load = ctx.loader(x, size, x.dtype)
    return ctx.pointwise(
        size, meta.dtype, lambda i: fn(load(i)) if fn is not None else load(i), ctx.order_of_meta(result)
    )


# -- norms of vectors --------------------------------------------------------------------------------------------------
def vector_norm(ctx: LoweringContext, x: TensorBox, order: float, dims: Dims, keepdim: bool) -> TensorBox:
    """(sum of |x| ** order) ** (1 / order), and its limits."""
    wide = compute_dtype(result_dtype(ctx))
    if math.isinf(order):
        if order > 0 or count(ctx, x, dims) != ONE:
            need_elements(ctx, x, dims)
        return reduce_to_result(ctx, "max" if order > 0 else "min", x, dims, lambda v, _: ops.abs(v), keepdim=keepdim)
    if order == 0:
        return reduce_to_result(ctx, "sum", x, dims, lambda v, _: ops.to_dtype(ops.ne(v, 0), wide), keepdim=keepdim)
    if order == 1:
        return reduce_to_result(ctx, "sum", x, dims, lambda v, _: ops.abs(v), keepdim=keepdim)
    if order == 2:
        return reduce_to_result(
            ctx, "sum", x, dims, lambda v, _: ops.mul(v, v), finish=lambda v: ops.sqrt(v), keepdim=keepdim
        )
    if order < 0:  # no identity exists for these
        need_elements(ctx, x, dims)
    return reduce_to_result(
        ctx, "sum", x, dims, lambda v, _: ops.pow(ops.abs(v), float(order)),
        finish=lambda v: ops.pow(v, 1.0 / order), keepdim=keepdim,
    )  # fmt: skip


@lower("aten.linalg_vector_norm")
def lower_vector_norm(
    ctx: LoweringContext, x: TensorBox, order: Any = 2, dims: Dims = None, keepdim: bool = False, dtype: Any = None
) -> TensorBox:
    """Norm of the vectors along `dims`."""
    return vector_norm(ctx, x, _order(order), dims, keepdim)


def _order(order: Any) -> float:
    if order is None:
        return 2.0
    if not isinstance(order, (int, float)):
        raise Unsupported(f"a norm of order {order!r}: expected a number known when the graph is registered")
    return float(order)


@lower("aten.norm")
def lower_norm(
    ctx: LoweringContext, x: TensorBox, order: Any = 2, dims: Dims = None, keepdim: bool = False, dtype: Any = None
) -> TensorBox:
    """The older spelling of the vector norm."""
    return vector_norm(ctx, x, _order(order), dims, keepdim)


@lower("aten.dist")
def lower_dist(ctx: LoweringContext, a: TensorBox, b: TensorBox, order: Any = 2) -> TensorBox:
    """Norm of the difference."""
    if torch.bool in (a.dtype, b.dtype):
        raise demands.refused("a difference of bools")
    dtype = result_dtype(ctx)
    gap = elementwise(ctx, [a, b], lambda x, y: ops.sub(x, y), dtype, ordered=False)
    return vector_norm(ctx, gap, _order(order), None, keepdim=False)


@lower("aten.logsumexp")
def lower_logsumexp(ctx: LoweringContext, x: TensorBox, dims: Dims, keepdim: bool = False) -> TensorBox:
    """log(sum(exp(x))), shifted by the largest element unless that is infinite."""
    wide = compute_dtype(result_dtype(ctx))
    largest = reduce(ctx, "max", x, dims, wide, keepdim=True)
    own = ctx.size_of(largest)
    load = ctx.loader(largest, own, wide)
    shift = ctx.pointwise(
        own, wide, lambda i: ops.where(ops.isinf(load(i)), ops.constant(0.0, wide), load(i))
    )  # fmt: skip
    load_shift = ctx.loader(shift, ctx.size_of(x), wide)
    total = reduce(ctx, "sum", x, dims, wide, lambda v, i: ops.exp(ops.sub(v, load_shift(i))), keepdim=True)
    loads = ctx.loader(total, own, wide), ctx.loader(shift, own, wide)
    out = ctx.pointwise(own, wide, lambda i: ops.add(ops.log(loads[0](i)), loads[1](i)))
    return squeezed(ctx, out, x, dims, keepdim, None, None)


@lower("aten.cosine_similarity")
def lower_cosine_similarity(
    ctx: LoweringContext, a: TensorBox, b: TensorBox, dim: int = 1, eps: float = 1e-8
) -> TensorBox:
    """Dot product of the vectors along `dim`, each divided by its norm (at least `eps`)."""
    dtype = result_dtype(ctx)
    wide = compute_dtype(dtype)
    size = ctx.broadcast_sizes([ctx.size_of(a), ctx.size_of(b)])
    full = [expanded(ctx, x, size) for x in (a, b)]
    scaled = []
    for x in full:
        total = reduce(ctx, "sum", x, dim, wide, lambda v, _: ops.mul(v, v), keepdim=True)
        load, load_total = ctx.loader(x, size, wide), ctx.loader(total, size, wide)

        def unit(i: Index, load: Any = load, load_total: Any = load_total) -> Value:
            return ops.div(load(i), ops.maximum(ops.sqrt(load_total(i)), float(eps)))

        scaled.append(unit)
    return reduce_to_result(ctx, "sum", full[0], dim, lambda _, i: ops.mul(scaled[0](i), scaled[1](i)))


def expanded(ctx: LoweringContext, x: TensorBox, size: tuple[Expr, ...]) -> TensorBox:
    """`x` viewed with the broadcast `size`."""
    own = ctx.size_of(x)
    lead = len(size) - len(own)
    keep = [not ctx.is_one(s) for s in own]
    return x.viewed(size, lambda i: tuple(e if k else ZERO for e, k in zip(i[lead:], keep)))


refuse(
    because("left_to_aten", "it sorts: left to ATen"),
    "aten.median", "aten.nanmedian", "aten.mode", "aten.sort", "aten.argsort", "aten.topk",
    "aten.kthvalue", "aten.msort", "aten.quantile", "aten.nanquantile",
)  # fmt: skip
refuse(
    because("data_size", "the number of unique values depends on data"),
    "aten.unique_dim",
    "aten.unique_consecutive",
    "aten._unique2",
)
refuse(because("left_to_aten", "it counts values in bins: left to ATen"), "aten.histc")
refuse(because("data_size", "the number of bins depends on data"), "aten.bincount")
