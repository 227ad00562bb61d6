"""Strides of dims of one element. They address nothing, but eager may choose a result's layout by them.

A batch of one image is channels-last if the batch stride says so. The memory order of a broadcast result follows
strides of dims of one element if its operands repeat along the other dims. For a graph where that is possible, a kernel
serves only tensors whose strides in such dims compare with all others as in the example.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from fuser.canonical import CanonicalGraph, CanonicalNode, Ref
from fuser.errors import Unsupported
from fuser.ir.sizes import STRIDE, Expr
from fuser.lowering.context import LoweringContext
from fuser.lowering.shapes import KINDS, broadcast, operands


def may_decide(graph: CanonicalGraph, metas: list[Any]) -> bool:
    """Whether eager may choose the layout of a node's result by strides of dims of one element, in some call.

    `metas`: results of all nodes as meta tensors.
    """
    return any(_may_decide(node, metas) for node in graph.calls)


def _may_decide(node: CanonicalNode, metas: list[Any]) -> bool:
    given = [m for i in node.refs() for m in _tensors(metas[i])]
    results = list(_tensors(metas[node.index]))
    if not given or not results or _memory(results[0]) in set(map(_memory, given)):
        return False  # a view of several elements has the layout of its base
    if node.op not in KINDS and not _is_elementwise(results[0], given):
        return any(m.dim() > 3 for m in (*given, *results))
    args = [metas[a.index] if isinstance(a, Ref) else a for a in node.args]
    iterated = [m for m in (operands(node.op, args) if node.op in KINDS else given) if m.dim()]
    order = len(iterated) > 1 or any(_repeats(m, results[0].shape) for m in iterated)
    return results[0].dim() > (2 if order else 3)


def _tensors(meta: Any) -> Iterator[torch.Tensor]:
    for m in meta if isinstance(meta, (tuple, list)) else (meta,):
        if isinstance(m, torch.Tensor):
            yield m


def _memory(m: torch.Tensor) -> int:
    return int(m.untyped_storage()._cdata)


def _is_elementwise(result: torch.Tensor, given: list[torch.Tensor]) -> bool:
    try:
        return broadcast([tuple(m.shape) for m in given], "") == tuple(result.shape)
    except Unsupported:
        return False


def _repeats(m: torch.Tensor, size: torch.Size) -> bool:
    """Whether a tensor repeats elements when it is broadcast to `size`."""
    lead = len(size) - m.dim()
    same = all(n == own and (n == 1 or s) for n, own, s in zip(size[lead:], m.shape, m.stride()))
    return not same or any(n > 1 for n in size[:lead])


def keep(ctx: LoweringContext, number: int, record: Any, meta: torch.Tensor) -> Any:
    """The record of tensor input `number`, with its strides in dims of one element checked.

    If the example's strides are not those of dense memory, they become guards, and the sizes constants.
    """
    if meta.dim() < 2 or not meta.numel():
        return record
    checked = list(record.stride)
    own = [s is not None and s.name == f"x{number}_s{d}" for d, s in enumerate(map(Expr.as_symbol, record.stride))]
    odd = [d for d, n in enumerate(meta.shape) if n == 1 and (own[d] or ctx.hint(record.stride[d]) != meta.stride(d))]
    bounds = [(1, Expr({(): 1}))]
    for d, (size, stride) in enumerate(zip(record.size, record.stride)):
        if d not in odd:
            bounds += [(meta.stride(d), stride), (meta.stride(d) * meta.shape[d], stride * size)]
    for d in sorted(odd, key=meta.stride):
        if not own[d]:
            checked[d] = ctx.new_symbol(f"x{number}_s{d}", meta.stride(d), STRIDE)
        ctx.specialise(record.size[d])  # with more elements the stride would be used for addressing
        _compare(ctx, checked[d], meta.stride(d), bounds)
        bounds.append((meta.stride(d), checked[d]))
    return dataclasses.replace(record, checked=tuple(checked))


def _compare(ctx: LoweringContext, stride: Expr, value: int, bounds: list[tuple[int, Expr]]) -> None:
    """Guard that `stride` lies between its neighbours among `bounds`, or equals one of them."""
    equal = next((e for at, e in bounds if at == value), None)
    if equal is not None:
        ctx.assume("eq", stride, equal)
        return
    below = max((b for b in bounds if b[0] < value), key=lambda b: b[0], default=None)
    above = min((b for b in bounds if b[0] > value), key=lambda b: b[0], default=None)
    if below is not None:
        ctx.assume("lt", below[1], stride)
    if above is not None:
        ctx.assume("lt", stride, above[1])
