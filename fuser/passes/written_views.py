"""Writes through views of an input write through the view: `x.view(-1)[i] = v` writes a few elements, not all.

AOTAutograd's functional graph computes the new content of the viewed part, converts it back to the whole input, and
copies that into the input at the end: `copy_(x, view(index_put(view(x), …)))`. This pass takes the same view of the
input instead, and copies or scatters the content into it. That requires that nothing else reads the values in between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fuser.canonical.mutation import in_place_twin
from fuser.lazy_dataclasses import dataclass
from fuser.passes.calls import erase_unread
from fuser.passes.classify import MARK, WRITTEN, base_of, is_view, is_write_back
from fuser.passes.hints import is_dense, numel_hint
from fuser.passes.scatters import IN_PLACE, is_small_part
from fuser.passes.written_parts import PART_OF, PARTS

aten = torch.ops.aten
_SWAPS = frozenset({aten.t.default, aten.transpose.int})
_RESIZED = frozenset(
    {aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default}
    | {getattr(aten.squeeze, o) for o in ("default", "dim", "dims")}
)
_MADE_BY_VIEWS = frozenset({*PART_OF, *_SWAPS, *_RESIZED, aten.permute.default})


@dataclass(frozen=True)
class _Seen:
    """A view of an input: the calls that make it, each a function and its arguments after the tensor, and its value."""

    calls: tuple[tuple[Any, tuple[Any, ...]], ...]
    value: torch.Tensor

    def through(self, function: Any, *args: Any) -> _Seen:
        """A view of this view. Raises the function's own error if the layout does not allow it."""
        with torch.no_grad(), self.value.fake_mode:  # type: ignore[attr-defined]
            return _Seen((*self.calls, (function, args)), function(self.value, *args))


@dataclass(frozen=True)
class _Write:
    """One write at the end of a graph: a node's value copied into a view, or an operator that writes there in place."""

    into: _Seen
    node: fx.Node
    operator: Any = None

    def copied(self) -> _Write:
        """The write with its value computed elsewhere, unless it is a scatter, which follows the writes before it."""
        return self if self.node.target in IN_PLACE else _Write(self.into, self.node)

    @property
    def is_part(self) -> bool:
        """Whether the view leaves out elements of the input."""
        return any(function in PARTS for function, _ in self.into.calls)


class _CannotWrite(Exception):
    """Raised if the parts that are written cannot be told from how the content is computed."""


def write_through_views(module: fx.GraphModule) -> int:
    """New contents of inputs that were computed through views are written through these views."""
    graph = module.graph
    copies = [n for n in graph.nodes if is_write_back(n) and len(n.args) == 2 and not n.kwargs]
    written = {n.args[0] for n in copies}
    changed = 0
    for copy in copies:
        x, value = copy.args
        if not isinstance(value, fx.Node) or value.target not in _MADE_BY_VIEWS or not _is_plain(x):
            continue
        assert isinstance(x, fx.Node)
        try:
            writes = _writes(x, value, _Seen((), x.meta["val"]))
        except _CannotWrite:
            continue
        views = _views(x)
        if _pays(x, writes) and all(_is_apart(w, written) and _can_be_spelled(w.into, views) for w in writes):
            _emit(graph, copy, writes, views)
            changed += 1
    return changed


def _is_plain(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and hasattr(value, "fake_mode")


def _writes(x: fx.Node, value: Any, at: _Seen) -> list[_Write]:
    """The writes into the view `at` of the input `x` that give it the content `value`."""
    if not _is_plain(value) or not _has_form(value.meta["val"], at.value):
        raise _CannotWrite
    if base_of(value) is x and _geometry(value.meta["val"]) == _geometry(at.value):
        return []  # the old content
    alone = len(value.users) == 1 and not value.kwargs
    if alone and value.target in PART_OF:
        base, source, *place = value.args
        before = _writes(x, base, at)
        then = _writes(x, source, _tried(lambda: at.through(PART_OF[value.target], *place)))
        # What an operator in place would read of the old content may have been written before.
        return before + ([w.copied() for w in then] if before else then)
    if len(value.users) == 1 and value.target in IN_PLACE and value.target not in PART_OF:
        return [*_writes(x, value.args[0], at), _Write(at, value, IN_PLACE[value.target])]
    if alone and value.target is aten.copy.default and _is_plain(value.args[1]):
        new: Any = value.args[1]
        if _has_form(new.meta["val"], at.value):
            return _writes(x, new, at)
    back = _undone(value, at) if alone else None
    if back is not None:
        return _writes(x, value.args[0], back)
    return [_Write(at, value, _twin(x, value, at) if alone else None)]


def _twin(x: fx.Node, value: fx.Node, at: _Seen) -> Any:
    """The in-place operator for one call that computes the new content of a part with gaps from the old one, or None.

    Kernels write no tensors with gaps, so a kernel's result would be copied into the part.
    """
    old: Any = value.args[0] if value.args else None
    if is_view(value.target) or is_dense(at.value) or base_of(old) is not x or not _is_plain(old):  # a list of pieces
        return None
    if _geometry(old.meta["val"]) != _geometry(at.value):
        return None
    twin = in_place_twin(value.target)
    return None if twin is None or torch.Tag.nondeterministic_seeded in twin.tags else twin


def _pays(x: fx.Node, writes: list[_Write]) -> bool:
    """Whether these writes take less time than a kernel that computes the whole input anew.

    Where every so many elements are written, a kernel would compute the others, too, and drop them.
    """
    parts = [w for w in writes if w.is_part and w.operator is None]
    if all(is_dense(w.into.value) or is_small_part(w.node.meta["val"], x.meta["val"]) for w in parts):
        return True
    written = sum(numel_hint(w.node.meta["val"]) for w in parts)
    return all(map(_has_steps, parts)) and 2 * written <= numel_hint(x.meta["val"])


def _has_steps(write: _Write) -> bool:
    """Whether a write takes every so many elements along a dim."""
    return any(function is aten.slice.Tensor and len(args) > 3 and args[3] != 1 for function, args in write.into.calls)


def _tried(view: Callable[[], _Seen]) -> _Seen:
    try:
        return view()
    except (RuntimeError, ValueError, IndexError, TypeError):
        raise _CannotWrite from None


def _undone(node: fx.Node, at: _Seen) -> _Seen | None:
    """The view of `at` with the content of `node`'s argument, if `node` is a view that only rearranges; else None."""
    source, args = node.args[0] if node.args else None, node.args[1:]
    if not isinstance(source, fx.Node) or not _is_plain(source):
        return None
    if node.target in _SWAPS:
        return _tried(lambda: at.through(node.target, *args))
    if node.target is aten.permute.default:
        order: list[int] = [d % at.value.dim() for d in args[0]]  # type: ignore[union-attr, operator, misc]
        return _tried(lambda: at.through(aten.permute.default, [order.index(d) for d in range(len(order))]))
    if node.target in _RESIZED:
        return _tried(lambda: at.through(aten.view.default, list(source.meta["val"].shape)))
    return None


def _geometry(value: torch.Tensor) -> tuple[Any, ...]:
    """The geometry of a view (sizes, strides, offset, dtype, conjugation, negation), as text. Adds no guard."""
    sizes, strides = tuple(map(str, value.shape)), tuple(map(str, value.stride()))
    return sizes, strides, str(value.storage_offset()), value.dtype, value.is_conj(), value.is_neg()


def _has_form(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.device == b.device and tuple(map(str, a.shape)) == tuple(map(str, b.shape))


def _views(x: fx.Node) -> dict[tuple[Any, ...], list[fx.Node]]:
    """The input itself and all views of it, by geometry."""
    found: dict[tuple[Any, ...], list[fx.Node]] = {}
    pending = [x]
    while pending:
        node = pending.pop()
        if _is_plain(node):
            found.setdefault(_geometry(node.meta["val"]), []).append(node)
            pending += [u for u in node.users if is_view(u.target) and u.args[0] is node]
    return found


def _can_be_spelled(seen: _Seen, views: dict[tuple[Any, ...], list[fx.Node]]) -> bool:
    """Whether a view is in the graph already, or can be made with numbers alone."""
    numbers = all(type(n) is int for _, args in seen.calls for a in args for n in (a if isinstance(a, list) else [a]))
    return numbers or _geometry(seen.value) in views


def _is_apart(write: _Write, written: set[Any]) -> bool:
    """Whether a write reads none of the inputs that the graph writes, except its own target, so that it may move."""
    arguments = write.node.all_input_nodes[1:] if write.operator else [write.node]
    return not any(base_of(a) in written for a in arguments)


def _emit(
    graph: fx.Graph, copy: fx.Node, writes: list[_Write], views: dict[tuple[Any, ...], list[fx.Node]]
) -> None:  # fmt: skip
    """Replace `copy` by the writes, and erase nodes that only `copy` needed."""
    for write in writes:
        target = _viewed(graph, copy, write.into, views)
        in_place = write.operator is not None
        args = (target, *write.node.args[1:]) if in_place else (target, write.node)
        function = write.operator if in_place else aten.copy_.default
        with graph.inserting_before(copy):
            new = graph.call_function(function, args, dict(write.node.kwargs) if in_place else {})
        new.meta = {**(write.node if in_place else copy).meta, "val": target.meta["val"]}
        if in_place:
            new.meta[MARK] = True
    erase_unread(copy)


def _viewed(
    graph: fx.Graph, copy: fx.Node, seen: _Seen, views: dict[tuple[Any, ...], list[fx.Node]]
) -> fx.Node:  # fmt: skip
    """The node of a view of an input, outside of groups. All its readers and writers share one node."""
    known = views.get(_geometry(seen.value))
    if known is None:
        node: fx.Node = copy.args[0]  # type: ignore[assignment]
        value: torch.Tensor = node.meta["val"]
        for function, args in seen.calls:
            with graph.inserting_before(copy):
                node = graph.call_function(function, (node, *args))
            with torch.no_grad(), value.fake_mode:  # type: ignore[attr-defined]
                value = function(value, *args)
            node.meta = {**copy.meta, "val": value}
        known = views[_geometry(seen.value)] = [node]
    first = min(known)
    for other in known:
        if other is not first:
            other.replace_all_uses_with(first, delete_user_cb=lambda user: user.op != "output")
    _move_before(copy, first)
    node = first
    while node.op != "placeholder":
        node.meta["outside"] = node.meta[WRITTEN] = True
        node = node.args[0]  # type: ignore[assignment]
    return first


def _move_before(place: fx.Node, node: fx.Node) -> None:
    """Move a node and its inputs before `place`, unless they are there already."""
    if place < node:
        for source in node.all_input_nodes:
            _move_before(place, source)
        place.prepend(node)


__all__ = ["write_through_views"]
