"""Depthwise convolutions on CUDA become kernels of the package, which fuse with norms and activations behind them.

Such a convolution is bound by memory: each element takes part in as many products as a window has places.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from fuser.passes.calls import own_operator
from fuser.passes.classify import APART, Kind, classify
from fuser.passes.example_sizes import by_example
from fuser.passes.writing import Writer

aten = torch.ops.aten
DEVICE = "cuda"
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_SUMMED = aten._native_batch_norm_legit_functional.default


def is_depthwise(node: fx.Node) -> bool:
    """Whether a convolution along one or two dims, or its gradients, has a filter for each channel."""
    args: Any = node.args[int(node.target is aten.convolution_backward.default) :]
    x, weight, _, _, _, _, transposed, _, groups = args[:9]
    sizes = [a.meta["val"].shape for a in (x, weight)]
    alone = groups == sizes[0][1] == sizes[1][0] and groups > 1
    return bool(alone and not transposed and len(sizes[1]) in (3, 4))


def depthwise_by_kernels(module: fx.GraphModule) -> int:
    """On CUDA, a depthwise convolution of small windows becomes a kernel that fuses with what follows."""
    calls = [n for n in module.graph.nodes if n.target is aten.convolution.default]
    return by_example(module, _rewrite_small) if any(n.args[8] != 1 for n in calls) else 0


def _rewrite_small(graph: fx.Graph, mode: FakeTensorMode) -> int:
    found = [n for n in graph.nodes if n.target is aten.convolution.default and _is_small(n)]
    for node in found:
        _rewrite(node)
    return len(found)


def _is_small(node: fx.Node) -> bool:
    values: list[Any] = [a.meta.get("val") for a in (*node.args[:2], node) if isinstance(a, fx.Node)]
    if node.kwargs or len(values) != 3 or not all(isinstance(v, torch.Tensor) and v.dim() in (3, 4) for v in values):
        return False
    x, weight, result = values
    if x.device.type != DEVICE or not is_depthwise(node) or any(v.dtype not in _DTYPES for v in values):
        return False
    from fuser.lowering.pooling import MOST_PLACES  # most processes have no such convolution
    from fuser.ops.depthwise import order_of

    last = order_of(x) is torch.channels_last
    small = weight.shape[2:].numel() <= MOST_PLACES and x.dtype is weight.dtype and _has_reader(node, last)
    return small and result.is_contiguous(memory_format=order_of(x))


def _has_reader(node: fx.Node, last: bool) -> bool:
    """Whether a kernel that reads a convolution can become part of it; by itself cuDNN's is faster.

    Not the sums of a batch norm in training. In the usual order cuDNN is slow enough that these do not matter.
    """
    readers = [user for user in node.users if classify(user).kind is Kind.COMPUTE]
    return any(not last or user.target is not _SUMMED for user in readers)


def _rewrite(node: fx.Node) -> None:
    x, weight, bias, stride, padding, dilation, *_ = node.args
    write = Writer(node)
    filters = write(aten.squeeze.dim, weight, 1)
    turned = write(aten.permute.default, filters, [*range(1, len(stride) + 1), 0])  # type: ignore[arg-type]
    new = write(own_operator("depthwise"), x, turned, bias, stride, padding, dilation)
    new.meta[APART] = True  # so that what comes before can be written into a product's memory, and is not alive beside
    write.instead(new)
