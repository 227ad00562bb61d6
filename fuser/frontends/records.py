"""What the dynamo frontend remembers of each graph that it compiled, for reports."""

from __future__ import annotations

import collections
from dataclasses import dataclass, field
from typing import Any

from fuser.passes.runner import PassRecord


@dataclass(frozen=True)
class GroupRecord:
    """One fusion group of a graph: its key, its operators in order, how many tensors go in and out."""

    key: int
    ops: tuple[str, ...]
    inputs: int
    outputs: int


@dataclass(frozen=True)
class UnfusedOp:
    """One operator that runs on ATen: its node, what it calls, and why it is not in a group."""

    node: str
    op: str
    reason: str


@dataclass(frozen=True)
class CompiledGraph:
    """One graph of `torch.compile`.

    `route` is "direct" (the program is called as is), "wrapped" (inside AOTAutograd's runtime wrapper) or "eager" (not
    compiled: `reason` says why). `seconds` leaves out tracing. `stage` is "inference", "forward" or "backward".
    `by_eager` counts later calls that ran by eager nevertheless, by reason.
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

    @property
    def ops_fused(self) -> int:
        return sum(len(g.ops) for g in self.groups)

    @property
    def keys(self) -> tuple[int, ...]:
        """The different fusions of the graph, in order of first use."""
        return tuple(dict.fromkeys(g.key for g in self.groups))


_history: collections.deque[CompiledGraph] = collections.deque(maxlen=128)


def remember(record: CompiledGraph) -> None:
    """Add a record; the oldest of more than 128 is forgotten."""
    _history.append(record)


def compilations() -> list[CompiledGraph]:
    """Records of the graphs compiled last, oldest first."""
    return list(_history)


def last_compilation() -> CompiledGraph | None:
    """The record of the graph compiled last; None before the first."""
    return _history[-1] if _history else None


def forget_compilations() -> None:
    """Empty the history."""
    _history.clear()
