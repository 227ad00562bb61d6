"""Sizes, strides and offset of a view from those of its root, as ATen computes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fuser.lazy_dataclasses import dataclass

aten = torch.ops.aten


@dataclass(frozen=True)
class Geometry:
    """Sizes and strides of a tensor, in elements; `offset` counts from the first element of its root."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0


def _permute(g: Geometry, dims: Sequence[int]) -> Geometry:
    return Geometry(tuple(g.sizes[d] for d in dims), tuple(g.strides[d] for d in dims), g.offset)


def _t(g: Geometry) -> Geometry | None:
    return _permute(g, range(len(g.sizes))[::-1]) if len(g.sizes) <= 2 else None


def _transpose(g: Geometry, a: int, b: int) -> Geometry:
    dims = list(range(len(g.sizes)))
    dims[a], dims[b] = dims[b], dims[a]
    return _permute(g, dims)


def _with(g: Geometry, dim: int, size: int, stride: int, offset: int) -> Geometry:
    sizes, strides = list(g.sizes), list(g.strides)
    sizes[dim], strides[dim] = size, stride
    return Geometry(tuple(sizes), tuple(strides), g.offset + offset)


def _slice(g: Geometry, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Geometry:
    size, stride = g.sizes[dim], g.strides[dim]
    first, last, _ = slice(start, end, 1).indices(size)
    last = max(first, last)
    return _with(g, dim, (last - first + step - 1) // step, stride * step, first * stride)


def _without(g: Geometry, dims: set[int], offset: int = 0) -> Geometry:
    kept = [d for d in range(len(g.sizes)) if d not in dims]
    return Geometry(tuple(g.sizes[d] for d in kept), tuple(g.strides[d] for d in kept), g.offset + offset)


def _select(g: Geometry, dim: int, index: int) -> Geometry:
    size = g.sizes[dim]
    at = range(size)[index]
    return _without(g, {dim % len(g.sizes)}, at * g.strides[dim])


def _squeeze(g: Geometry, dims: int | Sequence[int]) -> Geometry:
    given = [dims] if isinstance(dims, int) else dims
    n = len(g.sizes)
    return _without(g, {d % n for d in given if n and g.sizes[d] == 1})


def _unsqueeze(g: Geometry, dim: int) -> Geometry:
    n = len(g.sizes)
    at = dim % (n + 1)
    stride = g.sizes[at] * g.strides[at] if at < n else 1
    sizes, strides = (*g.sizes[:at], 1, *g.sizes[at:]), (*g.strides[:at], stride, *g.strides[at:])
    return Geometry(sizes, strides, g.offset)


def _expand(g: Geometry, wanted: Sequence[int]) -> Geometry | None:
    new = len(wanted) - len(g.sizes)
    if not g.sizes:
        return Geometry(tuple(wanted), (0,) * new, g.offset) if min(wanted, default=0) >= 0 else None
    sizes, strides = list(wanted), [0] * len(wanted)
    for d in reversed(range(len(wanted))):
        if d < new:
            size, stride = 1, sizes[d + 1] * strides[d + 1] if d + 1 < len(wanted) else 1
        else:
            size, stride = g.sizes[d - new], g.strides[d - new]
        if wanted[d] == -1 and d >= new or wanted[d] == size:
            sizes[d], strides[d] = size, stride
        elif size != 1 or wanted[d] < 0:
            return None
    return Geometry(tuple(sizes), tuple(strides), g.offset)


def _view(g: Geometry, wanted: Sequence[int]) -> Geometry | None:
    sizes = list(wanted)
    count = _product(g.sizes)
    if sizes.count(-1) == 1:
        known = _product(s for s in sizes if s != -1)
        if not known or count % known:
            return None
        sizes[sizes.index(-1)] = count // known
    if not count or _product(sizes) != count or min(sizes, default=0) < 0:
        return None
    strides = _strides(g, sizes)
    return None if strides is None else Geometry(tuple(sizes), strides, g.offset)


def _strides(g: Geometry, sizes: Sequence[int]) -> tuple[int, ...] | None:
    """Strides with which `sizes` is a view; None if a copy is needed. It walks over chunks of contiguous dims."""
    if not g.sizes:
        return (1,) * len(sizes)
    strides = [0] * len(sizes)
    at, base = len(sizes) - 1, g.strides[-1]
    old = new = 1
    for d in reversed(range(len(g.sizes))):
        old *= g.sizes[d]
        if d and (g.sizes[d - 1] == 1 or g.strides[d - 1] == old * base):
            continue
        while at >= 0 and (new < old or sizes[at] == 1):
            strides[at] = new * base
            new *= sizes[at]
            at -= 1
        if new != old:
            return None
        if d:
            base, old, new = g.strides[d - 1], 1, 1
    return tuple(strides) if at == -1 else None


def _product(numbers: Any) -> int:
    result = 1
    for n in numbers:
        result *= n
    return result


_RULES: dict[Any, Callable[..., Geometry | None]] = {
    aten.t.default: _t,
    aten.transpose.int: _transpose,
    aten.permute.default: _permute,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.unsqueeze.default: _unsqueeze,
    aten.expand.default: _expand,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.detach.default: lambda g: g,
    aten.alias.default: lambda g: g,
}


def is_known(target: Any) -> bool:
    """Whether there is a rule for the view operator `target`."""
    return target in _RULES


def of_view(target: Any, g: Geometry, args: Sequence[Any]) -> Geometry | None:
    """The geometry of `target(tensor, *args)`, where `g` is the tensor's; None if there is no rule or no such view."""
    plain = (int, type(None))
    for a in args:
        if not all(type(v) in plain for v in (a if isinstance(a, (list, tuple)) else (a,))):
            return None
    try:
        return _RULES[target](g, *args)
    except (IndexError, TypeError, KeyError):
        return None
