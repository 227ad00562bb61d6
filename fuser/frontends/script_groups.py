"""Groups of a TorchScript block: which calls are fused together, and an order of the block that fits all groups.

Nodes outside groups keep their order. A call's *level* counts the ordered nodes after a fusible one on the longest
path to it, as in `passes/grouping`. Levels of ordered nodes never decrease along the block, so a group of level n can
run right before the first ordered node of level n or more: all its inputs are computed, and nothing needs its results
yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fuser.frontends.script_nodes import Fact, Facts, Role, read_by
from fuser.lazy_dataclasses import dataclass
from fuser.reasons import because

Node = Any
Value = Any
_FIRST = -1  # the level of values that depend on no fusible call
_LAST = 1 << 30  # larger than the number of any node

# Calls that are worth a kernel of their own: eager makes several passes over memory, or computes much.
COSTLY = frozenset(
    "aten.softmax aten._softmax aten.log_softmax aten._log_softmax aten.layer_norm aten.native_layer_norm "
    "aten.group_norm aten.batch_norm aten.instance_norm aten.gelu aten.mish aten.logsumexp aten.cosine_similarity "
    "aten.cross_entropy_loss aten.rms_norm aten.var aten.std aten.var_mean aten.std_mean".split()
)


@dataclass
class Group:
    """Calls that are fused together. `nodes` are the calls and the free nodes between them, in order."""

    level: int
    members: list[Node]
    nodes: list[Node]
    inputs: list[Value]
    outputs: list[Value]
    values: frozenset[Value] = frozenset()  # inputs whose values decide the code
    presences: frozenset[Value] = frozenset()  # inputs that decide the code by being None or not


@dataclass
class Plan:
    """A block's groups, and the key by which each node or group is ordered."""

    groups: list[Group]
    keys: dict[Node, tuple[int, int, int]]
    key_of_group: dict[int, tuple[int, int, int]]


def plan_block(block: Any, facts: Facts) -> Plan:
    """The groups of a block; a single cheap call is left to the script."""
    while True:
        levels = _Levels(block, facts)
        found = _components(levels)
        poor = [g for g in found if not _is_worth_it(g, facts)]
        if not poor:
            return _Plan(levels, found).plan
        for members in poor:
            for node in members:
                facts.refuse(
                    node, because("alone", f"{node.kind()} stands alone: a kernel of its own would gain nothing")
                )


def _is_worth_it(members: Sequence[Node], facts: Facts) -> bool:
    costly = any(op in COSTLY for n in members for op in facts.of[n].operators)
    return len(members) > 1 or costly


class _Levels:
    """The level of each node of a block."""

    def __init__(self, block: Any, facts: Facts) -> None:
        self.block, self.facts = block, facts
        self.nodes: list[Node] = list(block.nodes())
        self.here = set(self.nodes)
        self.level: dict[Node, int] = {}
        self.ordered: list[Node] = []
        self.before: dict[Node, int] = {}  # the number of ordered nodes before a node
        last, top, top_exposed = _FIRST, _FIRST, _FIRST
        floor, floor_exposed = 0, 0
        for node in self.nodes:
            fact = facts.of[node]
            self.before[node] = len(self.ordered)
            match fact.role:
                case Role.COMPUTE:
                    wanted = [self._ready(v) for v in fact.leaves]
                    self.level[node] = level = max([floor, *wanted, floor_exposed if fact.exposed else 0])
                    top = max(top, level)
                    top_exposed = max(top_exposed, level) if fact.exposed else top_exposed
                case Role.FREE:
                    self.level[node] = max([last, *map(self._depth, node.inputs())])
                case Role.PURE:
                    self.level[node] = max([_FIRST, *map(self._depth, node.inputs())])
                case Role.ORDERED:
                    last = max([last, *map(self._depth, read_by(node))])
                    last = max(last, top) if fact.fence else last
                    last = max(last, top_exposed) if fact.writes else last
                    floor = max(floor, last + 1) if fact.raises or fact.fence else floor
                    floor_exposed = max(floor_exposed, last + 1) if fact.writes else floor_exposed
                    self.level[node] = last
                    self.ordered.append(node)

    def maker(self, value: Value) -> Fact | None:
        """The fact of the node in this block that makes a value; None if it comes from outside."""
        fact = self.facts.maker.get(value)
        return fact if fact is not None and fact.node in self.here else None

    def _depth(self, value: Value) -> int:
        """The level after which a value is available."""
        maker = self.maker(value)
        return _FIRST if maker is None else self.level[maker.node]

    def _ready(self, value: Value) -> int:
        """The lowest level of a fusible call that reads a value."""
        maker = self.maker(value)
        if maker is None:
            return 0
        return self.level[maker.node] + (maker.role is not Role.COMPUTE)


def _components(levels: _Levels) -> list[list[Node]]:
    """Fusible calls of one level that are connected, or that read the same tensor."""
    parent: dict[Node, Node] = {}

    def find(node: Node) -> Node:
        while parent[node] is not node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    readers: dict[tuple[int, Value], Node] = {}
    for node in levels.nodes:
        fact = levels.facts.of[node]
        if fact.role is not Role.COMPUTE:
            continue
        parent[node] = node
        level = levels.level[node]
        for value in fact.leaves:
            if value.type().kind() != "TensorType":
                continue
            maker = levels.maker(value)
            fused = maker is not None and maker.role is Role.COMPUTE and levels.level[maker.node] == level
            other = maker.node if maker is not None and fused else readers.setdefault((level, value), node)
            parent[find(node)] = find(other)
    found: dict[Node, list[Node]] = {}
    for node in parent:
        found.setdefault(find(node), []).append(node)
    return list(found.values())


class _Plan:
    """Turns components into groups with inputs and outputs, and finds an order."""

    def __init__(self, levels: _Levels, components: list[list[Node]]) -> None:
        self.levels, self.facts = levels, levels.facts
        self.group_of = {n: i for i, members in enumerate(components) for n in members}
        self.groups = [self._group(members) for members in components]
        needed = self._needed_outside()
        for group in self.groups:
            group.outputs = [v for n in group.members for v in n.outputs() if v in needed]
        self.groups = [g for g in self.groups if g.outputs]
        of_group = {i: self._slot(g.level) for i, g in enumerate(self.groups)}
        by_node = {n: of_group[i] for i, g in enumerate(self.groups) for n in g.members}
        self.plan = Plan(self.groups, self._keys(by_node), of_group)

    def _group(self, members: list[Node]) -> Group:
        nodes: dict[Node, None] = {}
        inputs: dict[Value, None] = {}
        inside = {v for n in members for v in n.outputs()}
        for node in members:
            fact = self.facts.of[node]
            nodes.update(dict.fromkeys((*fact.copies, node)))
            inputs.update(dict.fromkeys(v for v in fact.leaves if v not in inside))
        facts = [self.facts.of[n] for n in members]
        values = frozenset(v for f in facts for v in f.values)
        presences = frozenset(v for f in facts for v in f.presences) - values
        return Group(self.levels.level[members[0]], members, list(nodes), list(inputs), [], values, presences)

    def _needed_outside(self) -> set[Value]:
        """Values that are read outside the group that makes them, or returned from the block."""
        stack: list[Value] = list(self.levels.block.outputs())
        for node in self.levels.nodes:
            if self.facts.of[node].role in (Role.ORDERED, Role.PURE):
                stack += read_by(node)
        for group in self.groups:
            stack += group.inputs
        found: set[Value] = set()
        while stack:
            value = stack.pop()
            if value in found:
                continue
            found.add(value)
            maker = self.levels.maker(value)
            if maker is not None and maker.role is Role.FREE:
                stack += maker.node.inputs()
        return found

    def _slot(self, level: int) -> tuple[int, int, int]:
        ordered = self.levels.ordered
        at = next((i for i, n in enumerate(ordered) if self.levels.level[n] >= level), len(ordered))
        return at, level, 0

    def _keys(self, by_node: dict[Node, tuple[int, int, int]]) -> dict[Node, tuple[int, int, int]]:
        """For each node outside groups, its key: after everything it reads, and not before its old position."""
        keys: dict[Node, tuple[int, int, int]] = {}
        number = {n: i for i, n in enumerate(self.levels.ordered)}
        for node in self.levels.nodes:
            if node in number:
                keys[node] = number[node], _LAST, 0
            elif node not in by_node:
                stays = self.facts.of[node].role is Role.FREE
                first = (self.levels.before[node] - 1 if stays else -1, _LAST, 1)
                keys[node] = max([first, *self._after(node.inputs(), keys, by_node)])
        return keys

    def _after(self, values: Iterable[Value], keys: Any, by_node: Any) -> list[tuple[int, int, int]]:
        found = []
        for value in values:
            maker = self.levels.maker(value)
            if maker is not None:
                at, level, _ = by_node.get(maker.node) or keys[maker.node]
                found.append((at, level, 1))
        return found
