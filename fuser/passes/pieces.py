"""Norms in training: the cut between forward and backward sees their statistics and what these make of the input.

A norm's backward needs the norm's input in any case. With the norm as one operator its result would be saved beside
that whenever an activation's gradient reads it. In the joint graph the result is therefore written out, as a function
of the input and the statistics; the forward has its norm whole again once the cut is made. Lowerings of norms have the
same operations in the same order, so that the backward sees the very bits of the forward.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fuser import config, targets
from fuser.passes.classify import LIBRARY, after_tangents, is_view, op_name
from fuser.passes.hints import is_contiguous, same
from fuser.passes.writing import Writer

aten = torch.ops.aten
_WHOLE = "norm_in_pieces"  # in the meta of a result that was written out: the name of its norm
_FAR = 64  # nodes behind a norm that are looked at: with more of them the backward reads some
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def norms_in_pieces(module: fx.GraphModule) -> int:
    """A norm's result is written out, by its statistics, where the backward reads it and the norm's input."""
    behind = after_tangents(module.graph)
    if config.numerics == "eager" or not behind:
        return 0
    changed = 0
    for norm in [n for n in module.graph.nodes if n.target in _PIECES and not n.kwargs and n not in behind]:
        items = {u.args[1]: u for u in norm.users if u.target is operator.getitem}
        if len(items) == len(norm.users) and _is_read(norm, items, behind) and _is_plain(norm, items):
            _write_out(norm, items, behind)
            changed += 1
    return changed


def _is_read(norm: fx.Node, items: dict[Any, fx.Node], behind: set[fx.Node]) -> bool:
    """Whether the backward reads the norm's input and, through elementwise work or directly, its result."""
    if 0 not in items or not any(u in behind for u in norm.args[0].users):  # type: ignore[union-attr]
        return False
    found, seen = [items[0]], {items[0]}
    for node in found:
        if len(found) > _FAR or any(u in behind for u in node.users):
            return True
        more = [u for u in node.users if u not in seen and (is_view(u.target) or _is_pointwise(u))]
        found += more
        seen.update(more)
    return False


def _is_pointwise(node: fx.Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def _is_plain(norm: fx.Node, items: dict[Any, fx.Node]) -> bool:
    """Whether kernels compute a norm from float32 statistics as it is written out here."""
    x, out = norm.args[0].meta["val"], items[0].meta["val"]  # type: ignore[union-attr]
    statistics = [n for i, n in items.items() if i in _PIECES[norm.target][1]]
    floats = all(s.meta["val"].dtype is torch.float32 for s in statistics) and x.dtype in _FLOATS
    known = targets.known(x.device.type) is not None and getattr(out, "fake_mode", None) is not None
    numbers = norm.target is not aten.native_group_norm.default or type(x.shape[1]) is int
    numbers = numbers and (is_contiguous(out) or same(out.stride(), x.stride()))
    return known and floats and numbers and out.dtype is x.dtype and len(statistics) == len(_PIECES[norm.target][1])


def _write_out(norm: fx.Node, items: dict[Any, fx.Node], behind: set[fx.Node]) -> None:
    spell, numbers = _PIECES[norm.target]
    write = Writer(items[0])
    statistics = []
    for i in numbers:  # in front of what reads them here
        own = write(operator.getitem, norm, i)
        own.meta = dict(items[i].meta)
        items[i].replace_all_uses_with(own)
        norm.graph.erase_node(items[i])
        statistics.append(own)
    shaped, weight, bias = spell(write, norm, *statistics)
    value = _wide(write, norm.args[0])
    steps = (aten.sub.Tensor, aten.mul.Tensor, aten.mul.Tensor, aten.add.Tensor)
    for target, each in zip(steps, (*shaped, weight, bias)):
        if each is not None:
            value = write(target, value, _wide(write, each))
    made = items[0].meta["val"]
    if value.meta["val"].dtype is not made.dtype:
        value = write(torch.ops.prims.convert_element_type.default, value, made.dtype)
    if not same(value.meta["val"].stride(), made.stride()):
        value = write(aten.clone.default, value, memory_format=torch.contiguous_format)
    value.meta[_WHOLE] = norm.name
    write.instead(value)
    if "recompute" not in value.meta and _in_library(value, behind):
        value.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _in_library(node: fx.Node, behind: set[fx.Node]) -> bool:
    """Whether a library's call in the backward reads a node or a view of it: then it is written to memory anyway."""
    known = [node]
    for n in known:
        if any(u in behind and op_name(u.target) in _CALLS for u in n.users):
            return True
        known += [u for u in n.users if is_view(u.target) and u not in known]
    return False


_CALLS = frozenset({*LIBRARY, "aten.convolution_backward"})


def _wide(write: Writer, node: Any) -> fx.Node:
    if node.meta["val"].dtype is torch.float32:
        return node  # type: ignore[no-any-return]
    return write(torch.ops.prims.convert_element_type.default, node, torch.float32)


Spelled = tuple[tuple[fx.Node | None, fx.Node], Any, Any]


def _layer(write: Writer, norm: fx.Node, mean: fx.Node, rstd: fx.Node) -> Spelled:
    return (mean, rstd), norm.args[2], norm.args[3]


def _rms(write: Writer, norm: fx.Node, rstd: fx.Node) -> Spelled:
    return (None, rstd), norm.args[2], None


def _batch(write: Writer, norm: fx.Node, mean: fx.Node, rstd: fx.Node) -> Spelled:
    of_channel = _channels(write, norm)
    weight, bias = norm.args[1:3]
    return (of_channel(mean), of_channel(rstd)), of_channel(weight), of_channel(bias)


def _group(write: Writer, norm: fx.Node, mean: fx.Node, rstd: fx.Node) -> Spelled:
    x: fx.Node = norm.args[0]  # type: ignore[assignment]
    value, groups = x.meta["val"], norm.args[6]
    samples, channels = write.size(x, 0), value.shape[1]

    def of_each(t: fx.Node) -> fx.Node:
        """(samples, groups) to (samples, channels, 1, …)"""
        parts = write(aten.expand.default, write(aten.unsqueeze.default, t, 2), [samples, groups, channels // groups])
        parts = write(aten.clone.default, parts, memory_format=torch.contiguous_format)
        return write(aten.view.default, parts, [samples, channels, *[1] * (value.dim() - 2)])

    of_channel = _channels(write, norm)
    return (of_each(mean), of_each(rstd)), of_channel(norm.args[1]), of_channel(norm.args[2])


def _channels(write: Writer, norm: fx.Node) -> Callable[[Any], Any]:
    rank = norm.args[0].meta["val"].dim()  # type: ignore[union-attr]
    return lambda t: None if t is None else write(aten.view.default, t, [1, -1, *[1] * (rank - 2)])


# How each is written out, and which of its results are the statistics that the lowering subtracts and multiplies by.
_PIECES: dict[Any, tuple[Callable[..., Spelled], tuple[int, ...]]] = {
    aten.native_layer_norm.default: (_layer, (1, 2)),
    aten._fused_rms_norm.default: (_rms, (1,)),
    aten._native_batch_norm_legit_functional.default: (_batch, (1, 2)),
    aten._native_batch_norm_legit.no_stats: (_batch, (1, 2)),
    aten.native_group_norm.default: (_group, (1, 2)),
}


def norms_whole(forward: fx.GraphModule) -> None:
    """Give a forward, behind the cut, the results of norms again that were written out for it."""
    graph = forward.graph
    names = {n.name: n for n in graph.nodes}
    for value in [n for n in graph.nodes if _WHOLE in n.meta]:
        norm = names.get(value.meta.pop(_WHOLE))
        if norm is None:
            continue
        with graph.inserting_after(norm):
            out = graph.call_function(operator.getitem, (norm, 0))
        out.meta = dict(value.meta)
        value.replace_all_uses_with(out)
        _erase(graph, value)


def _erase(graph: fx.Graph, node: fx.Node) -> None:
    """A node that nobody reads, and what only it read."""
    todo = [node]
    while todo:
        n = todo.pop()
        if n.op == "call_function" and not n.users and not n._erased:
            todo += n.all_input_nodes
            graph.erase_node(n)
