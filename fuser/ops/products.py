"""`fuser::product(bias, x, w)`: a matrix product that a pass assigns to a kernel of the package."""

from __future__ import annotations

import torch

from fuser.ops.operators import operator


def _product(bias: torch.Tensor | None, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.mm(x, w) if bias is None else torch.addmm(bias, x, w)


def _product_meta(bias: torch.Tensor | None, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x.new_empty((x.shape[0], w.shape[1]))


operator("product(Tensor? bias, Tensor x, Tensor w) -> Tensor", _product, _product_meta)
