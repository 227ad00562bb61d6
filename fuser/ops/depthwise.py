"""`fuser::depthwise`: a convolution of each channel by itself, which kernels compute as sums over windows.

Weights have sizes (rows, columns, channels). Those of 16-bit images may be in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fuser.ops.operators import operator

Sizes = Sequence[int]


def order_of(x: torch.Tensor) -> torch.memory_format:
    """The memory order of the result for an input: the input's, or the usual one."""
    if x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last):
        return torch.channels_last
    return torch.contiguous_format


def _forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, stride: Sizes, padding: Sizes, dilation: Sizes
) -> torch.Tensor:  # fmt: skip
    behind = stride, padding, dilation, False, [0] * len(stride), x.shape[1]
    found = torch.ops.aten.convolution.default(x, weight.to(x.dtype).movedim(-1, 0).unsqueeze(1), bias, *behind)
    return found.contiguous(memory_format=order_of(x))  # type: ignore[no-any-return]


def _forward_meta(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, stride: Sizes, padding: Sizes, dilation: Sizes
) -> torch.Tensor:  # fmt: skip
    whole = zip(x.shape[2:], weight.shape[:-1], stride, padding, dilation)
    size = [(s + 2 * p - d * (k - 1) - 1) // step + 1 for s, k, step, p, d in whole]
    return torch.empty((*x.shape[:2], *size), dtype=x.dtype, device=x.device, memory_format=order_of(x))


operator(
    "depthwise(Tensor x, Tensor weight, Tensor? bias, int[] stride, int[] padding, int[] dilation) -> Tensor",
    _forward, _forward_meta,
)  # fmt: skip
