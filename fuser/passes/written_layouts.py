"""In-place writes that keep the layout of their target.

AOTAutograd makes `y.cumsum_(0)` the operator `cumsum`, whose result is row-major for any `y`. In eager `y` keeps its
strides, and later results follow them. So if the two differ, the write becomes `y.copy_(y.cumsum(0))`, which
AOTAutograd turns into a copy with the layout of `y`. Where gradients are recorded, the operator reads a clone: it may
save its argument, which the copy then writes.

A written tensor with gaps becomes one without. A reshape of a part of it, which is a copy in eager, would be a view of
it there, through which writes pass. Such a reshape is of a clone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from fuser.canonical.mutation import Effect, effect
from fuser.passes.calls import value_of, writers
from fuser.passes.hints import is_contiguous, same

_MAY_COPY = frozenset("reshape flatten ravel contiguous reshape_as".split())


def copy_as_eager(module: fx.GraphModule) -> int:
    """A reshape that copies a written tensor in eager copies it, if one of the two is written later."""
    graph = module.graph
    calls = [n for n in graph.nodes if getattr(n.target, "__name__", n.target) in _MAY_COPY and _copies(n)]
    if not calls:
        return 0
    place = {n: i for i, n in enumerate(graph.nodes)}
    written = [(place[w], _memories(w.all_input_nodes)) for w in writers(graph.nodes)]
    changed = 0
    for node in calls:
        source, both = _memories([node.args[0]]), _memories([node, node.args[0]])
        before = any(at < place[node] and not source.isdisjoint(of) for at, of in written)
        if before and any(at > place[node] and not both.isdisjoint(of) for at, of in written):
            dense = {"memory_format": torch.contiguous_format}
            with graph.inserting_before(node):
                made = graph.call_function(torch.clone, (node.args[0],), dense)  # type: ignore[arg-type]
            value: Any = value_of(node.args[0])
            with value.fake_mode, torch.no_grad():
                made.meta = {**node.meta, "example_value": value.clone(**dense)}
            node.args = (made, *node.args[1:])
            changed += 1
    return changed


def _copies(node: fx.Node) -> bool:
    """Whether a call's result does not have the memory of its argument."""
    source, value = value_of(node.args[0]) if node.args else None, value_of(node)
    if source is None or value is None or not hasattr(value, "fake_mode"):
        return False
    return _has_memory(source) and _has_memory(value) and not _share_memory(source, value)


def _has_memory(value: torch.Tensor) -> bool:
    return value.layout is torch.strided and not torch._C._functorch.is_functorch_wrapped_tensor(value)


def _memories(nodes: Iterable[Any]) -> set[int]:
    values = [v for v in map(value_of, nodes) if v is not None and _has_memory(v)]
    return {v.untyped_storage()._cdata for v in values}


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
