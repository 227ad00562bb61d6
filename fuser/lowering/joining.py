"""Tensors joined from pieces along a dim: joins, pads, rolls; also repeats, flips and rotations.

If a node of the graph reads the result, the pieces are selected element by element and nothing is stored. Otherwise
each piece is a loop of its own that fills its part of the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fuser.errors import Unsupported
from fuser.ir.loop_body import Value, ops
from fuser.ir.nodes import Index, TensorBox
from fuser.ir.sizes import ONE, ZERO, Expr, expr, floordiv, maximum, minimum, mod, product
from fuser.lazy_dataclasses import dataclass
from fuser.lowering.context import LoweringContext, Operand, as_expr
from fuser.lowering.entries import lower, refuse
from fuser.lowering.pointwise import cast_loader, result_dtype
from fuser.lowering.reshape import reshape_box
from fuser.lowering.shapes import copies_overlap
from fuser.lowering.views import (
    Int,
    Ints,
    diagonal_size,
    place_in,
    slice_range,
    transpose_box,
    unsqueeze_box,
    with_dim,
    wrap_dim,
)
from fuser.reasons import because

Load = Callable[[Index], Value]
MOST_CHOICES = 4  # pieces among which a reader may select
MOST_SIZES = 64  # different sizes of pieces: each has a kernel of its own, which takes 0.1 s to compile


@dataclass(frozen=True)
class Piece:
    """`size` elements along one dim. `load` gives the element at an index counted within the piece."""

    size: Expr
    load: Load


def at_dim(load: Load, dim: int, place: Callable[[Expr], Expr]) -> Load:
    """`load` with place(i) instead of index i along `dim`."""
    return lambda index: load((*index[:dim], place(index[dim]), *index[dim + 1 :]))


def chosen(pieces: Sequence[Piece], dim: int) -> Load:
    """A loader of the pieces in sequence: an element is read only from its own piece."""
    ends = [ZERO]
    for p in pieces:
        ends.append(ends[-1] + p.size)

    def load(index: Index) -> Value:
        place = ops.index_expr(index[dim])

        def part(k: int) -> Value:
            return at_dim(pieces[k].load, dim, lambda i: i - ends[k])(index)

        def from_piece(k: int) -> Value:
            if k == len(pieces) - 1:
                return part(k)
            before = ops.lt(place, ops.index_expr(ends[k + 1]))
            later = ops.guarded(ops.logical_not(before), lambda: from_piece(k + 1))
            return ops.masked(before, lambda: part(k), later)

        return from_piece(0)

    return load


def joined(
    ctx: LoweringContext, pieces: Sequence[Piece], dim: int, rest: Sequence[Expr], dtype: torch.dtype
) -> TensorBox:  # fmt: skip
    """The pieces in sequence along `dim` of a tensor with the sizes `rest` in the other dims."""
    pieces = [p for p in pieces if ctx.canon(p.size) != ZERO] or list(pieces[:1])
    together = _are_components(ctx, pieces, dim == len(rest) - 1 > 0)
    sizes = [(*rest[:dim], ctx.canon(p.size), *rest[dim + 1 :]) for p in pieces]
    total = ctx.canon(sum((p.size for p in pieces), ZERO))
    size = (*rest[:dim], total, *rest[dim + 1 :])
    # Selecting among pieces at each point takes longer than a scan that reads from memory.
    apart = ctx.is_scanned and ctx.target.scans_alone
    if ctx.is_normed and ctx.target.joins_stored:
        apart |= math.prod(map(ctx.hint, size)) >= ctx.target.joins_stored
    if len(pieces) == 1 or together or (ctx.n_readers and len(pieces) <= MOST_CHOICES and not apart):
        return ctx.pointwise(size, dtype, chosen(pieces, dim), ctx.order_of_meta())
    if len({own[dim] for own in sizes}) > MOST_SIZES:
        raise Unsupported(f"more than {MOST_SIZES} tensors of different sizes to be joined")
    out = ctx.empty(size, dtype, ctx.order_of_meta())
    start = ZERO
    for p, own in zip(pieces, sizes):
        ctx.into_slice(out, own, p.load, _shifted(dim, start))
        start = ctx.canon(start + p.size)
    return out


def _are_components(ctx: LoweringContext, pieces: Sequence[Piece], last: bool) -> bool:
    """Whether one iteration can compute all elements of the pieces together; if so, their sizes become constants.

    Pieces of one element each (`stack`) are excluded: each is stored by a loop of its own.
    """
    found = [ctx.hint(p.size) for p in pieces]
    if not last or sum(found) > ctx.target.components or max(found) < 2 or len(pieces) < 2:
        return False
    for p in pieces:
        ctx.specialise(p.size)
    return True


def _shifted(dim: int, start: Expr) -> Callable[[Index], Index]:
    return lambda index: (*index[:dim], index[dim] + start, *index[dim + 1 :])


# -- joins -------------------------------------------------------------------------------------------------------------
@lower("aten.cat", "aten.concat", "aten.concatenate")
def lower_cat(ctx: LoweringContext, tensors: Sequence[TensorBox], dim: int = 0) -> TensorBox:
    """The tensors in sequence along `dim`. Empty 1-d tensors are left out, as in eager."""
    dtype = result_dtype(ctx)
    parts = [t for t in tensors if not _is_nothing(ctx, t)] or list(tensors[:1])
    d = wrap_dim(dim, len(parts[0].size))
    rest = list(ctx.size_of(parts[0]))
    for t in parts[1:]:
        if len(t.size) != len(rest):
            raise Unsupported(f"tensors of {len(rest)} and of {len(t.size)} dims to be joined")
        for k, size in enumerate(ctx.size_of(t)):
            if k != d and not ctx.is_equal(rest[k], size):
                raise Unsupported(f"sizes {rest[k]} and {size} of tensors to be joined along another dim")
    rest = [ctx.canon(s) for s in rest]
    pieces = []
    for t in parts:
        own = ctx.size_of(t)
        pieces.append(Piece(own[d], cast_loader(ctx, t, own, dtype)))
    _keep_order(ctx, [s for t in parts for s in ctx.size_of(t)[1:]])
    return joined(ctx, pieces, d, rest, dtype)


def _keep_order(ctx: LoweringContext, sizes: Sequence[Expr]) -> None:
    """Exclude tensors with 0 or 1 elements in a dim of `sizes`: eager's result for them may be row-major."""
    if ctx.order_of_meta() is not None:
        for size in sizes:
            ctx.assume("le", min(ctx.hint(size), 2), size)


def _is_nothing(ctx: LoweringContext, t: TensorBox) -> bool:
    """Whether a tensor is 1-d and empty; the answer becomes a fact or guard."""
    size = ctx.size_of(t)
    if len(size) != 1:
        return False
    if ctx.hint(size[0]) == 0:
        return ctx.is_equal(size[0], ZERO)
    ctx.assume("lt", 0, size[0])
    return False


@lower("aten.stack")
def lower_stack(ctx: LoweringContext, tensors: Sequence[TensorBox], dim: int = 0) -> TensorBox:
    """The tensors in sequence along a new dim."""
    d = wrap_dim(dim, len(tensors[0].size) + 1)
    return lower_cat(ctx, [unsqueeze_box(ctx, t, d) for t in tensors], d)


def _at_least(ctx: LoweringContext, t: TensorBox, rank: int) -> TensorBox:
    if rank == 3 and len(t.size) in (1, 2):
        t = unsqueeze_box(ctx, t, len(t.size))
    while len(t.size) < rank:
        t = unsqueeze_box(ctx, t, 0)
    return t


@lower("aten.hstack", "aten.vstack", "aten.dstack", "aten.row_stack")
def lower_stacks(ctx: LoweringContext, tensors: Sequence[TensorBox]) -> TensorBox:
    """Joins along dim 1 (0 for 1-d tensors), 0 or 2, after the tensors are given enough dims."""
    rank = {"aten.hstack": 1, "aten.dstack": 3}.get(ctx.op, 2)
    parts = [_at_least(ctx, t, rank) for t in tensors]
    dim = {"aten.hstack": int(len(parts[0].size) > 1), "aten.dstack": 2}.get(ctx.op, 0)
    return lower_cat(ctx, parts, dim)


@lower("aten.column_stack")
def lower_column_stack(ctx: LoweringContext, tensors: Sequence[TensorBox]) -> TensorBox:
    """Tensors of at most one dim become columns, and are joined with the others along dim 1."""
    columns = [reshape_box(ctx, t, [ctx.numel(t), ONE]) if len(t.size) <= 1 else t for t in tensors]
    return lower_cat(ctx, columns, 1)


@lower("aten.block_diag")
def lower_block_diag(ctx: LoweringContext, tensors: Sequence[TensorBox]) -> TensorBox:
    """The tensors, as matrices, along the diagonal, zeros elsewhere."""
    dtype = result_dtype(ctx)
    blocks = [reshape_box(ctx, t, [ONE, ctx.numel(t)]) if len(t.size) < 2 else t for t in tensors]
    sizes = [ctx.size_of(b) for b in blocks]
    width = ctx.canon(sum((s[1] for s in sizes), ZERO))
    pieces, left = [], ZERO
    for block, (rows, columns) in zip(blocks, sizes):
        load = cast_loader(ctx, block, (rows, columns), dtype)
        pieces.append(Piece(rows, _padded(load, [(1, left, columns)], ops_zero(dtype))))
        left = ctx.canon(left + columns)
    return joined(ctx, pieces, 0, [ONE, width], dtype)


def ops_zero(dtype: torch.dtype) -> Callable[[], Value]:
    """A function that records a zero of `dtype`."""
    return lambda: ops.constant(0, dtype)


# -- pads --------------------------------------------------------------------------------------------------------------
def _padded(load: Load, dims: Sequence[tuple[int, Expr, Expr]], fill: Callable[[], Value]) -> Load:
    """`load` shifted by `before` along each (dim, before, size); `fill` outside of `size`."""

    def padded(index: Index) -> Value:
        inside: Value | None = None
        at = list(index)
        for dim, before, size in dims:
            at[dim] = index[dim] - before
            place = ops.index_expr(at[dim])
            own = ops.logical_and(ops.ge(place, 0), ops.lt(place, ops.index_expr(size)))
            inside = own if inside is None else ops.logical_and(inside, own)
        if inside is None:
            return load(index)
        return ops.masked(inside, lambda: load(tuple(at)), fill())

    return padded


def _pad_pairs(ctx: LoweringContext, pad: Ints, rank: int) -> list[tuple[int, Expr, Expr]]:
    """(dim, before, after) for each dim in a list of pads, which starts with the last dim."""
    return [
        (rank - 1 - k, ctx.canon(as_expr(pad[2 * k])), ctx.canon(as_expr(pad[2 * k + 1]))) for k in range(len(pad) // 2)
    ]


@lower("aten.constant_pad_nd")
def lower_constant_pad(ctx: LoweringContext, x: TensorBox, pad: Ints, value: Operand = 0) -> TensorBox:
    """`value` around the tensor; a negative pad removes elements."""
    dtype = result_dtype(ctx)
    own = list(ctx.size_of(x))
    out, dims = list(own), []
    for d, before, after in _pad_pairs(ctx, pad, len(own)):
        out[d] = ctx.canon(own[d] + before + after)
        for least in (own[d] + before, own[d] + after, out[d]):  # eager narrows first on one side, then on the other
            ctx.assume("le", 0, least)
        if before != ZERO or after != ZERO:
            dims.append((d, before, own[d]))
    fill = cast_loader(ctx, value, (), dtype)
    load = _padded(ctx.loader(x, own, dtype), dims, lambda: fill(()))
    _keep_order(ctx, own)
    return ctx.pointwise(out, dtype, load, ctx.order_of_meta())


def _gone(ctx: LoweringContext, mode: str, size: Expr, before: Expr, after: Expr) -> tuple[Expr, Expr]:
    """The number of elements that negative pads remove at both ends; adds guards for signs and the mode's limits."""
    gone = [ZERO, ZERO]
    for side, pad in enumerate((before, after)):
        if ctx.hint(pad) < 0:
            if mode == "circular":
                raise Unsupported("a negative pad in the mode circular")
            ctx.assume("lt", pad, 0)
            gone[side] = -pad
            continue
        ctx.assume("le", 0, pad)
        if mode != "replicate":
            ctx.assume("lt" if mode == "reflect" else "le", pad, size)
    ctx.assume("lt", gone[0] + gone[1], size)
    return gone[0], gone[1]


def _edges(ctx: LoweringContext, mode: str, load: Load, dim: int, size: Expr, before: Expr, after: Expr) -> list[Piece]:
    """The pieces of a padded dim: the tensor between its continuations, or without ends for negative pads."""
    gone = _gone(ctx, mode, size, before, after)
    whole = Piece(ctx.canon(size - gone[0] - gone[1]), at_dim(load, dim, gone[0].__add__))
    places: dict[str, tuple[Callable[[Expr], Expr], Callable[[Expr], Expr]]] = {
        "reflect": (lambda i: before - i, lambda i: size - 2 - i),
        "replicate": (lambda i: ZERO, lambda i: size - 1),
        "circular": (lambda i: size - before + i, lambda i: i),
    }
    first, last = places[mode]
    return [
        *([Piece(before, at_dim(load, dim, first))] if gone[0] == ZERO else []),
        whole,
        *([Piece(after, at_dim(load, dim, last))] if gone[1] == ZERO else []),
    ]


def _continued(mode: str, before: Expr, size: Expr) -> Callable[[Expr], Expr]:
    """A function from an index of the padded dim to the index in the dim of `size`."""

    def place(index: Expr) -> Expr:
        at = index - before
        if mode == "replicate":
            return minimum(maximum(at, 0), size - 1)
        if mode == "reflect":
            behind = size - 1 - maximum(at, -at)
            return size - 1 - maximum(behind, -behind)
        return mod(at + size, size)

    return place


def _pad_edges(ctx: LoweringContext, x: TensorBox, pad: Ints, mode: str) -> TensorBox:
    """Pad by pieces along the innermost dim in memory, so that loops stay contiguous; else by index arithmetic."""
    dtype = x.dtype
    out = list(ctx.size_of(x))
    for s in out[-len(pad) // 2 - 1 :]:  # only a batch dim may be empty
        ctx.assume("lt", 0, s)
    load: Load = ctx.loader(x, out, dtype)
    order = ctx.order_of_meta()
    innermost = len(out) - 1 if order is None else order[-1]
    pieces: list[Piece] = []
    pairs = [p for p in _pad_pairs(ctx, pad, len(out)) if p[1] != ZERO or p[2] != ZERO]
    for d, before, after in sorted(pairs, key=lambda p: p[0] == innermost):
        short = mode == "replicate" and min(ctx.hint(before), ctx.hint(after)) < 0
        if d == innermost and not short:
            pieces = [p for p in _edges(ctx, mode, load, d, out[d], before, after) if p.size != ZERO]
            continue
        if short:
            ctx.assume("lt", 0, out[d])
        else:
            _gone(ctx, mode, out[d], before, after)
        load = at_dim(load, d, _continued(mode, before, out[d]))
        out[d] = ctx.canon(out[d] + before + after)
    if pieces:
        return joined(ctx, pieces, innermost, out, dtype)
    return ctx.pointwise(out, dtype, load, order)


@lower("aten.reflection_pad1d", "aten.reflection_pad2d", "aten.reflection_pad3d")
def lower_reflection_pad(ctx: LoweringContext, x: TensorBox, pad: Ints) -> TensorBox:
    """The tensor mirrored at its edges, which are not repeated."""
    return _pad_edges(ctx, x, pad, "reflect")


@lower("aten.replication_pad1d", "aten.replication_pad2d", "aten.replication_pad3d")
def lower_replication_pad(ctx: LoweringContext, x: TensorBox, pad: Ints) -> TensorBox:
    """The elements at the edges, repeated."""
    return _pad_edges(ctx, x, pad, "replicate")


@lower("aten._pad_circular")
def lower_circular_pad(ctx: LoweringContext, x: TensorBox, pad: Ints) -> TensorBox:
    """The tensor continued periodically."""
    return _pad_edges(ctx, x, pad, "circular")


@lower("aten.pad", "aten._pad_enum")
def lower_pad(
    ctx: LoweringContext, x: TensorBox, pad: Ints, mode: Any = "constant", value: Operand | None = None
) -> TensorBox:  # fmt: skip
    """A pad in one of four modes."""
    mode = ("constant", "reflect", "replicate", "circular")[mode] if isinstance(mode, int) else mode
    if mode == "constant":
        return lower_constant_pad(ctx, x, pad, 0 if value is None else value)
    return _pad_edges(ctx, x, pad, mode)


# -- permuted and repeated elements ------------------------------------------------------------------------------------
@lower("aten.flip", "aten.fliplr", "aten.flipud")
def lower_flip(ctx: LoweringContext, x: TensorBox, dims: Sequence[int] | None = None) -> TensorBox:
    """The tensor reversed along `dims`."""
    size = ctx.size_of(x)
    for d in dims if dims is not None else {"aten.fliplr": (1,), "aten.flipud": (0,)}[ctx.op]:
        if size:
            x = _turned(ctx, x, wrap_dim(d, len(size)))
    return x


def _turned(ctx: LoweringContext, x: TensorBox, dim: int) -> TensorBox:
    n = ctx.size_of(x)[dim]
    return with_dim(ctx, x, dim, n, lambda i: n - 1 - i)


@lower("aten.rot90")
def lower_rot90(ctx: LoweringContext, x: TensorBox, k: int = 1, dims: Sequence[int] = (0, 1)) -> TensorBox:
    """Rotated by `k` quarter turns in the plane of two dims."""
    a, b = (wrap_dim(d, len(x.size)) for d in dims)
    k = ctx.specialise(k) % 4
    if k == 2:
        return _turned(ctx, _turned(ctx, x, a), b)
    if k == 1:
        return transpose_box(ctx, _turned(ctx, x, b), a, b)
    return _turned(ctx, transpose_box(ctx, x, a, b), b) if k == 3 else x


@lower("aten.roll")
def lower_roll(ctx: LoweringContext, x: TensorBox, shifts: Ints, dims: Sequence[int] = ()) -> TensorBox:
    """Rotated by `shifts` along `dims`, or over all elements in order if there are none."""
    own = ctx.size_of(x)
    if not dims:
        flat = reshape_box(ctx, x, [product(own)])
        return reshape_box(ctx, _roll(ctx, flat, shifts, [0]), own)
    return _roll(ctx, x, shifts, [wrap_dim(d, len(own)) for d in dims]) if own else x


def _roll(ctx: LoweringContext, x: TensorBox, shifts: Ints, dims: Sequence[int]) -> TensorBox:
    """Roll along the innermost dim in memory by pieces, and along other dims by index arithmetic, as pads do."""
    size = ctx.size_of(x)
    load: Load = ctx.loader(x, size, x.dtype)
    order = ctx.order_of_meta()
    innermost = len(size) - 1 if order is None else order[-1]
    pieces: list[Piece] = []
    for shift, d in sorted(zip(shifts, dims), key=lambda given: given[1] == innermost):
        start = _first_after_roll(ctx, ctx.canon(as_expr(shift)), size[d])
        if d != innermost:
            load = at_dim(load, d, _turned_by(start, size[d]))
            continue
        if pieces:  # the dim occurs a second time
            load = chosen(pieces, d)
        pieces = [Piece(size[d] - start, at_dim(load, d, start.__add__)), Piece(start, load)]
        pieces = [p for p in (Piece(ctx.canon(p.size), p.load) for p in pieces) if p.size != ZERO] or pieces[:1]
    if pieces:
        return joined(ctx, pieces, innermost, size, x.dtype)
    return ctx.pointwise(size, x.dtype, load, order)


def _turned_by(start: Expr, size: Expr) -> Callable[[Expr], Expr]:
    """(i + start) modulo `size`, without a division."""

    def place(i: Expr) -> Expr:
        at = i + start
        return at - size * minimum(maximum(at - size + 1, 0), 1)

    return place


def _first_after_roll(ctx: LoweringContext, shift: Expr, size: Expr) -> Expr:
    """The source index of the first element: -shift modulo size. A guard fixes which of the usual cases applies."""
    s, n = ctx.hint(shift), ctx.hint(size)
    if 0 < s <= n:
        ctx.assume("lt", 0, shift)
        ctx.assume("le", shift, size)
        return size - shift
    if -n < s <= 0:
        ctx.assume("le", shift, 0)
        ctx.assume("lt", -shift, size)
        return -shift
    return mod(-shift, size)


@lower("aten.repeat", "aten.tile")
def lower_repeat(ctx: LoweringContext, x: TensorBox, repeats: Ints) -> TensorBox:
    """The tensor repeated repeats[d] times along dim d."""
    size = ctx.size_of(x)
    times = [ctx.canon(as_expr(r)) for r in repeats]
    times = [ONE] * (len(size) - len(times)) + times
    lead = len(times) - len(size)
    full = (*(ONE,) * lead, *size)
    for r in times:
        ctx.assume("le", 0, r)
    alone = [r != ONE and _is_single(ctx, n) for r, n in zip(times[lead:], size)]

    def reindex(index: Index) -> Index:
        own = zip(index[lead:], times[lead:], size, alone)
        return tuple(ZERO if one else i if r == ONE else i % n for i, r, n, one in own)

    return x.viewed(tuple(ctx.canon(n * r) for n, r in zip(full, times)), reindex)


def _is_single(ctx: LoweringContext, size: Expr) -> bool:
    """Whether a dim has one element in every call of the kernel: a loop over it in each turn would take most time."""
    if ctx.is_equal(size, ONE):
        return True
    ctx.assume("ne", size, ONE)
    return False


@lower("aten.repeat_interleave")
def lower_repeat_interleave(
    ctx: LoweringContext, x: TensorBox, repeats: Any, dim: int | None = None, output_size: Any = None
) -> TensorBox:  # fmt: skip
    """Each element along `dim` (of the flattened tensor, if None) `repeats` times."""
    if isinstance(repeats, TensorBox) or not isinstance(repeats, (int, Expr)):
        raise Unsupported("repeat_interleave with its repeats in a tensor")
    times = ctx.canon(repeats)
    ctx.assume("lt", 0, times)
    if dim is None:
        x, dim = reshape_box(ctx, x, [ctx.numel(x)]), 0
    d = wrap_dim(dim, len(x.size))
    return with_dim(ctx, x, d, ctx.canon(ctx.size_of(x)[d] * times), lambda i: floordiv(i, times))


@lower("aten.pixel_shuffle", "aten.pixel_unshuffle")
def lower_pixel_shuffle(ctx: LoweringContext, x: TensorBox, factor: int) -> TensorBox:
    """Channels rearranged to squares of pixels of side `factor`, or back."""
    *lead, c, h, w = ctx.size_of(x)
    n, f = len(lead), expr(factor)
    if ctx.op == "aten.pixel_shuffle":
        parts = reshape_box(ctx, x, [*lead, c // (f * f), f, f, h, w])
        order, out = (0, 3, 1, 4, 2), (c // (f * f), h * f, w * f)
    else:
        parts = reshape_box(ctx, x, [*lead, c, h // f, f, w // f, f])
        order, out = (0, 2, 4, 1, 3), (c * f * f, h // f, w // f)
    size = ctx.size_of(parts)
    moved = [*range(n), *(n + o for o in order)]
    place = [moved.index(k) for k in range(len(size))]
    turned = parts.viewed(tuple(size[k] for k in moved), lambda index: tuple(index[p] for p in place))
    return reshape_box(ctx, turned, [*lead, *out])


@lower("aten.channel_shuffle", "aten.native_channel_shuffle")
def lower_channel_shuffle(ctx: LoweringContext, x: TensorBox, groups: int) -> TensorBox:
    """Channel i of group g becomes channel g of group i."""
    n, c, *rest = ctx.size_of(x)
    parts = reshape_box(ctx, x, [n, expr(groups), c // expr(groups), *rest])
    return reshape_box(ctx, transpose_box(ctx, parts, 1, 2), [n, c, *rest])


# -- a part of a tensor replaced ---------------------------------------------------------------------------------------
def _has_places(ctx: LoweringContext) -> None:
    """Unsupported if elements share memory: they do so in eager's copy, too, where a write shows in all of them."""
    if copies_overlap(ctx.arg_metas[0]):
        raise Unsupported(because("not_traced", "it replaces a part of a tensor whose elements overlap in memory"))


@lower("aten.slice_scatter")
def lower_slice_scatter(
    ctx: LoweringContext, x: TensorBox, src: TensorBox, dim: int = 0, start: Int | None = None, end: Int | None = None,
    step: Int = 1,
) -> TensorBox:  # fmt: skip
    """`x` with x[start:end:step] along `dim` replaced by `src`."""
    _has_places(ctx)
    size, d = ctx.size_of(x), wrap_dim(dim, len(x.size))
    stride = ctx.specialise(step)
    first, last, count = slice_range(ctx, size[d], start, end, stride)
    window = (*size[:d], count, *size[d + 1 :])
    _same_size(ctx, src, window)
    load, new = ctx.loader(x, size, x.dtype), cast_loader(ctx, src, window, x.dtype)
    if stride == 1:
        pieces = [Piece(first, load), Piece(count, new), Piece(size[d] - last, at_dim(load, d, last.__add__))]
        return joined(ctx, pieces, d, size, x.dtype)

    def inner(index: Index) -> Value:
        from_first = index[d] - first
        place = ops.index_expr(from_first)
        inside = ops.logical_and(ops.ge(place, 0), ops.lt(ops.index_expr(index[d]), ops.index_expr(last)))
        inside = ops.logical_and(inside, ops.eq(ops.index_expr(from_first % stride), 0))
        return ops.masked(inside, lambda: at_dim(new, d, lambda i: (i - first) // stride)(index), load(index))

    return ctx.pointwise(size, x.dtype, inner, ctx.order_of_meta())


def _same_size(ctx: LoweringContext, src: TensorBox, size: Sequence[Expr]) -> None:
    own = ctx.size_of(src)
    if len(own) != len(size) or not all(ctx.is_equal(a, b) for a, b in zip(own, size)):
        raise Unsupported(f"a source of size {own} for a place of size {tuple(size)}")


@lower("aten.select_scatter")
def lower_select_scatter(ctx: LoweringContext, x: TensorBox, src: TensorBox, dim: int, index: Int) -> TensorBox:
    """`x` with x[index] along `dim` replaced by `src`."""
    _has_places(ctx)
    size, d = ctx.size_of(x), wrap_dim(dim, len(x.size))
    at = place_in(ctx, index, size[d])
    _same_size(ctx, src, (*size[:d], *size[d + 1 :]))
    row = unsqueeze_box(ctx, src, d)
    load, new = ctx.loader(x, size, x.dtype), cast_loader(ctx, row, ctx.size_of(row), x.dtype)
    pieces = [Piece(at, load), Piece(ONE, new), Piece(size[d] - at - 1, at_dim(load, d, (at + 1).__add__))]
    return joined(ctx, [Piece(ctx.canon(p.size), p.load) for p in pieces], d, size, x.dtype)


@lower("aten.diagonal_scatter")
def lower_diagonal_scatter(
    ctx: LoweringContext, x: TensorBox, src: TensorBox, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> TensorBox:  # fmt: skip
    """`x` with a diagonal of two dims replaced by `src`."""
    _has_places(ctx)
    size = ctx.size_of(x)
    a, b = wrap_dim(dim1, len(size)), wrap_dim(dim2, len(size))
    rest = [d for d in range(len(size)) if d not in (a, b)]
    own = (*(size[d] for d in rest), diagonal_size(ctx, size[a], size[b], offset))
    _same_size(ctx, src, own)
    load, new = ctx.loader(x, size, x.dtype), cast_loader(ctx, src, own, x.dtype)

    def inner(index: Index) -> Value:
        on = ops.eq(ops.index_expr(index[b] - index[a]), offset)
        along = index[a] if offset >= 0 else index[b]
        return ops.masked(on, lambda: new((*(index[d] for d in rest), along)), load(index))

    return ctx.pointwise(size, x.dtype, inner, ctx.order_of_meta())


refuse(
    because("data_size", "the size of its result depends on data"),
    "aten.nonzero",
    "aten.masked_select",
    "aten.repeat_interleave.Tensor",
)

__all__ = ["Piece", "at_dim", "chosen", "joined"]
