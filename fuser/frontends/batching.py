"""Horizontal fusion: independent calls of one fusion become one call.

An optimiser makes the same group for every parameter. Python then makes one call for a whole step, and the launcher
runs all of it in one parallel region (`handle_each` in native/batch.h), so that small parameters keep all threads
busy.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch
from torch import fx

from fuser.lazy_dataclasses import dataclass
from fuser.passes.extract import GroupPlan
from fuser.passes.hints import numel_hint

# Most elements of new results in one batch, in all: single calls would free memory in between. Inputs that a call
# writes are not new.
_MOST_RESULTS = 256 << 10


@dataclass(frozen=True)
class Call:
    """A call of a fusion as text: its handle's `each`, names of inputs and results, elements of new results."""

    each: str
    inputs: tuple[str, ...]
    results: tuple[str, ...]
    several: bool  # the call returns a tuple
    elements: int

    @property
    def kind(self) -> tuple[object, ...]:
        """Calls of one kind can be batched."""
        return self.each, len(self.inputs), len(self.results)


def elements_made(plan: GroupPlan) -> int:
    """The number of elements in a group's new results, as far as it is known at compile time."""
    (found,) = plan.graph.output_node().args
    results = [n for n in (found if isinstance(found, tuple) else (found,)) if isinstance(n, fx.Node)]
    return sum(numel_hint(n.meta.get("val")) for n in results if n.target is not torch.ops.aten.copy_.default)


class Order:
    """An order of statements that respects their dependences, stays near their ranks and batches calls of one kind.

    `calls` are the statements' calls, `ranks` their positions in the original order, `needs` the statements that each
    has to follow. `runs` are the statements' numbers in their new order, as lists of statements that run together;
    statements in a dependence cycle are missing.
    """

    def __init__(self, calls: Sequence[Call | None], ranks: Sequence[int], needs: Sequence[set[int]]) -> None:
        self._calls, self._ranks, self._needs = calls, ranks, needs
        self._ready: list[tuple[int, int]] = []
        self._alike: dict[tuple[object, ...], list[tuple[int, int]]] = {}  # the ready statements by kind of call
        self._taken: set[int] = set()
        self._room = 0
        self.runs: list[list[int]] = []
        self._sort()

    def _sort(self) -> None:
        missing = [len(n) for n in self._needs]
        users: list[list[int]] = [[] for _ in missing]
        for number, makers in enumerate(self._needs):
            for m in makers:
                users[m].append(number)
            if not makers:
                self._push(number)
        while (now := self._next()) is not None:
            for user in users[now]:
                missing[user] -= 1
                if not missing[user]:
                    self._push(user)

    def _push(self, i: int) -> None:
        heapq.heappush(self._ready, (self._ranks[i], i))
        call = self._calls[i]
        if call is not None:
            heapq.heappush(self._alike.setdefault(call.kind, []), (self._ranks[i], i))

    def _next(self) -> int | None:
        """The next statement: one that joins the last run, else the first ready one; None at the end."""
        joining = self._joining()
        if joining is not None:
            self.runs[-1].append(joining)
            return joining
        first = self._first(self._ready)
        if first is not None:
            self._taken.add(first)
            self.runs.append([first])
            call = self._calls[first]
            self._room = _MOST_RESULTS - (call.elements if call else 0)
        return first

    def _joining(self) -> int | None:
        run = self.runs[-1] if self.runs else [-1]
        last = self._calls[run[0]] if run[0] >= 0 else None
        found = self._first(self._alike.get(last.kind, [])) if last else None
        call = self._calls[found] if found is not None else None
        if found is None or call is None or call.elements > self._room or not self._needs[found].isdisjoint(run):
            return None
        self._taken.add(found)
        self._room -= call.elements
        return found

    def _first(self, heap: list[tuple[int, int]]) -> int | None:
        while heap and heap[0][1] in self._taken:
            heapq.heappop(heap)
        return heap[0][1] if heap else None


def together(calls: Sequence[Call], keep: bool) -> str:
    """The statement that makes all calls; without `keep` their results are dropped."""
    lines = ",\n        ".join(", ".join(c.inputs) for c in calls)
    text = f"{calls[0].each}({len(calls[0].inputs)}, {keep},\n        {lines})"
    if not keep:
        return text
    targets = (f"({', '.join(c.results)},)" if c.several else c.results[0] for c in calls)
    return f"({', '.join(targets)},) = {text}"
