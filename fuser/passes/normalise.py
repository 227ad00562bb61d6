"""Rewrites of dynamo's graph that bring different spellings of one thing together. All keep writes in their places."""

from __future__ import annotations

import operator

from torch import fx

from fuser.passes.calls import shape_of, value_of, writes


def name_written(module: fx.GraphModule) -> int:
    """Who reads a tensor after a write in place reads the write's result, which is that tensor."""
    order = {node: i for i, node in enumerate(module.graph.nodes)}
    changed = 0
    for node in module.graph.nodes:
        if not _returns_what_it_writes(node):
            continue
        written = node.args[0]
        for user in [u for u in written.users if order[u] > order[node]]:
            user.replace_input_with(written, node)
            changed += 1
    return changed


def _returns_what_it_writes(node: fx.Node) -> bool:
    written = value_of(node.args[0]) if node.args else None
    if written is None or not writes(node) or shape_of(node) != shape_of(node.args[0]):
        return False  # `n += 1` of a number makes a new one
    if node.op == "call_method":
        return True
    return getattr(operator, getattr(node.target, "__name__", ""), None) is node.target and node.target not in (
        operator.setitem,
        operator.delitem,
    )
