"""Recomputation in the backward: calls that each of their readers recomputes. `norms` marks such calls."""

from __future__ import annotations

from torch import fx

AGAIN = "again"  # marks calls that the backward recomputes; `norms_apart` gives each reader its own copy
_MOST_READERS = 3  # that each get a copy of a call


def norms_apart(module: fx.GraphModule) -> int:
    """A call that the backward recomputes is copied for each reader, whose kernel reads most of its operands anyway."""
    changed = 0
    for node in reversed(list(module.graph.nodes)):
        if AGAIN not in node.meta or not 1 < len(node.users) <= _MOST_READERS:
            continue
        for reader in list(node.users)[1:]:
            with module.graph.inserting_before(reader):
                reader.replace_input_with(node, module.graph.node_copy(node))
            changed += 1
    return changed
