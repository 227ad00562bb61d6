"""Images resized to the nearest element.

Indices are computed in float32, step by step as in eager: another rounding would select another element. Sizes are
constants of the kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fuser.errors import Unsupported
from fuser.ir.loop_body import Value, ops
from fuser.ir.nodes import Index, TensorBox
from fuser.ir.sizes import Expr, expr, floordiv
from fuser.lowering.context import LoweringContext
from fuser.lowering.entries import lower, refuse
from fuser.reasons import because

F32 = torch.float32


def _float32(x: float) -> float:
    return float(torch.tensor(x, dtype=F32))


def _scale(given: float | None, size: int, out: int) -> float:
    """The distance, in the tensor, of neighbours in the result: `compute_scales_value` in eager's UpSample.h."""
    if given is not None and given > 0:
        return _float32(1.0 / given)
    return _float32(_float32(size) / out) if out else 0.0


def _sizes(
    ctx: LoweringContext, x: TensorBox, out: Any, scales: Sequence[float | None]
) -> tuple[list[int], list[int], list[float | None]]:  # fmt: skip
    if out is None:
        raise Unsupported("an output size that scale factors give")
    n = len(out)
    own = [ctx.specialise(s) for s in ctx.size_of(x)[-n:]]
    if any(s is not None and not isinstance(s, float) for s in scales):
        raise Unsupported("scale factors that are not known when the graph is registered")
    return own, [ctx.specialise(o) for o in out], [*scales, *(None,) * n][:n]


# -- nearest -----------------------------------------------------------------------------------------------------------
_EXACT = ("aten._upsample_nearest_exact1d", "aten._upsample_nearest_exact2d", "aten._upsample_nearest_exact3d")


@lower("aten.upsample_nearest1d", "aten.upsample_nearest2d", "aten.upsample_nearest3d", *_EXACT)
def lower_nearest(ctx: LoweringContext, x: TensorBox, out: Any, *scales: float | None) -> TensorBox:
    """The element nearest to each index (or before it, if not "exact")."""
    for s in ctx.size_of(x)[1:]:  # only a batch dim may be empty
        ctx.assume("lt", 0, s)
    own, sizes, factors = _sizes(ctx, x, out, scales)
    n, lead = len(own), ctx.size_of(x)[: -len(own)]
    exact = ctx.op in _EXACT
    load = ctx.loader(x, ctx.size_of(x), x.dtype)

    def inner(index: Index) -> Value:
        at = [_nearest(i, s, o, f, exact) for i, s, o, f in zip(index[-n:], own, sizes, factors)]
        return load((*index[:-n], *at))

    return ctx.pointwise((*lead, *(expr(o) for o in sizes)), x.dtype, inner, ctx.order_of_meta())


def _nearest(i: Expr, size: int, out: int, factor: float | None, exact: bool) -> Expr:
    if out == size:
        return i
    if out == 2 * size and not exact:
        return floordiv(i, expr(2))
    scale = _scale(factor, size, out)
    # By NumPy, which no default device and no fake mode of torch affects.
    points = np.arange(out)
    places = np.minimum(np.floor((points.astype(np.float32) + np.float32(0.5 * exact)) * np.float32(scale)), size - 1)
    if out > size and np.array_equal(places, points // (out // size)):
        return floordiv(i, expr(out // size))
    if 0 < out < size and np.array_equal(places, points * (size // out) + places[0]):
        return i * (size // out) + int(places[0])
    place = ops.index_expr(i, F32)
    if exact:
        place = ops.add(place, 0.5)
    place = ops.to_dtype(ops.floor(ops.mul(place, scale)), torch.int64)
    return ops.indirect(ops.minimum(place, size - 1), expr(size), checked=False)


refuse(
    because("left_to_aten", "linear and cubic resampling is left to ATen"),
    "aten.upsample_linear1d", "aten.upsample_bilinear2d",
    "aten.upsample_bicubic2d", "aten.upsample_trilinear3d",
)  # fmt: skip
refuse(
    because("left_to_aten", "antialiased resampling is left to ATen"),
    "aten._upsample_bilinear2d_aa",
    "aten._upsample_bicubic2d_aa",
)
refuse(
    because("left_to_aten", "it interpolates at positions that a tensor holds: left to ATen"),
    "aten.grid_sampler_2d",
    "aten.grid_sampler_3d",
)

__all__ = ["lower_nearest"]
