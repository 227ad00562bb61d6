"""Reindexing between two shapes of the same elements, kept local: an index depends only on dims that share elements.

Sizes are matched from the innermost dim outwards. A run of old dims and a run of new dims with the same product form a
group. Inside a group the index goes through one flat number, so a merge becomes `//` and `%`, and a split a sum. The
scheduler simplifies these where loop bounds allow.
"""

from __future__ import annotations

from collections.abc import Sequence

from fuser.errors import Unsupported
from fuser.ir.nodes import Index, TensorBox
from fuser.ir.sizes import ONE, ZERO, Expr, divide_exactly, product
from fuser.lazy_dataclasses import dataclass
from fuser.lowering.context import LoweringContext

Sizes = tuple[Expr, ...]
Group = tuple[tuple[int, ...], tuple[int, ...]]  # old dims and new dims with the same product, outermost first


@dataclass
class _Side:
    """Sizes that are consumed from the right."""

    size: list[Expr]
    at: int

    def skip_ones(self) -> None:
        while self.at >= 0 and self.size[self.at] == ONE:
            self.at -= 1

    def take(self) -> int:
        self.at -= 1
        return self.at + 1


def reshape_box(ctx: LoweringContext, x: TensorBox, shape: Sequence[Expr | int]) -> TensorBox:
    """A view of `x` with the sizes `shape`, one of which may be -1."""
    old = ctx.size_of(x)
    new = infer(ctx, old, [ctx.canon(s) for s in shape])
    if old == new:
        return x
    groups = match(ctx, old, new)
    if groups is None:
        for s in (*old, *new):
            ctx.specialise(s)
        groups = match(ctx, old, new)
    old, new = tuple(map(ctx.canon, old)), tuple(map(ctx.canon, new))
    if groups is None:
        if ctx.hint(product(old)) or ctx.hint(product(new)):
            raise Unsupported(f"sizes {old} and {new} do not hold the same number of elements")
        return x.viewed(new, lambda index: (ZERO,) * len(old))
    return x.viewed(new, lambda index: regroup(index, old, new, groups))


def regroup(index: Index, old: Sizes, new: Sizes, groups: Sequence[Group]) -> Index:
    """The index into `old` of the element at `index` in `new`."""
    out = [ZERO] * len(old)
    for olds, news in groups:
        rest = ZERO
        for d in news:
            rest = rest * new[d] + index[d]
        for d in reversed(olds[1:]):
            out[d] = rest % old[d]
            rest = rest // old[d]
        out[olds[0]] = rest
    return tuple(out)


def match(ctx: LoweringContext, old: Sizes, new: Sizes) -> list[Group] | None:
    """Groups of dims with equal products; required equalities become facts. None if the sizes do not match."""
    left = _Side([ctx.canon(s) for s in old], len(old) - 1)
    right = _Side([ctx.canon(s) for s in new], len(new) - 1)
    groups: list[Group] = []
    while True:
        left.skip_ones()
        right.skip_ones()
        if left.at < 0 or right.at < 0:
            rest = [*left.size[: left.at + 1], *right.size[: right.at + 1]]
            return groups if all(ctx.is_equal(s, ONE) for s in rest) else None
        group = _next_group(ctx, left, right)
        if group is None:
            return None
        groups.append(group)


def _next_group(ctx: LoweringContext, left: _Side, right: _Side) -> Group | None:
    olds, news = [left.take()], [right.take()]
    a, b = left.size[olds[0]], right.size[news[0]]
    while a != b:
        grow = _which_grows(ctx, a, b, left.at >= 0, right.at >= 0)
        if grow == "old" and left.at >= 0:
            olds.insert(0, left.take())
            a = ctx.canon(left.size[olds[0]] * a)
        elif grow == "new" and right.at >= 0:
            news.insert(0, right.take())
            b = ctx.canon(right.size[news[0]] * b)
        elif grow == "equal" and ctx.is_equal(a, b):
            break
        else:
            return None
    return tuple(olds), tuple(news)


def _which_grows(ctx: LoweringContext, a: Expr, b: Expr, more_old: bool, more_new: bool) -> str:
    """Which of two products needs another dim: the one that divides the other, else the smaller in the example."""
    if more_old and divide_exactly(b, a) is not None:
        return "old"
    if more_new and divide_exactly(a, b) is not None:
        return "new"
    x, y = ctx.hint(a), ctx.hint(b)
    if x == y:
        return "equal"
    return "old" if x < y else "new"


# -- the size that is left to be inferred ------------------------------------------------------------------------------
def infer(ctx: LoweringContext, old: Sizes, shape: Sequence[Expr]) -> Sizes:
    """`shape`, with a -1 replaced by the size that remains of `old`."""
    at = next((d for d, s in enumerate(shape) if ctx.hint(s) == -1), None)
    if at is None:
        return tuple(shape)
    ctx.specialise(shape[at])
    left, right = list(shape[:at]), list(shape[at + 1 :])
    ctx.assume("ne", product([*left, *right]), 0)  # else eager cannot infer the size
    rest = list(old)
    while right and rest and ctx.canon(rest[-1]) == right[-1]:
        rest.pop()
        right.pop()
    while left and rest and ctx.canon(rest[0]) == left[0]:
        rest.pop(0)
        left.pop(0)
    size = _quotient(ctx, rest, left, right)
    return (*shape[:at], size, *shape[at + 1 :])


def _quotient(ctx: LoweringContext, rest: list[Expr], left: list[Expr], right: list[Expr]) -> Expr:
    """product(rest) / product(left + right); sizes become constants, next to the divisor first, until it is exact."""
    divisor = [*left, *right]
    steps: list[Expr | None] = [*(reversed(rest) if right else rest), *divisor, None]
    for s in steps:
        exact = divide_exactly(ctx.canon(product(rest)), ctx.canon(product(divisor)))
        if exact is not None:
            return exact
        if s is not None:
            ctx.specialise(s)
    raise Unsupported(f"a size of -1 cannot be inferred from {rest} elements over {divisor}")


__all__ = ["infer", "match", "regroup", "reshape_box"]
