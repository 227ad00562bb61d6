"""The spelling of a graph's calls, as far as a caller can observe it.

Every spelling of a call is one ATen operator, so graphs in different spellings share kernels. If all operands of a call
are numbers, spellings differ: `2.5 * 2` is a number, `torch.mul(2.5, 2)` a tensor, `(2.5).mul(2)` an error.
"""

from __future__ import annotations

import _operator
from typing import Any

import torch

from fuser.canonical.build import Registered
from fuser.canonical.graph import refs_of

_PYTHONS = (_operator.__name__, "operator", "math", "builtins")


def spelling_of(registered: Registered) -> str:
    """A letter for each call whose operands may all be numbers; "" for graphs of a tracer, whose inputs are known."""
    if registered.graph.functional:
        return ""
    numbers: set[int] = set()  # rows whose value may be a number
    letters = []
    for row in registered.rows:
        if row.op == "placeholder":
            numbers.add(row.index)
        elif row.op in ("call_function", "call_method"):
            read = list(refs_of((row.args, row.kwargs)))
            if read and numbers.issuperset(read):
                letters.append(_letter(row.op, row.target))
                if letters[-1] == "o":
                    numbers.add(row.index)
    return "".join(letters)


def _letter(op: str, target: Any) -> str:
    if op == "call_method":
        return "m"
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return "a"
    return "o" if getattr(target, "__module__", None) in _PYTHONS else "f"
