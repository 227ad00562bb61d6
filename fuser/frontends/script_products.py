"""Large products of a script on oneDNN, as `passes/onednn.py` does in compiled graphs; small ones are unchanged.

A product becomes a branch on its operands' sizes, which takes the interpreter less than a microsecond.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from fuser import config, targets
from fuser.frontends.script_memory import every_node
from fuser.frontends.script_operators import NAMESPACE
from fuser.passes.onednn import chosen, fits
from fuser.passes.providers import ONEDNN, linear_op
from fuser.runtime.torch_abi import plain_context, plain_tensor

_LEAST = 1 << 29  # elements of one operand times those of the other, below which oneDNN is not tried
_PRODUCTS = {"aten::mm": "mm", "aten::linear": "linear"}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x @ weight.T + bias` for x of shape (..., k) and a weight of shape (n, k)."""
    op = _op_for(x, weight, bias)
    return torch.nn.functional.linear(x, weight, bias) if op is None else op(x, weight, bias, "none", [], "")


def mm(x: Tensor, y: Tensor) -> Tensor:
    """`x @ y` for x of shape (m, k) and y of shape (k, n)."""
    op = _op_for(x, y.t(), None) if x.dim() == 2 and y.dim() == 2 else None
    return torch.mm(x, y) if op is None else op(x, y.t(), None, "none", [], "")


def _op_for(x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
    """oneDNN's operator if it accepts these tensors and pays, else None."""
    given = [t for t in (x, weight, bias) if t is not None]
    if config.linear_backend == "aten" or config.numerics == "eager" or not config.enabled:
        return None
    if torch.is_grad_enabled() and any(t.requires_grad for t in given):
        return None
    if not all(t.dtype is torch.float32 and targets.is_host(t.device) and t.layout is torch.strided for t in given):
        return None
    alike = x.dim() > 0 and weight.dim() == 2 and x.shape[-1] == weight.shape[1]
    alike = alike and (bias is None or bias.shape == weight.shape[:1])
    if not alike or (x.dim() != 2 and not x.is_contiguous()):
        return None
    if not plain_context() or not all(map(plain_tensor, given)):
        return None
    rows = x if x.dim() == 2 else x.view(-1, x.shape[-1])
    by = chosen(rows, weight.t(), bias is not None) if fits(rows, weight.t()) else None
    return linear_op() if by == ONEDNN else None


@functools.cache
def _library() -> Any:
    library: Any = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
    library.define("mm(Tensor x, Tensor y) -> Tensor")
    library.impl("linear", linear, "CompositeImplicitAutograd")
    library.impl("mm", mm, "CompositeImplicitAutograd")
    return library


def divert_products(graph: Any) -> None:
    """Let oneDNN compute the large products of a graph."""
    found = [n for n in every_node(graph) if n.kind() in _PRODUCTS]
    if not found or linear_op() is None:
        return
    _library()
    for node in found:
        _divert(graph, node)


def _divert(graph: Any, node: Any) -> None:
    inputs, integer = list(node.inputs()), torch._C.IntType.get()
    with graph.insert_point_guard(node):
        sizes = [graph.insertNode(graph.create("aten::numel", [v], 1)).output() for v in inputs[:2]]
        work = graph.insertNode(graph.create("aten::mul", sizes, 1)).output()
        for value in (*sizes, work):
            value.setType(integer)
        least = graph.insertConstant(_LEAST)
        is_large = graph.insertNode(graph.create("aten::ge", [work, least], 1)).output()
        is_large.setType(torch._C.BoolType.get())
        choice = graph.insertNode(graph.create("prim::If", [is_large], 1))
    for kind in (f"{NAMESPACE}::{_PRODUCTS[node.kind()]}", node.kind()):
        block = choice.addBlock()
        call = block.addNode(kind, inputs)
        call.output().setType(node.output().type())
        call.copyMetadata(node)
        block.registerOutput(call.output())
    choice.output().setType(node.output().type())
    node.output().replaceAllUsesWith(choice.output())
    node.destroy()
