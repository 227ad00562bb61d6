"""Passes over vector IR: `walk` visits values, `values` makes a kernel with others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fuser.cpu.vir import nodes as ir

Rules = Mapping[type, Callable[[Any], ir.Value]]  # what becomes of a kind of value

def parts(node: Any) -> Iterator[Any]:
    """The nodes that a node holds, in order."""
    for name in node.__slots__:
        held = getattr(node, name)
        if isinstance(held, tuple):
            for one in held:
                yield from one if isinstance(one, tuple) else (one,)
        else:
            yield held


def walk(node: Any) -> Iterator[Any]:
    """A node and all that it holds: blocks, heads, statements and values, each before its own."""
    pending = [node]
    while pending:
        now = pending.pop()
        if type(now) in _NODES:
            yield now
            pending += reversed(list(parts(now)))


def values(node: Any, rules: Rules) -> Any:
    """`node` with each value that has a rule for its kind replaced by what that makes of it, the inner ones first.

    What is no node is left as it is; tuples of nodes are made anew.
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
        if (changed := values(held, rules)) is not held:
            new[name] = changed
    node = dataclasses.replace(node, **new) if new else node
    return rules[kind](node) if kind in rules else node


def statements(kernel: ir.Kernel, change: Callable[[ir.Statement], Sequence[ir.Statement]]) -> ir.Kernel:
    """`kernel` with each statement replaced by those that `change` makes of it, once those in it have been."""

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
