"""Matmuls on CUDA with cuBLASLt's epilogues: a bias per column, and gelu's tanh form.

`_addmm_activation(bias, x, w, use_gelu=True)` is one call of cuBLASLt if it supports the operands, else addmm followed
by gelu. Only for 16-bit floats: cuBLASLt's gelu has the error of a 16-bit float. A relu stays in a kernel, since
nothing says that cuBLASLt's keeps NaN.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fuser import targets
from fuser.passes.calls import put_for
from fuser.passes.classify import Kind, classify, is_view
from fuser.passes.hints import are_numbers
from fuser.passes.onednn import only_reader

aten = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)
_DTYPES = (*_HALVES, torch.float32)
_KEEP_COLUMNS = frozenset({aten.view.default, aten._unsafe_view.default, aten.reshape.default})


def _value(node: Any) -> torch.Tensor | None:
    """The recorded dense CUDA tensor of a node, or None."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    plain = isinstance(value, torch.Tensor) and value.layout is torch.strided and targets.has(value.device, "cublas")
    return value if plain else None


def _is_bias(node: Any, columns: Any, dtype: torch.dtype) -> bool:
    """Whether a node has one element of `dtype` for each of `columns` columns. The comparison adds no guard."""
    value = _value(node)
    if value is None or value.dim() != 1 or value.dtype is not dtype:
        return False
    return isinstance(value.shape[0], int) and isinstance(columns, int) and value.shape[0] == columns > 0


def _keeps_columns(node: fx.Node, matmul: fx.Node) -> bool:
    """Whether `node` is the matmul's result with other leading sizes."""
    columns = matmul.meta["val"].shape[-1]
    while node is not matmul:
        value = _value(node)
        if node.target not in _KEEP_COLUMNS or value is None or value.dim() == 0:
            return False
        if not are_numbers(value.shape[-1], columns) or value.shape[-1] != columns:
            return False
        node = node.args[0]  # type: ignore[assignment]
    return True


def _bias_of(add: fx.Node, matmul: fx.Node) -> fx.Node | None:
    """The bias, if `add` adds one to each column of `matmul`; else None."""
    value = matmul.meta["val"]
    if add.target is not aten.add.Tensor or add.kwargs or len(add.args) != 2:
        return None
    for mine, other in (add.args, add.args[::-1]):
        if isinstance(mine, fx.Node) and isinstance(other, fx.Node) and _is_bias(other, value.shape[-1], value.dtype):
            return other if _keeps_columns(mine, matmul) else None
    return None


def _is_gelu(node: fx.Node | None) -> bool:
    return node is not None and node.target is aten.gelu.default and node.kwargs.get("approximate") == "tanh"


def is_left_alone(node: fx.Node) -> bool:
    """Whether no kernel reads a node's result, so that a kernel for its epilogue would read and write it once more."""
    for user in node.users:
        if is_view(user.target):
            if not is_left_alone(user):
                return False
        elif classify(user).kind is Kind.COMPUTE:
            return False
    return True


def _comes_before(a: fx.Node, b: fx.Node) -> bool:
    return a.op in ("placeholder", "get_attr") or a < b


def _fold_bias(node: fx.Node) -> fx.Node | None:
    """The `addmm` for an `mm` whose only reader adds a bias; None for others, or if a kernel fuses the addition."""
    add = only_reader(node)
    bias = _bias_of(add, node) if add is not None else None
    if add is None or bias is None or not _comes_before(bias, node):
        return None
    in_call = node.meta["val"].dtype in _HALVES and _is_gelu(only_reader(add))
    if not (in_call or is_left_alone(add)):
        return None
    (source,) = (a for a in add.args if a is not bias)
    new = put_for(node, aten.addmm.default, (bias, *node.args))
    add.replace_all_uses_with(new if source is node else source)  # type: ignore[arg-type]
    add.graph.erase_node(add)
    return new


def _fold_gelu(node: fx.Node) -> bool:
    """Fold a gelu that is the only reader of an `addmm` into its call. Returns whether that was possible."""
    reader = only_reader(node)
    value = _value(node)
    if reader is None or not _is_gelu(reader) or value is None or value.dtype not in _HALVES or node.kwargs:
        return False
    bias, x, w = node.args
    source = reader.args[0]
    assert isinstance(source, fx.Node)
    if not _is_bias(bias, value.shape[-1], value.dtype) or not _keeps_columns(source, node):
        return False
    new = put_for(node, aten._addmm_activation.default, (bias, x, w), {"use_gelu": True})
    reader.replace_all_uses_with(new if source is node else source)
    reader.graph.erase_node(reader)
    return True


def fold_into_cublas(module: fx.GraphModule) -> int:
    """On CUDA, a bias and a gelu (tanh form) become part of cuBLASLt's call if nothing else reads the matmul."""
    changed = 0
    for node in list(module.graph.nodes):
        value = _value(node)
        if value is None or value.dtype not in _DTYPES:
            continue
        matmul: fx.Node | None = node if node.target is aten.addmm.default else None
        if node.target is aten.mm.default and not node.kwargs:
            matmul = _fold_bias(node)
            changed += matmul is not None
        if matmul is not None:
            changed += _fold_gelu(matmul)
    return changed
