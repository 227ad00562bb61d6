"""Pointwise loops in explicit vectors: where halves are rounded, float16 is read or written, or all is bfloat16.

The instructions are those of `ops/lanes_cpp.py`.
A group of elements is computed at a time, in several vectors, so that processors find work while one waits. What is
left in the end goes by way of the stack, through the same instructions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fuser.cpu.nest import Nest, storage_type
from fuser.ir.loop_body import Row
from fuser.ir.sizes import INDIRECT, ONE, coefficient, symbols
from fuser.ops import LOW, cpp_lanes
from fuser.scheduler.plan import Store

VECTORS, FEWER = 4, 2
MANY_ROWS = 60
LONG = 512  # elements of a row whose segments have whole groups
SHORTEST = 64  # elements of a row: what is left of a group costs more than a few elements by themselves
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
        self.rows = nest.closure(self.stored)
        used = {nest.dtypes[self.plan.rows[n].attr[0]] for n in self.rows if self.plan.rows[n].op == "load"}
        used |= {nest.dtypes[s.buffer] for s in self.full}
        self.dtypes = used
        self.pairs = used == {torch.bfloat16}
        self.vectors = VECTORS if len(self.rows) < MANY_ROWS else FEWER
        if nest.parts and nest.vector is not None and nest.vector.hint < LONG:
            self.vectors = 2 if self.pairs else 1

    def fits(self) -> bool:
        """Whether vectors pay, and there is one for every row, load and store."""
        nest = self.nest
        if nest.vector is None or nest.vector.hint < SHORTEST:
            return False
        if nest.has_checks or nest.staged or nest.hoisted or nest.kept_rows:
            return False
        if not (self.pairs or torch.float16 in self.dtypes or any(map(self._rounds, self.rows))):
            return False
        return all(map(self._store_fits, self.full, self.stored)) and all(map(self._row_fits, self.rows))

    def _rounds(self, n: int) -> bool:
        row = self.plan.rows[n]
        return row.op == "round_to" and not self.nest.is_exact(row.args[0], row.attr)

    def _runs_along(self, dtype: torch.dtype, address: object) -> bool:
        assert self.nest.vector is not None
        plain = not any(x.kind == INDIRECT for x in symbols(address))  # type: ignore[arg-type]
        return dtype in NAMES and plain and coefficient(address, self.nest.vector.sym) == ONE  # type: ignore[arg-type]

    def _store_fits(self, s: Store, n: int) -> bool:
        dtype = self.nest.dtypes[s.buffer]
        same = (dtype is torch.bool) == (self.plan.rows[n].dtype is torch.bool)
        return same and self.plan.rows[n].dtype in TYPES and self._runs_along(dtype, s.address)

    def _row_fits(self, n: int) -> bool:
        row = self.plan.rows[n]
        if row.dtype not in TYPES or any(self.plan.rows[a].dtype not in TYPES for a in row.args):
            return False
        if row.op == "load":
            buffer, (address,) = row.attr
            masked = bool(row.args) and n not in self.nest.parts or n in self.nest.guarded
            return not masked and self._runs_along(self.nest.dtypes[buffer], address)
        if row.op == "round_to":
            return row.attr in LOW
        return row.op == "to_dtype" or self._cell(row, tuple("x" for _ in row.args)) is not None

    def _cell(self, row: Row, args: tuple[str, ...]) -> str | None:
        kind = row.dtype if row.op == "where" else self.plan.rows[row.args[0]].dtype if row.args else row.dtype
        if any(self.plan.rows[a].dtype is not kind for a in (row.args[1:] if row.op == "where" else row.args)):
            return None
        return cpp_lanes(row.op, kind, *args)

    def emit(self, low: str, high: str) -> None:
        """The loop from `low` to `high`, which are names."""
        assert self.nest.vector is not None
        v, out = self.nest.vector.sym.name, self.out
        loads = [n for n in self.rows if self.plan.rows[n].op == "load"]
        reads = [self._read(n) for n in loads]
        writes = [self._write(k, s) for k, s in enumerate(self.full)]
        out.open(f"for (i64 {v} = {low}; {v} < {high};)")
        out.add(f"const i64 whole = ({high} - {v}) / ({self.vectors} * FUSER_LANES) * ({self.vectors} * FUSER_LANES);")
        out.add(f"const i64 left = whole ? 0 : {high} - {v}, step = whole ? whole : {self.vectors} * FUSER_LANES;")
        for stream, const in [*((r, "const ") for r in reads), *((w, "") for w in writes)]:
            out.add(f"{const}{stream.kind}* {stream.name} = &{stream.address};")
            out.add(f"{stream.kind} rest_{stream.name}[{self.vectors} * FUSER_LANES];")
        out.open("if (left)")
        for r in reads:
            rest = f"fuser_lanes_rest(rest_{r.name}, sizeof rest_{r.name}, {r.name}, left * sizeof({r.kind}))"
            out.add(f"{r.name} = (const {r.kind}*){rest};")
        for w in writes:
            out.add(f"{w.name} = rest_{w.name};")
        out.close()
        out.open(f"for (i64 k = 0; k < step; k += {self.vectors} * FUSER_LANES)")
        self._body()
        out.close()
        for w in writes:
            out.add(f"if (left) __builtin_memcpy(&{w.address}, rest_{w.name}, left * sizeof({w.kind}));")
        out.add(f"{v} += whole ? whole : left;")
        out.close()

    def _read(self, n: int) -> Stream:
        buffer, (address,) = self.plan.rows[n].attr
        place = self.nest.parts.get(n) or f"{buffer}[{self.nest.index(address)}]"
        return Stream(f"from{n}", self.nest.dtypes[buffer], place)

    def _write(self, k: int, s: Store) -> Stream:
        place = self.nest.streamed.get(s) or f"{s.buffer}[{self.nest.index(s.address)}]"
        return Stream(f"into{k}", self.nest.dtypes[s.buffer], place)

    def _body(self) -> None:
        needed = {m for n in (*self.rows, *self.stored) for m in (n, *self.nest.deps(n))}
        for n in sorted(needed - set(self.rows)):
            flags = "_flags" if self.plan.rows[n].dtype is torch.bool else ""
            kind = TYPES[self.plan.rows[n].dtype]
            self.out.add(f"const {kind} t{n}_all = fuser_lanes_all{flags}({self.nest.ref(n)});")
        for n in self.rows:
            for at, text in enumerate(self._values(n)):
                self.out.add(f"const {TYPES[self.plan.rows[n].dtype]} t{n}_{at} = {text};")
        for k, (s, n) in enumerate(zip(self.full, self.stored, strict=True)):
            self._store(f"into{k} + k", self.nest.dtypes[s.buffer], n)

    def _name(self, n: int, at: int) -> str:
        return f"t{n}_{at}" if self.nest.is_full(n) else f"t{n}_all"

    def _values(self, n: int) -> Iterator[str]:
        """The right-hand sides of row `n`, one for each vector of the group."""
        row = self.plan.rows[n]
        for at in range(self.vectors):
            args = tuple(self._name(a, at) for a in row.args)
            if row.op == "load":
                yield self._load(n, at)
            elif row.op == "round_to":
                exact, tame = self.nest.is_exact(row.args[0], row.attr), row.args[0] in self.nest.tame
                yield args[0] if exact else f"fuser_lanes_round_{_rounding(row.attr, tame)}({args[0]})"
            elif row.op == "to_dtype":
                yield _convert(self.plan.rows[row.args[0]].dtype, row.dtype, args[0])
            else:
                yield self._cell(row, args) or ""

    def _load(self, n: int, at: int) -> str:
        if self.pairs:
            pairs = f"fuser_lanes_load_pairs(from{n} + k + {at // 2 * 2} * FUSER_LANES)"
            return f"fuser_lanes_{'odd' if at % 2 else 'even'}({pairs})"
        dtype = self.nest.dtypes[self.plan.rows[n].attr[0]]
        return f"fuser_lanes_load_{NAMES[dtype]}(from{n} + k + {at} * FUSER_LANES)"

    def _store(self, to: str, dtype: torch.dtype, n: int) -> None:
        values = [self._name(n, at) for at in range(self.vectors)]
        if dtype is torch.bfloat16:
            values = [self._bits(n, dtype, v) for v in values]
        if self.pairs:
            for at in range(0, self.vectors, 2):
                pair = f"{values[at]}, {values[at + 1]}"
                self.out.add(f"fuser_lanes_store_pairs({to} + {at} * FUSER_LANES, {pair});")
            return
        for at, value in enumerate(values):
            self.out.add(f"fuser_lanes_store_{NAMES[dtype]}({to} + {at} * FUSER_LANES, {value});")

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
