"""Machines for which CPU kernels are compiled: one row each. Code asks for a row's properties, never for its name.

`config.isa` names a row; "" is the best one that runs here. A row's optional parts follow its name: "avx512+vnni". A
row decides the generated text and the compiler's flags, so its full name is part of a kernel's identity.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
import pathlib
from dataclasses import field
from typing import Any

from fuser.lazy_dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """An optional part of a machine: its names for Linux and for the compiler, and the fields that it sets."""

    name: str
    needs: str
    flag: str
    sets: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Machine:
    """One row: the machines it is for, and their properties.

    architecture: as in `uname -m`; "" is any.
    needs: Linux's names of features that a processor must have.
    flags: for every compiler; `runtime/compilers.py` has those that depend on the compiler.
    vector_bytes, registers: of the widest vectors, for which code is generated.
    line_bytes: of the caches, for prefetches and alignment.
    fma: has a fused multiply-add instruction.
    gathers: has a gather of words by a vector of indices.
    wide_casts: converts vectors of 64-bit integers from and to doubles by one instruction.
    half_casts: converts a float16 by an instruction that g++ has as a builtin.
    lanes: which explicit vectors of `ops/lanes_cpp.py` it has; "" is none.
    masks: loads and stores parts of a register under a byte mask, as `cpu/bits.py` does.
    dots: adds products of bytes to words in one instruction (VNNI).
    bf16_dots: adds products of pairs of bfloat16 to float32 sums in one instruction.
    past_cache: x86-64's instructions that load a register and store it past the cache; () is none.
    prefetches: whether software prefetches pay.
    vector_math: the vector function variants, by letter and doubles, that its compilers call (x86-64's vector ABI).
    sve_bits: the register length if it depends on the processor (SVE), else 0.
    """

    name: str
    architecture: str
    needs: frozenset[str] = frozenset()
    flags: tuple[str, ...] = ()
    vector_bytes: int = 16
    registers: int = 16
    line_bytes: int = 64
    fma: bool = False
    gathers: bool = False
    wide_casts: bool = False
    half_casts: bool = False
    lanes: str = ""
    masks: bool = False
    dots: bool = False
    bf16_dots: bool = False
    past_cache: tuple[str, ...] = ()
    prefetches: bool = True
    vector_math: tuple[tuple[str, int], ...] = ()
    sve_bits: int = 0
    parts: tuple[Part, ...] = ()

    def with_parts(self, names: frozenset[str]) -> Machine:
        """The row of a machine that also has these optional parts. KeyError for an unknown part."""
        own = {p.name: p for p in self.parts}
        chosen = [own[name] for name in sorted(names)]
        sets: dict[str, Any] = {}
        for part in chosen:
            sets |= part.sets
        return dataclasses.replace(
            self,
            name="+".join((self.name, *(p.name for p in chosen))),
            needs=self.needs | {p.needs for p in chosen},
            flags=(*self.flags, *(p.flag for p in chosen)),
            **sets,
        )


_X86 = "x86_64"
_SSE_FLAGS = ("-march=x86-64", "-msse4.2", "-mpopcnt")
_SSE_NEEDS = frozenset("ssse3 sse4_1 sse4_2 popcnt".split())
_AVX2_FLAGS = (*_SSE_FLAGS, "-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2", "-mlzcnt", "-mmovbe")
_AVX2_NEEDS = _SSE_NEEDS | set("avx avx2 fma f16c bmi1 bmi2 abm movbe".split())
_AVX512 = ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
_AVX512_PARTS = (
    Part("bf16", "avx512_bf16", "-mavx512bf16", {"bf16_dots": True}),
    Part("bitalg", "avx512_bitalg", "-mavx512bitalg"),
    Part("vbmi", "avx512vbmi", "-mavx512vbmi"),
    Part("vbmi2", "avx512_vbmi2", "-mavx512vbmi2"),
    Part("vnni", "avx512_vnni", "-mavx512vnni", {"dots": True}),
    Part("vpopcntdq", "avx512_vpopcntdq", "-mavx512vpopcntdq"),
)
_SVE_BITS = (512, 256, 128)

# Best first: "" is the first one that runs here.
ROWS: tuple[Machine, ...] = (
    Machine(
        "avx512", _X86, needs=_AVX2_NEEDS | set(_AVX512),
        flags=(*_AVX2_FLAGS, *(f"-m{name}" for name in _AVX512), "-mprefer-vector-width=512"),
        vector_bytes=64, registers=32, fma=True, gathers=True, wide_casts=True, half_casts=True, lanes="avx512",
        masks=True, past_cache=("vmovups", "vmovntps"), vector_math=(("b", 2), ("c", 4), ("d", 4), ("e", 8)),
        parts=_AVX512_PARTS,
    ),
    Machine(
        "avx2", _X86, needs=_AVX2_NEEDS, flags=_AVX2_FLAGS,
        vector_bytes=32, fma=True, gathers=True, half_casts=True, lanes="avx2", past_cache=("vmovups", "vmovntps"),
        vector_math=(("b", 2), ("c", 4), ("d", 4)),
    ),
    Machine("sse4.2", _X86, needs=_SSE_NEEDS, flags=_SSE_FLAGS, past_cache=("movups", "movntps")),
    *(
        Machine(
            f"sve{bits}", "aarch64", needs=frozenset({"asimd", "sve"}), sve_bits=bits,
            flags=("-march=armv8-a+sve", f"-msve-vector-bits={bits}"),
            vector_bytes=bits // 8, registers=32, fma=True, gathers=True, wide_casts=True,
        )
        for bits in _SVE_BITS
    ),
    Machine(
        "neon", "aarch64", needs=frozenset({"asimd"}), flags=("-march=armv8-a",), registers=32, fma=True,
        wide_casts=True,
    ),
    Machine("scalar", "", prefetches=False),
)  # fmt: skip
_BY_NAME = {row.name: row for row in ROWS}


@functools.lru_cache(maxsize=64)
def find(name: str) -> Machine:
    """The machine that `config.isa` names. ValueError if there is no such row or part."""
    if not name:
        return here()
    first, *parts = name.split("+")
    row = _BY_NAME.get(first)
    if row is None:
        raise ValueError(f"expected '' for what this machine has, or one of {', '.join(map(repr, _BY_NAME))}")
    try:
        return row.with_parts(frozenset(parts))
    except KeyError as e:
        own = ", ".join(p.name for p in row.parts) or "none"
        raise ValueError(f"{first} has no optional part {e.args[0]!r}: expected of {own}") from None


def check(name: Any) -> Any:
    """`name` if `find` accepts it; ValueError otherwise. Values of other types are returned unchanged."""
    if isinstance(name, str) and name:
        find(name)
    return name


@functools.lru_cache(maxsize=1)
def here() -> Machine:
    """The best row that runs on this machine, with all optional parts that the processor has."""
    row = next(row for row in ROWS if why_not(row) is None)
    return row.with_parts(frozenset(p.name for p in row.parts if p.needs in instructions()))


def why_not(machine: Machine) -> str | None:
    """None if kernels for `machine` run here, else the reason."""
    own = os.uname().machine
    if machine.architecture not in ("", own):
        return f"it is for {machine.architecture}, and this machine is {own}"
    missing = sorted(machine.needs - instructions())
    if missing:
        return f"this processor lacks {', '.join(missing)}"
    if machine.sve_bits and machine.sve_bits != sve_bits():
        return f"registers of SVE have {sve_bits()} bits here"
    return None


@functools.lru_cache(maxsize=1)
def instructions() -> frozenset[str]:
    """The processor's features by Linux's names; empty if Linux does not list them."""
    for line in cpu_text().splitlines():
        name, _, words = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(words.split())
    return frozenset()


def cpu_text() -> str:
    """The processor's name and flags as Linux lists them; "" if it does not."""
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
    lines = [ln for ln in text.split("\n\n")[0].splitlines() if ln.startswith(("model name", "flags", "Features"))]
    return "\n".join(lines)


_PR_SVE_GET_VL, _VL_BYTES = 51, 0xFFFF


@functools.lru_cache(maxsize=1)
def sve_bits() -> int:
    """The length of SVE registers in this process; 0 if there are none."""
    found = int(ctypes.CDLL(None).prctl(_PR_SVE_GET_VL, 0, 0, 0, 0))
    return 0 if found < 0 else (found & _VL_BYTES) * 8


__all__ = ["ROWS", "Machine", "Part", "check", "cpu_text", "find", "here", "instructions", "sve_bits", "why_not"]
