"""In-place writes that keep the layout of their target.

AOTAutograd makes `y.cumsum_(0)` the operator `cumsum`, whose result is row-major for any `y`. In eager `y` keeps its
strides, and later results follow them. So if the two differ, the write becomes `y.copy_(y.cumsum(0))`, which
AOTAutograd turns into a copy with the layout of `y`. Where gradients are recorded, the operator reads a clone: it may
save its argument, which the copy then writes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fuser.canonical.mutation import Effect, effect
from fuser.passes.calls import value_of
from fuser.passes.hints import is_contiguous, same


def keep_written_layouts(module: fx.GraphModule) -> int:
    """In-place writes become copies of their operators' results, if these have other strides than the target."""
    changed = 0
    for node in list(module.graph.nodes):
        target = value_of(node.args[0]) if node.args else None
        if target is None or target.layout is not torch.strided or target.dim() < 2 or is_contiguous(target):
            continue
        function = _computing(node)
        if function is not None:
            changed += _copied(module.graph, node, target, function)
    return changed


def _computing(node: fx.Node) -> Callable[..., Any] | None:
    """The operator that computes what a call writes into its first argument; None for calls that only write."""
    if effect(node.op, node.target, node.args, node.kwargs) is not Effect.RETURNS_WRITTEN:
        return None
    home: Any
    if node.op == "call_method":
        home, name = torch.Tensor, str(node.target)
    else:
        name = getattr(node.target, "__name__", "")
        home = next((h for h in (torch.Tensor, torch) if getattr(h, name, None) is node.target), None)
    if home is None or not name.endswith("_") or name.endswith("__") or name == "copy_":
        return None
    return getattr(home, name[:-1], None)


def _copied(graph: fx.Graph, node: fx.Node, target: torch.Tensor, function: Callable[..., Any]) -> int:
    """Make `node` a copy of the result of `function`, if that has other strides than `target`; 1 if it was changed."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda a: a.meta.get("example_value"))
    try:
        with target.fake_mode, torch.no_grad():  # type: ignore[attr-defined]
            value = function(*args, **kwargs)
            dense = torch.empty_like(target)  # the result of elementwise operators for a target with gaps
    except Exception:  # a value is missing, or the operator has other arguments: keep the node
        return 0
    if not isinstance(value, torch.Tensor) or value.dtype is not target.dtype or not same(value.shape, target.shape):
        return 0
    if any(same(value.stride(), t.stride()) for t in (target, dense)) or _share_memory(value, target):
        return 0  # the operator follows its target's strides, or makes a view, as `transpose_` does
    with graph.inserting_before(node):
        read = node.args[0]
        if target.requires_grad:
            read = graph.call_function(torch.clone, (read,))
            read.meta = {**node.meta, "example_value": dense}
        made = graph.call_function(function, (read, *node.args[1:]), node.kwargs)
    made.meta = {**node.meta, "example_value": value}
    node.op, node.target = "call_method", "copy_"
    node.args, node.kwargs = (node.args[0], made), {}
    return 1


def _share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)
