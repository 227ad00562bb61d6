"""Recognises additive attention masks: tensors of zeros and huge negative numbers.

`(1 - padding) * -1e9` and the like are masks if `padding` is made of integers or bools. Under autocast the fused
operator rounds its bias. That keeps the meaning of such a mask, but changes other biases.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fuser.passes.calls import call_of, number_of, value_of

HUGE = -1e9  # at most this: such a score has no weight beside others
_DEEPEST = 12  # calls behind each other that the question follows
_MOVES = frozenset(
    "getitem unsqueeze squeeze view reshape expand expand_as transpose permute contiguous to float type detach".split()
)
_FUNCTIONS: dict[Any, str] = {
    operator.getitem: "getitem", torch.unsqueeze: "unsqueeze", torch.squeeze: "squeeze", torch.reshape: "reshape",
    torch.transpose: "transpose", torch.permute: "permute", operator.sub: "sub", torch.sub: "sub", torch.rsub: "rsub",
    operator.mul: "mul", torch.mul: "mul", operator.add: "add", torch.add: "add",
}  # fmt: skip


def _name(node: fx.Node) -> str:
    if node.op == "call_method":
        return str(node.target)
    return _FUNCTIONS.get(node.target, "") if node.op == "call_function" else ""


def is_mask(node: Any, depth: int = _DEEPEST) -> bool:
    """Whether each element is certainly 0 or at most `HUGE`, as far as the graph shows."""
    if not isinstance(node, fx.Node) or depth == 0 or node.kwargs and _name(node) not in ("to", "type"):
        return False
    name = _name(node)
    if name in _MOVES:
        return is_mask(node.args[0], depth - 1)
    if name != "mul" or len(node.args) != 2:
        return False
    for factor, other in (node.args, node.args[::-1]):
        number = _number(factor)
        if number is not None and -float("inf") < number <= HUGE:
            return _is_whole(other, depth - 1)
    return False


def _number(value: Any) -> float | None:
    return number_of(value) if not isinstance(value, fx.Node) or call_of(value) is not None else None


def _is_whole(node: Any, depth: int) -> bool:
    """Whether each element is a whole number: of an integer dtype, or moved, cast or added from such tensors."""
    if isinstance(node, (int, float)):
        return float(node).is_integer()
    value = value_of(node)
    if value is None or depth == 0:
        return False
    if not value.dtype.is_floating_point and not value.dtype.is_complex:
        return True
    name = _name(node)
    if name in _MOVES:
        return _is_whole(node.args[0], depth - 1)
    if name in ("add", "sub", "rsub") and len(node.args) == 2 and not node.kwargs:
        return all(_is_whole(a, depth - 1) for a in node.args)
    return False
