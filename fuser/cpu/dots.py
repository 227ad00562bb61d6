"""C++ building blocks of vector products: float32 sums of float32 operands, or of pairs of bfloat16 operands.

Routines share the register block (`Shape`), the function that adds products with a panel of packed columns (`panel`),
and the division of rows into blocks (`BLOCKS`).
"""

from __future__ import annotations

from collections.abc import Set

import torch

from fuser.cpu.text import filled
from fuser.ir.sizes import Expr, expr, floordiv
from fuser.lazy_dataclasses import dataclass
from fuser.machines import Machine

DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16"}
ELEMENTS = {"f32": "float", "bf16": "u16"}
PAIRS = {"f32": 1, "bf16": 2}  # elements of each operand that one lane of a sum takes at once
_ADD = {"f32": "{s} += {a} * {b};", "bf16": "FUSER_DOT_BF16({s}, {a}, {b});"}


@dataclass(frozen=True)
class Shape:
    """A register block: `rows` rows by `registers` registers of `lanes` columns, whose sums stay in registers with one
    register of each operand."""

    rows: int
    registers: int
    lanes: int

    @property
    def width(self) -> int:
        """Columns of a panel."""
        return self.registers * self.lanes


def shape_of(columns: int | None, machine: Machine) -> Shape:
    """The shape that pads the last panel with the fewest zero columns.

    Without `columns`, as they differ by call: the most columns in a number of registers that is a power of two.
    """
    few, lanes = machine.registers < 32, machine.vector_bytes // 4
    if columns is None:
        return Shape(*((4, 2) if few else (6, 4)), lanes)
    shapes = [Shape(*s, lanes) for s in (((6, 2), (4, 3)) if few else ((8, 3), (6, 4)))]
    return min(shapes, key=lambda shape: -columns % shape.width)


_HEAD = """\
#if defined(__clang__)
#define FUSER_CONTRACT
#define FUSER_CONTRACTS _Pragma("clang fp contract(fast)")
#else
#define FUSER_CONTRACT __attribute__((optimize("fp-contract=fast")))
#define FUSER_CONTRACTS
#endif
typedef float fuser_dot_f __attribute__((vector_size(BYTES), aligned(4), may_alias));
typedef u32 fuser_dot_u __attribute__((vector_size(BYTES), aligned(2), may_alias));
FUSER_FN float fuser_dot_of(float x) { return x; }
FUSER_FN float fuser_dot_of(u16 x) {
  const u32 u = (u32)x << 16;
  float f;
  __builtin_memcpy(&f, &u, 4);
  return f;
}
#if defined(__clang__) || __GNUC__ >= 12
#define FUSER_DOT_PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef i32 fuser_dot_i __attribute__((vector_size(BYTES)));
#define FUSER_DOT_PICK(a, b, ...) __builtin_shuffle(a, b, (fuser_dot_i){__VA_ARGS__})
#endif
"""
# A vector that is used several times is loaded once: g++ would make it a memory operand of each use.
_KEEP = """\
#if defined(__AVX512F__)
#define FUSER_DOT_KEEP(b) asm("" : "+v"(b))
#elif defined(__AVX2__)
#define FUSER_DOT_KEEP(b) asm("" : "+x"(b))
#else
#define FUSER_DOT_KEEP(b)
#endif
"""
_BF16 = """\
#if defined(__AVX512BF16__)
#define FUSER_DOT_BF16(acc, a, b) asm("vdpbf16ps %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b))
#else
#define FUSER_DOT_BF16(acc, a, b) \\
  acc += (fuser_dot_f)(a << 16) * (fuser_dot_f)(b << 16); \\
  acc += (fuser_dot_f)(a & 0xffff0000u) * (fuser_dot_f)(b & 0xffff0000u)
#endif
"""


def words(dtypes: Set[str], machine: Machine) -> str:
    """The types and macros that products of these dtypes use."""
    text = _HEAD + _KEEP + (_BF16 if "bf16" in dtypes else "")
    return filled(text, {"BYTES": machine.vector_bytes})


def add(dtype: str, s: str, a: str, b: str) -> str:
    """The statement that adds the products of vectors `a` and `b` to the sums `s`."""
    return _ADD[dtype].format(s=s, a=a, b=b)


_PANEL = """\
typedef u32 fuser_word __attribute__((may_alias, aligned(2)));
FUSER_CONTRACT static __attribute__((noinline)) void fuser_panel(
    const TYPE* const* rows, const TYPE* w, i64 turns, float* sums, i64 across, bool first OF_PLACES) {
  FUSER_CONTRACTS
SUMS
  EACH_PLACE {
ROWS_OF
    i64 k = 0;
    for (; k + 2 <= turns; k += 2) {
TWO
    }
    if (k < turns) {
ONE
    }
  }
  if (!first) {
ADDED
  }
STORE
}
"""


def panel(dtype: str, shape: Shape, machine: Machine, places: bool = False) -> str:
    """`words`, and the function that adds the products of some rows with a panel to their sums.

    With `places` the function takes `HIGH` rows for each of several kernel positions, starting at an offset; the
    positions' parts of the panel are adjacent. It prefetches from `ahead` on, `step` bytes for every two turns.
    """
    high, registers, lanes = shape.rows, shape.registers, shape.lanes
    cells = [(m, n) for m in range(high) for n in range(registers)]
    vector = "fuser_dot_f" if dtype == "f32" else "fuser_dot_u"
    word = "float" if dtype == "f32" else "fuser_word"
    at = {(m, n): f"*(fuser_dot_f*)(sums + {m} * across + {n * lanes})" for m, n in cells}
    move, offset = registers * lanes * PAIRS[dtype], " + offset" if places else ""

    def turn(number: int) -> list[str]:
        out = []
        for n in range(registers):
            own, from_w = f"w{n}_{number}", number * move + n * lanes * PAIRS[dtype]
            out.append(f"      {vector} {own} = *(const {vector}*)(w + {from_w}); FUSER_DOT_KEEP({own});")
        for m in range(high):
            adds = " ".join(add(dtype, f"s{m}_{n}", f"w{n}_{number}", "b") for n in range(registers))
            out.append(f"      {{ {vector} b = x{m}[k + {number}] - ({vector}){{}}; FUSER_DOT_KEEP(b); {adds} }}")
        return out

    ask = ["      __builtin_prefetch(ahead); ahead += step;"] if places else []
    parts = {
        "TYPE": [ELEMENTS[dtype]],
        "OF_PLACES": [", i64 places, i64 offset, const char* ahead, i64 step" if places else ""],
        "EACH_PLACE": [f"for (i64 place = 0; place < places; ++place, rows += {high})" if places else ""],
        "SUMS": [f"  fuser_dot_f {', '.join(f's{m}_{n} = {{}}' for m, n in cells)};"],
        "ROWS_OF": [f"    const {word}* x{m} = (const {word}*)(rows[{m}]{offset});" for m in range(high)],
        "TWO": [*ask, *turn(0), *turn(1), f"      w += {2 * move};"],
        "ONE": [*turn(0), f"      w += {move};"],
        "ADDED": [f"    s{m}_{n} += {at[m, n]};" for m, n in cells],
        "STORE": [f"  {at[m, n]} = s{m}_{n};" for m, n in cells],
    }
    return words({dtype}, machine) + filled(_PANEL, {k: "\n".join(v) for k, v in parts.items()})


# Rows are divided into `ceiling(rows, MOST)` blocks of nearly equal numbers of rows; HIGH is that of the shape.
BLOCKS = "blocks = (rows + MOST - 1) / MOST, each = ((rows + blocks - 1) / blocks + HIGH - 1) / HIGH * HIGH"


def ceiling(a: Expr, b: int) -> Expr:
    """The number of pieces of `b` that cover `a`."""
    return floordiv(a + (b - 1), expr(b))


__all__ = ["BLOCKS", "DTYPES", "ELEMENTS", "PAIRS", "Shape", "add", "ceiling", "panel", "shape_of", "words"]
