"""Runs convolutions on CUDA in channels-last memory, which tensor cores read.

cuDNN reorders contiguous images before and after such a convolution. On an H200, bias included, contiguous and in
channels-last, ms: 128 images of 8x128x128 to 64 channels, TF32, 1.10 and 0.78; 64 of 64x56x56 0.21 and 0.14; 64 of
256x28x28 0.28 and 0.22; the first in bfloat16 1.43 and 0.95. In float32 without TF32 channels-last is slower: 1.09 and
1.48, 0.44 and 0.49, 0.65 and 2.02. On an H100, a transposed convolution by 2 of 128 images of 64x64x64 to 128 channels
takes 0.70 in TF32, and reordering its result takes 1.04 more.

A graph is converted as a whole. Operators between two convolutions follow their order. Copies are made where images
enter, leave, or meet an operator that supports only contiguous images. A kernel that computes the images stores the
copy, as that of a group norm does; such copies cost nothing. The graph is converted if the others move fewer bytes than
cuDNN's reordering would. Weights are copied by kernels at each call: Stable Diffusion's UNet, batch 2, bfloat16, took
9.8 ms on an H200, 3.2 of it in cuDNN's reordering, and takes 6.7. In training the gradients read and give such images,
too: a step of ResNeXt-50, 64 images in bfloat16, takes 16.4 ms of the device, and 18.3 in the usual order; of
MobileViT, whose depthwise gradients take ATen long, 16.2. Depthwise convolutions of small windows become kernels, which
read channels-last images faster, too. Other grouped convolutions are timed in both orders: for two filters a channel,
as in FastViT, cuDNN starts a kernel for each group, 9.6 of 12.5 ms. So are those of channels to which cuDNN adds some,
as of HRNet's 18: copies with more channels take it 6 of 40 ms.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy

from fuser import config, targets
from fuser.passes.conv_orders import are_faster_last
from fuser.passes.depthwise import is_depthwise
from fuser.passes.example_sizes import by_example
from fuser.passes.hints import are_numbers
from fuser.passes.layouts import Relayout, is_last, writes_at_end
from fuser.passes.rounded_factors import HALVES, convolutions_take_tf32

aten = torch.ops.aten
_MOST_COPIED = 0.6  # share of the bytes that convolutions read and write, for copies that no kernel stores
_PADDED, _COLOURS = 16, 4  # bytes of a point's channels whose multiples need no padding; most channels of a colour
_DECISIVE = 4  # padded channels are timed if they are at least 1 / _DECISIVE of the bytes that cuDNN turns
_TURNED_IN = 1 << 20  # bytes that cuDNN turns in a microsecond: they are read and written at 2 TB/s
_LEAST = 32 << 20  # bytes that a convolution reads and writes on average; with fewer, launches of copies dominate
_KEPT = 1 << 20  # bytes of a weight's copy that is not kept for the backward
_FEWEST = 4  # convolutions per copy from which their bytes do not matter


class _Walk(Relayout):
    """A walk that does not count the copies that would be made without it, too.

    These are copies of weights' gradients, which cuDNN would make, and of images with gaps, such as a slice of the
    channels, which ATen makes before a convolution in either order.
    """

    def _count(self, node: fx.Node) -> None:
        source: Any = node.args[0] if node.target is operator.getitem else None
        if source is None or source.target is not aten.convolution_backward.default or node.args[1] != 1:
            super()._count(node)

    def image(self, node: fx.Node) -> fx.Node:
        """A convolution's image, or a copy of it, in channels-last memory."""
        was, counts = self.before.get(node, node.meta["val"]), (self.calls, self.copied)
        found = self.in_format(node, torch.channels_last)
        if not was.is_contiguous():
            self.calls, self.copied = counts
        return found

    def follow(self, node: fx.Node) -> None:
        """The same; a convolution that is not converted, as of volumes, reads images in their old strides."""
        if _images(node) is None:
            super().follow(node)
        else:
            self._restore(node, node.all_input_nodes)


def _images(node: fx.Node) -> tuple[Any, Any, Any] | None:
    """The image, the weight and the result, or its gradient, of a convolution or its gradients; None for others."""
    if node.kwargs:
        return None
    if node.target is aten.convolution_backward.default:
        return node.args[1], node.args[2], node.args[0]
    return (node.args[0], node.args[1], node) if node.target is aten.convolution.default else None


def takes_groups(node: fx.Node) -> bool:
    """Whether a node is a convolution, or its gradients, for tensor cores, with several groups of several channels."""
    if not _is_for_tensor_cores(node, convolutions_take_tf32()):
        return False
    return bool(node.args[_first(node) + 8] != 1 and not is_depthwise(node))


def _is_to_time(node: fx.Node) -> bool:
    """Whether a convolution, or its gradients, has several groups of several channels, or channels that cuDNN pads."""
    if node.args[_first(node) + 8] != 1:
        return takes_groups(node)
    x, _, result = (image.meta["val"] for image in _images(node) or ())
    return any(v.shape[1] * v.itemsize % _PADDED and v.shape[1] > _COLOURS for v in (x, result))


def _first(node: fx.Node) -> int:
    """The position of the input among a node's arguments: gradients have their result's before it."""
    return int(node.target is aten.convolution_backward.default)


def _turned(node: fx.Node) -> int:
    """The bytes that cuDNN would reorder: none for a 1x1 convolution."""
    x, weight, result = _images(node) or (node,) * 3
    return _bytes(x, result) if tuple(weight.meta["val"].shape[2:]) != (1, 1) else 0


def _is_for_tensor_cores(node: fx.Node, tf32: bool) -> bool:
    """Whether a convolution, or its gradients, is two-dimensional, on CUDA, and of a dtype of tensor cores."""
    values: list[Any] = [a.meta.get("val") for a in _images(node) or ()]
    plain = all(isinstance(v, torch.Tensor) and v.dim() == 4 and are_numbers(*v.shape) and v.numel() for v in values)
    if not values or not plain:
        return False
    x = values[0]
    return targets.has(x.device, "cudnn") and (x.dtype in HALVES or x.dtype is torch.float32 and tf32)


def _bytes(*nodes: Any) -> int:
    return sum(int(n.meta["val"].numel() * n.meta["val"].element_size()) for n in nodes)


def _convert(walk: _Walk, node: fx.Node) -> bool:
    """Make a convolution or its gradients read channels-last images. False if they do not give such, as by no cuDNN."""
    first = _first(node)
    with walk.graph.inserting_before(node):
        images: Any = [walk.image(x) for x in node.args[: first + 1]]  # type: ignore[arg-type]
        weight = _turned_weight(walk, node.args[first + 1])
    walk.update(node, *images, weight, *node.args[first + 2 :])
    found: Any = node.meta["val"]
    result = found[0] if first else found
    return result is None or is_last(result)


def _turned_weight(walk: Relayout, weight: Any) -> fx.Node:
    """A weight in channels-last memory, copied by a kernel: cuDNN's and ATen's copies take longer.

    The backward copies a large one again: one copy for both would be kept from the forward to the backward.
    """
    if is_last(weight.meta["val"]):
        return weight  # type: ignore[no-any-return]
    copy = walk.call(aten.clone.default, weight, memory_format=torch.channels_last)
    if _bytes(weight) >= _KEPT:
        copy.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    return copy


def tensor_cores_channels_last(module: fx.GraphModule) -> int:
    """On CUDA, graphs whose convolutions run on tensor cores are converted to channels-last memory."""
    if config.convolution_layout == "eager" or not torch.backends.cudnn.enabled:
        return 0
    if not any(_images(n) is not None for n in module.graph.nodes) or not writes_at_end(module.graph):
        return 0
    return by_example(module, _convert_all)


def _convert_all(graph: fx.Graph, mode: FakeTensorMode) -> int:
    """Convert a graph. 0 if some convolution of images gives no such, or if the gain is too small."""
    tf32, walk = convolutions_take_tf32(), _Walk(graph, mode, stored=True)
    found = dict.fromkeys(n for n in graph.nodes if _is_for_tensor_cores(n, tf32))  # and gradients
    if not found:
        return 0
    moved, n = 0, len(found)
    for node in list(graph.nodes):
        if node not in found:
            walk.follow(node)
            continue
        moved += _turned(node)
        if not _convert(walk, node):
            return 0
    small = moved < _LEAST * n and n < _FEWEST * walk.calls
    if walk.copied > _MOST_COPIED * moved or small:
        return 0
    timed = list(filter(_is_to_time, found))
    share = sum(map(_turned, timed))
    if all(n.args[_first(n) + 8] == 1 for n in timed) and _DECISIVE * share < moved:
        return n
    return n if are_faster_last(timed, (moved - share) / _TURNED_IN) else 0
