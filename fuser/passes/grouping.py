"""Finds maximal convex groups of fusible nodes, in time linear in the graph.

A *unit* is a compute or extern node together with the getitems that pick its results. Free nodes (views, creation) are
transparent: a unit depends on the bases of its arguments' views. A view that must stay outside of groups (its metadata
`outside`) is a unit that is not fusible: no group holds both its base and its readers.

Each unit gets a level: the number of externs after a fusible unit on the longest path to it. A path between two fusible
units of one level contains no extern, so connected fusible units of one level form a convex group, and groups depend
only on groups of lower levels. Then `_contract` joins groups of different levels if no other path runs between them.

Externs that draw random numbers depend on each other in the graph's order.
"""

from __future__ import annotations

import operator
from dataclasses import field

import torch
from torch import fx

from fuser import targets
from fuser.lazy_dataclasses import dataclass
from fuser.passes.classify import (
    APART,
    MARK,
    Kind,
    Verdict,
    classify,
    draws,
    is_number,
    is_size_arithmetic,
    may_draw,
    op_name,
    tensors_of,
)
from fuser.passes.hints import numel_hint
from fuser.reasons import because

_SEARCH_LIMIT = 256  # units visited when looking for another path before a join is given up
_MAX_READERS = 3  # a group read by more groups than this stays apart: equal readers should stay equal
_GROWN = 8  # times its inputs
_LARGE = 1 << 20  # elements


@dataclass
class Group:
    """Members in the graph's order: compute nodes and the getitems of their results."""

    nodes: list[fx.Node]


@dataclass
class Grouping:
    """The groups of a graph, each node's kind, and the reason for each unfused operator.

    `apart` says why two groups, of which the second reads from the first, are not one.
    """

    groups: list[Group]
    kinds: dict[fx.Node, Kind]
    reasons: dict[str, str]
    group_of: dict[fx.Node, int] = field(default_factory=dict)
    apart: dict[tuple[int, int], str] = field(default_factory=dict)


def is_grown(node: fx.Node) -> bool:
    """Whether a node makes a large result of the graph from little: the gradient of an embedding table.

    It forms a group of its own, which runs last. In a larger group, the other members' inputs and later results would
    be alive together with the largest tensor of a step. Nothing else reads it, so groups without it stay convex.
    """
    value = node.meta.get("val")
    if node.target is not torch.ops.aten.embedding_dense_backward.default or not isinstance(value, torch.Tensor):
        return False
    most = max(numel_hint(a.meta.get("val")) for a in node.all_input_nodes)
    large = numel_hint(value) >= max(_LARGE, _GROWN * most) and targets.is_host(value.device)
    return large and all(user.op == "output" for user in node.users)


class _Sets:
    """Disjoint sets of 0 … n-1, each represented by its smallest member."""

    def __init__(self, n: int) -> None:
        self.parent = list(range(n))

    def find(self, a: int) -> int:
        while self.parent[a] != a:
            self.parent[a] = self.parent[self.parent[a]]
            a = self.parent[a]
        return a

    def union(self, a: int, b: int) -> None:
        a, b = self.find(a), self.find(b)
        self.parent[max(a, b)] = min(a, b)


class _Units:
    """The graph as units: getitems are part of their producers, and free nodes are transparent."""

    def __init__(self, graph: fx.Graph) -> None:
        self.verdicts: dict[fx.Node, Verdict] = {}
        self.index: dict[fx.Node, int] = {}
        self.heads: list[fx.Node] = []
        self.fusible: list[bool] = []
        self.preds: list[tuple[int, ...]] = []
        self.bases: dict[fx.Node, tuple[fx.Node, ...]] = {}  # by free node
        self.readers: dict[fx.Node, set[int]] = {}  # by tensor, so far: later writes must come after them
        self.drawn: tuple[int, ...] = ()  # the last unit that draws random numbers; the next one depends on it
        for node in graph.nodes:
            self._add(node)
        self.apart = [is_grown(node) or APART in node.meta for node in self.heads]
        self.users: list[list[int]] = [[] for _ in self.heads]
        for u, preds in enumerate(self.preds):
            for p in preds:
                self.users[p].append(u)

    def _add(self, node: fx.Node) -> None:
        verdict = self.verdicts[node] = classify(node)
        match verdict.kind:
            case Kind.FREE if not node.meta.get("outside"):
                self.bases[node] = self._sources(node)
            case Kind.ITEM if (source := node.args[0]) in self.index:
                self.index[node] = self.index[source]  # type: ignore[index]
            case _:
                preds = {self.index[s] for s in self._sources(node) if s in self.index}
                if MARK in node.meta:
                    written = node.all_input_nodes[0]
                    preds.update(*(self.readers.get(s, ()) for s in self.bases.get(written, (written,))))
                if verdict.kind is Kind.EXTERN and may_draw(node.target):
                    preds.update(self.drawn)
                    self.drawn = (len(self.heads),)
                self.index[node] = len(self.heads)
                for source in self._sources(node):
                    self.readers.setdefault(source, set()).add(len(self.heads))
                self.heads.append(node)
                self.fusible.append(verdict.kind is Kind.COMPUTE)
                self.preds.append(tuple(sorted(preds)))

    def _sources(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """The arguments of a node, with views replaced by their bases."""
        found: dict[fx.Node, None] = {}
        for arg in node.all_input_nodes:
            for source in self.bases.get(arg, (arg,)):
                found[source] = None
        return tuple(found)

    def sources(self, u: int) -> tuple[fx.Node, ...]:
        return self._sources(self.heads[u])


def _levels(units: _Units) -> list[int]:
    """The level of each unit: 0 for the first fusible ones, -1 for externs that depend on none of them."""
    levels: list[int] = []
    for u, preds in enumerate(units.preds):
        if units.fusible[u]:
            found = [levels[p] + (not units.fusible[p]) for p in preds]
        else:
            found = [levels[p] for p in preds]
        levels.append(max(found, default=-1) if not units.fusible[u] else max([0, *found]))
    return levels


def _raise(units: _Units, levels: list[int]) -> None:
    """Raise an elementwise unit to the level that all of its users share.

    Values that a backward recomputes from saved tensors would otherwise be at a lower level than their readers, apart
    from the readers' other inputs.
    """
    for u in range(len(units.heads) - 1, -1, -1):
        above = {levels[v] if units.fusible[v] else -1 for v in units.users[u]}
        if not units.fusible[u] or len(above) != 1 or max(above) <= levels[u]:
            continue
        largest = max((numel_hint(s.meta.get("val")) for s in units.sources(u) if not is_number(s)), default=0)
        if numel_hint(units.heads[u].meta.get("val")) >= largest > 0:
            levels[u] = max(above)


def _connect(units: _Units, levels: list[int]) -> _Sets:
    """Join fusible units of one level that are connected, or whose main input is the same tensor."""
    sets = _Sets(len(units.heads))
    main: dict[tuple[int, fx.Node], int] = {}
    for u, preds in enumerate(units.preds):
        if not units.fusible[u] or units.apart[u]:
            continue
        for p in preds:
            if units.fusible[p] and levels[p] == levels[u]:
                sets.union(u, p)
        source = _main_input(units, u)
        if source is not None:
            sets.union(u, main.setdefault((levels[u], source), u))
    return sets


def _main_input(units: _Units, u: int) -> fx.Node | None:
    """The tensor that makes up most of what a unit reads, if it is as large as the unit's result; else None."""
    read = [(numel_hint(s.meta.get("val")), i, s) for i, s in enumerate(units.sources(u)) if not is_number(s)]
    if not read:
        return None
    size, _, source = max(read)
    if sum(n for n, _, _ in read) > 1.5 * size or numel_hint(units.heads[u].meta.get("val")) > size:
        return None
    return source


def _join_readers(units: _Units, sets: _Sets, levels: list[int]) -> None:
    """Join groups of one level that mostly read the same large tensors, at least two of them.

    No path leads from one group of a level to another, so joined groups of a level are convex.
    """
    reads: dict[int, dict[fx.Node, int]] = {}
    for u in range(len(units.heads)):
        if units.fusible[u] and not units.apart[u]:
            here = sets.find(u)
            found = reads.setdefault(here, {})
            inside = (s for s in units.sources(u) if not is_number(s))
            outside = (s for s in inside if s not in units.index or sets.find(units.index[s]) != here)
            found.update((s, numel_hint(s.meta.get("val"))) for s in outside)
    readers: dict[tuple[int, fx.Node], list[int]] = {}
    for group, found in reads.items():
        for source, n in found.items():
            if 2 * n > max(found.values()):
                readers.setdefault((levels[group], source), []).append(group)
    for groups in readers.values():
        for a, b in zip(groups, groups[1:]) if len(groups) <= _MAX_READERS else ():
            shared = reads[a].keys() & reads[b].keys()
            both = sum(reads[a][s] for s in shared)
            if len(shared) > 1 and 2 * both > max(sum(reads[a].values()), sum(reads[b].values())):
                sets.union(a, b)


class _Condensed:
    """The graph of groups and externs, in which `_contract` joins groups one by one."""

    def __init__(self, units: _Units, sets: _Sets, levels: list[int]) -> None:
        self.sets = sets
        self.users: dict[int, set[int]] = {}
        self.preds: dict[int, set[int]] = {}
        self.lowest = list(levels)  # per group: one level until groups of different levels are joined
        self.highest = list(levels)
        for u, preds in enumerate(units.preds):
            here = sets.find(u)
            self.users.setdefault(here, set())
            self.preds.setdefault(here, set())
            for p in preds:
                there = sets.find(p)
                if there != here:
                    self.users[there].add(here)
                    self.preds[here].add(there)

    def another_path(self, a: int, b: int) -> int | None:
        """The last node of a path from a to b other than their edge; -1 if the search gets long; None if there is none.

        Levels never decrease along a path, so nodes above b are not visited.
        """
        stack = [u for u in self.users[a] if u != b]
        seen = set(stack)
        while stack:
            if len(seen) > _SEARCH_LIMIT:
                return -1
            here = stack.pop()
            for user in self.users[here]:
                if user == b:
                    return here
                if user not in seen and self.lowest[user] <= self.highest[b]:
                    seen.add(user)
                    stack.append(user)
        return None

    def join(self, a: int, b: int) -> int:
        """Join a and b; returns the representative of the result."""
        self.sets.union(a, b)
        whole = self.sets.find(a)
        part = b if whole == a else a
        self.lowest[whole] = min(self.lowest[a], self.lowest[b])
        self.highest[whole] = max(self.highest[a], self.highest[b])
        for neighbours, back in ((self.users, self.preds), (self.preds, self.users)):
            for other in neighbours.pop(part):
                back[other].discard(part)
                if other != whole:
                    back[other].add(whole)
                    neighbours[whole].add(other)
            neighbours[whole].discard(whole)
        return whole


def _contract(units: _Units, sets: _Sets, levels: list[int]) -> dict[tuple[int, int], str]:
    """Join each group into the later groups that read it, if no other path runs between the two.

    Returns why other pairs were not joined, keyed by one unit of each group.
    """
    refused: dict[tuple[int, int], str] = {}
    condensed = _Condensed(units, sets, levels)
    groups = [u for u in range(len(units.heads)) if units.fusible[u] and sets.find(u) == u]
    for a in sorted(groups, key=lambda g: -levels[g]):
        if sets.find(a) != a:
            continue
        fusible = [b for b in condensed.users[a] if units.fusible[b]]
        readers = [b for b in fusible if not units.apart[b]]
        refused.update({(a, b): _ALONE for b in fusible if units.apart[b]})
        if len(readers) > _MAX_READERS:
            refused.update({(a, b): _SHARED.format(len(readers)) for b in readers})
            continue
        for b in sorted(readers):
            here = sets.find(a)
            there = sets.find(b)
            if here == there:
                continue
            between = condensed.another_path(here, there)
            if between is None:
                condensed.join(here, there)
            else:
                refused[a, b] = _between(units, between)
    return refused


_ALONE = "the second is a kernel of its own: joined to its producer it is slower"
_SHARED = "{} groups read the first, which then is computed once for all of them"


def _between(units: _Units, u: int) -> str:
    if u < 0:
        return f"more than {_SEARCH_LIMIT} operators stand between the two: no order was looked for"
    what = "another group" if units.fusible[u] else f"{op_name(units.heads[u].target)} ({units.heads[u].name})"
    return f"{what} needs the first and is needed by the second"


def _why_dissolved(heads: list[fx.Node]) -> str | None:
    """Why a group is dissolved; None if it is kept."""
    if len(heads) > 1 or draws(heads[0].target) or any(tensors_of(a.meta.get("val")) for a in heads[0].all_input_nodes):
        return None
    return because("from_numbers", "it makes a tensor from numbers alone")


def group_nodes(graph: fx.Graph) -> Grouping:
    """Partition the fusible nodes of a functional ATen graph into groups; every other operator gets a reason."""
    units = _Units(graph)
    levels = _levels(units)
    _raise(units, levels)
    sets = _connect(units, levels)
    _join_readers(units, sets, levels)
    refused = _contract(units, sets, levels)
    kinds = {n: v.kind for n, v in units.verdicts.items()}
    reasons = {n.name: v.reason for n, v in units.verdicts.items() if v.reason and not is_size_arithmetic(n)}
    members: dict[int, list[int]] = {}
    for u, fusible in enumerate(units.fusible):
        if fusible:
            members.setdefault(sets.find(u), []).append(u)
    result = Grouping([], kinds, reasons)
    for found in members.values():
        _keep_or_dissolve([units.heads[u] for u in found], result)
    for node in graph.nodes:
        group = result.group_of.get(units.heads[units.index[node]]) if node in units.index else None
        if group is not None:
            result.group_of[node] = group
            result.groups[group].nodes.append(node)
    for (a, b), reason in refused.items():
        first, second = (result.group_of.get(units.heads[u]) for u in (a, b))
        if first is not None and second is not None and first != second:
            result.apart[first, second] = reason
    return result


def _keep_or_dissolve(heads: list[fx.Node], result: Grouping) -> None:
    reason = _why_dissolved(heads)
    for head in heads:
        if reason is None:
            result.group_of[head] = len(result.groups)
        else:
            result.kinds[head] = Kind.EXTERN
            result.reasons[head.name] = reason
    if reason is None:
        result.groups.append(Group([]))


def describe(graph: fx.Graph, grouping: Grouping) -> str:
    """A readable list: each operator with its group or its reason."""
    lines = []
    for node in graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        where = grouping.group_of.get(node)
        note = f"group {where}" if where is not None else grouping.reasons.get(node.name, grouping.kinds[node].value)
        lines.append(f"{node.name:30} {op_name(node.target):30} {note}")
    return "\n".join(lines)
