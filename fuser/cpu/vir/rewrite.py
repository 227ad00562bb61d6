"""Traversal of vector IR: `walk` visits nodes, `values` and `statements` make a kernel with replaced ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fuser.cpu.vir import nodes as ir

Rules = Mapping[type, Callable[[Any], ir.Value]]  # the replacement for each kind of value


def parts(node: Any) -> Iterator[Any]:
    """The nodes that a node holds, in order; tuples of them flattened."""
    for name in node.__slots__:
        held = getattr(node, name)
        if isinstance(held, tuple):
            for one in held:
                yield from one if isinstance(one, tuple) else (one,)
        else:
            yield held


def walk(node: Any) -> Iterator[Any]:
    """A node and all nodes inside it (blocks, heads, statements, values) in pre-order."""
    pending = [node]
    while pending:
        now = pending.pop()
        if type(now) in _NODES:
            yield now
            pending += reversed(list(parts(now)))


def values(node: Any, rules: Rules) -> Any:
    """`node` with each value whose kind has a rule replaced by the rule's result, innermost values first.

    Anything that is not a node is left as it is; tuples are rebuilt only if an item changed.
    """
    kind = type(node)
    if kind is tuple:
        made = [values(each, rules) for each in node]
        return tuple(made) if any(a is not b for a, b in zip(made, node)) else node
    if kind not in _NODES:
        return node
    new = {}
    for name in node.__slots__:
        held = getattr(node, name)
        if type(held) in _WALKED and (changed := values(held, rules)) is not held:
            new[name] = changed
    node = dataclasses.replace(node, **new) if new else node
    return rules[kind](node) if kind in rules else node


def statements(kernel: ir.Kernel, change: Callable[[ir.Statement], Sequence[ir.Statement]]) -> ir.Kernel:
    """`kernel` with each statement replaced by the statements that `change` returns for it, innermost first."""

    def changed(body: Sequence[ir.Statement]) -> tuple[ir.Statement, ...]:
        out: list[ir.Statement] = []
        for s in body:
            if isinstance(s, ir.Block):
                inner = changed(s.body)
                same = len(inner) == len(s.body) and all(a is b for a, b in zip(inner, s.body))
                s = s if same else ir.Block(s.head, inner)
            out += change(s)
        return tuple(out)

    return dataclasses.replace(kernel, body=changed(kernel.body))


_NODES = frozenset(
    x for x in vars(ir).values() if isinstance(x, type) and dataclasses.is_dataclass(x) and x is not ir.Scope
)
_WALKED = _NODES | {tuple}  # what nodes hold beside names, numbers and dtypes
