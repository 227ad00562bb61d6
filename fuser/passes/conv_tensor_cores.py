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
9.8 ms on an H200, 3.2 of it in cuDNN's reordering, and takes 6.7. Training is not converted: ResNet-50's step, 32
images in float32, took 137 ms, and 19 without. Depthwise convolutions of small windows become kernels, which read
channels-last images faster, too; other grouped convolutions are timed in both orders.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fuser import config
from fuser.errors import Unsupported
from fuser.passes.conv_groups import are_faster_last
from fuser.passes.depthwise import is_depthwise
from fuser.passes.hints import are_numbers
from fuser.passes.layouts import Relayout, copy_of, fake_mode_of, is_static
from fuser.passes.rounded_factors import HALVES, convolutions_take_tf32

aten = torch.ops.aten
_MOST_COPIED = 0.6  # share of the bytes that convolutions read and write, for copies that no kernel stores
_LEAST = 32 << 20  # bytes that a convolution reads and writes on average; with fewer, launches of copies dominate
_FEWEST = 4  # convolutions per copy from which their bytes do not matter


def _images(node: fx.Node) -> tuple[Any, Any, Any] | None:
    """The input, the weight and the result of a two-dimensional convolution; None for other nodes."""
    return (node.args[0], node.args[1], node) if node.target is aten.convolution.default and not node.kwargs else None


def _is_to_time(node: fx.Node) -> bool:
    """Whether a convolution has several groups of several channels."""
    return bool(node.args[8] != 1 and not is_depthwise(node))


def _is_trained(graph: fx.Graph) -> bool:
    return any(n.target is aten.convolution_backward.default for n in graph.nodes)


def _turned(node: fx.Node) -> int:
    """The bytes that cuDNN would reorder: none for a 1x1 convolution."""
    x, weight, result = _images(node) or (node,) * 3
    return _bytes(x, result) if tuple(weight.meta["val"].shape[2:]) != (1, 1) else 0


def _is_for_tensor_cores(node: fx.Node, tf32: bool) -> bool:
    """Whether a convolution is two-dimensional, on CUDA, and of a dtype that tensor cores support."""
    values: list[Any] = [a.meta.get("val") for a in _images(node) or ()]
    plain = all(isinstance(v, torch.Tensor) and v.dim() == 4 and are_numbers(*v.shape) and v.numel() for v in values)
    if not values or not plain:
        return False
    x = values[0]
    return x.device.type == "cuda" and (x.dtype in HALVES or x.dtype is torch.float32 and tf32)


def _bytes(*nodes: Any) -> int:
    return sum(int(n.meta["val"].numel() * n.meta["val"].element_size()) for n in nodes)


def _called(walk: Relayout, x: fx.Node, node: fx.Node) -> fx.Node:
    return walk.call(node.target, x, *node.args[1:])


def _convert(walk: Relayout, node: fx.Node) -> bool:
    """Make a convolution read channels-last images. False if its result is not channels-last, as of another library."""
    x: Any = node.args[0]
    with walk.graph.inserting_before(node):
        _turn_weight(walk, node)
        new = _called(walk, walk.in_format(x, torch.channels_last), node)
    walk.replace(node, new)
    return bool(new.meta["val"].is_contiguous(memory_format=torch.channels_last))


def _turn_weight(walk: Relayout, node: fx.Node) -> None:
    """Copy a convolution's weight to channels-last memory by a kernel: cuDNN's and ATen's copies take longer."""
    x, weight, *rest = node.args
    value = weight.meta["val"]  # type: ignore[union-attr]
    if not value.is_contiguous(memory_format=torch.channels_last):
        node.args = (x, walk.call(aten.clone.default, weight, memory_format=torch.channels_last), *rest)


def tensor_cores_channels_last(module: fx.GraphModule) -> int:
    """On CUDA, inference graphs whose convolutions run on tensor cores are converted to channels-last memory."""
    tf32, mode = convolutions_take_tf32(), fake_mode_of(module.graph)
    convolutions = [n for n in module.graph.nodes if _images(n) is not None]
    if not convolutions or mode is None or config.numerics == "eager" or config.convolution_layout == "eager":
        return 0
    if not all(_is_for_tensor_cores(n, tf32) for n in convolutions) or not torch.backends.cudnn.enabled:
        return 0
    if not is_static(module.graph) or _is_trained(module.graph):
        return 0
    walk = Relayout(copy_of(module.graph), mode, stored=True)
    moved, converted = 0, len(convolutions)
    try:
        for node in list(walk.graph.nodes):
            if _images(node) is None:
                walk.follow(node)
                continue
            moved += _turned(node)
            if not _convert(walk, node):
                return 0
    except (Unsupported, RuntimeError, ValueError):
        return 0
    small = moved < _LEAST * converted and converted < _FEWEST * walk.calls
    if walk.copied > _MOST_COPIED * moved or small or not are_faster_last([n for n in convolutions if _is_to_time(n)]):
        return 0
    module.graph = walk.graph
    return converted
