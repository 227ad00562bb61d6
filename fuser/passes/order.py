"""The order of a program's steps, by dependences through reads, writes and random numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

from torch import fx

from fuser.lazy_dataclasses import dataclass
from fuser.passes.classify import MARK, base_of, is_mutable, may_draw
from fuser.passes.extract import GroupPlan
from fuser.passes.grouping import is_grown


class Ordered(Protocol):
    """A step: what it defines, reads and writes, its rank in the original order, and its node if it is one call.

    A write that is `first` comes after all groups that read what it writes. If it is a group, it comes after all
    readers.
    """

    @property
    def defines(self) -> Sequence[fx.Node]: ...
    @property
    def reads(self) -> Sequence[fx.Node]: ...
    @property
    def rank(self) -> int: ...
    @property
    def writes(self) -> Sequence[fx.Node]: ...
    @property
    def first(self) -> bool: ...
    @property
    def grouped(self) -> bool: ...
    @property
    def node(self) -> fx.Node | None: ...


@dataclass(frozen=True)
class Step:
    """A step that has not been written as a call yet."""

    defines: Sequence[fx.Node]
    reads: Sequence[fx.Node]
    rank: int
    writes: Sequence[fx.Node]
    first: bool
    grouped: bool
    node: fx.Node | None = None


def step_of(node: fx.Node, rank: int) -> Step:
    """The step of a call that is not in a group."""
    writes = [base_of(node.args[0])] if is_mutable(node) and node.args else []
    return Step([node], node.all_input_nodes, rank, writes, MARK in node.meta, grouped=False, node=node)


def rank_of(plan: GroupPlan, rank: Mapping[fx.Node, int]) -> int:
    """A group's rank in the original order: that of its last result."""
    if any(map(is_grown, plan.outputs)):
        return len(rank)
    return max(rank[o] for o in plan.outputs if not is_mutable(o))


S = TypeVar("S", bound=Ordered)


def _before_writes(steps: Sequence[S]) -> dict[int, set[int]]:
    """For each step, steps that precede it due to writes: readers of old contents before the write, others after it."""
    writers = [(i, base_of(w)) for i, s in enumerate(steps) for w in s.writes]
    found: dict[int, set[int]] = {}
    if not writers:
        return found
    readers: dict[fx.Node, list[int]] = {}
    for i, s in enumerate(steps):
        for base in {base_of(r) for r in s.reads}:
            readers.setdefault(base, []).append(i)
    for writer, written in writers:
        for reader in readers.get(written, ()):
            if reader != writer:
                first = steps[writer].first and (steps[reader].grouped or steps[writer].grouped)
                early = first or steps[reader].rank < steps[writer].rank
                found.setdefault(writer if early else reader, set()).add(reader if early else writer)
    return found


def needs(steps: Sequence[S]) -> list[set[int]]:
    """For each step, the steps that must come before it."""
    maker = {node: i for i, s in enumerate(steps) for node in s.defines}
    first = _before_writes(steps)
    drawing = [i for i, s in enumerate(steps) if s.node is not None and may_draw(s.node.target)]
    for before, after in zip(drawing, drawing[1:]):
        first.setdefault(after, set()).add(before)
    return [{maker[r] for r in s.reads if r in maker} | first.get(i, set()) for i, s in enumerate(steps)]


def in_circles(steps: Sequence[S]) -> set[int]:
    """The steps on cycles of dependences, and those between cycles."""
    before = needs(steps)
    after: list[set[int]] = [set() for _ in steps]
    for i, found in enumerate(before):
        for j in found:
            after[j].add(i)
    return _peeled(_peeled(range(len(steps)), before, after), after, before)


def _peeled(steps: Iterable[int], before: Sequence[set[int]], after: Sequence[set[int]]) -> set[int]:
    """The rest of `steps` after repeatedly removing each step that depends on no other step of the rest."""
    left = set(steps)
    count = {i: len(before[i] & left) for i in left}
    ready = [i for i in left if not count[i]]
    for i in ready:  # grows
        left.discard(i)
        for j in after[i] & left:
            count[j] -= 1
            if not count[j]:
                ready.append(j)
    return left


__all__ = ["Ordered", "Step", "in_circles", "needs", "rank_of", "step_of"]
