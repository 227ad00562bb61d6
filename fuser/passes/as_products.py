"""Convolutions on CUDA that become products: the walk over a graph, and the results of their gradients."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import fx

from fuser import config, targets
from fuser.errors import Unsupported
from fuser.passes.layouts import Relayout, copy_of, fake_mode_of, is_static
from fuser.passes.rounded_factors import product_rounds_no_more

aten = torch.ops.aten
Form = TypeVar("Form")


def convolutions_to_products(
    module: fx.GraphModule, form_of: Callable[[fx.Node], Form | None], is_faster: Callable[[Form, torch.device], bool],
    convert: Callable[[Relayout, fx.Node, Form], None],
) -> int:  # fmt: skip
    """Convert the nodes that have a form, where products are faster, and let the others follow. Returns their number.

    0, with the graph as it was, where layouts must be eager's, for free sizes, and where a step fails.
    """
    mode = fake_mode_of(module.graph)
    if config.is_deterministic() or config.convolution_layout == "eager" or mode is None:
        return 0
    if all(form_of(n) is None for n in module.graph.nodes) or not is_static(module.graph):
        return 0
    walk, changed = Relayout(copy_of(module.graph), mode, stored=True), 0
    try:
        for node in list(walk.graph.nodes):
            form = form_of(node)
            if form is None or not is_faster(form, node.args[0].meta["val"].device):
                walk.follow(node)
                continue
            changed += 1
            with walk.graph.inserting_before(node):
                convert(walk, node, form)
    except (Unsupported, RuntimeError, ValueError):
        return 0
    if changed:
        module.graph = walk.graph
    return changed


def operands(node: fx.Node) -> tuple[Any, torch.Tensor, torch.Tensor] | None:
    """The arguments of a convolution on CUDA, or of its gradients behind that of the result, its images and filters.

    None for other nodes, for transposed ones, and where a product would round factors more.
    """
    if node.target is not aten.convolution.default and not is_backward(node) or node.kwargs:
        return None
    args: Any = node.args[int(is_backward(node)) :]
    x, weight = (a.meta.get("val") for a in args[:2])
    if not targets.has(x.device, "cudnn") or x.dtype is not weight.dtype or args[6]:
        return None
    if not product_rounds_no_more(x.dtype):
        return None
    return args, x, weight


def is_backward(node: fx.Node) -> bool:
    """Whether a node is the gradients of a convolution."""
    return node.target is aten.convolution_backward.default


def replace_gradients(walk: Relayout, node: fx.Node, makers: Sequence[Callable[[], fx.Node]]) -> None:
    """Replace the gradients of a convolution, of images, filters and bias, by what `makers` give, if they are read."""
    for item in list(node.users):
        which: Any = item.args[1]
        assert item.target is operator.getitem
        if item.users:
            walk.replace(item, makers[which]())
        else:
            walk.graph.erase_node(item)
    walk.graph.erase_node(node)
