"""What a backward computes again beside each of its readers; `norms` marks such calls."""

from __future__ import annotations

from torch import fx

AGAIN = "again"  # marks calls that the backward computes again; `norms_apart` gives each reader its own
_MOST_READERS = 3


def norms_apart(module: fx.GraphModule) -> int:
    """What a backward computes again is computed by each reader, whose kernel has read most of what it takes."""
    changed = 0
    for node in reversed(list(module.graph.nodes)):
        if AGAIN not in node.meta or not 1 < len(node.users) <= _MOST_READERS:
            continue
        for reader in list(node.users)[1:]:
            with module.graph.inserting_before(reader):
                reader.replace_input_with(node, module.graph.node_copy(node))
            changed += 1
    return changed
