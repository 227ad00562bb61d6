"""Kernels that write a result into the memory of an input that nothing reads later, such as a convolution's result.

If all readers of a product's or convolution's result are elementwise operators of one group, a result of the group with
the same number of elements, in the same order and of the same dtype, is written into it. The step then needs one tensor
less at its peak. A result of other sizes, such as rows of tokens of which the product has a matrix, gets a view of it.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch
from torch import fx

from fuser import config, targets
from fuser.canonical.schemas import is_pointwise
from fuser.kernel_spec import memory_order
from fuser.passes.classify import Kind, op_name
from fuser.passes.extract import GroupPlan, Plan
from fuser.passes.grouping import Grouping
from fuser.passes.hints import are_numbers, is_contiguous, same
from fuser.passes.reinplacing import alike, same_order, write_into

aten = torch.ops.aten
LEAST_BYTES = 1 << 18  # size of an input, below which memory does not matter
# Operators whose result is a new tensor, neither an argument nor a view of one.
_NEW = frozenset(
    "aten.convolution aten.mm aten.addmm aten.bmm aten.baddbmm aten._addmm_activation mkldnn._linear_pointwise "
    "mkldnn._convolution_pointwise".split()
)
_REGROUPINGS = frozenset({"aten.view", "aten._unsafe_view", "aten.reshape", "aten.squeeze", "aten.unsqueeze"})
_NORM = torch.ops.aten._native_batch_norm_legit_no_training.default  # elementwise in its first argument


def write_dying(plan: Plan, grouping: Grouping) -> tuple[Plan, frozenset[int]]:
    """The plan whose groups write inputs that nothing reads later, and the numbers of these groups.

    Only on devices whose kernels are not raced with ATen, which would end in a copy. With `max_autotune` a product
    is joined with its group instead.
    """
    if config.max_autotune:
        return plan, frozenset()
    outside, groups, found = set(plan.outside), list(plan.groups), set()
    views: list[fx.Node] = []
    for i, group in enumerate(groups):
        if group.written():
            continue
        for source in group.inputs:
            is_free = source in outside and _is_new(source) and _is_read_by_one_group(grouping, outside, source)
            value = _result_for(group, source) if is_free else None
            if value is None:
                continue
            target = source
            if not alike(value.meta["val"], source.meta["val"]):
                target = _in_sizes_of(value, source)
                views.append(target)
                grouping.kinds[target] = Kind.FREE
                group = _reading(group, source, target)
            groups[i] = write_into(group, target, value)
            found.add(i)
            break
    return dataclasses.replace(plan, groups=tuple(groups), outside=(*plan.outside, *views)), frozenset(found)


def _in_sizes_of(value: fx.Node, source: fx.Node) -> fx.Node:
    """A view of `source`, outside of groups, in the sizes of a result that will be written into it.

    Autograd does not take it for a view: the result is a tensor of its own.
    """
    shape = list(value.meta["val"].shape)
    with source.graph.inserting_after(source):
        view = source.graph.call_function(aten._unsafe_view.default, (source, shape))
    view.meta = {**value.meta, "val": source.meta["val"].view(shape), "outside": True}
    return view


def _reading(group: GroupPlan, source: fx.Node, view: fx.Node) -> GroupPlan:
    """The group, whose graph is changed, with a view of `source` for an input in its place."""
    graph, at = group.graph, group.inputs.index(source)
    inside = [n for n in graph.nodes if n.op == "placeholder"][at]
    first = next(n for n in graph.nodes if n.op != "placeholder")
    with graph.inserting_before(first):
        own = graph.call_function(aten.view.default, (inside, list(source.meta["val"].shape)))
    own.meta = dict(inside.meta)
    inside.meta = dict(view.meta)
    inside.replace_all_uses_with(own, lambda user: user is not own)
    return dataclasses.replace(group, inputs=tuple(view if n is source else n for n in group.inputs))


def _is_new(node: fx.Node) -> bool:
    """Whether a node is a new, large tensor without gaps, with static sizes, on a device without races."""
    value: Any = node.meta.get("val")
    if op_name(node.target) not in _NEW or not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    if is_raced(value.device.type) or not are_numbers(*value.shape, *value.stride()):
        return False
    is_dense = memory_order(value.shape, value.stride()) is not None
    return is_dense and value.numel() * value.element_size() >= LEAST_BYTES


def is_raced(device_type: str) -> bool:
    """Whether kernels of a device are timed beside ATen, or the device has none."""
    target = targets.known(device_type)
    return target is None or target.races


def _is_read_by_one_group(grouping: Grouping, outside: set[fx.Node], node: fx.Node) -> bool:
    """Whether all readers of a node, also through views that are copied into groups, are members of one group."""
    groups, views = set(), [node]
    for source in views:  # grows
        for user in source.users:
            number = grouping.group_of.get(user)
            if number is not None:
                groups.add(number)
            elif op_name(user.target) in _REGROUPINGS and user not in outside:
                views.append(user)
            else:
                return False
    return len(groups) == 1


def _result_for(group: GroupPlan, source: fx.Node) -> fx.Node | None:
    """The result of a group that can be written into `source`; None where a reader of it is not elementwise."""
    (results,) = group.graph.output_node().args
    made: dict[Any, fx.Node] = dict(zip(results if isinstance(results, tuple) else (results,), group.outputs))
    placeholders = [n for n in group.graph.nodes if n.op == "placeholder"]
    reached, fits = [placeholders[group.inputs.index(source)]], None
    value: Any = source.meta["val"]
    for node in reached:  # grows
        for user in node.users:
            if user.op == "output" or user in reached:
                continue
            if not _keeps_order(user, node):
                return None
            reached.append(user)
            mine = user.meta.get("val")
            equal = alike(mine, value) and same_order(mine, value) or _is_regrouped(mine, value)
            if user in made and fits is None and equal:
                fits = made[user]
    return fits


def _is_regrouped(mine: Any, value: torch.Tensor) -> bool:
    """Whether two row-major tensors of one dtype have equally many elements."""
    if not isinstance(mine, torch.Tensor) or mine.dtype != value.dtype or mine.device != value.device:
        return False
    static = are_numbers(*mine.shape) and mine.numel() == value.numel()
    return static and is_contiguous(mine) and is_contiguous(value)


def _keeps_order(user: fx.Node, source: fx.Node) -> bool:
    """Whether element i of what `user` gives depends on element i of `source` alone, counted in memory order."""
    mine, theirs = user.meta.get("val"), source.meta.get("val")
    if user.target is operator.getitem:
        return source.target is _NORM and bool(user.args[1] == 0 or not user.users)
    if user.target is _NORM:
        return user.args[0] is source and source not in user.args[1:]
    if not isinstance(mine, torch.Tensor) or not isinstance(theirs, torch.Tensor):
        return False
    if op_name(user.target) in _REGROUPINGS:
        return is_contiguous(mine) and is_contiguous(theirs)
    return is_pointwise(user.target) and same(mine.shape, theirs.shape)
