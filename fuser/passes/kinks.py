"""Rewrites gradients of functions with a kink as selections by a mask: one byte per element is saved, not four."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fuser import targets
from fuser.passes.classify import after_tangents, views_first
from fuser.passes.hints import same
from fuser.passes.writing import Writer

aten = torch.ops.aten


def kinks_by_masks(module: fx.GraphModule) -> int:
    """The backward of ReLU, leaky ReLU and hardtanh selects by a comparison, which the partitioner may save as a mask.

    Outside of a backward, as in a graph that is one, the operators stay whole: nothing is saved. The comparisons are
    those of the operators' lowerings, NaN included. A value that the backward needs for other reasons stays: it is
    saved in any case.
    """
    changed, behind = 0, after_tangents(module.graph)
    for node in list(module.graph.nodes):
        spell = _SPELLED.get(node.target)
        if spell is None or node not in behind or node.kwargs or not _is_plain(node) or _is_read(node.args[1], behind):
            continue
        write = Writer(node)
        write.instead(spell(write, *node.args))
        changed += 1
    return changed


def _is_read(value: Any, behind: set[fx.Node]) -> bool:
    """Whether the backward reads the value, or a view of it, for more than masks."""
    while value.op == "call_function" and views_first(value):
        value = value.args[0]
    known = [value]
    for n in known:
        views = [u for u in n.users if views_first(u) and u not in behind]
        if any(u in behind and u.target not in _SPELLED for u in n.users):
            return True
        known += [u for u in views if u not in known]
    return False


def _is_plain(node: fx.Node) -> bool:
    grad, x = node.args[:2]
    if not (isinstance(grad, fx.Node) and isinstance(x, fx.Node)):
        return False
    values: list[Any] = [n.meta.get("val") for n in (grad, x, node)]
    a, b, made = values
    if not all(isinstance(v, torch.Tensor) for v in values) or getattr(made, "fake_mode", None) is None:
        return False
    numbers = all(isinstance(n, (int, float)) for n in node.args[2:])
    floats = a.dtype is b.dtype is made.dtype and made.dtype.is_floating_point
    return numbers and floats and same(a.shape, b.shape) and same(a.stride(), b.stride())


def _threshold(write: Writer, grad: fx.Node, x: fx.Node, threshold: float) -> fx.Node:
    return _or_zero(write, write(aten.le.Scalar, x, threshold), grad, zero_where=True)


def _leaky(write: Writer, grad: fx.Node, x: fx.Node, slope: float, _: bool) -> fx.Node:
    return write(aten.where.self, write(aten.gt.Scalar, x, 0), grad, write(aten.mul.Scalar, grad, slope))


def _hardtanh(write: Writer, grad: fx.Node, x: fx.Node, low: float, high: float) -> fx.Node:
    if targets.of(x.meta["val"].device.type).masks_kinks:
        inside = write(aten.logical_and.default, write(aten.gt.Scalar, x, low), write(aten.lt.Scalar, x, high))
        return _or_zero(write, inside, grad, zero_where=False)
    outside = write(aten.logical_or.default, write(aten.le.Scalar, x, low), write(aten.ge.Scalar, x, high))
    return _or_zero(write, outside, grad, zero_where=True)


def _or_zero(write: Writer, mask: fx.Node, grad: fx.Node, zero_where: bool) -> fx.Node:
    value = grad.meta["val"]
    zero = write(aten.full.default, [], 0, dtype=value.dtype, device=value.device)
    return write(aten.where.self, mask, *((zero, grad) if zero_where else (grad, zero)))


_SPELLED: dict[Any, Callable[..., fx.Node]] = {
    aten.threshold_backward.default: _threshold,
    aten.leaky_relu_backward.default: _leaky,
    aten.hardtanh_backward.default: _hardtanh,
}
