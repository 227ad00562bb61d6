"""Convolutions on CUDA of single points in groups of channels: batched products.

cuDNN starts kernels for each group, and turns images before and after. On an H200 in bfloat16, 32 sequences of 256
points with 768 channels to 3,072 in 4 groups, as in SqueezeBERT, take it 98 µs, and its gradients 202 µs; a batched
product of points takes 25, and two for the gradients 45. 64 images of 28×28 points with 240 channels to 60 in 3
groups, as in ShuffleNet, take it 96 and 149; products of single images take 16 and 59.

Where channels are innermost in memory, the points of all images are the rows of one matrix for each group, and the
result keeps that order. Otherwise each image has a product for each group. Which is faster is measured once on each
device.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fuser.lazy_dataclasses import dataclass
from fuser.passes.as_products import convolutions_to_products, is_backward, operands, replace_gradients
from fuser.passes.layouts import Relayout

aten = torch.ops.aten
DEVICE = "cuda"
_LEAST_WORK = 1 << 24  # multiplications, below which launches decide
Call = Callable[..., Any]


@dataclass(frozen=True)
class Points:
    """A convolution, or its gradients, of images (images, groups * channels, *sides) by (groups * filters, channels).

    last: channels are innermost in the memory of the images and of the result.
    """

    images: int
    groups: int
    channels: int
    filters: int
    sides: tuple[int, ...]
    dtype: torch.dtype
    last: bool
    backward: bool

    @property
    def count(self) -> int:
        """The number of points of an image."""
        return math.prod(self.sides)

    def __str__(self) -> str:
        what = "gradients of " if self.backward else ""
        order = "channels-last" if self.last else "row-major"
        each = f"{self.groups} groups of {self.channels} channels by {self.filters} filters {str(self.dtype)[6:]}"
        return f"{what}{self.images} {order} images of {self.count} points in {each}"


def grouped_points_to_products(module: fx.GraphModule) -> int:
    """On CUDA, convolutions of single points in groups, and gradients, become products, where these are faster."""
    return convolutions_to_products(module, points_of, is_faster, _convert)


def points_of(node: fx.Node) -> Points | None:
    """The points that a convolution or its gradients read; None for other nodes."""
    found = operands(node)
    if found is None:
        return None
    args, x, weight = found
    stride, padding, groups = args[3], args[4], args[8]
    sizes = (*x.shape, *weight.shape)
    if groups == 1 or x.dim() < 3 or not all(type(s) is int and s for s in sizes):
        return None
    if math.prod(weight.shape[2:]) != 1 or any(s != 1 for s in stride) or any(padding):
        return None
    channels, filters = weight.shape[1], weight.shape[0] // groups
    if channels == 1 or filters == 1:
        return None
    backward = is_backward(node)
    images: Any = node.args[0].meta["val"] if backward else x  # type: ignore[union-attr]
    return Points(
        x.shape[0], groups, channels, filters, tuple(x.shape[2:]), x.dtype, _ends_in_channels(images), backward
    )


def _ends_in_channels(x: torch.Tensor) -> bool:
    return x.stride(1) == 1 and not x.is_contiguous()


# -- the products, of nodes of a graph and of tensors ------------------------------------------------------------------
def _stacked(call: Call, x: Any, p: Points, each: int) -> Any:
    """The points of images with `each` channels a group: (groups, points, each), or (images and groups, each, points).
    """
    if not p.last:
        rows = call(aten.clone.default, x, memory_format=torch.contiguous_format)
        return call(aten.view.default, rows, [p.images * p.groups, each, p.count])
    turned = call(aten.permute.default, x, [0, *range(2, 2 + len(p.sides)), 1])
    rows = call(aten.clone.default, turned, memory_format=torch.contiguous_format)
    return call(aten.permute.default, call(aten.view.default, rows, [-1, p.groups, each]), [1, 0, 2])


def _unstacked(call: Call, stacked: Any, p: Points, each: int) -> Any:
    """The images of a product, the inverse of `_stacked`."""
    if not p.last:
        return call(aten.view.default, stacked, [p.images, p.groups * each, *p.sides])
    turned = call(aten.permute.default, stacked, [1, 0, 2])
    rows = call(aten.clone.default, turned, memory_format=torch.contiguous_format)
    images = call(aten.view.default, rows, [p.images, *p.sides, p.groups * each])
    return call(aten.permute.default, images, [0, 1 + len(p.sides), *range(1, 1 + len(p.sides))])


def _filters(call: Call, weight: Any, p: Points) -> Any:
    """(groups, filters, channels); row-major, for each image."""
    own = call(aten.view.default, weight, [p.groups, p.filters, p.channels])
    if p.last:
        return own
    each = call(aten.expand.default, call(aten.unsqueeze.default, own, 0), [p.images, -1, -1, -1])
    copied = call(aten.clone.default, each, memory_format=torch.contiguous_format)
    return call(aten.view.default, copied, [p.images * p.groups, p.filters, p.channels])


def _result(call: Call, x: Any, weight: Any, p: Points) -> Any:
    points, filters = _stacked(call, x, p, p.channels), _filters(call, weight, p)
    if p.last:
        product = call(aten.bmm.default, points, call(aten.permute.default, filters, [0, 2, 1]))
    else:
        product = call(aten.bmm.default, filters, points)
    return _unstacked(call, product, p, p.filters)


def _gradient_of_images(call: Call, grad: Any, weight: Any, p: Points) -> Any:
    points, filters = _stacked(call, grad, p, p.filters), _filters(call, weight, p)
    if p.last:
        product = call(aten.bmm.default, points, filters)
    else:
        product = call(aten.bmm.default, call(aten.permute.default, filters, [0, 2, 1]), points)
    return _unstacked(call, product, p, p.channels)


def _gradient_of_filters(call: Call, grad: Any, x: Any, shape: Sequence[int], p: Points) -> Any:
    of_results, of_images = _stacked(call, grad, p, p.filters), _stacked(call, x, p, p.channels)
    if p.last:
        product = call(aten.bmm.default, call(aten.permute.default, of_results, [0, 2, 1]), of_images)
    else:
        each = call(aten.bmm.default, of_results, call(aten.permute.default, of_images, [0, 2, 1]))
        apart = call(aten.view.default, each, [p.images, p.groups, p.filters, p.channels])
        product = call(aten.sum.dim_IntList, apart, [0])
    return call(aten.view.default, product, list(shape))


# -- the graph ---------------------------------------------------------------------------------------------------------
def _maker(walk: Relayout) -> Call:
    """What makes nodes; a copy of what is row-major is the value itself."""

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        if target is aten.clone.default and args[0].meta["val"].is_contiguous():
            return args[0]  # type: ignore[no-any-return]
        return walk.call(target, *args, **kwargs)

    return call


def _convert(walk: Relayout, node: fx.Node, p: Points) -> None:
    if p.backward:
        _convert_gradients(walk, node, p)
        return
    x, weight, bias, *_ = node.args
    call = _maker(walk)
    result = _result(call, x, weight, p)
    if bias is not None:
        along = call(aten.view.default, bias, [-1, *(1 for _ in p.sides)])
        result = call(aten.add.Tensor, result, along)
    walk.replace(node, result)


def _convert_gradients(walk: Relayout, node: fx.Node, p: Points) -> None:
    grad, x, weight, *_ = node.args
    call = _maker(walk)
    shape = weight.meta["val"].shape  # type: ignore[union-attr]
    makers = (
        lambda: _gradient_of_images(call, grad, weight, p),
        lambda: _gradient_of_filters(call, grad, x, shape, p),
        lambda: call(aten.sum.dim_IntList, grad, [0, *range(2, 2 + len(p.sides))]),
    )
    replace_gradients(walk, node, makers)


# -- the race ----------------------------------------------------------------------------------------------------------
def is_faster(p: Points, device: torch.device) -> bool:
    """Whether products are faster on a device. The first convolution of a class is raced."""
    from fuser.cuda import choices

    if p.images * p.count * p.groups * p.filters * p.channels < _LEAST_WORK:
        return False
    key = "grouped points", *map(str, (p.images, p.groups, p.channels, p.filters, p.count, p.dtype, p.last, p.backward))
    found = choices.of_class(device, key, functools.partial(runs_of, p), "convolution", str(p))
    return found is not None and found.winner == "products"


def runs_of(p: Points, device: str = DEVICE) -> dict[str, Callable[[], Any]]:
    """The contestants on a device: the convolution or its gradients, and the products.

    Views are made before, since launches wait for them here, and not in a program. Kernels make the copies of images.
    """
    new: Any = functools.partial(torch.randn, dtype=p.dtype, device=device)
    ones = [1] * len(p.sides)
    weight = new(p.groups * p.filters, p.channels, *ones)
    x, grad = (_images(new, p, each) for each in (p.channels, p.filters))
    behind = ones, [0] * len(p.sides), ones, False, [0] * len(p.sides), p.groups
    points, of_results = _stacked(_call, x, p, p.channels), _stacked(_call, grad, p, p.filters)
    filters = _filters(_call, weight, p)
    own, places = weight.view(p.groups, p.filters, p.channels), filters.view(-1, p.groups, p.filters, p.channels)

    def product() -> torch.Tensor:
        if p.last:
            return torch.bmm(points, filters.mT)
        places.copy_(own)
        return torch.bmm(filters, points)

    def gradients() -> tuple[torch.Tensor, torch.Tensor]:
        if p.last:
            return torch.bmm(of_results, filters), torch.bmm(of_results.mT, points)
        places.copy_(own)
        each = torch.bmm(of_results, points.mT).view(p.images, p.groups, p.filters, p.channels)
        return torch.bmm(filters.mT, of_results), each.sum(0)

    if p.backward:
        mask = [True, True, False]
        return {
            "convolution": lambda: aten.convolution_backward.default(grad, x, weight, None, *behind, mask)[:2],
            "products": gradients,
        }
    return {"convolution": lambda: aten.convolution.default(x, weight, None, *behind), "products": product}


def _call(target: Any, *args: Any, **kwargs: Any) -> Any:
    """The operator on tensors; a copy of what is row-major is the value itself."""
    if target is aten.clone.default and args[0].is_contiguous():
        return args[0]
    return target(*args, **kwargs)


def _images(new: Callable[..., torch.Tensor], p: Points, each: int) -> torch.Tensor:
    """Images with `each` channels a group, in the order of `p`."""
    if not p.last:
        return new(p.images, p.groups * each, *p.sides)
    return new(p.images, *p.sides, p.groups * each).movedim(-1, 1)
