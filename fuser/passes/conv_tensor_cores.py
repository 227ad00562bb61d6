"""Convolutions on CUDA in channels-last memory, which tensor cores read.

cuDNN turns images of the usual order before and after such a convolution. On an H200, bias included, in the usual order
and in channels-last, ms: 128 images of 8x128x128 to 64 channels, TF32, 1.10 and 0.78; 64 of 64x56x56 0.21 and 0.14; 64
of 256x28x28 0.28 and 0.22; the first in bfloat16 1.43 and 0.95. In float32 without TF32 channels-last is slower: 1.09
and 1.48, 0.44 and 0.49, 0.65 and 2.02. Graphs of such convolutions and elementwise work alone are converted; grouped
convolutions, poolings, norms and training stay as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fuser import config
from fuser.errors import Unsupported
from fuser.passes.classify import tensors_of
from fuser.passes.hints import are_numbers
from fuser.passes.layouts import Relayout, copy_of, fake_mode_of, is_static

aten = torch.ops.aten
_MOST_COPIED = 0.6  # of the bytes that convolutions read and write: the copies of what no kernel stores
_LEAST = 32 << 20  # bytes that each convolution reads and writes on average: with fewer, launches of copies weigh more


def _takes_tf32() -> bool:
    """Whether cuDNN may round factors of float32 to TF32."""
    try:
        return torch.backends.cudnn.enabled and torch.backends.cudnn.allow_tf32
    except RuntimeError:  # old and new settings are mixed
        return False


def _is_for_tensor_cores(node: fx.Node, tf32: bool) -> bool:
    """Whether a node is a two-dimensional convolution on CUDA, in one group, of a dtype that tensor cores take."""
    if node.target is not aten.convolution.default or node.kwargs or node.args[6] or node.args[8] != 1:
        return False
    values: list[Any] = [a.meta.get("val") for a in (*node.args[:2], node)]  # type: ignore[union-attr]
    if not all(isinstance(v, torch.Tensor) and v.dim() == 4 and are_numbers(*v.shape) and v.numel() for v in values):
        return False
    x = values[0]
    return x.device.type == "cuda" and (x.dtype in (torch.float16, torch.bfloat16) or x.dtype is torch.float32 and tf32)


def _bytes(node: Any) -> int:
    return int(node.meta["val"].numel() * node.meta["val"].element_size())


def _is_trained(graph: fx.Graph) -> bool:
    return any(n.op == "placeholder" and str(n.target).startswith("tangents") for n in graph.nodes)


def _is_elementwise(node: fx.Node) -> bool:
    """Whether a node does the same to each element, or makes a tensor that is no stack of images."""
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, torch.Tensor) or value.dim() < 4:
        read = [v for a in node.all_input_nodes for v in tensors_of(a.meta.get("val"))]
        return node.op == "output" or all(v.dim() < 4 for v in read)
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags


def _called(walk: Relayout, x: fx.Node, node: fx.Node) -> fx.Node:
    return walk.call(node.target, x, *node.args[1:])


def tensor_cores_channels_last(module: fx.GraphModule) -> int:
    """On CUDA, convolutions that tensor cores make run in channels-last memory in inference, with what is around."""
    tf32, mode = _takes_tf32(), fake_mode_of(module.graph)
    convolutions = [n for n in module.graph.nodes if n.target is aten.convolution.default]
    if not convolutions or mode is None or config.numerics == "eager" or config.convolution_layout == "eager":
        return 0
    if not all(_is_for_tensor_cores(n, tf32) for n in convolutions) or not torch.backends.cudnn.enabled:
        return 0
    others = [n for n in module.graph.nodes if n.target is not aten.convolution.default]
    if not all(map(_is_elementwise, others)) or _is_trained(module.graph) or not is_static(module.graph):
        return 0
    walk = Relayout(copy_of(module.graph), mode, stored=True)
    moved = 0
    try:
        for node in list(walk.graph.nodes):
            if node.target is not aten.convolution.default:
                walk.follow(node)
                continue
            moved += _bytes(node.args[0]) + _bytes(node)
            with walk.graph.inserting_before(node):
                x = walk.in_format(node.args[0], torch.channels_last)
                new = _called(walk, x, node)
            if not new.meta["val"].is_contiguous(memory_format=torch.channels_last):
                return 0  # another library makes it
            walk.replace(node, new)
    except (Unsupported, RuntimeError, ValueError):
        return 0
    if walk.copied > _MOST_COPIED * moved or moved < _LEAST * len(convolutions):
        return 0
    module.graph = walk.graph
    return len(convolutions)
