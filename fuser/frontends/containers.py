"""Graph inputs that are lists or tuples, as compiled autograd passes them: each item becomes an input."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

Function = Callable[..., Any]
_CONTAINERS = (list, tuple, dict)
_PLAIN = (torch.Tensor, int, float, torch.SymInt, torch.SymFloat)


def flattened(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> tuple[fx.GraphModule, list[Any]] | None:
    """The same graph with one input for each item; None if it uses a container in any other way than to take items."""
    graph = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    inputs: list[Any] = []
    examples = iter(example_inputs)
    for node in gm.graph.nodes:
        value = next(examples) if node.op == "placeholder" else None
        if isinstance(value, _CONTAINERS):
            if not _is_unpacked(node, value):
                return None
            inputs.extend(value)
            for i, users in enumerate(_items(node, len(value))):
                new = graph.placeholder(f"{node.name}_{i}")
                new.meta = dict(users[0].meta) if users else {"example_value": value[i]}
                known.update(dict.fromkeys(users, new))
        elif node not in known:
            inputs += [value] if node.op == "placeholder" else []
            known[node] = graph.node_copy(node, known.__getitem__)
    return fx.GraphModule(gm, graph), inputs


def _is_unpacked(node: fx.Node, value: Any) -> bool:
    """Whether an input is a list of tensors and numbers from which the graph only takes items."""
    if isinstance(value, dict) or not all(isinstance(v, _PLAIN) for v in value):
        return False
    return all(u.target is operator.getitem and u.args[0] is node and type(u.args[1]) is int for u in node.users)


def _items(node: fx.Node, count: int) -> list[list[fx.Node]]:
    """For each index of a container, the nodes that take its item."""
    found: list[list[fx.Node]] = [[] for _ in range(count)]
    for user in node.users:
        found[user.args[1]].append(user)  # type: ignore[index]
    return found


def takes_containers(function: Function, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Function:
    """A function of `gm`'s inputs, given one of their items; lists that the caller gives away are emptied first."""
    nested = [isinstance(value, _CONTAINERS) for value in example_inputs]
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    given_away = [i for i, n in enumerate(placeholders) if nested[i] and n.meta.get("steal_arg")]

    def call(*args: Any) -> Any:
        flat = [v for arg, several in zip(args, nested) for v in (arg if several else (arg,))]
        for i in given_away:
            args[i].clear()
        return function(*flat)

    return call
