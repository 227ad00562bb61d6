"""Caches values that depend on frozen weights alone: computed at the first call, and again after a weight changes.

Examples: casts of parameters under autocast, factors of norms in weights, tables of positions, biases of attention. A
view of a weight costs nothing and stays. So do results of the graph, which a caller may write, and values that take far
more memory than their weights.
"""

from __future__ import annotations

import torch
from torch import fx

from fuser import config
from fuser.passes.classify import draws, is_view
from fuser.passes.onednn import FROZEN
from fuser.runtime.packing import folded_call

_GROWN, _SMALL_BYTES = 4, 1 << 22  # a kept value's size: at most _GROWN times its weights, or _SMALL_BYTES
_CREATING = frozenset("full zeros ones arange scalar_tensor empty iota".split())


def fold_frozen(module: fx.GraphModule) -> int:
    """Values computed from frozen weights and numbers alone are replaced by calls that keep them."""
    if not config.freeze:
        return 0
    behind = _decided(module.graph)
    roots = [n for n in behind if n.op == "call_function" and _is_worth_keeping(n, behind)]
    for root in roots:
        _keep(module, root, behind)
    return len(roots)


def _decided(graph: fx.Graph) -> dict[fx.Node, frozenset[fx.Node]]:
    """The nodes that depend on frozen weights and numbers alone, each with its weights."""
    found: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "placeholder" and FROZEN in node.meta:
            found[node] = frozenset({node})
        elif _is_function(node) and all(a in found for a in node.all_input_nodes):
            found[node] = frozenset().union(*(found[a] for a in node.all_input_nodes))
    return found


def _is_function(node: fx.Node) -> bool:
    """Whether a call returns one tensor of static sizes, equal for equal arguments."""
    value, target = node.meta.get("val"), node.target
    if node.op != "call_function" or not isinstance(value, torch.Tensor):
        return False
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable or draws(target):
        return False
    if target.namespace not in ("aten", "prims"):
        return False
    if not node.all_input_nodes and str(target.overloadpacket).partition(".")[2] not in _CREATING:
        return False
    return all(type(n) is int for n in (*value.shape, *value.stride())) and value.layout is torch.strided


def _is_worth_keeping(node: fx.Node, behind: dict[fx.Node, frozenset[fx.Node]]) -> bool:
    """Whether a value is more than a view of a weight, is not too large, and has a reader outside the folded part."""
    if not behind[node] or is_view(node.target) or not _is_needed(node, behind):
        return False
    given = sum(_bytes(n) for n in behind[node])
    return _bytes(node) <= max(_SMALL_BYTES, _GROWN * given)


def _bytes(node: fx.Node) -> int:
    value: torch.Tensor = node.meta["val"]
    return value.numel() * value.element_size()


def _is_needed(node: fx.Node, behind: dict[fx.Node, frozenset[fx.Node]]) -> bool:
    """Whether a reader outside the folded part uses the value, directly or through views, and none returns it."""
    outside = False
    pending = list(node.users)
    while pending:
        user = pending.pop()
        if user.op == "output":
            return False
        if is_view(user.target):
            pending += user.users
        outside |= user not in behind
    return outside


def _keep(module: fx.GraphModule, root: fx.Node, behind: dict[fx.Node, frozenset[fx.Node]]) -> None:
    """Replace `root` by a call that computes and keeps its value."""
    weights = [n for n in module.graph.nodes if n in behind[root]]
    inner = fx.Graph()
    copies = {w: inner.placeholder(w.name) for w in weights}
    inner.output(_copied(root, inner, copies))
    call = folded_call(fx.GraphModule({}, inner).forward, f"folded_{root.name}")
    with module.graph.inserting_before(root):
        new = module.graph.call_function(call, tuple(weights))
    new.meta = {**root.meta, FROZEN: True}
    root.replace_all_uses_with(new)


def _copied(node: fx.Node, graph: fx.Graph, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    for a in node.all_input_nodes:
        if a not in copies:
            _copied(a, graph, copies)
    copies[node] = graph.node_copy(node, copies.__getitem__)
    return copies[node]


__all__ = ["fold_frozen"]
