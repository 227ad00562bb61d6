"""Gives writes back: what a graph copies into its inputs at the end, the groups that compute it store there.

AOTAutograd's functional graph ends in `copy_(input, value)` calls. Where one group computes the value and nobody else
reads the input, the copy becomes part of the group, whose kernel then writes the input instead of a new tensor.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx

from fuser.passes.classify import Kind, is_view, is_write_back
from fuser.passes.cleanup import reaches_output
from fuser.passes.extract import GroupPlan, Plan
from fuser.passes.grouping import Grouping

aten = torch.ops.aten
# Operators that look whether places are in range: a kernel must not have written an input when one is not.
CHECKED = frozenset(
    f"aten.{name}"
    for name in (
        "index index_select gather take take_along_dim embedding one_hot scatter scatter_add scatter_reduce index_add "
        "index_copy index_fill index_put index_reduce masked_scatter put embedding_dense_backward searchsorted"
    ).split()
)


def reinplace(plan: Plan, grouping: Grouping) -> tuple[Plan, frozenset[int]]:
    """The plan with copies into inputs taken into groups, and the numbers of the groups that write inputs."""
    groups = list(plan.groups)
    maker = {o: i for i, g in enumerate(groups) for o in g.outputs}
    results = reaches_output(plan.outside[0].graph) if plan.outside else set()
    taken: set[fx.Node] = set()
    writing: set[int] = set()
    for node in plan.outside:
        if not is_write_back(node):
            continue
        target, value = node.args[0], node.args[1]
        assert isinstance(target, fx.Node) and isinstance(value, fx.Node)
        at = maker.get(value)
        if at is None or value not in grouping.group_of or value in results or not CHECKED.isdisjoint(groups[at].ops):
            continue
        if not _may_write(grouping, groups[at], node, target, value):
            continue
        groups[at] = _with_write(groups[at], target, value)
        taken.add(node)
        writing.add(at)
    outside = tuple(n for n in plan.outside if n not in taken)
    return dataclasses.replace(plan, groups=tuple(groups), outside=outside), frozenset(writing)


def _may_write(grouping: Grouping, group: GroupPlan, copy: fx.Node, target: fx.Node, value: Any) -> bool:
    """Whether the value is like the input, and only the group reads the input before."""
    if len(copy.args) != 2 or copy.kwargs:
        return False
    if not _alike(target.meta.get("val"), value.meta.get("val")):
        return False
    if len(value.users) > 1 and not _same_order(target.meta["val"], value.meta["val"]):
        return False  # others read the input in its place, and an operator's result may lie as its argument does
    number = grouping.group_of.get(value)
    stack = [u for u in target.users if u is not copy]
    while stack:
        node = stack.pop()
        if grouping.group_of.get(node) == number or node.op == "output":  # results are read behind all copies
            continue
        if grouping.kinds.get(node) is not Kind.FREE or not is_view(node.target):
            return False
        stack.extend(node.users)
    return True


def _alike(a: Any, b: Any) -> bool:
    """Equal shapes and dtypes of ordinary tensors, by spelling, which adds no guard."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    plain = a.layout is torch.strided and a.device == b.device and a.dtype == b.dtype
    return plain and list(map(str, a.shape)) == list(map(str, b.shape))


def _same_order(a: torch.Tensor, b: torch.Tensor) -> bool:
    return list(map(str, a.stride())) == list(map(str, b.stride()))


def _with_write(group: GroupPlan, target: fx.Node, value: fx.Node) -> GroupPlan:
    """The group with its result `value` copied into the input `target`, and that as the result in its place."""
    graph, inputs = group.graph, group.inputs
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    if target in inputs:
        inside = placeholders[inputs.index(target)]
    else:
        first = next(n for n in graph.nodes if n.op != "placeholder")  # a group of numbers alone has no placeholders
        with graph.inserting_before(first):
            inside = graph.placeholder(f"arg{len(placeholders)}")
        inside.meta = dict(target.meta)
        inputs = (*inputs, target)
    output = graph.output_node()
    (results,) = output.args
    several = isinstance(results, tuple)
    found: Any = list(results) if several else [results]  # type: ignore[arg-type]
    at = group.outputs.index(value)
    with graph.inserting_before(output):
        write = graph.call_function(aten.copy_.default, (inside, found[at]))
    write.meta = dict(value.meta)
    found[at] = write
    output.args = (tuple(found) if several else write,)
    return dataclasses.replace(group, inputs=inputs)
