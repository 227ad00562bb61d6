"""C++ for a kernel plan: returns strings, needs no compiler.

Three shapes of loop nest, told apart by which axis runs over vector lanes:

- *pointwise*: no reduction; units are (kept axes × blocks of the vector axis).
- *row*: the vector axis is reduced; a unit is one result, its passes run over the reduced axes, each accumulator is an
  array of lanes that is folded at the end in a fixed order.
- *column*: the vector axis is kept; a unit is a block of neighbouring results, one in each lane.

Where few results need much work a reduction is split: chunks write partial results, a second function combines them,
again in a fixed order. Chunks depend on sizes alone, so any number of threads gives the same bits.

Loops carry `#pragma omp simd` and cells are scalar expressions: the compiler vectorises them for its widest unit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from fuser.cpu.text import FLOOR_HELPERS, Lines, cpp_expr, cpp_name
from fuser.errors import Unsupported
from fuser.ir.loop_body import Row, indirect_rows, row_exprs
from fuser.ir.sizes import (
    INDIRECT,
    LOOP,
    ONE,
    Expr,
    Sym,
    coefficient,
    expr,
    floordiv,
    minimum,
    product,
    substitute,
    symbol,
    symbols,
)
from fuser.ops import (
    CPP_TYPEDEFS,
    CPP_TYPES,
    NO_INDEX,
    REDUCTIONS,
    ReductionRow,
    cpp_cell,
    cpp_combine,
    cpp_constant,
    cpp_convert,
    cpp_load,
    cpp_store,
    helpers_in,
    prelude_for,
)  # fmt: skip
from fuser.scheduler.nodes import row_cost
from fuser.scheduler.plan import Axis, KernelPlan, Reduce, Store

BLOCK = 4096  # elements of the vector axis in one unit of a pointwise nest
FLUSH = 256  # float32 additions per lane before they go to a float64 total
KEEP_COST = 8  # operations from which a value is kept for a later pass rather than computed again
KEEP_BYTES = 1 << 19  # most row-buffer bytes of one unit in the example
CHUNK, MOST_CHUNKS = 4096, 64
TILE_ROWS, TILE_COLUMNS = 64, 64  # a transposed read goes through a tile of the first level cache


# A block of 16 by 16 words is transposed by four rounds of interleaving row i with row i + 8.
TRANSPOSE_HELPER = f"""\
typedef u32 words __attribute__((vector_size(64), aligned(4)));
#if defined(__clang__) || __GNUC__ >= 12
#define LOW_HALVES(a, b) __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define HIGH_HALVES(a, b) __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#else
#define LOW_HALVES(a, b) __builtin_shuffle(a, b, (words){{0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23}})
#define HIGH_HALVES(a, b) \\
  __builtin_shuffle(a, b, (words){{8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31}})
#endif
static void transpose_band(const u32* in, i64 step, u32* __restrict tile, i64 columns) {{
  for (i64 c = 0; c < columns; c += 16) for (i64 r = 0; r < {TILE_ROWS}; r += 16) {{
    words a[16], b[16];
    for (int i = 0; i < 16; ++i) a[i] = *(const words*)(in + (c + i) * step + r);
    for (int i = 0; i < 8; ++i) {{ b[2 * i] = LOW_HALVES(a[i], a[i + 8]); b[2 * i + 1] = HIGH_HALVES(a[i], a[i + 8]); }}
    for (int i = 0; i < 8; ++i) {{ a[2 * i] = LOW_HALVES(b[i], b[i + 8]); a[2 * i + 1] = HIGH_HALVES(b[i], b[i + 8]); }}
    for (int i = 0; i < 8; ++i) {{ b[2 * i] = LOW_HALVES(a[i], a[i + 8]); b[2 * i + 1] = HIGH_HALVES(a[i], a[i + 8]); }}
    for (int i = 0; i < 8; ++i) {{ a[2 * i] = LOW_HALVES(b[i], b[i + 8]); a[2 * i + 1] = HIGH_HALVES(b[i], b[i + 8]); }}
    for (int i = 0; i < 16; ++i) *(words*)(tile + (r + i) * {TILE_COLUMNS} + c) = a[i];
  }}
}}
"""


@dataclass(frozen=True)
class Function:
    """One C++ function and how to launch it: `units`, `work`, `scratch` as `kernel_spec.Step` has them."""

    name: str
    text: str
    units: Expr
    work: Expr
    scratch: Expr


@dataclass(frozen=True)
class Partial:
    """A temporary of a split reduction: `size` elements of `dtype`."""

    name: str
    dtype: torch.dtype
    size: Expr


@dataclass(frozen=True)
class Generated:
    """The functions of one plan, in launch order, and the temporaries they share."""

    functions: tuple[Function, ...]
    partials: tuple[Partial, ...]


def generate(plan: KernelPlan, name: str, bindings: Bindings) -> Generated:
    """C++ functions for `plan`."""
    writer = _Nest(plan, name, bindings)
    if plan.split:
        return writer.split()
    return Generated((writer.whole(),), ())


def source_text(functions: Iterable[Function], comment: str) -> str:
    """A complete source: typedefs, the helpers that are called, the functions."""
    body = "\n".join(f.text for f in functions)
    floors = FLOOR_HELPERS if "floor_div(" in body or "floor_mod(" in body else ""
    head = "".join(f"// {line}\n" for line in comment.splitlines())
    tiles = TRANSPOSE_HELPER if "transpose_band(" in body else ""
    return f"{head}{CPP_TYPEDEFS}{prelude_for(helpers_in(body))}{floors}{tiles}\n{body}"


PART = 12_000  # characters of functions from which a source is compiled in several parts at the same time


def source_parts(functions: Sequence[Function], comment: str) -> tuple[str, ...]:
    """The sources of all functions: one, or several of about equal length where they are long."""
    parts: list[list[Function]] = [[]]
    length = 0
    for f in functions:
        if length > PART:
            parts.append([])
            length = 0
        parts[-1].append(f)
        length += len(f.text)
    return tuple(source_text(p, comment) for p in parts)


@dataclass(frozen=True)
class Bindings:
    """Where a function finds its arguments: pointers by buffer, int64 slots by symbol, float64 slots by scalar."""

    pointers: dict[str, int]
    slots: dict[Sym, int]
    floats: dict[str, int]


class _Nest:
    """Writes the functions of one plan."""

    def __init__(self, plan: KernelPlan, name: str, bindings: Bindings) -> None:
        self.plan, self.name, self.bindings = plan, name, bindings
        self.dtypes = dict(plan.buffers)
        self.reduced = {a.sym for a in plan.axes if a.reduced}
        self.kept = [a for a in plan.axes if not a.reduced]
        self.red_axes = [a for a in plan.axes if a.reduced]
        self.vector = next((a for a in plan.axes if a.sym == plan.vector), None)
        self.is_row = bool(self.reduced) and self.vector is not None and self.vector.reduced
        self.is_column = bool(self.reduced) and not self.is_row
        self.inside = self.reduced | ({plan.vector} if plan.vector is not None and not self.is_column else set())
        self.lanes = self._choose_lanes()
        self.out = Lines()
        self.emitted: set[int] = set()  # rows available in the unit (scalars, or lane arrays of a column nest)
        self.arrays: set[int] = set()  # rows that are lane arrays
        self.kept_rows: dict[int, int] = {}  # row -> number of its row buffer
        self.has_checks = any(r.op == "indirect" and r.attr[1] for r in plan.rows)
        self.partials: list[Partial] = []
        self.staged: dict[int, int] = {}  # transposed loads -> number of their tile
        self.tile_axis: Axis | None = None

    # -- what goes where ---------------------------------------------------------------------------------------------
    def _choose_lanes(self) -> int:
        if self.vector is None:
            return 1
        if self.is_column:
            return 256 if self.vector.hint >= 256 else 64
        return 64 if self.vector.hint >= 64 else 16

    def is_full(self, n: int) -> bool:
        """Whether row `n` lives inside the innermost loops."""
        return bool(self.plan.varies[n] & self.inside)

    def is_lane(self, n: int) -> bool:
        """Whether row `n` of a column nest has one value per lane, outside the reduced loops."""
        return self.is_column and not self.is_full(n) and self.plan.vector in self.plan.varies[n]

    def store_is_full(self, s: Store) -> bool:
        """Whether a store happens inside the innermost loops."""
        return self.is_full(s.row) or bool(symbols(s.address) & self.inside)

    def deps(self, n: int) -> list[int]:
        """Rows that row `n` needs."""
        row = self.plan.rows[n]
        return [*row.args, *indirect_rows(row)]

    def closure(self, roots: Iterable[int], stop: set[int] | None = None) -> list[int]:
        """Rows inside the innermost loops that `roots` need, in order; not looking behind `stop`."""
        seen: set[int] = set()
        pending = list(roots)
        while pending:
            n = pending.pop()
            if n in seen or not self.is_full(n):
                continue
            seen.add(n)
            if stop is None or n not in stop:
                pending += self.deps(n)
        return sorted(seen)

    def roots(self, phase: int) -> list[int]:
        """Rows that the pass of `phase` must produce inside the loops."""
        out = [s.row for s in self.plan.stores if s.phase == phase and self.store_is_full(s)]
        for s in self.plan.stores:
            if s.phase == phase and self.store_is_full(s):
                out += [int(x.name[1:]) for x in symbols(s.address) if x.kind == INDIRECT]
        return out + [r.row for r in self.plan.reductions if r.phase == phase]

    def choose_kept_rows(self) -> None:
        """Costly rows that a later pass needs again get a row buffer."""
        hint = 1
        for a in self.red_axes:
            hint *= a.hint
        per_unit = 8 * hint * (self.lanes if self.is_column else 1)
        earlier: set[int] = set()
        for phase in range(self.n_passes):
            mine = set(self.closure(self.roots(phase)))
            again = mine & earlier
            fresh = mine - earlier
            frontier = {d for n in fresh for d in self.deps(n) if d in again}
            frontier |= {r for r in self.roots(phase) if r in again}
            for n in sorted(frontier):
                costly = sum(row_cost(self.plan.rows[m]) for m in self.closure([n])) >= KEEP_COST
                fits = per_unit * (len(self.kept_rows) + 1) <= KEEP_BYTES
                if costly and fits and self.plan.rows[n].op not in ("load", "indirect", "pair"):
                    self.kept_rows.setdefault(n, len(self.kept_rows))
            earlier |= mine

    @property
    def n_passes(self) -> int:
        """Passes over the innermost loops."""
        phases = [s.phase for s in self.plan.stores if self.store_is_full(s)] + [r.phase for r in self.plan.reductions]
        return 1 + max(phases, default=-1)

    # -- text of values ----------------------------------------------------------------------------------------------
    def ref(self, n: int) -> str:
        """How a row's value is written where it is used."""
        row = self.plan.rows[n]
        if row.op == "const":
            return constant_text(row)
        return f"t{n}[l]" if n in self.arrays else f"t{n}"

    def index(self, e: Expr) -> str:
        """An index expression, lane arrays subscripted."""
        return cpp_expr(e, lambda s: self.ref(int(s.name[1:])) if s.kind == INDIRECT else cpp_name(s))

    def value(self, n: int) -> str:
        """The right-hand side of row `n`."""
        row = self.plan.rows[n]
        args = [self.ref(a) for a in row.args]
        if n in self.staged:
            assert self.tile_axis is not None and self.vector is not None
            t, v = self.tile_axis.sym.name, self.vector.sym.name
            return f"tile{self.staged[n]}[({t} - r0) * {TILE_COLUMNS} + {v} - v0]"
        if row.op == "load":
            buffer, (address,) = row.attr
            text = cpp_load(self.dtypes[buffer], f"{buffer}[{self.index(address)}]")
            return f"{args[0]} ? {text} : {cpp_constant(0, row.dtype)}" if args else text
        if row.op == "scalar":
            return f"f[{self.bindings.floats[row.attr]}]"
        if row.op == "index":
            return self.index(row.attr)
        if row.op == "to_dtype":
            return cpp_convert(row.attr, row.dtype, args[0])
        if row.op == "round_to":
            return cpp_convert(torch.float32, row.attr, args[0])
        return cpp_cell(row.op, self.plan.rows[row.args[0]].dtype if row.op != "where" else row.dtype, *args)

    def declare(self, n: int, target: str | None = None) -> None:
        """Statements that compute row `n` into `t<n>` (or assign to `target`)."""
        row = self.plan.rows[n]
        if row.op in ("const", "pair"):
            return
        left = target or f"const {CPP_TYPES[row.dtype]} t{n}"
        if row.op == "indirect":
            self._declare_indirect(n, row, left)
            return
        self.out.add(f"{left} = {self.value(n)};")

    def _declare_indirect(self, n: int, row: Row, left: str) -> None:
        size, checked = row.attr
        source, bound = self.ref(row.args[0]), self.index(size)
        self.out.add(f"const i64 w{n} = {source} + ({source} < 0 ? (i64)({bound}) : (i64)0);")
        self.out.add(f"const bool o{n} = (w{n} < 0) | (w{n} >= (i64)({bound}));")
        if checked:
            masked = f" & {self.ref(row.args[1])}" if len(row.args) > 1 else ""
            self.out.add(f"bad |= (int)(o{n}{masked});")
        self.out.add(f"{left} = o{n} ? (i64)0 : w{n};")

    def store(self, s: Store) -> None:
        """The statement of a store."""
        dtype = self.dtypes[s.buffer]
        self.out.add(f"{s.buffer}[{self.index(s.address)}] = {cpp_store(dtype, self.ref(s.row))};")

    # -- scaffolding -------------------------------------------------------------------------------------------------
    def open_function(self, suffix: str = "") -> str:
        """The function's head: pointers, sizes, what depends on no axis."""
        self.out = Lines()
        self.emitted, self.arrays = set(), set()
        name = self.name + suffix
        self.out.open(
            f'extern "C" void {name}(char* const* ptrs, const i64* s, const double* f, i64 begin, i64 end, '
            "char* scratch, i32* status)"
        )
        stored = {s.buffer for s in self.plan.stores} | {p.name for p in self.partials}
        names = [(b, d) for b, d in self.plan.buffers] + [(p.name, p.dtype) for p in self.partials]
        for buffer, dtype in names:
            kind = "u8" if dtype is torch.bool else CPP_TYPES[dtype]
            const = "" if buffer in stored else "const "
            at = self.bindings.pointers[buffer]
            self.out.add(f"{const}{kind}* __restrict {buffer} = ({const}{kind}*)ptrs[{at}];")
        for sym in sorted(self._symbols()):
            self.out.add(f"const i64 {cpp_name(sym)} = s[{self.bindings.slots[sym]}];")
        for a in self.plan.axes:
            self.out.add(f"const i64 n_{a.sym.name} = {cpp_expr(a.size)};")
        if self.has_checks:
            self.out.add("int bad = 0;")
            for row in self.plan.rows:
                if row.op == "indirect" and row.attr[1] and len(row.args) == 1:
                    self.out.add(f"if (({self.index(row.attr[0])}) <= 0) {{ *status = 1; return; }}")
        return name

    def _symbols(self) -> set[Sym]:
        own = {a.sym for a in self.plan.axes}
        exprs = [e for r in self.plan.rows for e in row_exprs(r)] + [s.address for s in self.plan.stores]
        exprs += [a.size for a in self.plan.axes] + [p.size for p in self.partials]
        return {s for e in exprs for s in symbols(e) if s.kind != INDIRECT and s not in own}

    def close_function(self) -> str:
        """The function's tail; returns the text."""
        if self.has_checks:
            self.out.add("if (bad) *status = 1;")
        self.out.close()
        return self.out.text()

    def open_units(self, digits: Sequence[tuple[str, str]]) -> None:
        """The loop over units: `digits` are (variable, size), the last running fastest."""
        self.out.add("i64 unit = begin;")
        for at, (variable, size) in reversed(list(enumerate(digits))):
            last = at == 0
            text = f"i64 {variable} = unit;" if last else f"i64 {variable} = unit % ({size}); unit /= {size};"
            self.out.add(text)
        self.out.open("for (i64 u = begin; u < end; ++u)")

    def close_units(self, digits: Sequence[tuple[str, str]]) -> None:
        """Step to the next unit."""
        text = ""
        for at, (variable, size) in enumerate(digits):
            text = f"++{variable};" if at == 0 else f"if (++{variable} == ({size})) {{ {variable} = 0; {text} }}"
        if text:
            self.out.add(text)
        self.out.close()

    def emit_unit_rows(self, roots: Iterable[int], phase: int) -> None:
        """Rows outside the innermost loops that `roots` need: scalars of the unit, lane arrays of a column nest."""
        wanted: set[int] = set()
        pending = list(roots)
        while pending:
            n = pending.pop()
            if n in wanted:
                continue
            wanted.add(n)
            pending += self.deps(n)
        for n in sorted(wanted):
            row = self.plan.rows[n]
            if n in self.emitted or self.is_full(n) or self.plan.phases[n] > phase or row.op == "reduced":
                continue
            self.emitted.add(n)
            if self.is_lane(n) and row.op not in ("const", "pair"):
                self._lane_row(n)
            else:
                self.declare(n)

    def _lane_row(self, n: int) -> None:
        self.out.add(f"{CPP_TYPES[self.plan.rows[n].dtype]} t{n}[{self.lanes}];")
        self.open_lanes()
        self.declare(n, f"t{n}[l]")
        self.out.close()
        self.arrays.add(n)

    def pragma(self) -> str:
        """The vectorisation pragma."""
        return "#pragma omp simd reduction(|:bad)" if self.has_checks else "#pragma omp simd"

    def open_lanes(self) -> None:
        """A loop over the lanes of a column nest's block."""
        assert self.vector is not None
        self.out.add(self.pragma())
        self.out.open("for (i64 l = 0; l < count; ++l)")
        self.out.add(f"const i64 {self.vector.sym.name} = v0 + l;")

    def work(self) -> Expr:
        """Operations of the whole nest."""
        cost = max(1, sum(max(1, row_cost(r)) for r in self.plan.rows) // 4)
        return product(a.size for a in self.plan.axes) * cost

    # -- shapes ------------------------------------------------------------------------------------------------------
    def whole(self) -> Function:
        """The single function of an unsplit plan."""
        if not self.reduced:
            return self._pointwise()
        return self._column() if self.is_column else self._row()

    def _pointwise(self) -> Function:
        self.find_transposed()
        name = self.open_function()
        tiled = self.tile_axis
        outer = [a for a in self.kept if a is not self.vector and a is not tiled]
        digits = [(a.sym.name, f"n_{a.sym.name}") for a in outer]
        units = product(a.size for a in outer)
        if tiled is not None:
            digits.append(("band", f"(n_{tiled.sym.name} + {TILE_ROWS - 1}) / {TILE_ROWS}"))
            units = units * floordiv(tiled.size + (TILE_ROWS - 1), expr(TILE_ROWS))
        block = TILE_COLUMNS if tiled is not None else BLOCK
        if self.vector is not None:
            digits.append(("block", f"(n_{self.vector.sym.name} + {block - 1}) / {block}"))
            units = units * floordiv(self.vector.size + (block - 1), expr(block))
        self.emit_constants()
        self.open_units(digits)
        if self.vector is not None:
            v = self.vector.sym.name
            self.out.add(f"const i64 v0 = block * {block}, v1 = v0 + {block} < n_{v} ? v0 + {block} : n_{v};")
        if tiled is not None:
            self._fill_tiles(tiled)
            t = tiled.sym.name
            self.out.open(f"for (i64 {t} = r0; {t} < r1; ++{t})")
        self._pointwise_unit()
        if tiled is not None:
            self.out.close()
        self.close_units(digits)
        return Function(name, self.close_function(), units, self.work(), expr(0))

    def _pointwise_unit(self) -> None:
        self.emit_unit_rows([*self.closure_deps(0), *self.outer_roots(0)], 0)
        if self.vector is not None:
            self.out.add(self.pragma())
            v = self.vector.sym.name
            self.out.open(f"for (i64 {v} = v0; {v} < v1; ++{v})")
            self.emit_inner(0)
            self.out.close()
        self.emit_outer_stores(0)

    def find_transposed(self) -> None:
        """Loads that run along another axis than the vector axis go through tiles, if there is one such axis."""
        if self.vector is None:
            return
        others = [a for a in self.kept if a is not self.vector]
        along: dict[int, Axis] = {}
        for n, row in enumerate(self.plan.rows):
            if row.op != "load" or row.args or indirect_rows(row):
                continue
            address = row.attr[1][0]
            c = coefficient(address, self.vector.sym)
            if c is None or c.as_int() in (0, 1, -1):
                continue
            axis = next((a for a in others if coefficient(address, a.sym) == ONE), None)
            if axis is not None:
                along[n] = axis
        if along and len({a.sym for a in along.values()}) == 1:
            self.tile_axis = next(iter(along.values()))
            self.staged = {n: k for k, n in enumerate(along)}

    def _fill_tiles(self, tiled: Axis) -> None:
        """Read a band of each transposed operand along its own rows."""
        assert self.vector is not None
        t, v = tiled.sym.name, self.vector.sym.name
        self.out.add(f"const i64 r0 = band * {TILE_ROWS}, r1 = r0 + {TILE_ROWS} < n_{t} ? r0 + {TILE_ROWS} : n_{t};")
        for n, k in self.staged.items():
            row = self.plan.rows[n]
            buffer, (address,) = row.attr
            text = cpp_load(self.dtypes[buffer], f"{buffer}[{self.index(address)}]")
            kind = CPP_TYPES[row.dtype]
            self.out.add(f"{kind} tile{k}[{TILE_ROWS * TILE_COLUMNS}] __attribute__((aligned(64)));")
            fast = CPP_TYPES[self.dtypes[buffer]] == kind and row.dtype.itemsize == 4
            ahead = "v0"
            if fast:
                ahead = f"done{k}"
                full = f"(r1 - r0 == {TILE_ROWS} ? (v1 - v0) / 16 * 16 : 0)"
                step = cpp_expr(coefficient(address, self.vector.sym) or expr(0))
                origin = {tiled.sym: symbol("r0", LOOP), self.vector.sym: symbol("v0", LOOP)}
                corner = self.index(substitute(address, origin))
                self.out.add(f"const i64 {ahead} = v0 + {full};")
                self.out.add(f"transpose_band((const u32*){buffer} + {corner}, {step}, (u32*)tile{k}, {ahead} - v0);")
            self.out.open(f"for (i64 {v} = {ahead}; {v} < v1; ++{v})")
            self.out.open(f"for (i64 {t} = r0; {t} < r1; ++{t})")
            self.out.add(f"tile{k}[({t} - r0) * {TILE_COLUMNS} + {v} - v0] = {text};")
            self.out.close()
            self.out.close()

    def outer_roots(self, phase: int) -> list[int]:
        """Rows that stores outside the innermost loops need in this phase."""
        out = []
        for s in self.plan.stores:
            if s.phase == phase and not self.store_is_full(s):
                out += [s.row, *(int(x.name[1:]) for x in symbols(s.address) if x.kind == INDIRECT)]
        return out

    def emit_constants(self) -> None:
        """Rows that vary along no axis."""
        for n, row in enumerate(self.plan.rows):
            if not self.plan.varies[n] and row.op != "reduced" and self.plan.phases[n] == 0:
                self.emitted.add(n)
                self.declare(n)

    def emit_inner(self, phase: int, loads_kept: bool = True) -> None:
        """The body of the innermost loops of a pass: rows, row buffers, stores, accumulation."""
        available = {n for n in self.kept_rows if self.first_pass(n) < phase}
        for n in self.closure(self.roots(phase), available):
            if n in available:
                kept = f"kept{self.kept_rows[n]}[{self.kept_at()}]"
                self.out.add(f"const {CPP_TYPES[self.plan.rows[n].dtype]} t{n} = {kept};")
                continue
            self.declare(n)
            if n in self.kept_rows and self.first_pass(n) == phase:
                self.out.add(f"kept{self.kept_rows[n]}[{self.kept_at()}] = t{n};")
        for s in self.plan.stores:
            if s.phase == phase and self.store_is_full(s):
                self.store(s)
        for r in self.plan.reductions:
            if r.phase == phase:
                self.accumulate(r)

    def first_pass(self, n: int) -> int:
        """The first pass whose loops compute row `n`."""
        return next(p for p in range(self.n_passes) if n in set(self.closure(self.roots(p))))

    def kept_at(self) -> str:
        """The place of the current point in a row buffer."""
        e = expr(0)
        for a in self.red_axes:
            e = e * symbol(f"n_{a.sym.name}") + expr(a.sym)
        return cpp_expr(e) if self.is_row else f"({cpp_expr(e)}) * {self.lanes} + l"

    def emit_outer_stores(self, phase: int) -> None:
        """Stores outside the innermost loops."""
        stores = [s for s in self.plan.stores if s.phase == phase and not self.store_is_full(s)]
        if not stores:
            return
        self.emit_unit_rows(self.outer_roots(phase), phase)
        if self.is_column:
            self.open_lanes()
        for s in stores:
            self.store(s)
        if self.is_column:
            self.out.close()

    # -- reductions --------------------------------------------------------------------------------------------------
    def spec(self, r: Reduce) -> tuple[ReductionRow, torch.dtype, torch.dtype]:
        """The table's row of a reduction, the dtype of its values and of its accumulator."""
        row = self.plan.rows[r.row]
        value = self.plan.rows[row.args[0]].dtype if row.op == "pair" else row.dtype
        spec = REDUCTIONS[r.kind]
        return spec, value, spec.accumulate(value)

    def flushes(self, r: Reduce) -> bool:
        """Whether partial sums go to float64 totals."""
        return r.kind == "sum" and self.spec(r)[2] is torch.float32

    def total_dtype(self, r: Reduce) -> torch.dtype:
        """The dtype of a finished accumulator."""
        return torch.float64 if self.flushes(r) else self.spec(r)[2]

    def declare_accumulators(self, phase: int) -> None:
        """Lane arrays at their identities."""
        for r in self.plan.reductions:
            if r.phase != phase:
                continue
            spec, _, acc = self.spec(r)
            k = r.number
            self.out.add(f"{CPP_TYPES[acc]} acc{k}[{self.lanes}];")
            if spec.index:
                self.out.add(f"i64 at{k}[{self.lanes}];")
            if self.flushes(r):
                self.out.add(f"double tot{k}[{self.lanes}];")
            start = f"acc{k}[l] = {cpp_constant(spec.identity(acc), acc)};"
            start += f" at{k}[l] = {NO_INDEX}LL;" if spec.index else ""
            start += f" tot{k}[l] = 0.0;" if self.flushes(r) else ""
            self.out.add(f"for (i64 l = 0; l < {self.lanes}; ++l) {{ {start} }}")

    def accumulate(self, r: Reduce) -> None:
        """Fold the current value into its lane."""
        spec, value, acc = self.spec(r)
        k = r.number
        if spec.index:
            v, i = self.plan.rows[r.row].args
            self.out.add(f"const {CPP_TYPES[acc]} x{k} = {cpp_convert(value, acc, self.ref(v))};")
            better = cpp_combine(r.kind, acc, f"acc{k}[l]", f"at{k}[l]", f"x{k}", self.ref(i))
            self.out.add(f"const bool better{k} = {better};")
            self.out.add(f"acc{k}[l] = better{k} ? x{k} : acc{k}[l];")
            self.out.add(f"at{k}[l] = better{k} ? {self.ref(i)} : at{k}[l];")
            return
        self.out.add(f"const {CPP_TYPES[acc]} x{k} = {cpp_convert(value, acc, self.ref(r.row))};")
        self.out.add(f"acc{k}[l] = {cpp_combine(r.kind, acc, f'acc{k}[l]', f'x{k}')};")

    def emit_flush(self, phase: int, when: str) -> None:
        """Move float32 partial sums to the totals when `when` holds."""
        mine = [r for r in self.plan.reductions if r.phase == phase and self.flushes(r)]
        if mine:
            moves = " ".join(f"tot{r.number}[l] += (double)acc{r.number}[l]; acc{r.number}[l] = 0.0f;" for r in mine)
            self.out.add(f"if ({when}) {{ turns = 0; for (i64 l = 0; l < {self.lanes}; ++l) {{ {moves} }} }}")

    def join(self, r: Reduce, a: str, b: str, ai: str = "", bi: str = "") -> str:
        """Statements that fold accumulator `b` (and its index) into `a`."""
        spec = REDUCTIONS[r.kind]
        dtype = self.total_dtype(r)
        if spec.index:
            return f"if ({cpp_combine(r.kind, dtype, a, ai, b, bi)}) {{ {a} = {b}; {ai} = {bi}; }}"
        return f"{a} = {cpp_combine(r.kind, dtype, a, b)};"

    def emit_fold(self, phase: int) -> None:
        """Row nests: fold the lanes of each accumulator, halving, into lane 0."""
        for r in self.plan.reductions:
            if r.phase == phase:
                k, array = r.number, "tot" if self.flushes(r) else "acc"
                step = self.join(r, f"{array}{k}[l]", f"{array}{k}[l + w]", f"at{k}[l]", f"at{k}[l + w]")
                self.out.add(f"for (i64 w = {self.lanes // 2}; w; w >>= 1) for (i64 l = 0; l < w; ++l) {{ {step} }}")

    def emit_results(self, phase: int) -> None:
        """Declare the `reduced` rows of a finished pass."""
        for n, row in enumerate(self.plan.rows):
            if row.op != "reduced" or self.plan.reductions[row.attr].phase != phase:
                continue
            r = self.plan.reductions[row.attr]
            spec = REDUCTIONS[r.kind]
            array = f"at{r.number}" if spec.index else ("tot" if self.flushes(r) else "acc") + str(r.number)
            source = torch.int64 if spec.index else self.total_dtype(r)
            self.emitted.add(n)
            if self.is_column:
                self.out.add(f"{CPP_TYPES[row.dtype]} t{n}[{self.lanes}];")
                text = cpp_convert(source, row.dtype, f"{array}[l]")
                self.out.add(f"for (i64 l = 0; l < count; ++l) t{n}[l] = {text};")
                self.arrays.add(n)
            else:
                self.out.add(f"const {CPP_TYPES[row.dtype]} t{n} = {cpp_convert(source, row.dtype, f'{array}[0]')};")

    def declare_kept(self) -> Expr:
        """Pointers to the row buffers in scratch memory; returns the bytes of all."""
        offset = expr(0)
        size = product(a.size for a in self.red_axes) * (self.lanes if self.is_column else 1) * 8 + 64
        for n, k in self.kept_rows.items():
            kind = CPP_TYPES[self.plan.rows[n].dtype]
            at = f"{k} * (({cpp_expr(size)} + 63) / 64 * 64)"
            self.out.add(f"{kind}* __restrict kept{k} = ({kind}*)(scratch + {at});")
            offset = offset + size + 64
        return offset

    def emit_pass(self, phase: int, bounds: dict[Sym, tuple[str, str]] | None = None) -> None:
        """One pass over the reduced axes (or the part of them that `bounds` gives)."""
        reductions = [r for r in self.plan.reductions if r.phase == phase]
        self.emit_unit_rows(self.closure_deps(phase), phase)
        if not reductions and not self.roots(phase):
            return
        self.declare_accumulators(phase)
        flush = any(self.flushes(r) for r in reductions)
        if flush:
            self.out.add("i64 turns = 0;") if not self._turns_declared() else self.out.add("turns = 0;")
        bounds = bounds or {}
        loops = [a for a in self.red_axes if a is not self.vector]
        for a in loops:
            lo, hi = bounds.get(a.sym, ("0", f"n_{a.sym.name}"))
            self.out.open(f"for (i64 {a.sym.name} = {lo}; {a.sym.name} < {hi}; ++{a.sym.name})")
        if self.is_column:
            self.open_lanes()
            self.emit_inner(phase)
            self.out.close()
            if flush:
                self.emit_flush(phase, f"++turns == {FLUSH}")
        else:
            self._vector_pass(phase, bool(reductions), flush, bounds)
        for _ in loops:
            self.out.close()
        if flush:
            self.emit_flush(phase, "true")

    def _turns_declared(self) -> bool:
        declared = getattr(self, "_turns", False)
        self._turns = True
        return declared

    def closure_deps(self, phase: int) -> list[int]:
        """Rows outside the loops that the pass needs."""
        available = {n for n in self.kept_rows if self.first_pass(n) < phase}
        inner = self.closure(self.roots(phase), available)
        stores = [s for s in self.plan.stores if s.phase == phase and self.store_is_full(s)]
        direct = [int(x.name[1:]) for s in stores for x in symbols(s.address) if x.kind == INDIRECT]
        return [d for n in inner if n not in available for d in self.deps(n)] + self.roots(phase) + direct

    def _vector_pass(self, phase: int, reduces: bool, flush: bool, bounds: dict[Sym, tuple[str, str]]) -> None:
        assert self.vector is not None
        v = self.vector.sym.name
        lo, hi = bounds.get(self.vector.sym, ("0", f"n_{v}"))
        if not reduces:
            self.out.add(self.pragma())
            self.out.open(f"for (i64 {v} = {lo}; {v} < {hi}; ++{v})")
            self.emit_inner(phase)
            self.out.close()
            return
        self.out.open(f"auto pass{phase} = [&](const i64 v0, const i64 count) __attribute__((always_inline))")
        self.out.add(self.pragma())
        self.out.open("for (i64 l = 0; l < count; ++l)")
        self.out.add(f"const i64 {v} = v0 + l;")
        self.emit_inner(phase)
        self.out.close()
        self.out.close("};")
        self.out.add(f"i64 p{phase} = {lo};")
        self.out.open(f"for (; p{phase} + {self.lanes} <= {hi}; p{phase} += {self.lanes})")
        self.out.add(f"pass{phase}(p{phase}, {self.lanes});")
        if flush:
            self.emit_flush(phase, f"++turns == {FLUSH}")
        self.out.close()
        self.out.add(f"if (p{phase} < {hi}) pass{phase}(p{phase}, {hi} - p{phase});")
        if flush and len(self.red_axes) > 1:
            self.emit_flush(phase, f"++turns == {FLUSH}")

    def _row(self) -> Function:
        self.choose_kept_rows()
        name = self.open_function()
        scratch = self.declare_kept()
        digits = [(a.sym.name, f"n_{a.sym.name}") for a in self.kept]
        self.emit_constants()
        self.open_units(digits)
        self._turns = False
        self._all_passes()
        self.close_units(digits)
        return Function(name, self.close_function(), product(a.size for a in self.kept), self.work(), scratch)

    def _all_passes(self) -> None:
        for phase in range(max(self.n_passes, self.plan.n_phases)):
            self.emit_pass(phase)
            if not self.is_column:
                self.emit_fold(phase)
            self.emit_results(phase)
            self.emit_outer_stores(phase)

    def _column(self) -> Function:
        self.choose_kept_rows()
        assert self.vector is not None
        name = self.open_function()
        scratch = self.declare_kept()
        digits, units = self._column_digits()
        self.emit_constants()
        self.open_units(digits)
        self._column_block()
        self._turns = False
        self._all_passes()
        self.close_units(digits)
        return Function(name, self.close_function(), units, self.work(), scratch)

    def _column_digits(self) -> tuple[list[tuple[str, str]], Expr]:
        assert self.vector is not None
        outer = [a for a in self.kept if a is not self.vector]
        blocks = f"(n_{self.vector.sym.name} + {self.lanes - 1}) / {self.lanes}"
        digits = [(a.sym.name, f"n_{a.sym.name}") for a in outer] + [("block", blocks)]
        return digits, product(a.size for a in outer) * floordiv(self.vector.size + (self.lanes - 1), expr(self.lanes))

    def _column_block(self) -> None:
        assert self.vector is not None
        n = f"n_{self.vector.sym.name}"
        self.out.add(f"const i64 v0 = block * {self.lanes}, count = v0 + {self.lanes} < {n} ? {self.lanes} : {n} - v0;")

    # -- split reductions --------------------------------------------------------------------------------------------
    def split(self) -> Generated:
        """Two functions: chunks write partial results; the second combines them and goes on."""
        axis = self.red_axes[0]
        least = CHUNK if axis is self.vector else 1
        chunks = minimum(floordiv(axis.size + (least - 1), expr(least)), MOST_CHUNKS)
        results = product(a.size for a in self.kept)
        for r in self.plan.reductions:
            spec = REDUCTIONS[r.kind]
            self.partials.append(Partial(f"{self.name}_p{r.number}", self.total_dtype(r), results * chunks))
            if spec.index:
                self.partials.append(Partial(f"{self.name}_i{r.number}", torch.int64, results * chunks))
        for at, p in enumerate(self.partials):
            self.bindings.pointers[p.name] = len(self.bindings.pointers)
            assert at >= 0
        first = self._partial_function(axis, chunks)
        second = self._combine_function(chunks)
        return Generated((first, second), tuple(self.partials))

    def _result_at(self) -> str:
        e = expr(0)
        for a in self.kept:
            e = e * symbol(f"n_{a.sym.name}") + expr(a.sym)
        return cpp_expr(e)

    def _partial_function(self, axis: Axis, chunks: Expr) -> Function:
        name = self.open_function("_partial")
        self.out.add(f"const i64 chunks = {cpp_expr(chunks)};")
        self.out.add(f"const i64 each = chunks ? (n_{axis.sym.name} + chunks - 1) / chunks : 0;")
        digits, units = self._split_digits()
        digits = [*digits, ("chunk", "chunks")]
        self.emit_constants()
        self.open_units(digits)
        if self.is_column:
            self._column_block()
        self.out.add("const i64 from = chunk * each;")
        self.out.add(f"const i64 to = from + each < n_{axis.sym.name} ? from + each : n_{axis.sym.name};")
        self._turns = False
        self.emit_pass(0, {axis.sym: ("from", "to")})
        if not self.is_column:
            self.emit_fold(0)
        self._store_partials()
        self.close_units(digits)
        return Function(name, self.close_function(), units * chunks, self.work(), expr(0))

    def _split_digits(self) -> tuple[list[tuple[str, str]], Expr]:
        if self.is_column:
            return self._column_digits()
        return [(a.sym.name, f"n_{a.sym.name}") for a in self.kept], product(a.size for a in self.kept)

    def _store_partials(self) -> None:
        if self.is_column:
            self.open_lanes()
        lane = "l" if self.is_column else "0"
        at = f"({self._result_at()}) * chunks + chunk"
        for r in self.plan.reductions:
            array = "tot" if self.flushes(r) else "acc"
            self.out.add(f"{self.name}_p{r.number}[{at}] = {array}{r.number}[{lane}];")
            if REDUCTIONS[r.kind].index:
                self.out.add(f"{self.name}_i{r.number}[{at}] = at{r.number}[{lane}];")
        if self.is_column:
            self.out.close()

    def _combine_function(self, chunks: Expr) -> Function:
        name = self.open_function("_combine")
        self.out.add(f"const i64 chunks = {cpp_expr(chunks)};")
        digits, units = self._split_digits()
        self.emit_constants()
        self.open_units(digits)
        if self.is_column:
            self._column_block()
        lanes = self.lanes if self.is_column else 1
        for r in self.plan.reductions:
            dtype, k = self.total_dtype(r), r.number
            array = "tot" if self.flushes(r) else "acc"
            self.out.add(f"{CPP_TYPES[dtype]} {array}{k}[{lanes}];")
            if REDUCTIONS[r.kind].index:
                self.out.add(f"i64 at{k}[{lanes}];")
        if self.is_column:
            self.open_lanes()
        else:
            self.out.open("")
            self.out.add("const i64 l = 0;")
        for r in self.plan.reductions:
            self._combine_one(r)
        self.out.close()
        self.emit_results(0)
        for phase in range(1, self.plan.n_phases):
            self.emit_outer_stores(phase)
        self.close_units(digits)
        return Function(name, self.close_function(), units, results_work(self.kept, chunks), expr(0))

    def _combine_one(self, r: Reduce) -> None:
        dtype, k = self.total_dtype(r), r.number
        spec = REDUCTIONS[r.kind]
        array = f"{'tot' if self.flushes(r) else 'acc'}{k}[l]"
        at = f"({self._result_at()}) * chunks"
        self.out.add(f"{array} = {cpp_constant(spec.identity(dtype), dtype)};")
        if spec.index:
            self.out.add(f"at{k}[l] = {NO_INDEX}LL;")
        step = self.join(r, array, f"{self.name}_p{k}[{at} + c]", f"at{k}[l]", f"{self.name}_i{k}[{at} + c]")
        self.out.add(f"for (i64 c = 0; c < chunks; ++c) {{ {step} }}")


def results_work(kept: Sequence[Axis], chunks: Expr) -> Expr:
    """Operations of the combining function."""
    return product(a.size for a in kept) * chunks


def constant_text(row: Row) -> str:
    """The C++ constant of a `const` row."""
    text: str = row.attr
    if row.dtype is torch.bool:
        return cpp_constant(text == "True", row.dtype)
    return cpp_constant(float(text) if row.dtype.is_floating_point else int(text), row.dtype)


__all__ = ["Bindings", "Function", "Generated", "Partial", "generate", "source_text", "ONE", "Unsupported"]
