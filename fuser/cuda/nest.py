"""One Triton kernel for one loop nest: rows, masks, loads and stores, and the folds of reductions."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

import torch

from fuser.cuda.layout import (
    Context,
    Dim,
    Layout,
    blocks,
    is_column,
    pointwise_layout,
    reduction_layout,
)  # fmt: skip
from fuser.cuda.random import EACH, NEIGHBOURS, find_quads, least_word
from fuser.cuda.text import Guard, Lines, Param, Params, triton_expr
from fuser.cuda.windows import Windows, find_windows
from fuser.errors import Unsupported
from fuser.ir.loop_body import Row, is_checked
from fuser.ir.sizes import INDIRECT, LOOP, Expr, Sym, expr, mod, product, rows_in, symbols
from fuser.lazy_dataclasses import dataclass
from fuser.ops import (
    FLOAT8,
    REDUCTIONS,
    TRITON_TYPES,
    ReductionRow,
    triton_cell,
    triton_constant,
    triton_convert,
    triton_folder,
    triton_load,
    triton_number,
    triton_store,
)  # fmt: skip
from fuser.scheduler.kernel_plan import KernelPlan, Reduce, Store

_EXPONENTS = 100  # powers of two up to this have normal reciprocals


PROGRAM = "@program"  # no Python, so never part of another word


@dataclass(frozen=True)
class Function:
    """One kernel and its launch: `units` programs of `warps` warps, with `params` as arguments.

    Its lines are those of `opening`, then of `body`. In the latter, `PROGRAM` stands for the program's `number`.
    """

    name: str
    body: str
    units: Expr
    work: Expr
    params: tuple[Param, ...]
    warps: int
    checked: bool  # it asserts that indices are in bounds
    stages: int = 0  # pipelined steps of its loop; 0: Triton's default
    registers: int = 0  # most registers of a thread; 0: no limit
    helpers: tuple[str, ...] = ()  # texts of functions that it calls
    unordered: bool = False  # atomics combine its results in no order
    opening: str = ""
    number: str = "tl.program_id(0)"

    @property
    def text(self) -> str:
        """The complete text."""
        body = self.body.replace(PROGRAM, self.number)
        return function_text(self.name, [p.name for p in self.params], self.opening + body)


def function_text(name: str, arguments: Iterable[str], body: str) -> str:
    """The text of a function."""
    return f"@triton.jit\ndef {name}({', '.join(arguments)}):\n{body}"


class Nest:
    """Writes one kernel for a plan."""

    def __init__(self, plan: KernelPlan, name: str, ctx: Context, layout: Layout | None = None) -> None:
        self.plan, self.name, self.ctx = plan, name, ctx
        self.dtypes = dict(plan.buffers)
        self.windows = find_windows(plan) if layout is None else Windows()
        self.reduced = {a.sym for a in plan.axes if a.reduced}
        if layout is None:
            layout = reduction_layout(plan, ctx) if self.reduced else pointwise_layout(plan, ctx)
        aligned = (lambda buffer: False) if self.windows.apart and not layout.flat else ctx.aligned
        self.params = Params(ctx.hint, aligned, self.dtypes, {a.sym: a.size for a in plan.axes})
        self.bits = 64 if ctx.wide else 32
        self.layout = layout
        self.quads = find_quads(plan, layout, ctx.hint)
        self.fast = self._is_fast()
        self.out = Lines()
        self.emitted: set[int] = set()
        self.eviction = ""
        self.loop_dim = next((d for d in layout.dims if d.loop), None)
        self.contiguous = {plan.vector} if plan.vector is not None else set()
        if layout.transposed:
            self.contiguous.add(layout.dims[0].axes[0].sym)
        self.bounds = _bounds(plan, self.contiguous)

    @property
    def guards(self) -> list[Guard]:
        """The relations under which the kernel is valid."""
        own = self.windows.guards if self.bits == 32 else ()
        return [*self.layout.guards, *self.params.guards, *own]

    def divides(self, size: Expr, block: int) -> bool:
        """Whether blocks cover the size exactly in the example; a guard makes the kernel valid for such sizes only."""
        rest = mod(size, expr(block))
        if rest.as_int() is not None:
            return rest.as_int() == 0
        fits = self.ctx.hint(size) % block == 0
        self.layout.guards.append(("eq" if fits else "ne", rest, expr(0)))
        return fits

    def _is_fast(self) -> bool:
        """Whether the errors of approximations are small beside the rounding of every result."""
        if not self.ctx.rough:
            return False
        for row in self.plan.rows:
            if row.op == "to_dtype" and row.attr.is_floating_point and not row.dtype.is_floating_point:
                return False
            args = [self.plan.rows[a] for a in row.args]
            if row.traits.steep and any(a.dtype.is_floating_point and not _has_no_error(a) for a in args):
                return False
        return True

    # -- dims of values ----------------------------------------------------------------------------------------------
    def dims_of(self, syms: Iterable[Sym]) -> frozenset[int]:
        """The tile dims that cover some of the axes `syms`."""
        own = set(syms)
        return frozenset(i for i, d in enumerate(self.layout.dims) if any(a.sym in own for a in d.axes))

    def row_dims(self, n: int) -> frozenset[int]:
        """The tile dims along which row `n` varies."""
        return self.dims_of(self.plan.varies[n])

    def expr_dims(self, e: Expr) -> frozenset[int]:
        """The tile dims along which an index expression varies."""
        out = self.dims_of(s for s in symbols(e) if s.kind == LOOP)
        return out.union(*(self.row_dims(n) for n in rows_in(e)))

    def shape(self, dims: Iterable[int] | None = None) -> str:
        """The shape of a value that varies along `dims`, by default all."""
        wanted = set(range(len(self.layout.dims)) if dims is None else dims)
        return "[" + ", ".join(str(d.block if i in wanted else 1) for i, d in enumerate(self.layout.dims)) + "]"

    def mask(self, dims: Iterable[int], *more: str) -> str:
        """The mask of an access along `dims`; "" if none is needed."""
        return " & ".join([*(f"m{self.layout.dims[i].name}" for i in sorted(dims)), *more])

    # -- values ------------------------------------------------------------------------------------------------------
    def symbol_text(self, s: Sym) -> str:
        """The text of an axis or of a computed index inside an address."""
        if s.row is None:
            return s.name
        return f"t{s.row}.to(tl.int32)" if self.bits == 32 else f"t{s.row}"

    def address(self, e: Expr) -> str:
        """The text of an offset into memory."""
        return triton_expr(e, self.params, self.bits, self.symbol_text, matters=True)

    def value_index(self, e: Expr, matters: bool = False) -> str:
        """An index expression as an int64 value; `matters`: its divisibility by 16 decides how wide accesses are."""
        if e.as_int() is not None:
            return triton_constant(e.as_int() or 0, torch.int64)

        def wide(s: Sym) -> str:
            return f"t{s.row}" if s.row is not None else f"{s.name}.to(tl.int64)"

        text = triton_expr(e, self.params, 64, wide, matters)
        return text if any(s.kind in (INDIRECT, LOOP) for s in symbols(e)) else f"tl.cast({text}, tl.int64)"

    def load(self, row: Row, other: str = "0") -> str:
        """The right-hand side of a load; `other`: the value where its condition is false."""
        return self.loaded(row, self.load_stored(row, other))

    def loaded(self, row: Row, text: str) -> str:
        """The compute value of a loaded element."""
        return triton_load(self.dtypes[row.buffer], text)

    def load_stored(self, row: Row, other: str = "0") -> str:
        """A load of an element as stored, not yet converted to its compute dtype."""
        dims, text = self.expr_dims(row.address), self.address(row.address)
        missing = self.row_dims(row.args[0]) - dims if row.args else frozenset()
        if missing:
            text = f"({text} + tl.zeros({self.shape(missing | dims)}, tl.int{self.bits}))"
        mask = self.mask(dims | missing, *(f"t{a}" for a in row.args))
        options = f", {mask}, other={other}" if mask else ""
        evict = self.eviction if dims else ""
        pointer = self.params.pointer(row.buffer)
        return f"tl.load({pointer} + ({text}){options}{evict})"

    def value(self, n: int) -> str:
        """The right-hand side of row `n`."""
        row = self.plan.rows[n]
        args = [f"t{a}" for a in row.args]
        if n in self.windows.given:
            return f"t{self.windows.given[n]}"
        if n in self.windows.compared and self.bits == 32:
            a, b = (triton_expr(e, self.params, 32, self.symbol_text) for e in self.windows.compared[n])
            return f"({a} {row.traits.sign} {b})"
        match row.op:
            case "load":
                filled = self.windows.filled.get(n)
                return self.load(row, "0" if filled is None else triton_number(filled, self.dtypes[row.buffer]))
            case "const":
                return triton_constant(_constant(row), row.dtype)
            case "scalar":
                return f"tl.cast({self.params.scalar(row.attr)}, {TRITON_TYPES[row.dtype]})"
            case "index":
                return self.value_index(row.attr, n in self.bounds)
            case "to_dtype":
                return triton_convert(row.attr, row.dtype, args[0])
            case "round_to":
                return triton_convert(torch.float32, row.attr, args[0])
        if row.traits.sign == "/" and (factor := self.reciprocal(row)) is not None:
            return f"(t{row.args[0]} * {factor})"
        if row.traits.draw is not None:
            return f"fuser_unit_float(w{n})"
        if row.traits.sign in (">=", "<") and self.plan.rows[row.args[0]].traits.draw == EACH:
            least = self.least_word(row)
            if least is not None:
                return f"w{row.args[0]} {row.traits.sign} tl.full([], {least}, tl.uint32)"
        return triton_cell(row.op, self.plan.rows[row.args[row.traits.typed]].dtype, self.fast, *args)

    def reciprocal(self, row: Row) -> str | None:
        """The factor whose product has the same bits as the division by a constant, a power of two; else None."""
        divisor = self.plan.rows[row.args[1]]
        if divisor.op != "const" or divisor.dtype not in (torch.float32, torch.float64):
            return None
        mantissa, exponent = math.frexp(float(divisor.attr))
        return repr(1 / float(divisor.attr)) if mantissa == 0.5 and abs(exponent) < _EXPONENTS else None

    def random_words(self, n: int) -> str:
        """The 32-bit words from which the random numbers of row `n` are made."""
        seed, stream, place = (f"t{a}" for a in self.plan.rows[n].args)
        pair, own = self.plan.rows[n].traits.draw or EACH
        quads = self.quads.get(n)
        if quads is None:
            return f"fuser_philox_word({seed}, {stream}, {own.format(place)})"
        d = self.layout.dims[quads.dim]
        block = f"{d.name}q"
        if quads.start != expr(0):
            block = f"(({self.address(quads.start)}) // {NEIGHBOURS} + {block})"
        dims = self.expr_dims(quads.start) | {quads.dim}
        first = len(self.layout.dims) == 2 and quads.dim == 0
        return f"fuser_philox_quads({seed}, {stream}, {block}, {self.shape(dims)}, {first}, {pair})"

    def least_word(self, row: Row) -> int | None:
        """The smallest word whose number is at least the constant that `row` compares with; None if there is none."""
        other = self.plan.rows[row.args[1]]
        return least_word(float(other.attr)) if other.op == "const" else None

    def emit(self, n: int) -> None:
        """The statements of row `n`."""
        row = self.plan.rows[n]
        self.emitted.add(n)
        if row.op == "pair" or n in self.windows.unused and self.bits == 32:
            return
        if row.traits.draw is not None:
            self.out.add(f"w{n} = {self.random_words(n)}")
        if row.op != "indirect":
            self.out.add(f"t{n} = {self.value(n)}")
            return
        size, checked = row.attr
        spread = self.row_dims(n) - self.row_dims(row.args[0])  # dims along which only the condition of its use varies
        wider = f" + tl.zeros({self.shape(self.row_dims(n))}, tl.int64)" if spread else ""
        self.out.add(f"w{n} = t{row.args[0]}{wider}")
        bound = self.value_index(size)
        self.out.add(f"w{n} = tl.where(w{n} < 0, w{n} + {bound}, w{n})")
        if checked:
            mask = self.mask(self.row_dims(n), *(f"t{a}" for a in row.args[1:]))
            text = f"(w{n} >= 0) & (w{n} < {bound})"
            self.out.add(f"tl.device_assert({text}, 'index out of range'{', mask=' + mask if mask else ''})")
        self.out.add(f"t{n} = tl.where((w{n} >= 0) & (w{n} < {bound}), w{n}, 0)")

    def store(self, s: Store) -> None:
        """The statement of a store."""
        dims = self.expr_dims(s.address)
        if self.row_dims(s.row) - dims:
            raise Unsupported(f"{s.buffer} is stored along fewer axes than its value has")
        mask = self.mask(dims)
        value = triton_store(self.dtypes[s.buffer], f"t{self.unrounded(s)}")
        text = f"{self.params.pointer(s.buffer)} + ({self.address(s.address)})"
        self.out.add(f"tl.store({text}, {value}{', ' + mask if mask else ''})")

    def unrounded(self, s: Store) -> int:
        """The row to store: a store of 8-bit floats rounds, so a rounding before it is skipped."""
        row, dtype = self.plan.rows[s.row], self.dtypes[s.buffer]
        twice = dtype in FLOAT8 and row.op == "round_to" and row.attr is dtype
        return row.args[0] if twice and self.loop_dim is None and row.args[0] in self.emitted else s.row

    # -- scaffolding -------------------------------------------------------------------------------------------------
    def digits(self) -> list[tuple[str, Expr]]:
        """The digits of a program's number: (variable, size), the last varying fastest."""
        shared = self.layout.shared
        own = [(f"b{d.name}", blocks(d.size, d.block)) for d in self.layout.dims if not (d.whole or d.loop)]
        first, last = ([(a.sym.name, a.size) for a in self.layout.scalars if (a in shared) is s] for s in (False, True))
        return [*first, *own, *last]

    def units(self) -> Expr:
        """The number of programs."""
        return product(size for _, size in self.digits())

    def open_programs(self, extra: list[tuple[str, Expr]] | None = None, number: str = PROGRAM) -> None:
        """Split the number of the program into its digits."""
        digits = [*(extra or []), *self.digits()]
        wide = ".to(tl.int64)" if self.bits == 64 else ""
        if digits:
            self.out.add(f"pid = {number}{wide}")
        for at, (variable, size) in reversed(list(enumerate(digits))):
            if at == 0:
                self.out.add(f"{variable} = pid")
                break
            n = self.params.number(size, self.bits, f"n_{variable}")
            self.out.add(f"{variable} = pid % {n}")
            self.out.add(f"pid = pid // {n}")
        for d in self.layout.dims:
            if not d.loop:
                self.open_dim(d, "" if d.whole else f"b{d.name} * {d.block} + ")

    def runs_along(self, d: Dim) -> bool:
        """Whether memory is contiguous along a dim, so that divisibility of its size by 16 matters."""
        return any(a.sym in self.contiguous for a in d.axes) or d.axes[0].reduced and not is_column(self.plan)

    def open_dim(self, d: Dim, start: str) -> None:
        """Declare the indices of a dim's block, the axes that they cover, and the mask."""
        both = len(self.layout.dims) == 2
        index = "" if not both else "[:, None]" if d is self.layout.dims[0] else "[None, :]"
        matters = self.runs_along(d)
        n = self.params.number(d.size, self.bits, f"n_{d.name}", matters)
        self.out.add(f"{d.name} = {start}tl.arange(0, {d.block}){index}")
        self.out.add(f"m{d.name} = {d.name} < {n}")
        if any(self.layout.dims[q.dim] is d for q in self.quads.values()):
            first = f"({start}0) // {NEIGHBOURS} + " if start else ""
            self.out.add(f"{d.name}q = {first}tl.arange(0, {d.block // NEIGHBOURS}){index}")
        rest = d.name
        for a in reversed(d.axes[1:]):
            size = self.params.number(a.size, self.bits, f"n_{a.sym.name}", a.sym in self.contiguous)
            self.out.add(f"{a.sym.name} = {rest} % {size}")
            self.out.add(f"{d.name}_{a.sym.name} = {rest} // {size}")
            rest = f"{d.name}_{a.sym.name}"
        self.out.add(f"{d.axes[0].sym.name} = {rest}")

    def body(self) -> str:
        """The lines so far."""
        return "\n".join(self.out.lines or ["    pass"]) + "\n"

    def close_function(self, name: str, units: Expr) -> Function:
        """The finished function."""
        params = tuple(self.params.known.values())
        checked = any(is_checked(r) for r in self.plan.rows)
        work = product(a.size for a in self.plan.axes)
        return Function(name, self.body(), units, work, params, self.layout.warps, checked)

    def all_at_once(self) -> None:
        """Emit every row once, in order, then the stores."""
        stores = list(self.plan.stores)
        for n, row in enumerate(self.plan.rows):
            if row.op == "reduced":
                r = self.plan.reductions[row.attr]
                self.result(n, r, *self.reduced_inputs(r))
            else:
                self.emit(n)
        for s in stores:
            self.store(s)

    # -- reductions --------------------------------------------------------------------------------------------------
    def spec(self, r: Reduce) -> tuple[ReductionRow, torch.dtype, torch.dtype]:
        """The table's row of a reduction, and the dtypes of its values and its accumulator."""
        row = self.plan.rows[r.row]
        value = self.plan.rows[row.args[0]].dtype if row.op == "pair" else row.dtype
        spec = REDUCTIONS[r.kind]
        return spec, value, spec.accumulate(value)

    @property
    def index_dtype(self) -> torch.dtype:
        """The dtype in which positions are compared."""
        return torch.int64 if self.bits == 64 else torch.int32

    def reduced_inputs(self, r: Reduce) -> tuple[str, str]:
        """The tile's values for a reduction and, for an index reduction, their indices; else ""."""
        spec, value, acc = self.spec(r)
        row = self.plan.rows[r.row]
        own = row.args[0] if spec.index else r.row
        inner = self.layout.dims[-1].name
        text = triton_convert(value, acc, f"t{own}")
        if spec.index or not self.is_zero_outside(own) or spec.identity(acc) != 0:
            text = f"tl.where(m{inner}, {text}, {triton_number(spec.identity(acc), acc)})"
        if acc is torch.bool:
            text = f"{text} != 0"
        elif acc.itemsize < 4:
            text = f"({text}).to({TRITON_TYPES[acc]})"
        if self.row_dims(own) != frozenset(range(len(self.layout.dims))) or spec.index:
            text = f"tl.broadcast_to({text}, {self.shape()})"
        if not spec.index:
            return text, ""
        index = triton_convert(torch.int64, self.index_dtype, f"t{row.args[1]}")
        last = torch.iinfo(self.index_dtype).max
        return text, f"tl.broadcast_to(tl.where(m{inner}, {index}, {last}), {self.shape()})"

    def is_zero_outside(self, n: int) -> bool:
        """Whether row `n` is zero where the tile exceeds the reduced axes, as masked loads are."""
        row, inner = self.plan.rows[n], len(self.layout.dims) - 1
        if row.op == "load":
            return inner in self.expr_dims(row.address)
        return (row.op == "to_dtype" or row.traits.keeps_zero) and all(map(self.is_zero_outside, row.args))

    def fold(self, r: Reduce, values: str, indices: str) -> str:
        """The expression that reduces a tile along its last dim."""
        spec, _, acc = self.spec(r)
        axis = len(self.layout.dims) - 1
        back = "[:, None]" if axis else ""
        if spec.adds:
            return f"tl.sum({values}, {axis}){back}"
        if acc is torch.bool:
            how = "min" if spec.identity(acc) else "max"
            return f"(tl.{how}(({values}).to(tl.int32), {axis}) != 0){back}"
        if spec.index:
            return f"tl.reduce(({values}, {indices}), {axis}, {triton_folder(r.kind)})[1]{back}"
        return f"tl.reduce({values}, {axis}, {triton_folder(r.kind)}){back}"

    def result(self, n: int, r: Reduce, values: str, indices: str) -> None:
        """Emit the `reduced` row `n`."""
        spec, _, acc = self.spec(r)
        self.emitted.add(n)
        if spec.index and self.loop_dim is None:
            self.index_result(n, r, values, indices)
            return
        source = self.index_dtype if spec.index else acc
        self.out.add(f"t{n} = {triton_convert(source, self.plan.rows[n].dtype, self.fold(r, values, indices))}")

    def index_result(self, n: int, r: Reduce, values: str, indices: str) -> None:
        """Emit the index of the extreme value: the extreme first, then its lowest index; NaN is extreme."""
        axis = len(self.layout.dims) - 1
        back = "[:, None]" if axis else ""
        k, folder = r.number, REDUCTIONS[REDUCTIONS[r.kind].value].folder
        self.out.add(f"x{k} = {values}")
        self.out.add(f"best{k} = tl.reduce(x{k}, {axis}, {folder}){back}")
        same = f"(x{k} == best{k})"
        if self.spec(r)[2].is_floating_point:
            same = f"tl.where(best{k} != best{k}, x{k} != x{k}, x{k} == best{k})"
        last = torch.iinfo(self.index_dtype).max
        lowest = f"tl.min(tl.where({same}, {indices}, {last}), {axis}){back}"
        self.out.add(f"t{n} = {triton_convert(self.index_dtype, self.plan.rows[n].dtype, lowest)}")


def _has_no_error(row: Row) -> bool:
    return row.op in ("load", "const") or row.traits.draw is not None


def _bounds(plan: KernelPlan, contiguous: Collection[Sym]) -> set[int]:
    """Rows that are constant in a launch and bound a mask along contiguous neighbours."""
    out = set()
    for row in plan.rows:
        if row.traits.sign in ("<", ">=") and all(plan.rows[a].op == "index" for a in row.args):
            moving, fixed = row.args
            if plan.varies[moving].intersection(contiguous) and not plan.varies[fixed]:
                out.add(fixed)
    return out


def _constant(row: Row) -> bool | int | float:
    text: str = row.attr
    if row.dtype is torch.bool:
        return text == "True"
    return float(text) if row.dtype.is_floating_point else int(text)
