"""Makes a plan of a grouping: the nodes that run outside, and a graph for each group.

Placeholders are created in the order in which members first read them, so equal layers give equal graphs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from fuser import targets
from fuser.canonical.graph import ROUNDED
from fuser.lazy_dataclasses import dataclass
from fuser.passes import sources
from fuser.passes.classify import Kind, op_name, tensors_of
from fuser.passes.grouping import Grouping

# Views with constants that differ between call sites: inside a group they would make equal groups differ. They stay
# outside if their base is computed outside. Views of the graph's inputs go into groups. So do components, of which a
# group often reads several: as neighbours in memory they are loaded together.
_POSITIONAL = frozenset({"aten.slice", "aten.select", "aten.narrow"})


@dataclass(frozen=True)
class GroupPlan:
    """One group: its graph, and the outer nodes that are its inputs and outputs, in order."""

    graph: fx.Graph
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    ops: tuple[str, ...]

    def written(self) -> list[fx.Node]:
        """The inputs that the group writes, by `copy_`."""
        placeholders = [n for n in self.graph.nodes if n.op == "placeholder"]
        copies = [n.args[0] for n in self.graph.nodes if n.target is torch.ops.aten.copy_.default]
        return [outer for inner, outer in zip(placeholders, self.inputs) if inner in copies]


@dataclass(frozen=True)
class Plan:
    """The groups, and the nodes that run one by one, in the outer graph's order."""

    groups: tuple[GroupPlan, ...]
    outside: tuple[fx.Node, ...]


class _Needs:
    """Walks backward from the nodes that must run, and finds the other nodes that must run outside."""

    def __init__(self, graph: fx.Graph, grouping: Grouping) -> None:
        self.grouping = grouping
        self.outside: set[fx.Node] = set()
        self.exports: set[fx.Node] = set()
        self.visited_groups: set[int] = set()
        self.stack: list[fx.Node] = []
        for node in graph.nodes:
            if node.op == "output" or (grouping.kinds[node] is Kind.EXTERN and _must_run(node)):
                self.stack.append(node)

    def run(self) -> None:
        while self.stack:
            node = self.stack.pop()
            if node in self.outside or node in self.exports:
                continue
            group = self.grouping.group_of.get(node)
            if group is None:
                self.outside.add(node)
                self.stack.extend(node.all_input_nodes)
            else:
                self.exports.add(node)
                if group not in self.visited_groups:
                    self.visited_groups.add(group)
                    self.stack.extend(_external_inputs(self.grouping, group))


def _must_run(node: fx.Node) -> bool:
    target = node.target
    mutable = isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable
    return mutable or node.is_impure() or not isinstance(target, torch._ops.OpOverload)


def is_inlined(grouping: Grouping, node: fx.Node) -> bool:
    """Whether a free node is copied into the groups that read it."""
    if grouping.kinds[node] is not Kind.FREE or node.meta.get("outside"):
        return False
    if op_name(node.target) not in _POSITIONAL:
        return True
    base = node.args[0]
    assert isinstance(base, fx.Node)
    if _is_component(node, base):
        return True
    while grouping.kinds[base] is Kind.FREE and base.args and isinstance(base.args[0], fx.Node):
        base = base.args[0]
    return grouping.kinds[base] is not Kind.EXTERN and not _is_item_of_extern(grouping, base)


def _is_component(node: fx.Node, source: fx.Node) -> bool:
    """Whether a view selects some of the few elements of the last dim."""
    value = source.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dim() < 2:
        return False
    dim, few = node.args[1] if len(node.args) > 1 else 0, value.shape[-1]
    return dim in (-1, value.dim() - 1) and type(few) is int and few <= targets.of(value.device.type).components


def _is_item_of_extern(grouping: Grouping, node: fx.Node) -> bool:
    return grouping.kinds[node] is Kind.ITEM and node not in grouping.group_of


def _external_inputs(grouping: Grouping, group: int) -> tuple[fx.Node, ...]:
    """The nodes outside a group that its members read, directly or through inlined nodes, in order of first use."""
    found: dict[fx.Node, None] = {}

    def visit(node: fx.Node) -> None:
        for arg in node.all_input_nodes:
            if grouping.group_of.get(arg) == group:
                continue
            if is_inlined(grouping, arg):
                visit(arg)
            else:
                found[arg] = None

    for member in grouping.groups[group].nodes:
        visit(member)
    anchor = _anchor(grouping.groups[group].nodes, found)
    return tuple(found) if anchor is None else (*found, anchor)


def _anchor(members: Sequence[fx.Node], inputs: Iterable[fx.Node]) -> fx.Node | None:
    """The graph input of fewest dims that tells a group without tensor inputs on which device it runs.

    None if the group reads a tensor or runs on the host, or if the graph has no tensor on the device.
    """
    if any(isinstance(n.meta.get("val"), torch.Tensor) for n in inputs):
        return None
    devices = {t.device for n in members for t in tensors_of(n.meta.get("val"))}
    if len(devices) != 1 or next(iter(devices)).type == targets.HOST:
        return None
    given = members[0].graph.find_nodes(op="placeholder")
    values = [(n, n.meta.get("val")) for n in given]
    there = [(n, v) for n, v in values if isinstance(v, torch.Tensor) and v.device in devices]
    return min(there, key=lambda pair: pair[1].dim())[0] if there else None


# Views that give the elements of a new tensor other sizes, in the same order.
_REGROUPINGS = frozenset({"aten.view", "aten._unsafe_view", "aten.squeeze", "aten.unsqueeze"})


def _own_views(grouping: Grouping, needs: _Needs) -> dict[fx.Node, fx.Node]:
    """The outer views whose source has no other reader outside its group, with the source: the group returns the view.

    A call of ATen costs the host more than other sizes cost the kernel.
    """
    found: dict[fx.Node, fx.Node] = {}
    stack = list(needs.exports)
    while stack:
        source = stack.pop()
        readers = [u for u in source.users if u not in grouping.group_of]
        own = needs.exports if source in grouping.group_of else found
        if source not in own or len(readers) != 1 or _reads_across(grouping, source):
            continue
        (view,) = readers
        if view.all_input_nodes != [source]:
            continue  # it reads sizes, which the group would also need
        if view in needs.outside and op_name(view.target) in _REGROUPINGS and _is_new_and_dense(view, source):
            if not any(_group_through(grouping, u) for u in view.users):
                found[view] = source
                stack.append(view)
    return found


def _reads_across(grouping: Grouping, source: fx.Node) -> bool:
    """Whether a group other than its own reads a node."""
    own = grouping.group_of.get(source)
    return any(grouping.group_of.get(u, own) != own for u in source.users)


def _group_through(grouping: Grouping, user: fx.Node) -> bool:
    """Whether a group reads a node, directly or through views."""
    if user in grouping.group_of:
        return True
    return grouping.kinds[user] is Kind.FREE and any(_group_through(grouping, u) for u in user.users)


def _is_new_and_dense(view: fx.Node, source: fx.Node) -> bool:
    """Whether both are contiguous, with static sizes."""
    for value in (view.meta.get("val"), source.meta.get("val")):
        if not isinstance(value, torch.Tensor) or not all(type(n) is int for n in (*value.shape, *value.stride())):
            return False
        if not value.is_contiguous():
            return False
    return True


def _copy_meta(new: fx.Node, old: fx.Node) -> fx.Node:
    new.meta = {k: old.meta[k] for k in ("val", "tensor_meta", ROUNDED, *sources.NOTES) if k in old.meta}
    return new


class _Builder:
    """Builds the graph of one group."""

    def __init__(self, grouping: Grouping, group: int, inputs: tuple[fx.Node, ...]) -> None:
        self.members = grouping.groups[group].nodes
        self.graph = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}
        self.inputs = inputs

    def build(self, exports: set[fx.Node], as_tuple: bool, views: dict[fx.Node, fx.Node]) -> GroupPlan:
        """The group's plan; instead of a member that `views` names, it returns the view."""
        for i, node in enumerate(self.inputs):
            self.env[node] = _copy_meta(self.graph.placeholder(f"arg{i}"), node)
        for member in self.members:
            self._copy(member)
        outputs = tuple(self._given(m, views) for m in self.members if m in exports)
        results = tuple(self.env[o] for o in outputs)
        self.graph.output(results if as_tuple or len(results) != 1 else results[0])
        ops = tuple(op_name(n.target) for n in self.graph.nodes if n.op == "call_function")
        return GroupPlan(self.graph, self.inputs, outputs, ops)

    def _given(self, member: fx.Node, views: dict[fx.Node, fx.Node]) -> fx.Node:
        while member in views:
            member = views[member]
            self._copy(member)
        return member

    def _copy(self, node: fx.Node) -> fx.Node:
        found = self.env.get(node)
        if found is None:
            for arg in node.all_input_nodes:
                self._copy(arg)
            found = self.env[node] = _copy_meta(self.graph.node_copy(node, self.env.__getitem__), node)
        return found


def _returned(graph: fx.Graph) -> tuple[Any, ...]:
    (result,) = graph.output_node().args
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def _inputs(graph: fx.Graph, grouping: Grouping, group: int, whole: bool) -> tuple[fx.Node, ...]:
    """A group's inputs; in the graph's own order if the group is the whole graph, so that it can be called directly."""
    inputs = _external_inputs(grouping, group)
    if not whole:
        return inputs
    wanted = set(inputs)
    return tuple(n for n in graph.nodes if n in wanted)


def extract(graph: fx.Graph, grouping: Grouping) -> Plan:
    """The plan of a grouping.

    A group that is the whole graph returns a tuple; any other returns a tensor if it has one result. Nodes whose
    results are unused appear nowhere.
    """
    needs = _Needs(graph, grouping)
    needs.run()
    views = _own_views(grouping, needs)
    alone = needs.outside - views.keys()
    outside = tuple(n for n in graph.nodes if n in alone and n.op not in ("placeholder", "output"))
    used = [i for i in range(len(grouping.groups)) if i in needs.visited_groups]
    whole = not outside and len(used) == 1
    by_source = {source: view for view, source in views.items()}
    builders = [_Builder(grouping, i, _inputs(graph, grouping, i, whole)) for i in used]
    groups = tuple(b.build(needs.exports, whole, by_source) for b in builders)
    if whole and groups[0].outputs != _returned(graph):
        reordered = _reorder(groups[0], _returned(graph))
        groups = (reordered,) if reordered is not None else groups
    return Plan(groups, outside)


def _reorder(plan: GroupPlan, wanted: tuple[Any, ...]) -> GroupPlan | None:
    """The same group with its results in the order of `wanted`; None if its results differ from those."""
    if set(wanted) != set(plan.outputs) or len(wanted) != len(plan.outputs):
        return None
    output = plan.graph.output_node()
    by_node = dict(zip(plan.outputs, output.args[0], strict=True))  # type: ignore[arg-type]
    output.args = (tuple(by_node[w] for w in wanted),)
    return GroupPlan(plan.graph, plan.inputs, wanted, plan.ops)
