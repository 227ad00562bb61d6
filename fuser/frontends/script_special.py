"""Groups whose code depends on values of a call: a dim, a dtype, a flag, whether an optional argument is None.

Such a group is registered for each of a few combinations of values; calls with other values run its graph on ATen.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from fuser import forks
from fuser.frontends.torchscript import enumerated

MOST = 8  # combinations of values for which one group is registered
Function = Callable[..., Any]
Group = fx.Graph | fx.GraphModule


class Specialised:
    """Runs a group for the values of a call. `held` is the registration of `template`, in which nothing is constant.

    `by_value` and `by_presence` are positions of arguments: the former are constants of each graph that `register`
    gets, the latter only if they are None.
    """

    def __init__(
        self, template: Group, held: Any, by_value: Sequence[int], by_presence: Sequence[int],
        register: Callable[[Group], tuple[int, Function]],
    ) -> None:  # fmt: skip
        self._held = held
        self._template = template if isinstance(template, fx.GraphModule) else fx.GraphModule({}, template)
        self._by_value, self._by_presence = tuple(by_value), tuple(by_presence)
        self._register = register
        self._made: dict[Any, tuple[Function, Function | None]] = {}
        self._lock = forks.lock()
        self.keys: dict[Any, int] = {}  # of the registrations, by values
        self.reasons: dict[str, int] = {}  # why calls ran on ATen, with the number of combinations of values

    def __call__(self, *args: Any) -> Any:
        word = self._word(args)
        function, chosen = self._made.get(word) or self._make(word, args)
        return function(*args) if chosen is None else function(*chosen(args))

    def _word(self, args: Sequence[Any]) -> Any:
        """The key of the graph for a call."""
        values = [args[i] for i in self._by_value]
        plain = tuple(tuple(v) if isinstance(v, list) else repr(v) if isinstance(v, float) else v for v in values)
        return plain + tuple(args[i] is None for i in self._by_presence)

    def _make(self, word: Any, args: Sequence[Any]) -> tuple[Function, Function | None]:
        with self._lock:
            if word in self._made:
                return self._made[word]
            if len(self.keys) >= MOST:
                return self._on_aten(f"more than {MOST} combinations of values")
            known = {i: args[i] for i in self._by_value} | {i: None for i in self._by_presence if args[i] is None}
            try:
                key, handle = self._register(with_values(self._template, known))
            except Exception as e:  # the values do not suit a kernel; ATen reports invalid ones
                made = self._on_aten(f"{type(e).__name__}: {(str(e).strip() or '.').splitlines()[0]}")
                if len(self._made) < 8 * MOST:
                    self._made[word] = made
                return made
            self.keys[word] = key
            rest = [i for i in range(len(args)) if i not in known]
            self._made[word] = handle, _picker(rest)
            return self._made[word]

    def _on_aten(self, reason: str) -> tuple[Function, None]:
        self.reasons[reason] = self.reasons.get(reason, 0) + 1
        return self._template, None


def _picker(positions: Sequence[int]) -> Function:
    if len(positions) > 1:
        return operator.itemgetter(*positions)
    return lambda args: tuple(args[i] for i in positions)


def with_values(template: fx.GraphModule, known: Mapping[int, Any]) -> Group:
    """The graph for these values of inputs, by position; what depends on them alone is computed."""
    made = fx.Graph()
    env: dict[fx.Node, Any] = {}
    inputs = [n for n in template.graph.nodes if n.op == "placeholder"]
    for node in template.graph.nodes:
        if node in inputs and inputs.index(node) in known:
            value = known[inputs.index(node)]
            env[node] = tuple(value) if isinstance(value, list) else value
            continue
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            args, kwargs = _enumerated(node.target, args, kwargs)
        elif node.op == "call_function" and not any(isinstance(a, fx.Node) for a in tree_leaves((args, kwargs))):
            env[node] = node.target(*args, **kwargs)
            continue
        env[node] = made.create_node(node.op, node.target, args, kwargs, node.name, node.type)
    made.lint()
    return fx.GraphModule(template, made) if any(n.op == "get_attr" for n in made.nodes) else made


def _enumerated(target: Any, args: tuple[Any, ...], kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments in which dtypes and the like, numbers in TorchScript, are torch objects."""
    kinds = {a.name: str(a.real_type) for a in target._schema.arguments}
    positional = tuple(enumerated(kind, a) for kind, a in zip(kinds.values(), args, strict=False))
    return positional, {n: enumerated(kinds[n], a) for n, a in kwargs.items()}
