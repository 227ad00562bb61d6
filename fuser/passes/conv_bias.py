"""On CUDA a convolution's bias is added by the kernel that reads the convolution's result; its gradient is a sum.

cuDNN's convolution has no bias: ATen adds it in another pass over the result, and adds up the result's gradient in
another pass, too.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fuser import targets
from fuser.passes.calls import put_for
from fuser.passes.cublas import is_left_alone
from fuser.passes.hints import are_numbers

aten = torch.ops.aten


def _is_biased(node: fx.Node) -> bool:
    """Whether a node is a real convolution on CUDA with a bias, and some kernel reads its result."""
    if node.target is not aten.convolution.default or node.kwargs or not isinstance(node.args[2], fx.Node):
        return False
    value: Any = node.meta.get("val")
    bias: Any = node.args[2].meta.get("val")
    if not isinstance(value, torch.Tensor) or not isinstance(bias, torch.Tensor):
        return False
    if not targets.has(value.device, "cudnn"):
        return False
    same = value.dtype == bias.dtype and value.dtype.is_floating_point and are_numbers(*bias.shape)
    return same and not is_left_alone(node)


def bias_behind_convolution(module: fx.GraphModule) -> int:
    """On CUDA the bias of a convolution whose result a kernel reads is added by that kernel."""
    changed = 0
    for node in list(module.graph.nodes):
        if not _is_biased(node):
            continue
        x, w, bias, *rest = node.args
        value, held = node.meta["val"], bias.meta["val"]
        plain = put_for(node, node.target, (x, w, None, *rest))
        sizes = [held.shape[0]] + [1] * (value.dim() - 2)
        with module.graph.inserting_after(plain):
            column = module.graph.call_function(aten.view.default, (bias, sizes))
        column.meta = {"val": held.view(sizes)}
        with module.graph.inserting_after(column):
            added = module.graph.call_function(aten.add.Tensor, (plain, column))
        added.meta = dict(plain.meta)
        for user in [u for u in plain.users if u is not added]:
            user.replace_input_with(plain, added)
        changed += 1
    return changed


def bias_gradients_apart(module: fx.GraphModule) -> int:
    """On CUDA the gradient of a convolution's bias is a sum of its own, which fuses with what else reads the images."""
    changed = 0
    for node in list(module.graph.nodes):
        if node.target is aten.convolution_backward.default and not node.kwargs and _sums_on_cuda(node):
            changed += _take_apart(module.graph, node)
    return changed


def _sums_on_cuda(node: fx.Node) -> bool:
    grad: Any = node.args[0]
    value = grad.meta.get("val")
    on_cuda = isinstance(value, torch.Tensor) and targets.has(value.device, "cudnn") and value.dtype.is_floating_point
    return bool(on_cuda and node.args[10][2])  # type: ignore[index]


def _take_apart(graph: fx.Graph, node: fx.Node) -> bool:
    item = gradient_of(node, 2)
    if item is None:
        return False
    grad: Any = node.args[0]
    with graph.inserting_before(node):
        total = graph.call_function(aten.sum.dim_IntList, (grad, [0, *range(2, grad.meta["val"].dim())]))
    total.meta = dict(item.meta)
    item.replace_all_uses_with(total)
    graph.erase_node(item)
    leave_out(node, 2)
    return True


def gradient_of(node: fx.Node, which: int) -> fx.Node | None:
    """The node that takes one of a convolution's gradients; None if it is not computed, or the call has other users."""
    mask: Any = node.args[10]
    if not mask[which] or any(u.target is not operator.getitem for u in node.users):
        return None
    return next((u for u in node.users if u.args[1] == which), None)


def leave_out(node: fx.Node, which: int) -> None:
    """Let the call not compute a gradient that has been replaced; without other gradients it is erased."""
    if not node.users:
        node.graph.erase_node(node)
        return
    mask: Any = node.args[10]
    node.update_arg(10, [m and n != which for n, m in enumerate(mask)])
    node.meta["val"] = tuple(None if n == which else v for n, v in enumerate(node.meta["val"]))
