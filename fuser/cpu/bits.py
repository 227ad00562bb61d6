"""Loops over short rows of 8-bit and 16-bit elements that are moved as bits, in whole registers under masks.

For pads, joins, slices, flips. g++ vectorises their loops too, but handles a row shorter than a vector element by
element. Conditions are masks, a bit for each lane. Machines without such masks have the plain loop.
"""

from __future__ import annotations

from collections.abc import Set

import torch

from fuser.cpu.conditions import find_edges
from fuser.cpu.facts import Facts, constant, storage_type
from fuser.cpu.float_rows import bits_of
from fuser.cpu.rows import Rows
from fuser.cpu.text import filled
from fuser.cpu.vir import nodes as ir
from fuser.ir.loop_body import indirect_rows
from fuser.machines import Machine
from fuser.ops import JOINING, LOGIC, TURNING
from fuser.scheduler.kernel_plan import Store

SHORTEST, LONGEST = 4, 256  # bytes of a row
_OF_MASKS = (*JOINING, "!")
_BYTES = (torch.bool, torch.uint8, torch.int8)
_FIRST = """\
#if !defined(__clang__)
#define FUSER_MASKS 1
FUSER_FN u64 fuser_first(i64 n) { return __builtin_ia32_bzhi_di(~0ULL, n < 0 ? 0 : n < 64 ? n : 64); }
"""
# `back` gives the `n` elements that end at p (or a full vector), in descending order.
_TEXT = """\
typedef CELL BITS __attribute__((vector_size(64)));
FUSER_FN BITS BITS_load(const void* p, u64 m) {
  return __builtin_ia32_loaddquMODE512_mask((const CELL*)p, (BITS){}, (MASK)m);
}
FUSER_FN void BITS_store(void* p, BITS x, u64 m) { __builtin_ia32_storedquMODE512_mask((CELL*)p, x, (MASK)m); }
FUSER_FN BITS BITS_pick(u64 m, BITS a, BITS b) { return __builtin_ia32_blendmBLEND_512_mask(b, a, (MASK)m); }
FUSER_FN BITS BITS_back(const void* p, i64 n) {
  const BITS x = BITS_load((const CELL*)p - (LANES - 1), fuser_first(n) << (n < LANES ? LANES - n : 0));
  BITS from;
  for (int l = 0; l < LANES; ++l) from[l] = LANES - 1 - l;
  return __builtin_shuffle(x, from);
}
"""
_WORDS = {
    1: {"CELL": "char", "MODE": "qi", "MASK": "u64", "BLEND": "b", "BITS": "fuser_bits1", "LANES": "64"},
    2: {"CELL": "i16", "MODE": "hi", "MASK": "u32", "BLEND": "w", "BITS": "fuser_bits2", "LANES": "32"},
}


def helpers(uses: Set[str], machine: Machine) -> str:
    """C++ of the vector types of one-byte and two-byte elements, if used."""
    assert machine.masks or "FUSER_MASKS" not in uses
    text = "".join(filled(_TEXT, words) for words in _WORDS.values() if f"{words['BITS']}_store" in uses)
    return f"{_FIRST}{text}#else\n#define FUSER_MASKS 0\n#endif\n" if text else ""


class Bits:
    """The innermost loop of a pointwise nest that moves elements of one size."""

    macro = "FUSER_MASKS"  # this macro is not 0 where there are such registers

    def __init__(self, facts: Facts) -> None:
        self.facts, self.plan = facts, facts.plan
        self.stores = [s for s in self.plan.stores if s in facts.passes.full_stores]
        self.edges = find_edges(facts)
        self.rows = facts.passes.closure([s.row for s in self.stores], set(self.edges))
        self.masks: set[int] = set(self.edges)
        for n in self.rows:
            row = self.plan.rows[n]
            if row.traits.sign in _OF_MASKS and all(a in self.masks or not facts.is_full(a) for a in row.args):
                self.masks.add(n)
        self.size = min((facts.dtypes[s.buffer].itemsize for s in self.stores), default=0)
        self.lanes = facts.machine.vector_bytes // max(1, self.size)
        self.vector = f"fuser_bits{self.size}"  # the C++ vector type

    @staticmethod
    def of(facts: Facts) -> Bits | None:
        """The loop, if all rows move elements of one size and the rows in memory are short; else None."""
        if not facts.machine.masks or facts.vector is None:
            return None
        if facts.has_checks or facts.staged or facts.hoisted:
            return None
        found = Bits(facts)
        short = found.size in _WORDS and SHORTEST <= facts.vector.hint * found.size < LONGEST
        fits = short and all(map(found._store_fits, found.stores)) and all(map(found._row_fits, found.rows))
        return found if fits else None

    def _store_fits(self, s: Store) -> bool:
        dtype = self.facts.dtypes[s.buffer]
        same = dtype is self.facts.moved.get(s.row, self.plan.rows[s.row].dtype)
        return same and s.row not in self.masks and dtype.itemsize == self.size and self.facts.step(s.address) == 1

    def _row_fits(self, n: int) -> bool:
        row = self.plan.rows[n]
        if n in self.masks:
            return True
        data = row.args[1:] if row.op == "load" or row.traits.chooses else row.args
        if not (n in self.facts.moved or row.dtype in _BYTES) or any(a in self.masks for a in data):
            return False
        if row.op == "load":
            own = self.facts.dtypes[row.buffer]
            same = own is self.facts.moved.get(n, row.dtype) and own.itemsize == self.size
            along = self.facts.step(row.address)
            known = not row.args or row.args[0] in self.masks or not self.facts.is_full(row.args[0])
            plain = not indirect_rows(row) and n not in self.facts.guarded and n not in self.facts.parts
            return same and known and plain and (along == 1 or (along == -1 and not row.args))
        if row.traits.chooses:
            return row.args[0] in self.masks or not self.facts.is_full(row.args[0])
        alike = row.dtype in _BYTES and all(self.plan.rows[a].dtype is row.dtype for a in row.args)
        return row.op == "round_to" or (alike and row.traits.sign in LOGIC)

    def emit(self, rows: Rows) -> None:
        """The loop over `length` elements from `start` on; the last register is partial."""
        out, length, k = rows.out, ir.Name("length"), ir.Name("k")
        for n in self.rows:
            row = self.plan.rows[n]
            if row.op == "load" and n not in self.masks:
                kind = f"{storage_type(self.facts.dtypes[row.buffer])}* const"
                out.let(kind, f"from{n}", rows.address(row.buffer, row.address))
        for at, s in enumerate(self.stores):
            of = storage_type(self.facts.dtypes[s.buffer])
            out.var(f"{of}* const", f"into{at}", ir.Unary("&", rows.target(s)))
        with out.block(ir.For("k", ir.Number(0), length, ir.Number(self.lanes))):
            out.let("u64", "some", ir.First(self.size, length - k))
            for n in self.rows:
                out.let("u64" if n in self.masks else self.vector, f"b{n}", self._value(n))
            for at, s in enumerate(self.stores):
                out.add(ir.Store(self.size, ir.Name(f"into{at}") + k, (self._data(s.row, s.row),), ir.Name("some")))

    def _value(self, n: int) -> ir.Value:
        row, k = self.plan.rows[n], ir.Name("k")
        if n in self.edges:
            before, place = self.edges[n]
            first = ir.First(self.size, place - "start" - k)
            return first if before else ~first
        if n in self.masks:
            args = [self._mask(a) for a in row.args]
            return ir.Binary(row.traits.sign, *args) if row.traits.sign in JOINING else ~args[0]
        if row.op == "load":
            at, length = ir.Name(f"from{n}"), ir.Name("length")
            if self.facts.step(row.address) != 1:
                loaded = ir.Load(self.size, at - k, back=length - k)
            else:
                some = ir.Name("some")
                loaded = ir.Load(self.size, at + k, some & self._mask(row.args[0]) if row.args else some)
            return ir.Cast(self.vector, loaded.differs(0)) & 1 if row.dtype is torch.bool else loaded
        if row.traits.chooses:
            _, a, b = row.args
            return ir.Blend(self.size, self._mask(row.args[0]), self._data(a, n), self._data(b, n))
        args = [self._data(a, n) for a in row.args]
        if row.traits.sign in JOINING:
            return ir.Binary(row.traits.sign, *args)
        if row.traits.sign in TURNING:
            return ir.Binary("^", args[0], ir.Number(1)) if row.dtype is torch.bool else ~args[0]
        return args[0]

    def _mask(self, n: int) -> ir.Value:
        none = ir.Cast("u64", ir.Number(0))
        return ir.Name(f"b{n}") if self.facts.is_full(n) else ir.Select(self.facts.scalar(n), ~none, none)

    def _data(self, n: int, user: int) -> ir.Value:
        """Row `n` as lanes of row `user`; a constant takes the 16-bit float dtype of `user`."""
        if self.facts.is_full(n):
            return ir.Name(f"b{n}")
        row, half = self.plan.rows[n], self.facts.moved.get(user)
        if row.op == "const":
            value: ir.Value = ir.Number(bits_of(float(row.attr), half)) if half is not None else constant(row)
        else:
            value = self.facts.scalar(n)
        return ir.Splat(self.size, ir.Cast(_WORDS[self.size]["CELL"], value))


__all__ = ["Bits", "helpers"]
