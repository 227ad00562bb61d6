"""Restores in-place writes: a group that computes the new content of an input stores it there.

AOTAutograd's functional graph ends in `copy_(input, value)` calls. If one group computes the value, and all others that
read the input can run before it, the copy becomes part of the group. Its kernel then writes the input instead of a new
tensor.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx

from fuser.lazy_dataclasses import dataclass
from fuser.passes import order
from fuser.passes.classify import Kind, base_of, is_view
from fuser.passes.cleanup import reaches_output
from fuser.passes.extract import GroupPlan, Plan
from fuser.passes.grouping import Grouping
from fuser.passes.hints import is_dense

aten = torch.ops.aten
_TRIES = 16  # orders that are tried
# Operators that check whether indices are in range: a kernel must not have written an input if one is not.
CHECKED = frozenset(
    f"aten.{name}"
    for name in (
        "index index_select gather take take_along_dim embedding one_hot scatter scatter_add scatter_reduce index_add "
        "index_copy index_fill index_put index_reduce masked_scatter put embedding_dense_backward searchsorted"
    ).split()
)


@dataclass(frozen=True)
class _Write:
    """A copy into an input, or into a view of one, that a group may perform.

    `ordered`: others read the input. `kept`: the value is a result of the graph, in separate memory.
    """

    copy: fx.Node
    target: fx.Node
    value: fx.Node
    group: int
    ordered: bool
    kept: bool


def reinplace(plan: Plan, grouping: Grouping) -> tuple[Plan, frozenset[int]]:
    """The plan with copies into inputs moved into groups, and the numbers of the groups that write inputs."""
    maker = {o: i for i, g in enumerate(plan.groups) for o in g.outputs}
    results = reaches_output(plan.outside[0].graph) if plan.outside else set()
    found: list[_Write] = []
    for node in plan.outside:
        value: Any = node.args[1] if _is_copy_into_input(node) else None
        if value in maker and CHECKED.isdisjoint(plan.groups[maker[value]].ops):
            write = _write(grouping, node, value, maker[value], value in results)
            found += [write] if write is not None else []
    found = _in_order(plan, found)
    groups = list(plan.groups)
    for write in found:
        groups[write.group] = _with_write(groups[write.group], write)
    taken = {w.copy for w in found}
    outside = tuple(n for n in plan.outside if n not in taken)
    return dataclasses.replace(plan, groups=tuple(groups), outside=outside), frozenset(w.group for w in found)


def _in_order(plan: Plan, writes: list[_Write]) -> list[_Write]:
    """The writes that can run after all readers of the old contents of their targets."""
    writes = list(writes)
    for _ in range(_TRIES):
        if not any(w.ordered for w in writes):
            return writes
        stuck = order.in_circles(_steps(plan, writes))
        ordered = [w for w in writes if w.ordered and w.group in stuck]
        if not ordered:
            return writes
        writes.remove(ordered[-1])
    return [w for w in writes if not w.ordered]


def _steps(plan: Plan, writes: list[_Write]) -> list[order.Step]:
    """The steps of a plan whose groups perform these writes, the groups first."""
    rank = {n: i for i, n in enumerate(plan.outside[0].graph.nodes)}
    into: dict[int, list[fx.Node]] = {}
    for w in writes:
        into.setdefault(w.group, []).append(w.target)
    made = {w.copy for w in writes}
    groups = [
        order.Step(g.outputs, g.inputs, order.rank_of(g, rank), into.get(i, ()), first=i in into, grouped=True)
        for i, g in enumerate(plan.groups)
    ]
    return groups + [order.step_of(n, rank[n]) for n in plan.outside if n not in made]


def _write(grouping: Grouping, copy: fx.Node, value: fx.Node, group: int, kept: bool) -> _Write | None:
    """The write that a group performs instead of `copy`; None if it could destroy data that is still read."""
    target: Any = copy.args[0]
    if len(copy.args) != 2 or copy.kwargs or not alike(target.meta.get("val"), value.meta.get("val")):
        return None
    if target.op != "placeholder" and not is_dense(target.meta["val"]):
        return None
    if len(value.users) > 1 and not kept and not same_order(target.meta["val"], value.meta["val"]):
        return None  # others then read the input, and an operator's result may depend on its argument's strides
    number, ordered = grouping.group_of.get(base_of(value)), False
    pending = [(base_of(target), u) for u in base_of(target).users]
    for source, node in pending:  # grows
        if node is copy or node.op == "output":  # results are read after all copies
            continue
        if grouping.kinds.get(node) is Kind.FREE and is_view(node.target):
            pending += [(node, u) for u in node.users]
        elif number is not None and grouping.group_of.get(node) == number:
            if source is not target and (target.op != "placeholder" or source.meta.get("outside")):
                return None  # two arguments of one kernel would share memory
        elif not _makes_anew(grouping, node):
            return None
        else:
            ordered = True
    return _Write(copy, target, value, group, ordered, kept)


def _is_copy_into_input(node: fx.Node) -> bool:
    """Whether a node copies into an input, or into a view of one."""
    return node.target is aten.copy_.default and not node.users and base_of(node.args[0]).op == "placeholder"


def _makes_anew(grouping: Grouping, node: fx.Node) -> bool:
    """Whether a reader of an input's old content returns tensors of its own, so that it is done once it has run."""
    if node in grouping.group_of:
        return True
    if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.is_mutable:
        return False
    return all(r.alias_info is None for r in node.target._schema.returns)


def alike(a: Any, b: Any) -> bool:
    """Whether two strided tensors have equal shapes, dtypes and devices, by their text. Adds no guard."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    plain = a.layout is torch.strided and a.device == b.device and a.dtype == b.dtype
    return plain and list(map(str, a.shape)) == list(map(str, b.shape))


def same_order(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have equal strides, by their text. Adds no guard."""
    return list(map(str, a.stride())) == list(map(str, b.stride()))


def _with_write(group: GroupPlan, write: _Write) -> GroupPlan:
    """The group with its result copied into the input. The copy replaces the result, or is an additional result."""
    if not write.kept:
        return write_into(group, write.target, write.value)
    results, inputs, copy = _copied(group, write.target, write.value)
    group.graph.output_node().args = ((*results, copy),)
    return dataclasses.replace(group, inputs=inputs, outputs=(*group.outputs, write.copy))


def write_into(group: GroupPlan, target: fx.Node, value: fx.Node) -> GroupPlan:
    """The group, whose graph is changed, with its result `value` written into `target`, an input or made one."""
    results, inputs, copy = _copied(group, target, value)
    results[group.outputs.index(value)] = copy
    output = group.graph.output_node()
    output.args = (tuple(results) if isinstance(output.args[0], tuple) else copy,)
    return dataclasses.replace(group, inputs=inputs)


def _copied(group: GroupPlan, target: fx.Node, value: fx.Node) -> tuple[list[Any], tuple[fx.Node, ...], fx.Node]:
    """The group's results, its inputs including `target`, and the copy of `value` into `target` in its graph."""
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
    found: list[Any] = list(results) if isinstance(results, tuple) else [results]
    with graph.inserting_before(output):
        copy = graph.call_function(aten.copy_.default, (inside, found[group.outputs.index(value)]))
    copy.meta = dict(value.meta)
    return found, inputs, copy
