"""Which rows a nest computes inside its innermost loops, and in which pass over them: found once for each nest."""

from __future__ import annotations

from collections.abc import Iterable, Set

from fuser.ir.loop_body import indirect_rows
from fuser.ir.sizes import INDIRECT, Expr, Sym, symbols
from fuser.scheduler.plan import KernelPlan


class Passes:
    """The passes of `plan` over loops along the axes `inside`; the rows `constant` are known before these loops."""

    def __init__(self, plan: KernelPlan, inside: Set[Sym], constant: Set[int]) -> None:
        self.deps = tuple((*row.args, *sorted(indirect_rows(row))) for row in plan.rows)
        varying = (n for n, along in enumerate(plan.varies) if along & inside)
        self.full = frozenset(n for n in varying if n not in constant)
        self.full_stores = frozenset(s for s in plan.stores if s.row in self.full or symbols(s.address) & inside)
        phases = [s.phase for s in self.full_stores] + [r.phase for r in plan.reductions]
        self.count = 1 + max(phases, default=-1)
        self._plan = plan
        self._roots: dict[int, list[int]] = {}
        self._first: dict[int, int] = {}
        for phase in range(self.count):
            for n in self.closure(self.roots(phase)):
                self._first.setdefault(n, phase)

    def closure(self, roots: Iterable[int], stop: Set[int] = frozenset()) -> list[int]:
        """Rows inside the innermost loops that `roots` need, in order; not looking behind `stop`."""
        seen: set[int] = set()
        pending = list(roots)
        while pending:
            n = pending.pop()
            if n in seen or n not in self.full:
                continue
            seen.add(n)
            if n not in stop:
                pending += self.deps[n]
        return sorted(seen)

    def roots(self, phase: int) -> list[int]:
        """Rows that the pass of `phase` must produce inside the loops."""
        found = self._roots.get(phase)
        if found is None:
            stores = [s for s in self._plan.stores if s.phase == phase and s in self.full_stores]
            out = [s.row for s in stores] + [n for s in stores for n in address_rows(s.address)]
            found = self._roots[phase] = out + [r.row for r in self._plan.reductions if r.phase == phase]
        return found

    def first(self, n: int) -> int:
        """The first pass whose loops compute row `n`. KeyError if none does."""
        return self._first[n]


def address_rows(address: Expr) -> list[int]:
    """The rows whose values an address uses."""
    return [int(s.name[1:]) for s in symbols(address) if s.kind == INDIRECT]


__all__ = ["Passes", "address_rows"]
