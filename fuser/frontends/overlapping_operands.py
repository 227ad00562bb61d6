"""Calls that write a tensor and read other elements of it, such as `x[1:].add_(x[:-1])`: the graph runs in eager.

Eager refuses nearly all of them, and gives others a result that depends on its order of elements. In a functional graph
the operand has its old elements. A call on lists, such as `_foreach_add_([x, x], 1)`, is such a call where a place of a
list shares elements with another place that is written: eager goes through the lists in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from fuser.frontends.overlaps import is_strided, name_of
from fuser.passes.hints import same, size_hint
from fuser.reasons import because

REASON = because("not_traced", "it writes a tensor by a call that reads other elements of it")
_MOST_STEPS = 10_000  # of a search, after which two tensors count as overlapping
# They read other elements than the one that they write, so no operand may be the written tensor.
_CROSSING = frozenset(
    "mm bmm mv matmul addmm addmv addbmm baddbmm addr index_add index_copy index_put index_reduce put scatter "
    "scatter_add scatter_reduce gather take".split()
)


def reads_what_it_writes(writers: Iterable[fx.Node]) -> bool:
    """Whether one of the calls that write a tensor reads other elements of its memory.

    Symbolic sizes count as those of the traced call.
    """
    return any(_may_cross(*pair) for node in writers for pair in _pairs(node, name_of(node)))


def _pairs(node: fx.Node, name: str) -> Iterator[tuple[torch.Tensor, torch.Tensor, bool]]:
    """The tensors that a call writes, each with the operands that are read for it, and whether it reads other elements
    of an operand than the one that it writes."""
    values: Any = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta.get("example_value"))
    args, kwargs = values
    written, others = kwargs.get("out"), list(args)
    if written is None and args:
        written, others = args[0], list(args[1:])
    if name == "setitem":
        written, others = _region(args[0], args[1]), list(args[2:])
    others += (value for key, value in kwargs.items() if key != "out")
    if not isinstance(written, (tuple, list)):
        written, others = [written], [[o] for o in _flat(others)]
    elif len(written) > 1:
        yield from _at_other_places(written, others if "out" not in kwargs else [])
    for i, tensor in enumerate(written):
        for operand in others:
            read = operand[i] if isinstance(operand, (tuple, list)) and i < len(operand) else operand
            if is_strided(tensor) and is_strided(read):
                yield tensor, read, name.rstrip("_") in _CROSSING


def _at_other_places(
    written: Sequence[Any], others: Sequence[Any]
) -> Iterator[tuple[torch.Tensor, torch.Tensor, bool]]:  # fmt: skip
    """Each tensor of a list that is written, with those of its memory that are written or read for other places."""
    known: dict[int, list[tuple[int, torch.Tensor]]] = {}  # by memory: an optimiser's lists are long
    for one in (written, *(o if isinstance(o, (tuple, list)) else [o] for o in others)):
        for i, t in enumerate(one):
            if is_strided(t):
                known.setdefault(t.untyped_storage()._cdata, []).append((i if len(one) > 1 else -1, t))
    for i, tensor in enumerate(written):
        if is_strided(tensor):
            same_memory = known[tensor.untyped_storage()._cdata]
            yield from ((tensor, t, True) for k, t in same_memory if k != i)


def _flat(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _flat(value)
        else:
            yield value


def _region(x: Any, index: Any) -> Any:
    """The view of a tensor that an index of numbers and slices selects; the tensor itself for other indices."""
    parts = index if isinstance(index, tuple) else (index,)
    plain = all(p is None or p is ... or type(p) in (int, slice, torch.SymInt) for p in parts)
    if not is_strided(x) or not plain:
        return x
    with torch.no_grad():
        return x[index]


def _may_cross(written: torch.Tensor, read: torch.Tensor, crossing: bool) -> bool:
    if written.untyped_storage()._cdata != read.untyped_storage()._cdata:
        return False
    geometry = [(*t.shape, *t.stride(), t.storage_offset()) for t in (written, read)]
    if same(*geometry) and written.dtype == read.dtype:
        return crossing
    return share_elements(written, read)


def share_elements(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one memory have a byte in common; True as well if that takes long to find out."""
    if not all(map(size_hint, (*a.shape, *b.shape))):
        return False
    start = [size_hint(t.storage_offset()) * t.element_size() for t in (a, b)]
    reach: dict[int, list[int]] = {1: [-(b.element_size() - 1), a.element_size() - 1]}
    for t, side in ((a, 1), (b, 0)):
        for n, s in zip(t.shape, t.stride(), strict=True):
            low_high = reach.setdefault(size_hint(s) * t.element_size(), [0, 0])
            low_high[side] += (size_hint(n) - 1) * (1 if side else -1)
    reach.pop(0, None)
    steps = [_MOST_STEPS]
    return _is_sum(start[1] - start[0], sorted(reach.items(), reverse=True), steps)


def _is_sum(total: int, terms: list[tuple[int, list[int]]], steps: list[int]) -> bool:
    """Whether `total` is a sum of a multiple of each step, with a factor between its two bounds."""
    steps[0] -= 1
    if not terms or steps[0] < 0:
        return total == 0 or steps[0] < 0
    (step, (low, high)), *rest = terms
    least, most = sum(s * n for s, (n, _) in rest), sum(s * n for s, (_, n) in rest)
    first, last = -((most - total) // step), (total - least) // step
    return any(_is_sum(total - step * k, rest, steps) for k in range(max(low, first), min(high, last) + 1))
