"""Marks nodes of an ATen graph that must have eager's bits because a decision depends on them.

Within a group `lowering.decisive` finds them. This module finds them across groups, and across the cut between forward
and backward: a backward that recomputes a value for a comparison needs the bits of the forward.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import fx

from fuser import targets
from fuser.canonical.graph import ROUNDED
from fuser.passes.classify import Kind, op_name, tensors_of


def round_both(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
    """Mark, in both graphs, the nodes that decisions of the backward depend on, and the inputs of norms.

    Nodes have the names that they had in the joint graph, from which both graphs were cut.
    """
    if not any(map(_may_stay_unrounded, (*forward.graph.nodes, *backward.graph.nodes))):
        return
    behind = _behind(_decided(backward.graph.nodes), ()) | _normed(forward.graph)
    names = {n.name for n in behind}
    for part in (forward, backward):
        _mark(n for n in part.graph.nodes if n.op == "call_function" and n.name in names)


def _normed(forward: fx.Graph) -> set[fx.Node]:
    """The inputs of norms whose statistics are saved: the backward combines these with the stored, rounded inputs.

    For values far from 0, or groups of two values, the rounding is as large as the normalised values.
    """
    calls = [(op_name(n.target), n) for n in forward.nodes if n.op == "call_function"]
    norms = [n for name, n in calls if name in _WITH_STATISTICS and any(u.args[1] != 0 for u in n.users)]
    inputs = [n.all_input_nodes[0] for n in norms + [n for name, n in calls if name in _FROM_VALUES]]
    for node in inputs:
        if op_name(node.target) in _CONVERSIONS and node.op == "call_function":
            inputs += node.all_input_nodes  # what is stored may be the narrower value
    return set(inputs)


_CONVERSIONS = frozenset({"prims.convert_element_type", "aten._to_copy"})


_FROM_VALUES = frozenset({"aten.logsumexp"})  # its gradient subtracts the result from the values
# Without running statistics a batch norm uses another overload, so all overloads are listed.
_WITH_STATISTICS = frozenset(
    f"aten.{name}"
    for name in (
        "native_group_norm", "native_layer_norm", "_fused_rms_norm", "native_batch_norm", "_native_batch_norm_legit",
        "_native_batch_norm_legit_functional", "_batch_norm_with_update", "_batch_norm_with_update_functional",
        "cudnn_batch_norm", "miopen_batch_norm",
    )
)  # fmt: skip


def round_decided(graph: fx.Graph, kinds: dict[fx.Node, Kind]) -> None:
    """Mark what decisions and marked nodes of a graph depend on, back to stored values: inputs and ATen's results."""
    if not any(map(_may_stay_unrounded, graph.nodes)):
        return
    stored = {n for n, kind in kinds.items() if kind is Kind.EXTERN}
    marked = [n for n in graph.nodes if ROUNDED in n.meta]
    behind = _behind([*marked, *_decided(n for n in graph.nodes if n not in stored)], stored)
    _mark(n for n in behind if n.op == "call_function")
    _mark(n for n in graph.nodes if n.op == "call_function" and _is_shared_summand(n))


# Sums into computed indices, with the position of the argument that is added.
_SUMMANDS = {"aten.index_add": 3, "aten.scatter_add": 3, "aten.scatter_reduce": 3, "aten.index_put": 2}


def _is_shared_summand(node: fx.Node) -> bool:
    """Whether a 16-bit float is both added up in memory, by a scatter, and read by other nodes.

    The sum is rounded there. A weight divided by the sum of weights has eager's value only if both come from rounded
    weights: in float16, small weights lose most of their bits.
    """
    tensors = tensors_of(node.meta.get("val"))
    if len(node.users) < 2 or not any(t.is_floating_point() and t.dtype.itemsize == 2 for t in tensors):
        return False
    for user in node.users:
        if user.op == "call_function" and isinstance(user.target, torch._ops.OpOverload):
            place = _SUMMANDS.get(op_name(user.target), len(user.args))
            if place < len(user.args) and user.args[place] is node:
                return True
    return False


def _decided(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """The nodes on whose values the decision of some call depends."""
    from fuser.lowering.decisive import deciding, reads_elements  # imports all lowerings, which few graphs need

    found: list[fx.Node] = []
    for node in nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            whole = _is_whole(node) and reads_elements(op_name(node.target))
            arguments: Any = node.all_input_nodes if whole else deciding(op_name(node.target), node.args, node.kwargs)
            found += filter(_is_float, _nodes_in(arguments))
    return found


def _nodes_in(value: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.node.map_arg(value, found.append)
    return found


def _is_float(node: fx.Node) -> bool:
    return any(t.is_floating_point() for t in tensors_of(node.meta.get("val")))


def _is_whole(node: fx.Node) -> bool:
    """Whether a result of the call is not a float."""
    return any(not t.is_floating_point() for t in tensors_of(node.meta.get("val")))


def _behind(roots: Iterable[fx.Node], stored: Collection[fx.Node]) -> set[fx.Node]:
    """`roots` and all nodes that their values depend on; the inputs of `stored` nodes are not followed."""
    from fuser.lowering.decisive import reads_elements

    found: set[fx.Node] = set()
    pending = list(roots)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            own = isinstance(node.target, torch._ops.OpOverload) and not reads_elements(op_name(node.target))
            pending += [] if own or node in stored else node.all_input_nodes
    return found


def _mark(nodes: Iterable[fx.Node]) -> None:
    for node in nodes:
        if _may_stay_unrounded(node):
            node.meta[ROUNDED] = True


def _may_stay_unrounded(node: fx.Node) -> bool:
    """Whether kernels may leave a result unrounded: 16-bit floats, and products that are contracted with a sum."""
    tensors = [t for t in tensors_of(node.meta.get("val")) if t.is_floating_point()]
    return any(t.dtype.itemsize < 4 or _contracts(t.device) for t in tensors)


def _contracts(device: torch.device) -> bool:
    target = targets.known(device.type)
    return target is not None and target.contracts


__all__ = ["round_both", "round_decided"]
