"""Evaluates parts of Dynamo's graph that are made of numbers alone, mostly masks and biases of attention.

`torch.tril(torch.ones(t, t))`, comparisons of `arange`s and the like run once, on the CPU. The values show what a mask
is, however it is spelled.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from fuser.passes.calls import value_of, writes
from fuser.passes.hints import are_numbers

LARGEST = 1 << 24  # elements of any intermediate tensor
_MOST_NODES = 32  # that are computed for one constant


def evaluated(node: Any) -> torch.Tensor | None:
    """The value, on the CPU, of a node that depends on no input; None for other nodes, or if a tensor is too large."""
    order = _made_of(node)
    if order is None:
        return None
    known: dict[fx.Node, Any] = {}
    try:
        with torch.no_grad(), _disable_current_modes():
            for n in order:
                args, kwargs = fx.map_arg((n.args, n.kwargs), known.__getitem__)
                known[n] = _run(n, args, {k: "cpu" if k == "device" else v for k, v in kwargs.items()})
    except Exception:  # a device given by position, a dtype that the CPU lacks: too rare for a rule
        return None
    found = known[node]
    value = value_of(node)
    same = isinstance(found, torch.Tensor) and value is not None and found.shape == value.shape
    return found if same and found.dtype is value.dtype else None  # type: ignore[union-attr]


def _made_of(node: Any) -> list[fx.Node] | None:
    """A node and all nodes that it depends on, in order; None if an input, a write or an unknown size is among them."""
    found: dict[fx.Node, None] = {}
    waiting = [node]
    while waiting:
        n = waiting.pop()
        if n in found:
            continue
        if not isinstance(n, fx.Node) or n.op not in ("call_function", "call_method") or len(found) == _MOST_NODES:
            return None
        if not _is_plain(n):
            return None
        found[n] = None
        waiting += n.all_input_nodes
    return [n for n in node.graph.nodes if n in found]


def _is_plain(node: fx.Node) -> bool:
    """Whether a node makes a tensor of known, moderate size, always the same, that no node writes into."""
    value = value_of(node)
    if value is None or not are_numbers(*value.shape, *value.stride()) or distinct(value).numel() > LARGEST:
        return False
    if writes(node) or any(map(writes, node.users)) or node.op == "call_method" and node.target in _DEVICES:
        return False
    return "rand" not in str(getattr(node.target, "__name__", node.target))


_DEVICES = ("cuda", "cpu")


def distinct(t: torch.Tensor) -> torch.Tensor:
    """A tensor without repetitions: dims of stride 0 are reduced to one element."""
    for d, (size, stride) in enumerate(zip(t.shape, t.stride())):
        t = t.narrow(d, 0, 1) if stride == 0 and size > 1 else t
    return t


def _run(node: fx.Node, args: Any, kwargs: Any) -> Any:
    args = tuple(torch.device("cpu") if isinstance(a, torch.device) else a for a in args)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]
