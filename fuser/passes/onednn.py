"""Matmuls of dense float32 on the CPU by oneDNN, and what follows them as part of the matmul.

`mkldnn._linear_pointwise(x[M,K], w[N,K], bias, op, scalars, algorithm)` does `op(x @ w.T + bias)`. Measured on two
AVX-512 cores: 12 % faster than `addmm` at GPT-2's sizes, 30 % for its last layer, `op` nearly free; below about eight
million multiplications the call costs more than it gains. oneDNN adds up a row in order where MKL splits it, so its
rounding errors are up to twice MKL's, of the same order. A transposed left operand, as in the gradient of weights, is
copied by a kernel first. Of 512 tokens, with the copy: 0.95 of MKL's time for a gradient of 512 x 512, 0.85 for 768 x
768, 0.9 for 3,072 x 768 or 512 x 2,048, 0.96 for 2,048 x 512, 0.98 for 2,304 x 768; with
oneDNN's own copy 0.83 to 1.16. Results of 32 MiB or more go another way (`runtime.products`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fuser import config
from fuser.passes.calls import put_for
from fuser.passes.classify import APART, is_view
from fuser.passes.hints import are_numbers, is_contiguous, size_hint
from fuser.runtime import products, warm

aten = torch.ops.aten
_WIDE = 1 << 13  # columns from which on a result with an open number of rows may be large
_MOST_COPIED = 1 << 22  # elements of a transposed left operand


def linear_op() -> Any:
    """oneDNN's linear with an operation behind it; None where this torch has none or it is switched off."""
    if not torch._C._has_mkldnn or not torch._C._get_mkldnn_enabled():
        return None
    packet = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    return getattr(packet, "default", None)


def _matrix(node: Any) -> torch.Tensor | None:
    """The recorded value of a node that is a dense two-dimensional float32 tensor on the CPU."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, torch.Tensor) or value.dim() != 2 or value.dtype is not torch.float32:
        return None
    return value if value.device.type == "cpu" and value.layout is torch.strided else None


def _operands(node: fx.Node) -> tuple[fx.Node | None, fx.Node, fx.Node] | None:
    """(bias, x, w) of a call that is `x @ w` or `bias + x @ w` with a bias for each column; else None."""
    if node.target is aten.mm.default and not node.kwargs:
        x, w = node.args
        return None, x, w  # type: ignore[return-value]
    if node.target is aten.addmm.default and not node.kwargs:
        bias, x, w = node.args
        value = bias.meta.get("val") if isinstance(bias, fx.Node) else None
        columns = node.meta["val"].shape[1]
        if isinstance(value, torch.Tensor) and are_numbers(*value.shape, columns) and tuple(value.shape) == (columns,):
            return bias, x, w  # type: ignore[return-value]
    return None


def pays(x: torch.Tensor, w: torch.Tensor) -> bool:
    """Whether oneDNN makes `x @ w` faster: matrices of float32 on the CPU."""
    inner, columns = w.shape
    if _is_transposed(x) and size_hint(x.shape[0]) * size_hint(inner) > _MOST_COPIED:
        return False
    if not are_numbers(inner, columns) or inner == 0 or columns == 0:
        return False  # oneDNN refuses empty products
    return size_hint(x.shape[0]) * inner * columns >= products.LEAST_WORK


def _is_transposed(x: torch.Tensor) -> bool:
    """Whether rows are not in one piece each: oneDNN's linear then needs a copy, where MKL reads as it is."""
    return are_numbers(x.stride(0)) and x.stride(0) == 1 and not is_contiguous(x)


def _transposed(graph: fx.Graph, w: fx.Node) -> fx.Node:
    """`w.t()`: what a transpose was made of, or a new transpose."""
    swaps = {aten.t.default: (), aten.permute.default: ([1, 0],), aten.transpose.int: (0, 1)}
    base = w.args[0] if w.args else None
    if w.target in swaps and tuple(w.args[1:]) == swaps[w.target] and isinstance(base, fx.Node):
        return base
    new = graph.call_function(aten.t.default, (w,))
    new.meta = {"val": w.meta["val"].t()}
    return new


def _copied(graph: fx.Graph, x: fx.Node) -> fx.Node:
    """A transposed left operand with its rows in one piece each: a kernel copies it faster than oneDNN does.

    The kernel that makes the operand would write it both ways at half the speed.
    """
    new = graph.call_function(aten.clone.default, (x,), {"memory_format": torch.contiguous_format})
    new.meta = {"val": x.meta["val"].clone(memory_format=torch.contiguous_format), APART: True}
    return new


def linear_to_onednn(module: fx.GraphModule) -> int:
    """Large enough `mm` and `addmm` become oneDNN's linear."""
    op = linear_op()
    if op is None or config.linear_backend != "onednn" or config.numerics == "eager":
        return 0
    changed = 0
    for node in list(module.graph.nodes):
        operands = _operands(node)
        if operands is None:
            continue
        bias, x, w = operands
        values = _matrix(x), _matrix(w)
        if values[0] is None or values[1] is None or not pays(values[0], values[1]):
            continue
        with module.graph.inserting_before(node):
            transposed = _transposed(module.graph, w)
            if _is_transposed(values[0]):
                x = _copied(module.graph, x)
        put_for(node, op, (x, transposed, bias, "none", [], ""))
        changed += 1
    return changed


def large_products(module: fx.GraphModule) -> int:
    """A product whose result malloc would map anew is written by oneDNN into warm memory, or into huge pages.

    Where the number of rows is open, each call decides.
    """
    changed = 0
    for node in list(module.graph.nodes):
        if node.target is not aten.mm.default or node.kwargs:
            continue
        if is_large(node) or _may_be_large(node):
            put_for(node, products.product if is_large(node) else products.sized_product, node.args)
            changed += 1
    return changed


def _may_be_large(node: fx.Node) -> bool:
    """Whether the result of an `mm` has an open number of rows, and so many columns that it is often large."""
    operands = [_matrix(a) for a in node.args]
    x, w = operands
    if x is None or w is None or type(x.shape[0]) is int or not are_numbers(*w.shape) or w.shape[0] == 0:
        return False
    return w.shape[1] >= _WIDE and not _is_transposed(x) and _is_free_to_choose(node)


def is_large(node: fx.Node) -> bool:
    """Whether an `mm` or `addmm` can be written into memory of choice, and malloc would map its result anew."""
    result, operands = _matrix(node), [_matrix(a) for a in node.args[-2:]]
    if result is None or any(v is None or any(type(s) is not int or s < 1 for s in v.shape) for v in operands):
        return False
    return result.numel() * result.dtype.itemsize >= warm.MAPPED and _is_free_to_choose(node)


def _is_free_to_choose(node: fx.Node) -> bool:
    """Whether settings, torch and the reader of a product let its result be written into memory of choice."""
    reader = only_reader(node)
    if config.linear_backend != "onednn" or config.numerics == "eager" or linear_op() is None:
        return False
    return (reader is None or reader.target not in _EPILOGUES) and products.are_possible()


def _gelu(node: fx.Node) -> tuple[str, str] | None:
    return ("gelu", "tanh") if node.kwargs.get("approximate") == "tanh" else None


# Operations that oneDNN computes as accurately as ATen does, on NaN and infinities too. Not here: its relu, hardtanh
# and hardsigmoid turn NaN into a number, its gelu by erf turns infinity into NaN.
_EPILOGUES: dict[Any, Callable[[fx.Node], tuple[str, str] | None]] = {
    aten.gelu.default: _gelu,
    aten.silu.default: lambda node: ("swish", ""),
    aten.sigmoid.default: lambda node: ("sigmoid", ""),
    aten.tanh.default: lambda node: ("tanh", ""),
}


def only_reader(node: fx.Node) -> fx.Node | None:
    """The one node that reads this one, views of it looked through."""
    while len(node.users) == 1:
        (user,) = node.users
        if not is_view(user.target):
            return user
        node = user
    return None


def fold_epilogues(module: fx.GraphModule) -> int:
    """An activation that alone reads a oneDNN linear becomes part of it."""
    op = linear_op()
    changed = 0
    for node in list(module.graph.nodes):
        if op is None or node.target is not op or node.args[3] != "none":
            continue
        reader = only_reader(node)
        found = _EPILOGUES[reader.target](reader) if reader is not None and reader.target in _EPILOGUES else None
        if reader is None or found is None:
            continue
        name, algorithm = found
        node.args = (*node.args[:3], name, [], algorithm)
        source = reader.args[0]
        assert isinstance(source, fx.Node)
        reader.replace_all_uses_with(source)
        module.graph.erase_node(reader)
        changed += 1
    return changed
