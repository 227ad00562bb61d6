"""Max pools save offsets in windows between forward and backward: one byte each, where an index takes eight."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fuser import targets
from fuser.passes.calls import own_operator
from fuser.passes.hints import is_contiguous
from fuser.passes.writing import Writer

aten = torch.ops.aten
_DIMS = {aten.max_pool2d_with_indices.default: 2, aten.max_pool3d_with_indices.default: 3}
_BACKWARD = {2: aten.max_pool2d_with_indices_backward.default, 3: aten.max_pool3d_with_indices_backward.default}


def pools_by_offsets(module: fx.GraphModule) -> int:
    """Max pools whose indices only their gradients read return offsets, which the gradients use instead.

    Only if kernels compute both. The backward then needs only the sizes of the pool's input.
    """
    changed = 0
    for pool in [n for n in module.graph.nodes if n.target in _DIMS and not n.kwargs]:
        windows = _windows(pool)
        items = {u.args[1]: u for u in pool.users if u.target is operator.getitem}
        if windows is None or len(items) != len(pool.users) or 1 not in items:
            continue
        readers = list(items[1].users)
        if readers and all(_is_gradient(r, pool, items[1]) for r in readers):
            _rewrite(pool, items, windows)
            changed += 1
    return changed


def _windows(pool: fx.Node) -> tuple[Any, ...] | None:
    """Kernel, stride, padding, dilation and ceil mode, if kernels compute the pool and its gradient; else None."""
    given: list[Any] = [*pool.args, *_DEFAULTS[len(pool.args) - 2 :]]
    x, kernel, stride, padding, dilation, ceil = given
    n, value = _DIMS[pool.target], x.meta.get("val")  # type: ignore[index]
    lists = [list(v) * (n if len(v) == 1 else 1) for v in (kernel, stride or kernel, padding, dilation)]
    if not isinstance(value, torch.Tensor) or not all(type(s) is int for v in lists for s in v):
        return None
    target = targets.known(value.device.type) if hasattr(value, "fake_mode") else None
    kernel, stride, _, dilation = lists
    from fuser.lowering.pooling import MOST_PLACES, overlap  # most processes have no pools

    shared = overlap(kernel, stride, dilation)
    if target is None or target.ordered or n > target.window_dims and shared > 1:
        return None
    return (*lists, bool(ceil)) if math.prod(kernel) <= MOST_PLACES else None


_DEFAULTS: Sequence[Any] = ((), (0,), (1,), False)


def _is_gradient(node: fx.Node, pool: fx.Node, indices: fx.Node) -> bool:
    """Whether a node is the gradient of a pool, and uses its indices only as such."""
    n = _DIMS[pool.target]  # type: ignore[index]
    if node.target is not _BACKWARD[n] or node.kwargs or len(node.args) != 8 or node.args[7] is not indices:
        return False
    value, x = node.meta["val"], pool.args[0].meta["val"]  # type: ignore[union-attr]
    plain = is_contiguous(value) or value.dim() == n + 2 and is_contiguous(value.movedim(1, -1))
    return plain and node.args[0] is not indices and value.dtype is x.dtype


def _rewrite(pool: fx.Node, items: dict[Any, fx.Node], windows: tuple[Any, ...]) -> None:
    write = Writer(pool)
    write.mode = pool.args[0].meta["val"].fake_mode  # type: ignore[union-attr]
    found = write(own_operator("max_pool_offsets"), pool.args[0], *windows)
    parts = [write(operator.getitem, found, i) for i in range(2)]
    if 0 in items:
        Writer(items[0]).instead(parts[0])
    for node in list(items[1].users):
        write, value = Writer(node), node.meta["val"]
        x: Any = node.args[1]
        size = [write.size(x, d) for d in range(value.dim())]
        last = not is_contiguous(value)
        write.instead(
            write(own_operator("max_pool_offsets_backward"), node.args[0], parts[1], size, *windows, last)
        )
    for node in (items[1], pool):
        pool.graph.erase_node(node)
