"""Loads under a condition that all neighbours along the vector axis share: a loop reads memory, or a page of zeros.

g++ makes no vectors of most loads under a condition, even where it is the same in each turn of the loop.
"""

from __future__ import annotations

from fuser.cpu.nest import Nest
from fuser.ir.loop_body import indirect_rows
from fuser.ir.sizes import LOOP, ONE, coefficient, substitute, symbol

LONGEST = 1024  # elements of a loop: of as many is the page of zeros
ZEROS = f"""\
static const u64 fuser_zeros[{LONGEST}] __attribute__((aligned(64))) = {{}};
"""


class PartsNest(Nest):
    """A nest whose loops of at most `LONGEST` turns look at such conditions once."""

    def open_parts(self, phase: int, start: str, place: str) -> None:
        """Before a loop of elements from `start` on; it finds element `place` of a part."""
        assert self.vector is not None
        loads = [n for n in self.rows_of(phase) if self.hangs_together(n)]
        for n in self.closure(self.plan.rows[n].args[0] for n in loads):
            self.declare(n)
        for n in loads:
            row = self.plan.rows[n]
            at = self.index(substitute(row.attr[1][0], {self.vector.sym: symbol(start, LOOP)}))
            text = f"{self.ref(row.args[0])} ? (const void*)({row.attr[0]} + ({at})) : fuser_zeros"
            self.out.add(f"const auto* const part{n} = (decltype({row.attr[0]}))({text});")
            self.parts[n] = f"part{n}[{place}]"

    def close_parts(self, phase: int) -> None:
        """After that loop."""
        for n in self.rows_of(phase):
            if self.hangs_together(n):
                del self.parts[n]

    def rows_of(self, phase: int) -> list[int]:
        """Rows that a pass computes in its loops."""
        available = self._available(phase)
        return [n for n in self.closure(self.roots(phase), available) if n not in available]

    def hangs_together(self, n: int) -> bool:
        """Whether row `n` is a load under such a condition."""
        row = self.plan.rows[n]
        if row.op != "load" or not row.args or self.vector is None or n in self.guarded or n in self.staged:
            return False
        if self.vector.sym in self.plan.varies[row.args[0]] or any(m in self.kept_rows for m in self.closure(row.args)):
            return False
        return not indirect_rows(row) and coefficient(row.attr[1][0], self.vector.sym) == ONE


__all__ = ["LONGEST", "ZEROS", "PartsNest"]
