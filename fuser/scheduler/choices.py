"""Components that lie side by side in memory, written out: of a point, a colour, a box, a complex number.

A rotation of pairs or a stack along the last dim chooses by the place in a short innermost axis what an element is made
of; a point divided by its length computes that for each component. A loop along that axis fills no register, and one
along another does all of it again for each place and writes with steps. Without the axis one turn computes all
components: a choice is known when the kernel is written, and what they share is computed once.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fuser.ir.loop_body import Recorder, Row, map_exprs, renumber_expr, row_exprs
from fuser.ir.sizes import ONE, Expr, Sym, coefficient, expr, substitute, symbols
from fuser.scheduler.nodes import row_cost

Stores = list[tuple[str, Expr, int]]
MOST_ROWS = 512
SHARED = 0.4  # of the work, from which components are computed together though nothing chooses between them
_KNOWN: dict[str, Callable[..., Any]] = {
    name: getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")
} | {"logical_not": operator.not_, "logical_and": operator.and_, "logical_or": operator.or_}


def write_out(
    sizes: Sequence[tuple[Sym, Expr]], rows: list[Row], stores: Stores, most: int
) -> tuple[Sym | None, list[Row], Stores]:
    """The rows and stores of a loop nest without one of its axes, and which that is; None where there is no such one.

    `sizes`: the axes, none of them reduced. `most`: places of an axis that is written out.
    """
    for axis, size in sizes:
        n = size.as_int() or 0
        if not 1 < n <= most or n * len(rows) > MOST_ROWS or len(sizes) == 1:
            continue
        if all(coefficient(e, axis) == ONE for _, e, _ in stores):
            copies, kept = _copies(rows, stores, axis, n)
            if _chooses(rows, axis) or _work(copies) <= (1 - SHARED) * n * _work(rows):
                return axis, copies, kept
    return None, rows, stores


def _work(rows: Sequence[Row]) -> float:
    return sum(1 + row_cost(row) for row in rows if row.op not in ("const", "index"))


def _chooses(rows: Sequence[Row], axis: Sym) -> bool:
    """Whether some choice depends on the place along `axis` alone."""
    behind: list[set[Sym] | None] = []  # the axes and sizes that each row depends on; None if it depends on memory, too
    for row in rows:
        of_args = [behind[a] for a in row.args]
        own = {s for e in row_exprs(row) for s in symbols(e)}
        known = row.op in ("const", "index") or row.op in _KNOWN
        found = [s for s in of_args if s is not None]
        behind.append(own.union(*found) if known and len(found) == len(of_args) else None)
    return any(row.op == "where" and behind[row.args[0]] == {axis} for row in rows)


def _copies(rows: Sequence[Row], stores: Stores, axis: Sym, places: int) -> tuple[list[Row], Stores]:
    """Rows and stores for each place of `axis`. What is equal for all is there once."""
    out, kept = Recorder(), list[tuple[str, Expr, int]]()
    for place in map(expr, range(places)):
        number: dict[int, int] = {}

        def moved(e: Expr, number: dict[int, int] = number, place: Expr = place) -> Expr:
            return substitute(renumber_expr(e, number), {axis: place})

        for n, row in enumerate(rows):
            if row_exprs(row):
                row = map_exprs(row, moved)
            number[n] = _settled(out, Row(row.op, tuple(number[a] for a in row.args), row.dtype, row.attr))
        kept += [(buffer, moved(e), number[r]) for buffer, e, r in stores]
    return out.rows, kept


def _settled(out: Recorder, row: Row) -> int:
    """The number of a row that says the same as `row`, which may be known now."""
    known = [_constant(out.rows[a]) for a in row.args]
    if row.op == "where" and known[0] is not None:
        return row.args[1 if known[0] else 2]
    if row.op == "logical_and" and True in known:
        return row.args[1 - known.index(True)]
    value: Any = None
    if row.op == "index":
        value = row.attr.as_int()
    elif row.op in _KNOWN and None not in known:
        value = _KNOWN[row.op](*known)
    elif row.op == "logical_and" and False in known:
        value = False
    elif row.op == "load" and known == [False]:  # nobody uses it
        value = 0.0 if row.dtype.is_floating_point else False if row.dtype is torch.bool else 0
    elif row.op in ("load", "indirect") and len(known) == 1 + (row.op == "indirect") and known[-1] is True:
        row = Row(row.op, row.args[:-1], row.dtype, row.attr)
    return out.add_row(row if value is None else Row("const", (), row.dtype, repr(value))).row


def _constant(row: Row) -> int | bool | None:
    if row.op != "const" or row.dtype.is_floating_point:
        return None
    return row.attr == "True" if row.dtype is torch.bool else int(row.attr)


__all__ = ["write_out"]
