"""Transposed reads of pointwise nests: a band of each operand is read along its own rows into a tile.

The helpers transpose square blocks of elements in registers, and split narrow rows element by element.
"""

from __future__ import annotations

from collections.abc import Set

from fuser.cpu.facts import Facts, size, storage_type
from fuser.cpu.rows import Place, Rows
from fuser.cpu.text import filled
from fuser.cpu.vir import nodes as ir
from fuser.cpu.vir.calls import WORDS
from fuser.ir.loop_body import indirect_rows
from fuser.ir.sizes import LOOP, ONE, coefficient, expr, substitute, symbol
from fuser.machines import Machine
from fuser.scheduler.kernel_plan import Axis

EDGES = {1: 16, 2: 16, 4: 16, 8: 8}  # by an element's bytes: rows and columns of a block in which tiles are read
LEAST_BYTES = 16  # least bytes of a block's row
TILE_ROWS, TILE_COLUMNS = 128, 128  # a transposed read goes through a tile in the first-level cache
TILE_STRIDE = TILE_COLUMNS + 16  # so the rows of a tile start in different cache sets
MOST_APART = 4  # elements of rows that are split, such as a pixel's channels: a block of them would be mostly padding

R0, R1, V0, V1 = map(ir.Name, ("r0", "r1", "v0", "v1"))  # the bounds of a tile's rows and columns


def transposed(facts: Facts) -> dict[int, Axis]:
    """Loads that are contiguous along an axis other than the vector axis, with that axis, if it is one for all."""
    if facts.vector is None or facts.checked:
        return {}
    others = [a for a in facts.kept_axes if a is not facts.vector]
    along: dict[int, Axis] = {}
    for n, row in enumerate(facts.plan.rows):
        if row.op != "load" or row.args or indirect_rows(row):
            continue
        address = row.address
        c = coefficient(address, facts.vector.sym)
        if c is None or c.as_int() in (0, 1, -1):
            continue
        axis = next((a for a in others if coefficient(address, a.sym) == ONE), None)
        if axis is not None:
            along[n] = axis
    return along if len({a.sym for a in along.values()}) == 1 else {}


def in_tiles(facts: Facts) -> dict[int, Place]:
    """The places of transposed loads in their tiles."""
    return {n: Place(_in_tile(facts, k)) for k, n in enumerate(facts.staged)}


def _in_tile(facts: Facts, k: int) -> ir.At:
    assert facts.tiled is not None
    return ir.Name(f"tile{k}")[(ir.Name(facts.tiled.sym.name) - R0) * TILE_STRIDE + facts.v - V0]


def fill_tiles(rows: Rows) -> None:
    """Read a band of each transposed operand along its own rows into its tile."""
    facts, out = rows.facts, rows.out
    assert facts.tiled is not None
    for k, n in enumerate(facts.staged):
        kind, begin = facts.kind(n), ir.value(V0)
        out.scratch(kind, f"tile{k}", TILE_ROWS * TILE_STRIDE, aligned=facts.machine.line_bytes)
        if storage_type(facts.dtypes[facts.plan.rows[n].buffer]) == kind:
            begin = _fill_blocks(rows, n, k)
        with out.block(ir.For(facts.v, begin, V1)), out.block(ir.For(facts.tiled.sym.name, R0, R1)):
            out.set(_in_tile(facts, k), rows.decoded(n, rows.element(n)))


def _fill_blocks(rows: Rows, n: int, k: int) -> ir.Value:
    """Fill the whole blocks of tile `k` by transposing in registers; returns the index to go on from."""
    facts, out, row = rows.facts, rows.out, rows.plan.rows[n]
    assert facts.tiled is not None
    width = facts.dtypes[row.buffer].itemsize
    count, step, last, end, columns = (ir.Name(f"{name}{k}") for name in ("rows", "step", "last", "end", "columns"))
    edge, length = EDGES[width], ir.Name(f"n_{facts.v}")
    out.let("i64", step.name, size(coefficient(row.address, facts.along.sym) or expr(0)))
    # Rows are rounded up to whole blocks if the extra elements that are read are inside the buffer.
    out.let("i64", count.name, (R1 - R0 + (edge - 1)) // edge * edge)
    past = ir.Select(step > 0, (count - (R1 - R0) + step - 1) // step, length)
    out.let("i64", last.name, length - past)
    out.let("i64", end.name, ir.least(last, V1))
    blocks = ir.Select(end > V0, (end - V0) // edge * edge, ir.Number(0))
    apart = ir.Name(f"apart{k}")
    out.let("bool", apart.name, step.same(R1 - R0) & (step > 1) & (step <= MOST_APART))
    out.let("i64", columns.name, ir.Select(apart, V1 - V0, blocks))
    origin = {facts.tiled.sym: symbol("r0", LOOP), facts.along.sym: symbol("v0", LOOP)}
    corner, to = rows.address(row.buffer, substitute(row.address, origin)), ir.Name(f"tile{k}")
    out.add(ir.Block(ir.If(apart), (ir.Transpose(width, corner, step, to, None, columns),)))
    out.add(ir.Block(ir.Else(), (ir.Transpose(width, corner, step, to, count, columns),)))
    return V0 + columns


# -- helpers ----------------------------------------------------------------------------------------------------------
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


def edge_of(width: int, machine: Machine) -> int:
    """The edge of a block. A block needs two registers for each of its rows, and a register holds one row.

    On 16 registers of 32 bytes, elements of 4 bytes take 1.5 ns each with an edge of 16, 0.16 ns with 8, 0.18 ns with
    4.
    """
    fits = min(EDGES[width], machine.registers // 2, machine.vector_bytes // width)
    return max(LEAST_BYTES // width, fits)


def helpers(uses: Set[str], machine: Machine) -> str:
    """C++ of the functions `transpose_u8` … `transpose_u64` that are used, each with its `apart_u8` …."""
    used = [width for width, w in WORDS.items() if f"transpose_{w}" in uses]
    return _SHUFFLE + "".join(_function(width, machine) + _apart(width) for width in used) if used else ""


def transposition(width: int, machine: Machine, stride: int) -> str:
    """C++ of the function `transpose_u8` … for whole blocks, into rows that are `stride` elements apart."""
    return _SHUFFLE + _function(width, machine, stride)


def _apart(width: int) -> str:
    """C++ of `apart_u8` … `apart_u64`: rows of 2 to MOST_APART elements, each element into a row of the tile."""
    cases = []
    for count in range(2, MOST_APART + 1):
        stores = " ".join(f"tile[{i * TILE_STRIDE} + c] = in[{count} * c + {i}];" for i in range(count))
        cases.append(f"  if (count == {count}) for (i64 c = 0; c < columns; ++c) {{ {stores} }}\n")
    return filled(_APART, {"CASES": "".join(cases), "WORD": WORDS[width]})


def _function(width: int, machine: Machine, stride: int = TILE_STRIDE) -> str:
    """Rounds that interleave row i with the row half a block below, one for each bit of a row's number."""
    edge = edge_of(width, machine)
    order = [str(lane) for i in range(edge) for lane in (i, i + edge)]
    rounds, of, to = [], "a", "b"
    for _ in range(edge.bit_length() - 1):
        rounds.append(filled(_ROUND, {"OF": of, "TO": to}))
        of, to = to, of
    words = {
        "AHEAD": _AHEAD if machine.prefetches else "", "ROUNDS": "\n".join(rounds), "RESULT": of,
        "LOW": ", ".join(order[:edge]), "HIGH": ", ".join(order[edge:]), "HALF": edge // 2, "EDGE": edge,
        "BYTES": edge * width, "SIZE": width, "WORD": WORDS[width], "STRIDE": stride,
    }  # fmt: skip
    return filled(_FUNCTION, words)


__all__ = ["TILE_COLUMNS", "TILE_ROWS", "TILE_STRIDE", "edge_of", "fill_tiles", "helpers", "in_tiles", "transposed",
           "transposition"]  # fmt: skip
