"""Which loops are written in explicit vectors, and what is known of their rows; `lane_loops.py` writes them.

They are loops with values rounded to 16 bits, float16 in memory, or bfloat16 throughout; loops of elementary float32
functions, whose operations form a dependence chain; and on machines with masks rows of float32 or 16-bit floats with a
tail. So are passes over short rows: sums stay in registers from the first element of a row to the last, where g++ would
load and store them around the tail.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch

from fuser.cpu.accumulators import Accumulator
from fuser.cpu.conditions import find_edges
from fuser.cpu.facts import Facts
from fuser.cpu.vir import nodes as ir
from fuser.ir.loop_body import Row, is_both
from fuser.ops import LOW, has_lanes
from fuser.scheduler.kernel_plan import Store
from fuser.scheduler.nodes import row_cost

VECTORS, FEWER = 4, 2  # vectors of a turn of a costly loop; the same of one with `MANY_ROWS` or more
MANY_ROWS = 60
COSTLY = 9  # operations of a function that alone is worth explicit vectors
SHORT = 256  # elements of a row, of which the tail takes much of the time of g++'s loops
SHORTEST = 4  # elements of a row: fewer fill no vector
LANES = ir.Name("FUSER_LANES")  # elements of a vector
DTYPES = (torch.float32, torch.bool, *LOW)  # dtypes that vectors load and store
SECOND = (torch.float32, *LOW)  # dtypes of loads with stride 2
TYPES = {torch.float32: "lanes_f", torch.bool: "lanes_i"}
WIDE = {torch.float64: "lanes_d", torch.bool: "lanes_l"}  # vector types of passes in float64


class Lanes:
    """A pointwise nest's innermost loop, or the pass `phase` of a row nest with the accumulators `own`, in vectors.

    scalars: rows that are the same in all lanes; rows: the others of the loop. found: rows with a buffer that an
    earlier pass filled; fresh: those whose buffer this pass fills. stores, and the row that each stores. edges: rows
    that compare an index, which become masks; inside: conditions that hold between all edges. loads, of them masked,
    backward, and every second element. types: vectors by dtype; float, width: of the floats in a vector. pairs: whether
    vectors hold pairs of bfloat16, whose lanes are not in order. vectors: how many are computed at a time.
    """

    macro = "FUSER_LANES"  # this macro is not 0 where there are such vectors

    def __init__(self, facts: Facts, phase: int, own: Sequence[Accumulator]) -> None:
        self.facts, self.plan, self.phase, self.own = facts, facts.plan, phase, own
        rows = self.plan.rows
        self.stores = [s for s in self.plan.stores if s in facts.passes.full_stores and s.phase == phase]
        self.stored = [facts.unrounded(s) for s in self.stores]
        self.edges = find_edges(facts, 2) if not facts.is_row else {}
        self.found = {n for n in facts.kept if facts.passes.first(n) < phase}
        roots = [*self.stored, *(a.reduce.row for a in own)]
        needed = facts.passes.closure(roots, {*self.edges, *self.found})
        self.rows = [n for n in needed if facts.along.sym in self.plan.varies[n]]
        self.scalars = [n for n in needed if facts.along.sym not in self.plan.varies[n]]
        self.fresh = [n for n in self.rows if n in facts.kept and n not in self.found]
        self.inside = _inside(rows, self.rows, self.edges)
        self.loads = [n for n in self.rows if rows[n].op == "load" and n not in self.found]
        self.masked = {n for n in self.loads if rows[n].args and n not in facts.parts}
        steps = {n: facts.step(rows[n].address) for n in self.loads}
        self.backward = {n for n, step in steps.items() if step == -1}
        self.second = {n for n, step in steps.items() if step == 2 and facts.dtypes[rows[n].buffer] in SECOND}
        self.dtypes = {facts.dtypes[rows[n].buffer] for n in self.loads}
        self.dtypes |= {facts.dtypes[s.buffer] for s in self.stores}
        wide = facts.is_row and torch.float64 in {rows[n].dtype for n in self.rows}
        self.types = WIDE if wide else TYPES
        self.float, self.width = (torch.float64, LANES // 2) if wide else (torch.float32, LANES)
        self.in_order = bool(self.masked or self.backward or any(n in self.edges for n in self.rows))
        self.heavy = self._is_heavy()
        self.vectors = (VECTORS if len(self.rows) < MANY_ROWS else FEWER) if self.heavy else 1
        if own:
            self.vectors = max(1, facts.lanes * self.float.itemsize // facts.machine.vector_bytes)
        plain = not (self.in_order or self.second or facts.kept)
        self.pairs = self.dtypes == {torch.bfloat16} and plain and not (own and self.vectors % 2)

    @staticmethod
    def of(facts: Facts, phase: int = 0, own: Sequence[Accumulator] = (), filled: bool = False) -> Lanes | None:
        """The loop in vectors; None if they do not pay, or a row, load or store has no vector form.

        `filled`: many values are chosen by conditions that hold for the whole loop, or up to an edge.
        """
        if not facts.machine.lanes or facts.vector is None or facts.vector.hint < SHORTEST:
            return None
        if facts.checks_inside or facts.plan.split or facts.staged or facts.hoisted:
            return None
        found = Lanes(facts, phase, own)
        pays = found._is_plain_pass() if facts.is_row else found.heavy or filled or found._is_ragged()
        return found if pays and not found._is_all_tail() and found._has_forms() else None

    @property
    def may_repeat(self) -> bool:
        """Whether the last vector of a row may take elements of the one before it again, in place of a mask.

        Machines with masks need no such vector. Elsewhere a partial vector is moved by 4, 2 and 1 elements.
        """
        loaded = {self.plan.rows[n].buffer for n in self.loads}
        return not self.facts.machine.masks and not any(s.buffer in loaded for s in self.stores)

    def _is_all_tail(self) -> bool:
        """Whether rows fill no vector on a machine without masks: g++'s loop moves their elements sooner."""
        facts = self.facts
        return not (facts.machine.masks or facts.is_row) and facts.along.hint < facts.machine.vector_bytes // 4

    def _has_forms(self) -> bool:
        """Whether every row and store has a vector form."""
        return all(map(self._store_fits, self.stores, self.stored)) and all(map(self._row_fits, self.rows))

    def _is_plain_pass(self) -> bool:
        """Whether a pass uses floats of one width, and if it reduces, stages no result."""
        facts = self.facts
        plain = all(a.dtype is self.float and not a.spec.index for a in self.own)
        staged = self.own and facts.streams_of(self.phase)
        outside = any(n in facts.kept for n in self.scalars)
        if self.types is WIDE:
            used = {m for n in self.rows for m in self.deps(n)}
            plain = plain and self.dtypes <= {torch.float64} and not self.backward
            plain = plain and all(n in self.rows or self.plan.rows[n].dtype is torch.float64 for n in used)
        return plain and not staged and not outside

    def _is_heavy(self) -> bool:
        """Whether g++'s loops are slow: 16-bit floats, or operations of one vector that wait for each other."""
        lone = bool(self.masked or self.backward) or self.dtypes == {torch.bfloat16}
        low = torch.float16 in self.dtypes or (torch.bfloat16 in self.dtypes and lone)
        costly = [r for r in (self.plan.rows[n] for n in self.rows) if row_cost(r) >= COSTLY]
        return low or any(map(self._rounds, self.rows)) or (bool(costly) and all(r.traits.inline for r in costly))

    def _rounds(self, n: int) -> bool:
        row = self.plan.rows[n]
        return row.op == "round_to" and not self.facts.is_exact(row.args[0], row.attr)

    def _is_ragged(self) -> bool:
        """Whether rows that are not cut into segments end in a tail, which explicit vectors take under a mask.

        Machines without masks move a tail by 4, 2 and 1 elements, and g++'s loops are faster.
        """
        facts, hint = self.facts, self.facts.along.hint
        if not facts.machine.masks:
            return False
        one_piece = not (self.in_order or facts.constant) and len(facts.kept_axes) > 1
        return one_piece and hint < SHORT and hint % (facts.machine.vector_bytes // 4) != 0

    def _store_fits(self, s: Store, n: int) -> bool:
        dtype = self.facts.dtypes[s.buffer]
        same = (dtype is torch.bool) == (self.plan.rows[n].dtype is torch.bool)
        known = self.plan.rows[n].dtype in self.types and dtype in (*DTYPES, self.float)
        return same and known and self.facts.step(s.address) == 1

    def _row_fits(self, n: int) -> bool:
        row = self.plan.rows[n]
        if n in self.edges:
            return True
        if n in self.found:
            return row.dtype is self.float
        if row.dtype not in self.types or (n in self.fresh and row.dtype is not self.float):
            return False
        if row.op == "load":
            return self.facts.step(row.address) == 1 or n in self.second or (n in self.backward and not row.args)
        if row.op == "round_to":
            return row.attr in LOW
        return (row.op == "to_dtype" and self.types is TYPES) or self.cell_dtype(row) is not None

    def cell_dtype(self, row: Row) -> torch.dtype | None:
        """The dtype of a row's explicit-vector cell; None if there is no cell."""
        kind = self.plan.rows[row.args[row.traits.typed]].dtype if row.args else row.dtype
        return kind if has_lanes(row.op, kind) else None

    def deps(self, n: int) -> Sequence[int]:
        """Rows that row `n` needs as vectors."""
        row = self.plan.rows[n]
        plain = n in self.edges or n in self.found or (row.op == "load" and n not in self.masked)
        return () if plain else row.args


def _inside(rows: Sequence[Row], within: Sequence[int], edges: Container[int]) -> frozenset[int]:
    """The conditions among the rows `within` that hold between all edges; empty without edges."""
    found: set[int] = set()
    for n in within:
        if n in edges or (is_both(rows[n]) and all(a in found for a in rows[n].args)):
            found.add(n)
    return frozenset(found)


__all__ = ["COSTLY", "MANY_ROWS", "SHORT", "WIDE", "Lanes"]
