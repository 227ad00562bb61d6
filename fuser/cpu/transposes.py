"""Transposed reads: square blocks of elements in registers, and narrow rows that are taken apart."""

from __future__ import annotations

from collections.abc import Set

from fuser.cpu.text import filled
from fuser.cpu.vir.calls import WORDS
from fuser.machines import Machine

EDGES = {1: 16, 2: 16, 4: 16, 8: 8}  # tiles are read in blocks of so many rows and columns, by an element's bytes
LEAST_BYTES = 16  # of a row of a block
TILE_ROWS, TILE_COLUMNS = 128, 128  # a transposed read goes through a tile in the first level cache
TILE_STRIDE = TILE_COLUMNS + 16  # the rows of a tile start in different sets of the cache
MOST_APART = 4  # elements of whole rows, such as the channels of a pixel, up to which a block would be mostly padding

_SHUFFLE = """\
#if defined(__clang__) || __GNUC__ >= 12
#define FUSER_INTERLEAVE(type, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define FUSER_INTERLEAVE(type, a, b, ...) __builtin_shuffle(a, b, (type){__VA_ARGS__})
#endif
"""

_FUNCTION = """\
typedef WORD lines_WORD __attribute__((vector_size(BYTES), aligned(SIZE), may_alias));
static void transpose_WORD(const void* from, i64 step, void* to, i64 rows, i64 columns) {
  const WORD* in = (const WORD*)from;
  WORD* tile = (WORD*)to;
  for (i64 c = 0; c < columns; c += EDGE) for (i64 r = 0; r < rows; r += EDGE) {
    lines_WORD a[EDGE], b[EDGE];
AHEAD    for (int i = 0; i < EDGE; ++i) a[i] = *(const lines_WORD*)(in + (c + i) * step + r);
ROUNDS
    for (int i = 0; i < EDGE; ++i) *(lines_WORD*)(tile + (r + i) * STRIDE + c) = RESULT[i];
  }
}
"""

# A constant number of elements to a row, which the compiler vectorises as a group of interleaved loads. Tile and input
# are of other types than their bits, so the type says that it may alias them: the kernel would not see the stores.
_APART = """\
typedef WORD apart_bits_WORD __attribute__((may_alias));
static void apart_WORD(const void* from, i64 count, void* to, i64 columns) {
  const apart_bits_WORD* __restrict in = (const apart_bits_WORD*)from;
  apart_bits_WORD* __restrict tile = (apart_bits_WORD*)to;
CASES}
"""


_ROUND = """\
    for (int i = 0; i < HALF; ++i) {
      TO[2 * i] = FUSER_INTERLEAVE(lines_WORD, OF[i], OF[i + HALF], LOW);
      TO[2 * i + 1] = FUSER_INTERLEAVE(lines_WORD, OF[i], OF[i + HALF], HIGH);
    }"""


_AHEAD = "    for (int i = EDGE; i < 2 * EDGE; ++i) __builtin_prefetch(in + (c + i) * step + r, 0, 2);\n"


def edge_of(size: int, machine: Machine) -> int:
    """The edge of a block. A block needs two registers for each of its rows, and a register holds one row.

    In ns an element of 4 bytes with 16 registers of 32: 1.5 with an edge of 16, 0.16 with 8, 0.18 with 4.
    """
    fits = min(EDGES[size], machine.registers // 2, machine.vector_bytes // size)
    return max(LEAST_BYTES // size, fits)


def helpers(uses: Set[str], machine: Machine) -> str:
    """The functions `transpose_u8` … `transpose_u64` that are used, each with its `apart_u8` …."""
    out = "".join(_function(size, machine) + _apart(size) for size, w in WORDS.items() if f"transpose_{w}" in uses)
    return _SHUFFLE + out if out else ""


def _apart(size: int) -> str:
    """The function `apart_u8` … `apart_u64`: rows of 2 to MOST_APART elements, each element into a row of the tile."""
    cases = []
    for count in range(2, MOST_APART + 1):
        stores = " ".join(f"tile[{i * TILE_STRIDE} + c] = in[{count} * c + {i}];" for i in range(count))
        cases.append(f"  if (count == {count}) for (i64 c = 0; c < columns; ++c) {{ {stores} }}\n")
    return filled(_APART, {"CASES": "".join(cases), "WORD": WORDS[size]})


def _function(size: int, machine: Machine) -> str:
    """Rounds of interleaving row i with the row half a block below, one for each bit of a row's number."""
    edge = edge_of(size, machine)
    order = [str(lane) for i in range(edge) for lane in (i, i + edge)]
    rounds, of, to = [], "a", "b"
    for _ in range(edge.bit_length() - 1):
        rounds.append(filled(_ROUND, {"OF": of, "TO": to}))
        of, to = to, of
    words = {
        "AHEAD": _AHEAD if machine.prefetches else "", "ROUNDS": "\n".join(rounds), "RESULT": of,
        "LOW": ", ".join(order[:edge]), "HIGH": ", ".join(order[edge:]), "HALF": edge // 2, "EDGE": edge,
        "BYTES": edge * size, "SIZE": size, "WORD": WORDS[size], "STRIDE": TILE_STRIDE,
    }  # fmt: skip
    return filled(_FUNCTION, words)


__all__ = ["EDGES", "MOST_APART", "TILE_COLUMNS", "TILE_ROWS", "TILE_STRIDE", "edge_of", "helpers"]
