"""Convolutions of rows by long windows in several groups on CUDA, as products of windows and weights.

Models of speech place their tokens by a convolution of 128 neighbours in 16 groups. cuDNN has no kernel for tensor
cores that does so: on an H200, its kernels for 8x768x499 in bfloat16 add up to 34 ms, several at a time; the products
with their copies take 1.1. The windows are copied in parts of 128 MiB.

Which is faster is measured once on each device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from fuser import config
from fuser.passes.calls import put_for
from fuser.passes.hints import are_numbers, is_contiguous
from fuser.passes.rounded_factors import product_rounds_no_more
from fuser.reasons import served_by

aten = torch.ops.aten
DEVICE = "cuda"
PART_BYTES = 128 << 20  # of copied windows
_FEWEST, _LEAST_CHANNELS = 16, 8  # elements of a window, and channels of a group
_LEAST_WORK = 1 << 28  # multiplications


def long_windows_to_products(module: fx.GraphModule) -> int:
    """On CUDA, convolutions of rows by long windows in groups become products of windows, where these are faster."""
    if config.is_deterministic():
        return 0
    found = [n for n in module.graph.nodes if n.target is aten.convolution.default and _is_long(n)]
    found = [n for n in found if is_faster(n)]
    for node in found:
        x, weight, bias, _, padding, *_, groups = node.args
        put_for(node, grouped_by_windows, (x, weight, bias, padding[0], groups))
    return len(found)


def _is_long(node: fx.Node) -> bool:
    args: Any = node.args
    x, weight, _, stride, _, dilation, transposed, _, groups = args
    values = [a.meta["val"] for a in (x, weight, node)]
    if node.kwargs or values[0].dim() != 3 or values[0].device.type != DEVICE or transposed:
        return False
    if not are_numbers(*values[0].shape, *values[1].shape) or not is_contiguous(values[2]):
        return False
    filters, channels, length = values[1].shape
    plain = list(stride) == list(dilation) == [1] and groups > 1
    long = length >= _FEWEST and channels >= _LEAST_CHANNELS
    work = values[2].numel() * channels * length
    same = values[0].dtype is values[1].dtype and product_rounds_no_more(values[0].dtype)
    return bool(plain and long and same and work >= _LEAST_WORK)


def grouped_by_windows(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, padding: int, groups: int
) -> torch.Tensor:  # fmt: skip
    """`conv1d` of (batch, channels, steps) by (filters, channels / groups, length), with a stride of 1.

    Returns a contiguous (batch, filters, steps + 2 * padding - length + 1).
    """
    batch, channels, steps = x.shape
    filters, own, length = weight.shape
    count = steps + 2 * padding - length + 1
    padded = F.pad(x, (padding, padding)).view(batch, groups, own, -1)
    factors = weight.reshape(groups, filters // groups, own * length).transpose(1, 2)
    out = x.new_empty(batch, groups, filters // groups, count)
    part = max(PART_BYTES // (channels * length * count * x.element_size()), 1)
    for begin in range(0, batch, part):
        taken = padded[begin : begin + part].unfold(3, length, 1)  # batch, groups, own, count, length
        rows = taken.permute(1, 0, 3, 2, 4).reshape(groups, -1, own * length)
        made = torch.bmm(rows, factors).view(groups, taken.shape[0], count, -1).permute(1, 0, 3, 2)
        if bias is None:
            out[begin : begin + part].copy_(made)
        else:
            torch.add(made, bias.view(groups, -1, 1), out=out[begin : begin + part])
    return out.view(batch, filters, count)


served_by(grouped_by_windows, "library", "a library's products of windows, in parts of the batch")


# -- the race ----------------------------------------------------------------------------------------------------------
def is_faster(node: fx.Node) -> bool:
    """Whether the products are faster on the device of a convolution. The first one of a class is raced."""
    from fuser.cuda import choices

    args: Any = node.args
    x, weight, bias, _, padding, *_, groups = args
    value = x.meta["val"]
    sizes: Any = tuple(value.shape), tuple(weight.meta["val"].shape)
    how: Any = bias is not None, padding[0], groups
    runs = functools.partial(runs_of, sizes[0], sizes[1], value.dtype, *how)
    what = f"convolution of {'×'.join(map(str, sizes[0]))} by {sizes[1][2]} in {groups} groups {str(value.dtype)[6:]}"
    key = "long windows", *sizes, str(value.dtype), *how
    found = choices.of_class(value.device, key, runs, "convolution", what)
    return found is not None and found.winner == "products"


def runs_of(
    size: Sequence[int], weights: Sequence[int], dtype: torch.dtype, has_bias: bool, padding: int, groups: int,
    device: str = DEVICE,
) -> dict[str, Callable[[], Any]]:  # fmt: skip
    """The contestants on a device: the convolution, and the products with their copies."""
    new: Any = functools.partial(torch.randn, device=device, dtype=dtype)
    x, weight = new(*size), new(*weights)
    bias = new(weights[0]) if has_bias else None
    behind = [1], [padding], [1], False, [0], groups
    return {
        "convolution": lambda: aten.convolution.default(x, weight, bias, *behind),
        "products": lambda: grouped_by_windows(x, weight, bias, padding, groups),
    }
