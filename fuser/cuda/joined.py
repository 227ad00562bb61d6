"""Row reductions that also accumulate column sums: a norm's gradients in one pass over memory.

A program takes a share of the rows, a few at a time in registers, with a tile of running results for the columns. It
stores these at its end, and a second kernel combines those of all programs in a fixed order. The rows of a program
depend on sizes alone: the same inputs give the same bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import torch

from fuser.cuda import tiles
from fuser.cuda.layout import Context, Dim, Layout, blocks, row_class
from fuser.cuda.looped import write_function
from fuser.cuda.nest import PROGRAM, Function, Nest
from fuser.cuda.split import CHUNK, Partial, combine_plan
from fuser.cuda.text import Guard
from fuser.ir.loop_body import indirect_rows
from fuser.ir.sizes import Expr, expr, minimum, product
from fuser.ops import REDUCTIONS, TRITON_TYPES, triton_combine, triton_folder, triton_number
from fuser.scheduler.kernel_plan import Axis, KernelPlan, Reduce
from fuser.scheduler.together import Joined

ROWS, COLUMNS = 0, 1  # the tile's dims


def fits(joined: Joined, ctx: Context) -> tiles.Walk | None:
    """The tile and programs that go over the rows; None if a row is too long or a reduction has no such form."""
    plan = joined.plan
    dtypes = dict(plan.buffers)
    both = {a.sym for a in plan.axes}
    loaded = [dtypes[r.buffer].itemsize for n, r in enumerate(plan.rows) if r.op == "load" and plan.varies[n] == both]
    if any(REDUCTIONS[r.kind].index for r in (*plan.reductions, *joined.columns)):
        return None
    accumulators = [_accumulator(plan, r) for r in joined.columns]
    if any(a is torch.bool or a.itemsize > 4 for a in accumulators):
        return None
    n = product(a.size for a in plan.reduced_axes)
    held = sum(loaded) + sum(a.itemsize for a in accumulators)
    return tiles.walk(ctx.hint(n), sum(loaded), len(loaded) + len(accumulators), held, ctx.smaller)


def _accumulator(plan: KernelPlan, r: Reduce) -> torch.dtype:
    return REDUCTIONS[r.kind].accumulate(plan.rows[r.row].dtype)


def write_joined(
    joined: Joined, walk: tiles.Walk, name: str, ctx: Context
) -> tuple[tuple[Function, ...], tuple[Partial, ...], tuple[Guard, ...]]:
    """Two functions, one over rows and one over the programs' results; their temporaries; the guards of the choice."""
    plan = joined.plan
    rows = [a for a in plan.axes if not a.reduced]
    n, results = product(a.size for a in rows), product(a.size for a in plan.reduced_axes)
    tile = walk.tile
    layout = Layout([], [Dim(rows, tile.outer, "x"), Dim(list(plan.reduced_axes), tile.inner, "r", whole=True)],
                    tile.warps, row_class(results, tile.inner, tiles.SHORTEST_ROW))  # fmt: skip
    nest = Nest(plan, name, ctx, layout)
    chunks = minimum(blocks(n, tile.outer), expr(walk.programs))
    partials = [Partial(f"{name}_p{r.number}", _accumulator(plan, r), results * chunks) for r in joined.columns]
    dtypes = {p.name: p.dtype for p in partials}
    nest.dtypes.update(dtypes)
    first = _Walking(nest, joined, walk).function(partials, chunks, results)
    combined = combine_plan(joined.down, chunks, results, name, dtypes)
    rest = Nest(combined, f"{name}_combine", ctx, _combine_layout(combined))
    second = write_function(rest)
    guards = dict.fromkeys([*nest.guards, *rest.params.guards])
    return (first, second), tuple(partials), tuple(guards)


def _combine_layout(plan: KernelPlan) -> Layout:
    tile = tiles.COMBINE_PROGRAMS
    kept, reduced = [a for a in plan.axes if not a.reduced], list(plan.reduced_axes)
    return Layout([], [Dim(kept, tile.outer, "x"), Dim(reduced, tile.inner, "r", loop=True)], tile.warps)


class _Walking:
    """Writes the kernel that goes over the rows."""

    def __init__(self, nest: Nest, joined: Joined, walk: tiles.Walk) -> None:
        self.nest, self.plan, self.columns, self.walk, self.out = nest, nest.plan, joined.columns, walk, nest.out

    def function(self, partials: list[Partial], chunks: Expr, results: Expr) -> Function:
        """The complete kernel."""
        nest, out = self.nest, self.out
        rows, columns = nest.layout.dims
        out.add(f"{CHUNK.name} = {PROGRAM}{'.to(tl.int64)' if nest.bits == 64 else ''}")
        nest.open_dim(columns, "")
        self.rows(hoisted=True)
        for r in self.columns:
            acc = _accumulator(self.plan, r)
            start = triton_number(REDUCTIONS[r.kind].identity(acc), acc)
            out.add(f"acc{r.number} = tl.full({nest.shape()}, {start}, {TRITON_TYPES[acc]})")
        n = nest.params.number(rows.size, nest.bits, f"n_{rows.name}")
        step = nest.params.number(chunks * rows.block, nest.bits, "step")
        ahead = self.ahead() if self.walk.by_hand else []
        if ahead:
            self.load(ahead, f"{CHUNK.name} * {rows.block} + ")
        stages = 1 if ahead else nest.ctx.variant.stages or tiles.WALK_STAGES
        out.open(f"for x0 in tl.range({CHUNK.name} * {rows.block}, {n}, {step}, num_stages={stages})")
        for at in ahead:
            out.add(f"t{at} = {nest.loaded(self.plan.rows[at], f'next{at}')}")
        if ahead:
            self.load(ahead, f"x0 + {step} + ")
        nest.open_dim(rows, "x0 + ")
        self.rows(hoisted=False, known=ahead)
        for s in self.plan.stores:
            nest.store(s)
        for r in self.columns:
            self.accumulate(r)
        out.close()
        for r, p in zip(self.columns, partials):
            self.keep(r, p, results)
        made = nest.close_function(nest.name, chunks)
        return dataclasses.replace(made, registers=tiles.WALK_REGISTERS)

    def ahead(self) -> list[int]:
        """Loads of whole tiles whose addresses depend on no other row: they can be issued a step ahead."""
        both = frozenset((ROWS, COLUMNS))
        rows = enumerate(self.plan.rows)
        return [n for n, r in rows if r.op == "load" and not r.args and not indirect_rows(r) and
                self.nest.row_dims(n) == both]  # fmt: skip

    def load(self, loads: list[int], start: str) -> None:
        """Load the tiles of a step into registers."""
        self.nest.open_dim(self.nest.layout.dims[ROWS], start)
        for n in loads:
            self.out.add(f"next{n} = {self.nest.load_stored(self.plan.rows[n])}")

    def rows(self, hoisted: bool, known: Collection[int] = ()) -> None:
        """Emit the rows that do not vary along the tile's rows (`hoisted`), or the others except `known` ones."""
        for n, row in enumerate(self.plan.rows):
            if (ROWS in self.nest.row_dims(n)) is hoisted or n in known:
                continue
            if row.op == "reduced":
                r = self.plan.reductions[row.attr]
                self.nest.result(n, r, *self.nest.reduced_inputs(r))
            else:
                self.nest.emit(n)

    def accumulate(self, r: Reduce) -> None:
        """Combine the tile's values with the running results of the columns."""
        acc, k = _accumulator(self.plan, r), r.number
        identity = triton_number(REDUCTIONS[r.kind].identity(acc), acc)
        value = f"t{r.row}.to({TRITON_TYPES[acc]})"
        inside = self.nest.mask([ROWS])
        self.out.add(f"y{k} = tl.broadcast_to(tl.where({inside}, {value}, {identity}), {self.nest.shape()})")
        self.out.add(f"acc{k} = {triton_combine(r.kind, acc, f'acc{k}', f'y{k}')}")

    def keep(self, r: Reduce, p: Partial, results: Expr) -> None:
        """Store this program's result for each column."""
        k, nest = r.number, self.nest
        value = f"acc{k}"
        if nest.layout.dims[ROWS].block > 1:
            adds = REDUCTIONS[r.kind].adds
            fold = f"tl.sum({value}, 0)" if adds else f"tl.reduce({value}, 0, {triton_folder(r.kind)})"
            value = f"{fold}[None, :]"
        at = expr(CHUNK) * results
        for a in nest.layout.dims[COLUMNS].axes:
            at = at + expr(a.sym) * _below(nest.layout.dims[COLUMNS].axes, a)
        self.out.add(f"tl.store({nest.params.pointer(p.name)} + ({nest.address(at)}), {value}, {nest.mask([COLUMNS])})")


def _below(axes: list[Axis], axis: Axis) -> Expr:
    return product(a.size for a in axes[axes.index(axis) + 1 :])
