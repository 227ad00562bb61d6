"""Calls written into a functional graph, with the values that they have."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx


class Writer:
    """Puts calls before a node, with its notes and with the values that they have."""

    def __init__(self, at: fx.Node) -> None:
        self.at = at
        self.mode: Any = getattr(at.meta["val"], "fake_mode", None)

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        with self.at.graph.inserting_before(self.at):
            node = self.at.graph.call_function(target, args, kwargs)
        values: Any = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        with torch.no_grad(), self.mode:
            value = target(*values[0], **values[1])
        node.meta = {**self.at.meta, "val": value}
        return node

    def size(self, node: fx.Node, dim: int) -> Any:
        """A size of a tensor: a number, or a call that gives a symbol."""
        known = node.meta["val"].shape[dim]
        return known if type(known) is int else self(torch.ops.aten.sym_size.int, node, dim)

    def instead(self, node: fx.Node) -> None:
        """`node` takes the place of the node before which calls were put."""
        node.meta = {**self.at.meta, **node.meta}
        self.at.replace_all_uses_with(node)
        self.at.graph.erase_node(self.at)
