"""Calls of Dynamo's graphs by meaning: `a @ b`, `a.matmul(b)` and `torch.matmul(a, b)` are the same call."""

from __future__ import annotations

import operator
import types
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from fuser.canonical import mutation
from fuser.lazy_dataclasses import dataclass
from fuser.startup import import_at_rest

_NAMES: dict[Any, str] = {
    operator.matmul: "matmul", torch.matmul: "matmul", torch.bmm: "matmul", torch.functional.einsum: "matmul",
    torch.baddbmm: "baddbmm",
    torch.einsum: "matmul", operator.mul: "mul", operator.imul: "mul", torch.mul: "mul", torch.multiply: "mul",
    operator.truediv: "div", operator.itruediv: "div", torch.div: "div", torch.true_divide: "div",
    operator.add: "add", operator.iadd: "add", torch.add: "add", torch.masked_fill: "masked_fill",
    torch.where: "where", torch.softmax: "softmax", F.softmax: "softmax", F.dropout: "dropout",
    torch.dropout: "dropout", torch.transpose: "transpose", torch.swapaxes: "transpose", torch.full: "full",
    torch.permute: "permute",
    torch.tensor: "full", operator.getitem: "getitem", F.batch_norm: "batch_norm", torch.conv1d: "conv",
    torch.conv2d: "conv", torch.conv3d: "conv", torch.split: "split", torch.chunk: "chunk", torch.cat: "cat",
}  # fmt: skip
_METHODS = {
    "matmul": "matmul", "bmm": "matmul", "mul": "mul", "mul_": "mul", "div": "div", "div_": "div", "add": "add",
    "add_": "add", "masked_fill": "masked_fill", "masked_fill_": "masked_fill", "where": "where", "softmax": "softmax",
    "transpose": "transpose", "swapaxes": "transpose", "split": "split", "chunk": "chunk",
}  # fmt: skip


@dataclass(frozen=True)
class Call:
    """A node's meaning by name, and its arguments as written."""

    node: fx.Node
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def arg(self, place: int, name: str, default: Any = None) -> Any:
        """An argument given by position or by name."""
        return self.args[place] if place < len(self.args) else self.kwargs.get(name, default)


def call_of(node: Any) -> Call | None:
    """A node as a call: of a function in the table, or of any method by its name; None for other nodes."""
    if not isinstance(node, fx.Node):
        return None
    if node.op == "call_method":
        name = _METHODS.get(str(node.target), str(node.target))
    elif node.op == "call_function" and node.target in _NAMES:
        name = _NAMES[node.target]
    else:
        return None
    args = node.args
    if name == "where" and node.op == "call_method" and len(args) == 3:
        args = (args[1], args[0], args[2])  # x.where(condition, other)
    return Call(node, name, args, dict(node.kwargs))


def called(graph: fx.Graph) -> frozenset[str]:
    """The names of a graph's calls.

    "aten.add" for an overload of ATen, the name of `call_of` for a function or method of torch, else the callable's
    own.
    """
    return frozenset(map(_name_of, (node for node in graph.nodes if node.op in ("call_function", "call_method"))))


def _name_of(node: fx.Node) -> str:
    target: Any = node.target
    if node.op == "call_method":
        return _METHODS.get(str(target), str(target))
    if isinstance(target, torch._ops.OpOverload):
        return str(target.overloadpacket)
    return _NAMES[target] if target in _NAMES else str(getattr(target, "__name__", target))


def own_operator(name: str) -> torch._ops.OpOverload:
    """The operator `fuser::name`, which the op tables register. They are imported here: few processes need them."""
    import_at_rest("fuser.ops")
    found: torch._ops.OpOverload = getattr(torch.ops.fuser, name).default
    return found


def is_dead_dropout(call: Call) -> bool:
    """Whether a dropout returns its argument."""
    return call.name == "dropout" and (call.arg(2, "training", default=True) is False or call.arg(1, "p", 0.5) == 0)


def value_of(node: Any) -> torch.Tensor | None:
    """The tensor recorded for a node of Dynamo's graph, or None."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def shape_of(node: Any) -> tuple[str, ...] | None:
    """A node's sizes as text, so that comparing them adds no guard; None without a tensor."""
    value = value_of(node)
    return tuple(map(str, value.shape)) if value is not None else None


def number_of(value: Any) -> float | None:
    """The value of a number, or of a 0-dim tensor made of a number; None for anything else."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    call = call_of(value)
    if call is None or call.name != "full" or value.target not in (torch.full, torch.tensor):
        return None
    filled = call.arg(1, "fill_value") if value.target is torch.full else call.arg(0, "data")
    if value.target is torch.full and list(call.arg(0, "size") or ()) != []:
        return None
    return float(filled) if isinstance(filled, (int, float)) and not isinstance(filled, bool) else None


def writes(node: fx.Node) -> bool:
    """Whether a node of a graph may write into a tensor that existed before."""
    return mutation.writes(node.op, node.target, node.args, node.kwargs)


def writers(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """The nodes of Dynamo's graph that may write into a tensor that existed before, but not norms' own statistics.

    Most other nodes are passed over by their names, because a look at schemas takes 13 µs.
    """
    return [n for n in nodes if _may_write(n) and writes(n) and "norm" not in _name_of(n)]


def _may_write(node: fx.Node) -> bool:
    if node.op == "call_method":
        return str(node.target).endswith("_")
    if node.op != "call_function":
        return False
    target: Any = node.target
    if isinstance(target, (types.FunctionType, torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return True
    name, home = str(getattr(target, "__name__", target)), getattr(target, "__module__", None)
    return name.endswith("_") or home == "_operator" or "out" in node.kwargs


def position_of_writes(nodes: list[fx.Node]) -> list[int]:
    """The positions, in a list of nodes, of those that may write into a tensor that existed before."""
    return [i for i, node in enumerate(nodes) if writes(node)]


def emit(graph: fx.Graph, function: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A new call at the graph's insertion point, with its value; LookupError if the graph has no fake values."""
    node = graph.call_function(function, args, kwargs)
    values, named = fx.node.map_arg((args, kwargs), lambda a: a.meta["example_value"])
    candidates = (*values, *(n.meta.get("example_value") for n in graph.nodes))
    mode = next((m for v in candidates if (m := getattr(v, "fake_mode", None)) is not None), None)
    if mode is None:
        raise LookupError("no value of this graph is a fake tensor")
    with mode, torch.no_grad():
        node.meta["example_value"] = function(*values, **named)
    return node


def erase_unread(node: fx.Node) -> None:
    """Erase a call without readers, and its inputs that had no other reader."""
    todo = [node]
    while todo:
        node = todo.pop()
        if node.op == "call_function" and not node.users and not node._erased:
            todo += node.all_input_nodes
            node.graph.erase_node(node)


def put_for(node: fx.Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> fx.Node:
    """Replace a node by a call, which keeps the metadata of the node's value. Returns the call."""
    with node.graph.inserting_before(node):
        new = node.graph.call_function(target, args, kwargs)
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)
    return new


@dataclass(frozen=True)
class Autocast:
    """The state of autocast at a node: dtypes by device type. In one region no node switches autocast."""

    region: int
    dtypes: tuple[tuple[str, torch.dtype], ...]

    def dtype(self, device: str) -> torch.dtype | None:
        """The dtype to which products on a device are cast; None without autocast."""
        return dict(self.dtypes).get(device)


def autocasts(nodes: list[fx.Node]) -> list[Autocast]:
    """The state of autocast at each node of Dynamo's graph."""
    now = {d: torch.get_autocast_dtype(d) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)}
    stack: list[dict[str, torch.dtype]] = []
    found, region = [], 0
    for node in nodes:
        if node.target is torch.amp.autocast_mode._enter_autocast:
            stack.append(dict(now))
            device, dtype, enabled = (*node.args, None, True)[:3]
            now.pop(str(device), None)
            if enabled:
                now[str(device)] = dtype or torch.get_autocast_dtype(str(device))  # type: ignore[assignment]
            region += 1
        elif node.target is torch.amp.autocast_mode._exit_autocast:
            now = stack.pop() if stack else {}
            region += 1
        found.append(Autocast(region, tuple(now.items())))
    return found
