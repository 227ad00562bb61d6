"""C++ building blocks of vector products: float32 sums of float32 operands, or of pairs of bfloat16 operands."""

from __future__ import annotations

from collections.abc import Set

import torch

from fuser.cpu.text import filled
from fuser.lazy_dataclasses import dataclass
from fuser.machines import Machine

Epilogue = tuple[str, str]  # oneDNN's name and algorithm of an activation applied to a product
EPILOGUES: dict[Epilogue, str] = {  # with its name in `epilogues.py`
    ("gelu", "erf"): "gelu", ("gelu", "tanh"): "gelu_tanh", ("swish", ""): "silu", ("sigmoid", ""): "sigmoid",
    ("tanh", ""): "tanh",
}  # fmt: skip
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


def shape_of(columns: int, machine: Machine) -> Shape:
    """The shape that pads the last panel with the fewest zero columns."""
    few = machine.registers < 32
    shapes = [Shape(*s, machine.vector_bytes // 4) for s in (((6, 2), (4, 3)) if few else ((8, 3), (6, 4)))]
    return min(shapes, key=lambda shape: -columns % shape.width)


def wide_shape(machine: Machine) -> Shape:
    """The shape with the most columns whose number of registers is a power of two."""
    return Shape(*((4, 2) if machine.registers < 32 else (6, 4)), machine.vector_bytes // 4)


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


__all__ = ["DTYPES", "ELEMENTS", "EPILOGUES", "PAIRS", "Epilogue", "Shape", "add", "shape_of", "wide_shape", "words"]
