"""Views: the result is the argument under another index. Nothing is computed or stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fuser.errors import Unsupported
from fuser.ir.nodes import Index, TensorBox
from fuser.ir.sizes import ONE, ZERO, Expr, expr, floordiv, minimum, product
from fuser.lowering.context import LoweringContext, as_expr
from fuser.lowering.entries import LOWERINGS, lower
from fuser.lowering.reshape import infer, reshape_box
from fuser.reasons import because

Int = Expr | int
Ints = Sequence[Int]
NO_END = 1 << 62  # end of a slice that means "all"


# -- reindexings, also for other families ------------------------------------------------------------------------------
def wrap_dim(dim: int, rank: int) -> int:
    """A dim as a non-negative number; a 0-dim tensor counts as 1-d."""
    rank = max(rank, 1)
    if not -rank <= dim < rank:
        raise Unsupported(f"dim {dim} of a tensor with {rank} dims")
    return dim % rank


def permute_box(ctx: LoweringContext, x: TensorBox, dims: Sequence[int]) -> TensorBox:
    """A view whose dim d is dim dims[d] of `x`."""
    size = ctx.size_of(x)
    order = [wrap_dim(d, len(size)) for d in dims]
    place = [order.index(d) for d in range(len(size))]
    return x.viewed(tuple(size[d] for d in order), lambda index: tuple(index[p] for p in place))


def transpose_box(ctx: LoweringContext, x: TensorBox, a: int, b: int) -> TensorBox:
    """Two dims swapped."""
    rank = len(x.size)
    order = list(range(rank))
    if rank:
        a, b = wrap_dim(a, rank), wrap_dim(b, rank)
        order[a], order[b] = b, a
    return permute_box(ctx, x, order)


def with_dim(ctx: LoweringContext, x: TensorBox, dim: int, size: Expr, index_fn: Callable[[Expr], Expr]) -> TensorBox:
    """`x` with `size` elements along `dim`: element i is element index_fn(i) of `x`."""
    own = ctx.size_of(x)

    def reindex(index: Index) -> Index:
        return (*index[:dim], index_fn(index[dim]), *index[dim + 1 :])

    return x.viewed((*own[:dim], size, *own[dim + 1 :]), reindex)


def select_box(ctx: LoweringContext, x: TensorBox, dim: int, at: Expr) -> TensorBox:
    """`x` at index `at` (in range) along `dim`, without that dim."""
    own = ctx.size_of(x)
    return x.viewed((*own[:dim], *own[dim + 1 :]), lambda index: (*index[:dim], at, *index[dim:]))


def unsqueeze_box(ctx: LoweringContext, x: TensorBox, dim: int) -> TensorBox:
    """`x` with a dim of size 1 before `dim` (up to the rank)."""
    own = ctx.size_of(x)
    return x.viewed((*own[:dim], ONE, *own[dim:]), lambda index: (*index[:dim], *index[dim + 1 :]))


def drop_dims(ctx: LoweringContext, x: TensorBox, dims: Sequence[int]) -> TensorBox:
    """`x` without `dims`, which have size 1."""
    own = ctx.size_of(x)
    kept = [d for d in range(len(own)) if d not in dims]

    def reindex(index: Index) -> Index:
        full = [ZERO] * len(own)
        for d, i in zip(kept, index):
            full[d] = i
        return tuple(full)

    return x.viewed(tuple(own[d] for d in kept), reindex) if len(kept) < len(own) else x


def expand_box(ctx: LoweringContext, x: TensorBox, shape: Ints) -> TensorBox:
    """`x` expanded to `shape`; -1 keeps a size."""
    own = ctx.size_of(x)
    lead = len(shape) - len(own)
    out: list[Expr] = [ctx.canon(s) for s in shape]
    keep = [True] * len(own)
    for d, size in enumerate(own):
        wanted = out[lead + d]
        if ctx.hint(wanted) == -1:
            ctx.specialise(wanted)
            wanted = size
        if not ctx.is_equal(size, wanted):
            if not ctx.is_equal(size, ONE):
                raise Unsupported(f"a size of {size} does not expand to {wanted}")
            keep[d] = False
        out[lead + d] = ctx.canon(wanted)
    for s in out[:lead]:
        ctx.assume("le", 0, s)
    if not lead and all(keep):
        return x
    return x.viewed(tuple(out), lambda index: tuple(i if k else ZERO for i, k in zip(index[lead:], keep)))


def keep_few(ctx: LoweringContext, x: TensorBox, dim: int) -> None:
    """If `dim` is a small last dim, make its size a constant: loads with constant strides vectorise."""
    size = ctx.size_of(x)
    if 0 <= dim == len(size) - 1 > 0 and 1 < ctx.hint(size[dim]) <= ctx.target.components:
        ctx.specialise(size[dim])


def slice_box(
    ctx: LoweringContext, x: TensorBox, dim: int, start: Int | None, end: Int | None, step: int = 1
) -> TensorBox:  # fmt: skip
    """Elements start, start + step, … below end; both clamped to the dim as in Python."""
    keep_few(ctx, x, dim)
    size = ctx.size_of(x)[dim]
    first, last, count = slice_range(ctx, size, start, end, step)
    if first == ZERO and last == size and step == 1:
        return x
    return with_dim(ctx, x, dim, count, lambda i: i * step + first)


def slice_range(
    ctx: LoweringContext, size: Expr, start: Int | None, end: Int | None, step: int
) -> tuple[Expr, Expr, Expr]:  # fmt: skip
    """The first index of start:end:step, the upper bound of its indices, and their number."""
    first = _clamped(ctx, ZERO if start is None else as_expr(start), ZERO, size)
    whole = end is None or (as_expr(end).as_int() or 0) >= NO_END
    last = size if whole else _clamped(ctx, as_expr(end), first, size)
    count = last - first if step == 1 else floordiv(last - first + (step - 1), expr(step))
    return first, last, ctx.canon(count)


def _clamped(ctx: LoweringContext, at: Expr, low: Expr, size: Expr) -> Expr:
    """`at`, counted from the end if negative, clamped between `low` and `size`. A guard fixes which case applies."""
    at = ctx.canon(at)
    if ctx.hint(at) < 0:
        ctx.assume("lt", at, 0)
        at = at + size
    elif at.as_int() is None:
        ctx.assume("le", 0, at)
    if ctx.hint(at) >= ctx.hint(size):
        ctx.assume("le", size, at)
        return size
    ctx.assume("le", at, size)
    if ctx.hint(at) <= ctx.hint(low):
        ctx.assume("le", at, low)
        return low
    ctx.assume("le", low, at)
    return at


def place_in(ctx: LoweringContext, at: Int, size: Expr) -> Expr:
    """A non-negative index: counted from the end if negative, and guarded to be below `size`."""
    at = ctx.canon(as_expr(at))
    if ctx.hint(at) < 0:
        ctx.assume("lt", at, 0)
        at = at + size
    ctx.assume("le", 0, at)
    ctx.assume("lt", at, size)
    return at


# -- shape -------------------------------------------------------------------------------------------------------------
@lower("aten.view", "aten.reshape", "aten._unsafe_view", "aten._reshape_alias", view=True)
def lower_view(ctx: LoweringContext, x: TensorBox, shape: Any, stride: Any = None) -> TensorBox:
    """The same elements, in row-major order, in another shape."""
    if shape is x.dtype:
        return x
    if isinstance(shape, torch.dtype):
        raise Unsupported(because("dtype", "a view of the bits in another dtype"))
    if ctx.op == "aten.view":
        _keep_ones(ctx, x)
    return reshape_box(ctx, x, shape)


def _keep_ones(ctx: LoweringContext, x: TensorBox) -> None:
    """Make dims of size 1 constants for a tensor that is not contiguous: eager may refuse the view for other sizes."""
    meta = ctx.arg_metas[0]
    expected = 1
    strict = True
    for n, stride in zip(reversed(meta.shape), reversed(meta.stride())):
        strict = strict and stride == expected
        expected *= n
    for size in () if strict else ctx.size_of(x):
        if ctx.hint(size) == 1:
            ctx.specialise(size)


@lower("aten.view_as", "aten.reshape_as", view=True)
def lower_view_as(ctx: LoweringContext, x: TensorBox, other: TensorBox) -> TensorBox:
    """Reshaped to the shape of another tensor."""
    return reshape_box(ctx, x, ctx.size_of(other))


@lower("aten.flatten", view=True)
def lower_flatten(ctx: LoweringContext, x: TensorBox, start: int = 0, end: int = -1) -> TensorBox:
    """Dims start … end merged into one."""
    size = ctx.size_of(x)
    if not size:
        return reshape_box(ctx, x, [ONE])
    a, b = wrap_dim(start, len(size)), wrap_dim(end, len(size))
    return reshape_box(ctx, x, [*size[:a], product(size[a : b + 1]), *size[b + 1 :]])


@lower("aten.ravel", view=True)
def lower_ravel(ctx: LoweringContext, x: TensorBox) -> TensorBox:
    """Flattened to one dim."""
    return lower_flatten(ctx, x)


@lower("aten.unflatten", view=True)
def lower_unflatten(ctx: LoweringContext, x: TensorBox, dim: int, sizes: Ints) -> TensorBox:
    """One dim split into several."""
    own = ctx.size_of(x)
    d = wrap_dim(dim, len(own))
    inner = infer(ctx, own[d : d + 1], [ctx.canon(s) for s in sizes])
    return reshape_box(ctx, x, [*own[:d], *inner, *own[d + 1 :]])


@lower("aten.squeeze", view=True)
def lower_squeeze(ctx: LoweringContext, x: TensorBox, dims: int | Sequence[int] | None = None) -> TensorBox:
    """Without the dims of size 1 (among `dims`, if given). A guard fixes which dims these are."""
    size = ctx.size_of(x)
    wanted = range(len(size)) if dims is None else [dims] if isinstance(dims, int) else dims
    gone = []
    for d in {wrap_dim(d, len(size)) for d in wanted} if size else ():
        if ctx.hint(size[d]) == 1:
            ctx.is_equal(size[d], ONE)
            gone.append(d)
        else:
            ctx.assume("ne", size[d], 1)
    return drop_dims(ctx, x, gone)


@lower("aten.unsqueeze", view=True)
def lower_unsqueeze(ctx: LoweringContext, x: TensorBox, dim: int) -> TensorBox:
    """A new dim of size 1."""
    return unsqueeze_box(ctx, x, wrap_dim(dim, len(x.size) + 1))


@lower("aten.expand", "aten.broadcast_to", view=True)
def lower_expand(ctx: LoweringContext, x: TensorBox, shape: Ints, implicit: bool = False) -> TensorBox:
    """Dims of size 1 repeated."""
    return expand_box(ctx, x, shape)


@lower("aten.expand_as", view=True)
def lower_expand_as(ctx: LoweringContext, x: TensorBox, other: TensorBox) -> TensorBox:
    """Repeated to the shape of another tensor."""
    return expand_box(ctx, x, ctx.size_of(other))


@lower("aten.broadcast_tensors")
def lower_broadcast_tensors(ctx: LoweringContext, tensors: Sequence[TensorBox]) -> tuple[TensorBox, ...]:
    """Each tensor expanded to the common size."""
    size = ctx.broadcast_sizes([ctx.size_of(t) for t in tensors])
    return tuple(expand_box(ctx, t, size) for t in tensors)


@lower("aten.meshgrid")
def lower_meshgrid(ctx: LoweringContext, tensors: Sequence[TensorBox], indexing: str = "ij") -> tuple[TensorBox, ...]:
    """Grid d holds tensor d's elements along dim d."""
    if indexing not in ("ij", "xy"):
        raise Unsupported(f"meshgrid with indexing {indexing!r}")
    sizes = [ctx.numel(t) for t in tensors]
    grids = []
    for d, t in enumerate(tensors):
        flat = reshape_box(ctx, t, [sizes[d]])
        grids.append(flat.viewed(tuple(sizes), _only(d)))
    if indexing == "xy" and len(grids) > 1:
        grids = [transpose_box(ctx, g, 0, 1) for g in grids]
    return tuple(grids)


def _only(d: int) -> Callable[[Index], Index]:
    return lambda index: (index[d],)


# -- order of dims -----------------------------------------------------------------------------------------------------
@lower("aten.permute", view=True)
def lower_permute(ctx: LoweringContext, x: TensorBox, dims: Sequence[int]) -> TensorBox:
    """Dims in another order."""
    return permute_box(ctx, x, dims)


@lower("aten.transpose", "aten.swapaxes", "aten.swapdims", view=True)
def lower_transpose(ctx: LoweringContext, x: TensorBox, a: int, b: int) -> TensorBox:
    """Two dims swapped."""
    return transpose_box(ctx, x, a, b)


@lower("aten.t", "aten.numpy_T", view=True)
def lower_t(ctx: LoweringContext, x: TensorBox) -> TensorBox:
    """All dims in reverse order."""
    return permute_box(ctx, x, list(range(len(x.size)))[::-1])


@lower("aten.mT", "aten.mH", "aten.adjoint", "aten.matrix_H", view=True)
def lower_matrix_transpose(ctx: LoweringContext, x: TensorBox) -> TensorBox:
    """The last two dims swapped (tensors here are real)."""
    return transpose_box(ctx, x, -2, -1)


@lower("aten.movedim", "aten.moveaxis", view=True)
def lower_movedim(ctx: LoweringContext, x: TensorBox, source: Any, target: Any) -> TensorBox:
    """Dims `source` moved to `target`; the others keep their order."""
    rank = len(x.size)
    sources = [wrap_dim(d, rank) for d in ([source] if isinstance(source, int) else source)]
    targets = [wrap_dim(d, rank) for d in ([target] if isinstance(target, int) else target)]
    others = iter(d for d in range(rank) if d not in sources)
    at = dict(zip(targets, sources))
    return permute_box(ctx, x, [at[d] if d in at else next(others) for d in range(rank)])


# -- parts of a dim ----------------------------------------------------------------------------------------------------
@lower("aten.slice", view=True)
def lower_slice(
    ctx: LoweringContext, x: TensorBox, dim: int = 0, start: Int | None = None, end: Int | None = None, step: Int = 1
) -> TensorBox:  # fmt: skip
    """x[start:end:step] along `dim`."""
    return slice_box(ctx, x, wrap_dim(dim, len(x.size)), start, end, ctx.specialise(step))


@lower("aten.narrow", view=True)
def lower_narrow(ctx: LoweringContext, x: TensorBox, dim: int, start: Any, length: Int) -> TensorBox:
    """`length` elements from `start`."""
    if isinstance(start, TensorBox):
        raise Unsupported("narrow with its start in a tensor")
    d = wrap_dim(dim, len(x.size))
    size = ctx.size_of(x)[d]
    first = ctx.canon(start)
    if ctx.hint(first) < 0:
        ctx.assume("lt", first, 0)
        first = first + size
    count = ctx.canon(length)
    ctx.assume("le", 0, first)
    ctx.assume("le", 0, count)
    ctx.assume("le", first + count, size)
    return with_dim(ctx, x, d, count, lambda i: i + first)


@lower("aten.select", view=True)
def lower_select(ctx: LoweringContext, x: TensorBox, dim: int, index: Int) -> TensorBox:
    """x[index] along `dim`, without that dim."""
    d = wrap_dim(dim, len(x.size))
    keep_few(ctx, x, d)
    return select_box(ctx, x, d, place_in(ctx, index, ctx.size_of(x)[d]))


def cut(ctx: LoweringContext, x: TensorBox, dim: int, starts: Sequence[Expr], ends: Sequence[Expr]) -> list[TensorBox]:
    """The parts [start, end) along `dim`, which are in range."""
    return [with_dim(ctx, x, dim, ctx.canon(b - a), a.__add__) for a, b in zip(starts, ends)]


def split_every(ctx: LoweringContext, x: TensorBox, dim: int, step: Expr) -> tuple[TensorBox, ...]:
    """Parts of `step` elements, and a last one of the remaining elements. Their number is a constant of the kernel."""
    size = ctx.size_of(x)[dim]
    n = ctx.hint(size)
    count = max(1, -(-n // max(ctx.hint(step), 1)))
    if ctx.hint(step) == 0:
        ctx.is_equal(size, ZERO)
        ctx.is_equal(step, ZERO)
    starts: list[Expr] = [step * k for k in range(count)]
    if count > 1:
        ctx.assume("lt", starts[-1], size)
    if not ctx.is_equal(size, step * count):  # equal parts are worth a fact: they can share a loop
        ctx.assume("le", size, step * count)
    return tuple(cut(ctx, x, dim, starts, [*starts[1:], size]))


@lower("aten.split", "aten.split_with_sizes", "aten.unsafe_split", "aten.unsafe_split_with_sizes")
def lower_split(ctx: LoweringContext, x: TensorBox, sizes: Any, dim: int = 0) -> tuple[TensorBox, ...]:
    """Parts of one size, or of the given sizes."""
    d = wrap_dim(dim, len(x.size))
    if not isinstance(sizes, (tuple, list)):
        return split_every(ctx, x, d, ctx.canon(as_expr(sizes)))
    ends: list[Expr] = []
    for s in sizes:
        ctx.assume("le", 0, s)
        ends.append(ctx.canon((ends[-1] if ends else ZERO) + as_expr(s)))
    if not ctx.is_equal(ctx.size_of(x)[d], ends[-1]):
        raise Unsupported("sizes of a split that do not add up")
    return tuple(cut(ctx, x, d, [ZERO, *ends[:-1]], ends))


@lower("aten.chunk")
def lower_chunk(ctx: LoweringContext, x: TensorBox, chunks: int, dim: int = 0) -> tuple[TensorBox, ...]:
    """At most `chunks` parts of equal size; the last one has the remaining elements."""
    d = wrap_dim(dim, len(x.size))
    size = ctx.size_of(x)[d]
    if ctx.hint(size) == 0:
        ctx.specialise(size)
        return (x,) * chunks
    if size.as_int() is None and ctx.hint(size) % chunks == 0:
        ctx.assume("eq", size % chunks, 0)
        step = floordiv(size, expr(chunks))
        starts = [step * k for k in range(chunks)]
        return tuple(cut(ctx, x, d, starts, [s + step for s in starts]))
    return split_every(ctx, x, d, ctx.canon(floordiv(size + (chunks - 1), expr(chunks))))


@lower("aten.tensor_split", "aten.hsplit", "aten.vsplit", "aten.dsplit")
def lower_tensor_split(ctx: LoweringContext, x: TensorBox, how: Any, dim: int = 0) -> tuple[TensorBox, ...]:
    """Parts that differ by at most one element (`how` a number), or parts cut at the indices `how`."""
    dim = {"aten.hsplit": min(1, len(x.size) - 1), "aten.vsplit": 0, "aten.dsplit": 2}.get(ctx.op, dim)
    d = wrap_dim(dim, len(x.size))
    if isinstance(how, TensorBox):
        raise Unsupported("tensor_split at indices that a tensor holds")
    if isinstance(how, (tuple, list)):
        places = [0, *how, None]
        return tuple(slice_box(ctx, x, d, a, b) for a, b in zip(places, places[1:]))
    size, parts = ctx.size_of(x)[d], ctx.specialise(as_expr(how))
    places = [ZERO]
    for k in range(1, parts + 1):  # the first size % parts of them are longer by one
        places.append(ctx.canon(floordiv(size, expr(parts)) * k + minimum(k, size % parts)))
    return tuple(cut(ctx, x, d, places[:-1], places[1:]))


@lower("aten.unbind")
def lower_unbind(ctx: LoweringContext, x: TensorBox, dim: int = 0) -> tuple[TensorBox, ...]:
    """The slices at each index of `dim`. Their number is a constant of the kernel."""
    d = wrap_dim(dim, len(x.size))
    return tuple(select_box(ctx, x, d, expr(k)) for k in range(ctx.specialise(ctx.size_of(x)[d])))


@lower("aten.unfold", view=True)
def lower_unfold(ctx: LoweringContext, x: TensorBox, dim: int, size: Int, step: Int) -> TensorBox:
    """Windows of `size` elements, `step` apart: `dim` counts the windows, a new last dim their elements."""
    own = ctx.size_of(x)
    width, step = ctx.canon(size), ctx.specialise(step)
    ctx.assume("le", 0, width)
    if not own:
        ctx.assume("le", width, 1)
        return x.viewed((width,), lambda index: ())
    d = wrap_dim(dim, len(own))
    ctx.assume("le", width, own[d])
    count = ctx.canon(floordiv(own[d] - width, expr(step)) + 1)
    if step == 1:  # both dims have one stride: in a result the larger dim gets the larger stride
        few, many = sorted((count, width), key=ctx.hint)
        ctx.assume("lt" if ctx.hint(few) < ctx.hint(many) else "eq", few, many)

    def reindex(index: Index) -> Index:
        return (*index[:d], index[d] * step + index[-1], *index[d + 1 : -1])

    return x.viewed((*own[:d], count, *own[d + 1 :], width), reindex)


@lower("aten.diagonal", view=True)
def lower_diagonal(ctx: LoweringContext, x: TensorBox, offset: int = 0, dim1: int = 0, dim2: int = 1) -> TensorBox:
    """The elements at (i, i + offset) of two dims, as a new last dim."""
    own = ctx.size_of(x)
    a, b = wrap_dim(dim1, len(own)), wrap_dim(dim2, len(own))
    skip_a, skip_b = max(-offset, 0), max(offset, 0)
    count = diagonal_size(ctx, own[a], own[b], offset)
    rest = [d for d in range(len(own)) if d not in (a, b)]

    def reindex(index: Index) -> Index:
        full = [ZERO] * len(own)
        for d, i in zip(rest, index):
            full[d] = i
        full[a], full[b] = index[-1] + skip_a, index[-1] + skip_b
        return tuple(full)

    return x.viewed((*(own[d] for d in rest), count), reindex)


def diagonal_size(ctx: LoweringContext, rows: Expr, columns: Expr, offset: int) -> Expr:
    """The number of elements (i, i + offset) of a matrix."""
    count = smaller(ctx, rows - max(-offset, 0), columns - max(offset, 0))
    if ctx.hint(count) <= 0:
        ctx.assume("le", count, 0)
        return ZERO
    ctx.assume("le", 0, count)
    return count


def smaller(ctx: LoweringContext, a: Expr, b: Expr) -> Expr:
    """The smaller of two sizes. A guard fixes which one it is."""
    a, b = ctx.canon(a), ctx.canon(b)
    if ctx.hint(a) > ctx.hint(b):
        a, b = b, a
    ctx.assume("le", a, b)
    return a


@lower("aten.as_strided", view=True)
def lower_as_strided(
    ctx: LoweringContext, x: TensorBox, size: Ints, stride: Ints, offset: Int | None = None
) -> TensorBox:  # fmt: skip
    """Elements of contiguous memory, addressed by strides. Unsupported unless the memory is known to begin with `x`."""
    meta = ctx.arg_metas[0]
    own_input = x.storage.buffer.input_number >= 0
    if not meta.is_contiguous() or (offset is not None and (own_input or meta.storage_offset() != 0)):
        raise Unsupported("as_strided of memory that is not contiguous, or begins elsewhere")
    own, first = ctx.size_of(x), ctx.canon(offset or 0)
    sizes, steps = [ctx.canon(s) for s in size], [ctx.canon(s) for s in stride]
    ctx.assume("le", 0, first)
    for s, n in zip(steps, sizes):
        ctx.assume("le", 0, s)
        ctx.assume("lt", 0, n)
    ctx.assume("lt", first + sum(((n - 1) * s for n, s in zip(sizes, steps)), ZERO), product(own))
    flat = reshape_box(ctx, x, [product(own)])
    return flat.viewed(tuple(sizes), lambda index: (sum((i * s for i, s in zip(index, steps)), first),))


# -- the same tensor ---------------------------------------------------------------------------------------------------
@lower("aten.alias", "aten.detach", "aten._conj", "aten.conj", "aten.resolve_conj", "aten.resolve_neg", "aten.real",
       view=True)  # fmt: skip
def lower_same(ctx: LoweringContext, x: TensorBox) -> TensorBox:
    """The tensor itself (tensors here are real)."""
    return x


@lower("aten.atleast_1d", "aten.atleast_2d", "aten.atleast_3d")
def lower_atleast(ctx: LoweringContext, x: Any) -> Any:
    """With at least 1, 2 or 3 dims."""
    if isinstance(x, (tuple, list)):
        return tuple(lower_atleast(ctx, t) for t in x)
    least = {"aten.atleast_1d": 1, "aten.atleast_2d": 2, "aten.atleast_3d": 3}[ctx.op]
    if least == 3 and len(x.size) in (1, 2):
        x = unsqueeze_box(ctx, x, len(x.size))
    while len(x.size) < least:
        x = unsqueeze_box(ctx, x, 0)
    return x


# -- copies of views: the elements that they read are the same ---------------------------------------------------------
_COPIED = (
    "view expand permute transpose t select slice squeeze unsqueeze unfold diagonal narrow alias detach split "
    "split_with_sizes unbind"
)
for _name in _COPIED.split():
    lower(f"aten.{_name}_copy")(LOWERINGS[f"aten.{_name}"])
