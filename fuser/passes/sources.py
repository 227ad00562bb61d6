"""Where in the user's program an operator comes from: notes of Dynamo on nodes, kept through every pass, and read.

Dynamo writes the user's stack into `meta["stack_trace"]` of each node, and the modules around it into
`meta["nn_module_stack"]`. A pass that puts new calls into a graph need not think of that: `kept` follows which node
takes another's place, and `complete` gives a node without a note that of the node it replaced, else of its nearest
argument, else of its nearest reader.
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
    """What is remembered of a node for later: strings alone, which are read when somebody asks."""

    trace: str = ""
    modules: Any = None

    def source(self) -> Source | None:
        """The innermost frame that is not torch's own, else the innermost; None where there is no stack."""
        frames = re.findall(_FRAME, self.trace)
        if not frames:
            return None
        file, line, function, text = next((f for f in reversed(frames) if not f[0].startswith(_TORCH)), frames[-1])
        return Source(file, int(line), function.strip(), text.strip(), self.modules or "")


def notes_of(node: fx.Node) -> Notes:
    """The notes on a node, without the node."""
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
    """The user's line from which a node comes; None where Dynamo knew none."""
    return notes_of(node).source()


def copy_notes(new: fx.Node, old: fx.Node) -> None:
    """Give `new` the notes of `old` that it does not have."""
    for name in NOTES:
        if name in old.meta and not new.meta.get(name):
            new.meta[name] = old.meta[name]


@contextlib.contextmanager
def kept(module: fx.GraphModule) -> Iterator[None]:
    """While passes rewrite the graph of `module`: no node of it is without notes at the end, if any had some."""
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
    """Give each call without notes those of a node near it; see the top of this file."""
    missing = [n for n in graph.nodes if n.op not in ("placeholder", "output") and not n.meta.get(TRACE)]
    for node in missing:  # arguments first: what they got is passed on
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
