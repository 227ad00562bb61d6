"""The line of the user's program that an operator comes from: Dynamo's notes on nodes, kept through every pass.

Dynamo writes the user's stack into `meta["stack_trace"]` of each node, and the modules around it into
`meta["nn_module_stack"]`. A pass need not copy these to its new calls: `kept` records which node replaces another, and
`complete` gives a node without notes those of the node that it replaced, else of its nearest argument, else of its
nearest reader.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from fuser.lazy_dataclasses import dataclass

TRACE = "stack_trace"
NOTES = (TRACE, "nn_module_stack", "fwd_nn_module_stack")
_FRAME = r'File "([^"\n]+)", line (\d+), in ([^\n]+)(?:\n[ \t]+([^\n]*))?'
_TORCH = os.path.dirname(torch.__file__) + os.sep
_NAME = r"\['?([^\]']+)'?\]"


@dataclass(frozen=True)
class Source:
    """One line of the user's program. `module` is the path of the innermost module around it, such as "layers.0"."""

    file: str
    line: int
    function: str
    text: str = ""
    module: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Notes:
    """The notes of a node as strings, which are parsed on demand."""

    trace: str = ""
    modules: Any = None

    def source(self) -> Source | None:
        """The innermost frame outside torch, else the innermost frame; None without a stack."""
        frames = re.findall(_FRAME, self.trace)
        if not frames:
            return None
        file, line, function, text = next((f for f in reversed(frames) if not f[0].startswith(_TORCH)), frames[-1])
        return Source(file, int(line), function.strip(), text.strip(), self.modules or "")


def notes_of(node: fx.Node) -> Notes:
    """The notes of a node, without a reference to the node."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    last = next(reversed(stack.values()), None) if isinstance(stack, dict) else None
    path = last[0] if isinstance(last, tuple) and last and isinstance(last[0], str) else ""
    return Notes(str(node.meta.get(TRACE) or ""), _plain(path) if path else "")


def _plain(path: str) -> str:
    """`layers.0.norm` for `L['self'].layers[0].norm`."""
    whole = re.sub(_NAME, r".\1", path).lstrip(".")
    head, _, rest = whole.partition(".")
    return (rest.removeprefix("self").lstrip(".") or rest) if head in ("L", "G") else whole


def source_of(node: fx.Node) -> Source | None:
    """The user's line from which a node comes; None if Dynamo recorded none."""
    return notes_of(node).source()


def copy_notes(new: fx.Node, old: fx.Node) -> None:
    """Copy the notes of `old` to `new`, where it has none."""
    for name in NOTES:
        if name in old.meta and not new.meta.get(name):
            new.meta[name] = old.meta[name]


@contextlib.contextmanager
def kept(module: fx.GraphModule) -> Iterator[None]:
    """Follow replacements while passes rewrite the graph of `module`; at the end complete the nodes' notes."""
    replaced: dict[str, fx.Node] = {}

    def follow(old: fx.Node, new: str, user: fx.Node) -> None:
        replaced.setdefault(new, old)

    module._register_replace_node_hook(follow)
    try:
        yield
    finally:
        module._unregister_replace_node_hook(follow)
    complete(module.graph, replaced)


def complete(graph: fx.Graph, replaced: dict[str, fx.Node] | None = None) -> None:
    """Give each call without notes those of a nearby node, as the module's docstring says."""
    missing = [n for n in graph.nodes if n.op not in ("placeholder", "output") and not n.meta.get(TRACE)]
    for node in missing:  # arguments first, since their notes may be passed on
        old = (replaced or {}).get(node.name)
        near = [*([old] if old is not None else []), *node.all_input_nodes]
        _take_first(node, near)
    for node in reversed(missing):
        if not node.meta.get(TRACE):
            _take_first(node, list(node.users))


def _take_first(node: fx.Node, near: list[fx.Node]) -> None:
    found = next((n for n in near if n.meta.get(TRACE)), None)
    if found is not None:
        copy_notes(node, found)


__all__ = ["NOTES", "Notes", "Source", "complete", "copy_notes", "kept", "notes_of", "source_of"]
