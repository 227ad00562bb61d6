"""Convolutional nets on the CPU in channels-last memory.

oneDNN takes and gives any order; in channels-last the first convolution, the poolings and the 1x1 convolutions, which
become linears, run in half the time or less (ResNet-50, 4 images: 471 to 400 ms on one core). One copy at the entry
pays for it. Where the weights outweigh the images, as in the last blocks, oneDNN turns small images more cheaply than
large weights, and the convolution keeps the usual order.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from torch import fx

from fuser import config
from fuser.errors import Unsupported
from fuser.passes.hints import are_numbers
from fuser.passes.layouts import Relayout, copy_of, fake_mode_of, is_static
from fuser.passes.providers import linear_op

aten = torch.ops.aten
_FEWEST = 2  # convolutions
_LEAST_WORK = 1 << 22  # multiplications of a 1x1 convolution that becomes a linear
_HEAVY_WEIGHTS = 4  # times the images
_MOST_COPIED = 0.25  # of the bytes that convolutions read and write


def _is_plain_conv(node: fx.Node) -> bool:
    """A dense two-dimensional convolution of float32 images on the CPU."""
    if node.op != "call_function" or node.target is not aten.convolution.default or node.kwargs:
        return False
    return _are_images(node.args[0], node) and not node.args[6]


def _are_images(*nodes: Any) -> bool:
    """Whether these are stacks of float32 images on the CPU, of known sizes and none of them empty."""
    values = [n.meta.get("val") if isinstance(n, fx.Node) else None for n in nodes]
    return all(
        isinstance(v, torch.Tensor) and v.dim() == 4 and are_numbers(*v.shape) and v.numel()
        and v.dtype is torch.float32 and v.device.type == "cpu" for v in values
    )  # fmt: skip


def _bytes(*nodes: Any) -> int:
    return sum(n.meta["val"].numel() * n.meta["val"].element_size() for n in nodes)


def _is_linear(node: fx.Node) -> bool:
    """Whether a convolution looks at single points and is large enough for a matmul of its own."""
    _, w, _, _, padding, _, _, _, groups = node.args
    out = node.meta["val"]
    work = out.numel() * math.prod(w.meta["val"].shape[1:])  # type: ignore[union-attr]
    return bool(
        linear_op() is not None
        and tuple(w.meta["val"].shape[2:]) == (1, 1)  # type: ignore[union-attr]
        and not any(padding)  # type: ignore[arg-type]
        and groups == 1
        and work >= _LEAST_WORK
    )


def _as_linear(walk: Relayout, node: fx.Node) -> fx.Node:
    """A 1x1 convolution as a matmul over the channels of all points."""
    x, w, bias, stride = node.args[:4]
    for dim, step in zip((2, 3), stride, strict=True):  # type: ignore[arg-type]
        if step != 1:
            x = walk.call(aten.slice.Tensor, x, dim, 0, sys.maxsize, step)
    x = walk.in_format(x, torch.channels_last)  # type: ignore[arg-type]
    n, c, height, width = x.meta["val"].shape
    out = w.meta["val"].shape[0]  # type: ignore[union-attr]
    points = walk.call(aten.permute.default, x, [0, 2, 3, 1])
    rows = walk.call(aten.view.default, points, [n * height * width, c])
    matrix = walk.call(aten.view.default, w, [out, c])
    product = walk.call(linear_op(), rows, matrix, bias, "none", [], "")
    images = walk.call(aten.view.default, product, [n, height, width, out])
    result = walk.call(aten.permute.default, images, [0, 3, 1, 2])
    for view in (images, result):  # inside of groups their sizes would make equal blocks differ
        view.meta["outside"] = True
    return result


def _format(x: Any, w: Any, out: Any) -> torch.memory_format:
    """The order in which a convolution runs: the usual one where weights outweigh images."""
    heavy = _bytes(w) > _HEAVY_WEIGHTS * _bytes(x, out)
    return torch.contiguous_format if heavy else torch.channels_last


def _convert(walk: Relayout, node: fx.Node) -> None:
    x, w = node.args[:2]
    with walk.graph.inserting_before(node):
        if _is_linear(node):
            new = _as_linear(walk, node)
        else:
            new = walk.call(node.target, walk.in_format(x, _format(x, w, node)), *node.args[1:])  # type: ignore[arg-type]
    walk.replace(node, new)


def _is_plain_backward(node: fx.Node) -> bool:
    """The gradients of such a convolution."""
    if node.op != "call_function" or node.target is not aten.convolution_backward.default or node.kwargs:
        return False
    return _are_images(node.args[0], node.args[1]) and not node.args[7]


def _convert_backward(walk: Relayout, node: fx.Node) -> None:
    grad, x, w = node.args[:3]
    form = _format(x, w, grad)
    with walk.graph.inserting_before(node):
        images = [walk.in_format(i, form) for i in (grad, x)]  # type: ignore[arg-type]
    walk.update(node, *images, *node.args[2:])


def convolutions_channels_last(module: fx.GraphModule) -> int:
    """Run the convolutions of a graph with several, and what is around them, in channels-last memory."""
    found = [n for n in module.graph.nodes if _is_plain_conv(n)]
    mode = fake_mode_of(module.graph)
    if len(found) < _FEWEST or mode is None or config.numerics == "eager" or not is_static(module.graph):
        return 0
    most = _MOST_COPIED * sum(_bytes(n.args[0], n) for n in found)
    walk = Relayout(copy_of(module.graph), mode)
    try:
        for node in list(walk.graph.nodes):
            if _is_plain_conv(node):
                _convert(walk, node)
            elif _is_plain_backward(node):
                _convert_backward(walk, node)
            else:
                walk.follow(node)
    except (Unsupported, RuntimeError, ValueError):
        return 0
    if walk.copied > most:
        return 0
    module.graph = walk.graph
    return len(found)
