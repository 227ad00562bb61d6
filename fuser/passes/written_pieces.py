"""Tensors that a program fills piece by piece: a chain of writes into parts of one dim becomes one `cat`.

AOTAutograd makes each `out[t] = row` a `select_scatter`, a new tensor of which only one row is new. A kernel that
computes the last of n such tensors selects among n rows at each element, and computes all of them to do so.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fuser.passes.calls import put_for
from fuser.passes.classify import is_write_back
from fuser.passes.cleanup import reaches_output, same_static_shape
from fuser.passes.hints import is_contiguous
from fuser.passes.written_parts import behind_writes, replace_read

aten = torch.ops.aten
LEAST = 3  # fewer writes stay: a kernel selects among their rows at each element, without a store
MOST = 256  # upper bound on the number of writes
_SCATTERS = {aten.select_scatter.default: aten.select.int, aten.slice_scatter.default: aten.slice.Tensor}
_CUTS = frozenset(_SCATTERS.values())
Span = tuple[int, int, int]  # a dim, its first index, and the index after the last


def join_writes(module: fx.GraphModule) -> int:
    """A tensor written piece by piece along a dim becomes a `cat`, if only its last content is read."""
    graph = module.graph
    kept = reaches_output(graph)
    changed = sum(_read_through(node, kept) for node in list(graph.nodes) if node.target in _CUTS)
    for node in reversed(list(graph.nodes)):
        if node.target in _SCATTERS and node.users:
            changed += _join(graph, node, kept)
    return changed


def _span(node: fx.Node) -> Span | None:
    """The part that a scatter writes, or a cut reads; None if it is unknown, or has steps."""
    scatter = node.target in _SCATTERS
    args = (node.args[0], *node.args[2:]) if scatter else node.args
    x: Any = args[0]
    value = x.meta.get("val")
    if node.kwargs or not isinstance(value, torch.Tensor) or len(args) < 2 or not all(type(a) is int for a in args[1:]):
        return None
    dim: int = args[1] % value.dim()  # type: ignore[operator, assignment]
    size = value.shape[dim]
    if type(size) is not int:
        return None
    if node.target in (aten.select_scatter.default, aten.select.int):
        start: int = args[2] % size if size else 0  # type: ignore[operator, assignment]
        return dim, start, start + 1
    bounds: list[Any] = [*args[2:], *(0, size, 1)[len(args) - 2 :]]
    if bounds[2] != 1:
        return None
    low, high, _ = slice(bounds[0], bounds[1]).indices(size)
    return dim, low, max(low, high)


def _apart(a: Span, b: Span) -> bool:
    return a[0] == b[0] and (a[2] <= b[1] or b[2] <= a[1])


def _read_through(cut: fx.Node, kept: set[fx.Node]) -> int:
    """A piece read after writes into other pieces is read from the older tensor, or is the value that was written."""
    if cut in kept or _of_written_input(cut.args[0]):
        return 0

    def span_of(n: fx.Node) -> Span | None:
        return _span(n) if n is cut or _alike(n, n.args[0]) else None

    def serves(write: Any) -> bool:
        return _SCATTERS[write.target] is cut.target and _alike(cut, write.args[1])

    source, is_written = behind_writes(cut, span_of, _apart, serves)
    if is_written:
        return replace_read(cut, source)
    if source is cut.args[0]:
        return 0
    cut.update_arg(0, source)
    return 1


def _of_written_input(node: Any) -> bool:
    """Whether a chain of scatters begins with an input that the graph writes; `scatters_in_place` handles these."""
    while isinstance(node, fx.Node) and node.target in _SCATTERS:
        node = node.args[0]
    return isinstance(node, fx.Node) and node.op == "placeholder" and any(map(is_write_back, node.users))


def _alike(a: Any, b: Any) -> bool:
    return same_static_shape(a.meta.get("val"), b.meta.get("val"))


def _join(graph: fx.Graph, last: fx.Node, kept: set[fx.Node]) -> int:
    """Replace the chain of writes that ends with `last` by a `cat`; 0 if it stays."""
    value = last.meta["val"]
    if not is_contiguous(value) or _of_written_input(last):
        return 0
    pieces: dict[Span, fx.Node] = {}
    node, base = last, last
    while node.target in _SCATTERS and (node is last or len(node.users) == 1 and node not in kept):
        span = _span(node)
        if span is None or any(s != span and not _apart(s, span) for s in pieces) or not _fits(value, node):
            break
        pieces.setdefault(span, node)
        node = base = node.args[0]  # type: ignore[assignment]
    if not LEAST <= len(pieces) <= MOST or not _alike(last, base):
        return 0
    dim, size = next(iter(pieces))[0], 0
    parts: list[fx.Node] = []
    with graph.inserting_before(last):
        for span in sorted(pieces):
            if span[1] > size:
                parts.append(_emit(graph, aten.slice.Tensor, base, dim, size, span[1]))
            scatter, size = pieces[span], span[2]
            source: Any = scatter.args[1]
            selects = scatter.target is aten.select_scatter.default
            parts.append(_emit(graph, aten.unsqueeze.default, source, dim) if selects else source)
        if size < value.shape[dim]:
            parts.append(_emit(graph, aten.slice.Tensor, base, dim, size, value.shape[dim]))
    put_for(last, aten.cat.default, (parts, dim))
    return 1


def _fits(value: torch.Tensor, scatter: fx.Node) -> bool:
    """Whether a `cat` of the written pieces has the dtype and memory format of the last scatter's result."""
    source = scatter.args[1]
    own = source.meta.get("val") if isinstance(source, fx.Node) else None
    if not isinstance(own, torch.Tensor) or own.dtype is not value.dtype:
        return False
    return is_contiguous(own) or value.dim() not in (4, 5)


def _emit(graph: fx.Graph, function: Any, x: fx.Node, *args: Any) -> fx.Node:
    node = graph.call_function(function, (x, *args))
    node.meta = {**x.meta, "val": function(x.meta["val"], *args)}
    return node


__all__ = ["join_writes"]
