"""Non-temporal stores of large results in whole lines: the lines are not read, which saves a third of the traffic.

A piece of each result is computed into a tile in the first-level cache and copied from there. Whether it pays is known
only at run time: the variable `stream` of the function says so; otherwise loops store to memory as usual. Rows have to
start at multiples of half a line: else each load from the tile spans two earlier stores and stalls.
"""

from __future__ import annotations

from collections.abc import Set
from contextlib import AbstractContextManager, nullcontext

import torch

from fuser.cpu.facts import size, storage_type
from fuser.cpu.rows import LoopRange, Rows
from fuser.cpu.text import filled
from fuser.cpu.vir import nodes as ir
from fuser.ir.sizes import product, symbol
from fuser.machines import Machine

STREAM_BYTES = 24 << 20  # results of a kernel from which non-temporal stores are used

# Whole lines stored past the cache need not be read first. Lines shared with neighbours are stored as usual. The loop
# is in assembler, because g++ takes 7 of 36 ms for it in C++, in almost every kernel; a sanitizer does not see its
# accesses.
_STREAM_HELPER = """\
typedef float fuser_line __attribute__((vector_size(WIDTH)));
static inline void fuser_stream(void* to, const void* from, i64 bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __builtin_memcpy(to, from, bytes);
#else
  fuser_line line;
  __asm__ volatile(
      "mov %%rdi, %%rcx; neg %%rcx; and $LAST, %%rcx; cmp %[left], %%rcx; cmovg %[left], %%rcx;"  // to the first line
      "sub %%rcx, %[left]; FEW sub $SPAN, %[left]; jl 2f;"
      "1: MOVES add $SPAN, %%rsi; add $SPAN, %%rdi; sub $SPAN, %[left]; jge 1b;"
      "2: lea SPAN(%[left]), %%rcx; FEW"
      : "+D"(to), "+S"(from), [left] "+r"(bytes), [line] "=&x"(line) : : "rcx", "memory", "cc");
#endif
}
static inline void fuser_stream_end() { __asm__ volatile("sfence" : : : "memory"); }
"""
# Less than a line, %rcx bytes. `rep movsb` takes 60 cycles to start, even for none.
_FEW = (
    "3: sub $8, %%rcx; jl 4f; movsq; jmp 3b; 4: test $4, %%cl; jz 5f; movsl; 5: test $2, %%cl; jz 6f; movsw;"
    " 6: test $1, %%cl; jz 7f; movsb; 7:"
)


def stream_helper(uses: Set[str], machine: Machine) -> str:
    """C++ of the function that copies tiles, if it is used."""
    if "fuser_stream" not in uses:
        return ""
    (load, store), span, width = machine.past_cache, machine.line_bytes, machine.vector_bytes
    places = range(0, span, width)
    moves = " ".join(f"{load} {at}(%%rsi), %[line]; {store} %[line], {at}(%%rdi);" for at in places)
    return filled(_STREAM_HELPER, {"FEW": _FEW, "MOVES": moves, "LAST": span - 1, "SPAN": span, "WIDTH": width})


def may_stream(rows: Rows) -> None:
    """Declare `stream` in a function's head: whether its results are large, and their rows start at half lines.

    The result of a single row needs no such alignment.
    """
    facts = rows.facts
    widths = [facts.dtypes[s.buffer].itemsize for s in facts.streams]
    extents = [symbol(f"n_{a.sym.name}") for a in facts.plan.axes]
    large = size(product(extents)) >= ir.Number(STREAM_BYTES // sum(widths), torch.int64)
    if len(extents) > 1 and facts.vector is not None:
        row, elements = symbol(f"n_{facts.vector.sym.name}"), facts.machine.line_bytes // 2 // min(widths)
        large &= (size(row) % elements).same(0) | size(product(extents)).same(size(row))
    rows.out.let("bool", "stream", large)


def staged(rows: Rows, phase: int, loop: LoopRange) -> AbstractContextManager[None]:
    """Around a loop of a pass: mark its large results as ones that may go through tiles."""
    facts, results = rows.facts, []
    for s in facts.streams_of(phase):
        dtype, memory = facts.dtypes[s.buffer], rows.address_from(loop.start, s.buffer, s.address)
        results.append(ir.Result(facts.tile_of(s), storage_type(dtype), dtype.itemsize, memory))
    if not results:
        return nullcontext()
    return rows.out.block(ir.Staged(tuple(results), loop.at, loop.length, loop.count))


__all__ = ["STREAM_BYTES", "may_stream", "staged", "stream_helper"]
