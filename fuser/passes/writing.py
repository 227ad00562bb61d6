"""Creates calls in a functional graph, with their values."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx


class Writer:
    """Creates calls before a node, with the node's notes and their own values."""

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
        """A size of a tensor: a number, or a node that computes a symbol."""
        known = node.meta["val"].shape[dim]
        return known if type(known) is int else self(torch.ops.aten.sym_size.int, node, dim)

    def instead(self, node: fx.Node) -> None:
        """Replace the node that calls were put before by `node`."""
        node.meta = {**self.at.meta, **node.meta}
        self.at.replace_all_uses_with(node)
        self.at.graph.erase_node(self.at)
