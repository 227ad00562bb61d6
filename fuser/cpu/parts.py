"""Loads that g++ does not vectorise, prepared before the loop.

- A load under a condition that all neighbours along the vector axis share: the loop reads memory, or a page of zeros.
- A load that runs backwards, in a loop over elements of several widths: a piece of it is turned round before.
"""

from __future__ import annotations

from fuser.cpu.nest import Nest, storage_type
from fuser.cpu.vir import nodes as ir
from fuser.ir.sizes import LOOP, ONE, Expr, expr, substitute, symbol

LONGEST = 1024  # elements of a loop: of as many is the page of zeros
ZEROS = f"""\
static const u64 fuser_zeros[{LONGEST}] __attribute__((aligned(64))) = {{}};
"""


class PartsNest(Nest):
    """A nest whose loops of at most `LONGEST` iterations evaluate such conditions once."""

    def _open_parts(self, phase: int, start: str, place: ir.Value, count: ir.Value) -> None:
        """Before a loop of `count` elements from `start` on, whose current index in a part is `place`."""
        assert self.vector is not None
        if self.checked:
            return
        for n in filter(self._runs_back, self.rows_of(phase)):
            buffer, (address,) = self.plan.rows[n].attr
            at = self.index(substitute(address, {self.vector.sym: symbol(start, LOOP)}))
            part = ir.Name(f"part{n}")
            self.out.scratch(storage_type(self.dtypes[buffer]), part.name, LONGEST, aligned=self.line)
            with self.out.block(ir.For("k", ir.Number(0), count, simd=True)):
                self.out.set(part["k"], ir.Name(buffer)[at - "k"])
            self.parts[n] = part[place]
        loads = [n for n in self.rows_of(phase) if self._hangs_together(n)]
        for n in self.closure(self.plan.rows[n].args[0] for n in loads):
            self.declare(n)
        for n in loads:
            row = self.plan.rows[n]
            open_part(self, n, substitute(row.attr[1][0], {self.vector.sym: symbol(start, LOOP)}))
            self.parts[n] = ir.Name(f"part{n}")[place]

    def _close_parts(self, phase: int) -> None:
        """After that loop."""
        for n in self.rows_of(phase):
            if self.is_part(n):
                del self.parts[n]

    def is_part(self, n: int) -> bool:
        """Whether row `n` is such a load."""
        return not self.checked and (self._hangs_together(n) or self._runs_back(n))

    def rows_of(self, phase: int) -> list[int]:
        """Rows that a pass computes in its loops."""
        available = self._available(phase)
        return [n for n in self.closure(self.passes[phase].roots, available) if n not in available]

    def _hangs_together(self, n: int) -> bool:
        row = self.plan.rows[n]
        if row.op != "load" or not row.args or self.vector is None or n in self.guarded or n in self.staged:
            return False
        if self.vector.sym in self.plan.varies[row.args[0]] or any(m in self.kept_rows for m in self.closure(row.args)):
            return False
        return self.step(row.attr[1][0]) == ONE

    def _runs_back(self, n: int) -> bool:
        """Whether row `n` is a load that runs backwards in a loop over elements of several widths."""
        row = self.plan.rows[n]
        if row.op != "load" or row.args or n in self.guarded:
            return False
        widths = {d.itemsize for _, d in self.plan.buffers} | {r.dtype.itemsize for r in self.plan.rows}
        return len(widths) > 1 and self.step(row.attr[1][0]) == expr(-1)


def open_part(nest: Nest, n: int, address: Expr) -> None:
    """What the masked load `n` reads: memory, or where its condition does not hold the page of zeros."""
    row = nest.plan.rows[n]
    memory = ir.Cast("const void*", nest.address(row.attr[0], address))
    source = ir.Select(nest.ref(row.args[0]), memory, ir.Name("fuser_zeros"))
    kind = f"{storage_type(nest.dtypes[row.attr[0]])}*"
    nest.out.let(f"{kind} const", f"part{n}", ir.Cast(f"const {kind}", source))


__all__ = ["LONGEST", "ZEROS", "PartsNest", "open_part"]
