"""One step of an outer program: the values that it defines, reads and writes, as text and as a call."""

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
# Of a group: its plan, the callable, the numbers before its inputs, whether it returns a tuple.
Launch = tuple[GroupPlan, Callable[..., Any], tuple[Any, ...], bool]


class Statement:
    """One step: the values it defines and reads, its position in the original order, the inputs it writes.

    `node` is the node that it calls, or `launch` the group; a statement that makes several calls has neither.
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
        self.call = call  # of a fusion that can be called for several sets of arguments at once
        self.node, self.launch = node, launch

    @property
    def written(self) -> tuple[fx.Node, ...]:
        """The tensors that it may write, or bases or views of which it writes."""
        return (*self.writes, *(self.node.all_input_nodes if self.node is not None and is_mutable(self.node) else ()))


def moves_memory(node: fx.Node) -> bool:
    """Whether a call may change the sizes or the memory of an existing tensor."""
    if not is_mutable(node) or not isinstance(node.target, torch._ops.OpOverload):
        return False
    return node.target.namespace not in _PLAIN_NAMESPACES or node.target._schema.name in _MOVES_MEMORY
