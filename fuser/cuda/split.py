"""Split reductions to few results: chunks of the reduced axes write partial results, the last program combines them.

The programs of a tile of results count themselves. Which of them is last differs between runs, but its work does not:
the number of chunks depends on sizes alone, and chunks are combined in the order of their numbers, so the same inputs
give the same bits. (The counters are zero before and after; see `BufferPattern`.) Where that is not faster, a second
kernel combines.
"""

from __future__ import annotations

import dataclasses

import torch

from fuser.cuda import moments, tiles
from fuser.cuda.layout import Context, Dim, Layout, blocks, is_column, narrowest, reduction_layout
from fuser.cuda.looped import Looped, write_body, write_function
from fuser.cuda.moments import combine_rows, moments_by_phase, reads_once
from fuser.cuda.nest import PROGRAM, Function, Nest, function_text
from fuser.cuda.text import Guard
from fuser.ir.loop_body import Row, loads_in, renumber, renumber_expr
from fuser.ir.sizes import (
    LOOP,
    ONE,
    Expr,
    Sym,
    expr,
    floordiv,
    maximum,
    minimum,
    product,
    symbols,
)  # fmt: skip
from fuser.lazy_dataclasses import dataclass
from fuser.ops import REDUCTIONS
from fuser.scheduler.kernel_plan import Axis, KernelPlan, Reduce, Store
from fuser.scheduler.plan import phases_of

CHUNK = Sym("chunk", LOOP)


@dataclass(frozen=True)
class Partial:
    """A temporary of a split reduction: `size` elements of `dtype`."""

    name: str
    dtype: torch.dtype
    size: Expr
    counters: bool = False  # initialised with zeros


def programs(plan: KernelPlan, width: int = 0) -> Expr:
    """The number of programs of an unsplit, looped kernel; for columns, with tiles `width` wide unless it is 0."""
    kept = [a for a in plan.axes if not a.reduced]
    if not is_column(plan):
        return product(a.size for a in kept)
    others = product(a.size for a in kept if a.sym != plan.vector)
    vector = next(a for a in kept if a.sym == plan.vector)
    return others * blocks(vector.size, width or tiles.LOOPED_COLUMNS[narrowest(plan)].outer)


@dataclass(frozen=True)
class Cut:
    """Whether the reduced axes are cut into chunks (`split`), and how data is loaded.

    `ahead`: chunks are loaded to registers a step ahead; `whole`: uncut columns are, with this tile; both use an
    eviction policy. None: loads go through shared memory. `small`: the only tensor is smaller than the cache. `guards`:
    the sizes for which the same choice holds.
    """

    split: bool
    guards: tuple[Guard, ...] = ()
    ahead: tiles.Ahead | None = None
    whole: tiles.Tile | None = None
    eviction: str = ""
    small: bool = False


def cut(plan: KernelPlan, ctx: Context) -> Cut:
    """The cut of a plan's reduced axes."""
    found = _cut(plan, ctx) if reads_once(plan) else _uncut(plan, ctx)
    guards = [g for g in found.guards if g[1].as_int() is None or g[2].as_int() is None]
    return dataclasses.replace(found, guards=tuple(guards))


def _cut(plan: KernelPlan, ctx: Context) -> Cut:
    n, column = product(a.size for a in plan.reduced_axes), is_column(plan)
    least = tiles.SPLIT_COLUMN_FROM if column else tiles.SPLIT_ROW_FROM
    if ctx.hint(n) < least:  # tested first: all further guards of such rows imply it, so it adds no class
        return Cut(split=False, guards=(("lt", n, expr(least)),))
    loading = _loading(plan, ctx)
    guards: list[Guard] = [("le", expr(least), n)]
    if column and loading.ahead is not None:
        width = loading.ahead.tile.outer
        units = programs(plan, width)
        at_least, whole, below = tiles.whole_columns(
            ctx.hint(units), width, narrowest(plan), _takes_registers(plan), loading.small
        )
        guards += [("le", expr(at_least), units)] if at_least else []
        guards += [("lt", units, expr(below))] if below else []
        return dataclasses.replace(loading, split=whole is None, whole=whole, guards=(*guards, *loading.guards))
    units, limit = programs(plan), expr(tiles.SPLIT_BELOW)
    if ctx.hint(units) >= tiles.SPLIT_BELOW:
        return Cut(split=False, guards=(*guards, ("le", limit, units), *(loading.guards if column else ())))
    return dataclasses.replace(loading, guards=(*guards, ("lt", units, limit), *loading.guards))


def _uncut(plan: KernelPlan, ctx: Context) -> Cut:
    """The cut of reductions that depend on each other: not split; long columns of one tensor are loaded ahead."""
    n, longest = product(a.size for a in plan.reduced_axes), tiles.LONGEST_COLUMN
    if not is_column(plan) or ctx.hint(n) <= longest or len(_read(plan)) != 1:
        return Cut(False)
    several = _takes_registers(plan)
    width = _ahead_columns(plan, several, ctx).tile.outer
    units = programs(plan, width)
    at_least, whole, below = tiles.whole_columns(ctx.hint(units), width, narrowest(plan), several, small=True)
    if whole is None:
        _, rows, warps = tiles.AHEAD_WHOLE_COLUMNS[-1]
        whole = tiles.Tile(width, rows[narrowest(plan)] >> several, warps)
    guards: list[Guard] = [("lt", expr(longest), n)]
    guards += [("le", expr(at_least), units)] if at_least else []
    guards += [("lt", units, expr(below))] if below else []
    return Cut(split=False, guards=tuple(guards), whole=whole)


def _read(plan: KernelPlan) -> set[str]:
    """The tensors that are read along all axes."""
    both = {a.sym for a in plan.axes}
    return {r.buffer for n, r in enumerate(plan.rows) if r.op == "load" and plan.varies[n] == both}


def _ahead_columns(plan: KernelPlan, several: bool, ctx: Context) -> tiles.Ahead:
    vector = next(a for a in plan.axes if a.sym == plan.vector)
    if ctx.hint(vector.size) % 16 == 0:
        return tiles.AHEAD_COLUMNS[several][narrowest(plan)]
    odd = tiles.AHEAD_ODD_COLUMNS[narrowest(plan)]
    tile = odd.tile
    half = tiles.Tile(tile.outer, tile.inner // 2, tile.warps)  # same width: a row's bytes are read at one time
    return dataclasses.replace(odd, tile=half) if moments_by_phase(plan) else odd


def _takes_registers(plan: KernelPlan) -> bool:
    """Whether a loop keeps more than one running result for each element."""
    if is_column(plan) and moments_by_phase(plan):
        return True
    return any(sum(1 + REDUCTIONS[r.kind].index for r in p.folds) > 1 for p in plan.passes)


def _loading(plan: KernelPlan, ctx: Context) -> Cut:
    """How a loop over chunks loads."""
    read = _read(plan)
    if len(read) != 1:
        return Cut(True)
    moved = product(a.size for a in plan.axes) * dict(plan.buffers)[min(read)].itemsize
    size, passing, below = ctx.hint(moved), expr(tiles.PASSING_FROM), expr(tiles.AHEAD_BELOW)
    if size >= tiles.AHEAD_BELOW:
        return Cut(split=True, guards=(("le", below, moved),))
    several = _takes_registers(plan)
    ahead = _ahead_columns(plan, several, ctx) if is_column(plan) else tiles.AHEAD_ROWS[several][narrowest(plan)]
    if size < tiles.PASSING_FROM:
        return Cut(split=True, guards=(("lt", moved, passing),), ahead=ahead, small=True)
    eviction = tiles.PASSING if not read & ctx.later else ""
    return Cut(split=True, guards=(("le", passing, moved), ("lt", moved, below)), ahead=ahead, eviction=eviction)


def split(
    plan: KernelPlan, name: str, ctx: Context
) -> tuple[tuple[Function, ...], tuple[Partial, ...], tuple[Guard, ...]]:
    """One or two functions for `plan`, the temporaries that programs share, and the guards of the choice."""
    how = cut(plan, ctx)
    layout = reduction_layout(plan, ctx, loop=True, ahead=how.ahead.tile if how.ahead else None)
    inner = layout.dims[-1]
    chunks, longest = _chunks(plan, how, inner)
    in_one = tiles.SPLIT_IN_ONE and not any(REDUCTIONS[r.kind].index for r in plan.reductions)
    nest = Nest(plan, name if in_one else f"{name}_partial", ctx, layout)
    results = product(a.size for a in plan.axes if not a.reduced)
    partials = _partials(plan, nest, name, results * chunks)
    dtypes = {p.name: p.dtype for p in partials}
    nest.dtypes.update(dtypes)
    _write_partial(nest, chunks, result_address(plan, results), name, how)
    combined = combine_plan(plan, chunks, results, name, dtypes)
    then = _combine_layout(combined, longest, narrowest(plan), layout if in_one else None)
    rest = Nest(combined, f"{name}_combine", ctx, then)
    if in_one:
        counters = Partial(f"{name}_arrived", torch.int32, nest.units(), counters=True)
        partials.append(counters)
        functions: tuple[Function, ...] = (_in_one(nest, rest, chunks, counters),)
    else:
        functions = nest.close_function(nest.name, nest.units() * chunks), write_function(rest)
    guards = dict.fromkeys([*how.guards, *nest.params.guards, *rest.params.guards])
    return functions, tuple(partials), tuple(guards)


def _chunks(plan: KernelPlan, how: Cut, inner: Dim) -> tuple[Expr, int]:
    """The number of chunks, and its upper bound over all sizes."""
    column = is_column(plan)
    if how.ahead is not None:
        units, wanted = programs(plan, how.ahead.tile.outer), expr(how.ahead.programs)
        longest = tiles.power_of_two(how.ahead.programs)
    elif column:
        units = programs(plan, tiles.SPLIT_COLUMNS[narrowest(plan)].outer)
        wanted, longest = expr(tiles.COLUMN_PROGRAMS[narrowest(plan)]), tiles.MOST_CHUNKS
    else:
        units, longest = programs(plan), tiles.MOST_CHUNKS
        much = floordiv(product(a.size for a in plan.axes), expr(tiles.SPLIT_ELEMENTS))
        wanted = minimum(maximum(much, tiles.FEWEST_PROGRAMS), tiles.SPLIT_PROGRAMS[narrowest(plan)])
    most = minimum(maximum(floordiv(wanted, units), ONE), expr(longest))
    least = inner.block * tiles.LEAST_STEPS if column else inner.block
    return minimum(blocks(inner.size, least), most), longest


def unsplit(plan: KernelPlan, name: str, ctx: Context) -> tuple[Function, tuple[Guard, ...]]:
    """The function of a plan that is not split, and the guards of the choice."""
    how = cut(plan, ctx)
    if how.whole is None:
        nest = Nest(plan, name, ctx)
        function = write_function(nest)
    else:
        nest = Nest(plan, name, ctx, reduction_layout(plan, ctx, loop=True, ahead=how.whole))
        nest.open_programs()
        Looped(nest, None, how.eviction).all_phases()
        function = nest.close_function(name, nest.units())
    return function, tuple(dict.fromkeys([*how.guards, *nest.guards]))


def _in_one(nest: Nest, rest: Nest, chunks: Expr, counters: Partial) -> Function:
    """The function of `nest`; the last of its programs for each tile continues with `rest`."""
    assert nest.units() == rest.units()
    nest.dtypes[counters.name] = counters.dtype
    rest.params = nest.params
    rest.open_programs(number="tile")
    write_body(rest)
    counter = nest.params.pointer(counters.name)
    tiles_there, last = (nest.params.number(n, nest.bits) for n in (nest.units(), chunks - 1))
    names = list(nest.params.known)
    nest.out.add(f"tile = ({PROGRAM} - chunk * {tiles_there}).to(tl.int32)")
    nest.out.add("tl.debug_barrier()  # what all threads stored comes before the count")
    nest.out.add(f"before = tl.atomic_add({counter} + tile, 1, sem='acq_rel', scope='gpu')")
    nest.out.open(f"if before == {last}")
    nest.out.add(f"tl.store({counter} + tile, 0)")
    nest.out.add(f"{rest.name}({', '.join(['tile', *names])})")
    nest.out.close()
    made = nest.close_function(nest.name, nest.units() * chunks)
    return dataclasses.replace(made, helpers=(function_text(rest.name, ["tile", *names], rest.body()),))


def _combine_layout(plan: KernelPlan, longest: int, itemsize: int, first: Layout | None) -> Layout:
    """The layout for combining: a row's chunks, at most `longest`, at once; for neighbouring results, a loop over
    chunks. `first`: the layout of the programs that continue, whose tiles are kept. `itemsize`: bytes of the narrowest
    element that is reduced."""
    kept, reduced = [a for a in plan.axes if not a.reduced], list(plan.reduced_axes)
    if not is_column(plan):
        return Layout(kept, [Dim(reduced, longest, "r", whole=True)], first.warps if first else 4)
    tile = tiles.COMBINE_COLUMNS
    if first is not None:
        width = first.dims[0].block
        tile = tiles.Tile(width, max(tiles.COMBINE_IN_ONE[itemsize] // width, 16), first.warps)
    outer = [a for a in kept if a.sym == plan.vector]
    scalars = [a for a in kept if a.sym != plan.vector]
    return Layout(scalars, [Dim(outer, tile.outer, "x"), Dim(reduced, tile.inner, "r", loop=True)], tile.warps)


def result_address(plan: KernelPlan, results: Expr) -> Expr:
    """The index of a chunk's result in a partial buffer: chunks are outermost, then the kept axes in their order."""
    at = expr(0)
    for a in plan.axes:
        if not a.reduced:
            at = at * a.size + expr(a.sym)
    return expr(CHUNK) * results + at


def _partials(plan: KernelPlan, nest: Nest, name: str, size: Expr) -> list[Partial]:
    out = []
    spreads = {m.number for m in moments_by_phase(plan).get(0, ())}
    for r in plan.reductions:
        if r.number in spreads:
            out += [Partial(f"{name}_{part}{r.number}", torch.float32, size) for part in moments.NAMES]
            continue
        spec, _, acc = nest.spec(r)
        out.append(Partial(f"{name}_p{r.number}", acc, size))
        if spec.index:
            out.append(Partial(f"{name}_i{r.number}", torch.int64, size))
    return out


def _write_partial(nest: Nest, chunks: Expr, at: Expr, name: str, how: Cut) -> None:
    """Emit a looped pass over a chunk that stores its accumulators. If loads are ahead, chunks take tiles in turn."""
    nest.open_programs([("chunk", chunks)])
    inner = nest.layout.dims[-1]
    along = nest.runs_along(inner)
    n = nest.params.number(inner.size, nest.bits, f"n_{inner.name}", along)
    if how.ahead is not None:
        step = nest.params.number(chunks * inner.block, nest.bits, "step", along)
        loop = Looped(nest, (f"chunk * {inner.block}", n, step), how.eviction)
    else:
        each = floordiv(floordiv(inner.size + chunks - 1, chunks) + (inner.block - 1), expr(inner.block)) * inner.block
        size = nest.params.number(each, nest.bits, "each", along)
        nest.out.add(f"low = chunk * {size}")
        nest.out.add(f"high = tl.minimum(low + {size}, {n})")
        loop = Looped(nest, ("low", "high", str(inner.block)))
    loop.phase(0)
    address = nest.address(at)
    mask = nest.mask(nest.expr_dims(at))
    masked = f", {mask}" if mask else ""
    spreads = {m.number: m for m in loop.moments.get(0, ())}
    for m in spreads.values():
        loop.join_moments(m)
        for part in moments.NAMES:
            pointer = nest.params.pointer(f"{name}_{part}{m.number}")
            nest.out.add(f"tl.store({pointer} + ({address}), {part}{m.number}{masked})")
    for r in nest.plan.reductions:
        if r.number in spreads:
            continue
        spec, _, acc = nest.spec(r)
        if spec.index:
            axis = len(nest.layout.dims) - 1
            back = "[:, None]" if axis else ""
            pair = f"(acc{r.number}, at{r.number})"
            nest.out.add(f"v{r.number}, j{r.number} = tl.reduce({pair}, {axis}, {REDUCTIONS[r.kind].folder})")
            index = nest.params.pointer(f"{name}_i{r.number}")
            nest.out.add(f"tl.store({index} + ({address}), j{r.number}{back}.to(tl.int64){masked})")
            value = f"v{r.number}{back}"
        else:
            value = nest.fold(r, f"acc{r.number}", "")
        pointer = nest.params.pointer(f"{name}_p{r.number}")
        value = f"({value}).to(tl.uint8)" if acc is torch.bool else value
        nest.out.add(f"tl.store({pointer} + ({address}), {value}{masked})")


def combine_plan(
    plan: KernelPlan, chunks: Expr, results: Expr, name: str, dtypes: dict[str, torch.dtype]
) -> KernelPlan:
    """The plan after chunks are reduced: the same reductions over the chunks' results, and the rows behind them."""
    reduced = {a.sym for a in plan.reduced_axes}
    at = result_address(plan, results)
    rows: list[Row] = []
    number: dict[int, int] = {}
    reductions: list[Reduce] = []
    spreads = {m.number: m for m in moments_by_phase(plan).get(0, ())}
    for r in plan.reductions:
        if r.number in spreads:
            reductions.append(r)  # its row is added after the centre's
            continue
        rows.append(Row("load", (), dtypes[f"{name}_p{r.number}"], (f"{name}_p{r.number}", (at,))))
        if REDUCTIONS[r.kind].index:
            rows.append(Row("load", (), torch.int64, (f"{name}_i{r.number}", (at,))))
            rows.append(Row("pair", (len(rows) - 2, len(rows) - 1), torch.int64))
        reductions.append(Reduce(r.number, r.kind, len(rows) - 1, r.dtype, 0))
    for n, row in enumerate(plan.rows):
        if plan.varies[n] & reduced and row.op != "reduced":
            continue
        if row.op == "reduced" and row.attr in spreads:
            spread, first = spreads[row.attr], len(rows)
            for part in moments.NAMES:
                rows.append(Row("load", (), torch.float32, (f"{name}_{part}{spread.number}", (at,))))
            value = combine_rows(spread, plan, rows, (first, first + 1, first + 2), number[spread.centre])
            reductions[spread.number] = dataclasses.replace(spread.total, row=value)
        number[n] = len(rows)
        rows.append(renumber(row, number))
    stores = []
    for s in plan.stores:
        if not (plan.varies[s.row] | symbols(s.address)) & reduced:
            stores.append(Store(s.buffer, renumber_expr(s.address, number), number[s.row], 1))
    kept = tuple(a for a in plan.axes if not a.reduced)
    axes = (*kept, Axis(CHUNK, chunks, reduced=True, hint=tiles.MOST_CHUNKS))
    buffers = {r.buffer: None for r in loads_in(rows)} | {s.buffer: None for s in stores}
    known = {**dict(plan.buffers), **dtypes}
    phases, varies = phases_of(axes, rows, [r.row for r in reductions])
    reductions = [dataclasses.replace(r, phase=phases[r.row]) for r in reductions]
    vector = plan.vector if is_column(plan) else CHUNK
    return dataclasses.replace(
        plan, axes=axes, vector=vector, rows=tuple(rows), phases=phases, varies=varies, stores=tuple(stores),
        reductions=tuple(reductions), buffers=tuple((b, known[b]) for b in buffers),
    )  # fmt: skip


