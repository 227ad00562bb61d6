"""A plan with the decisions about its code: axes, rows, lanes, and which loads and stores are special."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import field, replace
from types import MappingProxyType

import torch

from fuser.cpu.float_rows import exact_rows, near_rows, tame_rows
from fuser.cpu.records import Bindings, Partial
from fuser.cpu.vir import nodes as ir
from fuser.ir.loop_body import LOW_PRECISION, Row, is_checked, loads_in
from fuser.ir.ranges import NO_LOOPS
from fuser.ir.sizes import INDIRECT, Expr, coefficient, product, symbols
from fuser.lazy_dataclasses import dataclass
from fuser.machines import Machine
from fuser.ops import CPP_TYPES
from fuser.scheduler.kernel_plan import Axis, KernelPlan, Passes, Store
from fuser.scheduler.nodes import row_cost

STREAM_SHORTEST = 64  # elements of a row, below which results are stored directly
MOST_STREAMS = 6  # most results whose tiles fit into the first-level cache
MOST_OF_A_GROUP = 4  # most stores of a group with gaps: g++ took ten seconds for 11 of 12 float16
WORK_OF_ONE = 3  # operations for each access at an odd stride, from which vectors are worth element-wise accesses


@dataclass(frozen=True)
class Facts:
    """A plan with all decisions about its code. Each is made once: a generator goes on with new facts.

    lanes: elements of a block of columns, or of a row accumulator. constant: rows that do not change in a segment of
    the loop; parts: loads under such conditions. moved: rows that hold the bits of a 16-bit float. kept: rows with a
    row buffer; hoisted: rows computed before the loops; staged: loads that go through tiles, whose rows run along the
    axis `tiled`. around: the length of short rows that are taken as one long row; hoisted rows repeat with this period
    (`rounds.py`). partials: temporaries that the functions share.
    """

    plan: KernelPlan
    name: str
    bindings: Bindings
    lanes: int = 1
    constant: frozenset[int] = frozenset()
    parts: frozenset[int] = frozenset()
    moved: Mapping[int, torch.dtype] = field(default_factory=lambda: MappingProxyType({}))
    kept: tuple[int, ...] = ()
    hoisted: tuple[int, ...] = ()
    staged: tuple[int, ...] = ()
    tiled: Axis | None = None
    around: Expr | None = None
    partials: tuple[Partial, ...] = ()

    def with_partials(self, partials: Sequence[Partial]) -> Facts:
        """The facts of functions that share these temporaries, whose pointers follow the others."""
        pointers = dict(self.bindings.pointers)
        for p in partials:
            pointers[p.name] = len(pointers)
        return replace(self, partials=tuple(partials), bindings=replace(self.bindings, pointers=pointers))

    # -- the plan ------------------------------------------------------------------------------------------------------
    @functools.cached_property
    def machine(self) -> Machine:
        """The machine that runs the code; if offsets are checked, without what takes addresses of memory."""
        own = self.bindings.machine
        return replace(own, lanes="", masks=False, past_cache=(), prefetches=False) if self.checked else own

    @property
    def checked(self) -> bool:
        """Whether each offset into memory is checked."""
        return self.bindings.counts is not None

    @functools.cached_property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtype of each buffer."""
        return dict(self.plan.buffers)

    @functools.cached_property
    def kept_axes(self) -> tuple[Axis, ...]:
        """The axes whose points are divided into units."""
        return tuple(a for a in self.plan.axes if not a.reduced)

    @functools.cached_property
    def reduced_axes(self) -> tuple[Axis, ...]:
        """The axes of the inner loops of a nest that reduces."""
        return self.plan.reduced_axes

    @functools.cached_property
    def vector(self) -> Axis | None:
        """The axis that runs over lanes, if there is one."""
        return next((a for a in self.plan.axes if a.sym == self.plan.vector), None)

    @property
    def along(self) -> Axis:
        """The axis that runs over lanes; there has to be one."""
        assert self.vector is not None
        return self.vector

    @property
    def v(self) -> str:
        """The C++ variable of the lanes' axis."""
        return self.along.sym.name

    @functools.cached_property
    def is_row(self) -> bool:
        """Whether the lanes' axis is reduced."""
        return self.vector is not None and self.vector.reduced

    @functools.cached_property
    def is_column(self) -> bool:
        """Whether the nest reduces and each lane holds its own result."""
        return bool(self.reduced_axes) and not self.is_row

    @functools.cached_property
    def in_blocks(self) -> bool:
        """Whether a unit is a block of columns: of a column nest, or of a scatter or scan over lanes."""
        goes_down = bool(self.reduced_axes) or self.plan.ordered is not None
        return goes_down and self.vector is not None and not self.vector.reduced

    @functools.cached_property
    def passes(self) -> Passes:
        """The passes over the inner loops."""
        return Passes(self.plan, self.constant) if self.constant else self.plan.passes

    # -- rows ----------------------------------------------------------------------------------------------------------
    def is_full(self, n: int) -> bool:
        """Whether row `n` is computed inside the innermost loops."""
        return n in self.passes.full

    def is_lane(self, n: int) -> bool:
        """Whether row `n` of a column nest has one value per lane, outside the reduced loops."""
        return self.is_column and not self.is_full(n) and self.plan.vector in self.plan.varies[n]

    def is_outside(self, n: int) -> bool:
        """Whether row `n` has one value outside the innermost loops, for all lanes."""
        return not self.is_full(n) and not self.is_lane(n)

    def is_exact(self, n: int, dtype: torch.dtype) -> bool:
        """Whether every value of row `n` is representable in the 16-bit float `dtype`."""
        if dtype not in self._exact:
            self._exact[dtype] = exact_rows(self.plan, dtype) if dtype in LOW_PRECISION else frozenset()
        return n in self._exact[dtype]

    @functools.cached_property
    def _exact(self) -> dict[torch.dtype, frozenset[int]]:
        return {}

    @functools.cached_property
    def tame(self) -> frozenset[int]:
        """Rows whose NaNs have zeros in their low 16 bits."""
        return tame_rows(self.plan)

    @functools.cached_property
    def near(self) -> frozenset[int]:
        """Rows whose arguments are in the interval for which their op has a cheaper helper."""
        return near_rows(self.plan)

    def kind(self, n: int) -> str:
        """The C++ type of row `n`."""
        return storage_type(self.moved[n]) if n in self.moved else CPP_TYPES[self.plan.rows[n].dtype]

    def array_kind(self, n: int) -> str:
        """The C++ type of row `n` in an array. Truth values are bytes: g++ 12 vectorises no loop that joins an element
        of type bool with a comparison.
        """
        return "u8" if self.kind(n) == "bool" else self.kind(n)

    def in_array(self, n: int, element: ir.Value) -> ir.Value:
        """The value of row `n`, given its element of an array of `array_kind`."""
        return ir.Decode(torch.bool, element) if self.kind(n) == "bool" else element

    def scalar(self, n: int) -> ir.Value:
        """The value of a row that is the same for all lanes, or of the current lane."""
        row = self.plan.rows[n]
        return constant(row) if row.op == "const" else ir.Name(f"t{n}")

    @functools.cached_property
    def guarded(self) -> frozenset[int]:
        """Loads before the reduced loops used only inside: if the loops have no iterations, no element may exist.

        An ordered nest has no units in that case, so nothing is loaded.
        """
        if not self.reduced_axes or self.plan.ordered is not None:
            return frozenset()
        loads = {n for n, row in enumerate(self.plan.rows) if row.op == "load" and not self.is_full(n)}
        return frozenset(loads.difference(*(p.outer for p in self.passes)))

    def unrounded(self, s: Store) -> int:
        """The row to store. Storing rounds, so a `round_to` before it is skipped where its source is available."""
        row = self.plan.rows[s.row]
        if row.op != "round_to" or row.attr is not self.dtypes[s.buffer] or not self.is_full(row.args[0]):
            return s.row
        return s.row if row.args[0] in self.kept or s.row in self.kept else row.args[0]

    @functools.cached_property
    def has_checks(self) -> bool:
        """Whether any index is bounds-checked."""
        return any(map(is_checked, self.plan.rows))

    @functools.cached_property
    def checks_inside(self) -> bool:
        """Whether an index is bounds-checked in an innermost loop."""
        rows = enumerate(self.plan.rows)
        return any(is_checked(r) and not self.is_outside(n) for n, r in rows)

    # -- passes --------------------------------------------------------------------------------------------------------
    def available(self, phase: int) -> Set[int]:
        """Rows of the inner loops whose values are already in memory when pass `phase` runs."""
        return {*(n for n in self.kept if self.passes.first(n) < phase), *self.hoisted}

    def computed(self, phase: int) -> list[int]:
        """Rows that a pass uses in its loops: computed there or found in memory."""
        return self.passes.closure(self.passes[phase].roots, self.available(phase))

    def rows_of(self, phase: int) -> list[int]:
        """Rows that a pass computes in its loops, without those found in memory."""
        available = self.available(phase)
        return [n for n in self.computed(phase) if n not in available]

    def cost_of(self, phase: int) -> int:
        """Operations of the rows of a pass."""
        return sum(row_cost(self.plan.rows[n]) for n in self.computed(phase))

    @functools.cached_property
    def costliest_pass(self) -> int:
        """The pass with the most operations for each element among the passes that reduce."""

        def cost(phase: int) -> int:
            mine = [n for n in self.passes[phase].inner if self.passes.first(n) == phase]
            return sum(row_cost(self.plan.rows[n]) for n in mine)

        return max((r.phase for r in self.plan.reductions), key=lambda p: (cost(p), -p))

    def work(self) -> Expr:
        """Operations of the whole nest."""
        cost = max(1, sum(max(1, row_cost(r)) for r in self.plan.rows) // 4)
        return product(a.size for a in self.plan.axes) * cost

    # -- memory --------------------------------------------------------------------------------------------------------
    def step(self, address: Expr) -> int | None:
        """The stride of an address along the lanes' axis, in elements.

        None if it is not a known number, or the address has a computed index.
        """
        if self.vector is None or any(s.kind == INDIRECT for s in symbols(address)):
            return None
        found = coefficient(address, self.vector.sym)
        return found.as_int() if found is not None else None

    def lines_read(self, rows: Iterable[int]) -> list[tuple[str, Expr]]:
        """(buffer, offset) of the loads among `rows` that are contiguous along the lanes' axis."""
        loads = [self.plan.rows[n] for n in rows if self.plan.rows[n].op == "load"]
        found = ((r.buffer, r.address) for r in loads if not r.args and self.step(r.address) == 1)
        return list(dict.fromkeys(found))

    @functools.cached_property
    def streams(self) -> tuple[Store, ...]:
        """Stores that are contiguous along the lanes' axis and may be large, so non-temporal stores may pay.

        A buffer that the kernel also reads is in the cache already and is left out. So are scatters and scans: their
        results are read again soon, or are stored in small parts.
        """
        if not self.machine.past_cache or self.plan.split or self.plan.ordered is not None:
            return ()
        if self.vector is None or self.vector.hint < STREAM_SHORTEST:
            return ()
        read = {row.buffer for row in loads_in(self.plan.rows)}
        full = [s for s in self.plan.stores if s in self.passes.full_stores and s.buffer not in read]
        found = tuple(s for s in full if self.step(s.address) == 1)
        return found if len(found) <= MOST_STREAMS else ()

    def streams_of(self, phase: int) -> list[Store]:
        """The streams of one pass."""
        return [s for s in self.streams if s.phase == phase]

    def tile_of(self, s: Store) -> str:
        """The name of the tile that may stage a store; "" if none does."""
        return f"{s.phase}_{self.streams_of(s.phase).index(s)}" if s in self.streams else ""

    @functools.cached_property
    def scattered_steps(self) -> frozenset[int]:
        """Lane strides at which elements are accessed one by one, and not as interleaved groups.

        These are strides at which many stores leave gaps between their elements. In arithmetic-heavy kernels they are
        also the strides for which g++ has no permutation, all but 3 and powers of two: it would use vectors of two
        elements.
        """
        rows = self.plan.rows
        stores = Counter((s.buffer, step) for s in self.plan.stores for step in self._steps(s.address))
        gapped = frozenset(step for (_, step), n in stores.items() if MOST_OF_A_GROUP < n < step)
        loads = [step for r in loads_in(rows) for e in r.indices for step in self._steps(e)]
        steps = (*loads, *(step for _, step in stores.elements()))
        odd = [step for step in steps if step != 3 and step.bit_count() > 1]
        worth = sum(map(row_cost, rows)) >= WORK_OF_ONE * len(odd)
        return gapped | frozenset(odd if worth else ())

    def _steps(self, address: Expr) -> list[int]:
        if self.vector is None:
            return []
        own = (self.vector.sym,)
        return [abs(c) for monomial, c in address.terms if monomial == own]


def storage_type(dtype: torch.dtype) -> str:
    """The C++ type of elements in memory."""
    return "u8" if dtype is torch.bool else CPP_TYPES[dtype]


def constant(row: Row) -> ir.Number:
    """The constant of a `const` row."""
    text: str = row.attr
    if row.dtype is torch.bool:
        return ir.Number(text == "True", row.dtype)
    return ir.Number(float(text) if row.dtype.is_floating_point else int(text), row.dtype)


def size(e: Expr) -> ir.Value:
    """An integer expression over sizes alone."""
    return ir.Offset(e, "floor", _SIZES)


def whole_lines(size_in_bytes: Expr) -> ir.Value:
    """Bytes rounded up to whole cache lines of 64 bytes."""
    return (size(size_in_bytes) + 63) // 64 * 64


def no_row(n: int) -> ir.Value:
    """The `ref` of scopes that hold sizes only: a size depends on no row."""
    raise AssertionError(f"a size depends on the computed index t{n}")


_SIZES = ir.Scope(no_row, NO_LOOPS)

__all__ = ["Facts", "constant", "no_row", "size", "storage_type", "whole_lines"]
