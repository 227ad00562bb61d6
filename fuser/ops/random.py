"""Random numbers that are functions of a seed: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2,
3", 2011), and the operators of namespace `fuser` by which graphs request them.

The key is a tensor of one 64-bit seed; the counter is an element's number divided by four, and the number of a stream.
A block has four words, one for each of four adjacent elements. So an element's random number depends on nothing else:
not on threads, tiles, strides or device, and recomputation gives the same number.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fuser.ops.operators import operator
from fuser.ops.table import OpRow

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_LOW = 0xFFFFFFFF


def _product(a: torch.Tensor, multiplier: int) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low 32 bits of a product of 32-bit numbers, computed without overflow."""
    upper, lower = (a >> 16) * multiplier, (a & 0xFFFF) * multiplier
    return (upper + (lower >> 16)) >> 16, (((upper & 0xFFFF) << 16) + lower) & _LOW


def philox(
    key: tuple[torch.Tensor, torch.Tensor], counter: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The four 32-bit words of a block, as int64 tensors, from two words of key and four of counter."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(_ROUNDS):
        high0, low0 = _product(c0, _MULTIPLIERS[0])
        high1, low1 = _product(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def philox_uniform(seed: torch.Tensor, stream: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """float32 in [0, 1), multiples of 2**-24, from int64 seeds, streams and element numbers."""

    def words(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x & _LOW, (x >> 32) & _LOW

    four = philox(words(seed), (*words(index >> 2), *words(stream)))
    word = functools.reduce(lambda found, k: torch.where(index & 3 == k, four[k], found), range(1, 4), four[0])
    return (word >> 8).to(torch.float32) * 2.0**-24


def philox_even(seed: torch.Tensor, stream: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The number at the even index of the pair that contains `index`."""
    return philox_uniform(seed, stream, index & ~1)


def philox_odd(seed: torch.Tensor, stream: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The number at the odd index of the pair that contains `index`."""
    return philox_uniform(seed, stream, index | 1)


# sin(pi v) / v and cos(pi v) as polynomials in v * v, for |v| <= 1/2, to 2e-10.
SIN_PI = (3.141592653536292, -5.167712764624551, 2.5501633189455406, -0.5992521977943747, 0.08205040162318872,
          -0.0070283860344466965)  # fmt: skip
COS_PI = (0.9999999997799046, -4.934802137078827, 4.058709159556141, -1.3352120030478634, 0.23493731379972624,
          -0.024396324313850033)  # fmt: skip


def normal_of(call: Callable[..., Any], first: Any, second: Any, odd: Any) -> Any:
    """A standard normal number from two uniform ones, by Box and Muller; each pair gives two.

    The even one is `r * cos(t)`, the odd one `r * sin(t)`, with `t = 2 pi second`; with `v = second - 1/2` these are `2
    sin(pi v)**2 - 1` and `-2 sin(pi v) cos(pi v)`. `call(name, ...)` computes an op of the table.
    """

    def polynomial(z: Any, coefficients: Sequence[float]) -> Any:
        value = call("add", call("mul", z, coefficients[-1]), coefficients[-2])
        for c in reversed(coefficients[:-2]):
            value = call("add", call("mul", value, z), c)
        return value

    radius = call("sqrt", call("mul", call("log", call("add", call("mul", first, -1.0), 1.0)), -2.0))
    v = call("add", second, -0.5)
    z = call("mul", v, v)
    s, c = call("mul", polynomial(z, SIN_PI), v), polynomial(z, COS_PI)
    even = call("add", call("mul", call("mul", s, s), 2.0), -1.0)
    return call("mul", radius, call("where", odd, call("mul", call("mul", s, c), -2.0), even))


def _cpp_block() -> str:
    """C++ text for the four words of a block of `seed` and `stream`.

    Words stay in 64-bit lanes: packing them for the 32-bit part of a round costs more than half-empty lanes.
    """
    rounds = []
    for r in range(_ROUNDS):
        k0, k1 = ((w * r) & _LOW for w in _WEYL)
        rounds.append(f"  FUSER_PHILOX_ROUND({k0:#010x}u, {k1:#010x}u)")
    ten = " \\\n".join(rounds)
    return f"""\
#define FUSER_PHILOX_ROUND(w0, w1) {{ \\
  const u64 p0 = c0 * {_MULTIPLIERS[0]:#x}ULL, p1 = c2 * {_MULTIPLIERS[1]:#x}ULL; \\
  c0 = (p1 >> 32) ^ c1 ^ (u64)(u32)(k0 + w0), c1 = p1 & 0xffffffffULL; \\
  c2 = (p0 >> 32) ^ c3 ^ (u64)(u32)(k1 + w1), c3 = p0 & 0xffffffffULL; }}
#define FUSER_PHILOX_BLOCK(number) \\
  const u64 block = number; \\
  u64 c0 = (u32)block, c1 = block >> 32, c2 = (u32)(u64)stream, c3 = (u64)stream >> 32; \\
  const u32 k0 = (u32)(u64)seed, k1 = (u32)((u64)seed >> 32); \\
{ten}
"""


_CPP_WORD = """\
FUSER_FN float fuser_philox_word(i64 seed, i64 stream, i64 place, i64 word) {
  FUSER_PHILOX_BLOCK((u64)(place >> 2))
  const u64 even = word & 2 ? c2 : c0, odd = word & 2 ? c3 : c1;
  return (float)(i32)((word & 1 ? odd : even) >> 8) * 0x1p-24f;
}
"""
# Numbers of `count` adjacent elements from `place` on, from eight blocks at a time, whose words are then interleaved.
_CPP_FILL = """\
FUSER_FN float fuser_philox_unit(u32 word) { return (float)(i32)(word >> 8) * 0x1p-24f; }
static void fuser_philox_fill(float* to, i64 seed, i64 stream, i64 place, i64 count, int word) {
  const i64 skip = place & 3;
  for (i64 at = -skip; at < count; at += 32) {
    float words[32] __attribute__((aligned(64))), turns[32] __attribute__((aligned(64)));
    const u64 first = (u64)((place + at) >> 2);
    #pragma omp simd
    for (int b = 0; b < 8; ++b) {
      FUSER_PHILOX_BLOCK(first + (u64)b)
      words[b] = fuser_philox_unit((u32)c0), words[8 + b] = fuser_philox_unit((u32)c1);
      words[16 + b] = fuser_philox_unit((u32)c2), words[24 + b] = fuser_philox_unit((u32)c3);
    }
    const float* even = words + (word == 1 ? 8 : 0);
    const float* odd = words + (word == 0 ? 0 : 8);
    #pragma omp simd
    for (int b = 0; b < 8; ++b) {
      turns[4 * b] = even[b], turns[4 * b + 1] = odd[b];
      turns[4 * b + 2] = even[16 + b], turns[4 * b + 3] = odd[16 + b];
    }
    if (at >= 0 && at + 32 <= count) __builtin_memcpy(to + at, turns, sizeof turns);
    else for (i64 i = at < 0 ? -at : 0; i < 32 && at + i < count; ++i) to[at + i] = turns[i];
  }
}
"""


HELPERS = {
    "FUSER_PHILOX_BLOCK": _cpp_block(), "fuser_philox_word": _CPP_WORD, "fuser_philox_fill": _CPP_FILL,
}  # fmt: skip
# `quads` gives the words of four adjacent elements for each block, along the tile's last dim or the first of two, which
# becomes four times as long. Each thread keeps its words: tl.join and tl.reshape only rename registers.
TRITON_HELPERS = {
    "fuser_philox": """\
@triton.jit
def fuser_philox(seed, stream, block):
    low = block.to(tl.uint32)
    zero = low ^ low
    high = zero
    if block.dtype.primitive_bitwidth == 64:
        high = (block >> 32).to(tl.uint32)
    s0, s1 = zero + (stream & 0xFFFFFFFF).to(tl.uint32), zero + ((stream >> 32) & 0xFFFFFFFF).to(tl.uint32)
    return tl.philox(seed, low, high, s0, s1)
""",
    "fuser_philox_quads": """\
@triton.jit
def fuser_philox_quads(seed, stream, block, shape: tl.constexpr, first: tl.constexpr, pair: tl.constexpr):
    a, b, c, d = fuser_philox(seed, stream, block)
    if pair == 0:
        b, d = a, c
    if pair == 1:
        a, c = b, d
    four = tl.join(tl.join(a, c), tl.join(b, d))
    if first:
        four = tl.permute(four, (0, 2, 3, 1))
    return tl.reshape(four, shape)
""",
    "fuser_philox_word": """\
@triton.jit
def fuser_philox_word(seed, stream, index):
    a, b, c, d = fuser_philox(seed, stream, index >> 2)
    at = index & 3
    return tl.where(at < 2, tl.where(at == 0, a, b), tl.where(at == 2, c, d))
""",
    "fuser_unit_float": """\
@triton.jit
def fuser_unit_float(word):
    return (word >> 8).to(tl.float32) * 5.9604644775390625e-08
""",
}
# Numbers in [0, 1) by seed, stream and index: the upper 24 bits of word `word` of the block that a quarter of the
# index counts.
ROWS = tuple(
    OpRow(
        name, 3, eval, f"fuser_philox_word({{0}}, {{1}}, {{2}}, {word})",
        f"fuser_unit_float(fuser_philox_word({{0}}, {{1}}, {index.replace('{0}', '{2}')}))", (torch.int64,),
        result=torch.float32, cost=40, draw=(drawn, index),
    )
    for name, eval, word, index, drawn in (
        ("philox_uniform", philox_uniform, "{2}", "{0}", 2),
        ("philox_even", philox_even, "{2} & 2", "{0} & -2", 0),
        ("philox_odd", philox_odd, "{2} | 1", "{0} | 1", 1),
    )
)  # fmt: skip


def _uniform_like(seed: torch.Tensor, stream: int, like: torch.Tensor) -> torch.Tensor:
    index = torch.arange(like.numel(), device=like.device).reshape(like.shape)
    return philox_uniform(seed, torch.tensor(stream, device=like.device), index)


def _normal_like(seed: torch.Tensor, stream: int, like: torch.Tensor) -> torch.Tensor:
    index = torch.arange(like.numel(), device=like.device).reshape(like.shape)
    first, second = (f(seed, torch.tensor(stream, device=like.device), index) for f in (philox_even, philox_odd))
    value: torch.Tensor = normal_of(lambda name, *args: getattr(torch, name)(*args), first, second, index & 1 == 1)
    return value


def _uniform_like_meta(seed: torch.Tensor, stream: int, like: torch.Tensor) -> torch.Tensor:
    return torch.empty(like.shape, dtype=torch.float32, device=like.device)


def _probabilities(p: torch.Tensor) -> torch.Tensor:
    if not ((p >= 0) & (p <= 1)).all():
        raise RuntimeError("bernoulli expects each probability to be in [0, 1]")
    return p.clone()


# uniform_like(seed, stream, like): float32 in [0, 1) for each element of `like`, of which only the sizes are used;
# normal_like: standard normal numbers. probabilities(p): `p`, or an error if an element is outside [0, 1].
operator("uniform_like(Tensor seed, int stream, Tensor like) -> Tensor", _uniform_like, _uniform_like_meta)
operator("normal_like(Tensor seed, int stream, Tensor like) -> Tensor", _normal_like, _uniform_like_meta)
operator("probabilities(Tensor p) -> Tensor", _probabilities, torch.empty_like)
