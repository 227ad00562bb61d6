"""Products of dense matrices on the CPU by the fastest of several libraries, with activations folded into the call.

`mkldnn._linear_pointwise(x[M,K], w[N,K], bias, op, scalars, algorithm)` computes `op(x @ w.T + bias)`. Whether it is
faster than `mm` and `addmm` (MKL, where present) depends on the machine: with 512 rows it takes 0.82 of MKL's time on
two AMD cores, and 1.27 on sixteen Intel ones. So a contest decides for each class of products (`providers`), unless
`config.linear_backend` names one. oneDNN adds up a row in order where MKL splits it, so its rounding errors are up to
twice MKL's, of the same order. A transposed left operand, as in the gradient of weights, is copied by a kernel first,
which is faster than oneDNN's own copy. Results of 32 MiB or more are made by `runtime.products`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fuser import config, targets
from fuser.cpu import packed
from fuser.cpu.packed import Activation
from fuser.passes import providers
from fuser.passes.calls import put_for
from fuser.passes.classify import APART, Kind, classify, is_view
from fuser.passes.hints import are_numbers, is_contiguous, size_hint
from fuser.passes.providers import OF_ONEDNN, linear_op
from fuser.runtime import packing, products, warm

aten = torch.ops.aten
_WIDE = 1 << 13  # columns from which a result with a symbolic number of rows may be large
_MOST_COPIED = 1 << 22  # elements of a transposed left operand
_SWAPS: dict[Any, tuple[Any, ...]] = {aten.t.default: (), aten.permute.default: ([1, 0],), aten.transpose.int: (0, 1)}
# In the meta of an input: a parameter that does not change. In the meta of a call: its weight is packed once, by oneDNN
# or for the package's own kernel.
FROZEN, PACKED, OWN_MARK = "frozen", "packed", "packed for the own kernel"


def _matrix(node: Any, dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> torch.Tensor | None:
    """The recorded value of a node, if it is a dense matrix of one of `dtypes` on the CPU; else None."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, torch.Tensor) or value.dim() != 2 or value.dtype not in dtypes:
        return None
    return value if targets.has(value.device, "onednn") and value.layout is torch.strided else None


def _operands(node: fx.Node) -> tuple[fx.Node | None, fx.Node, fx.Node] | None:
    """(bias, x, w) of a call that is `x @ w` or `bias + x @ w` with a bias per column; else None."""
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


def fits(x: torch.Tensor, w: torch.Tensor) -> bool:
    """Whether oneDNN can compute `x @ w`, matrices on the CPU, without a large copy."""
    inner, columns = w.shape
    if _is_transposed(x) and size_hint(x.shape[0]) * size_hint(inner) > _MOST_COPIED:
        return False
    return are_numbers(inner, columns) and inner > 0 and columns > 0  # oneDNN refuses empty products


def chosen(
    x: torch.Tensor, w: torch.Tensor, bias: bool, epilogue: Activation | None = None, read: bool = False,
    frozen: bool = False,
) -> str:  # fmt: skip
    """The one of `providers` that computes `x @ w (+ bias)`: matrices on the CPU for which `fits` is True."""
    inner, columns = w.shape
    rows = size_hint(x.shape[0])
    if config.linear_backend == "onednn":
        large = rows * inner * columns >= providers.LEAST_WORK
        return providers.ONEDNN if large and x.dtype is torch.float32 else providers.ATEN
    turned = are_numbers(w.stride(0)) and w.stride(0) == 1
    product = providers.Product(
        rows, inner, columns, x.dtype, _is_transposed(x), turned, bias, epilogue, read, frozen and turned
    )
    return providers.choose(product)


def _is_transposed(x: torch.Tensor) -> bool:
    """Whether `x` is stored by columns: oneDNN's linear then copies it, while MKL reads it as it is."""
    return are_numbers(x.stride(0)) and x.stride(0) == 1 and not is_contiguous(x)


def _transposed(graph: fx.Graph, w: fx.Node) -> fx.Node:
    """`w.t()`: the source of `w` if that is a transpose itself, else a new transpose."""
    base = w.args[0] if w.args else None
    if w.target in _SWAPS and tuple(w.args[1:]) == _SWAPS[w.target] and isinstance(base, fx.Node):
        return base
    new = graph.call_function(aten.t.default, (w,))
    new.meta = {"val": w.meta["val"].t()}
    return new


def _copied(graph: fx.Graph, x: fx.Node) -> fx.Node:
    """A transposed left operand copied to row-major: a kernel copies it faster than oneDNN does.

    Fused with the operand's producer, which would store both orders, it ran at half the speed.
    """
    new = graph.call_function(aten.clone.default, (x,), {"memory_format": torch.contiguous_format})
    new.meta = {"val": x.meta["val"].clone(memory_format=torch.contiguous_format), APART: True}
    return new


def linear_to_onednn(module: fx.GraphModule) -> int:
    """`mm` and `addmm` become oneDNN's linear, or leave their bias to a kernel, where that is faster."""
    op = linear_op()
    if op is None or config.linear_backend == "aten":
        return 0
    return sum(_provide(node, op) for node in list(module.graph.nodes))


def _provide(node: fx.Node, op: Any) -> bool:
    """Let the fastest provider compute a product; returns whether the node changed."""
    operands = _operands(node)
    if operands is None:
        return False
    bias, x, w = operands
    values = _matrix(x, providers.DTYPES), _matrix(w, providers.DTYPES)
    if values[0] is None or values[1] is None or values[0].dtype is not values[1].dtype or not fits(*values):  # type: ignore[arg-type]
        return False
    found = epilogue_of(node)
    frozen = _is_frozen(w)
    how = chosen(*values, bias is not None, found[1:] if found else None, _is_read_by_kernels(node), frozen)  # type: ignore[arg-type]
    if how == providers.APART:
        with node.graph.inserting_before(node):
            product = node.graph.call_function(aten.mm.default, (x, w))
        product.meta = dict(node.meta)
        put_for(node, aten.add.Tensor, (product, bias))
        return True
    if how == providers.OWN:
        put_for(node, providers.product_op(), (bias, x, w))
        return True
    if how not in (providers.ONEDNN, providers.PACKED, providers.OWN_PACKED):
        return False
    with node.graph.inserting_before(node):
        transposed = _transposed(node.graph, w)
        if _is_transposed(values[0]):
            x = _copied(node.graph, x)
    if how == providers.OWN_PACKED:
        call = packing.packed_call(packed.product, packed.pack, "packed_product")
        put_for(node, call, (x, transposed, values[1].shape[1], bias, found[1:] if found else None))
        if found:
            _leave_out(found[0])
        return True
    new = put_for(node, op, (x, transposed, bias, "none", [], ""))
    if how == providers.PACKED:
        new.meta[PACKED] = True
    return True


def _is_frozen(w: fx.Node) -> bool:
    """Whether a product's right operand is the transpose of a parameter that the user declared frozen."""
    swapped = w.op == "call_function" and w.target in _SWAPS and tuple(w.args[1:]) == _SWAPS[w.target]
    base = w.args[0] if swapped else None
    return isinstance(base, fx.Node) and FROZEN in base.meta


def _is_read_by_kernels(node: fx.Node) -> bool:
    """Whether a node has readers, and all of them, through views, can be part of kernels."""
    kinds = [(_is_read_by_kernels(u) if is_view(u.target) else classify(u).kind is Kind.COMPUTE) for u in node.users]
    return bool(kinds) and all(kinds)


def large_products(module: fx.GraphModule) -> int:
    """A product whose result malloc would map anew is written by oneDNN into warm memory, or into huge pages.

    With a symbolic number of rows, each call decides.
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
    """Whether the result of an `mm` has a symbolic number of rows, and so many columns that it is often large."""
    operands = [_matrix(a) for a in node.args]
    x, w = operands
    if x is None or w is None or type(x.shape[0]) is int or not are_numbers(*w.shape) or w.shape[0] == 0:
        return False
    return w.shape[1] >= _WIDE and not _is_transposed(x) and _is_free_to_choose(node)


def is_large(node: fx.Node) -> bool:
    """Whether an `mm` or `addmm` can be written into chosen memory, and malloc would map its result anew."""
    result, operands = _matrix(node), [_matrix(a) for a in node.args[-2:]]
    if result is None or any(v is None or any(type(s) is not int or s < 1 for s in v.shape) for v in operands):
        return False
    return result.numel() * result.dtype.itemsize >= warm.MAPPED and _is_free_to_choose(node)


def _is_free_to_choose(node: fx.Node) -> bool:
    """Whether settings, torch and the product's reader allow its result to be written into chosen memory."""
    reader = only_reader(node)
    if config.linear_backend == "aten" or config.numerics == "eager" or linear_op() is None:
        return False
    return (reader is None or reader.target not in _EPILOGUES) and products.are_possible()


_EPILOGUES: dict[Any, Callable[[fx.Node], Activation]] = {
    aten.gelu.default: lambda node: ("gelu", "tanh" if node.kwargs.get("approximate") == "tanh" else "erf"),
    aten.silu.default: lambda node: ("swish", ""),
    aten.sigmoid.default: lambda node: ("sigmoid", ""),
    aten.tanh.default: lambda node: ("tanh", ""),
}


def only_reader(node: fx.Node) -> fx.Node | None:
    """The only reader of a node, through views; None if there are several or none."""
    while len(node.users) == 1:
        (user,) = node.users
        if not is_view(user.target):
            return user
        node = user
    return None


def epilogue_of(node: fx.Node) -> tuple[fx.Node, str, str] | None:
    """A product's only reader, if it is an activation that can be folded: the node, oneDNN's name and algorithm."""
    reader = only_reader(node)
    found = _EPILOGUES[reader.target](reader) if reader is not None and reader.target in _EPILOGUES else None
    return (reader, *found) if reader is not None and found is not None else None


def fold_epilogues(module: fx.GraphModule) -> int:
    """An activation that is the only reader of a oneDNN linear becomes part of it."""
    op = linear_op()
    changed = 0
    for node in list(module.graph.nodes):
        if op is None or node.target is not op or node.args[3] != "none":
            continue
        found = epilogue_of(node)
        if found is None or found[1:] not in OF_ONEDNN:
            continue
        reader, name, algorithm = found
        node.args = (*node.args[:3], name, [], algorithm)
        _leave_out(reader)
        changed += 1
    return changed


def _leave_out(activation: fx.Node) -> None:
    """Replace an activation's result by its argument."""
    source = activation.args[0]
    assert isinstance(source, fx.Node)
    activation.replace_all_uses_with(source)
    activation.graph.erase_node(activation)
