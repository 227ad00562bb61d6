"""`fuser::max_pool_offsets`: a max pool that returns the offset of the largest element in its window, one byte each.

ATen's returns the index in the image, 8 bytes each. `backward` is the gradient, which needs only the offsets. Windows
extend along the last `len(kernel)` dims, two or three; an offset counts their elements in row-major order.

`fuser::avg_pool2d_backward` is ATen's gradient of an average pool, computed in row-major order whatever the order of
the images: ATen's kernel for channels-last images takes padding for 0 on CUDA (torch 2.11).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from fuser.ops.depthwise import order_of
from fuser.ops.operators import operator

_aten = torch.ops.aten
_FORWARD = {2: _aten.max_pool2d_with_indices.default, 3: _aten.max_pool3d_with_indices.default}
_BACKWARD = {2: _aten.max_pool2d_with_indices_backward.default, 3: _aten.max_pool3d_with_indices_backward.default}
Sizes = Sequence[int]


def _forward(
    x: torch.Tensor, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, ceil_mode: bool
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    n = len(kernel)
    value, index = _FORWARD[n](x, kernel, stride, padding, dilation, ceil_mode)
    size = x.shape[-n:]
    offset, behind = torch.zeros_like(index), math.prod(size)
    for d in range(n):
        behind //= max(size[d], 1)
        starts = torch.arange(index.shape[d - n], device=x.device) * stride[d] - padding[d]
        place = index // max(behind, 1) % max(size[d], 1) - starts.view([-1 if k == d else 1 for k in range(n)])
        offset = offset * kernel[d] + place // dilation[d]
    return value, offset.to(torch.int8)


def _forward_meta(
    x: torch.Tensor, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, ceil_mode: bool
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    value, index = _FORWARD[len(kernel)](x, kernel, stride, padding, dilation, ceil_mode)
    return value, torch.empty_like(index, dtype=torch.int8)


def _backward(
    grad: torch.Tensor, offsets: torch.Tensor, size: Sizes, kernel: Sizes, stride: Sizes, padding: Sizes,
    dilation: Sizes, ceil_mode: bool, channels_last: bool,
) -> torch.Tensor:  # fmt: skip
    n = len(kernel)
    index, left = torch.zeros_like(offsets, dtype=torch.int64), offsets.to(torch.int64)
    behind = 1
    for d in reversed(range(n)):
        starts = torch.arange(offsets.shape[d - n], device=grad.device) * stride[d] - padding[d]
        place = left % kernel[d] * dilation[d] + starts.view([-1 if k == d else 1 for k in range(n)])
        index, left, behind = index + place * behind, left // kernel[d], behind * size[d - n]
    x = _like(grad, size, channels_last)
    return _BACKWARD[n](grad, x, kernel, stride, padding, dilation, ceil_mode, index)  # type: ignore[no-any-return]


def _backward_meta(
    grad: torch.Tensor, offsets: torch.Tensor, size: Sizes, kernel: Sizes, stride: Sizes, padding: Sizes,
    dilation: Sizes, ceil_mode: bool, channels_last: bool,
) -> torch.Tensor:  # fmt: skip
    return _like(grad, size, channels_last)


def _like(grad: torch.Tensor, size: Sizes, channels_last: bool) -> torch.Tensor:
    """A tensor of sizes `size`, with uninitialised elements."""
    order = (torch.channels_last if len(size) == 4 else torch.channels_last_3d) if channels_last else None
    return torch.empty(size, dtype=grad.dtype, device=grad.device, memory_format=order or torch.contiguous_format)


def _average_backward(
    grad: torch.Tensor, x: torch.Tensor, kernel: Sizes, stride: Sizes, padding: Sizes, ceil_mode: bool,
    count_include_pad: bool, divisor_override: int | None,
) -> torch.Tensor:  # fmt: skip
    how = kernel, stride, padding, ceil_mode, count_include_pad, divisor_override
    found = _aten.avg_pool2d_backward.default(grad.contiguous(), x.contiguous(), *how)
    return found.contiguous(memory_format=order_of(x))  # type: ignore[no-any-return]


def _average_backward_meta(
    grad: torch.Tensor, x: torch.Tensor, kernel: Sizes, stride: Sizes, padding: Sizes, ceil_mode: bool,
    count_include_pad: bool, divisor_override: int | None,
) -> torch.Tensor:  # fmt: skip
    return torch.empty_like(x, memory_format=order_of(x))


operator(
    "max_pool_offsets(Tensor x, int[] kernel, int[] stride, int[] padding, int[] dilation, "
    "bool ceil_mode) -> (Tensor, Tensor)", _forward, _forward_meta,
)  # fmt: skip
operator(
    "max_pool_offsets_backward(Tensor grad, Tensor offsets, SymInt[] size, int[] kernel, int[] stride, int[] padding, "
    "int[] dilation, bool ceil_mode, bool channels_last) -> Tensor", _backward, _backward_meta,
)  # fmt: skip
operator(
    "avg_pool2d_backward(Tensor grad, Tensor x, int[] kernel, int[] stride, int[] padding, bool ceil_mode, "
    "bool count_include_pad, int? divisor_override) -> Tensor", _average_backward, _average_backward_meta,
)  # fmt: skip
