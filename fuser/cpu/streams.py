"""Large results are written past the cache in whole lines. No line is read first, which saves a third of the traffic.

A piece of each result is computed into a tile in the first level cache and written from there. Whether it pays is
known at run time alone: `stream` in the function says so, and else the loops write to memory as usual.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from fuser.cpu.facts import size, storage_type
from fuser.cpu.rows import Rows
from fuser.cpu.vir import nodes as ir
from fuser.ir.sizes import product, symbol
from fuser.machines import Machine

STREAM_BYTES = 24 << 20  # results of a kernel from which they are written past the cache

# Whole lines written past the cache need not be read first. Lines that are shared with neighbours are written as usual.
_STREAM_HELPER = """\
typedef float fuser_line __attribute__((vector_size(WIDTH), may_alias));
#if defined(__clang__)
#define FUSER_LINE_TO(to, from) __builtin_nontemporal_store(*(const fuser_line*)(from), (fuser_line*)(to))
#else
#define FUSER_LINE_TO(to, from) __builtin_ia32_STORE((float*)(to), *(const fuser_line*)(from))
#endif
static void fuser_stream(void* to, const void* from, i64 bytes) {
  char* t = (char*)to;
  const char* f = (const char*)from;
  typedef float unaligned __attribute__((vector_size(WIDTH), aligned(1), may_alias));
  const i64 before = -(i64)t & LAST, head = before < bytes ? before : bytes;
  __builtin_memcpy(t, f, head);
  i64 i = head;
  for (; i + SPAN <= bytes; i += SPAN) {
    for (int part = 0; part < SPAN; part += WIDTH) {
      const fuser_line line = (fuser_line)*(const unaligned*)(f + i + part);
      FUSER_LINE_TO(t + i + part, &line);
    }
  }
  __builtin_memcpy(t + i, f + i, bytes - i);
}
static void fuser_stream_end() {
  FENCE
}
"""


def stream_helper(machine: Machine) -> str:
    """What a nest with `streams` calls."""
    words = {"LAST": machine.line_bytes - 1, "SPAN": machine.line_bytes, "WIDTH": machine.vector_bytes}
    text = _STREAM_HELPER.replace("STORE", machine.past_cache).replace("FENCE", machine.fence)
    for word, number in words.items():
        text = text.replace(word, str(number))
    return text


def may_stream(rows: Rows) -> None:
    """In a function's head: declare `stream`, whether its results are that large."""
    facts = rows.facts
    width = sum(facts.dtypes[s.buffer].itemsize for s in facts.streams)
    total = product(symbol(f"n_{a.sym.name}") for a in facts.plan.axes)
    rows.out.let("bool", "stream", size(total) >= ir.Number(STREAM_BYTES // width, torch.int64))


def staged(
    rows: Rows, phase: int, start: str, place: ir.Value, length: int, count: ir.Value
) -> AbstractContextManager[None]:  # fmt: skip
    """Around a loop of `count` elements from `start` on, at most `length`: its large results may go through tiles."""
    facts, results = rows.facts, []
    for s in facts.streams_of(phase):
        dtype, memory = facts.dtypes[s.buffer], rows.address_from(start, s.buffer, s.address)
        results.append(ir.Result(facts.tile_of(s), storage_type(dtype), dtype.itemsize, memory))
    return rows.out.block(ir.Staged(tuple(results), place, length, count)) if results else nullcontext()


__all__ = ["STREAM_BYTES", "may_stream", "staged", "stream_helper"]
