"""Lifts constants, which become arguments as sizes are.

The first graph of a form keeps its constants. A second graph, equal except for the constants named here, has them as
inputs, which are bound at registration like the graph's own tensors; all later graphs share its kernels. So a loop over
time, or fifty scales, has two kernels, and a graph that is the only one of its form keeps its constants.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from fuser.canonical.graph import CanonicalGraph, CanonicalNode, FloatLiteral, IntLiteral, text_of

SMALL_SIZE = 16  # a slice of at most so many elements keeps its size: its loops are unrolled, and size 1 broadcasts
NO_END = 1 << 62  # end of a slice that means "all"
MOST_WHOLE = 127  # the largest integer that fits every dtype: eager raises for a number that overflows
MOST = 65504.0  # the largest float that fits every dtype


def as_literal(value: Any) -> Any:
    """`value` marked as a literal of a call, if it is a number that may be lifted."""
    if type(value) is int and 1 < abs(value) < NO_END:
        return IntLiteral(value)
    return FloatLiteral(value) if type(value) is float else value


def is_literal(value: Any) -> bool:
    """Whether `as_literal` has marked `value`."""
    return type(value) in (IntLiteral, FloatLiteral)


def plain(value: int | float) -> int | float:
    """The number without its mark."""
    return int(value) if isinstance(value, int) else float(value)


def map_literals(value: Any, fn: Callable[[Any], Any] = plain) -> Any:
    """`value` with each literal replaced by `fn(literal)`; by plain numbers if `fn` is not given."""
    if is_literal(value):
        return fn(value)
    if isinstance(value, (tuple, list)):
        items = [map_literals(v, fn) for v in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        return {k: map_literals(v, fn) for k, v in value.items()}
    if isinstance(value, slice):
        return slice(*(map_literals(v, fn) for v in (value.start, value.stop, value.step)))
    return value


# -- which constants ---------------------------------------------------------------------------------------------------
def _is_index(value: Any) -> bool:
    """Whether an index is lifted. 0 and -1 are not: a slice from 0 is aligned, and often is the whole dim."""
    return isinstance(value, int) and not isinstance(value, bool) and value not in (0, -1) and abs(value) < NO_END


def _is_number(value: Any) -> bool:
    """Whether a number is lifted. Not 0 or powers of two: products with them are exact, quotients become products."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return False
    most = MOST if isinstance(value, float) else MOST_WHOLE
    return math.frexp(value)[0] not in (0.0, 0.5, -0.5) and abs(value) <= most


def _is_float(value: Any) -> bool:
    return isinstance(value, float) and _is_number(value)


def _is_limit(value: Any) -> bool:
    """Whether a limit is lifted. Not a negative integer: its clamp in uint8 depends on torch's version."""
    return _is_number(value) and (isinstance(value, float) or value >= 0)


Place = tuple[int | str, int | None]
Rule = tuple[Callable[[Any], bool], tuple[int | str, ...]]
# By operator: a test of values, and the arguments, by number or name, that are lifted if it holds.
_RULES: dict[str, Rule] = {
    **{f"aten.{n}": (_is_index, (2,)) for n in ("select", "select_copy", "narrow", "narrow_copy")},
    "aten.select_scatter": (_is_index, (3,)),
    **{f"aten.{n}": (_is_number, (1,)) for n in ("full", "full_like", "fill")},
    **{f"aten.{n}": (_is_number, (2,)) for n in ("masked_fill", "new_full", "constant_pad_nd")},
    "aten.pad": (_is_number, (3,)),
    "aten.where": (_is_number, (1, 2)),
    **{f"aten.{n}": (_is_number, (1, "alpha")) for n in ("add", "sub")},
    **{f"aten.{n}": (_is_number, (1,)) for n in "mul eq ne lt le gt ge".split()},
    **{f"aten.{n}": (_is_limit, (1,)) for n in ("clamp_min", "clamp_max")},
    "aten.rsub": (_is_number, (1, 2)),
    "aten.clamp": (_is_limit, (1, 2)),
    **{f"aten.{n}": (_is_float, (1,)) for n in ("div", "leaky_relu")},
    **{f"aten.{n}": (_is_float, (2,)) for n in ("leaky_relu_backward", "threshold_backward", "lerp")},
    **{f"aten.{n}": (_is_float, (4,)) for n in ("layer_norm", "native_layer_norm", "group_norm")},
    **{f"aten.{n}": (_is_float, (3,)) for n in ("rms_norm", "_fused_rms_norm")},
    **{f"aten.{n}": (_is_float, (7,)) for n in ("native_group_norm", "native_batch_norm")},
    "aten._native_batch_norm_legit_no_training": (_is_float, (6,)),
    **{f"aten.{n}": (_is_float, ("value",)) for n in ("addcmul", "addcdiv")},
    **{f"aten.{n}": (_is_float, (1, 2)) for n in ("hardtanh", "threshold")},
}
# Slices: the position of the start; the end follows.
_SLICES = {"aten.slice": 2, "aten.slice_copy": 2, "aten.slice_scatter": 3}


def lifted_places(op: str, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]) -> Iterator[Place]:
    """The arguments of a call that are lifted: (number or name, None), or (number, distance from the previous one)."""
    if op in _SLICES:
        yield from _of_slice(_SLICES[op], args)
    test, places = _RULES.get(op, (_is_number, ()))
    named = dict(kwargs)
    if "rounding_mode" in named:
        return
    for place in places:
        value = named.get(place) if isinstance(place, str) else args[place] if place < len(args) else None
        if test(value):
            yield place, None


def _of_slice(at: int, args: tuple[Any, ...]) -> Iterator[Place]:
    """The lifted ends of a slice: both, if they have equal signs, so that their distance, the size, stays known."""
    start, end = (*args[at : at + 2], None, None)[:2]
    if _is_index(start):
        if end is None or isinstance(end, int) and end >= NO_END:
            yield at, None
        elif _is_index(end) and (start < 0) == (end < 0):
            yield at, None
            yield at + 1, end - start
    elif (start is None or type(start) is int and start == 0) and _is_index(end) and abs(end) > SMALL_SIZE:
        yield at + 1, None


# -- which graphs ------------------------------------------------------------------------------------------------------
def skeleton(graph: CanonicalGraph) -> str | None:
    """The text of a graph without constants that may be lifted; None if it has no such constants, or no input."""
    lines: list[str] = []
    found = False
    for node in graph.nodes:
        places = list(lifted_places(node.op, node.args, node.kwargs)) if node.index >= graph.n_inputs else []
        found = found or bool(places)
        lines.append(str(_blanked(node, places)))
    return "\n".join([*lines, text_of(graph.output), str(graph.functional)]) if found and graph.n_inputs else None


def _blanked(node: CanonicalNode, places: list[Place]) -> CanonicalNode:
    args, kwargs = list(node.args), dict(node.kwargs)
    for place, behind in places:
        into: Any = args if isinstance(place, int) else kwargs
        into[place] = (type(plain(into[place])).__name__, behind)
    return CanonicalNode(node.index, node.op, tuple(args), tuple(kwargs.items()), node.rounded)


__all__ = ["as_literal", "is_literal", "lifted_places", "map_literals", "plain", "skeleton"]
