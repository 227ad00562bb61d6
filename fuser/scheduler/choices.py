"""Writes out a short innermost axis, such as the components of a point, a colour, a box or a complex number.

A rotation of pairs or a stack along the last dim selects its operands by the index along a short innermost axis; a
point divided by its length computes the length for each component. A loop along that axis does not fill a register. A
loop along another axis repeats the work for each component and stores with a stride. Without the axis, one iteration
computes all components: selections are known when the kernel is written, and common subexpressions are computed once. A
short axis is also written out if some load is not contiguous from the axis's end to the next iteration, such as a
factor for each point: such an axis cannot be merged with another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fuser.ir.loop_body import Recorder, Row, is_both, is_test, map_exprs, outcome, renumber_expr, row_exprs
from fuser.ir.sizes import ONE, SIZE, Expr, Sym, coefficient, expr, floordiv, minimum, product, substitute, symbols
from fuser.lowering.context import LoweringContext
from fuser.scheduler.nodes import row_cost

Stores = list[tuple[str, Expr, int]]
MOST_ROWS = 512  # that all copies of a body may have
MOST_TOGETHER = 16  # adjacent elements that one iteration computes, over several axes
MANY = 32  # iterations that fill registers; with fewer, a free size stays free
LARGE = 4096  # elements of a call that takes longer than the call itself: smaller ones share kernels
SHARED = 0.4  # share of the work saved from which an axis without selections is written out, too


def write_out(
    ctx: LoweringContext, sizes: Sequence[tuple[Sym, Expr]], rows: list[Row], stores: Stores, run: int = 1
) -> tuple[Sym | None, list[Row], Stores]:
    """The written-out axis, and the rows and stores without it; (None, rows, stores) if no axis qualifies.

    `sizes`: the axes, none of them reduced. `run`: adjacent elements that one iteration computes already. A size that
    was free becomes a guard of the kernel.
    """
    for axis, size in sizes:
        n = ctx.hint(size)
        if not 1 < n <= ctx.target.written_out or n * len(rows) > MOST_ROWS or len(sizes) == 1:
            continue
        if not all(coefficient(e, axis) == expr(run) for _, e, _ in stores):
            continue
        numbers = {s: expr(ctx.hints[s]) for s in symbols(size)}
        own, addressed = fixed(numbers, rows, stores)
        others = {other: substitute(length, numbers) for other, length in sizes if other is not axis}
        outer = beside(ctx, others, expr(n * run), n * run, addressed)
        if outer is None and (numbers or n > ctx.target.components):
            assume_few(ctx, [size for _, size in sizes], others, expr(n * run), own, addressed, axis)
            continue
        made, kept = copies(own, addressed, axis, list(map(expr, range(n))))
        shares = _work(made) < (1 - SHARED) * n * _work(rows)
        if shares or _chooses(rows, axis) or (outer is not None and not runs_on(rows, outer, axis, size)):
            for s, number in numbers.items():
                ctx.assume("eq", expr(s), number)
            return axis, made, kept
    return None, rows, stores


def beside(
    ctx: LoweringContext, sizes: Mapping[Sym, Expr], step: Expr, run: int, stores: Stores, many: int = MANY
) -> Sym | None:
    """The axis whose neighbours are `step` elements apart in all results; None if it makes too few iterations.

    `run`: elements that one iteration computes if the axes up to `step` are written out. If this axis is short enough,
    it may be written out next; then the axes beyond it have to make `many` iterations.
    """
    for axis, size in sizes.items():
        if not all(coefficient(e, axis) == step for _, e, _ in stores):
            continue
        n, short = ctx.hint(size), run > 0 and ctx.hint(size) <= ctx.target.written_out
        if n >= many:
            return axis
        if n < 2 or (short and run * n > MOST_TOGETHER):
            return None
        left = (run * n, many) if short else (0, -(-many // n))
        return axis if beside(ctx, sizes, step * size, left[0], stores, left[1]) is not None else None
    return None


def assume_few(
    ctx: LoweringContext, every: Sequence[Expr], sizes: Mapping[Sym, Expr], step: Expr, rows: list[Row],
    stores: Stores, axis: Sym,
) -> None:  # fmt: skip
    """Guards on a kernel whose short `axis` stays a loop because it makes too few iterations.

    A kernel of a small call takes small calls alone; that of a large one those with few neighbours of the axis.
    `every`: the sizes of all axes; `sizes`: of the others, as in `beside`.
    """
    near = beside(ctx, sizes, step, 0, stores, 0)
    if near is None or runs_on(rows, near, axis, ctx.hint(step)):
        return
    elements = product(every)
    if ctx.hint(elements) < LARGE:
        ctx.assume("lt", elements, LARGE)
    elif ctx.hint(sizes[near]) < MANY:
        large, many = floordiv(elements, expr(LARGE)), floordiv(sizes[near], expr(MANY))
        ctx.assume("le", minimum(large, ONE) + minimum(many, ONE), ONE)


def runs_on(rows: Sequence[Row], outer: Sym, axis: Sym, size: Expr | int) -> bool:
    """Whether `outer` and `axis` act as one axis in every index, except in those that vary along `axis` alone."""
    for e in (e for row in rows for e in row_exprs(row)):
        beyond, own = coefficient(e, outer), coefficient(e, axis)
        along = {s for s in symbols(e) if s.kind != SIZE}
        if along - {axis} and (beyond is None or own is None or beyond != own * size):
            return False
    return True


def fixed(numbers: Mapping[Sym, Expr], rows: list[Row], stores: Stores) -> tuple[list[Row], Stores]:
    """The rows and stores with `numbers` substituted for symbols."""
    if not numbers:
        return rows, stores

    def put(e: Expr) -> Expr:
        return substitute(e, numbers)

    return [map_exprs(r, put) if row_exprs(r) else r for r in rows], [(b, put(e), r) for b, e, r in stores]


def _work(rows: Sequence[Row]) -> float:
    return sum(1 + row_cost(row) for row in rows if row.op not in ("const", "index"))


def _chooses(rows: Sequence[Row], axis: Sym) -> bool:
    """Whether some selection depends on the index along `axis` alone."""
    behind: list[set[Sym] | None] = []  # axes and sizes that each row depends on; None if it also depends on memory
    for row in rows:
        of_args = [behind[a] for a in row.args]
        own = {s for e in row_exprs(row) for s in symbols(e)}
        known = row.op in ("const", "index") or is_test(row)
        found = [s for s in of_args if s is not None]
        behind.append(own.union(*found) if known and len(found) == len(of_args) else None)
    return any(row.traits.chooses and behind[row.args[0]] == {axis} for row in rows)


def copies(
    rows: Sequence[Row], stores: Stores, axis: Sym, places: Sequence[Expr],
    always: Callable[[Sequence[Row], Row], bool] = lambda *_: False,
) -> tuple[list[Row], Stores]:  # fmt: skip
    """The rows and stores for each of the indices along `axis`. Rows equal for several indices occur once.

    always: whether a comparison, given with the rows of its arguments, always holds.
    """
    out, kept = Recorder(), list[tuple[str, Expr, int]]()
    for place in places:
        number: dict[int, int] = {}

        def moved(e: Expr, number: dict[int, int] = number, place: Expr = place) -> Expr:
            return substitute(renumber_expr(e, number), {axis: place})

        for n, row in enumerate(rows):
            if row_exprs(row):
                row = map_exprs(row, moved)
            row = Row(row.op, tuple(number[a] for a in row.args), row.dtype, row.attr)
            if is_test(row) and always(out.rows, row):
                row = Row("const", (), row.dtype, "True")
            number[n] = settled(out, row)
        kept += [(buffer, moved(e), number[r]) for buffer, e, r in stores]
    return out.rows, kept


def settled(out: Recorder, row: Row) -> int:
    """The number of a row in `out` equal to `row`, simplified by the constants that are known by now."""
    known = [_constant(out.rows[a]) for a in row.args]
    if row.traits.chooses and known[0] is not None:
        return row.args[1 if known[0] else 2]
    if is_both(row) and True in known:
        return row.args[1 - known.index(True)]
    value: Any = outcome(row, known)
    if row.op == "index":
        value = row.attr.as_int()
    elif is_both(row) and False in known:
        value = False
    elif row.op == "load" and known == [False]:  # the value is not used
        value = 0.0 if row.dtype.is_floating_point else False if row.dtype is torch.bool else 0
    elif row.op in ("load", "indirect") and len(known) == 1 + (row.op == "indirect") and known[-1] is True:
        row = Row(row.op, row.args[:-1], row.dtype, row.attr)
    return out.add_row(row if value is None else Row("const", (), row.dtype, repr(value))).row


def _constant(row: Row) -> int | bool | None:
    if row.op != "const" or row.dtype.is_floating_point:
        return None
    return row.attr == "True" if row.dtype is torch.bool else int(row.attr)


__all__ = ["LARGE", "MOST_ROWS", "Stores", "assume_few", "beside", "copies", "fixed", "runs_on", "settled", "write_out"]
