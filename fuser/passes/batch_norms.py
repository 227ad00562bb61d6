"""Folds batch norms into convolutions, in eval mode.

The norm's factors are multiplied into the weights inside the graph, at each call, from the current parameters: a later
update of weights or statistics is seen, and gradients flow to all of them. Folding pays only where the norm would need
its own pass over the images. If pointwise operations follow, their kernel computes the norm at no cost.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fuser.passes.calls import Call, autocasts, call_of, emit, position_of_writes, value_of

_LEAST_GAIN = 2  # elements of the images per element of the weights
_DTYPES = (torch.float32, torch.float64)


def fold_batch_norms(module: fx.GraphModule) -> int:
    """A batch norm in eval mode after a convolution is folded into it, if no kernel would compute the norm."""
    nodes = list(module.graph.nodes)
    if any(a.dtypes for a in autocasts(nodes)):
        return 0
    order = {node: i for i, node in enumerate(nodes)}
    writes = position_of_writes(nodes)
    changed = 0
    for node in nodes:
        norm = call_of(node)
        if norm is None or norm.name != "batch_norm":
            continue
        conv = call_of(norm.arg(0, "input"))
        if conv is None or not _may_fold(conv, norm):
            continue
        if any(order[conv.node] < w < order[node] for w in writes):
            continue  # the convolution's operands might be written in between
        _fold(module.graph, conv, norm)
        changed += 1
    return changed


def _may_fold(conv: Call, norm: Call) -> bool:
    if conv.name != "conv" or len(conv.node.users) != 1 or norm.arg(5, "training", default=False) is not False:
        return False
    weight, out = value_of(conv.arg(1, "weight")), value_of(norm.node)
    tensors = [value_of(conv.arg(0, "input")), weight, out, *map(value_of, _statistics(norm))]
    if any(t is None or t.dtype not in _DTYPES or t.dtype is not tensors[0].dtype for t in tensors):  # type: ignore[union-attr]
        return False
    assert weight is not None and out is not None
    if not all(isinstance(n, int) for t in (weight, out) for n in t.shape):
        return False
    return out.numel() >= _LEAST_GAIN * weight.numel() and not any(_is_fused(u) for u in norm.node.users)


def _statistics(norm: Call) -> tuple[Any, Any]:
    return norm.arg(1, "running_mean"), norm.arg(2, "running_var")


def _is_fused(reader: fx.Node) -> bool:
    """Whether a kernel may fuse the norm with a reader: true for all but convolutions and the graph's output."""
    call = call_of(reader)
    return reader.op != "output" and (call is None or call.name != "conv")


def _fold(graph: fx.Graph, conv: Call, norm: Call) -> None:
    weight, bias = conv.arg(1, "weight"), conv.arg(2, "bias")
    mean, variance = _statistics(norm)
    gamma, beta = norm.arg(3, "weight"), norm.arg(4, "bias")
    rank = value_of(weight).dim()  # type: ignore[union-attr]
    with graph.inserting_before(conv.node):
        scale = emit(graph, torch.rsqrt, emit(graph, torch.add, variance, norm.arg(7, "eps", 1e-5)))
        scale = scale if gamma is None else emit(graph, torch.mul, gamma, scale)
        folded = emit(graph, torch.mul, weight, emit(graph, torch.reshape, scale, (-1, *[1] * (rank - 1))))
        shift = emit(graph, torch.neg, mean) if bias is None else emit(graph, torch.sub, bias, mean)
        shift = emit(graph, torch.mul, shift, scale)
        shift = shift if beta is None else emit(graph, torch.add, shift, beta)
        args = (conv.arg(0, "input"), folded, shift, *conv.args[3:])
        kwargs = {k: v for k, v in conv.kwargs.items() if k not in ("input", "weight", "bias")}
        new = graph.call_function(conv.node.target, args, kwargs)  # type: ignore[arg-type]
    new.meta = dict(norm.node.meta)
    norm.node.replace_all_uses_with(new)
    graph.erase_node(norm.node)
    graph.erase_node(conv.node)
