"""Scans: Triton's scan runs over a tile, and a carry brings in the tiles before it.

A short row is one tile. Longer rows, and columns, are looped over. Few long rows are cut into chunks: one kernel
reduces each chunk, a second scans each chunk with the totals of the chunks before it.
"""

from __future__ import annotations

import torch

from fuser.cuda import tiles
from fuser.cuda.layout import Context, Dim, Layout, blocks, narrowest, row_class
from fuser.cuda.looped import Looped
from fuser.cuda.nest import Function, Nest
from fuser.cuda.split import CHUNK, Partial, result_address
from fuser.cuda.text import Guard
from fuser.ir.loop_body import compute_dtype
from fuser.ir.sizes import LOOP, ONE, Expr, Sym, expr, floordiv, maximum, minimum, product, rows_in, substitute
from fuser.ops import SCANS, TRITON_TYPES, triton_convert, triton_number, triton_store
from fuser.scheduler.kernel_plan import KernelPlan

EARLIER = Sym("earlier", LOOP)
Written = tuple[tuple[Function, ...], tuple[Partial, ...], tuple[Guard, ...]]


def write_scan(plan: KernelPlan, name: str, ctx: Context) -> Written:
    """The kernels of a scan's plan, their temporaries, and the guards of this choice."""
    if not plan.reduced_axes:
        nest = Scan(plan, name, ctx)
        nest.open_programs()
        nest.of_one()
        return (nest.close_function(name, nest.units()),), (), tuple(dict.fromkeys(nest.guards))
    layout, guards, cut = scan_layout(plan, ctx)
    nest = Scan(plan, name, ctx, layout)
    if cut is not None:
        return _in_chunks(nest, name, *cut, guards)
    nest.open_programs()
    if nest.loop_dim is None:
        nest.tile()
    else:
        nest.start_carry()
        nest.loop(None, stores=True)
    return (nest.close_function(name, nest.units()),), (), tuple(dict.fromkeys([*guards, *nest.guards]))


def scan_layout(plan: KernelPlan, ctx: Context) -> tuple[Layout, list[Guard], tuple[Expr, Expr] | None]:
    """The layout of a scan, its guards, and, if it is cut, the number of chunks and their length."""
    kept, reduced = [a for a in plan.axes if not a.reduced], list(plan.reduced_axes)
    n = product(a.size for a in reduced)
    assert plan.ordered is not None
    places = SCANS[plan.ordered.how].index
    rows = tiles.SCANNED_PLACES if places else tiles.SCANNED_ROWS
    if plan.vector is not None:
        outer = [a for a in kept if a.sym == plan.vector]
        scalars = [a for a in kept if a.sym != plan.vector]
        short = ctx.hint(n) <= tiles.SHORT_COLUMN
        table = tiles.PLACED_COLUMNS if places else tiles.SCANNED_COLUMNS
        tile = (tiles.SCANNED_SHORT_COLUMNS if short else table)[narrowest(plan)]
        length: Guard = ("le", n, expr(tiles.SHORT_COLUMN)) if short else ("lt", expr(tiles.SHORT_COLUMN), n)
        below = tiles.SPLIT_BELOW if short else tiles.SCAN_COLUMNS_BELOW
        tile, least = tiles.shrunk(tile, ctx.smaller), tiles.SPLIT_COLUMN_FROM
        units = product(a.size for a in scalars) * blocks(outer[0].size, tile.outer)
        layout = Layout(scalars, [Dim(outer, tile.outer, "x"), Dim(reduced, tile.inner, "r", loop=True)], tile.warps)
    else:
        whole = tiles.fewer(tiles.scanned_row(ctx.hint(n), rows), ctx.smaller)
        whole = tiles.varied(whole, ctx.variant, warps=False) if whole is not None else None
        if whole is not None:
            dims = [Dim(reduced, whole.inner, "r", whole=True)]
            if whole.outer > 1 and kept:
                dims.insert(0, Dim(kept, whole.outer, "x"))
            scalars = [] if len(dims) == 2 else kept
            elements = whole.outer * whole.inner if len(dims) == 2 else whole.inner
            # No more threads than elements: the others would repeat the same scan.
            warps = max(min(whole.warps, elements // 64), 1)
            return Layout(scalars, dims, warps), row_class(n, whole.inner, tiles.SHORTEST_ROW), None
        looped = tiles.LOOPED_SCAN_ODD if tiles.divisor_of(ctx.hint(n)) < 4 else tiles.LOOPED_SCAN
        tile = tiles.shrunk((tiles.LOOPED_PLACES if places else looped)[narrowest(plan)], ctx.smaller)
        least, below = tiles.SPLIT_ROW_FROM, tiles.SPLIT_BELOW
        units = product(a.size for a in kept)
        layout = Layout(kept, [Dim(reduced, tile.inner, "r", loop=True)], tile.warps)
    guards: list[Guard] = []
    if plan.vector is None:
        longest = rows[-1][0]
        far = ctx.hint(n) > longest
        guards += [("lt", expr(longest), n)] if far else row_class(n, tiles.power_of_two(ctx.hint(n)), 1)
    else:
        guards.append(length)
    few = ctx.hint(units) < below
    if not few:
        return layout, [*guards, ("le", expr(below), units)], None
    if ctx.hint(n) < least:
        return layout, [*guards, ("lt", n, expr(least))], None
    most = minimum(maximum(floordiv(expr(tiles.SCAN_PROGRAMS), units), ONE), expr(tiles.MOST_CHUNKS))
    chunks = minimum(blocks(n, tile.inner), most)
    each = blocks(floordiv(n + chunks - 1, chunks), tile.inner) * tile.inner
    return layout, [*guards, ("lt", units, expr(below)), ("le", expr(least), n)], (chunks, each)


def _in_chunks(nest: Scan, name: str, chunks: Expr, each: Expr, guards: list[Guard]) -> Written:
    plan, ctx, layout = nest.plan, nest.ctx, nest.layout
    results = product(a.size for a in plan.axes if not a.reduced)
    at = result_address(plan, results)
    partials = [Partial(f"{name}_p{k}", d, results * chunks) for k, d in enumerate(nest.dtypes_scanned)]
    out = []
    for part in ("reduce", "scan"):
        nest = Scan(plan, f"{name}_{part}", ctx, layout)
        nest.dtypes.update({p.name: p.dtype for p in partials})
        nest.open_programs([("chunk", chunks)])
        size = nest.params.number(each, nest.bits, "each", matters=True)
        n = nest.params.number(layout.dims[-1].size, nest.bits, "n_r", matters=True)
        nest.out.add(f"low = chunk * {size}")
        nest.out.add(f"high = tl.minimum(low + {size}, {n})")
        nest.start_carry()
        if part == "reduce":
            nest.loop(("low", "high"), stores=False)
            nest.keep_carry(partials, at)
        else:
            nest.take_carry(partials, at)
            nest.loop(("low", "high"), stores=True)
        out.append(nest.close_function(nest.name, nest.units() * chunks))
        guards = [*guards, *nest.guards]
    return tuple(out), tuple(partials), tuple(dict.fromkeys(guards))


class Scan(Nest):
    """Writes one kernel of a scan over values, or over pairs of a value and its index."""

    def __init__(self, plan: KernelPlan, name: str, ctx: Context, layout: Layout | None = None) -> None:
        super().__init__(plan, name, ctx, layout)
        assert plan.ordered is not None
        self.kind = plan.ordered.how
        (self.goal,) = plan.stores
        row = plan.rows[self.goal.row]
        self.scanned = row.args if row.op == "pair" else (self.goal.row,)
        source = plan.rows[self.scanned[0]].dtype
        spec = SCANS[self.kind]
        # Float sums are accumulated in float32, as in eager on this device. Triton scans nothing narrower than 32
        # bits.
        self.acc = source if source.is_floating_point else spec.accumulate(source)
        self.start = triton_number(spec.identity(self.acc), self.acc)
        if self.acc.itemsize < 4:
            self.acc = torch.int32
        self.function = spec.folder

    @property
    def dtypes_scanned(self) -> tuple[torch.dtype, ...]:
        """The dtypes of the scanned values and indices."""
        return (self.acc, self.index_dtype)[: len(self.scanned)]

    @property
    def parts(self) -> tuple[tuple[str, torch.dtype, str], ...]:
        """For a value and its index: a letter for names, the dtype, and the identity."""
        return tuple(zip("vi", self.dtypes_scanned, (self.start, "-1")))

    def of_one(self) -> None:
        """Emit a scan along a dim of size 1: each result is its own value."""
        for n in range(len(self.plan.rows)):
            self.emit(n)
        self.put(f"t{self.scanned[-1]}", self.plan.rows[self.scanned[-1]].dtype)

    def tile(self) -> None:
        """Emit a scan whose rows are one tile."""
        for n in range(len(self.plan.rows)):
            self.emit(n)
        self.read_tile()
        self.scan(carried=False)
        self.put(f"y{self.parts[-1][0]}", self.dtypes_scanned[-1])

    def loop(self, bounds: tuple[str, str] | None, stores: bool) -> None:
        """Emit the loop over tiles: each is added to the carry, and scanned if it `stores` results."""
        long = self.axis and self.layout.dims[-1].block > tiles.SCANNED_SHORT_COLUMNS[4].inner
        stages = tiles.PLACED_STAGES if len(self.parts) > 1 and not self.axis else tiles.SCAN_STAGES
        chunk = (*bounds, str(self.layout.dims[-1].block)) if bounds else None
        looped = Looped(self, chunk, stages=tiles.COLUMN_SCAN_STAGES if long else stages)
        roots = [*self.scanned, *rows_in(self.goal.address)]
        looped.outer_rows(0)
        looped.open_loop(False)
        for n in self.plan.passes.closure(roots):
            self.emit(n)
        self.read_tile()
        if stores:
            self.scan(carried=True)
            self.put(f"y{self.parts[-1][0]}", self.dtypes_scanned[-1])
        self.add_to_carry("x", scanned=stores)
        self.out.close()

    def read_tile(self) -> None:
        """Declare the tile to scan, with identities beyond the end of the row."""
        inner = f"m{self.layout.dims[-1].name}"
        for row, (letter, dtype, start) in zip(self.scanned, self.parts):
            text = triton_convert(self.plan.rows[row].dtype, dtype, f"t{row}")
            self.out.add(f"x{letter} = tl.broadcast_to(tl.where({inner}, {text}, {start}), {self.shape()})")

    @property
    def axis(self) -> int:
        """The tile dim along which the scan runs."""
        return len(self.layout.dims) - 1

    def scan(self, carried: bool) -> None:
        """Declare the tile's scan `y`, combined with the carry. An index is the last whose value is the extreme so
        far."""
        for n, (letter, _, _) in enumerate(self.parts):
            source = f"x{letter}"
            if n:
                self.out.add(f"last_{letter} = {self.places('xv', 'yv', source)}")
                source, function = f"last_{letter}", "fuser_combine_max"
            else:
                function = self.function
            self.out.add(f"y{letter} = tl.associative_scan({source}, {self.axis}, {function})")
            if carried:
                self.out.add(f"y{letter} = {function}(carry_{letter}, y{letter})")

    def places(self, values: str, extreme: str, places: str) -> str:
        """The indices at which values are the extreme; -1 elsewhere. NaN counts as extreme."""
        nan = f"({values} != {values}) | " if self.acc.is_floating_point else ""
        return f"tl.where({nan}({values} == {extreme}), {places}, -1)"

    def add_to_carry(self, prefix: str, scanned: bool = False) -> None:
        """Combine the tile `prefix` with the carry. `scanned`: the indices of its extremes are computed already."""
        for n, (letter, _, _) in enumerate(self.parts):
            source = f"{prefix}{letter}"
            if n and not scanned:
                self.out.add(f"last_{letter} = {self.places(f'{prefix}v', 'carry_v', source)}")
            if n:
                source, function = f"last_{letter}", "fuser_combine_max"
            else:
                function = self.function
            reduced = f"tl.reduce({source}, {self.axis}, {function}, keep_dims=True)"
            self.out.add(f"carry_{letter} = {function}(carry_{letter}, {reduced})")

    @property
    def carry_shape(self) -> str:
        """The shape of the carry."""
        return f"[{self.layout.dims[0].block}, 1]" if self.axis else "[1]"

    def start_carry(self) -> None:
        """Declare a carry of identities."""
        for letter, dtype, start in self.parts:
            self.out.add(f"carry_{letter} = tl.full({self.carry_shape}, {start}, {TRITON_TYPES[dtype]})")

    def keep_carry(self, partials: list[Partial], at: Expr) -> None:
        """Store a chunk's total."""
        mask = self.mask(self.expr_dims(at))
        for p, (letter, _, _) in zip(partials, self.parts):
            place = f"{self.address(at)} + tl.zeros({self.carry_shape}, tl.int{self.bits})"
            target = f"{self.params.pointer(p.name)} + ({place})"
            self.out.add(f"tl.store({target}, carry_{letter}{', ' + mask if mask else ''})")

    def take_carry(self, partials: list[Partial], at: Expr) -> None:
        """Combine the totals of all earlier chunks into the carry."""
        block = self.layout.dims[-1].block if self.axis else tiles.MOST_CHUNKS
        index = "[None, :]" if self.axis else ""
        self.out.open(f"for earlier0 in range(0, chunk, {block})")
        self.out.add(f"{EARLIER.name} = earlier0 + tl.arange(0, {block}){index}")
        before = substitute(at, {CHUNK: expr(EARLIER)})
        mask = self.mask(self.expr_dims(at), "(earlier < chunk)")
        for p, (letter, _, start) in zip(partials, self.parts):
            source = f"{self.params.pointer(p.name)} + ({self.address(before)})"
            self.out.add(f"p{letter} = tl.load({source}, {mask}, other={start})")
        self.add_to_carry("p")
        self.out.close()

    def put(self, text: str, dtype: torch.dtype) -> None:
        """Store the result of each element of the tile."""
        own = self.dtypes[self.goal.buffer]
        value = triton_store(own, triton_convert(dtype, compute_dtype(own), text))
        mask = self.mask(range(len(self.layout.dims)))
        target = f"{self.params.pointer(self.goal.buffer)} + ({self.address(self.goal.address)})"
        self.out.add(f"tl.store({target}, {value}{', ' + mask if mask else ''})")
