"""Reductions to few results: chunks of the reduced axes write partial results, the last program combines them.

The programs of a tile of results count themselves. Which one is the last differs from run to run, but not what it does:
how many chunks there are follows from sizes alone, and they are combined in the order of their numbers, so the same
inputs give the same bits. (The counters are zero before and after; see `BufferPattern`.) Where that is not better, a
second kernel combines.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from fuser.cuda import tiles
from fuser.cuda.layout import Context, Dim, Layout, blocks, is_column, narrowest, reduction_layout
from fuser.cuda.looped import Looped, write_body, write_function
from fuser.cuda.nest import Function, Nest
from fuser.cuda.text import Guard
from fuser.ir.loop_body import Row, indirect_rows, indirect_symbol, map_exprs
from fuser.ir.sizes import (
    INDIRECT,
    LOOP,
    ONE,
    Expr,
    Sym,
    expr,
    floordiv,
    maximum,
    minimum,
    product,
    substitute,
    symbols,
)  # fmt: skip
from fuser.ops import REDUCTIONS
from fuser.scheduler.plan import Axis, KernelPlan, Reduce, Store, passes
from fuser.scheduler.together import reduces_in_one_pass

CHUNK = Sym("chunk", LOOP)


@dataclass(frozen=True)
class Partial:
    """A temporary of a split reduction: `size` elements of `dtype`."""

    name: str
    dtype: torch.dtype
    size: Expr
    counters: bool = False  # zeros


def programs(plan: KernelPlan) -> Expr:
    """How many programs an unsplit, looped kernel would have."""
    kept = [a for a in plan.axes if not a.reduced]
    if not is_column(plan):
        return product(a.size for a in kept)
    others = product(a.size for a in kept if a.sym != plan.vector)
    vector = next(a for a in kept if a.sym == plan.vector)
    return others * blocks(vector.size, tiles.LOOPED_COLUMNS[narrowest(plan)].outer)


def _decision(plan: KernelPlan, ctx: Context) -> tuple[bool, list[Guard]]:
    """Whether the sizes ask for a split, and the relations that say the same of other sizes."""
    units, n = programs(plan), product(a.size for a in plan.reduced_axes)
    few = ctx.hint(units) < tiles.SPLIT_BELOW
    least = tiles.SPLIT_COLUMN_FROM if is_column(plan) else tiles.SPLIT_ROW_FROM
    if ctx.hint(n) < least:  # asked first: what else is said of such rows implies it, so it makes no further class
        return False, [("lt", n, expr(least))]
    if few:
        return True, [("lt", units, expr(tiles.SPLIT_BELOW)), ("le", expr(least), n)]
    return False, [("le", expr(tiles.SPLIT_BELOW), units)]


def wants_split(plan: KernelPlan, ctx: Context) -> bool:
    """Whether few programs would have to do much each."""
    return reduces_in_one_pass(plan) and _decision(plan, ctx)[0]


def split_guards(plan: KernelPlan, ctx: Context) -> list[Guard]:
    """What keeps the decision the same for other sizes."""
    if not reduces_in_one_pass(plan):
        return []
    return [g for g in _decision(plan, ctx)[1] if g[1].as_int() is None or g[2].as_int() is None]


def split(
    plan: KernelPlan, name: str, ctx: Context
) -> tuple[tuple[Function, ...], tuple[Partial, ...], tuple[Guard, ...]]:
    """One or two functions for `plan`, the temporaries of all programs, and what the choice rests on."""
    passing, passing_guards = _passing(plan, ctx)
    layout = reduction_layout(plan, ctx, True, passing)
    inner = layout.dims[-1]
    units = programs(plan)
    n = inner.size
    wanted = maximum(floordiv(product(a.size for a in plan.axes), expr(tiles.SPLIT_ELEMENTS)), tiles.FEWEST_PROGRAMS)
    wanted = minimum(wanted, tiles.SPLIT_PROGRAMS[narrowest(plan)])
    longest = tiles.MOST_CHUNKS
    if passing:
        wanted, longest = expr(tiles.PASSING_PROGRAMS), tiles.PASSING_CHUNKS
    most = minimum(maximum(floordiv(wanted, units), ONE), expr(longest))
    chunks = minimum(blocks(n, inner.block), most)
    each = floordiv(floordiv(n + chunks - 1, chunks) + (inner.block - 1), expr(inner.block)) * inner.block
    in_one = tiles.SPLIT_IN_ONE and not any(REDUCTIONS[r.kind].index for r in plan.reductions)
    nest = Nest(plan, name if in_one else f"{name}_partial", ctx, layout)
    results = product(a.size for a in plan.axes if not a.reduced)
    partials = _partials(plan, nest, name, results * chunks)
    dtypes = {p.name: p.dtype for p in partials}
    nest.dtypes.update(dtypes)
    _write_partial(nest, chunks, each, result_address(plan, results), name, passing)
    combined = combine_plan(plan, chunks, results, name, dtypes)
    rest = Nest(combined, f"{name}_combine", ctx, _combine_layout(combined, longest, layout if in_one else None))
    if in_one:
        counters = Partial(f"{name}_arrived", torch.int32, nest.units(), counters=True)
        partials.append(counters)
        functions: tuple[Function, ...] = (_in_one(nest, rest, chunks, counters),)
    else:
        functions = nest.close_function(nest.name, nest.units() * chunks), write_function(rest)
    guards = dict.fromkeys([*split_guards(plan, ctx), *passing_guards, *nest.params.guards, *rest.params.guards])
    return functions, tuple(partials), tuple(guards)


def _passing(plan: KernelPlan, ctx: Context) -> tuple[bool, list[Guard]]:
    """Whether what is read had better leave the second-level cache alone, and the relations that say so."""
    both = {a.sym for a in plan.axes}
    read = {r.attr[0] for n, r in enumerate(plan.rows) if r.op == "load" and plan.varies[n] == both}
    if len(read) != 1 or read & ctx.later:
        return False, []
    moved = product(a.size for a in plan.axes) * dict(plan.buffers)[min(read)].itemsize
    low, high = expr(tiles.PASSING_FROM), expr(tiles.PASSING_BELOW)
    if ctx.hint(moved) < tiles.PASSING_FROM:
        return False, [("lt", moved, low)]
    if ctx.hint(moved) >= tiles.PASSING_BELOW:
        return False, [("le", high, moved)]
    return True, [("le", low, moved), ("lt", moved, high)]


def _in_one(nest: Nest, rest: Nest, chunks: Expr, counters: Partial) -> Function:
    """The function of `nest`, the last of whose programs for each tile goes on with `rest`."""
    assert nest.units() == rest.units()
    nest.dtypes[counters.name] = counters.dtype
    rest.params = nest.params
    rest.open_programs(number="tile")
    write_body(rest)
    counter = nest.params.pointer(counters.name)
    tiles_there, last = (nest.params.number(n, nest.bits) for n in (nest.units(), chunks - 1))
    names = list(nest.params.known)
    nest.out.add(f"tile = (tl.program_id(0) - chunk * {tiles_there}).to(tl.int32)")
    nest.out.add("tl.debug_barrier()  # what all threads stored comes before the count")
    nest.out.add(f"before = tl.atomic_add({counter} + tile, 1, sem='acq_rel', scope='gpu')")
    nest.out.open(f"if before == {last}")
    nest.out.add(f"tl.store({counter} + tile, 0)")
    nest.out.add(f"{rest.name}({', '.join(['tile', *names])})")
    nest.out.close()
    made = nest.close_function(nest.name, nest.units() * chunks)
    return dataclasses.replace(made, helpers=(rest.text(rest.name, ["tile", *names]),))


def _combine_layout(plan: KernelPlan, longest: int, first: Layout | None) -> Layout:
    """All chunks of a row, at most `longest`, at once; for neighbouring results, a loop over them. `first`: programs
    have the tiles of that, whose work they go on with."""
    kept, reduced = [a for a in plan.axes if not a.reduced], list(plan.reduced_axes)
    if not is_column(plan):
        return Layout(kept, [Dim(reduced, longest, "r", whole=True)], first.warps if first else 4)
    tile = tiles.COMBINE_COLUMNS
    if first is not None:
        tile = tiles.Tile(first.dims[0].block, tiles.COMBINE_IN_ONE, first.warps)
    outer = [a for a in kept if a.sym == plan.vector]
    scalars = [a for a in kept if a.sym != plan.vector]
    return Layout(scalars, [Dim(outer, tile.outer, "x"), Dim(reduced, tile.inner, "r", loop=True)], tile.warps)


def result_address(plan: KernelPlan, results: Expr) -> Expr:
    """Where a chunk's result lies in a partial buffer: chunk after chunk, each as the kept axes run."""
    at = expr(0)
    for a in plan.axes:
        if not a.reduced:
            at = at * a.size + expr(a.sym)
    return expr(CHUNK) * results + at


def _partials(plan: KernelPlan, nest: Nest, name: str, size: Expr) -> list[Partial]:
    out = []
    for r in plan.reductions:
        spec, _, acc = nest.spec(r)
        out.append(Partial(f"{name}_p{r.number}", acc, size))
        if spec.index:
            out.append(Partial(f"{name}_i{r.number}", torch.int64, size))
    return out


def _write_partial(nest: Nest, chunks: Expr, each: Expr, at: Expr, name: str, passing: bool) -> None:
    """A looped pass over a chunk, stored unfinished."""
    nest.open_programs([("chunk", chunks)])
    size = nest.params.number(each, nest.bits, "each", True)
    n = nest.params.number(nest.layout.dims[-1].size, nest.bits, "n_r", True)
    nest.out.add(f"low = chunk * {size}")
    nest.out.add(f"high = tl.minimum(low + {size}, {n})")
    bounds = ("low", "high")
    loop = Looped(nest, bounds, 0, tiles.PASSING) if passing else Looped(nest, bounds)
    loop.phase(0)
    address = nest.address(at)
    mask = nest.mask(nest.expr_dims(at))
    masked = f", {mask}" if mask else ""
    for r in nest.plan.reductions:
        spec, _, acc = nest.spec(r)
        if spec.index:
            axis = len(nest.layout.dims) - 1
            back = "[:, None]" if axis else ""
            pair = f"(acc{r.number}, at{r.number})"
            nest.out.add(f"v{r.number}, j{r.number} = tl.reduce({pair}, {axis}, fuser_combine_{r.kind})")
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
    """What is left to do once the chunks are reduced: the same reductions over chunks, and what follows them."""
    reduced = {a.sym for a in plan.reduced_axes}
    at = result_address(plan, results)
    rows: list[Row] = []
    number: dict[int, int] = {}
    reductions: list[Reduce] = []
    for r in plan.reductions:
        rows.append(Row("load", (), dtypes[f"{name}_p{r.number}"], (f"{name}_p{r.number}", (at,))))
        if REDUCTIONS[r.kind].index:
            rows.append(Row("load", (), torch.int64, (f"{name}_i{r.number}", (at,))))
            rows.append(Row("pair", (len(rows) - 2, len(rows) - 1), torch.int64))
        reductions.append(Reduce(r.number, r.kind, len(rows) - 1, r.dtype, 0))
    for n, row in enumerate(plan.rows):
        if plan.varies[n] & reduced and row.op != "reduced":
            continue
        number[n] = len(rows)
        rows.append(_moved(row, number))
    stores = []
    for s in plan.stores:
        if not (plan.varies[s.row] | symbols(s.address)) & reduced:
            stores.append(Store(s.buffer, _moved_expr(s.address, number), number[s.row], 1))
    kept = tuple(a for a in plan.axes if not a.reduced)
    axes = (*kept, Axis(CHUNK, chunks, True, tiles.MOST_CHUNKS))
    buffers = {r.attr[0]: None for r in rows if r.op == "load"} | {s.buffer: None for s in stores}
    known = {**dict(plan.buffers), **dtypes}
    phases, varies = passes(axes, rows, [r.row for r in reductions])
    vector = plan.vector if is_column(plan) else CHUNK
    return dataclasses.replace(
        plan, axes=axes, vector=vector, rows=tuple(rows), phases=phases, varies=varies, stores=tuple(stores),
        reductions=tuple(reductions), buffers=tuple((b, known[b]) for b in buffers),
    )  # fmt: skip


def _moved(row: Row, number: dict[int, int]) -> Row:
    if indirect_rows(row):
        row = map_exprs(row, lambda e: _moved_expr(e, number))
    return Row(row.op, tuple(number[a] for a in row.args), row.dtype, row.attr)


def _moved_expr(e: Expr, number: dict[int, int]) -> Expr:
    used = {s: indirect_symbol(number[int(s.name[1:])]) for s in symbols(e) if s.kind == INDIRECT}
    return substitute(e, used) if used else e
