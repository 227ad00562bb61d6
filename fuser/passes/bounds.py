"""Bounds of the elements of a tensor, for blocks of its indices, derived from the graph.

Interval arithmetic (Moore, "Interval Analysis", 1966), from a node back to the numbers that it is computed from. A
tensor that the graph knows nothing about may have any value of its dtype. No element is outside its bounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from fuser.lazy_dataclasses import dataclass

aten: Any = torch.ops.aten
MOST_NODES = 256  # whose bounds one `Bounds` computes; of others nothing is known
_DEEPEST = 48  # calls behind each other that it follows
_EXACT = 2.0**53 - 1  # float64 represents all integers up to here exactly


@dataclass(frozen=True)
class Interval:
    """For each block, the least and the greatest element, as float64 tensors of shapes that broadcast.

    Elements are not NaN if an interval is finite, or infinite on one side only.
    """

    low: torch.Tensor
    high: torch.Tensor

    @staticmethod
    def of(low: float, high: float) -> Interval:
        """The same interval for all blocks."""
        return Interval(*(torch.tensor(float(n), dtype=torch.float64, device="cpu") for n in (low, high)))

    def truth(self) -> Interval:
        """The truth values of the elements: 1 if all differ from 0, 0 if none does, both if unknown."""
        surely = (self.low > 0) | (self.high < 0)
        never = (self.low == 0) & (self.high == 0)
        return _truths(surely, ~never)

    def choose(self, yes: Interval, no: Interval) -> Interval:
        """Bounds of `yes` where this truth value is 1, of `no` where it is 0, and of both where it may be either."""
        surely, never = self.low > 0, self.high < 1
        both = yes.united(no)
        low = torch.where(surely, yes.low, torch.where(never, no.low, both.low))
        return Interval(low, torch.where(surely, yes.high, torch.where(never, no.high, both.high)))

    def united(self, other: Interval) -> Interval:
        """Bounds of elements that are in one interval or the other."""
        return Interval(torch.minimum(self.low, other.low), torch.maximum(self.high, other.high))


with _disable_current_modes():  # passes are imported while fake tensors are traced
    _ALL = Interval.of(-math.inf, math.inf)
    _EITHER = Interval.of(0, 1)
    ZERO = Interval.of(0, 0)
Index = tuple[Interval, ...]
Rule = Callable[["Bounds", fx.Node, Index], "Interval | None"]


def _truths(surely: torch.Tensor, perhaps: torch.Tensor) -> Interval:
    return Interval(surely.double(), perhaps.double())


def _any_of(dtype: torch.dtype) -> Interval:
    return _EITHER if dtype is torch.bool else _ALL


Size = int | str  # a symbol by its text


class Bounds:
    """Derives bounds from a graph. `of(node, index)`: `index` holds the bounds of the index along each dim of the node.

    `symbols`: the values of symbolic sizes, by symbol; sizes without a value are at least 2.
    """

    def __init__(self, symbols: Mapping[Any, int] | None = None) -> None:
        self._symbols = symbols or {}
        self._known: dict[Any, Interval] = {}
        self._kept: list[Index] = []  # identities of intervals are in keys
        self._depth = 0

    def of(self, node: Any, index: Index) -> Interval:
        """The bounds of a node's elements at these indices."""
        if isinstance(node, (bool, int, float)):
            return Interval.of(node, node) if node == node else _ALL
        value = node.meta.get("val") if isinstance(node, fx.Node) else None
        if isinstance(value, torch.SymInt):
            number = self.argument(node)
            return _ALL if number is None else self.of(number, ())
        if not isinstance(value, torch.Tensor) or value.dtype.is_complex:
            return _ALL
        key = node, tuple(map(id, index))
        if key not in self._known:
            room = len(self._known) < MOST_NODES and self._depth < _DEEPEST
            rule = _RULES.get(node.target) if room else None
            self._kept.append(index)
            self._depth += 1
            found = None if rule is None else rule(self, node, index)
            self._depth -= 1
            self._known[key] = _any_of(value.dtype) if found is None else _in_dtype(found, value.dtype)
        return self._known[key]

    def operand(self, node: fx.Node, arg: Any, index: Index) -> Interval:
        """The bounds of an operand that is broadcast to the shape of `node`."""
        if not isinstance(arg, fx.Node):
            return self.of(arg, ()) if isinstance(arg, (bool, int, float)) else _ALL
        value, own = arg.meta.get("val"), node.meta["val"]
        if not isinstance(value, torch.Tensor):
            return self.of(arg, ())
        if value.dim() > own.dim():
            return _ALL
        last = index[len(index) - value.dim() :]
        return self.of(arg, tuple(ZERO if n == 1 else i for n, i in zip(self.sizes(arg), last)))

    def sizes(self, node: Any) -> list[Size]:
        """The sizes of a node's tensor; an unknown symbolic size as text."""
        return [self._number(n) for n in node.meta["val"].shape]

    def argument(self, arg: Any) -> Any:
        """An argument's number, or the value of a symbolic size; None for an unknown size or another node."""
        value = arg.meta.get("val") if isinstance(arg, fx.Node) else arg
        found = self._number(value) if isinstance(value, torch.SymInt) else value
        return None if isinstance(found, (str, fx.Node)) else found

    def _number(self, size: Any) -> Size:
        if type(size) is int:
            return size
        found = size.node.expr.subs(self._symbols)
        return str(found) if found.free_symbols else int(found)


def _in_dtype(found: Interval, dtype: torch.dtype) -> Interval:
    """Bounds of elements after conversion to a dtype; unbounded if they may be NaN or wrap around."""
    low, high = found.low, found.high
    if dtype.is_floating_point:
        if dtype is not torch.float64:
            low, high = torch.minimum(low, low.to(dtype).double()), torch.maximum(high, high.to(dtype).double())
        bad = low.isnan() | high.isnan()
    elif dtype is torch.bool:
        return found.truth()
    else:
        info = torch.iinfo(dtype)
        low, high = low.trunc(), high.trunc()
        bad = ~((low >= max(info.min, -_EXACT)) & (high <= min(info.max, _EXACT)))
    return Interval(low.masked_fill(bad, -math.inf), high.masked_fill(bad, math.inf))


# -- elementwise ------------------------------------------------------------------------------------------------------
def _elementwise(function: Callable[..., Interval | None], arity: int, first: int = 0) -> Rule:
    """The rule for a function of `arity` operands; those from `first` on are promoted to a common dtype."""

    def rule(bounds: Bounds, node: fx.Node, index: Index) -> Interval | None:
        if len(node.args) != arity:
            return None
        given = [bounds.operand(node, a, index) for a in node.args]
        dtype = _common_dtype(node.args[first:])
        return None if dtype is None else function(node, *given[:first], *(_in_dtype(i, dtype) for i in given[first:]))

    return rule


def _common_dtype(args: Sequence[Any]) -> torch.dtype | None:
    """The dtype to which torch promotes the operands; None if one of them is not a tensor or number."""
    found: list[Any] = [a.meta.get("val") if isinstance(a, fx.Node) else a for a in args]
    tensors = [torch.empty((1,) * a.dim(), dtype=a.dtype, device="meta") for a in found if isinstance(a, torch.Tensor)]
    numbers = [a for a in found if isinstance(a, (bool, int, float))]
    if len(tensors) + len(numbers) != len(found) or not tensors:
        return None
    dtype = tensors[0].dtype
    for other in (*tensors[1:], *numbers):
        dtype = torch.result_type(tensors[0], other) if len(found) == 2 else torch.promote_types(dtype, _alone(other))
    return dtype


def _alone(value: Any) -> torch.dtype:
    return value.dtype if isinstance(value, torch.Tensor) else torch.result_type(value, value)


def _widened(node: fx.Node, low: torch.Tensor, high: torch.Tensor) -> Interval:
    """Bounds widened for a result that is rounded, perhaps twice."""
    dtype = node.meta["val"].dtype
    if not dtype.is_floating_point:
        return Interval(low, high)
    eps = 4 * torch.finfo(dtype).eps

    def moved(t: torch.Tensor, way: float) -> torch.Tensor:
        exact = (t == t.round()) & (t.abs() <= 1 / eps) | t.isinf() | t.isnan()
        return torch.where(exact, t, t + way * eps * t.abs())

    return Interval(moved(low, -1.0), moved(high, 1.0))


def _add(node: fx.Node, a: Interval, b: Interval) -> Interval | None:
    alpha = node.kwargs.get("alpha", 1)
    if node.meta["val"].dtype is torch.bool or not isinstance(alpha, (int, float)):
        return None
    b = b if alpha == 1 else _mul(node, b, Interval.of(alpha, alpha))
    return _widened(node, a.low + b.low, a.high + b.high)


def _sub(node: fx.Node, a: Interval, b: Interval) -> Interval | None:
    alpha = node.kwargs.get("alpha", 1)
    if not isinstance(alpha, (int, float)):
        return None
    b = b if alpha == 1 else _mul(node, b, Interval.of(alpha, alpha))
    return _widened(node, a.low - b.high, a.high - b.low)


def _corners(a: Interval, b: Interval, call: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and greatest result at the ends of two intervals; NaN if one of the results is NaN."""
    first, second, third, fourth = (call(x, y) for x in (a.low, a.high) for y in (b.low, b.high))
    low = torch.minimum(torch.minimum(first, second), torch.minimum(third, fourth))  # these keep NaN
    return low, torch.maximum(torch.maximum(first, second), torch.maximum(third, fourth))


def _mul(node: fx.Node, a: Interval, b: Interval) -> Interval:
    return _widened(node, *_corners(a, b, torch.mul))


def _div(node: fx.Node, a: Interval, b: Interval) -> Interval | None:
    dtype = node.meta["val"].dtype
    if dtype.is_floating_point:
        a, b = (_in_dtype(i, dtype) for i in (a, b))  # integers are converted first
    low, high = _corners(a, b, torch.div)
    rounding = node.kwargs.get("rounding_mode", "floor" if node.target in _pairs("floor_divide") else None)
    if rounding is not None and dtype.is_floating_point:
        return None  # the rounding of a quotient decides on which side of an integer it falls
    match rounding:
        case "floor":
            found = Interval(low.floor(), high.floor())
        case "trunc":
            found = Interval(low.trunc(), high.trunc())
        case _:
            found = _widened(node, low, high)
    crosses = (b.low <= 0) & (b.high >= 0)
    return Interval(found.low.masked_fill(crosses, -math.inf), found.high.masked_fill(crosses, math.inf))


def _remainder(node: fx.Node, a: Interval, b: Interval) -> Interval | None:
    if not bool((b.low == b.high).all() and (b.low > 0).all()):
        return None
    floats = node.meta["val"].dtype.is_floating_point
    turns = (a.low / b.low).floor()
    whole = (turns == 0) if floats else torch.ones_like(turns, dtype=torch.bool)  # other remainders of floats round
    same = (turns == (a.high / b.low).floor()) & whole
    low = torch.where(same, a.low - turns * b.low, 0.0)
    high = torch.where(same, a.high - turns * b.low, b.low if floats else b.low - 1)
    unknown = ~(a.low.isfinite() & a.high.isfinite())
    return Interval(low.masked_fill(unknown, -math.inf), high.masked_fill(unknown, math.inf))


def _abs(_: fx.Node, a: Interval) -> Interval:
    crosses = (a.low <= 0) & (a.high >= 0)
    ends = a.low.abs(), a.high.abs()
    return _where_numbers((a,), torch.minimum(*ends).masked_fill(crosses, 0.0), torch.maximum(*ends))


def _clamp(bounds: Bounds, node: fx.Node, index: Index) -> Interval | None:
    def limit(place: int, name: str, missing: float) -> Interval:
        given = node.args[place] if len(node.args) > place else node.kwargs.get(name)
        if given is None:
            return Interval.of(missing, missing)
        return _in_dtype(bounds.of(given, ()), node.meta["val"].dtype)

    raised = _most(node, bounds.operand(node, node.args[0], index), limit(1, "min", -math.inf))
    return _least(node, raised, limit(2, "max", math.inf))


def _least(_: fx.Node, a: Interval, b: Interval) -> Interval:
    return _where_numbers((a, b), torch.minimum(a.low, b.low), torch.minimum(a.high, b.high))


def _most(_: fx.Node, a: Interval, b: Interval) -> Interval:
    return _where_numbers((a, b), torch.maximum(a.low, b.low), torch.maximum(a.high, b.high))


def _where_numbers(given: Sequence[Interval], low: torch.Tensor, high: torch.Tensor) -> Interval:
    """The given bounds, unbounded where an operand may be NaN, because extremes propagate NaN."""
    for i in given:
        bad = (i.low == -math.inf) & (i.high == math.inf)
        low, high = low.masked_fill(bad, -math.inf), high.masked_fill(bad, math.inf)
    return Interval(low, high)


def _compared(surely: Callable[..., torch.Tensor], perhaps: Callable[..., torch.Tensor]) -> Any:
    """A comparison. It is certain only between finite intervals, since others may include NaN."""

    def found(_: fx.Node, a: Interval, b: Interval) -> Interval:
        finite = a.low.isfinite() & a.high.isfinite() & b.low.isfinite() & b.high.isfinite()
        return _truths(surely(a, b) & finite, perhaps(a, b) | ~finite)

    return found


_less = _compared(lambda a, b: a.high < b.low, lambda a, b: a.low < b.high)
_not_more = _compared(lambda a, b: a.high <= b.low, lambda a, b: a.low <= b.high)
_equal = _compared(
    lambda a, b: (a.low == b.high) & (a.high == b.low), lambda a, b: (a.low <= b.high) & (b.low <= a.high)
)


def _turned(function: Any) -> Any:
    return lambda node, a, b: function(node, b, a)


def _negated(function: Any) -> Any:
    def found(node: fx.Node, *given: Interval) -> Interval:
        truth = function(node, *given)
        return Interval(1 - truth.high, 1 - truth.low)

    return found


def _of_truths(function: Callable[[Interval, Interval], Interval]) -> Any:
    """A function of truth values; None for integers, whose bits are unknown."""

    def found(node: fx.Node, a: Interval, b: Interval) -> Interval | None:
        return function(a.truth(), b.truth()) if node.meta["val"].dtype is torch.bool else None

    return found


_and = _of_truths(lambda a, b: Interval(a.low * b.low, a.high * b.high))
_or = _of_truths(lambda a, b: Interval(torch.maximum(a.low, b.low), torch.maximum(a.high, b.high)))
_xor = _of_truths(lambda a, b: a.choose(Interval(1 - b.high, 1 - b.low), b))


def _bitwise_not(node: fx.Node, a: Interval) -> Interval:
    one = 1 if node.meta["val"].dtype is torch.bool else -1
    return Interval(one - a.high, one - a.low)


def _where(_: fx.Node, condition: Interval, yes: Interval, no: Interval) -> Interval:
    return condition.truth().choose(yes, no)


def _filled(bounds: Bounds, node: fx.Node, index: Index) -> Interval | None:
    if len(node.args) != 3:
        return None
    value, condition, filler = (bounds.operand(node, a, index) for a in node.args)
    return condition.truth().choose(_in_dtype(filler, node.meta["val"].dtype), value)


def _copied(bounds: Bounds, node: fx.Node, index: Index) -> Interval | None:
    """A copy or a cast: the bounds of its operand."""
    return bounds.operand(node, node.args[0], index)


# -- created ----------------------------------------------------------------------------------------------------------
def _number(place: int | float) -> Rule:
    """A tensor filled with the argument at position `place`, or with `place` itself if that is a float."""

    def rule(bounds: Bounds, node: fx.Node, index: Index) -> Interval | None:
        return bounds.of(place if isinstance(place, float) else node.args[place], ())

    return rule


def _counted(bounds: Bounds, node: fx.Node, index: Index) -> Interval | None:
    args = [bounds.argument(a) for a in node.args]
    if node.target is torch.ops.prims.iota.default:
        start, step = (bounds.argument(node.kwargs.get(name)) for name in ("start", "step"))
    else:
        start, step = (args[0] if len(args) > 1 else 0), (args[2] if len(args) > 2 else 1)
    if not all(isinstance(n, (int, float)) and math.isfinite(n) for n in (start, step)):
        return None
    (at,), dtype = index, node.meta["val"].dtype
    if not dtype.is_floating_point:
        start, step = math.trunc(start), math.trunc(step)
    low, high = _corners(at, Interval.of(step, step), torch.mul)
    if start % 1 or step % 1:  # eager adds steps to rounded numbers
        slack = 4 * torch.finfo(dtype).eps * (abs(start) + abs(step) * at.high)
        low, high = low - slack, high + slack
    return _widened(node, low + start, high + start)


# -- moved ------------------------------------------------------------------------------------------------------------
def _moved(places: Callable[[Bounds, fx.Node, Index], Sequence[Interval] | None]) -> Rule:
    """A view: `places` maps indices of the view to indices of its operand."""

    def rule(bounds: Bounds, node: fx.Node, index: Index) -> Interval | None:
        source = node.args[0]
        found = places(bounds, node, index)
        return None if found is None or not isinstance(source, fx.Node) else bounds.of(source, tuple(found))

    return rule


def _permuted(_: Bounds, node: fx.Node, index: Index) -> Sequence[Interval] | None:
    rank = len(index)
    args: Any = node.args
    dims = range(rank)[::-1] if len(args) == 1 else args[1] if len(args) == 2 else _swapped(rank, args[1], args[2])
    found: list[Interval] = [ZERO] * rank
    for i, d in zip(index, dims):
        found[d % rank] = i
    return found


def _swapped(rank: int, a: Any, b: Any) -> list[int]:
    dims = list(range(rank))
    dims[a % rank], dims[b % rank] = dims[b % rank], dims[a % rank]
    return dims


def _reshaped(bounds: Bounds, node: fx.Node, index: Index) -> Sequence[Interval] | None:
    """Reshapes that only add or drop dims of size 1."""
    before, after = bounds.sizes(node.args[0]), bounds.sizes(node)
    if [n for n in before if n != 1] != [n for n in after if n != 1]:
        return None
    left = iter([i for i, n in zip(index, after) if n != 1])
    return [ZERO if n == 1 else next(left) for n in before]


def _expanded(bounds: Bounds, node: fx.Node, index: Index) -> Sequence[Interval] | None:
    before = bounds.sizes(node.args[0])
    return [ZERO if n == 1 else i for n, i in zip(before, index[len(index) - len(before) :])]


def _sliced(bounds: Bounds, node: fx.Node, index: Index) -> Sequence[Interval] | None:
    args = [0 if a is None else bounds.argument(a) for a in node.args[1:]]
    dim, start, _, step = args + [0, 0, None, 1][len(args) :]
    size = bounds.sizes(node.args[0])[dim]
    if type(start) is not int or type(step) is not int or start and type(size) is not int:
        return None
    start = min(max(start + size if start < 0 else start, 0), size) if type(size) is int else 0
    found = list(index)
    found[dim] = Interval(found[dim].low * step + start, found[dim].high * step + start)
    return found


def _selected(bounds: Bounds, node: fx.Node, index: Index) -> Sequence[Interval] | None:
    dim, at = (bounds.argument(a) for a in node.args[1:3])
    sizes = bounds.sizes(node.args[0])
    size = sizes[dim] if type(dim) is int else 0
    if type(at) is not int or type(size) is not int:
        return None
    dim %= len(sizes)
    at %= max(size, 1)
    return [*index[:dim], Interval.of(at, at), *index[dim:]]


def _padded(bounds: Bounds, node: fx.Node, index: Index) -> Interval | None:
    args: Any = node.args
    source, pads = args[0], [bounds.argument(p) for p in args[1]]
    value = bounds.of(args[2] if len(args) > 2 else 0, ())
    if not all(type(p) is int for p in pads):
        return None
    found, sizes = list(index), bounds.sizes(source)
    inside = perhaps = torch.tensor(True, device="cpu")
    for n in range(len(pads) // 2):
        dim = len(sizes) - 1 - n
        size = sizes[dim]
        if not pads[2 * n] and not pads[2 * n + 1]:
            continue
        if type(size) is not int:
            return None
        at = Interval(found[dim].low - pads[2 * n], found[dim].high - pads[2 * n])
        inside = inside & (at.low >= 0) & (at.high < size)
        perhaps = perhaps & (at.high >= 0) & (at.low < size)
        last = max(size - 1, 0)
        found[dim] = Interval(at.low.clamp(0, last), at.high.clamp(0, last))
    return _truths(inside, perhaps).choose(bounds.of(source, tuple(found)), value)


def _looked_up(bounds: Bounds, node: fx.Node, index: Index) -> Interval | None:
    """A gather whose source is indexed by a tensor in each dim."""
    source: Any = node.args[0]
    places: Any = node.args[1]
    sizes = bounds.sizes(source)
    if len(places) != len(sizes) or not all(isinstance(p, fx.Node) for p in places):
        return None
    found = [bounds.operand(node, p, index) for p in places]
    of_truths = any(p.meta["val"].dtype in (torch.bool, torch.uint8) for p in places)
    if of_truths or any(bool((i.low < 0).any()) for i in found):
        return None
    return bounds.of(source, tuple(ZERO if n == 1 else i for n, i in zip(sizes, found)))


def _triangle(bounds: Bounds, node: fx.Node, index: Index) -> Interval | None:
    diagonal = bounds.argument(node.args[1] if len(node.args) > 1 else node.kwargs.get("diagonal", 0))
    if type(diagonal) is not int or len(index) < 2:
        return None
    low, high = index[-1].low - index[-2].high, index[-1].high - index[-2].low
    if node.target is aten.tril.default:
        kept = _truths(high <= diagonal, low <= diagonal)
    else:
        kept = _truths(low >= diagonal, high >= diagonal)
    return kept.choose(bounds.operand(node, node.args[0], index), ZERO)


def _pairs(name: str) -> list[Any]:
    packet = getattr(aten, name)
    return [getattr(packet, o) for o in packet.overloads() if o in ("Tensor", "Scalar", "default", "Tensor_mode")]


_BINARY: dict[str, Any] = {
    "add": _add, "sub": _sub, "mul": _mul, "div": _div, "floor_divide": _div, "remainder": _remainder,
    "minimum": _least, "maximum": _most, "rsub": _turned(_sub),
    "lt": _less, "gt": _turned(_less), "le": _not_more, "ge": _turned(_not_more), "eq": _equal, "ne": _negated(_equal),
    "bitwise_and": _and, "logical_and": _and, "bitwise_or": _or, "logical_or": _or, "bitwise_xor": _xor,
    "logical_xor": _xor,
}  # fmt: skip
_RULES: dict[Any, Rule] = {
    **{o: _elementwise(f, 2) for name, f in _BINARY.items() for o in _pairs(name)},
    aten.neg.default: _elementwise(lambda node, a: Interval(-a.high, -a.low), 1),
    aten.abs.default: _elementwise(_abs, 1),
    aten.clamp.default: _clamp,
    aten.logical_not.default: _elementwise(_negated(lambda node, a: a.truth()), 1),
    aten.bitwise_not.default: _elementwise(_bitwise_not, 1),
    **{getattr(aten.where, o): _elementwise(_where, 3, 1) for o in ("self", "ScalarOther", "ScalarSelf", "Scalar")},
    **{getattr(aten.masked_fill, o): _filled for o in ("Scalar", "Tensor")},
    **dict.fromkeys(
        [
            aten._to_copy.default, torch.ops.prims.convert_element_type.default, aten.clone.default, aten.alias.default,
            aten.detach.default,
        ],
        _copied,
    ),  # fmt: skip
    **dict.fromkeys([aten.full.default, aten.full_like.default], _number(1)),
    aten.new_full.default: _number(2),
    aten.scalar_tensor.default: _number(0),
    **dict.fromkeys([aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default], _number(0.0)),
    **dict.fromkeys([aten.ones.default, aten.ones_like.default, aten.new_ones.default], _number(1.0)),
    **dict.fromkeys([aten.arange.default, aten.arange.start, aten.arange.start_step], _counted),
    torch.ops.prims.iota.default: _counted,
    **dict.fromkeys([aten.permute.default, aten.transpose.int, aten.t.default], _moved(_permuted)),
    **dict.fromkeys(
        [
            aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.view.default,
            aten._unsafe_view.default,
        ],
        _moved(_reshaped),
    ),  # fmt: skip
    aten.expand.default: _moved(_expanded),
    aten.slice.Tensor: _moved(_sliced),
    aten.select.int: _moved(_selected),
    aten.constant_pad_nd.default: _padded,
    aten.index.Tensor: _looked_up,
    **dict.fromkeys([aten.tril.default, aten.triu.default], _triangle),
}

__all__ = ["MOST_NODES", "ZERO", "Bounds", "Interval"]
