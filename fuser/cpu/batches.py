"""Row nests of several passes in batches: each pass goes over the rows of a batch before the next pass begins.

In a short row each operation waits for the one before: the fold, the scalars computed from it, the next pass. The rows
of a batch are independent, so they overlap, and their scalars are computed in vectors. A batch stays in cache.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from fuser.cpu.facts import Facts
from fuser.cpu.frame import Digits
from fuser.cpu.lanes import COSTLY
from fuser.cpu.rows import Rows
from fuser.cpu.vir import nodes as ir
from fuser.ops import LOW
from fuser.scheduler.nodes import row_cost

ROWS = 16  # most rows of a batch
BYTES = 1 << 14  # most bytes that the rows of a batch read and write: half of a first-level cache of 32 KiB
_NO_VARIABLES = ("const", "pair")
FIRST, FITS, HELD, R = ir.Name("first"), ir.Name("fits"), ir.Name("held"), ir.Name("r")


def pays(facts: Facts) -> bool:
    """Whether a kernel's rows are batched: its passes wait for two folds, or it reads or writes 16-bit floats.

    Rows of wider floats are batched only if short: passes over longer rows are memory-bound, and batches read in
    bursts.
    """
    if not facts.is_row or facts.passes.loops < 2 or facts.checked or not facts.kept_axes:
        return False
    folding = sum(bool(p.folds) for p in facts.passes)
    length = math.prod(a.hint for a in facts.reduced_axes)
    low = any(dtype in LOW for _, dtype in facts.plan.buffers)
    return (folding > 1 or low) and length * bytes_of(facts) * (2 if low else 8) < BYTES


def bytes_of(facts: Facts) -> int:
    """Bytes that one element of a row reads, writes and keeps."""
    loads = {r.attr for n, r in enumerate(facts.plan.rows) if r.op == "load" and facts.is_full(n)}
    stored = [s.buffer for s in facts.plan.stores if s in facts.passes.full_stores]
    kept = sum(facts.plan.rows[n].dtype.itemsize for n in facts.kept)
    return max(1, kept + sum(facts.dtypes[b].itemsize for b in (*(buffer for buffer, _ in loads), *stored)))


class Batch:
    """The batches of one function: the variables of each row, and arrays for values that later passes need."""

    def __init__(self, rows: Rows, digits: Digits, buffers: Callable[[], None]) -> None:
        """`buffers` declares the row buffers of row `r`."""
        self.rows, self.out, self.digits, self.buffers = rows, rows.out, digits, buffers
        self.known: list[int] = []  # rows of the plan whose value is kept for each row of a batch

    @contextmanager
    def each(self) -> Iterator[None]:
        """The loop over batches; where rows are long, a batch is one row."""
        out = self.out
        sizes: list[ir.Value] = [ir.Name(f"n_{a.sym.name}") for a in self.rows.facts.reduced_axes]
        length = functools.reduce(operator.mul, sizes)
        out.let("i64", "fits", ir.Number(BYTES) // (length * bytes_of(self.rows.facts) + 1))
        out.let("i64", "batch", ir.Select(FITS < 1, ir.Number(1), ir.least(FITS, ROWS)))
        with out.block(ir.For("first", ir.Name("begin"), ir.Name("end"), ir.Name("batch"))):
            out.let("i64", "held", ir.least(FIRST + "batch", "end") - FIRST)
            if len(self.digits) > 1:
                self._number()
            yield

    def _number(self) -> None:
        """Compute the digits of each row's unit number into arrays."""
        for name, _ in self.digits:
            self.out.scratch("i64", f"{name}s", ROWS)
        with self.out.block(ir.For("r", ir.Number(0), HELD)):
            self.out.var("i64", "rest", FIRST + R)
            for at, (name, size) in reversed(list(enumerate(self.digits))):
                self.out.set(ir.Name(f"{name}s")[R], ir.Name("rest") % size if at else "rest")
                if at:
                    self.out.set("rest", ir.Name("rest") // size)

    @contextmanager
    def over(self, simd: bool = False) -> Iterator[None]:
        """A loop over the rows of a batch; the values it declares for each row are kept for later loops."""
        rows, out, made = self.rows, self.out, set(self.rows.made)
        spot = len(out.statements)
        with out.block(rows.simd("r", 0, HELD) if simd else ir.For("r", ir.Number(0), HELD)):
            out.let("i64", "u", FIRST + R)
            for name, _ in self.digits:
                out.let("i64", name, ir.Name(f"{name}s")[R] if len(self.digits) > 1 else ir.Name("u"))
            for n in self.known:
                out.let(rows.facts.kind(n), f"t{n}", self._held(n))
            if not simd:
                self.buffers()
            yield
            fresh = [n for n in sorted(rows.made - made) if rows.plan.rows[n].op not in _NO_VARIABLES]
            for n in fresh:
                out.set(self._held(n), f"t{n}")
        self.known += fresh
        out.statements[spot:spot] = [ir.Scratch(rows.facts.kind(n), f"t{n}s", (ROWS,), 0, zero=False) for n in fresh]

    def takes_apart(self, before: Sequence[int]) -> bool:
        """Whether scalars before a pass are computed in a vectorised loop: there are some, and none calls a library.

        A library's vector function differs from its scalar one in the last bits, so the result would depend on the
        row.
        """
        rows = [self.rows.plan.rows[n] for n in before if n not in self.rows.made]
        rows = [r for r in rows if r.op not in _NO_VARIABLES]
        own = [r.traits.inline and r.dtype is not torch.float64 or row_cost(r) < COSTLY for r in rows]
        return bool(own) and all(own)

    @staticmethod
    def _held(n: int) -> ir.At:
        return ir.Name(f"t{n}s")[R]


__all__ = ["BYTES", "ROWS", "Batch", "bytes_of", "pays"]
