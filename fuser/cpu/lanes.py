"""Pointwise loops in explicit vectors: values are rounded to 16 bits, float16 is read or written, or all is bfloat16.

So are loops of elementary functions in float32, whose operations wait for each other, and rows of all floats that end
with a part of a vector.

The instructions are those of `ops/lanes_cpp.py`.
The loop computes several independent vectors at a time, then single ones, the last under a mask. Masked loads read only
the lanes of their mask. A comparison of the index along the vector axis becomes a mask: all lanes before the index at
which it changes, or all from there on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from fuser.cpu.facts import Facts, storage_type
from fuser.cpu.rows import Rows
from fuser.cpu.segments import find_edges
from fuser.cpu.vir import nodes as ir
from fuser.cpu.vir.builder import Builder
from fuser.ir.loop_body import Row
from fuser.ir.sizes import ONE, expr
from fuser.lazy_dataclasses import dataclass
from fuser.ops import LOW, has_lanes
from fuser.scheduler.kernel_plan import Store
from fuser.scheduler.nodes import row_cost

VECTORS, FEWER = 4, 2
MANY_ROWS = 60
COSTLY = 9  # operations of a function that is worth vectors by itself
LANES = ir.Name("FUSER_LANES")  # elements of a vector
SHORT = 256  # elements of a row, of which what fills no vector takes much of the time of g++'s loops
SHORTEST = 4  # elements of a row: fewer fill no vector
DTYPES = (torch.float32, torch.bool, *LOW)  # that vectors read and write
TYPES = {torch.float32: "lanes_f", torch.bool: "lanes_i"}


@dataclass(frozen=True)
class Stream:
    """What is read or written along the vector axis: its pointer's name, dtype, and first element."""

    name: str
    dtype: torch.dtype
    element: ir.Value

    @property
    def kind(self) -> str:
        """The C++ type of its elements."""
        return storage_type(self.dtype)


class LaneLoop:
    """The innermost loop of a pointwise nest, without reductions; `fits` says whether it can be written so."""

    macro = "FUSER_LANES"  # is not 0 where there are such vectors

    def __init__(self, facts: Facts) -> None:
        self.facts, self.plan = facts, facts.plan
        self.full = [s for s in self.plan.stores if s in facts.passes.full_stores]
        self.stored = [facts.unrounded(s) for s in self.full]
        self.edges = find_edges(facts)
        self.rows = facts.passes.closure(self.stored, set(self.edges))
        self.loads = [n for n in self.rows if self.plan.rows[n].op == "load"]
        self.masked = {n for n in self.loads if self.plan.rows[n].args and n not in facts.parts}
        used = {facts.dtypes[self.plan.rows[n].attr[0]] for n in self.loads}
        used |= {facts.dtypes[s.buffer] for s in self.full}
        self.backward = {n for n in self.loads if facts.step(self.plan.rows[n].attr[1][0]) == expr(-1)}
        self.dtypes = used
        self.in_order = bool(self.masked or self.backward or any(n in self.edges for n in self.rows))
        self.pairs = used == {torch.bfloat16} and not self.in_order  # whose lanes are not
        lone = self.masked or self.backward or self.dtypes == {torch.bfloat16}
        halves = torch.float16 in self.dtypes or (torch.bfloat16 in self.dtypes and lone)
        self.heavy = halves or any(map(self._rounds, self.rows)) or self._is_costly()
        self.vectors = (VECTORS if len(self.rows) < MANY_ROWS else FEWER) if self.heavy else 1

    def fits(self) -> bool:
        """Whether vectors pay, and there is one for every row, load and store."""
        facts = self.facts
        if not facts.machine.lanes or facts.vector is None or facts.vector.hint < SHORTEST:
            return False
        if facts.checks_inside or facts.staged or facts.hoisted:
            return False
        if not self.heavy and not self._is_ragged():
            return False
        return all(map(self._store_fits, self.full, self.stored)) and all(map(self._row_fits, self.rows))

    def _is_costly(self) -> bool:
        """Whether elementary functions decide the time, of which a vector's operations wait for each other."""
        rows = [self.plan.rows[n] for n in self.rows]
        costly = [r for r in rows if row_cost(r) >= COSTLY]
        return bool(costly) and all(r.traits.inline for r in costly)

    def _is_ragged(self) -> bool:
        """Whether rows in one piece end with a part of a vector, on a machine that takes it under a mask."""
        facts = self.facts
        one_piece = not (self.in_order or facts.constant) and len(facts.kept_axes) > 1
        if not facts.machine.masks or facts.vector is None or not one_piece:
            return False
        return facts.vector.hint < SHORT and facts.vector.hint % (facts.machine.vector_bytes // 4) != 0

    def _rounds(self, n: int) -> bool:
        row = self.plan.rows[n]
        return row.op == "round_to" and not self.facts.is_exact(row.args[0], row.attr)

    def _store_fits(self, s: Store, n: int) -> bool:
        dtype = self.facts.dtypes[s.buffer]
        same = (dtype is torch.bool) == (self.plan.rows[n].dtype is torch.bool)
        return same and self.plan.rows[n].dtype in TYPES and dtype in DTYPES and self.facts.step(s.address) == ONE

    def _row_fits(self, n: int) -> bool:
        row = self.plan.rows[n]
        if n in self.edges:
            return True
        if row.dtype not in TYPES or any(self.plan.rows[a].dtype not in TYPES for a in row.args):
            return False
        if row.op == "load":
            buffer, (address,) = row.attr
            if n in self.facts.guarded or self.facts.dtypes[buffer] not in DTYPES:
                return False
            return self.facts.step(address) == ONE or (n in self.backward and not row.args)
        if row.op == "round_to":
            return row.attr in LOW
        return row.op == "to_dtype" or self._cell_dtype(row) is not None

    def _cell_dtype(self, row: Row) -> torch.dtype | None:
        """The dtype of the cell of explicit vectors for a row; None if there is none."""
        kinds = [self.plan.rows[a].dtype for a in row.args[row.traits.typed :]]
        kind = kinds[0] if kinds else row.dtype
        if any(k is not kind for k in kinds):
            return None
        return kind if has_lanes(row.op, kind) else None

    def emit(self, rows: Rows) -> None:
        """The loop over `length` elements from `start` on: groups of vectors, then single ones, the last in part."""
        out = rows.out
        streams = [*((self._read(rows, n), True) for n in self.loads)]
        streams += [(self._write(rows, k, s), False) for k, s in enumerate(self.full)]
        for stream, const in streams:
            out.add(ir.Let(f"{stream.kind}* const", stream.name, ir.Unary("&", stream.element), const))
        needed = {*self.rows, *self.stored, *(m for n in self.rows for m in self._deps(n))}
        for n in sorted(needed - set(self.rows)):
            dtype = self.plan.rows[n].dtype
            out.let(TYPES[dtype], f"t{n}_all", ir.Splat(dtype, rows.ref(n)))
        out.var("i64", "k", 0)
        length = ir.Name("length")
        with out.block(ir.For("k", None, length, ir.Number(self.vectors) * LANES, whole=True)):
            self._body(out, self.vectors, None)
        with out.block(ir.For("k", None, length, LANES)):
            out.let("lanes_m", "some", ir.First(torch.float32, length - "k"))
            self._body(out, 1, ir.Name("some"))

    def _deps(self, n: int) -> Sequence[int]:
        """Rows that row `n` needs as vectors."""
        row = self.plan.rows[n]
        return () if n in self.edges or (row.op == "load" and n not in self.masked) else row.args

    def _read(self, rows: Rows, n: int) -> Stream:
        buffer, (address,) = self.plan.rows[n].attr
        part = rows.places.get(n)
        element = part.value if part is not None else ir.Name(buffer)[rows.index(address)]
        return Stream(f"from{n}", self.facts.dtypes[buffer], element)

    def _write(self, rows: Rows, k: int, s: Store) -> Stream:
        return Stream(f"into{k}", self.facts.dtypes[s.buffer], rows.target(s))

    def _body(self, out: Builder, vectors: int, some: ir.Value | None) -> None:
        """All rows and stores of as many vectors; of one, if `some` names its lanes."""
        for n in self.rows:
            for at, v in enumerate(self._values(n, vectors, some)):
                out.let(TYPES[self.plan.rows[n].dtype], f"t{n}_{at}", v)
        for k, (s, n) in enumerate(zip(self.full, self.stored, strict=True)):
            self._store(out, ir.Name(f"into{k}") + "k", self.facts.dtypes[s.buffer], n, vectors, some)

    def _name(self, n: int, at: int) -> ir.Value:
        return ir.Name(f"t{n}_{at}" if self.facts.is_full(n) else f"t{n}_all")

    def _values(self, n: int, vectors: int, some: ir.Value | None) -> Iterator[ir.Value]:
        """The right-hand sides of row `n`, one for each vector."""
        row = self.plan.rows[n]
        for at in range(vectors):
            args = tuple(self._name(a, at) for a in row.args)
            if n in self.edges:
                before, place = self.edges[n]
                count = place - "start" - "k" - ir.Number(at) * LANES
                lanes = ir.First(torch.bool, count, flags=True)
                yield lanes if before else lanes.same(0)
            elif row.op == "load":
                yield self._load(n, at, args, some)
            elif row.op == "round_to":
                exact, tame = self.facts.is_exact(row.args[0], row.attr), row.args[0] in self.facts.tame
                yield args[0] if exact else ir.Round(row.attr, args[0], tame, vector=True)
            elif row.op == "to_dtype":
                yield _convert(self.plan.rows[row.args[0]].dtype, row.dtype, args[0])
            else:
                kind = self._cell_dtype(row)
                assert kind is not None
                yield ir.Op("lanes_near" if n in self.facts.near else "lanes", row.op, kind, args)

    def _load(self, n: int, at: int, args: tuple[ir.Value, ...], some: ir.Value | None) -> ir.Value:
        start = ir.Name(f"from{n}")
        if self.pairs and some is None:
            pairs = ir.Load(torch.bfloat16, start + "k" + ir.Number(at // 2 * 2) * LANES, paired=True)
            return ir.Half(pairs, odd=bool(at % 2))
        dtype = self.facts.dtypes[self.plan.rows[n].attr[0]]
        if n in self.backward:
            lanes = LANES if some is None else ir.Name("length") - "k"
            return ir.Load(dtype, start - "k" - ir.Number(at) * LANES, back=lanes)
        mask: ir.Value | None = ir.Mask(args[0]) if n in self.masked else None
        if some is not None:
            mask = some if mask is None else some & mask
        return ir.Load(dtype, start + "k" + ir.Number(at) * LANES, mask)

    def _store(
        self, out: Builder, to: ir.Value, dtype: torch.dtype, n: int, vectors: int, some: ir.Value | None
    ) -> None:  # fmt: skip
        exact, tame = self.facts.is_exact(n, dtype), n in self.facts.tame
        together = 2 if self.pairs and some is None else 1
        for at in range(0, vectors, together):
            values = tuple(self._name(n, at + k) for k in range(together))
            out.add(ir.Store(dtype, to + ir.Number(at) * LANES, values, some, exact, tame))


def _convert(source: torch.dtype, target: torch.dtype, value: ir.Value) -> ir.Value:
    if source is target:
        return value
    if target is torch.bool:
        return value.differs(ir.Number(0.0, torch.float32))
    one, zero = (ir.Splat(torch.float32, ir.Number(x, torch.float32)) for x in (1.0, 0.0))
    return ir.Select(value, one, zero)
