"""On CUDA, gradients of depthwise convolutions in channels-last memory, by those kernels of cuDNN that are fast.

The gradient of the images is a convolution of the result's gradient, with the filters turned round. cuDNN's convolution
takes 0.42 to 0.75 of the time of its own gradient in 16-bit floats (H200, 21 shapes with windows of 3x3, 5x5 and 7x7),
and 0.84 to 0.91 in float32 with 3x3. Both give the same bits in 16-bit floats.

The gradient of the filters in float32 with windows of 7x7 takes row-major images. Of 64 images of 96x56x56 it takes 1.3
ms, and 4.5 in channels-last memory; of 192x28x28 0.7 and 2.4; of 768x7x7 0.47 and 0.54.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from fuser import targets
from fuser.passes.conv_bias import gradient_of, leave_out
from fuser.passes.depthwise import is_depthwise
from fuser.passes.example_sizes import by_example
from fuser.passes.layouts import is_last
from fuser.passes.writing import Writer

aten = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)
_LEAST = 1 << 20  # elements of an image; below, turning the filters takes what is gained
_CHANNELS = 8  # divide those for which cuDNN was measured
_SMALL, _LONG = 9, 49  # places of a window in float32


def depthwise_gradients(module: fx.GraphModule) -> int:
    """On CUDA, gradients of depthwise convolutions in channels-last memory are computed in faster ways."""
    if not torch.backends.cudnn.enabled:
        return 0
    calls = [n for n in module.graph.nodes if n.target is aten.convolution_backward.default and n.args[9] != 1]
    return by_example(module, _rewrite_all) if calls else 0


def _rewrite_all(graph: fx.Graph, mode: FakeTensorMode) -> int:
    found = [n for n in graph.nodes if n.target is aten.convolution_backward.default and _is_known(n)]
    return sum(_by_convolution(n) + _by_rows(n) for n in found)


def _is_known(node: fx.Node) -> bool:
    """Whether a call has large channels-last images, and windows like those that were measured."""
    values: list[Any] = [a.meta.get("val") for a in node.args[:3] if isinstance(a, fx.Node)]
    images = len(values) == 3 and all(isinstance(v, torch.Tensor) and v.dim() == 4 for v in values)
    if node.kwargs or not images or not is_depthwise(node):
        return False
    grad, x, weight = values
    args: Any = node.args
    sides = zip(weight.shape[2:], *args[4:7], strict=True)
    plain = all(k % 2 and s == d == 1 and p == k // 2 for k, s, p, d in sides)
    large = x.numel() >= _LEAST and x.shape[1] % _CHANNELS == 0 and targets.has(x.device, "cudnn")
    return bool(plain and large and is_last(grad) and is_last(x) and grad.dtype is weight.dtype is x.dtype)


def _window(node: fx.Node) -> tuple[torch.dtype, int]:
    """The dtype of the filters, and the number of their places."""
    weight: Any = node.args[2].meta["val"]  # type: ignore[union-attr]
    return weight.dtype, weight.shape[2:].numel()


def _by_convolution(node: fx.Node) -> bool:
    """Compute the images' gradient by a convolution, where that takes less time."""
    dtype, places = _window(node)
    item = gradient_of(node, 0)
    if item is None or places == 1 or not (dtype in _HALVES or dtype is torch.float32 and places <= _SMALL):
        return False
    grad, _, weight, _, *how, _ = node.args
    write = Writer(item)
    turned = write(aten.flip.default, weight, [2, 3])
    found = write(aten.convolution.default, grad, turned, None, *how)
    found.meta["val"] = item.meta["val"]  # channels-last, too
    write.instead(found)
    leave_out(node, 0)
    return True


def _by_rows(node: fx.Node) -> bool:
    """Compute the filters' gradient from row-major images, where that takes less time."""
    dtype, places = _window(node)
    item = gradient_of(node, 1)
    if item is None or dtype is not torch.float32 or places < _LONG:
        return False
    grad, x, *behind, _ = node.args
    write = Writer(item)
    rows = [write(aten.clone.default, image, memory_format=torch.contiguous_format) for image in (grad, x)]
    found = write(node.target, *rows, *behind, [False, True, False])
    write.instead(write(operator.getitem, found, 1))
    leave_out(node, 1)
    return True
