"""On CUDA a convolution's bias is added by the kernel that reads the convolution's result.

cuDNN's convolution has no bias: ATen adds it in another pass over the result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fuser import config
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
    if not isinstance(value, torch.Tensor) or not isinstance(bias, torch.Tensor) or value.device.type != "cuda":
        return False
    same = value.dtype == bias.dtype and value.dtype.is_floating_point and are_numbers(*bias.shape)
    return same and not is_left_alone(node)


def bias_behind_convolution(module: fx.GraphModule) -> int:
    """On CUDA the bias of a convolution whose result a kernel reads is added by that kernel."""
    if config.numerics == "eager":
        return 0
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
