"""Gradients of embeddings, added where they belong instead of to a matrix of zeros."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fuser import config
from fuser.passes.calls import put_for
from fuser.passes.classify import LIBRARY, op_name

aten = torch.ops.aten


def add_rows_in_place(module: fx.GraphModule) -> int:
    """The gradient of an embedding that is added to a product's, as of weights that a head shares, is added in place.

    On the CPU: rows of the product's result are added to, where otherwise a matrix of zeros would be filled and added
    whole. It runs row by row, in the order of the words, so it gives the same bits each time.
    """
    if config.numerics == "eager":
        return 0
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


def _is_scattered(node: Any, reader: fx.Node) -> bool:
    """Whether a node is an embedding's gradient without a padding word, in plain float32, for this reader alone."""
    if getattr(node, "target", None) is not aten.embedding_dense_backward.default or list(node.users) != [reader]:
        return False
    grad, indices, _, padding, by_frequency = node.args
    whole = _is_plain(grad) and indices.meta["val"].is_contiguous()
    return whole and isinstance(padding, int) and padding < 0 and by_frequency is False


def _is_fresh(node: Any, reader: fx.Node) -> bool:
    """Whether a node is a product's result in memory of its own, of the size of the sum, which nobody else reads."""
    if getattr(node, "op", "") != "call_function" or op_name(node.target) not in LIBRARY:
        return False
    same = _is_plain(node) and node.meta["val"].shape == reader.meta["val"].shape
    return same and list(node.users) == [reader]


def _is_plain(node: fx.Node) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not all(isinstance(s, int) for s in value.shape):
        return False
    return value.dtype is torch.float32 and value.device.type == "cpu" and value.is_contiguous()


def _add_rows(node: fx.Node, own: Any, scattered: Any) -> None:
    graph = node.graph
    grad, indices = scattered.args[:2]
    with graph.inserting_before(node):
        words = graph.call_function(aten.view.default, (indices, [-1]))
        words.meta = {"val": indices.meta["val"].view(-1)}
        rows = graph.call_function(aten.view.default, (grad, [-1, grad.meta["val"].shape[-1]]))
        rows.meta = {"val": grad.meta["val"].view(-1, grad.meta["val"].shape[-1])}
    put_for(node, aten.index_add_.default, (own, 0, words, rows))
    graph.erase_node(scattered)
