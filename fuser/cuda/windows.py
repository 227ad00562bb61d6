"""Windows in elementwise kernels: each element reads neighbours, and a constant replaces those outside the tensor.

Along a long vector axis, loads less than a vector access apart are made element by element: with four neighbours for
each thread, each load would touch four times as many cache lines (on an H200, poolings of eight took four times as
long). Along a short axis, and for windows with a stride, programs have few elements of all axes. The constant becomes
the load's `other` value, and comparisons with edges are made in 32 bits.
"""

from __future__ import annotations

import math
from dataclasses import field

import torch

from fuser.cuda.target import TARGET
from fuser.cuda.text import Guard
from fuser.cuda.tiles import VECTOR
from fuser.ir.loop_body import Row, indirect_rows
from fuser.ir.sizes import INDIRECT, LOOP, ONE, SIZE, Call, Expr, Sym, coefficient, expr, product, rows_in, symbols
from fuser.lazy_dataclasses import dataclass
from fuser.scheduler.kernel_plan import KernelPlan

FEWEST = 3  # loads of one tensor that make a window
_COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")
_INT32 = 1 << 31


@dataclass(frozen=True)
class Windows:
    """How a kernel treats its windows, by rows of the plan.

    `apart`: accesses are made element by element. `filled`: loads, with their values where their condition is false;
    `given`: the selects that these loads replace. `compared`: comparisons of numbers that fit in 32 bits under
    `guards`. `unused`: rows that are then not read.
    """

    apart: bool = False
    filled: dict[int, bool | int | float] = field(default_factory=dict)
    given: dict[int, int] = field(default_factory=dict)
    compared: dict[int, tuple[Expr, Expr]] = field(default_factory=dict)
    guards: tuple[Guard, ...] = ()
    unused: frozenset[int] = frozenset()


def find_windows(plan: KernelPlan) -> Windows:
    """The windows of a plan; empty for one that reduces."""
    if plan.reductions or plan.ordered is not None or not any(row.op == "load" and row.args for row in plan.rows):
        return Windows()
    filled, given = _filled(plan)
    compared, guards = _compared(plan)
    unused = _unused(plan, given, compared)
    return Windows(_is_apart(plan), filled, given, compared, guards, unused)


def reads_windows(plan: KernelPlan) -> bool:
    """Whether a plan reads neighbours of each element of some tensor at offsets that no vector access fits."""
    if plan.reductions or plan.ordered is not None:
        return False
    itemsize = {name: dtype.itemsize for name, dtype in plan.buffers}
    for name, found in _places(plan).items():
        steps = [p - found[0] for p in found]
        steps = [s for s in steps if not any(v.kind in (LOOP, INDIRECT) for v in symbols(s))]
        if len(steps) >= FEWEST and any((s.as_int() or 0) * itemsize[name] % VECTOR for s in steps):
            return True
    return False


def reads_many(plan: KernelPlan) -> bool:
    """Whether a plan reads many neighbours of each element, all in vectors, as convolutions of channels do."""
    if plan.reductions or plan.ordered is not None or plan.vector is None:
        return False
    found = (places for places in _places(plan).values() if len(places) >= TARGET.neighbours)
    return any(all(coefficient(p, plan.vector) == ONE for p in places) for places in found)


def has_stride(plan: KernelPlan) -> bool:
    """Whether a plan reads some tensor with a stride along its vector axis, as strided poolings do."""
    steps = (coefficient(p, plan.vector) for found in _places(plan).values() for p in found if plan.vector is not None)
    return any(c is not None and abs(c.as_int() or 0) > 1 for c in steps)


def _places(plan: KernelPlan) -> dict[str, list[Expr]]:
    """The addresses at which a plan reads each tensor, except computed ones."""
    places: dict[str, list[Expr]] = {}
    for row in plan.rows:
        if row.op == "load" and not indirect_rows(row):
            places.setdefault(row.buffer, []).append(row.address)
    return places


def _is_apart(plan: KernelPlan) -> bool:
    """Whether contiguous loads of one tensor are at offsets that no vector access fits."""
    itemsize = {name: dtype.itemsize for name, dtype in plan.buffers}
    for name, found in _places(plan).items():
        if plan.vector is None or len(found) < FEWEST or coefficient(found[0], plan.vector) != ONE:
            continue
        steps = [(p - found[0]).as_int() for p in found[1:]]
        if any(s is not None and s * itemsize[name] % VECTOR for s in steps):
            return True
    return False


def _filled(plan: KernelPlan) -> tuple[dict[int, bool | int | float], dict[int, int]]:
    """Loads under a condition whose only reader selects a constant where the condition is false; and these selects."""
    readers: dict[int, list[int]] = {}
    for n, row in enumerate(plan.rows):
        for a in (*row.args, *indirect_rows(row)):
            readers.setdefault(a, []).append(n)
    stored = {s.row for s in plan.stores}
    dtypes = dict(plan.buffers)
    filled: dict[int, bool | int | float] = {}
    given: dict[int, int] = {}
    for n, row in enumerate(plan.rows):
        if not row.traits.chooses:
            continue
        condition, load, other = row.args
        source, constant = plan.rows[load], plan.rows[other]
        if source.op != "load" or source.args != (condition,) or constant.op != "const":
            continue
        value = _constant_for(constant, dtypes[source.buffer])
        if value is not None and readers[load] == [n] and load not in stored:
            filled[load], given[n] = value, load
    return filled, given


def _constant_for(row: Row, dtype: torch.dtype) -> bool | int | float | None:
    """The value of a constant that every dtype of its kind, or `dtype`, represents; None for others."""
    if row.dtype is torch.bool or dtype.itemsize == 1:
        return None
    if row.dtype.is_floating_point and dtype.is_floating_point:
        number = float(row.attr)
        return number if math.isinf(number) or number == 0 and math.copysign(1, number) > 0 else None
    if row.dtype is dtype and not dtype.is_floating_point:
        return int(row.attr)
    return None


def _compared(plan: KernelPlan) -> tuple[dict[int, tuple[Expr, Expr]], tuple[Guard, ...]]:
    """Comparisons of indices with edges, and the guards under which they fit in 32 bits."""
    found: dict[int, tuple[Expr, Expr]] = {}
    guards: dict[Guard, None] = {}
    sizes = {a.sym: a.size for a in plan.axes}
    for n, row in enumerate(plan.rows):
        if row.traits.sign not in _COMPARISONS or len(row.args) != 2:
            continue
        sides = [_index(plan.rows[a]) for a in row.args]
        if any(s is None for s in sides) or not any(symbols(s) & sizes.keys() for s in sides if s is not None):
            continue
        bounds = [_most(s, sizes) for s in sides if s is not None]
        if all(b is not None and (b.as_int() or 0) < _INT32 for b in bounds):
            found[n] = (sides[0], sides[1])  # type: ignore[assignment]
            open_bounds = (b for b in bounds if b is not None and b.as_int() is None)
            guards.update(dict.fromkeys(("lt", b, expr(_INT32)) for b in open_bounds))
    return found, tuple(guards)


def _index(row: Row) -> Expr | None:
    if row.op == "index":
        return row.attr  # type: ignore[no-any-return]
    return expr(int(row.attr)) if row.op == "const" and row.dtype is torch.int64 else None


def _most(e: Expr, sizes: dict[Sym, Expr]) -> Expr | None:
    """An upper bound of the absolute value of an expression over loop variables and sizes, and of its parts."""
    total = expr(0)
    for monomial, factor in e.terms:
        bounds = [_most_of(a, sizes) for a in monomial]
        if any(b is None for b in bounds):
            return None
        total = total + product(b for b in bounds if b is not None) * abs(factor)
    return total


def _most_of(a: Sym | Call, sizes: dict[Sym, Expr]) -> Expr | None:
    """The same for an atom: a quotient or remainder by a number is at most the dividend or the number."""
    if isinstance(a, Sym):
        return sizes[a] if a.kind == LOOP else expr(a) if a.kind == SIZE else None
    value, by = a.args
    if a.fn not in ("floordiv", "mod") or (by.as_int() or 0) < 1:
        return None
    most = _most(value, sizes)
    return None if most is None else most + by


def _unused(plan: KernelPlan, given: dict[int, int], compared: dict[int, tuple[Expr, Expr]]) -> frozenset[int]:
    """Rows that are not read once loads replace selects, and comparisons use expressions of their own."""
    pending = [s.row for s in plan.stores]
    pending += [n for s in plan.stores for n in rows_in(s.address)]
    needed: set[int] = set()
    while pending:
        n = pending.pop()
        if n in needed:
            continue
        needed.add(n)
        if n in given:
            pending.append(given[n])
        elif n not in compared:
            pending += [*plan.rows[n].args, *indirect_rows(plan.rows[n])]
    return frozenset(range(len(plan.rows))) - needed
