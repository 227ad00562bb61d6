"""Finds values whose last bits matter: those that are compared, searched, cast to integers or viewed as bits.

With `numerics="fast"` a float16 or bfloat16 value that stays in a register is not rounded. A comparison of such a value
could differ from eager's, and from that of another kernel, which recomputes the value or loads it from memory. So every
operator that a decision depends on rounds its result, as eager does, and every kernel has the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fuser.canonical.graph import CanonicalGraph, refs_of
from fuser.lowering.registry import DECISIVE

_BY_EXPONENT = frozenset({"aten.pow", "aten.float_power"})  # 0 ** y jumps at y = 0


def deciding(op: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The arguments of a call whose last bits may decide between results that are far apart.

    In `type_as` and `copy` the other argument's dtype decides whether a float becomes an integer; it is not known here.
    """
    every = (*args, *kwargs.values())
    if op in DECISIVE:
        return tuple(args[i] for i in DECISIVE[op] if i < len(args)) or every
    if kwargs.get("rounding_mode") is not None:
        return every
    if op in _BY_EXPONENT:
        return () if len(args) > 1 and isinstance(args[1], (int, float)) else every
    given = [a for a in every if isinstance(a, torch.dtype)]
    return every if any(not d.is_floating_point for d in given) or (given and op == "aten.view") else ()


def reads_elements(op: str) -> bool:
    """Whether an operator reads its arguments' elements, and not only their sizes and dtypes."""
    name = op.split(".")[1] if op.startswith("aten.") else op
    return not (op.startswith("fuser.") or name.startswith("new_") or name.endswith("_like"))


def rounded_nodes(graph: CanonicalGraph) -> frozenset[int]:
    """The nodes whose results are rounded: those marked as rounded, and all that a decision in the graph depends on."""
    found = {node.index for node in graph.calls if node.rounded}
    for node in reversed(graph.calls):
        if node.index in found:
            found.update(node.refs() if reads_elements(node.op) else ())
        else:
            found.update(refs_of(deciding(node.op, node.args, dict(node.kwargs))))
    return frozenset(found)


__all__ = ["deciding", "reads_elements", "rounded_nodes"]
