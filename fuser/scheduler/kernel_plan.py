"""Kernel plans: what the scheduler hands to a code generator.

A plan is one loop nest with everything decided: axes in order, which of them are reduced, which one runs over vector
lanes, the fused rows with flat addresses, the stores, and the reductions with their phases. It contains no code and no
device, and its text is its hash key.

Phases: a row that needs the result of a reduction of the same nest belongs to a later pass over the reduced axes. A
pass recomputes what it needs from earlier ones; the generator may keep costly values in a row buffer instead.
`KernelPlan.passes` lists for each pass the rows before, inside and after its loops. Generators and the interpreter read
it, so they agree on what a pass is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence, Set

import torch

from fuser.ir.loop_body import Row, indirect_rows
from fuser.ir.sizes import Expr, Sym, rows_in, symbols
from fuser.lazy_dataclasses import dataclass
from fuser.scheduler.contraction import Contraction, contraction_of
from fuser.scheduler.nodes import Ordered


@dataclass(frozen=True)
class Axis:
    """A loop of the nest. `hint` is its size in the example: it guides choices, never results."""

    sym: Sym
    size: Expr
    reduced: bool
    hint: int


@dataclass(frozen=True)
class Store:
    """Write row `row` to `buffer` at the flat `address`, in the pass `phase` or after it."""

    buffer: str
    address: Expr
    row: int
    phase: int


@dataclass(frozen=True)
class Reduce:
    """Reduce row `row` by `kind` over the reduced axes; the result is the row `reduced` with attr `number`."""

    number: int
    kind: str
    row: int
    dtype: torch.dtype
    phase: int


@dataclass(frozen=True)
class Pass:
    """One pass over the inner loops, with its fields in the order of execution and rows in order of dependence.

    `before` and `outer` are rows outside the loops. Several passes may name the same such row: its value stays.
    """

    before: tuple[int, ...]  # rows that the loops need
    inner: tuple[int, ...]  # rows of the loops: computed at each point, and again in each pass
    stores: tuple[Store, ...]  # stores in the loops
    folds: tuple[Reduce, ...]  # reductions in the loops
    results: tuple[int, ...]  # rows that are the results of `folds`
    outer: tuple[int, ...]  # rows that `after` needs
    after: tuple[Store, ...]  # stores outside the loops

    @property
    def roots(self) -> list[int]:
        """Rows that the loops compute for a store or a reduction; some may be known before the loops."""
        out = [s.row for s in self.stores] + [n for s in self.stores for n in rows_in(s.address)]
        return out + [r.row for r in self.folds]

    @property
    def outer_roots(self) -> list[int]:
        """Rows that the stores outside the loops need."""
        return [n for s in self.after for n in (s.row, *rows_in(s.address))]


class Passes(Sequence[Pass]):
    """The passes of `plan`. Rows in `constant` count as known before the inner loops, although they vary in them."""

    def __init__(self, plan: KernelPlan, constant: Set[int] = frozenset()) -> None:
        self._plan = plan
        self.deps = tuple((*row.args, *sorted(indirect_rows(row))) for row in plan.rows)
        varying = (n for n, along in enumerate(plan.varies) if along & plan.inside)
        self.full = frozenset(n for n in varying if n not in constant)  # rows of the inner loops
        self.full_stores = frozenset(s for s in plan.stores if self._is_full(s))
        count = max([s.phase for s in plan.stores] + [r.phase for r in plan.reductions], default=0) + 1
        self._each = tuple(map(self._pass, range(count)))
        self.loops = 1 + max((at for at, p in enumerate(self._each) if p.stores or p.folds), default=-1)

    def __len__(self) -> int:
        return len(self._each)

    def __getitem__(self, at):  # type: ignore[no-untyped-def]
        return self._each[at]

    def _is_full(self, s: Store) -> bool:
        inner = symbols(s.address) & self._plan.inside or not self.full.isdisjoint(rows_in(s.address))
        return bool(inner) or s.row in self.full or self._plan.ordered is not None

    def _pass(self, phase: int) -> Pass:
        stores = [s for s in self._plan.stores if s.phase == phase]
        folds = tuple(r for r in self._plan.reductions if r.phase == phase)
        numbers = {r.number for r in folds}
        rows = enumerate(self._plan.rows)
        results = tuple(n for n, row in rows if row.op == "reduced" and row.attr in numbers)
        within, after = (tuple(s for s in stores if (s in self.full_stores) is full) for full in (True, False))
        made = Pass((), (), within, folds, results, (), after)
        inner = self.closure(made.roots)
        before = self.outside([*made.roots, *(d for n in inner for d in self.deps[n])])
        outer = self.outside(made.outer_roots)
        return Pass(tuple(before), tuple(inner), within, folds, results, tuple(outer), after)

    def closure(self, roots: Iterable[int], stop: Set[int] = frozenset()) -> list[int]:
        """Rows of the inner loops that `roots` depend on, in order; the inputs of rows in `stop` are not followed."""
        return self._behind(roots, lambda n: n in self.full, stop)

    def outside(self, roots: Iterable[int]) -> list[int]:
        """Rows outside the inner loops that `roots` depend on, in order, without results of reductions."""
        return self._behind(roots, lambda n: n not in self.full and self._plan.rows[n].op != "reduced")

    def varying(self, roots: Iterable[int]) -> list[int]:
        """Rows that vary along an axis and that `roots` depend on, in order."""
        return self._behind(roots, lambda n: bool(self._plan.varies[n]))

    def needed(self, roots: Iterable[int]) -> list[int]:
        """Rows that `roots` depend on, in order. The search stops at results of reductions."""
        return self._behind(roots, lambda n: True)

    def _behind(
        self, roots: Iterable[int], belongs: Callable[[int], bool], stop: Set[int] = frozenset()
    ) -> list[int]:  # fmt: skip
        seen: set[int] = set()
        pending = list(roots)
        while pending:
            n = pending.pop()
            if n not in seen and belongs(n):
                seen.add(n)
                if n not in stop:
                    pending += self.deps[n]
        return sorted(seen)

    def known(self, phase: int) -> list[int]:
        """Rows outside the loops that can be computed before the loops of pass `phase`, but results of reductions."""
        rows = enumerate(self._plan.rows)
        return [n for n, r in rows if n not in self.full and r.op != "reduced" and self._plan.phases[n] <= phase]

    @functools.cached_property
    def _first(self) -> dict[int, int]:
        first: dict[int, int] = {}
        for phase, p in enumerate(self._each):
            for n in p.inner:
                first.setdefault(n, phase)
        return first

    def first(self, n: int) -> int:
        """The first pass whose loops compute row `n`. KeyError if none does."""
        return self._first[n]


@dataclass(frozen=True)
class KernelPlan:
    """One loop nest. `axes` from outermost to innermost; `vector` is the axis that runs over lanes."""

    name: str
    axes: tuple[Axis, ...]
    vector: Sym | None
    rows: tuple[Row, ...]
    phases: tuple[int, ...]  # per row: the first pass in which it can be computed
    varies: tuple[frozenset[Sym], ...]  # per row: the axes along which its value varies
    stores: tuple[Store, ...]
    reductions: tuple[Reduce, ...]
    buffers: tuple[tuple[str, torch.dtype], ...]  # in order of first use
    split: bool  # few outputs, much to reduce: partial results per chunk, then combined
    comments: tuple[str, ...] = ()
    # A scatter or scan: the reduced axes run in order, and `stores` has one entry. A scan for indices has two: the
    # store of row `pair` takes the index, the store of its value the extreme.
    ordered: Ordered | None = None

    @property
    def reduced_axes(self) -> tuple[Axis, ...]:
        """The axes that are reduced."""
        return tuple(a for a in self.axes if a.reduced)

    @property
    def contraction(self) -> Contraction | None:
        """The contraction of this nest along its vector axis; None if it has none."""
        kept, reduced = ([a.sym for a in self.axes if a.reduced is side] for side in (False, True))
        sums = [(r.kind, r.row) for r in self.reductions]
        found = contraction_of(kept, reduced, self.rows, sums, dict(self.buffers))
        return found if found is not None and self.vector == found.columns[-1] else None

    @functools.cached_property
    def inside(self) -> frozenset[Sym]:
        """The axes of the inner loops, which passes run over: the reduced ones, or the vector axis if none is."""
        reduced = frozenset(a.sym for a in self.axes if a.reduced)
        return reduced or frozenset({self.vector} if self.vector is not None else ())

    @functools.cached_property
    def passes(self) -> Passes:
        """The passes over the inner loops, in order."""
        return Passes(self)

    @property
    def n_phases(self) -> int:
        """The number of passes over the inner loops."""
        return len(self.passes)


__all__ = ["Axis", "KernelPlan", "Pass", "Passes", "Reduce", "Store"]
