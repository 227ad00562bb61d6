"""How products and convolutions on CUDA may round their factors: by torch's settings, which users change."""

from __future__ import annotations

import torch

HALVES = (torch.float16, torch.bfloat16)


def _of_products() -> bool | None:
    """Whether products of float32 may round factors to TF32; None where old and new settings of torch are mixed."""
    try:
        return bool(torch.backends.cuda.matmul.allow_tf32)
    except RuntimeError:
        return None


def products_take_tf32() -> bool:
    """Whether products of float32 may certainly round factors to TF32."""
    return _of_products() is True


def convolutions_take_tf32() -> bool:
    """Whether convolutions of float32 may certainly round factors to TF32."""
    try:
        return bool(torch.backends.cudnn.enabled and torch.backends.cudnn.allow_tf32)
    except RuntimeError:
        return False


def product_rounds_no_more(dtype: torch.dtype) -> bool:
    """Whether a product certainly rounds factors of a dtype no more than a convolution may."""
    if dtype is not torch.float32:
        return dtype in HALVES
    return convolutions_take_tf32() or _of_products() is False
