"""Windows of fixed size that slide over the last dims: pools, and copies of every window.

A window's elements are read in sequence in the body of one loop, so only small windows are supported.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fuser.errors import Unsupported
from fuser.ir.loop_body import Value, compute_dtype, ops
from fuser.ir.nodes import Index, TensorBox
from fuser.ir.sizes import ZERO, Expr, floordiv, maximum, minimum, product
from fuser.lazy_dataclasses import dataclass
from fuser.lowering.context import LoweringContext
from fuser.lowering.entries import EVERY, lower, refuse
from fuser.lowering.pointwise import result_dtype
from fuser.lowering.reductions import number_of, reduce
from fuser.lowering.reshape import reshape_box
from fuser.ops.reductions import smallest
from fuser.reasons import because

MOST_PLACES = 27  # largest number of elements in a window
Load = Callable[[Index], Value]


@dataclass(frozen=True)
class Sliding:
    """Windows of `kernel` elements, `dilation` apart, at every `stride`-th index from `-padding`."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    size: tuple[Expr, ...]  # of the dims that windows slide over
    count: tuple[Expr, ...]  # number of windows along each
    inside: tuple[bool, ...]  # whether every window is inside the tensor
    ceil: bool  # the last window may end further behind the tensor than `padding`

    def start(self, d: int, at: Expr) -> Expr:
        """The first index of window `at` along dim `d`, which may be negative."""
        return at * self.stride[d] - self.padding[d]

    def places(self, at: Sequence[Expr]) -> Iterator[tuple[tuple[Expr, ...], Callable[[], Value | None]]]:
        """Each index in the window `at`, and a function for the condition that it is inside; None if it always is."""
        for step in itertools.product(*map(range, self.kernel)):
            where = tuple(self.start(d, a) + s * self.dilation[d] for d, (a, s) in enumerate(zip(at, step)))
            yield where, functools.partial(self.is_inside, where, step)

    def is_inside(self, where: Sequence[Expr], step: Sequence[int]) -> Value | None:
        """The condition that the index at `step` in a window is inside the tensor; None if it is in every window."""
        out: Value | None = None
        for d, (p, s) in enumerate(zip(where, step)):
            for own in self.conditions(d, p, s):
                out = own if out is None else ops.logical_and(out, own)
        return out

    def conditions(self, d: int, p: Expr, step: int) -> Iterator[Value]:
        """The conditions for index `p`, at `step` in a window along dim `d`, to be inside the tensor.

        The first window begins `padding` before the tensor; without `ceil` the last one ends at most as far behind it.
        """
        offset, last = step * self.dilation[d], (self.kernel[d] - 1) * self.dilation[d]
        if self.inside[d]:
            return
        if offset < self.padding[d]:
            yield ops.ge(ops.index_expr(p), 0)
        if self.ceil or last - offset < self.padding[d]:
            yield ops.lt(ops.index_expr(p), ops.index_expr(self.size[d]))


def _each(value: Any, n: int, default: int = 0) -> tuple[int, ...]:
    """One number for each of `n` dims."""
    if isinstance(value, int):
        return (value,) * n
    numbers = tuple(value)
    if not all(isinstance(v, int) for v in numbers):
        raise Unsupported("a window whose size is not known when the graph is registered")
    return numbers * n if len(numbers) == 1 else numbers or (default,) * n


def sliding(
    ctx: LoweringContext, whole: Sequence[Expr], n: int, kernel: Any, stride: Any, padding: Any, dilation: Any = 1,
    ceil: Any = False, by_dims: bool = False, backward: bool = False,
) -> Sliding:  # fmt: skip
    """The windows over the last `n` dims of a tensor of sizes `whole`; their number follows `pooling_output_shape`.

    `by_dims`: each loop reads along one dim, so only a window's edges are limited. `backward`: each element reads the
    windows that contain it, so only their overlap is limited.
    """
    sizes = _each(kernel, n)
    steps = _each(stride, n) if stride or stride == 0 else sizes
    pads, gaps = _each(padding, n), _each(dilation, n, 1)
    shared = overlap(sizes, steps, gaps if backward else (1,) * n)
    if n > ctx.target.window_dims and shared > 1:
        raise Unsupported(f"windows of {n} dims that overlap, which ATen is faster with")
    most = shared if backward else max(sizes) if by_dims else math.prod(sizes)
    if most > MOST_PLACES:
        what = ("an element in", "windows") if backward else ("a window of", "places")
        raise Unsupported(f"{what[0]} more than {MOST_PLACES} {what[1]}")
    size = tuple(whole[-n:])
    count, inside = [], []
    for s in whole[-n - 1 :]:  # only a batch dim may be empty
        ctx.assume("lt", 0, s)
    for s, k, step, p, g in zip(size, sizes, steps, pads, gaps):
        room = s + (2 * p - g * (k - 1) - 1)
        ctx.assume("le", 0, room)
        number = floordiv(room + (step - 1 if ceil else 0), ctx.canon(step)) + 1
        fits = not ceil
        if ceil:
            last = (number - 1) * step
            if ctx.hint(last) >= ctx.hint(s) + p:
                ctx.assume("le", s + p, last)
                number = number - 1
            else:
                ctx.assume("lt", last, s + p)
        count.append(ctx.canon(number))
        inside.append(fits and p == 0)
    return Sliding(sizes, steps, pads, gaps, size, tuple(count), tuple(inside), bool(ceil))


def overlap(kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> int:
    """How many windows each element checks: those that may contain it; with gaps one for each element of a window."""
    return math.prod(-(-k // s) if g == 1 else k for k, s, g in zip(kernel, stride, dilation))


def n_dims(ctx: LoweringContext) -> int:
    """The n of "aten.avg_pool<n>d"."""
    return int(ctx.op[ctx.op.index("pool") + len("pool")])


def _window_loader(ctx: LoweringContext, x: TensorBox, n: int, dtype: torch.dtype) -> tuple[Load, tuple[Expr, ...]]:
    size = ctx.size_of(x)
    return ctx.loader(x, size, dtype), size[:-n]


# -- averages ----------------------------------------------------------------------------------------------------------
@lower("aten.avg_pool1d", "aten.avg_pool2d", "aten.avg_pool3d")
def lower_avg_pool(
    ctx: LoweringContext, x: TensorBox, kernel: Sequence[int], stride: Any = (), padding: Any = 0, ceil: Any = False,
    include_pad: Any = True, divisor: int | None = None,
) -> TensorBox:  # fmt: skip
    """The sum of each window divided by the number of its elements."""
    dtype = result_dtype(ctx)
    if not dtype.is_floating_point:
        raise Unsupported("an average pool of integers")
    n, wide = n_dims(ctx), compute_dtype(dtype)
    w = sliding(ctx, ctx.size_of(x), n, kernel, stride, padding, 1, ceil, by_dims=ctx.target.sums_by_dims)
    if n == 3:  # eager refuses windows larger than the tensor, even if it is padded
        for k, s in zip(w.kernel, w.size):
            ctx.assume("le", k, s)
    if math.prod(w.kernel) > MOST_PLACES:
        for d in reversed(range(1, n)):  # sum along one dim after the other; dim 0 is left
            x = _sums_along(ctx, x, w, d, wide)
        along: tuple[int, ...] = (0,)
    else:
        along = tuple(range(n))
    load, lead = _window_loader(ctx, x, n, wide)

    def inner(index: Index) -> Value:
        at = index[-n:]
        total = _sum(w, load, index, along)
        return ops.div(total, places(ctx, w, at, bool(include_pad), divisor, wide))

    return ctx.pointwise((*lead, *w.count), dtype, inner, ctx.order_of_meta())


def _sums_along(ctx: LoweringContext, x: TensorBox, w: Sliding, d: int, wide: torch.dtype) -> TensorBox:
    """The sums of windows along dim `d` of the dims that they slide over."""
    at = len(ctx.size_of(x)) - len(w.kernel) + d
    load, size = ctx.loader(x, ctx.size_of(x), wide), list(ctx.size_of(x))
    size[at] = w.count[d]
    return ctx.pointwise(tuple(size), wide, lambda index: _sum(w, load, index, (d,)), ctx.order_of_meta())


def _sum(w: Sliding, load: Load, index: Index, along: Sequence[int]) -> Value:
    """The sum over a window along some dims; in the other dims `index` is an element's index."""
    lead = len(index) - len(w.kernel)
    total: Value | None = None
    for step in itertools.product(*(range(w.kernel[d]) for d in along)):
        where, inside = list(index), None
        for d, s in zip(along, step):
            p = where[lead + d] = w.start(d, index[lead + d]) + s * w.dilation[d]
            for own in w.conditions(d, p, s):
                inside = own if inside is None else ops.logical_and(inside, own)
        value = read(load, tuple(where), inside, 0)
        total = value if total is None else ops.add(total, value)
    assert total is not None
    return total


def read(load: Load, index: Index, inside: Value | None, other: float | int | bool) -> Value:
    """The element at an index; `other` outside of the tensor."""
    return load(index) if inside is None else ops.masked(inside, lambda: load(index), other)


def same_places(w: Sliding, include_pad: bool, divisor: int | None) -> int | None:
    """The divisor of all windows' sums; None if they have different ones."""
    if divisor is None and not all(_is_whole(w, d, include_pad) for d in range(len(w.kernel))):
        return None
    return math.prod(w.kernel) if divisor is None else divisor


def _is_whole(w: Sliding, d: int, include_pad: bool) -> bool:
    """Whether all elements of each window count along dim `d`; without `ceil` no window ends behind the padding."""
    return w.inside[d] or include_pad and not w.ceil


def places(
    ctx: LoweringContext, w: Sliding, at: Sequence[Expr], include_pad: bool, divisor: int | None, wide: torch.dtype
) -> Value:
    """The divisor of a window's sum."""
    same = same_places(w, include_pad, divisor)
    if same is not None:
        return ops.constant(same, wide)
    known, found = 1, None
    for d, k in enumerate(w.kernel):
        if _is_whole(w, d, include_pad):
            known *= k
            continue
        start = w.start(d, at[d])
        if include_pad:
            number = minimum(start + k, w.size[d] + w.padding[d]) - start
        else:
            number = minimum(start + k, w.size[d]) - maximum(start, 0)
        value = ops.index_expr(number, wide)
        found = value if found is None else ops.mul(found, value)
    return ops.constant(known, wide) if found is None else ops.mul(found, known)


@lower("aten._adaptive_avg_pool2d", "aten.adaptive_avg_pool2d", "aten._adaptive_avg_pool3d", "aten.adaptive_avg_pool1d",
       "aten.adaptive_avg_pool3d")  # fmt: skip
def lower_adaptive_avg_pool(ctx: LoweringContext, x: TensorBox, out: Sequence[int]) -> TensorBox:
    """Means of parts of the last dims. Parts differ by one element where a size is not divisible."""
    n, size = len(out), ctx.size_of(x)
    out = [ctx.specialise(o) for o in out]
    if any(ctx.hint(s) % o for s, o in zip(size[-n:], out) if o):
        return _uneven_means(ctx, x, [ctx.specialise(s) for s in size[-n:]], out)
    parts: list[Expr] = list(size[:-n])
    for s, o in zip(size[-n:], out):
        if o == 1:
            parts += [ctx.canon(1), s]
            continue
        own = ctx.specialise(s)
        if o == 0:
            raise Unsupported("an adaptive pool into nothing")
        parts += [ctx.canon(o), ctx.canon(own // o)]
    split = reshape_box(ctx, x, parts)
    lead, dtype = len(size) - n, result_dtype(ctx)
    dims, wide = [lead + 2 * k + 1 for k in range(n)], compute_dtype(dtype)
    for d in dims:
        ctx.assume("lt", ZERO, ctx.size_of(split)[d])
    total = reduce(ctx, "sum", split, dims, wide)
    count = product(ctx.size_of(split)[d] for d in dims)
    load, shape = ctx.loader(total, ctx.size_of(total), wide), ctx.size_of(total)
    return ctx.pointwise(shape, dtype, lambda i: ops.div(load(i), number_of(ctx, count, wide)), ctx.order_of_meta())


# -- extremes ----------------------------------------------------------------------------------------------------------
def _uneven_means(ctx: LoweringContext, x: TensorBox, owns: Sequence[int], out: Sequence[int]) -> TensorBox:
    """Means of windows from floor(i * own / out) to ceil((i + 1) * own / out)."""
    n, dtype = len(out), result_dtype(ctx)
    wide = compute_dtype(dtype)
    lengths = [[-(-(i + 1) * own // o) - i * own // o for i in range(o)] for own, o in zip(owns, out)]
    if not all(lengths) or math.prod(map(max, lengths)) > MOST_PLACES:
        raise Unsupported(f"an adaptive pool of {tuple(owns)} places into {tuple(out)}: large windows that differ")
    load, lead = _window_loader(ctx, x, n, wide)

    def inner(index: Index) -> Value:
        first, at = index[:-n], index[-n:]
        starts = [floordiv(a * own, ctx.canon(o)) for a, own, o in zip(at, owns, out)]
        ends = [floordiv((a + 1) * own + (o - 1), ctx.canon(o)) for a, own, o in zip(at, owns, out)]
        total: Value | None = None
        for step in itertools.product(*(range(max(length)) for length in lengths)):
            where = [s + k for s, k in zip(starts, step)]
            inside: Value | None = None
            for p, end, k, length in zip(where, ends, step, lengths):
                if k >= min(length):
                    own = ops.lt(ops.index_expr(p), ops.index_expr(end))
                    inside = own if inside is None else ops.logical_and(inside, own)
            value = read(load, (*first, *where), inside, 0)
            total = value if total is None else ops.add(total, value)
        assert total is not None
        for start, end in zip(starts, ends):
            total = ops.div(total, ops.index_expr(end - start, wide))
        return total

    return ctx.pointwise((*lead, *map(ctx.canon, out)), dtype, inner, ctx.order_of_meta())


def _pooled(
    ctx: LoweringContext, x: TensorBox, w: Sliding, order: tuple[int, ...] | None,
    place_dtype: torch.dtype | None = None,
) -> TensorBox:  # fmt: skip
    """The largest element of each window, where NaN is the largest; or, with `place_dtype`, the number of its index.

    An int64 numbers the elements of the dims that windows slide over, an int8 those of the window.
    """
    n = len(w.kernel)
    load, lead = _window_loader(ctx, x, n, x.dtype)
    least = smallest(x.dtype)

    def inner(index: Index) -> Value:
        first, at = index[:-n], index[-n:]
        best = ops.constant(least, x.dtype)
        steps = [_first_inside(w, d, a) for d, a in enumerate(at)]
        place = _place(w, at, steps, place_dtype)
        for step, (where, inside) in zip(itertools.product(*map(range, w.kernel)), w.places(at)):
            value = read(load, (*first, *where), inside(), least)
            if place_dtype is not None:
                better = ops.gt(value, best)
                if x.dtype.is_floating_point:
                    better = ops.logical_or(better, ops.isnan(value))
                place = ops.where(better, _place(w, at, [ctx.canon(s) for s in step], place_dtype), place)
            best = ops.maximum(best, value)
        return best if place_dtype is None else place

    return ctx.pointwise((*lead, *w.count), place_dtype or x.dtype, inner, order)


def _place(w: Sliding, at: Sequence[Expr], steps: Sequence[Expr], dtype: torch.dtype | None) -> Value:
    """The number of the element that is `steps` from the first one of window `at`."""
    if dtype is torch.int8:
        return number_in_int8(offset_number(w, steps))
    where = [w.start(d, a) + s * w.dilation[d] for d, (a, s) in enumerate(zip(at, steps))]
    return ops.index_expr(window_number(w, where))


def _first_inside(w: Sliding, d: int, at: Expr) -> Expr:
    """The step of a window's first element that is inside the tensor."""
    start, gap = w.start(d, at), w.dilation[d]
    return ZERO if w.padding[d] == 0 else floordiv(maximum(-start, 0) + (gap - 1), maximum(gap, gap))


def window_number(w: Sliding, where: Sequence[Expr]) -> Expr:
    """The number of a point of a window, in row-major order."""
    out = ZERO
    for size, p in zip(w.size, where):
        out = out * size + p
    return out


def number_in_int8(number: Expr) -> Value:
    """An offset in a window as a value of a kernel."""
    known = number.as_int()
    return ops.index_expr(number, torch.int8) if known is None else ops.constant(known, torch.int8)


def offset_number(w: Sliding, steps: Sequence[Expr]) -> Expr:
    """The number of an element within its window."""
    out = ZERO
    for size, s in zip(w.kernel, steps):
        out = out * size + s
    return out


@lower("aten.max_pool1d", "aten.max_pool2d", "aten.max_pool3d")
def lower_max_pool(
    ctx: LoweringContext, x: TensorBox, kernel: Sequence[int], stride: Any = (), padding: Any = 0, dilation: Any = 1,
    ceil: Any = False,
) -> TensorBox:  # fmt: skip
    """The largest element of each window."""
    w = sliding(ctx, ctx.size_of(x), n_dims(ctx), kernel, stride, padding, dilation, ceil)
    return _pooled(ctx, x, w, ctx.order_of_meta())


@lower("aten.max_pool2d_with_indices", "aten.max_pool3d_with_indices", decisive=EVERY)
def lower_max_pool_with_indices(
    ctx: LoweringContext, x: TensorBox, kernel: Sequence[int], stride: Any = (), padding: Any = 0, dilation: Any = 1,
    ceil: Any = False,
) -> tuple[TensorBox, TensorBox]:  # fmt: skip
    """The largest element of each window, and its number among the elements of the pooled dims."""
    w = sliding(ctx, ctx.size_of(x), n_dims(ctx), kernel, stride, padding, dilation, ceil)
    return _with_places(ctx, x, w, torch.int64)


@lower("fuser.max_pool_offsets", decisive=EVERY)
def lower_max_pool_offsets(
    ctx: LoweringContext, x: TensorBox, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], ceil: bool,
) -> tuple[TensorBox, TensorBox]:  # fmt: skip
    """The largest element of each window, and its number within the window."""
    w = sliding(ctx, ctx.size_of(x), len(kernel), kernel, stride, padding, dilation, ceil)
    return _with_places(ctx, x, w, torch.int8)


def _with_places(ctx: LoweringContext, x: TensorBox, w: Sliding, dtype: torch.dtype) -> tuple[TensorBox, TensorBox]:
    return _pooled(ctx, x, w, ctx.order_of_meta(0)), _pooled(ctx, x, w, ctx.order_of_meta(1), dtype)


# -- copies of windows -------------------------------------------------------------------------------------------------
@lower("aten.im2col")
def lower_im2col(
    ctx: LoweringContext, x: TensorBox, kernel: Sequence[int], dilation: Any, padding: Any, stride: Any
) -> TensorBox:
    """The elements of every window as a column."""
    w = sliding(ctx, ctx.size_of(x), 2, kernel, stride, padding, dilation)
    load, lead = _window_loader(ctx, x, 2, x.dtype)
    *batch, channels = lead
    size = (*lead, *(ctx.canon(k) for k in w.kernel), *w.count)

    def inner(index: Index) -> Value:
        *first, i, j, a, b = index
        where = [w.start(d, at) + s * w.dilation[d] for d, (at, s) in enumerate(((a, i), (b, j)))]
        inside: Value | None = None
        for d, p in enumerate(where):
            if not w.inside[d]:
                here = ops.index_expr(p)
                own = ops.logical_and(ops.ge(here, 0), ops.lt(here, ops.index_expr(w.size[d])))
                inside = own if inside is None else ops.logical_and(inside, own)
        return read(load, (*first, *where), inside, 0)

    columns = ctx.pointwise(size, x.dtype, inner)
    return reshape_box(ctx, columns, [*batch, channels * product(w.kernel), product(w.count)])


refuse(
    because("left_to_aten", "a pool whose windows differ in size: left to ATen"),
    "aten.adaptive_max_pool1d", "aten.adaptive_max_pool2d", "aten.adaptive_max_pool3d",
    "aten.fractional_max_pool2d", "aten.fractional_max_pool3d",
)  # fmt: skip
refuse(
    because("left_to_aten", "each element sums over a variable number of windows: left to ATen"),
    "aten._adaptive_avg_pool2d_backward", "aten._adaptive_avg_pool3d_backward", "aten.max_unpool2d",
    "aten.max_unpool3d",
)  # fmt: skip

__all__ = [
    "MOST_PLACES", "Sliding", "n_dims", "number_in_int8", "offset_number", "overlap", "places", "sliding",
    "window_number",
]  # fmt: skip
