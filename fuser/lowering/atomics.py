"""The memory that scatters write into.

On devices that run points in order it is the result itself, but sums and products of 16-bit floats accumulate in
float32, as in eager. On other devices points run in no order and are combined by atomic operations. The hardware has
few of these: sums of 16-bit floats accumulate in float32, small integers in int32. Extremes of floats use a NaN whose
bits compare as the greatest, and a minimum is the maximum of negated values. The result is converted back at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fuser import config
from fuser.errors import Unsupported
from fuser.ir.loop_body import LOW_PRECISION, Value, compute_dtype, ops
from fuser.ir.nodes import Index, Scatter, TensorBox
from fuser.ir.sizes import Expr, product
from fuser.lowering.context import LoweringContext
from fuser.ops import REDUCTIONS
from fuser.reasons import because

Put = Callable[[Index], tuple[Value, Sequence[Expr]]]
Change = Callable[[Value], Value]
DIRECT = (torch.float32, torch.float64, torch.int32, torch.int64)
NARROW = (torch.int8, torch.int16, torch.uint8)
LARGE = 1 << 23  # elements of a widened copy from which ATen's sort is faster
FEW = 8  # elements per sum from which sums are few


def why_not_atomic() -> str | None:
    """Why writes in no order are not allowed; None if they are."""
    if config.is_deterministic():
        return "writes to computed places run in no order here, and torch.use_deterministic_algorithms asks for one"
    return None


class Target:
    """Memory that starts as `start`. `into` converts values of `dtype` to the memory's values, `back` converts back.

    `reuse`: a tensor with the values of `start`. If scatters made it and nothing else reads it, its memory is reused.
    """

    def __init__(
        self, ctx: LoweringContext, size: Sequence[Expr], dtype: torch.dtype, start: Callable[[Index], Value],
        combine: str, order: tuple[int, ...] | None = None, reuse: TensorBox | None = None,
    ) -> None:  # fmt: skip
        self.ctx, self.dtype, self.size, self.order = ctx, dtype, tuple(size), order
        self.combine = combine
        self.into: Change = _same
        self.back: Change = _same
        own = dtype
        if not ctx.target.ordered:
            reason = why_not_atomic()
            if reason is not None:
                raise Unsupported(reason)
            if combine:
                own = self._plan_atomics()
        elif combine and not REDUCTIONS[combine].idempotent:
            if dtype is torch.bool:
                raise Unsupported(f"a scatter that combines masks by {combine}")
            own = torch.float32 if dtype in LOW_PRECISION else dtype
        plain = own is dtype and self.into is _same
        if plain and reuse is not None and _is_free(ctx, reuse):
            self.box = _taken(ctx, reuse)
            return
        self.box = ctx.empty(self.size, own, order)
        ctx.into_slice(self.box, self.size, lambda i: self.into(start(i)), lambda i: i)

    def _plan_atomics(self) -> torch.dtype:
        """Choose `into` and `back`. Returns the dtype of the memory."""
        own = torch.float32 if self.dtype in LOW_PRECISION else torch.int32 if self.dtype in NARROW else self.dtype
        row = REDUCTIONS[self.combine]
        if own not in DIRECT or not row.atomic:
            raise Unsupported(f"no atomic operation combines {self.dtype} by {self.combine!r}")
        if own.is_floating_point and row.extreme:
            negated = row.extreme == "<"
            self.combine = "max"
            self.into = lambda v: _nan_above_all(ops.neg(v) if negated else v)
            self.back = ops.neg if negated else _same
        elif own is not self.dtype and own is torch.int32:
            self.into = lambda v: ops.to_dtype(v, own)
            self.back = lambda v: ops.to_dtype(v, self.dtype)
        return own

    def put(self, size: Sequence[Expr], inner_fn: Put, combine: bool = True) -> None:
        """Add a loop over `size` that scatters values to indices; each replaces the element, or is combined with it."""
        self._need_sums(size)

        def inner(index: Index) -> tuple[Value, Sequence[Expr]]:
            value, where = inner_fn(index)
            return self.into(ops.to_dtype(value, compute_dtype(self.dtype))), where

        self.ctx.scatter_into(self.box, size, inner, self.combine if combine else "")

    def _need_sums(self, size: Sequence[Expr]) -> None:
        """Unsupported for few sums into a large converted target, such as the gradient of a 16-bit embedding table."""
        if self.ctx.target.ordered or self.box.dtype is self.dtype:
            return
        elements, sums = (self.ctx.hint(product(s)) for s in (self.size, size))
        if elements >= LARGE and FEW * sums <= elements:
            raise Unsupported(because("left_to_aten", f"few sums of {self.dtype} in a large tensor are left to ATen"))

    def result(self) -> TensorBox:
        """The tensor after all writes, in `dtype`."""
        if self.box.dtype is self.dtype and self.back is _same:
            return self.box
        load = self.ctx.loader(self.box, self.size, self.box.dtype)
        return self.ctx.pointwise(self.size, self.dtype, lambda i: self.back(load(i)), self.order)


def _same(value: Value) -> Value:
    return value


def _nan_above_all(v: Value) -> Value:
    """`v`, with each NaN replaced by one whose bits compare as the greatest."""
    return ops.where(ops.ne(v, v), ops.constant(float("nan"), v.dtype), v)


def target(ctx: LoweringContext, x: TensorBox, combine: str) -> Target:
    """A target with the values of `x`, in the memory order of eager's result."""
    size = ctx.size_of(x)
    return Target(ctx, size, x.dtype, ctx.loader(x, size, x.dtype), combine, ctx.order_of_meta(), x)


def _is_free(ctx: LoweringContext, x: TensorBox) -> bool:
    buffer = x.storage.buffer
    made = bool(buffer.loops) and isinstance(buffer.loops[-1], Scatter)
    return made and x.view is None and ctx.claims[id(x.storage)] == 1


def _taken(ctx: LoweringContext, x: TensorBox) -> TensorBox:
    buffer = x.storage.buffer
    ctx.claims[id(x.storage)] = 0  # this node is the only reader
    ctx.buffers.remove(buffer)  # later loops read buffers made since
    ctx.buffers.append(buffer)
    return TensorBox(x.storage)


__all__ = ["Put", "Target", "target", "why_not_atomic"]
