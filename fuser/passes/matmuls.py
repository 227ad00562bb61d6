"""Products and sums: joined or split, whichever suits their neighbours.

A row added to a product is a bias, which the library adds at no cost. An added matrix is not: the library reads and
writes it separately, while a kernel fuses the sum with its neighbours. A row is not joined either if the product is
written into chosen memory (`runtime.products`) and a kernel reads it in any case.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fuser import targets
from fuser.passes.calls import put_for
from fuser.passes.classify import LIBRARY, is_view, op_name
from fuser.passes.hints import are_numbers, same
from fuser.passes.onednn import is_large

aten = torch.ops.aten


def _value(node: Any) -> torch.Tensor | None:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def _is_row(bias: Any, product: fx.Node) -> bool:
    """Whether `bias` has one element for each column of a product, with the same dtype and device."""
    value, other = _value(bias), _value(product)
    if value is None or other is None or value.dim() != 1 or value.dtype != other.dtype or value.device != other.device:
        return False
    return are_numbers(value.shape[0]) and same(value.shape[0], other.shape[1]) and value.is_floating_point()


def add_to_addmm(module: fx.GraphModule) -> int:
    """A product whose only reader adds a row becomes `addmm`, with the row as its bias."""
    changed = 0
    for node in list(module.graph.nodes):
        if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2:
            continue
        for product, bias in (node.args, node.args[::-1]):
            if getattr(product, "target", None) is not aten.mm.default or len(product.users) != 1:
                continue
            if _is_row(bias, product):
                put_for(node, aten.addmm.default, (bias, *product.args))
                module.graph.erase_node(product)
                changed += 1
                break
    return changed


def _is_matrix(added: Any, product: fx.Node) -> bool:
    """Whether `added` has the product's sizes and no 16-bit floats, whose product would be rounded once more."""
    value, other = _value(added), product.meta["val"]
    if value is None or value.dim() != 2 or value.dtype != other.dtype or value.dtype.itemsize < 4:
        return False
    return same(value.shape, other.shape)


def _is_taken_whole(node: fx.Node) -> bool:
    """Whether a node, or a view of it, leaves the graph or is read by a library, so that no kernel can add a row."""
    readers = node.users
    if any(u.op == "output" or op_name(u.target) in LIBRARY for u in readers):
        return True
    return any(is_view(u.target) and _is_taken_whole(u) for u in readers)


def _is_cublas(node: fx.Node) -> bool:
    """Whether a product is in float32 on CUDA, where cuBLAS without a bias has better kernels than cuBLASLt with one.

    45 products of transformers on an H200: 1.14 times the time of the plain product (geometric mean), 2.3 at most. A
    product in 16 bits would be rounded before the bias is added, and once more after it.
    """
    value = _value(node)
    return value is not None and targets.has(value.device, "cublas") and value.dtype is torch.float32


def addmm_to_add(module: fx.GraphModule) -> int:
    """An `addmm` with a matrix to add, a very large one, or one in float32 on CUDA becomes a product and a sum."""
    changed = 0
    for node in list(module.graph.nodes):
        if node.target is not aten.addmm.default or node.kwargs:
            continue
        matrix, left, right = node.args
        by_kernel = _is_row(matrix, node) and (is_large(node) or _is_cublas(node)) and not _is_taken_whole(node)
        if not _is_matrix(matrix, node) and not by_kernel:
            continue
        with module.graph.inserting_before(node):
            product = module.graph.call_function(aten.mm.default, (left, right))
        product.meta = dict(node.meta)
        put_for(node, aten.add.Tensor, (product, matrix))  # keeps eager's strides: those of the product
        changed += 1
    return changed
