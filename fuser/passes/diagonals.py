"""Diagonals by their name: ATen's `fill_diagonal_` spells the diagonal of a matrix by offsets in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fuser.passes.calls import put_for
from fuser.passes.hints import are_numbers, is_dense, same

aten = torch.ops.aten
_BY_NAME = {
    aten.as_strided.default: (aten.diagonal.default, 1),
    aten.as_strided_scatter.default: (aten.diagonal_scatter.default, 2),
}


def diagonals_by_name(module: fx.GraphModule) -> int:
    """A diagonal that `as_strided` reads or writes becomes a view by dims, which kernels can have in them."""
    changed = 0
    for target, (by_name, count) in _BY_NAME.items():
        for node in module.graph.find_nodes(op="call_function", target=target):
            x, *place = _values((node.args[0], *node.args[count:]))
            if not node.kwargs and _is_diagonal(x, *place):
                put_for(node, by_name, node.args[:count])
                changed += 1
    return changed


def _values(args: Any) -> Any:
    """The arguments with the recorded values of nodes."""
    return fx.map_arg(args, lambda n: n.meta.get("val"))


def _is_diagonal(x: Any, size: Any, stride: Any, offset: Any = None) -> bool:
    """Whether these places in memory are the main diagonal of the matrix `x`, from end to end, and no other element."""
    if not isinstance(x, torch.Tensor) or x.dim() != 2 or len(size) != 1 or not is_dense(x):
        return False
    begins = offset is None or same(offset, x.storage_offset())
    return begins and same(stride[0], x.stride(0) + x.stride(1)) and _is_shortest(size[0], *x.shape)


def _is_shortest(n: Any, rows: Any, columns: Any) -> bool:
    """Whether `n` is certainly the smaller of two sizes. Adds no guard."""
    if are_numbers(n, rows, columns):
        return bool(n == min(rows, columns))
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    pairs = (rows, columns), (columns, rows)
    return any(same(n, a) and statically_known_true(a <= b) for a, b in pairs)
