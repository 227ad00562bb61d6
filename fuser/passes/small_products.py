"""Products of matrices of a few elements: transforms of points, rotations, rotary embeddings by 2×2 matrices.

A library handles each matrix separately. If the summed dim and one more are short, a kernel adds up the few terms, and
fuses with its neighbours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fuser import targets
from fuser.passes.classify import tensors_of
from fuser.passes.hints import are_numbers, is_contiguous, same

aten: Any = torch.ops.aten
_PRODUCTS = (aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default)
_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def small_products_to_sums(module: fx.GraphModule) -> int:
    """A product of matrices of a few rows or columns, whose summed dim is short, becomes a sum of products."""
    found = [n for n in module.graph.nodes if n.target in _PRODUCTS and _is_small(n)]
    for node in found:
        _put_sum(node)
    return len(found)


def _is_small(node: fx.Node) -> bool:
    values = [v for a in (*node.args, node) if isinstance(a, fx.Node) for v in tensors_of(a.meta.get("val"))]
    if node.kwargs or len(values) != len(node.args) + 1 or any(v.layout is not torch.strided for v in values):
        return False
    x, w, out = values[-3:]
    if out.dtype not in _FLOATS or any(v.dtype is not out.dtype for v in values) or not is_contiguous(out):
        return False
    target = targets.known(out.device.type)
    most = target.components if target is not None else 0
    inner, outer = x.shape[-1], [n for n in (x.shape[-2], w.shape[-1]) if are_numbers(n)]
    return are_numbers(inner) and 0 < inner <= most and any(0 < n <= most for n in outer)


def _put_sum(node: fx.Node) -> None:
    """Replace a product by the sum of products; of 16-bit floats in float32, as in the library."""
    graph, dtype = node.graph, node.meta["val"].dtype
    operands: list[Any] = list(node.args)
    dim = node.meta["val"].dim() - 2

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        new = graph.call_function(target, args, kwargs)
        given = fx.node.map_arg(args, lambda a: a.meta["val"])
        new.meta = {**node.meta, "val": target(*given, **kwargs)}
        return new

    with graph.inserting_before(node):
        if dtype.itemsize == 2:
            operands = [call(aten._to_copy.default, a, dtype=torch.float32) for a in operands]
        *added, x, w = operands
        total: fx.Node | None = None
        for k in range(x.meta["val"].shape[-1]):
            column = call(aten.unsqueeze.default, call(aten.select.int, x, dim + 1, k), dim + 1)
            row = call(aten.unsqueeze.default, call(aten.select.int, w, dim, k), dim)
            term = call(aten.mul.Tensor, column, row)
            total = term if total is None else call(aten.add.Tensor, total, term)
        assert total is not None
        for a in added:
            total = call(aten.add.Tensor, total, a)
        if dtype.itemsize == 2:
            total = call(aten._to_copy.default, total, dtype=dtype)
        if not same(total.meta["val"].stride(), node.meta["val"].stride()):
            total = call(aten.clone.default, total, memory_format=torch.contiguous_format)
    total.meta = dict(node.meta)
    node.replace_all_uses_with(total)
    graph.erase_node(node)


__all__ = ["small_products_to_sums"]
