"""Pointwise loops in explicit vectors: where halves are rounded, float16 is read or written, or all is bfloat16.

The instructions are those of `ops/lanes_cpp.py`.
A group of elements is computed at a time, in several vectors, so that processors find work while one waits, and what is
left in the end a vector at a time, of which only some lanes are read and written. So are loads under a condition.
Comparisons of the index along the vector axis are as good as where they change: its lanes lie before that or behind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from fuser.cpu.nest import Nest, storage_type
from fuser.cpu.segments import find_edges
from fuser.ir.loop_body import Row
from fuser.ir.sizes import ONE, expr
from fuser.ops import LOW, cpp_lanes
from fuser.scheduler.plan import Store

VECTORS, FEWER = 4, 2
MANY_ROWS = 60
SHORTEST = 4  # elements of a row: fewer fill no vector
NAMES = {torch.float32: "float", torch.bool: "bool", **LOW}
TYPES = {torch.float32: "lanes_f", torch.bool: "lanes_i"}


@dataclass(frozen=True)
class Stream:
    """What is read or written along the vector axis: its pointer's name, dtype, and address in C++."""

    name: str
    dtype: torch.dtype
    address: str

    @property
    def kind(self) -> str:
        """The C++ type of its elements."""
        return storage_type(self.dtype)


class LaneLoop:
    """The innermost loop of a pointwise nest, without reductions; `fits` says whether it can be written so."""

    def __init__(self, nest: Nest) -> None:
        self.nest, self.plan, self.out = nest, nest.plan, nest.out
        self.full = [s for s in self.plan.stores if nest.store_is_full(s)]
        self.stored = [nest.unrounded(s) for s in self.full]
        self.edges = find_edges(nest)
        self.rows = nest.closure(self.stored, set(self.edges))
        self.loads = [n for n in self.rows if self.plan.rows[n].op == "load"]
        self.masked = {n for n in self.loads if self.plan.rows[n].args and n not in nest.parts}
        used = {nest.dtypes[self.plan.rows[n].attr[0]] for n in self.loads}
        used |= {nest.dtypes[s.buffer] for s in self.full}
        self.backward = {n for n in self.loads if nest.step(self.plan.rows[n].attr[1][0]) == expr(-1)}
        self.dtypes = used
        in_order = self.masked or self.backward or any(n in self.edges for n in self.rows)  # lanes of pairs are not
        self.pairs = used == {torch.bfloat16} and not in_order
        self.vectors = VECTORS if len(self.rows) < MANY_ROWS else FEWER

    def fits(self) -> bool:
        """Whether vectors pay, and there is one for every row, load and store."""
        nest = self.nest
        if not nest.machine.lanes or nest.vector is None or nest.vector.hint < SHORTEST:
            return False
        if nest.checks_inside or nest.staged or nest.hoisted or nest.kept_rows:
            return False
        lone = self.masked or self.backward or self.dtypes == {torch.bfloat16}
        halves = torch.float16 in self.dtypes or (torch.bfloat16 in self.dtypes and lone)
        if not halves and not any(map(self._rounds, self.rows)):
            return False
        return all(map(self._store_fits, self.full, self.stored)) and all(map(self._row_fits, self.rows))

    def _rounds(self, n: int) -> bool:
        row = self.plan.rows[n]
        return row.op == "round_to" and not self.nest.is_exact(row.args[0], row.attr)

    def _store_fits(self, s: Store, n: int) -> bool:
        dtype = self.nest.dtypes[s.buffer]
        same = (dtype is torch.bool) == (self.plan.rows[n].dtype is torch.bool)
        return same and self.plan.rows[n].dtype in TYPES and dtype in NAMES and self.nest.step(s.address) == ONE

    def _row_fits(self, n: int) -> bool:
        row = self.plan.rows[n]
        if n in self.edges:
            return True
        if row.dtype not in TYPES or any(self.plan.rows[a].dtype not in TYPES for a in row.args):
            return False
        if row.op == "load":
            buffer, (address,) = row.attr
            if n in self.nest.guarded or self.nest.dtypes[buffer] not in NAMES:
                return False
            return self.nest.step(address) == ONE or (n in self.backward and not row.args)
        if row.op == "round_to":
            return row.attr in LOW
        return row.op == "to_dtype" or self._cell(row, tuple("x" for _ in row.args)) is not None

    def _cell(self, row: Row, args: tuple[str, ...]) -> str | None:
        kinds = [self.plan.rows[a].dtype for a in row.args[row.traits.typed :]]
        kind = kinds[0] if kinds else row.dtype
        if any(k is not kind for k in kinds):
            return None
        return cpp_lanes(row.op, kind, *args)

    def emit(self, low: str, high: str) -> None:
        """The loop from `low` to `high`, which are names: groups of vectors, then single ones, the last in part."""
        assert self.nest.vector is not None
        v, out = self.nest.vector.sym.name, self.out
        streams = [*((self._read(n), "const ") for n in self.loads)]
        streams += [(self._write(k, s), "") for k, s in enumerate(self.full)]
        out.open("")
        out.add(f"const i64 start = {low}, length = {high} - start;")
        out.add(f"const i64 {v} = start;")
        for stream, const in streams:
            out.add(f"{const}{stream.kind}* const {stream.name} = &{stream.address};")
        needed = {*self.rows, *self.stored, *(m for n in self.rows for m in self._deps(n))}
        for n in sorted(needed - set(self.rows)):
            flags = "_flags" if self.plan.rows[n].dtype is torch.bool else ""
            kind = TYPES[self.plan.rows[n].dtype]
            out.add(f"const {kind} t{n}_all = fuser_lanes_all{flags}({self.nest.ref(n)});")
        out.add("i64 k = 0;")
        out.open(f"for (; k + {self.vectors} * FUSER_LANES <= length; k += {self.vectors} * FUSER_LANES)")
        self._body(self.vectors, "")
        out.close()
        out.open("for (; k < length; k += FUSER_LANES)")
        out.add("const lanes_m some = fuser_lanes_first(length - k);")
        self._body(1, "some")
        out.close()
        out.close()

    def _deps(self, n: int) -> Sequence[int]:
        """Rows that row `n` needs as vectors."""
        row = self.plan.rows[n]
        return () if n in self.edges or (row.op == "load" and n not in self.masked) else row.args

    def _read(self, n: int) -> Stream:
        buffer, (address,) = self.plan.rows[n].attr
        place = self.nest.parts.get(n) or f"{buffer}[{self.nest.index(address)}]"
        return Stream(f"from{n}", self.nest.dtypes[buffer], place)

    def _write(self, k: int, s: Store) -> Stream:
        place = self.nest.streamed.get(s) or f"{s.buffer}[{self.nest.index(s.address)}]"
        return Stream(f"into{k}", self.nest.dtypes[s.buffer], place)

    def _body(self, vectors: int, some: str) -> None:
        """All rows and stores of as many vectors; of one, if `some` names its lanes."""
        for n in self.rows:
            for at, text in enumerate(self._values(n, vectors, some)):
                self.out.add(f"const {TYPES[self.plan.rows[n].dtype]} t{n}_{at} = {text};")
        for k, (s, n) in enumerate(zip(self.full, self.stored, strict=True)):
            self._store(f"into{k} + k", self.nest.dtypes[s.buffer], n, vectors, some)

    def _name(self, n: int, at: int) -> str:
        return f"t{n}_{at}" if self.nest.is_full(n) else f"t{n}_all"

    def _values(self, n: int, vectors: int, some: str) -> Iterator[str]:
        """The right-hand sides of row `n`, one for each vector."""
        row = self.plan.rows[n]
        for at in range(vectors):
            args = tuple(self._name(a, at) for a in row.args)
            if n in self.edges:
                before, place = self.edges[n]
                text = f"fuser_lanes_before({place} - start - k - {at} * FUSER_LANES)"
                yield text if before else f"{text} == 0"
            elif row.op == "load":
                yield self._load(n, at, args, some)
            elif row.op == "round_to":
                exact, tame = self.nest.is_exact(row.args[0], row.attr), row.args[0] in self.nest.tame
                yield args[0] if exact else f"fuser_lanes_round_{_rounding(row.attr, tame)}({args[0]})"
            elif row.op == "to_dtype":
                yield _convert(self.plan.rows[row.args[0]].dtype, row.dtype, args[0])
            else:
                yield self._cell(row, args) or ""

    def _load(self, n: int, at: int, args: tuple[str, ...], some: str) -> str:
        if self.pairs and not some:
            pairs = f"fuser_lanes_load_pairs(from{n} + k + {at // 2 * 2} * FUSER_LANES)"
            return f"fuser_lanes_{'odd' if at % 2 else 'even'}({pairs})"
        name, place = NAMES[self.nest.dtypes[self.plan.rows[n].attr[0]]], f"from{n} + k + {at} * FUSER_LANES"
        masks = [some] if some else []
        if n in self.masked:
            masks.append(f"FUSER_MASK({args[0]})")
        if n in self.backward:
            lanes = "length - k" if some else "FUSER_LANES"
            return f"fuser_lanes_back_{name}(from{n} - k - {at} * FUSER_LANES, {lanes})"
        if not masks:
            return f"fuser_lanes_load_{name}({place})"
        return f"fuser_lanes_part_{name}({place}, {' & '.join(masks)})"

    def _store(self, to: str, dtype: torch.dtype, n: int, vectors: int, some: str) -> None:
        values = [self._name(n, at) for at in range(vectors)]
        if dtype is torch.bfloat16:
            values = [self._bits(n, dtype, v) for v in values]
        if self.pairs and not some:
            for at in range(0, vectors, 2):
                pair = f"{values[at]}, {values[at + 1]}"
                self.out.add(f"fuser_lanes_store_pairs({to} + {at} * FUSER_LANES, {pair});")
            return
        for at, value in enumerate(values):
            place = f"{to} + {at} * FUSER_LANES"
            if some:
                self.out.add(f"fuser_lanes_put_{NAMES[dtype]}({place}, {value}, {some});")
            else:
                self.out.add(f"fuser_lanes_store_{NAMES[dtype]}({place}, {value});")

    def _bits(self, n: int, dtype: torch.dtype, value: str) -> str:
        """Row `n` as the bits of a float whose upper half is the bfloat16 to store, or a NaN."""
        if self.nest.is_exact(n, dtype):
            return f"(lanes_u){value}"
        if n in self.nest.tame:
            return f"fuser_lanes_nearest_bfloat16({value})"
        return f"(lanes_u)fuser_lanes_round_bfloat16({value})"


def _rounding(dtype: torch.dtype, tame: bool) -> str:
    return "tame_bfloat16" if tame and dtype is torch.bfloat16 else LOW[dtype]


def _convert(source: torch.dtype, target: torch.dtype, text: str) -> str:
    if source is target:
        return text
    if target is torch.bool:
        return f"{text} != 0.0f"
    return f"{text} ? fuser_lanes_all(1.0f) : fuser_lanes_all(0.0f)"
