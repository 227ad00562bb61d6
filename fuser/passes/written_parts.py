"""Parts of a tensor that are written several times are read from what was written, and written once.

AOTAutograd makes `x[::2].mul_(a).add_(b)` a `slice_scatter` of the product, a slice of that, and a `slice_scatter` of
the sum. The slice is the product, and of the two new contents only the last one is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fuser.passes.cleanup import reaches_output, same_static_shape
from fuser.passes.hints import are_numbers, is_contiguous, same

aten = torch.ops.aten
# For a write into a part of a tensor: the view that is this part, with the same arguments.
PART_OF: dict[Any, Any] = {
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.select_scatter.default: aten.select.int,
    aten.diagonal_scatter.default: aten.diagonal.default,
}
PARTS = frozenset(PART_OF.values())
Part = tuple[Any, ...]  # the view, and its arguments; those of a slice or select are spelled in one way


def read_written_parts(module: fx.GraphModule) -> int:
    """A part that is read after it was written is the value that was written; one that is overwritten is not kept."""
    graph = module.graph
    kept = reaches_output(graph)
    changed = 0
    for node in list(graph.nodes):
        if node.target in PARTS and node not in kept:
            changed += _read(node)
        elif node.target in PART_OF:
            changed += _overwrite(node)
    return changed


def _part(node: fx.Node) -> Part | None:
    """The part that a scatter writes, or a view reads; None if it is not known."""
    args: list[Any] = list(node.args[2:] if node.target in PART_OF else node.args[1:])
    source: Any = node.args[0]
    value = source.meta.get("val") if isinstance(source, fx.Node) else None
    if node.kwargs or not isinstance(value, torch.Tensor):
        return None
    view = PART_OF.get(node.target, node.target)
    if view is aten.diagonal.default or not args or type(args[0]) is not int:
        return (view, *args)
    dim = args[0] % value.dim()
    size, rest = value.shape[dim], args[1:]
    if not are_numbers(size, *(a for a in rest if a is not None)):
        return (view, dim, *rest)
    if view is aten.select.int:
        return view, dim, rest[0] % size if size else 0
    low, high, step = slice(*(*rest, None, None, None)[:3]).indices(size)
    return view, dim, low, max(low, high), step


def _apart(a: Part, b: Part) -> bool:
    """Whether two parts certainly share no element."""
    spans = [_span(part) for part in (a, b)]
    if None in spans or a[1] != b[1]:
        return False
    one, other = spans
    assert one is not None and other is not None
    if one.stop <= other.start or other.stop <= one.start:
        return True
    return one.step == other.step and (one.start - other.start) % one.step != 0


def _span(part: Part) -> range | None:
    """The indices along a dim that a slice or select has; None if these are not known numbers."""
    if part[0] is aten.diagonal.default or not are_numbers(*part[1:]):
        return None
    if part[0] is aten.select.int:
        return range(part[2], part[2] + 1)
    return range(*part[2:]) if len(part) == 5 else None


def _read(view: fx.Node) -> int:
    """Replace a view of a written tensor by the value that was written there, unless a later write may overlap it."""
    if not view.users:
        return 0
    source, is_written = behind_writes(
        view, _part, _apart, lambda write: _serves(write.args[1], view, write.args[0])
    )
    return replace_read(view, source) if is_written else 0


def behind_writes(
    view: fx.Node, part_of: Callable[[fx.Node], Any], are_apart: Callable[[Any, Any], bool],
    serves: Callable[[Any], bool],
) -> tuple[Any, bool]:  # fmt: skip
    """The tensor that a view reads, without later writes into other parts; whether it is a write that gives the view.

    part_of: the part that a write or a view is of; None if it is not known. are_apart: whether two share no element.
    serves: whether the value of a write into the view's part stands for the view; an input never does, because results
    do not share its memory.
    """
    part, source = part_of(view), view.args[0]
    while part is not None and isinstance(source, fx.Node) and source.target in PART_OF:
        written, value = part_of(source), source.args[1]
        if written == part and isinstance(value, fx.Node) and value.op != "placeholder" and serves(source):
            return source, True
        if written is None or not are_apart(written, part):
            return source, False
        source = source.args[0]
    return source, False


def replace_read(view: fx.Node, write: Any) -> int:
    """Replace a view by the value that was written there."""
    view.replace_all_uses_with(write.args[1])
    view.graph.erase_node(view)
    return 1


def _serves(value: Any, view: fx.Node, older: Any) -> bool:
    """Whether readers of `view` get the same from `value`: its elements, and its dims in the same order of memory."""
    a, b, base = (n.meta.get("val") for n in (value, view, older))
    if not all(isinstance(t, torch.Tensor) and t.layout is torch.strided for t in (a, b, base)):
        return False
    if a.dtype != b.dtype or a.device != b.device or not same(a.shape, b.shape):  # type: ignore[union-attr]
        return False
    if any(t.is_conj() or t.is_neg() for t in (a, b)):  # type: ignore[union-attr]
        return False
    if are_numbers(*a.shape, *a.stride(), *b.stride()):  # type: ignore[union-attr]
        return _order(a) == _order(b)  # type: ignore[arg-type]
    return view.target is not aten.diagonal.default and is_contiguous(a) and is_contiguous(base)  # type: ignore[arg-type]


def _order(t: torch.Tensor) -> list[int]:
    """The dims of more than one element, from the outermost to the innermost in memory."""
    return sorted((d for d in range(t.dim()) if t.shape[d] != 1), key=lambda d: (-t.stride()[d], d))


def _overwrite(scatter: fx.Node) -> int:
    """Let a write into a part follow the tensor before an earlier write into the same part."""
    before: Any = scatter.args[0]
    if not isinstance(before, fx.Node) or before.target is not scatter.target or _part(before) is None:
        return 0
    older = before.args[0]
    if _part(before) != _part(scatter) or not isinstance(older, fx.Node):
        return 0
    if not same_static_shape(before.meta.get("val"), older.meta.get("val")):
        return 0
    scatter.update_arg(0, older)
    return 1


__all__ = ["PARTS", "PART_OF", "read_written_parts"]
