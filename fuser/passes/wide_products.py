"""Computes 16-bit products and convolutions in float32 if the machine has no fast ones.

On the CPU, ATen multiplies float16 with its own loops where oneDNN does not. On two AMD cores a product of 512×512×2048
took 1,020 ms, and takes 6 with casts; a convolution of 8×64×56×56 took 237, and takes 5. Sums are rounded once, as at
best on ATen.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fuser import targets
from fuser.attention.products import product_dtype
from fuser.passes.hints import same, size_hint

aten: Any = torch.ops.aten
LEAST_WORK = 1 << 15  # multiplications, below which casts cost more
_FEW_ROWS = 4  # with fewer, ATen's product of a vector and a transposed matrix runs at memory speed
_TENSORS = {  # number of leading tensor arguments
    aten.mm.default: 2, aten.bmm.default: 2, aten.addmm.default: 3, aten.baddbmm.default: 3,
    aten.convolution.default: 3, aten.convolution_backward.default: 3,
}  # fmt: skip


def products_in_float32(module: fx.GraphModule) -> int:
    """A product or convolution in 16-bit floats without a fast kernel on the CPU is computed in float32."""
    return sum(_widened(node) for node in list(module.graph.nodes) if node.target in _TENSORS)


def _widened(node: fx.Node) -> bool:
    count = _TENSORS[node.target]
    values = [_value(a) for a in node.args[:count]]
    given = [v for v in values if v is not None]
    dtype = given[0].dtype if given else torch.float32
    if dtype.itemsize != 2 or not dtype.is_floating_point or product_dtype(dtype) is dtype:
        return False
    if any(not targets.has(v.device, "onednn") or v.dtype is not dtype for v in given) or not _is_worth_it(node, given):
        return False
    if node.target is aten.convolution_backward.default and any(u.target is not operator.getitem for u in node.users):
        return False
    graph, target = node.graph, node.target
    assert callable(target)
    with graph.inserting_before(node):
        wide = [_cast(graph, a, torch.float32) if isinstance(a, fx.Node) else a for a in node.args[:count]]
        new = graph.call_function(target, (*wide, *node.args[count:]), dict(node.kwargs))
    new.meta = {**node.meta, "val": _computed(new)}
    pairs = _results(node, new)
    if not all(same(old.meta["val"].stride(), made.meta["val"].stride()) for old, made in pairs):
        for made in {made for _, made in pairs} | {new}:
            if made is not new:
                graph.erase_node(made)
        graph.erase_node(new)
        return False
    for old, made in pairs:
        with graph.inserting_before(old):
            narrow = _cast(graph, made, dtype)
        narrow.meta = dict(old.meta)
        old.replace_all_uses_with(narrow)
        if old is not node:
            graph.erase_node(old)
    graph.erase_node(node)
    return True


def _value(argument: Any) -> torch.Tensor | None:
    found = argument.meta.get("val") if isinstance(argument, fx.Node) else None
    return found if isinstance(found, torch.Tensor) else None


def _is_worth_it(node: fx.Node, values: Sequence[torch.Tensor]) -> bool:
    if node.target in (aten.convolution.default, aten.convolution_backward.default):
        return True
    x, w = values[-2:]
    rows, inner, columns = (size_hint(n) for n in (x.shape[-2], x.shape[-1], w.shape[-1]))
    work = rows * inner * columns * (size_hint(x.shape[0]) if x.dim() == 3 else 1)
    turned = size_hint(w.stride()[-2]) == 1
    return work >= LEAST_WORK and not (rows < _FEW_ROWS and turned)


def _cast(graph: fx.Graph, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    new = graph.call_function(aten._to_copy.default, (node,), {"dtype": dtype})
    new.meta["val"] = node.meta["val"].to(dtype)
    return new


def _computed(node: fx.Node) -> Any:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda a: a.meta["val"])
    target: Any = node.target
    return target(*args, **kwargs)


def _results(node: fx.Node, new: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    """The nodes of a call's results, each with a node for the same result of the new call."""
    if node.target is not aten.convolution_backward.default:
        return [(node, new)]
    pairs = []
    for user in list(node.users):
        number: Any = user.args[1]
        with node.graph.inserting_before(user):
            made = node.graph.call_function(operator.getitem, (new, number))
        made.meta = {**user.meta, "val": new.meta["val"][number]}
        pairs.append((user, made))
    return pairs


__all__ = ["products_in_float32"]
