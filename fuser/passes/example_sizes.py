"""Graphs of free sizes, for passes that look at numbers: values get the sizes of the example, and their symbols back.

A rewrite that is right for all sizes is chosen by those of the example. No size is compared as a symbol, so no guard is
added.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from fuser.errors import Unsupported
from fuser.passes.classify import tensors_of
from fuser.passes.hints import are_numbers
from fuser.passes.layouts import copy_of, fake_mode_of

aten = torch.ops.aten
Values = dict[fx.Node, Any]
FREE = "free"


def by_example(module: fx.GraphModule, rewrite: Callable[[fx.Graph, FakeTensorMode], int]) -> int:
    """Rewrite a copy of a graph whose values have the sizes of the example, and put it in place if that is right for
    all sizes. `rewrite` returns the number of changes; if it is 0, or if it raises Unsupported, RuntimeError or
    ValueError, the graph stays."""
    mode = fake_mode_of(module.graph)
    if mode is None:
        return 0
    graph = copy_of(module.graph)
    try:
        before = put_numbers(graph, mode)
        changed = rewrite(graph, mode)
        if changed:
            put_symbols(graph, mode, before)
    except (Unsupported, RuntimeError, ValueError):
        return 0
    if changed:
        module.graph = graph
    return changed


def put_numbers(graph: fx.Graph, mode: FakeTensorMode) -> Values:
    """Replace the symbols in a graph's values by their numbers in the example. Returns the values as they were; none
    if no value has a symbol. Nodes that had one keep that value in `meta[FREE]`.

    Unsupported if a symbol has no number, as the size of a selection by data.
    """
    before = {node: node.meta["val"] for node in graph.nodes if "val" in node.meta}
    free = [node for node, value in before.items() if _is_free(value)]
    for node in free:
        node.meta["val"], node.meta[FREE] = _numbers(before[node], mode), before[node]
    return before if free else {}


def put_symbols(graph: fx.Graph, mode: FakeTensorMode, before: Values) -> None:
    """Give the values their symbols back; those whose strides have changed, and new ones, by torch's shape functions.

    Unsupported if that adds a guard, or if a new call names a stride that is a symbol.
    """
    if not before:
        return
    guards = _guards(mode)
    for node in graph.nodes:
        given = node.meta.pop(FREE, None)
        old = before.get(node, given)
        if node.target is aten.clone.default and old is None:
            old = node.args[0].meta["val"]
        if old is not None and _sizes(old) != _sizes(node.meta["val"]):
            old = None  # a rewrite gave the node the notes of another
        if old is not None and _strides(old) == _strides(node.meta["val"]):
            node.meta["val"] = old
        elif node.op == "call_function" and any(_is_free(a.meta.get("val")) for a in node.all_input_nodes):
            dense = None if old is None else _as_dense(old, node.meta["val"], mode)
            node.meta["val"] = _computed(graph, node, mode) if dense is None else dense
    if _guards(mode) != guards:
        raise Unsupported("a shape function compares a free size")


def _as_dense(free: Any, example: Any, mode: FakeTensorMode) -> Any:
    """A value of the sizes of `free`, each tensor without gaps and in the order of the dims of `example`; None if that
    would not give the strides of `example`."""
    if isinstance(free, (tuple, list)):
        parts = [_as_dense(f, e, mode) for f, e in zip(free, example, strict=True)]
        whole = all(p is not None or f is None for p, f in zip(parts, free, strict=True))
        return type(free)(parts) if whole else None
    if not isinstance(free, torch.Tensor):
        return free
    strides, given, step, last = [0] * free.dim(), [0] * free.dim(), 1, 1
    for dim in sorted(range(free.dim()), key=lambda d: (example.stride(d), -d)):
        strides[dim], given[dim] = step, last
        step, last = step * free.shape[dim], last * example.shape[dim]
    if given != list(example.stride()):
        return None
    with mode:
        return torch.empty_strided(free.shape, strides, dtype=free.dtype, device=free.device)


def _computed(graph: fx.Graph, node: fx.Node, mode: FakeTensorMode) -> Any:
    if node.target is aten.as_strided.default:
        _free_sizes(graph, node)
    args: Any
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    if node.target is operator.getitem:
        return args[0][args[1]]
    with mode:
        return node.target(*args, **kwargs)  # type: ignore[operator]


def _free_sizes(graph: fx.Graph, node: fx.Node) -> None:
    """Make the sizes of a view of a whole tensor those of the tensor."""
    x, _, strides = node.args[:3]
    shape = x.meta["val"].shape  # type: ignore[union-attr]
    if not are_numbers(*x.meta["val"].stride()) or len(strides) != len(shape):  # type: ignore[union-attr,arg-type]
        raise Unsupported("a view whose strides are free")
    sizes: list[Any] = list(shape)
    with graph.inserting_before(node):
        for dim, size in enumerate(shape):
            if not are_numbers(size):
                sizes[dim] = graph.call_function(aten.sym_size.int, (x, dim))
                sizes[dim].meta["val"] = size
    node.update_arg(1, sizes)


def _has_symbols(leaf: Any) -> bool:
    if isinstance(leaf, torch.Tensor):
        return leaf.layout is torch.strided and not are_numbers(*leaf.shape, *leaf.stride())
    return isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool))


def _is_free(value: Any) -> bool:
    return any(map(_has_symbols, pytree.tree_leaves(value)))


def _with_numbers(leaf: Any, mode: FakeTensorMode) -> Any:
    if not _has_symbols(leaf):
        return leaf
    if not isinstance(leaf, torch.Tensor):
        return _number(leaf)
    sizes, strides = ([_number(n) for n in numbers] for numbers in (leaf.shape, leaf.stride()))
    with mode:
        return torch.empty_strided(sizes, strides, dtype=leaf.dtype, device=leaf.device)


def _number(symbol: Any) -> Any:
    if type(symbol) in (int, float, bool):
        return symbol
    found = symbol.node.hint
    if found is None:
        raise Unsupported(f"{symbol} has no value in the example")
    return found


def _numbers(value: Any, mode: FakeTensorMode) -> Any:
    return pytree.tree_map(lambda leaf: _with_numbers(leaf, mode), value)


def _strides(value: Any) -> list[list[int]]:
    return [[*map(_number, t.stride())] for t in tensors_of(value)]


def _sizes(value: Any) -> list[list[int]]:
    return [[*map(_number, t.shape)] for t in tensors_of(value)]


def _guards(mode: FakeTensorMode) -> int:
    return len(mode.shape_env.guards) if mode.shape_env is not None else 0
