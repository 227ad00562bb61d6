"""A matrix product whose results go through the fused rows of a kernel before they are stored.

The lowering has no products. In a product's place is an outer product of the first column of `a` and the first row of
`b`: it has the product's sizes, and its two loads show how addresses run along rows and columns. The kernel written
here sums along the inner axis instead, and then emits the remaining rows: bias, activation, residual, scale, casts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from fuser.cuda import fused_kernel
from fuser.cuda.codegen import Generated
from fuser.cuda.layout import Context, Dim, Layout, blocks
from fuser.cuda.nest import PROGRAM, Function, Nest
from fuser.errors import Unsupported
from fuser.ir.loop_body import indirect_rows
from fuser.ir.sizes import Expr, product
from fuser.lazy_dataclasses import dataclass
from fuser.lowering.graph import Lowered
from fuser.lowering.inputs import TensorInput
from fuser.reasons import because
from fuser.scheduler.kernel_plan import Axis, KernelPlan
from fuser.scheduler.schedule import Schedule

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
GROUP = 8  # blocks of rows that share the cached blocks of `b`
PRECISIONS = ("ieee", "tf32")


@dataclass(frozen=True)
class MatmulTile:
    """A program's tile: `rows` × `columns` results, in steps of `inner`, by `warps` warps with `stages` in flight."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}x{self.inner} warps {self.warps} stages {self.stages}"


# The tiles that race, by the largest number of rows they are for; a table for each element size.
HALVES: tuple[tuple[int, tuple[MatmulTile, ...]], ...] = (
    (16, (MatmulTile(16, 32, 256, 4, 4), MatmulTile(16, 64, 128, 4, 5), MatmulTile(16, 128, 128, 4, 4))),
    (32, (MatmulTile(32, 32, 128, 4, 5), MatmulTile(32, 64, 128, 4, 4), MatmulTile(16, 64, 128, 4, 5))),
    (64, (MatmulTile(64, 32, 128, 4, 5), MatmulTile(64, 64, 128, 4, 4), MatmulTile(64, 64, 64, 4, 5),
          MatmulTile(32, 64, 128, 4, 4))),
    (256, (MatmulTile(64, 64, 64, 4, 5), MatmulTile(64, 128, 64, 4, 4), MatmulTile(128, 64, 64, 4, 4),
           MatmulTile(128, 128, 64, 8, 4))),
    (1 << 62, (MatmulTile(128, 256, 64, 8, 3), MatmulTile(128, 128, 64, 8, 4), MatmulTile(128, 128, 64, 4, 3),
               MatmulTile(128, 64, 64, 4, 4))),
)  # fmt: skip
SINGLES: tuple[tuple[int, tuple[MatmulTile, ...]], ...] = (
    (32, (MatmulTile(16, 64, 64, 4, 4), MatmulTile(32, 32, 64, 4, 4))),
    (1 << 62, (MatmulTile(64, 64, 32, 4, 4), MatmulTile(128, 64, 32, 4, 4), MatmulTile(128, 128, 32, 8, 3))),
)


def precision() -> str:
    """The precision of float32 products by torch's settings: "tf32" or "ieee"."""
    try:
        return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    except RuntimeError:  # both torch's old names and its new ones were set
        return "ieee"


def candidates(rows: int, dtype: torch.dtype) -> tuple[MatmulTile, ...]:
    """The tiles that race for products of `rows` rows."""
    table = SINGLES if dtype.itemsize == 4 else HALVES
    return next(tiles for most, tiles in table if rows <= most)


def rows_class(rows: int) -> int:
    """The power of two, at least 16, that holds `rows`; products of one class share a choice."""
    return max(16, 1 << max(rows - 1, 0).bit_length())


@dataclass(frozen=True)
class Product:
    """The outer product in a plan: its row, those of its two loads, and the axes along which each varies."""

    row: int
    a: int
    b: int
    batch: tuple[Axis, ...]
    rows: tuple[Axis, ...]
    columns: tuple[Axis, ...]


def find_product(plan: KernelPlan) -> Product:
    """The outer product of `in0` and `in1`, read by each element once. Unsupported if the plan has another form."""
    if plan.reductions or plan.ordered is not None:
        raise Unsupported("what follows the matmul is no elementwise computation")
    loads: list[list[int]] = [
        [i for i, r in enumerate(plan.rows) if r.op == "load" and r.buffer == name] for name in ("in0", "in1")
    ]
    if [len(found) for found in loads] != [1, 1]:
        raise Unsupported("what follows reads the matmul's results elsewhere than where it puts its own")
    (a,), (b,) = loads
    readers = [i for i, r in enumerate(plan.rows) if a in r.args or b in r.args or {a, b} & set(indirect_rows(r))]
    if len(readers) != 1 or plan.rows[readers[0]].traits.sign != "*" or set(plan.rows[readers[0]].args) != {a, b}:
        raise Unsupported("the matmul's operands are read by what follows")
    if plan.rows[a].args or plan.rows[b].args:
        raise Unsupported("the matmul is computed for a part of what follows")
    along_a, along_b = plan.varies[a], plan.varies[b]
    batch = tuple(x for x in plan.axes if x.sym in along_a and x.sym in along_b)
    rows = tuple(x for x in plan.axes if x.sym in along_a and x.sym not in along_b)
    columns = tuple(x for x in plan.axes if x.sym in along_b and x.sym not in along_a)
    if len(batch) + len(rows) + len(columns) != len(plan.axes):
        raise Unsupported("what follows has more elements than the matmul")
    if not rows or not columns:
        raise Unsupported("the matmul has one row or one column")
    return Product(readers[0], a, b, batch, rows, columns)


@dataclass(frozen=True)
class Inner:
    """The inner axis: its size, and its stride in each operand."""

    size: Expr
    a: Expr
    b: Expr


class MatmulNest(Nest):
    """Writes one kernel: blocks in a cache-friendly order, the loop along the inner axis, the remaining rows."""

    def __init__(
        self, plan: KernelPlan, name: str, ctx: Context, inner: Inner, tile: MatmulTile, precision: str
    ) -> None:
        self.product, self.inner, self.tile, self.precision = find_product(plan), inner, tile, precision
        dims = [Dim([*self.product.rows], tile.rows, "y"), Dim([*self.product.columns], tile.columns, "x")]
        super().__init__(plan, name, ctx, Layout([*self.product.batch], dims, tile.warps))
        self.contiguous = {plan.vector} if plan.vector is not None else set()
        fits = [self.divides(d.size, d.block) for d in dims]
        self.whole = {d.name for d, fit in zip(dims, fits) if fit}
        self.even = self.divides(inner.size, tile.inner)

    def write(self) -> Function:
        """The whole kernel."""
        self.open_blocks()
        self.add_up()
        own = {self.product.a, self.product.b}
        for n in range(len(self.plan.rows)):
            if n == self.product.row:
                self.out.add(f"t{n} = total")
            elif n not in own:
                self.emit(n)
        for s in self.plan.stores:
            self.store(s)
        function = self.close_function(self.name, self.units())
        return replace(function, work=function.work * self.inner.size, stages=self.tile.stages)

    def open_blocks(self) -> None:
        """Compute which block of results a program has: consecutive programs share blocks of `b`."""
        y, x = self.layout.dims
        n_y = self.params.number(blocks(y.size, y.block), self.bits, "n_by")
        n_x = self.params.number(blocks(x.size, x.block), self.bits, "n_bx")
        self.out.add(f"pid = {PROGRAM}" + (".to(tl.int64)" if self.bits == 64 else ""))
        if self.layout.scalars:
            self.out.add(f"rest = pid // ({n_y} * {n_x})")
            self.out.add(f"pid = pid % ({n_y} * {n_x})")
            for axis in reversed(self.layout.scalars[1:]):
                n = self.params.number(axis.size, self.bits, f"n_{axis.sym.name}")
                self.out.add(f"{axis.sym.name} = rest % {n}")
                self.out.add(f"rest = rest // {n}")
            self.out.add(f"{self.layout.scalars[0].sym.name} = rest")
        self.out.add(f"first = pid // ({GROUP} * {n_x}) * {GROUP}")
        self.out.add(f"high = tl.minimum({n_y} - first, {GROUP})")
        self.out.add(f"by = first + pid % ({GROUP} * {n_x}) % high")
        self.out.add(f"bx = pid % ({GROUP} * {n_x}) // high")
        for d in self.layout.dims:
            self.open_dim(d, f"b{d.name} * {d.block} + ")

    def units(self) -> Expr:
        """The number of programs."""
        return product([*(blocks(d.size, d.block) for d in self.layout.dims), *(a.size for a in self.layout.scalars)])

    def add_up(self) -> None:
        """Emit the loop along the inner axis, with a float32 total."""
        add = self.out.add
        n = self.params.number(self.inner.size, self.bits, "n_k", matters=True)
        by_a = self.params.number(self.inner.a, self.bits, "s_ak", matters=True)
        by_b = self.params.number(self.inner.b, self.bits, "s_bk", matters=True)
        rows = self.plan.rows
        wide = ".to(tl.int64)" if self.bits == 64 else ""
        add(f"k = tl.arange(0, {self.tile.inner}){wide}")
        operands = (("a", self.product.a, "[None, :]", by_a), ("b", self.product.b, "[:, None]", by_b))
        for name, row, index, stride in operands:
            load = rows[row]
            add(f"{name} = {self.params.pointer(load.buffer)} + ({self.address(load.address)}) + k{index} * {stride}")
        add(f"total = tl.zeros([{self.tile.rows}, {self.tile.columns}], tl.float32)")
        self.out.open(f"for k0 in range(0, {n}, {self.tile.inner})")
        for name, dim, index in (("a", "y", "[None, :]"), ("b", "x", "[:, None]")):
            masks = [] if dim in self.whole else [f"m{dim}"]
            masks += [] if self.even else [f"(k0 + k < {n}){index}"]
            options = f", {' & '.join(masks)}, other=0.0" if masks else ""
            add(f"{name}k = tl.load({name}{options})")
        add(f"total = tl.dot(ak, bk, total, input_precision='{self.precision}')")
        add(f"a += {self.tile.inner} * {by_a}")
        add(f"b += {self.tile.inner} * {by_b}")
        self.out.close()

    def mask(self, dims: Iterable[int], *more: str) -> str:
        """The mask of an access along `dims`, leaving out dims that blocks cover exactly."""
        return super().mask([i for i in dims if self.layout.dims[i].name not in self.whole], *more)


def generate(
    lowered: Lowered, schedule: Schedule, single: bool, tile: MatmulTile, precision: str, comment: str = ""
) -> fused_kernel.Source:
    """The source of a product of inputs 0 and 1 and its epilogue. Unsupported if that is not one elementwise kernel.

    `lowered` has the outer product in the product's place (`outer_product` in `fuser.frontends.matmuls`).
    """
    if len(schedule.plans) != 1:
        raise Unsupported("what follows the matmul takes several kernels")
    a, b = lowered.inputs[:2]
    if not isinstance(a, TensorInput) or not isinstance(b, TensorInput) or a.dtype is not b.dtype:
        raise Unsupported(because("dtype", "the matmul's operands differ in dtype"))
    if a.dtype not in DTYPES or precision not in PRECISIONS:
        raise Unsupported(f"a matmul of {a.dtype} in {precision}")
    canon = lowered.ctx.canon
    inner = Inner(canon(a.size[-1]), canon(a.stride[-1]), canon(b.stride[-2]))
    same = ("eq", inner.size, canon(b.size[-2]))

    def write(plan: KernelPlan, name: str, ctx: Context) -> Generated:
        nest = MatmulNest(plan, name.replace("pw", "matmul"), ctx, inner, tile, precision)
        function = nest.write()
        return Generated((function,), (), tuple(dict.fromkeys([same, *nest.guards])))

    source = fused_kernel.generate(lowered, schedule, single, comment, write)
    return replace(source, again=None)  # a tile that spills or does not fit loses the race
