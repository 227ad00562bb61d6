"""Losses: elementwise ones, and those that pick a class by its index."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fuser.ir.loop_body import Value, compute_dtype, ops
from fuser.ir.nodes import Index, TensorBox
from fuser.ir.sizes import ZERO, Expr, product
from fuser.lowering import demands
from fuser.lowering.activations import log_sigmoid
from fuser.lowering.context import LoweringContext, Operand
from fuser.lowering.entries import lower, refuse
from fuser.lowering.pointwise import elementwise, in_unit_interval, result_dtype
from fuser.lowering.reductions import expanded, number_of, reduce, reduce_to_result
from fuser.reasons import because

NONE, MEAN, SUM = 0, 1, 2  # torch's numbers for a loss's reduction
Body = Callable[..., Value]


def loss(ctx: LoweringContext, operands: Sequence[Operand], body: Body, reduction: int) -> TensorBox:
    """`body` of the broadcast operands: its values, their mean or their sum."""
    if reduction == NONE:
        return elementwise(ctx, operands, body)
    wide = compute_dtype(result_dtype(ctx))
    size = ctx.broadcast_sizes([ctx.size_of(o) for o in operands])
    loads = [ctx.loader(o, size, wide) for o in operands]
    first = next(o for o in operands if isinstance(o, TensorBox))
    n = product(size)
    return reduce_to_result(
        ctx, "sum", expanded(ctx, first, size), None, lambda _, i: body(*(load(i) for load in loads)),
        finish=(lambda v: ops.div(v, number_of(ctx, n, wide))) if reduction == MEAN else None,
    )  # fmt: skip


# -- elementwise -------------------------------------------------------------------------------------------------------
def _gap(x: Value, y: Value) -> Value:
    return ops.abs(ops.sub(x, y))


@lower("aten.mse_loss")
def lower_mse_loss(ctx: LoweringContext, x: TensorBox, y: TensorBox, reduction: int = MEAN) -> TensorBox:
    """(x - y) squared"""

    def body(a: Value, b: Value) -> Value:
        d = ops.sub(a, b)
        return ops.mul(d, d)

    return loss(ctx, [x, y], body, reduction)


@lower("aten.l1_loss")
def lower_l1_loss(ctx: LoweringContext, x: TensorBox, y: TensorBox, reduction: int = MEAN) -> TensorBox:
    """|x - y|"""
    if torch.bool in (x.dtype, y.dtype):
        raise demands.refused("a difference of bools")
    return loss(ctx, [x, y], _gap, reduction)


@lower("aten.smooth_l1_loss")
def lower_smooth_l1_loss(
    ctx: LoweringContext, x: TensorBox, y: TensorBox, reduction: int = MEAN, beta: Any = 1.0
) -> TensorBox:
    """d * d / (2 beta) for d = |x - y| below beta, else d - beta / 2"""
    if beta == 0:
        return loss(ctx, [x, y], _gap, reduction)

    def body(a: Value, b: Value, k: Value) -> Value:
        d = _gap(a, b)
        near = ops.div(ops.mul(ops.mul(d, d), 0.5), k)
        return ops.where(ops.lt(d, k), near, ops.sub(d, ops.mul(k, 0.5)))

    return loss(ctx, [x, y, beta], body, reduction)


@lower("aten.huber_loss")
def lower_huber_loss(
    ctx: LoweringContext, x: TensorBox, y: TensorBox, reduction: int = MEAN, delta: Any = 1.0
) -> TensorBox:
    """d * d / 2 for d = |x - y| up to delta, else delta * (d - delta / 2)"""
    if not x.dtype.is_floating_point:
        raise demands.refused(f"a Huber loss of {x.dtype}")

    def body(a: Value, b: Value, k: Value) -> Value:
        d = _gap(a, b)
        return ops.where(
            ops.le(d, k), ops.mul(ops.mul(d, d), 0.5), ops.mul(k, ops.sub(d, ops.mul(k, 0.5)))
        )  # fmt: skip

    return loss(ctx, [x, y, delta], body, reduction)


@lower("aten.soft_margin_loss")
def lower_soft_margin_loss(ctx: LoweringContext, x: TensorBox, y: TensorBox, reduction: int = MEAN) -> TensorBox:
    """log(1 + exp(-y * x))"""
    demands.has_size(ctx, y, ctx.size_of(x), "a target")
    demands.same_dtypes(x, y)
    return loss(ctx, [x, y], lambda a, b: ops.log1p(ops.exp(ops.mul(ops.neg(b), a))), reduction)


@lower("aten.kl_div")
def lower_kl_div(
    ctx: LoweringContext, x: TensorBox, y: TensorBox, reduction: int = MEAN, log_target: bool = False
) -> TensorBox:
    """y * (log(y) - x), or exp(y) * (y - x) for a target in logarithms"""
    if log_target:
        return loss(ctx, [x, y], lambda a, b: ops.mul(ops.exp(b), ops.sub(b, a)), reduction)
    return loss(ctx, [x, y], lambda a, b: ops.sub(ops.xlogy(b, b), ops.mul(b, a)), reduction)


@lower("aten.binary_cross_entropy")
def lower_binary_cross_entropy(
    ctx: LoweringContext, x: TensorBox, y: TensorBox, weight: TensorBox | None = None, reduction: int = MEAN
) -> TensorBox:
    """-(y * log(x) + (1 - y) * log(1 - x)), with logarithms of at least -100

    A call with x or y outside [0, 1] runs in eager, which raises. For y it does so from some version of torch on.
    """
    for t in (y, weight):
        demands.has_size(ctx, t, ctx.size_of(x), "a target or weight")
    demands.same_dtypes(x, y, weight)

    def body(a: Value, b: Value, *w: Value) -> Value:
        a, b = in_unit_interval(a), in_unit_interval(b)
        low = ops.maximum(ops.log1p(ops.neg(a)), -100.0)
        high = ops.maximum(ops.log(a), -100.0)
        out = ops.sub(ops.mul(ops.sub(b, 1.0), low), ops.mul(b, high))
        return ops.mul(out, w[0]) if w else out

    return loss(ctx, [x, y] if weight is None else [x, y, weight], body, reduction)


@lower("aten.binary_cross_entropy_with_logits")
def lower_bce_with_logits(
    ctx: LoweringContext, x: TensorBox, y: TensorBox, weight: TensorBox | None = None,
    pos_weight: TensorBox | None = None, reduction: int = MEAN,
) -> TensorBox:  # fmt: skip
    """(1 - y) * x - (1 + (pos_weight - 1) * y) * log(sigmoid(x))"""
    demands.has_size(ctx, y, ctx.size_of(x), "a target")

    def body(a: Value, b: Value, *rest: Value) -> Value:
        more = list(rest)
        out = log_sigmoid(a)
        if pos_weight is not None:
            out = ops.mul(out, ops.add(ops.mul(ops.sub(more.pop(0), 1.0), b), 1.0))
        out = ops.sub(ops.mul(ops.sub(ops.constant(1, a.dtype), b), a), out)
        return ops.mul(out, more.pop(0)) if weight is not None else out

    return loss(ctx, [x, y] + [t for t in (pos_weight, weight) if t is not None], body, reduction)


@lower("aten.poisson_nll_loss")
def lower_poisson_nll_loss(
    ctx: LoweringContext, x: TensorBox, y: TensorBox, log_input: bool, full: bool, eps: float, reduction: int
) -> TensorBox:
    """exp(x) - y * x, or x - y * log(x + eps), with Stirling's term if `full`"""

    def body(a: Value, b: Value) -> Value:
        if log_input:
            out = ops.sub(ops.exp(a), ops.mul(b, a))
        else:
            out = ops.sub(a, ops.mul(b, ops.log(ops.add(a, float(eps)))))
        if full:
            stirling = ops.sub(ops.mul(b, ops.log(b)), b)
            stirling = ops.add(stirling, ops.mul(ops.log(ops.mul(b, 2 * math.pi)), 0.5))
            out = ops.add(out, ops.where(ops.le(b, 1.0), ops.constant(0, b.dtype), stirling))
        return out

    return loss(ctx, [x, y], body, reduction)


@lower("aten.margin_ranking_loss")
def lower_margin_ranking_loss(
    ctx: LoweringContext, a: TensorBox, b: TensorBox, y: TensorBox, margin: Operand = 0.0, reduction: int = MEAN
) -> TensorBox:
    """max(0, margin - y * (a - b))"""
    return loss(
        ctx, [a, b, y, margin],
        lambda u, v, t, m: ops.maximum(ops.add(ops.mul(ops.neg(t), ops.sub(u, v)), m), 0.0), reduction,
    )  # fmt: skip


@lower("aten.hinge_embedding_loss", decisive=(1,))
def lower_hinge_embedding_loss(
    ctx: LoweringContext, x: TensorBox, y: TensorBox, margin: Operand = 1.0, reduction: int = MEAN
) -> TensorBox:
    """x where y is 1, max(0, margin - x) where it is -1"""

    def body(a: Value, b: Value, m: Value) -> Value:
        zero = ops.constant(0, a.dtype)
        far = ops.where(ops.ne(b, 1.0), ops.maximum(ops.sub(m, a), 0.0), zero)
        return ops.add(far, ops.where(ops.ne(b, -1.0), a, zero))

    return loss(ctx, [x, y, margin], body, reduction)


# -- by class index ----------------------------------------------------------------------------------------------------
class ClassLoss:
    """-w[t] * log_probability(t) for each sample, where t is its class; 0 if t is ignored.

    `x` has its classes along dim 1 (dim 0 if it has no other), `target` one class for each other index.
    """

    def __init__(
        self, ctx: LoweringContext, x: TensorBox, target: TensorBox, weight: TensorBox | None, ignore: int,
        wide: torch.dtype,
    ) -> None:  # fmt: skip
        self.ctx, self.wide = ctx, wide
        self.x_size = ctx.size_of(x)
        self.dim = min(1, len(self.x_size) - 1)
        self.classes = self.x_size[self.dim]
        ctx.assume("lt", 0, self.classes)  # a class is gathered under a mask: without classes there is no address
        self.size = tuple(s for d, s in enumerate(self.x_size) if d != self.dim)
        demands.has_size(ctx, target, self.size, "a target")
        demands.same_dtypes(x, weight)
        if target.dtype not in (torch.int64, torch.uint8):
            raise demands.refused(f"classes of {target.dtype}")
        demands.has_size(ctx, weight, (self.classes,), "a weight of classes")
        self.load_target = ctx.loader(target, self.size, torch.int64)
        self.load_weight = None if weight is None else ctx.loader(weight, ctx.size_of(weight), wide)
        self.ignore = ignore

    def full(self, index: Index, at: Expr) -> Index:
        """The index into `x` of a sample's class `at`."""
        return (*index[: self.dim], at, *index[self.dim :])

    def valid(self, index: Index) -> Value:
        """Whether the sample's class is not ignored."""
        return ops.ne(self.load_target(index), ops.constant(self.ignore, torch.int64))

    def at_class(self, index: Index, value: Callable[[Expr], Value]) -> Value:
        """`value(class)` of the sample's class; 0 if it is ignored."""
        valid, target = self.valid(index), self.load_target(index)

        def picked() -> Value:
            # A negative class is an error: it does not count from the end.
            inside = ops.where(ops.lt(target, 0), ops.index_expr(self.classes), target)
            return value(ops.indirect(inside, self.classes))

        return ops.masked(valid, picked, 0.0)

    def weight(self, index: Index) -> Value:
        """The weight of the sample."""
        if self.load_weight is None:
            return ops.to_dtype(self.valid(index), self.wide)
        load = self.load_weight
        return self.at_class(index, lambda c: load((c,)))

    def value(self, index: Index, log_probability: Callable[[Index], Value]) -> Value:
        """The loss of one sample; `log_probability` takes an index of `x`."""
        out = self.at_class(index, lambda c: ops.neg(log_probability(self.full(index, c))))
        return ops.mul(out, self.weight(index)) if self.load_weight is not None else out

    def total(self, per_sample: Callable[[Index], Value]) -> TensorBox:
        """The sum of a value over all samples."""
        return self.ctx.reduction("sum", (), self.size, self.wide, lambda _, i: per_sample(i))


def reduced(
    ctx: LoweringContext, core: ClassLoss, per_sample: Callable[[Index], Value], reduction: int,
    result: int | None = None,
) -> TensorBox:  # fmt: skip
    """The samples' losses, their sum, or their sum divided by the sum of weights."""
    meta = ctx.meta if result is None else ctx.meta[result]
    if reduction == NONE:
        return ctx.pointwise(core.size, meta.dtype, per_sample, ctx.order_of_meta(result))
    # The losses get a buffer of their own, which ends the kernel that reads the classes.
    losses = ctx.pointwise(core.size, core.wide, per_sample)
    load = ctx.loader(losses, core.size, core.wide)
    # Reading the classes again lets both sums share a kernel.
    parts = [core.total(lambda i: ops.where(core.valid(i), load(i), ops.constant(0.0, core.wide)))]
    if reduction == MEAN:
        parts.append(core.total(core.weight))
    loads = [ctx.loader(p, (), core.wide) for p in parts]
    return ctx.pointwise((), meta.dtype, lambda i: ops.div(loads[0](i), loads[1](i)) if len(loads) > 1 else loads[0](i))


def nll_loss(
    ctx: LoweringContext, x: TensorBox, target: TensorBox, weight: TensorBox | None, reduction: int, ignore: int,
    result: int | None = None,
) -> tuple[TensorBox, ClassLoss]:  # fmt: skip
    """Negative log likelihood of the classes `target` by the log probabilities `x`."""
    wide = compute_dtype(x.dtype)
    core = ClassLoss(ctx, x, target, weight, ignore, wide)
    load = ctx.loader(x, core.x_size, wide)
    return reduced(ctx, core, lambda i: core.value(i, load), reduction, result), core


@lower("aten.nll_loss", "aten.nll_loss2d", "aten.nll_loss_nd")
def lower_nll_loss(
    ctx: LoweringContext, x: TensorBox, target: TensorBox, weight: TensorBox | None = None, reduction: int = MEAN,
    ignore_index: int = -100,
) -> TensorBox:  # fmt: skip
    """Negative log likelihood."""
    return nll_loss(ctx, x, target, weight, reduction, ignore_index)[0]


@lower("aten.nll_loss_forward", "aten.nll_loss2d_forward")
def lower_nll_loss_forward(
    ctx: LoweringContext, x: TensorBox, target: TensorBox, weight: TensorBox | None, reduction: int, ignore_index: int
) -> tuple[TensorBox, TensorBox]:
    """`lower_nll_loss` with the sum of weights as second result (0 if nothing is reduced)."""
    out, core = nll_loss(ctx, x, target, weight, reduction, ignore_index, 0)
    dtype = ctx.meta[1].dtype
    if reduction == NONE:
        return out, ctx.pointwise((), dtype, lambda i: ops.constant(0, dtype))
    load = ctx.loader(core.total(core.weight), (), core.wide)
    return out, ctx.pointwise((), dtype, load)


@lower("aten.nll_loss_backward", "aten.nll_loss2d_backward")
def lower_nll_loss_backward(
    ctx: LoweringContext, grad: TensorBox, x: TensorBox, target: TensorBox, weight: TensorBox | None, reduction: int,
    ignore_index: int, total_weight: TensorBox,
) -> TensorBox:  # fmt: skip
    """-w * grad at the class of each sample, 0 elsewhere; divided by the sum of weights for a mean"""
    dtype = result_dtype(ctx)
    core = ClassLoss(ctx, x, target, weight, ignore_index, compute_dtype(dtype))
    load_grad = ctx.loader(grad, core.size, core.wide)
    load_total = ctx.loader(total_weight, core.size, core.wide)

    def inner(i: Index) -> Value:
        sample = (*i[: core.dim], *i[core.dim + 1 :])
        w = ops.mul(ops.neg(core.weight(sample)), load_grad(sample))
        w = ops.div(w, load_total(sample)) if reduction == MEAN else w
        here = ops.eq(core.load_target(sample), ops.index_expr(i[core.dim]))
        return ops.where(ops.logical_and(here, core.valid(sample)), w, ops.constant(0, core.wide))

    return ctx.pointwise(core.x_size, dtype, inner, ctx.order_of_meta())


# -- cross entropy -----------------------------------------------------------------------------------------------------
@lower("aten.cross_entropy_loss")
def lower_cross_entropy_loss(
    ctx: LoweringContext, x: TensorBox, target: TensorBox, weight: TensorBox | None = None, reduction: int = MEAN,
    ignore_index: int = -100, label_smoothing: float = 0.0,
) -> TensorBox:  # fmt: skip
    """Negative log likelihood of log_softmax(x), which is not stored: reductions read the logits for max and sum."""
    smoothing = float(label_smoothing)
    dtype = result_dtype(ctx)
    parts = LogSoftmax(ctx, x, min(1, len(ctx.size_of(x)) - 1), dtype)
    if target.dtype.is_floating_point:
        return _by_probabilities(ctx, x, target, weight, reduction, smoothing, parts)
    core = ClassLoss(ctx, x, target, weight, ignore_index, parts.wide)
    if not smoothing:
        return reduced(ctx, core, lambda i: core.value(i, parts.at), reduction)
    load_all = ctx.loader(parts.total_over_classes(weight), core.size, core.wide)

    def smoothed(i: Index) -> Value:
        every = ops.where(core.valid(i), ops.neg(load_all(i)), ops.constant(0.0, core.wide))
        share = ops.div(ops.constant(smoothing, core.wide), number_of(ctx, core.classes, core.wide))
        return ops.add(ops.mul(core.value(i, parts.at), 1.0 - smoothing), ops.mul(every, share))

    return reduced(ctx, core, smoothed, reduction)


class LogSoftmax:
    """log_softmax of `x` along `dim`, an element at a time. `at` takes an index of `x`."""

    def __init__(self, ctx: LoweringContext, x: TensorBox, dim: int, dtype: torch.dtype) -> None:
        self.ctx, self.x, self.dim, self.dtype = ctx, x, dim, dtype
        self.wide = compute_dtype(dtype)
        size = ctx.size_of(x)
        self.load = ctx.loader(x, size, self.wide)
        self.load_largest = ctx.loader(reduce(ctx, "max", x, dim, self.wide, keepdim=True), size, self.wide)
        total = reduce(
            ctx, "sum", x, dim, self.wide, lambda v, i: ops.exp_down(ops.sub(v, self.load_largest(i))), keepdim=True
        )  # fmt: skip
        self.load_total = ctx.loader(total, size, self.wide)

    def at(self, index: Index) -> Value:
        """The log probability at `index`, with the statistics of its row."""
        row = tuple(ZERO if d == self.dim else e for d, e in enumerate(index))
        out = ops.sub(ops.sub(self.load(index), self.load_largest(row)), ops.log(self.load_total(row)))
        return ops.round_to(out, self.dtype) if self.ctx.numerics == "eager" else out

    def total_over_classes(self, weight: TensorBox | None) -> TensorBox:
        """Each row's sum of log probabilities, times the weights of classes if given."""
        load_weight = None if weight is None else self.ctx.loader(weight, self.ctx.size_of(weight), self.wide)

        def value(_: Value, i: Index) -> Value:
            out = self.at(i)
            return ops.mul(out, load_weight((i[self.dim],))) if load_weight is not None else out

        return reduce(self.ctx, "sum", self.x, self.dim, self.wide, value)


def _by_probabilities(
    ctx: LoweringContext, x: TensorBox, target: TensorBox, weight: TensorBox | None, reduction: int, smoothing: float,
    parts: LogSoftmax,
) -> TensorBox:  # fmt: skip
    """Cross entropy with a target probability for each class."""
    size, wide = ctx.size_of(x), parts.wide
    demands.has_size(ctx, target, size, "target probabilities")
    demands.has_size(ctx, weight, (size[parts.dim],), "a weight of classes")
    load_target = ctx.loader(target, size, wide)
    load_weight = None if weight is None else ctx.loader(weight, ctx.size_of(weight), wide)

    def value(_: Value, i: Index) -> Value:
        p = load_target(i)
        if smoothing:
            share = ops.div(ops.constant(smoothing, wide), number_of(ctx, size[parts.dim], wide))
            p = ops.add(ops.mul(p, 1.0 - smoothing), share)
        out = ops.mul(parts.at(i), p)
        return ops.mul(out, load_weight((i[parts.dim],))) if load_weight is not None else out

    rows = reduce(ctx, "sum", x, parts.dim, wide, value)
    own = ctx.size_of(rows)
    load = ctx.loader(rows, own, wide)
    if reduction == NONE:
        return ctx.pointwise(own, parts.dtype, lambda i: ops.neg(load(i)), ctx.order_of_meta())
    n = product(own)

    def finish(v: Value) -> Value:
        return ops.div(v, number_of(ctx, n, wide)) if reduction == MEAN else v

    return reduce_to_result(ctx, "sum", rows, None, lambda v, _: ops.neg(v), finish=finish)


refuse(
    because("left_to_aten", "a loss over pairs of classes: left to ATen"),
    "aten.multi_margin_loss", "aten.multilabel_margin_loss", "aten.multilabel_margin_loss_forward",
)  # fmt: skip
refuse(because("left_to_aten", "a recursion over time is left to ATen"), "aten.ctc_loss", "aten._ctc_loss")
