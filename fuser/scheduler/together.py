"""Joins two plans over the same points so that one pass over memory serves both.

The gradients of a norm are sums along rows and sums along columns of the same values. These are two loop nests, because
a nest reduces along one set of axes. If a kernel can hold whole rows, it can add up the columns during its pass over
the rows. This module finds such plans and writes each pair as one plan; a code generator uses it if a row fits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence

from fuser.ir.loop_body import Recorder, Row, loads_in, map_exprs, renumber_expr, row_exprs
from fuser.ir.sizes import ZERO, Expr, Sym, expr, product, substitute
from fuser.lazy_dataclasses import dataclass
from fuser.scheduler.kernel_plan import Axis, KernelPlan, Reduce, Store
from fuser.scheduler.plan import phases_of


@dataclass(frozen=True)
class Joined:
    """Two plans as one: `plan` reduces along rows and has the stores of both, without those that depend on `columns`.

    `columns` are the reductions of `down` along the other axes, with row numbers of `plan`. The reduced axes of `plan`,
    as one mixed-radix number, are the kept axes of `down`.
    """

    plan: KernelPlan
    columns: tuple[Reduce, ...]
    down: KernelPlan
    shared: int  # tensors along both axes that are no longer written and read, or no longer read twice


def join_plans(plans: Sequence[KernelPlan], kept: Collection[str]) -> tuple[list[KernelPlan], dict[int, Joined]]:
    """`plans` with joinable plans adjacent, and by the first one's number their joined plan.

    `kept` are buffers that are stored in any case. Pairs that share the most tensors are joined first.
    """
    out = list(plans)
    pairs: list[tuple[KernelPlan, KernelPlan, Joined]] = []
    for at, joined in sorted(_candidates(plans), key=lambda c: -c[1].shared):
        i, j = sorted(_place(out, plans[n]) for n in at)
        if any(p is out[i] or p is out[j] for a, b, _ in pairs for p in (a, b)):
            continue
        order = _moved_together(out, i, j)
        if order is not None and all(_place(order, b) == _place(order, a) + 1 for a, b, _ in pairs):
            pairs.append((out[i], out[j], _without_handed_over(joined, out[i], out[j], plans, kept)))
            out = order
    return out, {_place(out, a): joined for a, _, joined in pairs}


def _candidates(plans: Sequence[KernelPlan]) -> Iterator[tuple[tuple[int, int], Joined]]:
    """Pairs of plans that can be joined: their numbers in order, and the joined plan."""
    downs = [n for n, p in enumerate(plans) if _reduces_across(p) and reduces_in_one_pass(p)]
    for along in [n for n, p in enumerate(plans) if downs and _reduces_along_memory(p)]:
        touched = _reads(plans[along]) | _writes(plans[along])
        for down in downs:
            at = min(along, down), max(along, down)
            if touched & (_reads(plans[down]) | _writes(plans[down])):
                joined = _join(plans[at[0]], plans[at[1]])
                if joined is not None:
                    yield at, joined


def _without_handed_over(
    joined: Joined, first: KernelPlan, second: KernelPlan, plans: Sequence[KernelPlan], kept: Collection[str]
) -> Joined:
    """`joined` without stores of buffers that only its two plans use."""
    read = {b for p in plans if p is not first and p is not second for b in _reads(p)}
    read |= {r.buffer for n, r in enumerate(joined.down.rows) if r.op == "load" and joined.down.phases[n] > 0}
    stores = tuple(s for s in joined.plan.stores if s.buffer in kept or s.buffer in read)
    return dataclasses.replace(joined, plan=dataclasses.replace(joined.plan, stores=stores))


def _place(plans: Sequence[KernelPlan], plan: KernelPlan) -> int:
    return next(n for n, p in enumerate(plans) if p is plan)


def _vector_is_reduced(plan: KernelPlan) -> bool | None:
    return next((a.reduced for a in plan.axes if a.sym == plan.vector), None)


def _reduces_along_memory(plan: KernelPlan) -> bool:
    return bool(plan.reductions) and plan.ordered is None and _vector_is_reduced(plan) is True


def _reduces_across(plan: KernelPlan) -> bool:
    return plan.ordered is None and _vector_is_reduced(plan) is False


def reduces_in_one_pass(plan: KernelPlan) -> bool:
    """Whether all reductions are in the first pass, and no later pass stores along the reduced axes."""
    if not plan.reductions or any(r.phase for r in plan.reductions):
        return False
    return not any(p.stores for p in plan.passes[1:])


# -- order ------------------------------------------------------------------------------------------------------------
def _reads(plan: KernelPlan) -> set[str]:
    return {r.buffer for r in loads_in(plan.rows)}


def _writes(plan: KernelPlan) -> set[str]:
    return {s.buffer for s in plan.stores}


def _moved_together(plans: Sequence[KernelPlan], i: int, j: int) -> list[KernelPlan] | None:
    """The plans with number `j` right behind `i`, or `i` right before `j`; None if plans in between forbid both."""
    between = plans[i + 1 : j]
    if not any(_conflict(p, plans[j]) for p in between):
        return [*plans[: i + 1], plans[j], *between, *plans[j + 1 :]]
    if not any(_conflict(p, plans[i]) for p in between):
        return [*plans[:i], *between, plans[i], *plans[j:]]
    return None


def _conflict(a: KernelPlan, b: KernelPlan) -> bool:
    return bool(_writes(a) & (_reads(b) | _writes(b)) or _reads(a) & _writes(b))


# -- one nest ---------------------------------------------------------------------------------------------------------
Moved = Mapping[Sym, Expr]


def _join(first: KernelPlan, second: KernelPlan) -> Joined | None:
    """The two plans as one, where `second` uses rows of `first`; None if they share nothing or cannot be joined."""
    along, down = (first, second) if _reduces_along_memory(first) else (second, first)
    axes, of_along, of_down = _common_axes(along, down)
    if not axes:
        return None
    merged = _Merged()
    for plan in (first, second):
        if not merged.add(plan, of_along if plan is along else of_down, plan is down):
            return None
    if not merged.shared:
        return None
    reductions = [dataclasses.replace(r, row=merged.numbers[id(along)][r.row]) for r in along.reductions]
    columns = tuple(dataclasses.replace(r, row=merged.numbers[id(down)][r.row]) for r in down.reductions)
    rows = merged.out.rows
    phases, varies = phases_of(axes, rows, [r.row for r in reductions])
    stores = tuple(dataclasses.replace(s, phase=phases[s.row]) for s in merged.stores)
    reductions = [dataclasses.replace(r, phase=phases[r.row]) for r in reductions]
    used = dict.fromkeys([r.buffer for r in loads_in(rows)] + [s.buffer for s in stores])
    dtypes = {**dict(first.buffers), **dict(second.buffers)}
    vector = next(a.sym for a in reversed(axes) if a.reduced)
    plan = KernelPlan(
        name=f"{along.name}_columns", axes=tuple(axes), vector=vector, rows=tuple(rows), phases=phases, varies=varies,
        stores=stores, reductions=tuple(reductions), buffers=tuple((b, dtypes[b]) for b in used), split=False,
        comments=(*along.comments, *down.comments),
    )  # fmt: skip
    return Joined(plan, columns, down, merged.shared)


def _common_axes(along: KernelPlan, down: KernelPlan) -> tuple[list[Axis], Moved, Moved]:
    """Axes for both plans, those of rows first, and each plan's axes as expressions over them; none without a match."""
    axes: list[Axis] = []
    moved: tuple[dict[Sym, Expr], dict[Sym, Expr]] = ({}, {})
    for reduced in (False, True):
        mine = [a for a in along.axes if a.reduced is reduced]
        theirs = [a for a in down.axes if a.reduced is not reduced]
        made = _matched(mine, theirs, len(axes), reduced, moved)
        if not made:
            return [], {}, {}
        axes += made
    return axes, *moved


def _matched(
    mine: list[Axis], theirs: list[Axis], at: int, reduced: bool, moved: tuple[dict[Sym, Expr], dict[Sym, Expr]]
) -> list[Axis]:
    """The finer of two lists of axes that have equal sizes, or equal products where one list is a single axis."""
    same = [a.size for a in mine] == [a.size for a in theirs]
    whole = product(a.size for a in mine) == product(a.size for a in theirs)
    if not mine or not same and not (whole and 1 in (len(mine), len(theirs))):
        return []
    finer = max(mine, theirs, key=len)
    made = [Axis(Sym(f"a{at + n}", a.sym.kind), a.size, reduced, a.hint) for n, a in enumerate(finer)]
    for own, mapping in ((mine, moved[0]), (theirs, moved[1])):
        if len(own) == len(made):
            mapping.update((a.sym, expr(b.sym)) for a, b in zip(own, made))
            continue
        number = ZERO
        for b in made:
            number = number * b.size + expr(b.sym)
        mapping[own[0].sym] = number
    return made


class _Merged:
    """The rows of two plans, equal rows once. A load of a value that the first plan stores becomes the stored row."""

    def __init__(self) -> None:
        self.out = Recorder()
        self.numbers: dict[int, dict[int, int]] = {}  # by the plan's identity
        self.stores: list[Store] = []
        self.shared = 0  # values along both axes that the second plan takes from the first
        self.known: dict[tuple[str, Expr], int] = {}  # row by stored buffer and address
        self.written: set[str] = set()

    def add(self, plan: KernelPlan, mapping: Moved, is_down: bool) -> bool:
        """Add a plan's rows and stores; False if a load is not of the same point. `is_down`: only the plan's pass 0."""
        number: dict[int, int] = {}
        self.numbers[id(plan)] = number
        before = len(self.out.rows)

        def moved(e: Expr) -> Expr:
            return substitute(renumber_expr(e, number), mapping)

        for n, row in enumerate(plan.rows):
            if is_down and plan.phases[n] > 0:
                continue
            args = tuple(number[a] for a in row.args)
            if row_exprs(row):
                row = map_exprs(row, moved)
            if row.op == "load" and row.buffer in self.written:
                found = self.known.get((row.buffer, row.address))
                if found is None or args:
                    return False
                number[n] = found
            else:
                number[n] = self.out.add_row(Row(row.op, args, row.dtype, row.attr)).row
            self.shared += row.op == "load" and len(plan.varies[n]) == len(plan.axes) and number[n] < before
        for s in plan.stores:
            self.written.add(s.buffer)
            if not is_down or s in plan.passes[0].stores:
                address = moved(s.address)
                self.stores.append(Store(s.buffer, address, number[s.row], 0))
                self.known[s.buffer, address] = number[s.row]
        return True


__all__ = ["Joined", "join_plans", "reduces_in_one_pass"]
