"""Contractions in plans: which axes are rows, which are columns, and where each operand is in memory.

A contraction is a reduction whose values are products of two operands, `x` along its rows and `w` along its columns.
Code generators treat the operands differently: an element of `w` is read once for all rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fuser.ir.loop_body import Row
from fuser.ir.sizes import INDIRECT, ONE, Expr, Sym, coefficient, symbols
from fuser.lazy_dataclasses import dataclass
from fuser.ops import REDUCTIONS

Sums = Sequence[tuple[str, int]]  # of reductions: kind, and the reduced row


@dataclass(frozen=True)
class Operand:
    """A tensor of `dtype` in memory, with the address of its element."""

    buffer: str
    dtype: torch.dtype
    address: Expr


@dataclass(frozen=True)
class Contraction:
    """The contractions of one loop nest, each with both operands. `row` is the axis of their rows; None for one row."""

    row: Sym | None
    columns: tuple[Sym, ...]
    inner: Sym
    operands: tuple[tuple[Operand, Operand], ...]


def contraction_of(
    kept: Sequence[Sym], reduced: Sequence[Sym], rows: Sequence[Row], sums: Sums, dtypes: dict[str, torch.dtype]
) -> Contraction | None:
    """The nest's contraction; None if it has none, or if an operand is not read along the reduced axis."""
    if not sums or len(reduced) != 1 or not all(REDUCTIONS[kind].contracts for kind, _ in sums):
        return None
    found: list[tuple[Operand, Operand]] = []
    sides: list[tuple[frozenset[Sym], frozenset[Sym]]] = []
    for _, n in sums:
        x, w = (_operand(rows, a, reduced[0], dtypes) for a in rows[n].args)
        if x is None or w is None:
            return None
        along = [frozenset(symbols(o.address)) & frozenset(kept) for o in (x, w)]
        found.append((x, w))
        sides.append((along[0], along[1]))
    across, down = sides[0]
    if any(side != sides[0] for side in sides) or across & down or len(across) > 1 or not down:
        return None
    if across | down != set(kept):
        return None
    return Contraction(next(iter(across), None), tuple(a for a in kept if a in down), reduced[0], tuple(found))


def _operand(rows: Sequence[Row], n: int, inner: Sym, dtypes: dict[str, torch.dtype]) -> Operand | None:
    row = rows[n]
    if row.op != "load" or row.args:
        return None
    address = row.address
    if any(s.kind == INDIRECT for s in symbols(address)) or coefficient(address, inner) != ONE:
        return None
    return Operand(row.buffer, dtypes[row.buffer], address)


__all__ = ["Contraction", "Operand", "contraction_of"]
