"""Kernels that write a result into the memory of an input that nothing reads later, such as a convolution's result.

If all readers of a product's or convolution's result are elementwise operators of one group, a result of the group with
the same sizes, strides and dtype is written into it. The step then needs one tensor less at its peak.
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
from fuser.passes.classify import op_name
from fuser.passes.extract import GroupPlan, Plan
from fuser.passes.grouping import Grouping
from fuser.passes.hints import are_numbers, is_contiguous, same
from fuser.passes.reinplacing import alike, same_order, write_into

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
    for i, group in enumerate(groups):
        if group.written():
            continue
        for source in group.inputs:
            is_free = source in outside and _is_new(source) and _is_read_by_one_group(grouping, outside, source)
            value = _result_for(group, source) if is_free else None
            if value is not None:
                groups[i] = write_into(group, source, value)
                found.add(i)
                break
    return dataclasses.replace(plan, groups=tuple(groups)), frozenset(found)


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
            if user in made and fits is None and alike(mine, value) and same_order(mine, value):
                fits = made[user]
    return fits


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
