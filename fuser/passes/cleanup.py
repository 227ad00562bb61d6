"""Small rewrites that shorten graphs and make equal layers equal. Each returns the number of changes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fuser.passes.calls import put_for
from fuser.passes.classify import BY_PLACE, is_ordered, is_scatter, is_view, is_write, is_write_back, qualified_name

aten = torch.ops.aten


def reaches_output(graph: fx.Graph) -> set[fx.Node]:
    """The nodes whose memory a result of the graph may share: the results, and the sources of their views and items.

    So are those of which `as_strided` reads elements by their offset in memory: it sees whether a value has memory of
    its own.
    """
    found = _read_by_offset(graph)
    stack = list(graph.output_node().all_input_nodes)
    while stack:
        node = stack.pop()
        if node in found:
            continue
        found.add(node)
        if is_view(node.target) or node.target is operator.getitem:
            stack.extend(node.all_input_nodes)
    return found


def _read_by_offset(graph: fx.Graph) -> set[fx.Node]:
    """The nodes whose memory `as_strided` and its scatter read, up to those that have it.

    A scatter's result has the offset and the gaps of the tensor that it copies.
    """
    found: set[fx.Node] = set()
    stack: list[Any] = [n.args[0] for t in BY_PLACE for n in graph.find_nodes(op="call_function", target=t)]
    while stack:
        node = stack.pop()
        if not isinstance(node, fx.Node) or node in found:
            continue
        found.add(node)
        if is_view(node.target) or node.target is operator.getitem or is_scatter(node.target):
            stack.append(node.args[0])
    return found


def same_static_shape(a: Any, b: Any) -> bool:
    """Whether dtype, device, sizes, strides, conjugate and negative bits are equal. Adds no guard on a symbol."""

    def plain(t: torch.Tensor) -> tuple[Any, ...]:
        return tuple(s if isinstance(s, int) else str(s) for s in (*t.shape, *t.stride()))

    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    if a.is_conj() != b.is_conj() or a.is_neg() != b.is_neg():
        return False
    return a.dtype == b.dtype and a.device == b.device and len(a.shape) == len(b.shape) and plain(a) == plain(b)


# Operators that return their argument's elements unchanged if shape, dtype and strides stay the same.
_IDENTITIES = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.expand.default,
        aten.slice.Tensor,
        aten.alias.default,
        aten.detach.default,
        aten.lift_fresh.default,
        aten.clone.default,
        aten._to_copy.default,
    }
)


def remove_noops(module: fx.GraphModule) -> int:
    """Drop views, copies and casts that change nothing, unless a result of the graph may share their memory."""
    graph = module.graph
    kept = reaches_output(graph)
    changed = 0
    for node in list(graph.nodes):
        if is_write_back(node) and node.args[1] is node.args[0]:
            graph.erase_node(node)
            changed += 1
            continue
        if node.target not in _IDENTITIES or node in kept or not isinstance(node.args[0], fx.Node):
            continue
        source = node.args[0]
        if source.op == "placeholder" and not is_view(node.target):
            continue  # a copy protects its readers from later writes into the input
        if same_static_shape(node.meta.get("val"), source.meta.get("val")):
            node.replace_all_uses_with(source)
            graph.erase_node(node)
            changed += 1
    return changed


def return_written(module: fx.GraphModule) -> int:
    """A result that is a copy into an input becomes the input, so that the group with the content may write it."""
    output = module.graph.output_node()
    written = [n for n in output.all_input_nodes if set(n.users) == {output} and is_write(n)]
    instead = {n: n.args[0] for n in written}
    output.args = fx.node.map_arg(output.args, lambda n: instead.get(n, n))
    return len(written)


def _bounds(node: fx.Node) -> list[tuple[int, int]] | None:
    """The start and end of each piece of a split; None if a size is symbolic."""
    value = node.meta.get("val")
    dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)
    if not isinstance(value, (tuple, list)) or not isinstance(dim, int):
        return None
    sizes = [v.shape[dim] for v in value]
    if not all(isinstance(s, int) for s in sizes):
        return None
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [(a, a + s) for a, s in zip(starts, sizes, strict=True)]


_SPLITS = frozenset(
    {aten.split.Tensor, aten.split_with_sizes.default, aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default}
)


def split_to_slices(module: fx.GraphModule) -> int:
    """A split or `unbind` whose pieces are all picked one by one becomes slices, which groups include separately."""
    graph = module.graph
    changed = 0
    for node in list(graph.nodes):
        if any(u.target is not operator.getitem for u in node.users):
            continue
        if node.target is aten.unbind.int:
            _unbind_to_selects(node)
            changed += 1
        if node.target not in _SPLITS:
            continue
        bounds = _bounds(node)
        if bounds is None:
            continue
        dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)
        for item in list(node.users):
            start, end = bounds[item.args[1]]
            put_for(item, aten.slice.Tensor, (node.args[0], dim, start, end))
        graph.erase_node(node)
        changed += 1
    return changed


def _unbind_to_selects(node: fx.Node) -> None:
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    for item in list(node.users):
        put_for(item, aten.select.int, (node.args[0], dim, item.args[1]))
    node.graph.erase_node(node)


def _key(value: Any) -> Any:
    """A hashable form of an argument, different for 1, 1.0 and True."""
    if isinstance(value, (list, tuple)):
        return tuple(_key(v) for v in value)
    if isinstance(value, slice):
        return ("slice", _key(value.start), _key(value.stop), _key(value.step))
    return value if isinstance(value, fx.Node) else (type(value), repr(value))


def _is_pure(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return True
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return False
    return torch.Tag.nondeterministic_seeded not in target.tags and not qualified_name(target).startswith("aten::empty")


def _writes_midway(node: fx.Node) -> bool:
    """Whether a call writes a tensor that later calls may read."""
    mutable = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
    return mutable and not is_write_back(node)


def merge_equal(module: fx.GraphModule) -> int:
    """Compute equal calls once, except those whose result is, or shares memory with, a result of the graph."""
    graph = module.graph
    kept = reaches_output(graph)
    if any(_writes_midway(n) for n in graph.nodes):
        return 0
    return _merge(graph, lambda node: 0 if _is_pure(node) and node not in kept else None)


def merge_joint(joint: fx.GraphModule) -> int:
    """Compute equal calls of a joint graph once, before the partitioner cuts it. Call `keep_results_apart` first.

    Calls with a write in between are not equal. A tensor that shares memory with a result stays separate. The
    partitioner can do the same (`functorch.config.cse`), but imports all of TorchInductor for it: 0.3 s.
    """
    graph = joint.graph
    graph.eliminate_dead_code()
    results = {_memory(n) for n in graph.output_node().all_input_nodes} - {None}
    writes = 0

    def writes_before(node: fx.Node) -> int | None:
        nonlocal writes
        writes += isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
        return writes if (_is_pure(node) or _is_arithmetic(node)) and _memory(node) not in results else None

    return _merge(graph, writes_before)


def _merge(graph: fx.Graph, class_of: Callable[[fx.Node], int | None]) -> int:
    """Compute equal calls of one class once; nodes whose class is None stay. Returns the number of removed nodes."""
    seen: dict[Any, fx.Node] = {}
    changed = 0
    for node in list(graph.nodes):
        own = class_of(node)
        if own is None:
            continue
        key = (own, node.target, _key(node.args), tuple((k, _key(v)) for k, v in sorted(node.kwargs.items())))
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)
            changed += 1
    return changed


def _is_arithmetic(node: fx.Node) -> bool:
    """Whether a node computes a number from numbers by a Python function, or by torch's for symbolic sizes."""
    own = getattr(node.target, "__module__", "") in ("_operator", "math", "torch")
    return node.op == "call_function" and own and isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat))


def _memory(node: fx.Node) -> int | None:
    """An identifier of the storage of a node's tensor; None without one."""
    value = node.meta.get("val")
    try:
        return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None
    except NotImplementedError:  # a layout without storage
        return None


def keep_results_apart(joint: fx.GraphModule) -> int:
    """Clone parts of repeated multi-output calls that share memory with results of the joint graph.

    `merge_joint` merges equal calls, except those that return a tensor which shares memory with a result. It does not
    look into tuples: `x.sort().values, x.sort().values` would come back as one tensor. Parts that are views share
    memory in eager too.
    """
    graph = joint.graph
    results = reaches_output(graph)
    values: dict[Any, fx.Node] = {}
    first: dict[fx.Node, fx.Node] = {}  # for each node the first one of equal value
    seen: set[tuple[fx.Node, Any]] = set()  # parts of calls that share memory with a result
    changed = 0
    for node in list(graph.nodes):
        args, kwargs = fx.map_arg((node.args, node.kwargs), first.__getitem__)
        key = (node.target, _key(args), tuple((k, _key(v)) for k, v in sorted(kwargs.items())))
        first[node] = values.setdefault(key, node) if _is_pure(node) else node
        if node.target is not operator.getitem or node not in results or _gives_views(node.args[0]):
            continue
        part = (first[node.args[0]], node.args[1])
        if part in seen:
            with graph.inserting_after(node):
                copy = graph.call_function(torch.ops.aten.clone.default, (node,))
            copy.meta = dict(node.meta)
            first[copy] = copy
            node.replace_all_uses_with(copy, delete_user_cb=lambda user, copy=copy: user is not copy)
            changed += 1
        seen.add(part)
    if changed:
        joint.recompile()
    return changed


def _gives_views(call: Any) -> bool:
    return isinstance(call, fx.Node) and (is_view(call.target) or call.target in _SPLITS)


def drop_dead(module: fx.GraphModule) -> int:
    """Remove calls whose results are unused and that have no side effects."""
    before = len(module.graph.nodes)
    module.graph.eliminate_dead_code(lambda n: n.is_impure() or is_ordered(n))
    return before - len(module.graph.nodes)
