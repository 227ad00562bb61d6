"""Large results are written past the cache in whole lines. No line is read first, which saves a third of the traffic.

A piece of each result is computed into a tile in the first level cache and written from there. Whether it pays is
known at run time alone: `stream` in the function says so, and else the loops write to memory as usual.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from fuser.cpu.halves import HalvesNest
from fuser.cpu.nest import size, storage_type
from fuser.cpu.vir import nodes as ir
from fuser.ir.sizes import LOOP, ONE, product, substitute, symbol
from fuser.machines import Machine
from fuser.scheduler.kernel_plan import Store

STREAM_BYTES = 24 << 20  # results of a kernel from which they are written past the cache
STREAM_SHORTEST = 64  # elements of a row, below which they are written where they belong
STREAM_TILE = 1024  # elements that are staged in the first level cache before they are
MOST_STREAMS = 6  # more would not fit there

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


class StreamingNest(HalvesNest):
    """A nest whose results may be written past the cache."""

    may_stream = False  # in the function that is being written

    def open_function(self, suffix: str = "") -> None:
        """The function's head, with the decision whether its results are that large."""
        super().open_function(suffix)
        streams = self.streams() if not suffix else []
        self.may_stream = bool(streams)
        if streams:
            width = sum(self.dtypes[s.buffer].itemsize for s in streams)
            total = product(symbol(f"n_{a.sym.name}") for a in self.plan.axes)
            self.out.let("bool", "stream", size(total) >= ir.Number(STREAM_BYTES // width, torch.int64))

    def close_function(self) -> ir.Kernel:
        """The function's tail; returns the function."""
        if self.may_stream:
            self.out.add(ir.Block(ir.If(ir.Name("stream")), (ir.StreamEnd(),)))
        return super().close_function()

    @contextmanager
    def tiles_of(self, phase: int, v: str, low: ir.Like, high: ir.Like, halves: bool = True) -> Iterator[None]:
        """A loop over tiles of a range, from `w0` to `w1`, around a loop over the axis `v` in each."""
        with self.out.block(ir.For("w0", ir.value(low), ir.value(high), ir.Number(STREAM_TILE))):
            self.out.let("i64", "w1", ir.least(ir.Name("w0") + STREAM_TILE, high))
            with self.pieces_of(phase, "w0", ir.Name(v) - "w0", STREAM_TILE, ir.Name("w1") - "w0", halves):
                yield

    def streams(self, phase: int | None = None) -> list[Store]:
        """Stores of one pass, or of all, that are contiguous along the vector axis and may be large.

        A buffer that the kernel also reads is in the cache already and is left out.
        """
        if self.checked or not self.machine.past_cache or self.vector is None or self.plan.split:
            return []
        if self.vector.hint < STREAM_SHORTEST:
            return []
        out = []
        read = {row.attr[0] for row in self.plan.rows if row.op == "load"}
        for s in self.plan.stores:
            if s.buffer not in read and self.store_is_full(s) and self.step(s.address) == ONE:
                out.append(s)
        if len(out) > MOST_STREAMS:
            return []
        return [s for s in out if phase is None or s.phase == phase]

    def _may_stage(
        self, phase: int, start: str, place: ir.Like, length: int, count: ir.Like
    ) -> AbstractContextManager[None]:  # fmt: skip
        """A loop of `count` elements from `start` on, at most `length`: its large results may go through tiles."""
        streams = self.streams(phase)
        if not streams:
            return nullcontext()
        assert self.vector is not None
        origin = {self.vector.sym: symbol(start, LOOP)}
        results = []
        for s in streams:
            dtype, memory = self.dtypes[s.buffer], self.address(s.buffer, substitute(s.address, origin))
            results.append(ir.Result(self.tile_of(s), storage_type(dtype), dtype.itemsize, memory))
        return self.out.block(ir.Staged(tuple(results), ir.value(place), length, ir.value(count)))

    @contextmanager
    def pieces_of(
        self, phase: int, start: str, place: ir.Like, length: int, count: ir.Like, halves: bool = True
    ) -> Iterator[None]:
        """The same, and with `halves` the loop finds float16 as float32, and the parts of masked loads."""
        with self._may_stage(phase, start, place, length, count):
            if halves:
                self.open_pieces(phase, start, place, length, count)
            yield
            if halves:
                self.close_pieces(phase, start, count)

    def tile_of(self, s: Store) -> str:
        """The name of the tile that may stage a store; empty if none does."""
        streams = self.streams(s.phase)
        return f"{s.phase}_{streams.index(s)}" if s in streams else ""
