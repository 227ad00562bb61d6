"""Layouts: which axes of a plan the dims of a kernel's tile cover, and which are digits of the program's number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field

import torch

from fuser.cuda import tiles
from fuser.cuda.moments import alone_behind, moments_by_phase
from fuser.cuda.text import Guard, divisor_class
from fuser.cuda.windows import has_stride, reads_many, reads_windows
from fuser.ir.loop_body import Row, indirect_rows, loads_in
from fuser.ir.sizes import ONE, Expr, coefficient, expr, floordiv, product, symbols
from fuser.lazy_dataclasses import dataclass
from fuser.ops import REDUCTIONS
from fuser.scheduler.kernel_plan import Axis, KernelPlan, Reduce


@dataclass(frozen=True)
class Context:
    """A generator's queries about the lowering, and how its tiles differ from the tables.

    `hint` gives an expression's value in the example; `aligned` whether a buffer starts at a multiple of 16 bytes;
    `wide` whether addresses need 64 bits; `rough` whether every result is finally rounded to a 16-bit float.
    `smaller`: how many times tiles are halved, because a kernel with larger ones did not fit. `later`: buffers that
    later kernels of the program read or write. `variant`: any other difference of tiles from the tables'.
    """

    hint: Callable[[Expr], int]
    aligned: Callable[[str], bool]
    wide: bool
    rough: bool
    smaller: int = 0
    later: frozenset[str] = frozenset()
    variant: tiles.Variant = tiles.Variant()


def blocks(n: Expr, size: int) -> Expr:
    """The number of blocks of `size` elements that cover `n`."""
    return floordiv(n + (size - 1), expr(size))


@dataclass
class Dim:
    """One dim of the tile: `axes` numbered as one, the last varying fastest; a program takes `block` elements of it.

    `loop`: covered by a loop instead of by programs. `whole`: one block covers the dim.
    """

    axes: list[Axis]
    block: int
    name: str
    whole: bool = False
    loop: bool = False

    @property
    def size(self) -> Expr:
        """Elements of all axes together."""
        return product(a.size for a in self.axes)


@dataclass
class Layout:
    """A kernel's layout: `scalars` are digits of the program's number, `dims` those of the tile, reduced ones last."""

    scalars: list[Axis]
    dims: list[Dim]
    warps: int
    guards: list[Guard] = field(default_factory=list)
    transposed: bool = False  # memory is contiguous along the first dim, too
    flat: bool = False  # all axes are one dim, of few elements for each program
    shared: frozenset[Axis] = frozenset()  # scalars that vary fastest between consecutive programs


def is_column(plan: KernelPlan) -> bool:
    """Whether neighbouring results, not neighbouring reduced elements, are contiguous in memory."""
    vector = next((a for a in plan.axes if a.sym == plan.vector), None)
    return bool(plan.reductions) and vector is not None and not vector.reduced


def row_class(n: Expr, length: int, least: int) -> list[Guard]:
    """Guards for row lengths `n` that fit a block of `length` but not its half; `least` is the smallest block."""
    out: list[Guard] = [("le", n, expr(length))]
    if length > least:
        out.append(("lt", expr(length // 2), n))
    return out


def _read_along(plan: KernelPlan) -> list[int]:
    dtypes, reduced = dict(plan.buffers), {a.sym for a in plan.reduced_axes}
    read = [r.buffer for i, r in enumerate(plan.rows) if r.op == "load" and plan.varies[i] & reduced]
    return [dtypes[b].itemsize for b in read] or [4]


def _reduces_double(plan: KernelPlan) -> bool:
    return any(plan.rows[r.row].dtype is torch.float64 for r in plan.reductions)


def narrowest(plan: KernelPlan) -> int:
    """Bytes of the narrowest element that is read along the reduced axes."""
    return min(_read_along(plan))


def widest(plan: KernelPlan) -> int:
    """Bytes of the widest element that is read along the reduced axes."""
    return max(_read_along(plan))


@dataclass(frozen=True)
class Online:
    """A maximum, and the sum of exponentials of values minus that maximum: one pass over the row computes both."""

    maximum: Reduce
    sum: Reduce


def online_phases(plan: KernelPlan) -> dict[int, tuple[Online, ...]]:
    """By phase, the maxima after which the next phase only adds up `exp(x - maximum)` for each of them."""
    out: dict[int, tuple[Online, ...]] = {}
    for before, totals in alone_behind(plan):
        pairs = [(_subtracted_maximum(plan, t), t) for t in totals]
        found = tuple(Online(m, t) for m, t in pairs if m is not None and m.phase == before)
        if before - 1 not in out and len({o.maximum.number for o in found}) == len(totals):
            out[before] = found
    return out


def _subtracted_maximum(plan: KernelPlan, total: Reduce) -> Reduce | None:
    """The reduction `m`, a maximum of some float32 `x`, if `total` sums `exp(x - m)`; else None."""
    e = plan.rows[total.row]
    if not REDUCTIONS[total.kind].adds or not e.traits.exponential or e.dtype is not torch.float32:
        return None
    difference = plan.rows[e.args[0]]
    if difference.traits.sign != "-":
        return None
    x, m = difference.args
    if plan.rows[m].op != "reduced":
        return None
    r = plan.reductions[plan.rows[m].attr]
    spec = REDUCTIONS[r.kind]
    return r if spec.extreme == ">" and not spec.index and r.row == x else None


def _passes(plan: KernelPlan, online: bool) -> int:
    """The number of loops over the reduced axes."""
    spared = len(online_phases(plan)) + len(moments_by_phase(plan)) if online else 0
    return sum(bool(p.roots) for p in plan.passes) - spared


def adds_floats(plan: KernelPlan) -> bool:
    """Whether some reduction's result depends on the order of its values."""
    for r in plan.reductions:
        row, spec = plan.rows[r.row], REDUCTIONS[r.kind]
        value = plan.rows[row.args[0]].dtype if row.op == "pair" else row.dtype
        if spec.accumulate(value).is_floating_point and not spec.extreme:
            return True
    return False


def reduction_layout(plan: KernelPlan, ctx: Context, loop: bool = False, ahead: tiles.Tile | None = None) -> Layout:
    """The layout of a plan with reductions. `loop`: that of its chunks, which are looped over and not held in
    registers; `ahead`: their tile if tiles are loaded ahead."""
    kept = [a for a in plan.axes if not a.reduced]
    column = is_column(plan)
    reduced = list(plan.reduced_axes) if column else _read_in_turn(plan)
    n = product(a.size for a in reduced)
    loads = sum(1 for i, r in enumerate(plan.rows) if r.op == "load" and plan.varies[i] & {a.sym for a in reduced})
    if column:
        tile = tiles.persistent_column(ctx.hint(n), narrowest(plan))
        table = tiles.SPLIT_COLUMNS if loop else tiles.LOOPED_COLUMNS
        looped, least = table[narrowest(plan)], tiles.SHORTEST_COLUMN
        longest = tiles.LONGEST_COLUMN
    else:
        tile = tiles.persistent_row(ctx.hint(n), max(loads, 1), _persistent_table(plan, loads), narrowest(plan))
        again = tiles.LOOPED_ROW_DOUBLE if _reduces_double(plan) else tiles.LOOPED_ROW_AGAIN
        looped = tiles.LOOPED_ROW if _passes(plan, online=True) == 1 else again
        least = tiles.SHORTEST_ROW
        longest = tiles.PERSISTENT[-1][0]
    turned = column and _reads_rows(plan)  # transposed operands take twice the registers
    tile, looped = tiles.fewer(tile, ctx.smaller), tiles.shrunk(ahead or looped, ctx.smaller + turned)
    # The order of float additions depends on the number of warps, and in columns also on the number of neighbours.
    free = not adds_floats(plan)
    if tile is not None and not loop and (free or not column):
        tile = tiles.varied(tile, ctx.variant, free)
    guards: list[Guard] = []
    if tile is None or loop:
        if tile is None and not loop and ctx.hint(n) > longest:
            guards.append(("lt", expr(longest), n))
        elif not loop:
            guards += row_class(n, tiles.power_of_two(ctx.hint(n)), least)
        tile = looped
        loop = True
    else:
        guards += row_class(n, tile.inner, least)
        guards += divisor_class(n, tiles.divisor_of(ctx.hint(n))) if not column else []
    outer = [a for a in kept if a.sym == plan.vector] if column else kept
    scalars = [a for a in kept if a not in outer]
    if column:
        width = outer[0].size
        narrow, below = tiles.narrowed(tile, ctx.hint(width), loop, bool(moments_by_phase(plan)))
        guards += [("lt", expr(below), width)] if below else []
        guards += [("le", width, expr(narrow.outer))] if narrow.outer < tile.outer else []
        tile = narrow
    dims = []
    if tile.outer > 1 and outer:
        dims.append(Dim(outer, tile.outer, "x"))
    else:
        scalars += outer
    dims.append(Dim(reduced, tile.inner, "r", whole=not loop, loop=loop))
    return Layout(scalars, dims, tile.warps, guards)


def _persistent_table(plan: KernelPlan, loads: int) -> Sequence[tuple[int, int, int]]:
    """The tiles for rows in registers, by the cost of their elements; `loads` tensors are read."""
    if any(r.traits.draw is not None for r in plan.rows):
        return tiles.PERSISTENT_DRAWN
    reduced, dtypes = {a.sym for a in plan.reduced_axes}, dict(plan.buffers)
    written = [s for s in plan.stores if (plan.varies[s.row] | symbols(s.address)) & reduced]
    if loads > 1 or any(dtypes[s.buffer].is_floating_point and dtypes[s.buffer].itemsize == 1 for s in written):
        return ()  # conversion to 8-bit floats takes much arithmetic
    return tiles.PERSISTENT_ONE if written else tiles.PERSISTENT_READ


def _reads_rows(plan: KernelPlan) -> bool:
    """Whether an operand of a column nest is contiguous along a reduced axis."""
    loads = [r.address for r in loads_in(plan.rows) if not indirect_rows(r)]
    return any(plan.vector in symbols(e) and coefficient(e, a.sym) == ONE for e in loads for a in plan.reduced_axes)


def _read_in_turn(plan: KernelPlan) -> list[Axis]:
    """The reduced axes, the one last along which most loads are contiguous, such as a group's channels in
    channels-last memory. For index reductions they stay in the order of the indices."""
    reduced, dtypes = list(plan.reduced_axes), dict(plan.buffers)
    if len(reduced) < 2 or any(REDUCTIONS[r.kind].index for r in plan.reductions):
        return reduced
    syms = {a.sym for a in reduced}
    side_by_side = dict.fromkeys(reduced, 0)
    for i, row in enumerate(plan.rows):
        if row.op == "load" and syms <= plan.varies[i] and not indirect_rows(row):
            for a in reduced:
                if coefficient(row.address, a.sym) == ONE:
                    side_by_side[a] += dtypes[row.buffer].itemsize
    last = max(reduced[::-1], key=lambda a: side_by_side[a])
    return [*(a for a in reduced if a is not last), last]


def pointwise_layout(plan: KernelPlan, ctx: Context) -> Layout:
    """The layout of a plan without reductions."""
    axes = list(plan.axes)
    if not axes:
        return Layout([], [], 1)
    vector = next((a for a in axes if a.sym == plan.vector), axes[-1])
    others = [a for a in axes if a is not vector]
    across = _transposed_axis(plan, vector, others)
    if across is not None:
        several = sum(r.op == "load" for r in plan.rows) > tiles.TRANSPOSED_LOADS
        odd = vector.hint % tiles.DIVISORS[0] != 0 and vector.hint >= tiles.TRANSPOSED_ODD.inner
        plain = tiles.TRANSPOSED_ODD if odd else tiles.TRANSPOSED
        fitting = tiles.fitted(tiles.shrunk(plain, ctx.smaller + several), across.hint, vector.hint)
        tile = tiles.varied(fitting, ctx.variant, warps=True)
        rest = [a for a in others if a is not across]
        dims = [Dim([across], tile.outer, "y"), Dim([vector], tile.inner, "x")]
        return Layout(rest, dims, tile.warps, transposed=True)
    guards = _window_class(plan, vector.size, ctx)
    if guards is not None:
        warps = max(tiles.scaled(tiles.POINTWISE_WARPS, ctx.variant.warps), 1)
        elements = max(tiles.scaled(tiles.WINDOW_ELEMENTS, ctx.variant.outer), 128)
        return Layout([], [Dim(axes, elements, "x")], warps, guards, flat=True)
    dtypes = dict(plan.buffers)
    sizes = [dtypes[r.buffer].itemsize for r in _streamed(plan, vector)]
    sizes += [dtypes[s.buffer].itemsize for s in plan.stores]
    total = product(a.size for a in axes)
    elements, guards = _pointwise_class(total, vector.size if others else None, sizes, ctx)
    if any(r.traits.draw is not None for r in plan.rows) and sizes and min(sizes) == 1 < max(sizes):
        elements = min(elements, tiles.DRAWN_ELEMENTS)
    many = reads_many(plan)
    elements <<= many and elements > tiles.SMALL_ELEMENTS
    if many and len({s.buffer for s in plan.stores}) < len(plan.stores):
        elements //= 2  # an iteration computes several neighbours
    elements = min(max(tiles.scaled(elements, ctx.variant.outer), 128), tiles.MOST_ELEMENTS)
    warps = max(tiles.scaled(tiles.POINTWISE_WARPS, ctx.variant.warps), 1)
    short = vector.hint < tiles.SHORT_VECTOR
    if not others or short:
        return Layout([], [Dim(axes, elements, "x")], warps, guards)
    outer, widths = ctx.hint(product(a.size for a in others)), tiles.WINDOW_WIDTHS if many else None
    tile = tiles.pointwise(outer, vector.hint, elements, widths)
    if tile.outer > 1:
        guards.append(("lt", expr(tile.inner // 2), vector.size))  # more than half of the tile's elements exist
    inner = Dim([vector], tile.inner, "x")
    if tile.outer == 1:
        shared, why = _shared(plan, vector, others, ctx)
        return Layout(others, [inner], warps, [*guards, *why], shared=shared)
    return Layout([], [Dim(others, tile.outer, "y"), inner], warps, guards)


def _streamed(plan: KernelPlan, vector: Axis) -> list[Row]:
    """The loads of a plan along its vector axis, without those that rows share, such as a norm's weights; if rows share
    all, all."""
    loads = [(plan.varies[i], r) for i, r in enumerate(plan.rows) if r.op == "load" and vector.sym in plan.varies[i]]
    return [r for syms, r in loads if len(syms) > 1] or [r for _, r in loads]


def _shared(plan: KernelPlan, vector: Axis, others: list[Axis], ctx: Context) -> tuple[frozenset[Axis], list[Guard]]:
    """The axes along which large operands are shared, such as a norm's weights for whole images, and guards for this.

    Consecutive programs along such an axis find the operand in the cache. Along the vector axis they would read all of
    it from memory for each row.
    """
    by_axes: dict[frozenset[Axis], Expr] = {}
    dtypes = dict(plan.buffers)
    for i, row in enumerate(plan.rows):
        if row.op == "load" and vector.sym in plan.varies[i] and not indirect_rows(row):
            own = [a for a in others if a.sym in plan.varies[i]]
            apart = frozenset(others) - frozenset(own)
            size = product(a.size for a in (*own, vector)) * dtypes[row.buffer].itemsize
            by_axes[apart] = by_axes.get(apart, expr(0)) + size
    by_axes.pop(frozenset(), None)
    if len(by_axes) != 1:
        return frozenset(), []
    ((axes, size),) = by_axes.items()
    large = ctx.hint(size) >= tiles.SHARED_FROM
    enough = expr(tiles.SHARED_FROM)
    return (axes, [("le", enough, size)]) if large else (frozenset(), [("lt", size, enough)])


def _window_class(plan: KernelPlan, vector: Expr, ctx: Context) -> list[Guard] | None:
    """Guards of a window kernel whose programs have few elements of all axes as one dim; None if it is not one."""
    if not reads_windows(plan):
        return None
    if has_stride(plan):
        return []
    short = expr(tiles.WINDOW_ROW)
    return [("lt", vector, short)] if ctx.hint(vector) < tiles.WINDOW_ROW else None


def _pointwise_class(total: Expr, vector: Expr | None, itemsizes: list[int], ctx: Context) -> tuple[int, list[Guard]]:
    """The elements of a program, and guards for the sizes for which these and the tile's shape are chosen."""
    elements = tiles.pointwise_elements(itemsizes)
    enough = expr(elements * 2 * tiles.MULTIPROCESSORS)
    many = ctx.hint(total) >= ctx.hint(enough)
    guards: list[Guard] = [("le", enough, total) if many else ("lt", total, enough)]
    elements = max((elements if many else tiles.SMALL_ELEMENTS) >> ctx.smaller, 128)
    if vector is not None:
        n = ctx.hint(vector)
        bounds = [b for b in (tiles.SHORT_VECTOR, elements) if n >= b]
        guards += [("le", expr(bounds[-1]), vector)] if bounds else []
        above = [b for b in (tiles.SHORT_VECTOR, elements) if n < b]
        guards += [("lt", vector, expr(above[0]))] if above else []
    return elements, guards


def _transposed_axis(plan: KernelPlan, vector: Axis, others: list[Axis]) -> Axis | None:
    """The axis along which an operand is contiguous that is strided along `vector`; None if not exactly one."""
    found: set[Axis] = set()
    loads = [r.address for r in loads_in(plan.rows) if not indirect_rows(r)]
    for address in (*loads, *(s.address for s in plan.stores)):
        c = coefficient(address, vector.sym)
        if c is None or c.as_int() in (0, 1):
            continue
        found.update(a for a in others if coefficient(address, a.sym) == ONE)
    axis = next(iter(found)) if len(found) == 1 else None
    return axis if axis is not None and axis.hint >= 16 and vector.hint >= 16 else None
