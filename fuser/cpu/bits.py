"""Loops over short rows of bytes or halves that are moved as bits: whole registers, of which some lanes are touched.

Pads, joins, slices, flips. g++ makes vectors of their loops too, but goes through a row shorter than a vector by
elements. Conditions are masks, a bit for each lane. Machines without such masks have the plain loop.
"""

from __future__ import annotations

import torch

from fuser.cpu.moves import bits_of
from fuser.cpu.nest import Nest, constant_text, storage_type
from fuser.cpu.segments import find_edges
from fuser.ir.loop_body import indirect_rows
from fuser.ir.sizes import ONE, expr
from fuser.machines import Machine
from fuser.ops import JOINING, LOGIC, TURNING
from fuser.scheduler.plan import Store

SHORTEST, LONGEST = 4, 256  # bytes of a row
_OF_MASKS = (*JOINING, "!")
_BYTES = (torch.bool, torch.uint8, torch.int8)
_FIRST = """\
#if !defined(__clang__)
#define FUSER_MASKS 1
FUSER_FN u64 fuser_first(i64 n) { return __builtin_ia32_bzhi_di(~0ULL, n < 0 ? 0 : n < 64 ? n : 64); }
"""
# `back` gives the first `n` elements or all of those that end at p, backwards.
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


def helpers(body: str, machine: Machine) -> str:
    """What `body` calls for elements of one byte and of two."""
    assert machine.masks or "fuser_bits" not in body
    text = ""
    for words in _WORDS.values():
        if f"{words['BITS']}_" in body:
            part = _TEXT
            for word, to in words.items():
                part = part.replace(word, to)
            text += part
    return f"{_FIRST}{text}#else\n#define FUSER_MASKS 0\n#endif\n" if text else ""


class BitsLoop:
    """The innermost loop of a pointwise nest that moves elements of one size; `fits` says whether it is one."""

    def __init__(self, nest: Nest) -> None:
        self.nest, self.plan, self.out = nest, nest.plan, nest.out
        self.stores = [s for s in self.plan.stores if nest.store_is_full(s)]
        self.edges = find_edges(nest)
        self.rows = nest.closure([s.row for s in self.stores], set(self.edges))
        self.masks: set[int] = set(self.edges)
        for n in self.rows:
            row = self.plan.rows[n]
            if row.traits.sign in _OF_MASKS and all(a in self.masks or not nest.is_full(a) for a in row.args):
                self.masks.add(n)
        self.size = min((nest.dtypes[s.buffer].itemsize for s in self.stores), default=0)
        self.lanes = nest.machine.vector_bytes // max(1, self.size)

    def fits(self) -> bool:
        """Whether all rows move elements of that size, and rows in memory are short."""
        nest = self.nest
        if not nest.machine.masks or nest.vector is None or self.size not in _WORDS:
            return False
        if nest.has_checks or nest.staged or nest.hoisted:
            return False
        short = SHORTEST <= nest.vector.hint * self.size < LONGEST
        return short and all(map(self._store_fits, self.stores)) and all(map(self._row_fits, self.rows))

    def _is_moved(self, n: int) -> bool:
        return n in self.nest.moved or self.plan.rows[n].dtype in _BYTES

    def _store_fits(self, s: Store) -> bool:
        dtype = self.nest.dtypes[s.buffer]
        same = dtype is self.nest.moved.get(s.row, self.plan.rows[s.row].dtype)
        return same and s.row not in self.masks and dtype.itemsize == self.size and self.nest.step(s.address) == ONE

    def _row_fits(self, n: int) -> bool:
        row = self.plan.rows[n]
        if n in self.masks:
            return True
        data = row.args[1:] if row.op == "load" or row.traits.chooses else row.args
        if not self._is_moved(n) or any(a in self.masks for a in data):
            return False
        if row.op == "load":
            own = self.nest.dtypes[row.attr[0]]
            same = own is self.nest.moved.get(n, row.dtype) and own.itemsize == self.size
            along = self.nest.step(row.attr[1][0])
            known = not row.args or row.args[0] in self.masks or not self.nest.is_full(row.args[0])
            plain = not indirect_rows(row) and n not in self.nest.guarded and n not in self.nest.parts
            return same and known and plain and (along == ONE or (along == expr(-1) and not row.args))
        if row.traits.chooses:
            return row.args[0] in self.masks or not self.nest.is_full(row.args[0])
        alike = row.dtype in _BYTES and all(self.plan.rows[a].dtype is row.dtype for a in row.args)
        return row.op == "round_to" or row.traits.copies or (alike and row.traits.sign in LOGIC)

    def emit(self, low: str, high: str) -> None:
        """The loop from `low` to `high`, which are names."""
        assert self.nest.vector is not None
        v, out, kind = self.nest.vector.sym.name, self.out, f"fuser_bits{self.size}"
        out.open("")
        out.add(f"const i64 start = {low}, length = {high} - start;")
        out.add(f"const i64 {v} = start;")
        for n in self.rows:
            if self.plan.rows[n].op == "load" and n not in self.masks:
                buffer, (address,) = self.plan.rows[n].attr
                of = storage_type(self.nest.dtypes[buffer])
                out.add(f"const {of}* const from{n} = {buffer} + ({self.nest.index(address)});")
        for k, s in enumerate(self.stores):
            place = self.nest.streamed.get(s) or f"{s.buffer}[{self.nest.index(s.address)}]"
            out.add(f"{storage_type(self.nest.dtypes[s.buffer])}* const into{k} = &{place};")
        out.open(f"for (i64 k = 0; k < length; k += {self.lanes})")
        out.add("const u64 some = fuser_first(length - k);")
        for n in self.rows:
            out.add(f"const {'u64' if n in self.masks else kind} b{n} = {self._value(n, kind)};")
        for k, s in enumerate(self.stores):
            out.add(f"{kind}_store(into{k} + k, {self._data(s.row, s.row, kind)}, some);")
        out.close()
        out.close()

    def _value(self, n: int, kind: str) -> str:
        row = self.plan.rows[n]
        if n in self.edges:
            before, place = self.edges[n]
            return f"{'' if before else '~'}fuser_first({place} - start - k)"
        if n in self.masks:
            args = [self._mask(a) for a in row.args]
            return f" {row.traits.sign} ".join(args) if row.traits.sign in JOINING else f"~{args[0]}"
        if row.op == "load":
            mask = f"some & {self._mask(row.args[0])}" if row.args else "some"
            back = self.nest.step(row.attr[1][0]) != ONE
            text = f"{kind}_back(from{n} - k, length - k)" if back else f"{kind}_load(from{n} + k, {mask})"
            return f"({kind})({text} != 0) & 1" if row.dtype is torch.bool else text
        if row.traits.chooses:
            _, a, b = row.args
            return f"{kind}_pick({self._mask(row.args[0])}, {self._data(a, n, kind)}, {self._data(b, n, kind)})"
        args = [self._data(a, n, kind) for a in row.args]
        if row.traits.sign in JOINING:
            return f" {row.traits.sign} ".join(args)
        if row.traits.sign in TURNING:
            return f"{args[0]} ^ 1" if row.dtype is torch.bool else f"~{args[0]}"
        return args[0]

    def _mask(self, n: int) -> str:
        return f"b{n}" if self.nest.is_full(n) else f"({self.nest.ref(n)} ? ~0ULL : 0ULL)"

    def _data(self, n: int, user: int, kind: str) -> str:
        """Row `n` in the lanes of row `user`; a constant is of the half that this one is."""
        if self.nest.is_full(n):
            return f"b{n}"
        row, half = self.plan.rows[n], self.nest.moved.get(user)
        if row.op == "const":
            text = str(bits_of(float(row.attr), half)) if half is not None else constant_text(row)
        else:
            text = self.nest.ref(n)
        return f"(({kind}){{}} + ({_WORDS[self.size]['CELL']})({text}))"


__all__ = ["BitsLoop", "helpers"]
