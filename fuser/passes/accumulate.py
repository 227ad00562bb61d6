"""Gradients of embeddings, added into existing rows instead of through a matrix of zeros."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fuser import targets
from fuser.passes.calls import put_for
from fuser.passes.classify import LIBRARY, op_name
from fuser.passes.hints import are_numbers, is_contiguous, same
from fuser.runtime import products, untouched, warm

aten = torch.ops.aten
_SPARSE = 4  # a table's gradient is sparse if at most one of so many of its pages is written


def add_rows_in_place(module: fx.GraphModule) -> int:
    """An embedding's gradient that is added to a product's, as for weights shared with a head, is added in place.

    On the CPU. ATen would fill a matrix of zeros and add the whole matrix. Rows are added one by one in the order of
    the words, so the bits are the same each time.
    """
    changed = 0
    for node in list(module.graph.nodes):
        if node.target is not aten.add.Tensor or node.kwargs:
            continue
        for own, other in (node.args, node.args[::-1]):
            if _is_scattered(other, node) and _is_fresh(own, node):
                _add_rows(node, own, other)
                changed += 1
                break
    return changed


def add_rows_to_zeros(module: fx.GraphModule) -> int:
    """The gradient of a large embedding table of which few rows are read is added into untouched pages of zeros.

    On the CPU. The pass comes last, when the inputs of the gradient's rows are freed. Rows are added in the order of
    the words.
    """
    changed = 0
    for node in list(module.graph.nodes):
        if not _is_gradient(node) or any(user.op != "output" for user in node.users) or not _is_sparse(node):
            continue
        value = node.meta["val"]
        with module.graph.inserting_before(module.graph.output_node()):
            words, rows = _words_and_rows(module.graph, node)
            zeros = module.graph.call_function(untouched.zeros, (tuple(value.shape), value.dtype, words))
            zeros.meta = {"val": value}
            added = module.graph.call_function(aten.index_add_.default, (zeros, 0, words, rows))
        added.meta = dict(node.meta)
        node.replace_all_uses_with(added)
        module.graph.erase_node(node)
        changed += 1
    return changed


def _is_sparse(node: fx.Node) -> bool:
    """Whether an embedding's gradient is large enough for its own memory mapping, and few of its pages are written."""
    value, rows = node.meta["val"], node.args[0].meta["val"]  # type: ignore[union-attr]
    if not _is_plain(node):
        return False
    row = value.shape[1] * value.dtype.itemsize
    nbytes = value.shape[0] * row
    written = rows.numel() // max(value.shape[1], 1) * (row + untouched.PAGE)
    return nbytes >= warm.MAPPED and bool(written * _SPARSE <= nbytes)


def _is_scattered(node: Any, reader: fx.Node) -> bool:
    """Whether a node is an embedding's gradient that only this reader uses."""
    return list(getattr(node, "users", ())) == [reader] and _is_gradient(node)


def _is_gradient(node: Any) -> bool:
    """Whether a node is an embedding's gradient without a padding word, in plain float32."""
    if getattr(node, "target", None) is not aten.embedding_dense_backward.default:
        return False
    grad, indices, _, padding, by_frequency = node.args
    whole = _is_plain(grad) and is_contiguous(indices.meta["val"])
    return whole and isinstance(padding, int) and padding < 0 and by_frequency is False


def _is_fresh(node: Any, reader: fx.Node) -> bool:
    """Whether a node is a product in memory of its own, of the sum's shape, that only this reader uses."""
    if getattr(node, "op", "") != "call_function":
        return False
    if op_name(node.target) not in LIBRARY and node.target not in (products.product, products.sized_product):
        return False
    alike = _is_plain(node) and same(node.meta["val"].shape, reader.meta["val"].shape)
    return alike and list(node.users) == [reader]


def _is_plain(node: fx.Node) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not are_numbers(*value.shape):
        return False
    return value.dtype is torch.float32 and targets.is_host(value.device) and value.is_contiguous()


def _add_rows(node: fx.Node, own: Any, scattered: Any) -> None:
    graph = node.graph
    with graph.inserting_before(node):
        words, rows = _words_and_rows(graph, scattered)
    put_for(node, aten.index_add_.default, (own, 0, words, rows))
    graph.erase_node(scattered)


def _words_and_rows(graph: fx.Graph, scattered: Any) -> tuple[fx.Node, fx.Node]:
    """An embedding's words as one dimension, and the gradient's rows, created at the graph's insertion point."""
    grad, indices = scattered.args[:2]
    words = graph.call_function(aten.view.default, (indices, [-1]))
    words.meta = {"val": indices.meta["val"].view(-1)}
    rows = graph.call_function(aten.view.default, (grad, [-1, grad.meta["val"].shape[-1]]))
    rows.meta = {"val": grad.meta["val"].view(-1, grad.meta["val"].shape[-1])}
    return words, rows
