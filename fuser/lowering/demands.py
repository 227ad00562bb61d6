"""Requirements on sizes and dtypes that eager's kernels check, but torch's shape functions do not.

A kernel would, for example, read behind the end of a weight that is too short. Unsupported, so that eager raises its
error.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fuser.errors import Unsupported
from fuser.ir.nodes import TensorBox
from fuser.ir.sizes import Expr
from fuser.lowering.context import LoweringContext
from fuser.reasons import because

_LOW = (torch.float16, torch.bfloat16)


def refused(why: str) -> Unsupported:
    """The error for a call that eager refuses."""
    return Unsupported(because("eager_raises", why))


def has_size(ctx: LoweringContext, t: TensorBox | None, size: Sequence[Expr | int], what: str) -> None:
    """Unsupported unless a tensor is None or has the given size."""
    if t is None:
        return
    own = ctx.size_of(t)
    if len(own) != len(size) or not all(ctx.is_equal(a, b) for a, b in zip(own, size)):
        raise refused(f"{what} of size {tuple(own)}, where {tuple(size)} is expected")


def is_vector(index: object) -> None:
    """Unsupported if an index has more than one dim."""
    if isinstance(index, TensorBox) and len(index.size) > 1:
        raise refused(f"an index of {len(index.size)} dims, where one is expected")


def same_dtypes(*tensors: TensorBox | None) -> None:
    """Unsupported unless all tensors that are given have one dtype."""
    found = {t.dtype for t in tensors if t is not None}
    if len(found) > 1:
        raise refused(f"tensors of {' and '.join(sorted(map(str, found)))}, where one dtype is expected")


def parameters_of_norm(x: TensorBox, *parameters: TensorBox | None) -> None:
    """Unsupported unless a norm's parameters have one dtype: its input's, or float32 beside 16-bit floats."""
    same_dtypes(*parameters)
    for t in parameters:
        if t is not None and t.dtype is not x.dtype and not (x.dtype in _LOW and t.dtype is torch.float32):
            raise refused(f"parameters of {t.dtype} for a norm of {x.dtype}")
