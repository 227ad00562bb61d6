"""Fake values for nodes of graphs that Dynamo did not capture; its own graphs have them, and passes depend on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fuser.frontends.fakes import correct
from fuser.passes.calls import writes
from fuser.passes.classify import BUILTIN, qualified_name, tensors_of
from fuser.reasons import because


def give_values(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    """Give the nodes of a graph that writes tensors fake tensors. Nodes that fail, and all after them, get none."""
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    if any("example_value" in n.meta for n in placeholders) or not any(map(writes, gm.graph.nodes)):
        return
    mode = torch._guards.detect_fake_mode(list(example_inputs))
    if mode is None:
        mode = torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True)
        correct(mode)
    try:
        with mode, torch.no_grad():
            fakes = [mode.from_tensor(x) if type(x) is torch.Tensor else x for x in example_inputs]
            _Valued(gm).run(*fakes)
    except Exception:  # eager reports the graph's error when it runs
        return


class _Valued(fx.Interpreter):
    def run_node(self, node: fx.Node) -> Any:
        """A node's value, which is stored as it is now: `unsqueeze_` and similar change a tensor's sizes later."""
        value = super().run_node(node)
        node.meta["example_value"] = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, value)
        return value


# Dispatch keys of kernels that give an operator a gradient.
_OF_GRADIENTS = ("Autograd", "AutogradCPU", "AutogradCUDA", "CompositeImplicitAutograd")
HIDDEN = because("python", "a custom operator has no gradient of its own; in eager it has that of what it calls")


def hides_gradient(node: fx.Node) -> bool:
    """Whether the gradient of a custom operator is that of the operators its kernel calls.

    No trace sees these calls. Operators with a gradient of their own have a kernel for it.
    """
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverloadPacket):
        target = getattr(target, target.overloads()[0])  # type: ignore[no-untyped-call]
    if not isinstance(target, torch._ops.OpOverload) or target.namespace in BUILTIN:
        return False
    if any(torch._C._dispatch_has_kernel_for_dispatch_key(qualified_name(target), key) for key in _OF_GRADIENTS):
        return False
    values = [node, *(node.all_input_nodes if target._schema.is_mutable else ())]
    return any(t.requires_grad for n in values for t in tensors_of(n.meta.get("example_value")))

