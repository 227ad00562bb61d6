"""One step of an outer program: what it defines, reads and writes, as text and as a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fuser.frontends import batching
from fuser.passes.classify import is_mutable
from fuser.passes.extract import GroupPlan

aten = torch.ops.aten
_PLAIN_NAMESPACES = ("aten", "prims", "mkldnn", "fuser")
_MOVES_MEMORY = frozenset({"aten::set_", "aten::resize_", "aten::resize_as_"})
# Of a group: its plan, what is called, the numbers before its inputs, whether that gives a tuple.
Launch = tuple[GroupPlan, Callable[..., Any], tuple[Any, ...], bool]


class Statement:
    """One step: what it defines, what it reads, its place in the original order, which inputs it writes.

    `node` is the one that it calls, or `launch` the group; a statement that makes several calls has neither.
    """

    def __init__(
        self,
        defines: Sequence[fx.Node],
        reads: Sequence[fx.Node],
        rank: int,
        text: str,
        writes: Sequence[fx.Node] = (),
        call: batching.Call | None = None,
        first: bool = False,
        grouped: bool = False,
        node: fx.Node | None = None,
        launch: Launch | None = None,
    ) -> None:
        self.defines, self.reads, self.rank, self.text = tuple(defines), tuple(reads), rank, text
        self.writes = tuple(writes)
        self.first = first  # see `order.Ordered`
        self.grouped = grouped
        self.call = call  # of a fusion which can be called for several sets of arguments at once
        self.node, self.launch = node, launch

    @property
    def written(self) -> tuple[fx.Node, ...]:
        """What it may write to, bases and views of them."""
        return (*self.writes, *(self.node.all_input_nodes if self.node is not None and is_mutable(self.node) else ()))


def moves_memory(node: fx.Node) -> bool:
    """Whether a call may give a tensor that exists other sizes or other memory."""
    if not is_mutable(node) or not isinstance(node.target, torch._ops.OpOverload):
        return False
    return node.target.namespace not in _PLAIN_NAMESPACES or node.target._schema.name in _MOVES_MEMORY
