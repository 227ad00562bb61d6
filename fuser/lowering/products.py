"""Products of matrices with few rows: contractions, that is the reduction `dot` over products of two operands.

Such a product is bound by reading the weight once, so a kernel is as fast as a library and fuses with its neighbours.
Larger products are left to libraries. The number of rows is a constant of the kernel.
"""

from __future__ import annotations

import torch

from fuser.errors import Unsupported
from fuser.ir.loop_body import Value, compute_dtype, ops
from fuser.ir.nodes import Index, TensorBox
from fuser.lowering.context import LoweringContext
from fuser.lowering.entries import lower
from fuser.lowering.pointwise import elementwise
from fuser.reasons import because
from fuser.targets import LEAST_WEIGHT

DTYPES = (torch.float32, torch.bfloat16)


def product(ctx: LoweringContext, x: TensorBox, w: TensorBox, dtype: torch.dtype) -> TensorBox:
    """`x @ w`, (rows, inner) and (inner, columns), summed in float32. Unsupported if a library is faster."""
    (rows, inner), (again, columns) = ctx.size_of(x), ctx.size_of(w)
    if ctx.hint(rows) > ctx.target.product_rows or ctx.hint(inner) * ctx.hint(columns) < LEAST_WEIGHT:
        raise Unsupported(because("library", "a library's kernel does this better"))
    metas = [m for m in ctx.arg_metas if isinstance(m, torch.Tensor)][-2:]
    if ctx.numerics == "eager" or any(m.dtype not in DTYPES or m.dtype is not metas[0].dtype for m in metas):
        raise Unsupported(because("library", "a product of these dtypes and numerics is a library's"))
    if metas[1].stride(0) != 1 or metas[0].stride(1) != 1:
        raise Unsupported(because("library", "a product of operands in another order is a library's"))
    if not ctx.is_equal(inner, again):
        raise Unsupported(f"sizes {inner} and {again} of a product differ")
    rows = ctx.canon(ctx.specialise(rows))

    def inner_fn(index: Index, reduced: Index) -> Value:
        left, right = x.load((index[0], reduced[0])), w.load((reduced[0], index[1]))
        return ops.call("mul", left, right)

    return ctx.reduction("dot", (rows, columns), (inner,), dtype, inner_fn)


@lower("fuser.product")
def lower_product(ctx: LoweringContext, bias: TensorBox | None, x: TensorBox, w: TensorBox) -> TensorBox:
    """A product of matrices with few rows, plus a bias if there is one."""
    if bias is None:
        return product(ctx, x, w, ctx.meta.dtype)
    total = product(ctx, x, w, compute_dtype(ctx.meta.dtype))
    return elementwise(ctx, [total, bias], lambda a, b: ops.add(a, b), ctx.meta.dtype)


__all__ = ["product"]
