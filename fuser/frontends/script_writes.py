"""In-place writes of a TorchScript graph that no alias observes become operators that return new tensors.

Torch's pass for that loses a property of writes: the result keeps the dtype and size of the written tensor. So the
operators made by the pass are remembered. In a group their result is copied to that dtype and size, which is free in a
kernel; operators left to the script write into a copy. A write that eager refuses, of floats into integers, is rounded
in a group.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fuser.frontends.script_memory import every_node

Writes = frozenset[Any]  # torch._C.Node
# They keep the dtype and size of their input, or raise just as in place.
_ALIKE = frozenset(
    "aten::relu aten::relu6 aten::hardtanh aten::leaky_relu aten::elu aten::celu aten::selu aten::silu aten::mish "
    "aten::hardswish aten::hardsigmoid aten::neg aten::zeros_like aten::full_like aten::tril aten::triu".split()
)


def without_writes(graph: Any) -> Writes:
    """Remove the writes of a graph as torch's pass does. Returns operators whose dtype and size have to be kept."""
    before = set(every_node(graph))
    torch._C._jit_pass_remove_mutation(graph)
    return frozenset(n for n in every_node(graph) if n not in before and n.kind() not in _ALIKE and _in_place(n))


def _in_place(node: Any) -> bool:
    return node.kind().startswith("aten::") and hasattr(torch.ops.aten, f"{node.kind().removeprefix('aten::')}_")


def written_copy(graph: fx.Graph, before: Any, result: Any) -> Any:
    """The tensor `before` after a write of `result`: its dtype and size are kept. `aten.copy` has no gradient."""
    cast = graph.call_function(torch.ops.aten.type_as.default, (result, before))
    return graph.call_function(torch.ops.aten.expand_as.default, (cast, before))


def write_again(graph: Any, written: Writes) -> None:
    """Let the operators outside groups write into a copy."""
    for node in list(every_node(graph)) if written else ():
        if node in written:
            with graph.insert_point_guard(node):
                none = graph.insertConstant(None)
                copy = graph.insertNode(graph.create("aten::clone", [node.inputsAt(0), none], 1))
                given = [copy.output(), *list(node.inputs())[1:]]
                again = graph.insertNode(graph.create(f"{node.kind()}_", given, 1))
            node.output().replaceAllUsesWith(again.output())
            node.destroy()


__all__ = ["Writes", "without_writes", "write_again", "written_copy"]
