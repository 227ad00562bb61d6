"""The Dynamo frontend's records of compiled graphs, for reports."""

from __future__ import annotations

import collections
import contextlib
import sys
from collections.abc import Iterator
from dataclasses import field
from typing import Any

from fuser.lazy_dataclasses import dataclass
from fuser.passes.runner import PassRecord
from fuser.passes.sources import Notes, Source
from fuser.reasons import code_of


@dataclass(frozen=True)
class GroupRecord:
    """One fusion group of a graph: its key, its operators in order, the numbers of input and output tensors.

    `notes` give the source of each operator. `bytes` are those of its inputs and results, each once, in the sizes seen
    while tracing. `apart`: groups that read this one but do not run with it, with the reason.
    """

    key: int
    ops: tuple[str, ...]
    inputs: int
    outputs: int
    notes: tuple[Notes, ...] = ()
    bytes: int = 0
    apart: tuple[tuple[int, str], ...] = ()

    @property
    def sources(self) -> tuple[Source | None, ...]:
        """The user's line of each operator; None if Dynamo knew none."""
        return tuple(n.source() for n in self.notes)


@dataclass(frozen=True)
class UnfusedOp:
    """One operator that runs on ATen: its node, its name, and why it is not in a group.

    `bytes` pass between it and other operators of the graph, in the sizes seen while tracing; one kernel for all would
    not move them. `reads` and `read_by` are the numbers of the groups before and after it.
    """

    node: str
    op: str
    reason: str
    notes: Notes = Notes()
    bytes: int = 0
    reads: tuple[int, ...] = ()
    read_by: tuple[int, ...] = ()

    @property
    def source(self) -> Source | None:
        """The user's line; None if Dynamo knew none."""
        return self.notes.source()

    @property
    def code(self) -> str:
        """The reason's code, one of `fuser.reasons.REASONS`."""
        return code_of(self.reason)


@dataclass(frozen=True)
class CompiledGraph:
    """One graph of `torch.compile`.

    `route` is "direct" (the program is called directly, or Dynamo's graph if nothing is fused), "wrapped" (inside
    AOTAutograd's runtime wrapper) or "eager" (not compiled: `reason` says why). `seconds` excludes tracing. `stage` is
    "inference", "forward" or "backward".
    `by_eager` counts later calls that nevertheless ran in eager, by reason. `compile_id` is Dynamo's name of the
    compilation, such as "0/1": frame 0, compiled for the second time. `flows` are the values that pass between groups
    ("group 0") and operators on ATen (their nodes' names): from, to, and bytes. `body`: for a graph that an operator
    of another graph runs, its name there and the operator, such as "true_graph_0 of cond".
    """

    route: str
    reason: str = ""
    groups: tuple[GroupRecord, ...] = ()
    unfused: tuple[UnfusedOp, ...] = ()
    passes: tuple[PassRecord, ...] = ()
    source: str = ""
    seconds: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)
    stage: str = "inference"
    by_eager: collections.Counter[str] = field(default_factory=collections.Counter)
    flows: tuple[tuple[str, str, int], ...] = ()
    compile_id: str = field(default_factory=lambda: _compile_id())
    body: str = ""

    @property
    def ops_fused(self) -> int:
        """The number of calls in groups."""
        return sum(len(g.ops) for g in self.groups)

    @property
    def keys(self) -> tuple[int, ...]:
        """The distinct fusions of the graph, in order of first use."""
        return tuple(dict.fromkeys(g.key for g in self.groups))


def _compile_id() -> str:
    """Dynamo's name of the current compilation; "" outside of one."""
    guards = sys.modules.get("torch._guards")
    found = guards.CompileContext.current_compile_id() if guards is not None else None
    return str(found) if found is not None else ""


_history: collections.deque[CompiledGraph] = collections.deque(maxlen=128)


_listeners: list[list[CompiledGraph]] = []


def remember(record: CompiledGraph) -> None:
    """Add a record; beyond 128, the oldest is dropped."""
    _history.append(record)
    for found in _listeners:
        found.append(record)


@contextlib.contextmanager
def collected(found: list[CompiledGraph] | None = None) -> Iterator[list[CompiledGraph]]:
    """The records that any thread adds in the block; appended to `found`, if given."""
    found = [] if found is None else found
    _listeners.append(found)
    try:
        yield found
    finally:
        _listeners[:] = [other for other in _listeners if other is not found]


def compilations() -> list[CompiledGraph]:
    """The records of the latest compiled graphs, oldest first."""
    return list(_history)


def last_compilation() -> CompiledGraph | None:
    """The record of the last compiled graph; None before the first."""
    return _history[-1] if _history else None


def forget_compilations() -> None:
    """Empty the history."""
    _history.clear()
