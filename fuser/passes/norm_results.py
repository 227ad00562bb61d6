"""Norms in training: results are decomposed before the cut between forward and backward, and recomposed after it.

A norm's backward reads the norm's input. If the norm is one operator, the cut also saves its result whenever an
activation's gradient reads that. So the joint graph computes the result from the input and the statistics, which the
backward can repeat. Lowerings of norms have the same operations in the same order: the bits are the forward's.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fuser import targets
from fuser.canonical.schemas import is_pointwise
from fuser.passes.calls import erase_unread
from fuser.passes.classify import LIBRARY, after_tangents, is_read, is_view, op_name
from fuser.passes.hints import is_contiguous, same
from fuser.passes.rounded_factors import HALVES
from fuser.passes.writing import Writer

aten = torch.ops.aten
_CONVERT = torch.ops.prims.convert_element_type.default
_NORM = "decomposed_norm"  # in the meta of a result that was decomposed: the name of its norm
_MOST_READERS = 64  # readers of a norm's result that are searched; of more, the backward is assumed to read some
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def decompose_norms(module: fx.GraphModule) -> int:
    """A norm's result that the backward reads is computed from its statistics and its input by single operators."""
    behind = after_tangents(module.graph)
    if not behind:
        return 0
    changed = 0
    for norm in [n for n in module.graph.nodes if n.target in _SPELLED and not n.kwargs and n not in behind]:
        items = {u.args[1]: u for u in norm.users if u.target is operator.getitem}
        if len(items) != len(norm.users) or not _needed(norm, items, behind):
            continue
        if _has_rounded_statistics(norm, items):
            norm, items = _in_float32(norm, items)
        if _is_plain(norm, items):
            _decompose(norm, items, behind)
            changed += 1
    return changed


def _has_rounded_statistics(norm: fx.Node, items: dict[Any, fx.Node]) -> bool:
    """Whether a group norm gives its statistics in its own 16-bit dtype, from which no result can be repeated."""
    if norm.target is not aten.native_group_norm.default or not {1, 2} <= items.keys():
        return False
    x, *others = (n.meta["val"] for n in (norm.args[0], items[0], items[1], items[2]))  # type: ignore[union-attr]
    can_lower = targets.known(x.device.type) is not None and type(x.shape[1]) is int
    rounded = x.dtype in HALVES and all(t.dtype is x.dtype for t in others)
    return can_lower and rounded and getattr(x, "fake_mode", None) is not None


def _in_float32(norm: fx.Node, items: dict[Any, fx.Node]) -> tuple[fx.Node, dict[Any, fx.Node]]:
    """A norm and its results, made in float32 from the same operands; readers get rounded results as before.

    A kernel computes both in the same way.
    """
    write = Writer(next(u for u in norm.graph.nodes if u in norm.users))
    wide = write(norm.target, *(_wide(write, a) for a in norm.args[:3]), *norm.args[3:])
    made = {}
    for i, item in items.items():
        write = Writer(item)
        made[i] = write(operator.getitem, wide, i)
        write.instead(write(_CONVERT, made[i], item.meta["val"].dtype))
    norm.graph.erase_node(norm)
    return wide, made


def _needed(norm: fx.Node, items: dict[Any, fx.Node], behind: set[fx.Node]) -> bool:
    """Whether the backward reads the norm's input and also its result, directly or through elementwise operators."""
    if 0 not in items or not any(u in behind for u in norm.args[0].users):  # type: ignore[union-attr]
        return False
    found, seen = [items[0]], {items[0]}
    for node in found:
        if len(found) > _MOST_READERS or any(u in behind for u in node.users):
            return True
        more = [u for u in node.users if u not in seen and (is_view(u.target) or is_pointwise(u.target))]
        found += more
        seen.update(more)
    return False


def _is_plain(norm: fx.Node, items: dict[Any, fx.Node]) -> bool:
    """Whether kernels compute the norm from float32 statistics in the order used here."""
    x, out = norm.args[0].meta["val"], items[0].meta["val"]  # type: ignore[union-attr]
    statistics = [items[i].meta["val"] if i in items else None for i in _SPELLED[norm.target][1]]
    if any(s is None or s.dtype is not torch.float32 for s in statistics):
        return False
    names = [a.name for a in norm.target._schema.arguments]  # type: ignore[union-attr]
    if "training" in names and norm.args[names.index("training")] is not True:
        return False  # its statistics are empty
    if norm.target is aten.native_group_norm.default and type(x.shape[1]) is not int:
        return False
    ordered = is_contiguous(out) or same(out.stride(), x.stride())
    known = targets.known(x.device.type) is not None and getattr(out, "fake_mode", None) is not None
    return known and ordered and x.dtype in _FLOATS and out.dtype is x.dtype


def _decompose(norm: fx.Node, items: dict[Any, fx.Node], behind: set[fx.Node]) -> None:
    spell, numbers = _SPELLED[norm.target]
    write = Writer(items[0])
    statistics = []
    for i in numbers:  # before their readers here
        own = write(operator.getitem, norm, i)
        own.meta = dict(items[i].meta)
        items[i].replace_all_uses_with(own)
        norm.graph.erase_node(items[i])
        statistics.append(own)
    value = normalised(write, norm.args[0], spell(write, norm, *statistics))
    made = items[0].meta["val"]
    if value.meta["val"].dtype is not made.dtype:
        value = write(_CONVERT, value, made.dtype)
    if not same(value.meta["val"].stride(), made.stride()):
        value = write(aten.clone.default, value, memory_format=torch.contiguous_format)
    value.meta[_NORM] = norm.name
    write.instead(value)
    # An operand of a library's call in the backward is stored in any case. A user's policy stays.
    if "recompute" not in value.meta and is_read(value, lambda u: u in behind and op_name(u.target) in _CALLS):
        value.meta["recompute"] = CheckpointPolicy.MUST_SAVE


_CALLS = frozenset({*LIBRARY, "aten.convolution_backward"})


def normalised(
    write: Writer, x: Any, operands: Sequence[Any], noted: Callable[[fx.Node], fx.Node] = lambda node: node
) -> fx.Node:  # fmt: skip
    """(x - mean) * rstd * weight + bias in float32, without operands that are None. `noted` is called on each step."""
    value: fx.Node = _wide(write, x)
    steps = (aten.sub.Tensor, aten.mul.Tensor, aten.mul.Tensor, aten.add.Tensor)
    for target, each in zip(steps, operands, strict=True):
        if each is not None:
            value = noted(write(target, value, _wide(write, each)))
    return value


def _wide(write: Writer, node: Any) -> Any:
    """A node in float32; None for None."""
    if node is None or node.meta["val"].dtype is torch.float32:
        return node
    return write(_CONVERT, node, torch.float32)


def _layer(write: Writer, norm: fx.Node, mean: fx.Node, rstd: fx.Node) -> Sequence[Any]:
    return mean, rstd, norm.args[2], norm.args[3]


def _rms(write: Writer, norm: fx.Node, rstd: fx.Node) -> Sequence[Any]:
    return None, rstd, norm.args[2], None


def batch_operands(write: Writer, norm: fx.Node, mean: fx.Node, rstd: fx.Node) -> Sequence[Any]:
    """The operands of a batch norm's result, reshaped to its dims."""
    return [_of_channels(write, norm, t) for t in (mean, rstd, *norm.args[1:3])]


def _group(write: Writer, norm: fx.Node, mean: fx.Node, rstd: fx.Node) -> Sequence[Any]:
    x: fx.Node = norm.args[0]  # type: ignore[assignment]
    value, groups = x.meta["val"], norm.args[6]
    samples, channels = write.size(x, 0), value.shape[1]

    each, target = channels // groups, targets.known(value.device.type)
    by_index = value.dim() > 2 and value.stride(1) == 1 and target is not None and target.square_tiles

    def of_each(t: fx.Node) -> fx.Node:
        """(samples, groups) to (samples, channels, 1, …)"""
        if by_index:  # as a view it would divide the channels, which tiles read side by side
            channel = write(aten.arange.default, channels, device=value.device)
            parts = write(aten._unsafe_index.Tensor, t, [None, write(aten.floor_divide.default, channel, each)])
            parts.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE  # for the cut, a gather is no cheap operator
        else:
            parts = write(aten.expand.default, write(aten.unsqueeze.default, t, 2), [samples, groups, each])
            parts = write(aten.clone.default, parts, memory_format=torch.contiguous_format)
        return write(aten.view.default, parts, [samples, channels, *[1] * (value.dim() - 2)])

    return of_each(mean), of_each(rstd), *(_of_channels(write, norm, t) for t in norm.args[1:3])


def _of_channels(write: Writer, norm: fx.Node, t: Any) -> Any:
    rank = norm.args[0].meta["val"].dim()  # type: ignore[union-attr]
    return None if t is None else write(aten.view.default, t, [1, -1, *[1] * (rank - 2)])


# For each norm, the function that gives its operands, and the numbers of the results that are its statistics.
_SPELLED: dict[Any, tuple[Callable[..., Sequence[Any]], tuple[int, ...]]] = {
    aten.native_layer_norm.default: (_layer, (1, 2)),
    aten._fused_rms_norm.default: (_rms, (1,)),
    aten._native_batch_norm_legit_functional.default: (batch_operands, (1, 2)),
    aten._native_batch_norm_legit.no_stats: (batch_operands, (1, 2)),
    aten.native_group_norm.default: (_group, (1, 2)),
}


def recompose_norms(forward: fx.GraphModule) -> None:
    """In the forward, after the cut, use the norms' own results again instead of the decomposed ones."""
    graph = forward.graph
    names = {n.name: n for n in graph.nodes}
    for value in [n for n in graph.nodes if _NORM in n.meta]:
        norm = names.get(value.meta.pop(_NORM))
        if norm is None:
            continue
        with graph.inserting_after(norm):
            out = graph.call_function(operator.getitem, (norm, 0))
        out.meta = dict(value.meta)
        value.replace_all_uses_with(out)
        erase_unread(value)
