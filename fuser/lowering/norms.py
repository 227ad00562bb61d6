"""Softmax and normalisation: pointwise functions of an element and the statistics of its row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fuser.errors import Unsupported
from fuser.ir.loop_body import Value, compute_dtype, ops
from fuser.ir.nodes import Index, TensorBox
from fuser.ir.sizes import ONE, ZERO, Expr, expr, product
from fuser.kernel_spec import memory_order
from fuser.lowering import demands
from fuser.lowering.context import LoweringContext, Operand
from fuser.lowering.entries import lower
from fuser.lowering.pointwise import result_dtype
from fuser.lowering.reductions import Element, divided, moments, reduce
from fuser.reasons import because
from fuser.targets import HOST

Statistics = tuple[TensorBox, TensorBox, TensorBox]
_OF_BATCHES = frozenset(
    {"aten.batch_norm", "aten.native_batch_norm", "aten._native_batch_norm_legit",
     "aten._native_batch_norm_legit_functional"}
)  # fmt: skip
_OF_IMAGES = frozenset({"aten.instance_norm", "aten.group_norm", "aten.native_group_norm"})
Order = tuple[int, ...] | None


def rereads(op: str, args: Sequence[Any]) -> bool:
    """Whether a call is a norm that reads whole images for its statistics, and then again for its result."""
    return op in _OF_IMAGES or (op in _OF_BATCHES and any(a is True for a in args))


# -- softmax -----------------------------------------------------------------------------------------------------------
@lower("aten._softmax", "aten._log_softmax", "aten.softmax", "aten.log_softmax", "aten._safe_softmax")
def lower_softmax(ctx: LoweringContext, x: TensorBox, dim: int, dtype: Any = None) -> TensorBox:
    """exp(x - max) / sum, or x - max - log(sum), along `dim`."""
    return softmax(ctx, x, dim, result_dtype(ctx), ctx.op in ("aten._log_softmax", "aten.log_softmax"))


def softmax(ctx: LoweringContext, x: TensorBox, dim: int, dtype: torch.dtype, log: bool) -> TensorBox:
    """Three loops over `dim`: largest, sum of exponentials, result."""
    wide = compute_dtype(dtype)
    size = ctx.size_of(x)
    load, load_largest, load_total = softmax_parts(ctx, x, dim, wide)

    def inner(i: Index) -> Value:
        shifted = ops.sub(load(i), load_largest(i))
        if log:
            return ops.sub(shifted, ops.log(load_total(i)))
        # The reciprocal is computed once per row; its rounding error is small beside that of exp.
        out = ops.mul(ops.exp_down(shifted), ops.div(ops.constant(1.0, wide), load_total(i)))
        if ctx.op == "aten._safe_softmax":  # a row of -inf gives zeros
            return ops.where(ops.eq(load_largest(i), -float("inf")), ops.constant(0.0, wide), out)
        return out

    return ctx.pointwise(size, dtype, inner, ctx.order_of_meta())


Loader = Callable[[Index], Value]


def softmax_parts(ctx: LoweringContext, x: TensorBox, dim: int, wide: torch.dtype) -> tuple[Loader, Loader, Loader]:
    """Loaders, over the size of `x`, of x, its largest element along `dim`, and the sum of exp(x - largest)."""
    size = ctx.size_of(x)
    load = ctx.loader(x, size, wide)
    load_largest = ctx.loader(reduce(ctx, "max", x, dim, wide, keepdim=True), size, wide)
    total = reduce(ctx, "sum", x, dim, wide, lambda v, i: ops.exp_down(ops.sub(v, load_largest(i))), keepdim=True)
    return load, load_largest, ctx.loader(total, size, wide)


@lower("aten._softmax_backward_data", "aten._log_softmax_backward_data")
def lower_softmax_backward(
    ctx: LoweringContext, grad: TensorBox, out: TensorBox, dim: int, input_dtype: Any = None
) -> TensorBox:
    """(grad - sum(grad * out)) * out, or grad - exp(out) * sum(grad)"""
    if input_dtype not in (None, grad.dtype) and ctx.target.like == HOST:
        raise Unsupported("the gradient of a softmax in another dtype than its input's")  # ATen's differs
    dtype = result_dtype(ctx)
    wide = compute_dtype(grad.dtype)
    size = ctx.size_of(grad)
    demands.has_size(ctx, out, size, "the result of a softmax")
    demands.same_dtypes(grad, out)
    log = ctx.op == "aten._log_softmax_backward_data"
    g, y = ctx.loader(grad, size, wide), ctx.loader(out, size, wide)
    total = reduce(ctx, "sum", grad, dim, wide, lambda v, i: v if log else ops.mul(v, y(i)), keepdim=True)
    s = ctx.loader(total, size, wide)

    def inner(i: Index) -> Value:
        if log:
            return ops.sub(g(i), ops.mul(ops.exp(y(i)), s(i)))
        return ops.mul(ops.sub(g(i), s(i)), y(i))  # for equal gradients, only the rounding error of the sum is left

    return ctx.pointwise(size, dtype, inner, ctx.order_of_meta())


# -- shared by all norms
# ------------------------------------------------------------------------------------------------
def inverse_root(ctx: LoweringContext, var: TensorBox, eps: Operand, wide: torch.dtype) -> TensorBox:
    """1 / sqrt(var + eps)"""
    size = ctx.size_of(var)
    load, load_eps = ctx.loader(var, size, wide), ctx.loader(eps, size, wide)
    return ctx.pointwise(size, wide, lambda i: ops.rsqrt(ops.add(load(i), load_eps(i))))


def scaled(
    ctx: LoweringContext, x: TensorBox, mean: Loader | None, rstd: Loader, weight: Loader | None, bias: Loader | None,
    dtype: torch.dtype, order: Order,
) -> TensorBox:  # fmt: skip
    """(x - mean) * rstd * weight + bias; the loaders take an index of `x`."""
    size = ctx.size_of(x)
    load = ctx.loader(x, size, compute_dtype(dtype))

    def inner(i: Index) -> Value:
        v = load(i)
        v = ops.sub(v, mean(i)) if mean is not None else v
        v = ops.mul(v, rstd(i))
        v = ops.mul(v, weight(i)) if weight is not None else v
        return ops.add(v, bias(i)) if bias is not None else v

    return ctx.pointwise(size, dtype, inner, order)


def in_dtype(ctx: LoweringContext, x: TensorBox, dtype: torch.dtype, size: Sequence[Expr] | None = None) -> TensorBox:
    """A statistic as eager returns it: in `dtype`, without the dims of size 1 that `size` lacks."""
    own = ctx.size_of(x)
    if size is not None and len(size) != len(own):
        kept = [d for d in range(len(own)) if not ctx.is_one(own[d])][: len(size)]
        kept = kept if len(kept) == len(size) else list(range(len(size)))
        at, rank = {d: n for n, d in enumerate(kept)}, len(own)
        x = x.viewed(tuple(size), lambda i: tuple(i[at[d]] if d in at else ZERO for d in range(rank)))
        own = tuple(size)
    elif x.dtype is dtype and x.view is None:
        return x
    return ctx.pointwise(own, dtype, ctx.loader(x, own, compute_dtype(dtype)))


# -- layer norm, rms norm ----------------------------------------------------------------------------------------------
def _over_last(ctx: LoweringContext, t: TensorBox | None, size: Sequence[Expr], wide: torch.dtype) -> Loader | None:
    return None if t is None else ctx.loader(t, size, wide)


def _known_last(ctx: LoweringContext, x: TensorBox, shape: Sequence[Any]) -> tuple[Expr, ...]:
    """The size of `x`, after guards that its last dims are `shape`."""
    for n, s in zip(reversed(shape), reversed(ctx.size_of(x))):
        ctx.assume("eq", s, n)
        ctx.is_equal(s, n)
    return ctx.size_of(x)


def layer_norm(
    ctx: LoweringContext, x: TensorBox, shape: Sequence[Any], weight: TensorBox | None, bias: TensorBox | None,
    eps: Operand, dtype: torch.dtype, order: Order,
) -> Statistics:  # fmt: skip
    """The normalised tensor, the mean and 1 / sqrt(var + eps) over the last dims; the latter two with dims kept."""
    size, wide = _known_last(ctx, x, shape), compute_dtype(dtype)
    demands.parameters_of_norm(x, weight, bias)
    var, mean = moments(ctx, x, list(range(len(size) - len(shape), len(size))), wide)
    rstd = inverse_root(ctx, var, eps, wide)
    load_mean, load_rstd = (ctx.loader(t, size, wide) for t in (mean, rstd))
    w, b = (_over_last(ctx, t, size, wide) for t in (weight, bias))
    return scaled(ctx, x, load_mean, load_rstd, w, b, dtype, order), mean, rstd


@lower("aten.native_layer_norm")
def lower_native_layer_norm(
    ctx: LoweringContext, x: TensorBox, shape: Sequence[Any], weight: TensorBox | None, bias: TensorBox | None,
    eps: Operand,
) -> Statistics:  # fmt: skip
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dims; mean and rstd as further results."""
    out, mean, rstd = layer_norm(ctx, x, shape, weight, bias, eps, ctx.meta[0].dtype, ctx.order_of_meta(0))
    return out, in_dtype(ctx, mean, ctx.meta[1].dtype), in_dtype(ctx, rstd, ctx.meta[2].dtype)


@lower("aten.layer_norm")
def lower_layer_norm(
    ctx: LoweringContext, x: TensorBox, shape: Sequence[Any], weight: TensorBox | None = None,
    bias: TensorBox | None = None, eps: Operand = 1e-5, cudnn_enable: bool = True,
) -> TensorBox:  # fmt: skip
    """`lower_native_layer_norm` without the statistics."""
    return layer_norm(ctx, x, shape, weight, bias, eps, result_dtype(ctx), ctx.order_of_meta())[0]


def rms_norm(
    ctx: LoweringContext, x: TensorBox, shape: Sequence[Any], weight: TensorBox | None, eps: Operand | None,
    dtype: torch.dtype, order: Order,
) -> tuple[TensorBox, TensorBox]:  # fmt: skip
    """x / sqrt(mean of squares + eps) * weight over the last dims, and the inverse root with dims kept."""
    size, wide = _known_last(ctx, x, shape), compute_dtype(dtype)
    dims = list(range(len(size) - len(shape), len(size)))
    eps = torch.finfo(wide).eps if eps is None else eps
    total = reduce(ctx, "sum", x, dims, wide, lambda v, _: ops.mul(v, v), keepdim=True)
    own = ctx.size_of(total)
    load_total, load_eps = ctx.loader(total, own, wide), ctx.loader(eps, own, wide)
    n = product(size[d] for d in dims)

    def root(i: Index) -> Value:
        mean = ops.div(load_total(i), ops.index_expr(ctx.canon(n), wide))
        return ops.rsqrt(ops.add(mean, load_eps(i)))

    rstd = ctx.pointwise(own, wide, root)
    load_rstd = ctx.loader(rstd, size, wide)
    return scaled(ctx, x, None, load_rstd, _over_last(ctx, weight, size, wide), None, dtype, order), rstd


@lower("aten.rms_norm")
def lower_rms_norm(
    ctx: LoweringContext, x: TensorBox, shape: Sequence[Any], weight: TensorBox | None = None, eps: Any = None
) -> TensorBox:
    """x / sqrt(mean of squares + eps) * weight over the last dims"""
    return rms_norm(ctx, x, shape, weight, eps, result_dtype(ctx), ctx.order_of_meta())[0]


@lower("aten._fused_rms_norm")
def lower_fused_rms_norm(
    ctx: LoweringContext, x: TensorBox, shape: Sequence[Any], weight: TensorBox | None, eps: Any
) -> tuple[TensorBox, TensorBox]:
    """`lower_rms_norm` with the inverse root as second result."""
    out, rstd = rms_norm(ctx, x, shape, weight, eps, ctx.meta[0].dtype, ctx.order_of_meta(0))
    return out, in_dtype(ctx, rstd, ctx.meta[1].dtype)


# -- batch norm, instance norm -----------------------------------------------------------------------------------------
def over_channels(ctx: LoweringContext, t: TensorBox | None, channels: Expr, wide: torch.dtype) -> Loader | None:
    """A loader, by index of `x`, of a tensor with one element per channel (dim 1); None without a tensor."""
    if t is None:
        return None
    demands.has_size(ctx, t, (channels,), "a parameter or statistic of channels")
    load = ctx.loader(t, ctx.size_of(t), wide)
    return lambda i: load((i[1],))


def batch_norm(
    ctx: LoweringContext, x: TensorBox, weight: TensorBox | None, bias: TensorBox | None, mean: TensorBox | None,
    var: TensorBox | None, training: bool, eps: Operand, dtype: torch.dtype, order: Order,
) -> tuple[TensorBox, TensorBox, TensorBox, TensorBox]:  # fmt: skip
    """`x` normalised over all dims but 1; mean, rstd and variance of each channel, of the batch in training."""
    size, wide = ctx.size_of(x), compute_dtype(dtype)
    if len(size) < 2:
        raise Unsupported("batch_norm of a tensor without channels")
    if training:
        var, mean = (per_channel(ctx, t) for t in moments(ctx, x, [d for d in range(len(size)) if d != 1], wide))
    if mean is None or var is None:
        raise Unsupported("batch_norm without statistics outside of training")
    rstd = inverse_root(ctx, var, eps, wide)
    demands.parameters_of_norm(x, weight, bias)
    load_mean, load_rstd, w, b = (over_channels(ctx, t, size[1], wide) for t in (mean, rstd, weight, bias))
    assert load_mean is not None and load_rstd is not None
    return scaled(ctx, x, load_mean, load_rstd, w, b, dtype, order), mean, rstd, var


def per_channel(ctx: LoweringContext, x: TensorBox) -> TensorBox:
    """A statistic with dims kept, viewed as one element per channel."""
    rank = len(ctx.size_of(x))
    return x.viewed((ctx.size_of(x)[1],), lambda i: tuple(i[0] if d == 1 else ZERO for d in range(rank)))


MUTATES = because("left_to_aten", "batch norm in training writes its running statistics: left to ATen")


@lower("aten.batch_norm")
def lower_batch_norm(
    ctx: LoweringContext, x: TensorBox, weight: TensorBox | None, bias: TensorBox | None, mean: TensorBox | None,
    var: TensorBox | None, training: bool, momentum: Any, eps: Operand, cudnn: bool = False,
) -> TensorBox:  # fmt: skip
    """(x - mean) / sqrt(var + eps) * weight + bias, statistics of each channel"""
    if training and mean is not None:
        raise Unsupported(MUTATES)
    return batch_norm(ctx, x, weight, bias, mean, var, training, eps, result_dtype(ctx), ctx.order_of_meta())[0]


def _native(
    ctx: LoweringContext, x: TensorBox, weight: TensorBox | None, bias: TensorBox | None, mean: TensorBox | None,
    var: TensorBox | None, training: bool, eps: Operand,
) -> Statistics:  # fmt: skip
    out, m, r, _ = batch_norm(ctx, x, weight, bias, mean, var, training, eps, ctx.meta[0].dtype, ctx.order_of_meta(0))
    empty = ctx.target.empty_statistics
    if not training and empty is None:
        raise Unsupported(f"the statistics of batch norm outside of training on {ctx.target.device_type}")
    if not training and empty:
        m, r = (ctx.pointwise([ZERO], t.dtype, lambda i: ops.constant(0, torch.float32)) for t in ctx.meta[1:3])
        return out, m, r
    return out, in_dtype(ctx, m, ctx.meta[1].dtype), in_dtype(ctx, r, ctx.meta[2].dtype)


@lower("aten.native_batch_norm", "aten._native_batch_norm_legit")
def lower_native_batch_norm(ctx: LoweringContext, x: TensorBox, *args: Any) -> Statistics:
    """Batch norm with mean and rstd of the batch. Unsupported if running statistics would be written."""
    weight, bias, *running, training, _, eps = args
    if training and running and running[0] is not None:
        raise Unsupported(MUTATES)
    mean, var = running if running else (None, None)
    return _native(ctx, x, weight, bias, mean, var, training, eps)


@lower("aten._native_batch_norm_legit_no_training")
def lower_batch_norm_no_training(
    ctx: LoweringContext, x: TensorBox, weight: TensorBox | None, bias: TensorBox | None, mean: TensorBox,
    var: TensorBox, momentum: Any, eps: Operand,
) -> Statistics:  # fmt: skip
    """Batch norm with the running statistics."""
    return _native(ctx, x, weight, bias, mean, var, training=False, eps=eps)


@lower("aten._native_batch_norm_legit_functional")
def lower_batch_norm_functional(
    ctx: LoweringContext, x: TensorBox, weight: TensorBox | None, bias: TensorBox | None, mean: TensorBox,
    var: TensorBox, training: bool, momentum: Operand, eps: Operand,
) -> tuple[TensorBox, ...]:  # fmt: skip
    """Batch norm in training, with the new running statistics as further results."""
    if not training:
        raise Unsupported("functional batch norm outside of training")
    meta = ctx.meta
    wide = compute_dtype(meta[0].dtype)
    out, batch_mean, rstd, batch_var = batch_norm(
        ctx, x, weight, bias, None, None, training=True, eps=eps, dtype=meta[0].dtype, order=ctx.order_of_meta(0)
    )
    n = product(s for d, s in enumerate(ctx.size_of(x)) if d != 1)
    ctx.assume("lt", ONE, n)
    own = (ctx.size_of(x)[1],)
    for t in (mean, var):
        demands.has_size(ctx, t, own, "a running statistic")

    def moved(old: TensorBox, new: TensorBox, unbiased: bool, at: int) -> TensorBox:
        load_old, load_new, load_m = (ctx.loader(t, own, wide) for t in (old, new, momentum))

        def inner(i: Index) -> Value:
            v = load_new(i)
            if unbiased:
                v = ops.mul(v, ops.div(ops.index_expr(n, wide), ops.index_expr(n - 1, wide)))
            m = load_m(i)
            return ops.add(ops.mul(m, v), ops.mul(ops.sub(ops.constant(1, wide), m), load_old(i)))

        return ctx.pointwise(own, meta[at].dtype, inner)

    saved = (in_dtype(ctx, t, m.dtype) for t, m in zip((batch_mean, rstd), meta[1:3]))
    return out, *saved, moved(mean, batch_mean, unbiased=False, at=3), moved(var, batch_var, unbiased=True, at=4)


@lower("aten.instance_norm")
def lower_instance_norm(
    ctx: LoweringContext, x: TensorBox, weight: TensorBox | None, bias: TensorBox | None, mean: TensorBox | None,
    var: TensorBox | None, use_input_stats: bool, momentum: Any, eps: Operand, cudnn: bool = False,
) -> TensorBox:  # fmt: skip
    """Each channel of each sample normalised with its own statistics, or with running statistics."""
    dtype, order = result_dtype(ctx), ctx.order_of_meta()
    if not use_input_stats:
        return batch_norm(ctx, x, weight, bias, mean, var, training=False, eps=eps, dtype=dtype, order=order)[0]
    if mean is not None:
        raise Unsupported(MUTATES)
    size, wide = ctx.size_of(x), compute_dtype(dtype)
    own_var, own_mean = moments(ctx, x, list(range(2, len(size))), wide)
    rstd = inverse_root(ctx, own_var, eps, wide)
    load_mean, load_rstd = (ctx.loader(t, size, wide) for t in (own_mean, rstd))
    ctx.assume("lt", ONE, product(size[2:]))  # torch.nn.functional refuses a single element
    demands.parameters_of_norm(x, weight, bias)
    w, b = (over_channels(ctx, t, size[1], wide) for t in (weight, bias))
    return scaled(ctx, x, load_mean, load_rstd, w, b, dtype, order)


# -- group norm --------------------------------------------------------------------------------------------------------
def group_norm(
    ctx: LoweringContext, x: TensorBox, groups: int, weight: TensorBox | None, bias: TensorBox | None, eps: Operand,
    dtype: torch.dtype, order: Order,
) -> Statistics:  # fmt: skip
    """`x` normalised over each group of channels of each sample; mean and rstd of size (samples, groups, 1, …)."""
    size, wide = ctx.size_of(x), compute_dtype(dtype)
    each = ctx.specialise(size[1]) // groups
    demands.parameters_of_norm(x, weight, bias)
    w, b = (over_channels(ctx, t, size[1], wide) for t in (weight, bias))
    if lies_by_channel(ctx, order, each):
        return _by_channels(ctx, x, groups, each, w, b, eps, dtype, order)
    shape = (size[0], *(ctx.canon(s) for s in (groups, each)), *size[2:])
    columns = reads_columns(ctx, each, size)
    if columns:
        var, mean = _joined_moments(ctx, x, groups, each, wide)
    else:
        grouped = x.viewed(shape, lambda i: (i[0], i[1] * each + i[2], *i[3:]))
        var, mean = moments(ctx, grouped, list(range(2, len(shape))), wide)
    rstd = inverse_root(ctx, var, eps, wide)

    def of_group(t: TensorBox) -> Loader:
        load = ctx.loader(t, shape, wide)
        if columns:
            return by_channel(ctx, lambda i: load((*i, *(ZERO for _ in shape[2:]))), size, each, wide)
        return lambda i: load((i[0], i[1] // each, i[1] % each, *i[2:]))

    return scaled(ctx, x, of_group(mean), of_group(rstd), w, b, dtype, order), mean, rstd


def reads_columns(ctx: LoweringContext, each: int, size: Sequence[Expr]) -> bool:
    """Whether tiles run over the channels of large images, in groups of `each`: rows of a group would be few bytes."""
    return ctx.target.square_tiles and each > 1 and _ends_in_channels(ctx) and _is_large(ctx, size)


def _ends_in_channels(ctx: LoweringContext) -> bool:
    """Whether channels are the innermost dim in the memory of the norm's input, or of the gradient of its result."""
    meta = ctx.arg_metas[0] if ctx.arg_metas else None
    order = memory_order(meta.size(), meta.stride()) if isinstance(meta, torch.Tensor) and meta.dim() > 2 else None
    return order is not None and order[-1] == 1


_LARGE = 1 << 20  # elements from which rows of strided reads take longer than three further launches


def _is_large(ctx: LoweringContext, size: Sequence[Expr]) -> bool:
    n, least = product(size), expr(_LARGE)
    large = ctx.hint(n) >= _LARGE
    ctx.assume("le", least, n) if large else ctx.assume("lt", n, least)
    return large


def _joined_moments(
    ctx: LoweringContext, x: TensorBox, groups: int, each: int, wide: torch.dtype
) -> tuple[TensorBox, TensorBox]:
    """Variance and mean of each group from those of its channels, all of which have equally many elements."""
    size = ctx.size_of(x)
    rest = tuple(ZERO for _ in size[2:])
    own = (size[0], ctx.canon(groups), ctx.canon(each))
    of_channels = moments(ctx, x, list(range(2, len(size))), wide)
    var, mean = (t.viewed(own, lambda i: (i[0], i[1] * each + i[2], *rest)) for t in of_channels)
    whole = divided(ctx, reduce(ctx, "sum", mean, 2, wide, keepdim=True), own[2], wide)
    load_var, load_whole = ctx.loader(var, own, wide), ctx.loader(whole, own, wide)

    def spread(v: Value, i: Index) -> Value:
        d = ops.sub(v, load_whole(i))
        return ops.add(ops.mul(d, d), load_var(i))

    spreads = divided(ctx, reduce(ctx, "sum", mean, 2, wide, spread, keepdim=True), own[2], wide)
    shape = (*own[:2], ONE, *(ONE for _ in rest))
    first, second = (t.viewed(shape, lambda i: i[:3]) for t in (spreads, whole))
    return first, second


def lies_by_channel(ctx: LoweringContext, order: Order, each: int) -> bool:
    """Whether loops in memory order `order` run over the channels of groups of `each`, and kernels reduce in lanes.

    Lanes that each gather a value of their group are slow.
    """
    return order is not None and ctx.target.sums_by_channel and each > 1


def by_channel(ctx: LoweringContext, load: Loader, size: Sequence[Expr], each: int, wide: torch.dtype) -> Loader:
    """A loader, by index of a tensor of `size`, of `load` at (sample, group), from a table of samples and channels."""
    table = ctx.table(size[:2], wide, lambda i: load((i[0], i[1] // each)))
    load_own = ctx.loader(table, size[:2], wide)
    return lambda i: load_own(i[:2])


def _by_channels(
    ctx: LoweringContext, x: TensorBox, groups: int, each: int, weight: Loader | None, bias: Loader | None,
    eps: Operand, dtype: torch.dtype, order: Order,
) -> Statistics:  # fmt: skip
    """`group_norm` where channels are the innermost dim: sums for each channel, in lanes, and then for each group."""
    size, wide = ctx.size_of(x), compute_dtype(dtype)
    rest = list(range(2, len(size)))
    n = product([ctx.canon(each), *size[2:]])
    own = (size[0], ctx.canon(groups), ctx.canon(each))

    def of_group(value: Element | None) -> TensorBox:
        sums = reduce(ctx, "sum", x, rest, wide, value)
        grouped = sums.viewed(own, lambda i: (i[0], i[1] * each + i[2]))
        return divided(ctx, reduce(ctx, "sum", grouped, 2, wide), n, wide)

    def square(v: Value, i: Index) -> Value:
        d = ops.sub(v, load_mean(i))
        return ops.mul(d, d)

    mean = of_group(None)
    load_mean = by_channel(ctx, ctx.loader(mean, own[:2], wide), size, each, wide)
    rstd = inverse_root(ctx, of_group(square), eps, wide)
    load_rstd = by_channel(ctx, ctx.loader(rstd, own[:2], wide), size, each, wide)
    out = scaled(ctx, x, load_mean, load_rstd, weight, bias, dtype, order)
    shape = (*own[:2], *(ONE for _ in range(1 + len(rest))))
    mean, rstd = (t.viewed(shape, lambda i: i[:2]) for t in (mean, rstd))
    return out, mean, rstd


@lower("aten.group_norm")
def lower_group_norm(
    ctx: LoweringContext, x: TensorBox, groups: int, weight: TensorBox | None = None, bias: TensorBox | None = None,
    eps: Operand = 1e-5, cudnn_enabled: bool = True,
) -> TensorBox:  # fmt: skip
    """(x - mean) / sqrt(var + eps) * weight + bias, statistics over each group of channels of each sample"""
    ctx.assume("ne", ctx.numel(x), expr(groups))  # torch.nn.functional refuses one sample with one value in each group
    return group_norm(ctx, x, groups, weight, bias, eps, result_dtype(ctx), ctx.order_of_meta())[0]


@lower("aten.native_group_norm")
def lower_native_group_norm(
    ctx: LoweringContext, x: TensorBox, weight: TensorBox | None, bias: TensorBox | None, n: Any, c: Any, hw: Any,
    groups: int, eps: Operand,
) -> Statistics:  # fmt: skip
    """Group norm with mean and rstd of size (samples, groups) as further results."""
    own = ctx.size_of(x)
    for a, b in zip((own[0], own[1], product(own[2:])), (n, c, hw)):
        ctx.assume("eq", a, ctx.canon(b))
    out, mean, rstd = group_norm(ctx, x, groups, weight, bias, eps, ctx.meta[0].dtype, ctx.order_of_meta(0))
    size = (ctx.size_of(x)[0], ctx.canon(groups))
    return out, in_dtype(ctx, mean, ctx.meta[1].dtype, size), in_dtype(ctx, rstd, ctx.meta[2].dtype, size)
