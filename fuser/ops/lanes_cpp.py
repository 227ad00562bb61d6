"""C++ for explicit vectors of float32 lanes, where 16-bit floats take one instruction to load, store or round.

g++ vectorises loops, but not conversions between float16 and float32: as integers, a load takes eight instructions and
a rounding thirteen, while machines with F16C and AVX-512 have one and two. A machine's row says how its vectors are
spelled, if at all. If the compiler lacks these builtins `FUSER_LANES` is 0, and kernels use a plain loop instead. Both
give the same bits.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from functools import partial

from fuser.lazy_dataclasses import dataclass
from fuser.machines import Machine
from fuser.ops import float_cpp, inverse_cpp, special

# `lanes_f` is a vector of floats, `lanes_i` the result of a comparison, 0 or -1 per lane. A pair is two adjacent
# bfloat16 in one word: a vector of the even elements and one of the odd elements take one instruction each.
_TEXT = """\
#if defined(__clang__)
#define FUSER_LANES 0
#else
#define FUSER_LANES WIDTH
#endif
#if FUSER_LANES
typedef float lanes_f __attribute__((vector_size(4 * FUSER_LANES)));
typedef u32 lanes_u __attribute__((vector_size(4 * FUSER_LANES)));
typedef i32 lanes_i __attribute__((vector_size(4 * FUSER_LANES)));
typedef double lanes_d __attribute__((vector_size(4 * FUSER_LANES)));
typedef u64 lanes_q __attribute__((vector_size(4 * FUSER_LANES)));
typedef i64 lanes_l __attribute__((vector_size(4 * FUSER_LANES)));
typedef float lanes_f2 __attribute__((vector_size(2 * FUSER_LANES)));
typedef double lanes_d2 __attribute__((vector_size(2 * FUSER_LANES)));
typedef i16 lanes_w __attribute__((vector_size(4 * FUSER_LANES)));
typedef i16 lanes_h __attribute__((vector_size(2 * FUSER_LANES)));
typedef u8 lanes_b __attribute__((vector_size(FUSER_LANES)));
typedef u16 lanes_m;
#define FUSER_AT(T, p) T at; __builtin_memcpy(&at, p, sizeof at)
WORDS
#define FUSER_L(x) ((x) - (lanes_f){})
#define FUSER_LD(x) ((x) - (lanes_d){})
// Some lanes of a vector, a bit for each: of what is in memory at the others nothing is read, or written.
SOME
// The first lanes, `n` of them or all: as a mask where n is 1 at least, as flags for any n. The mask is computed, as
// g++ makes a constant of all ones by an instruction that waits for what was in the register before.
FUSER_FN lanes_m fuser_lanes_first(i64 n) {
  return (lanes_m)(((1u << FUSER_LANES) - 1) >> (FUSER_LANES - (n < FUSER_LANES ? n : FUSER_LANES)));
}
FUSER_FN lanes_i fuser_lanes_before(i64 n) {
  lanes_i own;
  for (int l = 0; l < FUSER_LANES; ++l) own[l] = l;
  return own < (i32)(n < 0 ? 0 : n < FUSER_LANES ? n : FUSER_LANES);
}
FUSER_FN lanes_f fuser_lanes_all(float x) { return x - (lanes_f){}; }
FUSER_FN lanes_i fuser_lanes_all_flags(bool x) { return (lanes_i){} - (i32)x; }
FUSER_FN lanes_f fuser_lanes_from_float(lanes_f at) { return at; }
FUSER_FN lanes_f fuser_lanes_from_half(lanes_h at) { return FUSER_FROM_HALF(at); }
FUSER_FN lanes_f fuser_lanes_from_bfloat16(lanes_h at) { return (lanes_f)(FUSER_WIDEN(at) << 16); }
FUSER_FN lanes_i fuser_lanes_from_bool(lanes_b at) { return __builtin_convertvector(at, lanes_i) != 0; }
FUSER_FN lanes_f fuser_lanes_turn(lanes_f x) {
  lanes_i from;
  for (int l = 0; l < FUSER_LANES; ++l) from[l] = FUSER_LANES - 1 - l;
  return __builtin_shuffle(x, from);
}
FUSER_FN lanes_i fuser_lanes_turn(lanes_i x) { return (lanes_i)fuser_lanes_turn((lanes_f)x); }
// `load` reads a vector from p on, `part` some of it, `back` its first lanes or all, backwards, lane 0 from p itself.
#define FUSER_LOAD(name, vector, T) \
  FUSER_FN auto fuser_lanes_load_##name(const T* p) { FUSER_AT(vector, p); return fuser_lanes_from_##name(at); } \
  FUSER_FN auto fuser_lanes_part_##name(const T* p, lanes_m m) { \
    return fuser_lanes_from_##name(fuser_lanes_some(p, m)); \
  } \
  FUSER_FN auto fuser_lanes_back_##name(const T* p, i64 n) { \
    const lanes_m m = fuser_lanes_first(n) << (n < FUSER_LANES ? FUSER_LANES - n : 0); \
    return fuser_lanes_turn(fuser_lanes_part_##name(p - (FUSER_LANES - 1), m)); \
  }
FUSER_LOAD(float, lanes_f, float)
FUSER_LOAD(half, lanes_h, u16)
FUSER_LOAD(bfloat16, lanes_h, u16)
FUSER_LOAD(bool, lanes_b, u8)
FUSER_FN lanes_u fuser_lanes_load_pairs(const u16* p) { FUSER_AT(lanes_u, p); return at; }
FUSER_FN lanes_f fuser_lanes_even(lanes_u pairs) { return (lanes_f)(pairs << 16); }
FUSER_FN lanes_f fuser_lanes_odd(lanes_u pairs) { return (lanes_f)(pairs & 0xffff0000u); }
FUSER_FN lanes_f fuser_lanes_round_half(lanes_f x) { return FUSER_FROM_HALF(FUSER_TO_HALF(x)); }
NEAREST
FUSER_FN lanes_f fuser_lanes_round_tame_bfloat16(lanes_f x) {
  return (lanes_f)(fuser_lanes_nearest_bfloat16(x) & 0xffff0000u);
}
FUSER_FN lanes_f fuser_lanes_no_nan(lanes_f x, lanes_f y) {
  return x != x ? (lanes_f)((lanes_u){} + 0x7fc00000u) : y;
}
FUSER_FN lanes_f fuser_lanes_round_bfloat16(lanes_f x) {
  return fuser_lanes_no_nan(x, fuser_lanes_round_tame_bfloat16(x));
}
FUSER_FN lanes_f fuser_lanes_to_float(lanes_f x) { return x; }
FUSER_FN lanes_h fuser_lanes_to_half(lanes_f x) { return FUSER_TO_HALF(x); }
// What goes to bfloat16 is a float's bits, rounded, of which the low half may be anything; each NaN becomes the same.
FUSER_FN lanes_h fuser_lanes_to_bfloat16(lanes_u x) {
  const lanes_h n = FUSER_NARROW(x >> 16);
  return (n & 0x7fff) > 0x7f80 ? (lanes_h){} + 0x7fc0 : n;
}
FUSER_FN lanes_b fuser_lanes_to_bool(lanes_i x) { return __builtin_convertvector(-x, lanes_b); }
#define FUSER_STORE(name, vector, T) \
  FUSER_FN void fuser_lanes_store_##name(T* p, vector x) { \
    const auto out = fuser_lanes_to_##name(x); \
    __builtin_memcpy(p, &out, sizeof out); \
  } \
  FUSER_FN void fuser_lanes_put_##name(T* p, vector x, lanes_m m) { fuser_lanes_put(p, fuser_lanes_to_##name(x), m); }
FUSER_STORE(float, lanes_f, float)
FUSER_STORE(half, lanes_f, u16)
FUSER_STORE(bfloat16, lanes_u, u16)
FUSER_STORE(bool, lanes_i, u8)
FUSER_FN void fuser_lanes_store_pairs(u16* p, lanes_u even, lanes_u odd) {
  const lanes_w pairs = (lanes_w)((even >> 16) | (odd & 0xffff0000u));
  const lanes_w out = (pairs & 0x7fff) > 0x7f80 ? (lanes_w){} + 0x7fc0 : pairs;
  __builtin_memcpy(p, &out, sizeof out);
}
FUSER_FN lanes_f fuser_lanes_abs(lanes_f x) { return (lanes_f)((lanes_u)x & 0x7fffffffu); }
FUSER_FN lanes_f fuser_lanes_copysign(lanes_f x, lanes_f y) {
  return (lanes_f)(((lanes_u)x & 0x7fffffffu) | ((lanes_u)y & 0x80000000u));
}
FUSER_FN lanes_f fuser_lanes_number(lanes_i x) { return __builtin_convertvector(x, lanes_f); }
// The same of doubles, of which a vector has half as many.
FUSER_FN lanes_m fuser_lanes_first_double(i64 n) {
  return (lanes_m)(((1u << FUSER_LANES / 2) - 1) >> (FUSER_LANES / 2 - (n < FUSER_LANES / 2 ? n : FUSER_LANES / 2)));
}
FUSER_FN lanes_l fuser_lanes_before_double(i64 n) {
  lanes_l own;
  for (int l = 0; l < FUSER_LANES / 2; ++l) own[l] = l;
  return own < n;
}
FUSER_FN lanes_d fuser_lanes_all(double x) { return x - (lanes_d){}; }
FUSER_FN lanes_d fuser_lanes_load_double(const double* p) { FUSER_AT(lanes_d, p); return at; }
FUSER_FN lanes_d fuser_lanes_part_double(const double* p, lanes_m m) { return fuser_lanes_some(p, m); }
FUSER_FN void fuser_lanes_store_double(double* p, lanes_d x) { __builtin_memcpy(p, &x, sizeof x); }
FUSER_FN void fuser_lanes_put_double(double* p, lanes_d x, lanes_m m) { fuser_lanes_put(p, x, m); }
UNLESS_NAN
FUSER_FN lanes_f fuser_lanes_maximum(lanes_f a, lanes_f b) { return fuser_lanes_unless_nan(a, b, a > b ? a : b); }
FUSER_FN lanes_f fuser_lanes_minimum(lanes_f a, lanes_f b) { return fuser_lanes_unless_nan(a, b, a < b ? a : b); }
#endif
"""


@dataclass(frozen=True)
class Spelled:
    """The spelling of vectors for a family of instruction sets, with g++'s builtins.

    lanes: number of floats in a vector. words: conversions, square roots, roundings, sums of products. some: masked
    loads and stores. unless_nan: a value, or the sum of two others if one of these is NaN.
    """

    lanes: int
    words: str
    some: str
    unless_nan: str


_SPELLED = {
    "avx512": Spelled(
        16,
        """\
#define FUSER_TO_HALF(x) ((lanes_h)__builtin_ia32_vcvtps2ph512_mask(x, 0, (lanes_h){}, (u16)-1))
#define FUSER_FROM_HALF(h) __builtin_ia32_vcvtph2ps512_mask(h, (lanes_f){}, (u16)-1, 4)
#define FUSER_WIDEN(h) ((lanes_u)__builtin_ia32_pmovzxwd512_mask(h, (lanes_i){}, (u16)-1))
#define FUSER_NARROW(w) ((lanes_h)__builtin_ia32_pmovdw512_mask((lanes_i)(w), (lanes_h){}, (u16)-1))
#define FUSER_LANES_SQRT(x) __builtin_ia32_sqrtps512_mask(x, (lanes_f){}, (u16)-1, 4)
#define FUSER_LANES_ROUND(x, how) __builtin_ia32_rndscaleps_mask(x, 8 + how, (lanes_f){}, (u16)-1, 4)
#define FUSER_LANES_ANY_ABOVE(x, y) __builtin_ia32_cmpps512_mask(x, FUSER_L(y), 13, (u16)-1, 4)
#define FUSER_LANES_JOIN(a, b) ((lanes_f)__builtin_ia32_insertf64x4_mask( \\
  (lanes_d)__builtin_ia32_ps512_256ps(a), (lanes_d2)(b), 1, (lanes_d){}, (u8)-1))
#define FUSER_LANES_DOUBLE(x) __builtin_ia32_cvtps2pd512_mask(x, (lanes_d){}, (u8)-1, 4)
#define FUSER_LANES_EVEN (lanes_u){0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30}
#define FUSER_LANES_FMAD(a, b, c) __builtin_ia32_vfmaddpd512_mask(FUSER_LD(a), FUSER_LD(b), FUSER_LD(c), (u8)-1, 4)
#define FUSER_LANES_FMA(a, b, c) __builtin_ia32_vfmaddps512_mask(FUSER_L(a), FUSER_L(b), FUSER_L(c), (u16)-1, 4)
#define FUSER_LANES_SCALE(p, n) __builtin_ia32_scalefps512_mask(p, n, (lanes_f){}, (u16)-1, 4)
""",
        """\
typedef char lanes_c __attribute__((vector_size(16)));
#define FUSER_MASK(c) ((lanes_m)__builtin_ia32_ptestmd512(c, c, (u16)-1))
FUSER_FN lanes_h fuser_lanes_some(const u16* p, lanes_m m) {
  return (lanes_h)__builtin_ia32_loaddquhi256_mask((const i16*)p, (lanes_h){}, m);
}
FUSER_FN lanes_b fuser_lanes_some(const u8* p, lanes_m m) {
  return (lanes_b)__builtin_ia32_loaddquqi128_mask((const char*)p, (lanes_c){}, m);
}
FUSER_FN lanes_f fuser_lanes_some(const float* p, lanes_m m) {
  return __builtin_ia32_loadups512_mask(p, (lanes_f){}, m);
}
FUSER_FN void fuser_lanes_put(u16* p, lanes_h x, lanes_m m) { __builtin_ia32_storedquhi256_mask((i16*)p, x, m); }
FUSER_FN void fuser_lanes_put(u8* p, lanes_b x, lanes_m m) {
  __builtin_ia32_storedquqi128_mask((char*)p, (lanes_c)x, m);
}
FUSER_FN void fuser_lanes_put(float* p, lanes_f x, lanes_m m) { __builtin_ia32_storeups512_mask(p, x, m); }
FUSER_FN lanes_d fuser_lanes_some(const double* p, lanes_m m) {
  return __builtin_ia32_loadupd512_mask(p, (lanes_d){}, (u8)m);
}
FUSER_FN void fuser_lanes_put(double* p, lanes_d x, lanes_m m) { __builtin_ia32_storeupd512_mask(p, x, (u8)m); }
""",
        """\
FUSER_FN lanes_f fuser_lanes_unless_nan(lanes_f a, lanes_f b, lanes_f y) {
  return __builtin_ia32_addps512_mask(a, b, y, __builtin_ia32_cmpps512_mask(a, b, 3, (u16)-1, 4), 4);
}
""",
    ),
    "avx2": Spelled(
        8,
        """\
#define FUSER_TO_HALF(x) ((lanes_h)__builtin_ia32_vcvtps2ph256(x, 0))
#define FUSER_FROM_HALF(h) __builtin_ia32_vcvtph2ps256(h)
#define FUSER_WIDEN(h) ((lanes_u)__builtin_ia32_pmovzxwd256(h))
#define FUSER_NARROW(w) __builtin_convertvector(w, lanes_h)
#define FUSER_LANES_SQRT(x) __builtin_ia32_sqrtps256(x)
#define FUSER_LANES_ROUND(x, how) __builtin_ia32_roundps256(x, 8 + how)
#define FUSER_LANES_ANY_ABOVE(x, y) __builtin_ia32_movmskps256((lanes_f)((x) >= (y)))
#define FUSER_LANES_JOIN(a, b) __builtin_ia32_vinsertf128_ps256(__builtin_ia32_ps256_ps(a), b, 1)
#define FUSER_LANES_DOUBLE(x) __builtin_ia32_cvtps2pd256(x)
#define FUSER_LANES_EVEN (lanes_u){0, 2, 4, 6, 8, 10, 12, 14}
#define FUSER_LANES_FMAD(a, b, c) __builtin_ia32_vfmaddpd256(FUSER_LD(a), FUSER_LD(b), FUSER_LD(c))
#define FUSER_LANES_FMA(a, b, c) __builtin_ia32_vfmaddps256(FUSER_L(a), FUSER_L(b), FUSER_L(c))
""",
        """\
#define FUSER_MASK(c) ((lanes_m)__builtin_ia32_movmskps256((lanes_f)(c)))
FUSER_FN lanes_i fuser_lanes_flags(lanes_m m) {
  return ((lanes_i){} + (i32)m & (lanes_i){1, 2, 4, 8, 16, 32, 64, 128}) != 0;
}
template <class V, class T> FUSER_FN V fuser_lanes_some_of(const T* p, lanes_m m) {
  V at = {};
  if (m == 255) __builtin_memcpy(&at, p, sizeof at);
  else for (int l = 0; l < FUSER_LANES; ++l) if (m >> l & 1) at[l] = p[l];
  return at;
}
FUSER_FN lanes_b fuser_lanes_some(const u8* p, lanes_m m) { return fuser_lanes_some_of<lanes_b>(p, m); }
FUSER_FN lanes_f fuser_lanes_some(const float* p, lanes_m m) {
  return __builtin_ia32_maskloadps256((const lanes_f*)p, fuser_lanes_flags(m));
}
FUSER_FN lanes_d fuser_lanes_some(const double* p, lanes_m m) {
  return __builtin_ia32_maskloadpd256((const lanes_d*)p, ((lanes_l){} + m & (lanes_l){1, 2, 4, 8}) != 0);
}
// Most masks are the first lanes: then 4, 2 and 1 elements are moved, as the bits of their number say.
typedef u64 lanes_q2 __attribute__((vector_size(16)));
FUSER_FN lanes_h fuser_lanes_some(const u16* p, lanes_m m) {
  if (m == 255 || m & (m + 1)) return fuser_lanes_some_of<lanes_h>(p, m);
  u64 four = 0, rest = 0;
  if (m & 8) { __builtin_memcpy(&four, p, 8); p += 4; }
  const u32 n = m & 8 ? m >> 4 : m;
  if (n & 2) {
    u32 two;
    __builtin_memcpy(&two, p, 4);
    rest = n & 4 ? two | (u64)p[2] << 32 : two;
  } else if (n & 1) rest = *p;
  return (lanes_h)(m & 8 ? (lanes_q2){four, rest} : (lanes_q2){rest, 0});
}
template <class V, class T> FUSER_FN void fuser_lanes_put(T* p, V x, lanes_m m) {
  if (m == 255) { __builtin_memcpy(p, &x, sizeof x); return; }
  T own[sizeof x / sizeof(T)];
  __builtin_memcpy(own, &x, sizeof x);
  const T* from = own;
  if (m & 8) { __builtin_memcpy(p, from, 4 * sizeof(T)); p += 4; from += 4; m >>= 4; }
  if (m & 2) { __builtin_memcpy(p, from, 2 * sizeof(T)); p += 2; from += 2; m >>= 2; }
  if (m & 1) *p = *from;
}
""",
        """\
FUSER_FN lanes_f fuser_lanes_unless_nan(lanes_f a, lanes_f b, lanes_f y) { return (a != a) | (b != b) ? a + b : y; }
""",
    ),
}
_NEAREST = """\
FUSER_FN lanes_u fuser_lanes_nearest_bfloat16(lanes_f x) {
  const lanes_u b = (lanes_u)x;
  return b + 0x7fffu + ((b >> 16) & 1u);
}
"""
_NEAREST_BY_DOTS = f"""\
#if __GNUC__ < 15
FUSER_FN lanes_u fuser_lanes_nearest_bfloat16(lanes_f x) {{
  const lanes_i last = (lanes_i)((lanes_u)x & 0x10000u), one = (lanes_i){{}} + 0x10000;
  return (lanes_u)__builtin_ia32_vpdpbusd_v16si((lanes_i)((lanes_u)x + 0x7fffu), last, one);
}}
#else
{_NEAREST}#endif
"""


def _lanes(machine: Machine) -> str:
    """The types and functions of explicit vectors."""
    spelled = _SPELLED[machine.lanes]
    text = _TEXT.replace("WIDTH", str(spelled.lanes)).replace("UNLESS_NAN\n", spelled.unless_nan)
    text = text.replace("NEAREST\n", _NEAREST_BY_DOTS if machine.dots else _NEAREST)
    return text.replace("WORDS\n", spelled.words).replace("SOME\n", spelled.some)


# The head of each function, its loop over vectors, and the plain loop. A piece has room for a whole number of vectors;
# elements after its first `count` may have any value.
_PIECES = {
    "fuser_piece_from_half": ("""\
FUSER_FN void fuser_piece_from_half(float* to, const u16* from, i64 count) {
""", """\
  i64 k = 0;
  for (; k + FUSER_LANES <= count; k += FUSER_LANES) fuser_lanes_store_float(to + k, fuser_lanes_load_half(from + k));
  if (k < count) fuser_lanes_store_float(to + k, fuser_lanes_part_half(from + k, fuser_lanes_first(count - k)));
""", """\
#pragma omp simd
  for (i64 k = 0; k < count; ++k) to[k] = fuser_load_half(from[k]);
"""),
    # Zeros before element `low` and from element `high` on, which are not read.
    "fuser_piece_between": ("""\
FUSER_FN void fuser_piece_between(float* to, const u16* from, i64 count, i64 low, i64 high) {
""", """\
  for (i64 k = 0; k < count; k += FUSER_LANES) {
    const lanes_i inside = fuser_lanes_before(high - k) & ~fuser_lanes_before(low - k);
    fuser_lanes_store_float(to + k, fuser_lanes_part_half(from + k, FUSER_MASK(inside)));
  }
""", """\
  for (i64 k = 0; k < count; ++k) to[k] = (k >= low) & (k < high) ? fuser_load_half(from[k]) : 0.0f;
"""),
    "fuser_piece_to_half": ("""\
FUSER_FN void fuser_piece_to_half(u16* to, const float* from, i64 count) {
""", """\
  i64 k = 0;
  for (; k + FUSER_LANES <= count; k += FUSER_LANES) fuser_lanes_store_half(to + k, fuser_lanes_load_float(from + k));
  if (k < count) fuser_lanes_put_half(to + k, fuser_lanes_load_float(from + k), fuser_lanes_first(count - k));
""", """\
#pragma omp simd
  for (i64 k = 0; k < count; ++k) to[k] = fuser_store_half(from[k]);
"""),
}

# Every second element, from two vectors. The second vector begins early enough that nothing after the last element is
# read. The lower half of a mask's bits is for lanes in the first vector.
_SECOND = """\
#if FUSER_LANES
#if defined(__BMI2__)
#define FUSER_SPREAD(m) __builtin_ia32_pdep_si(m, 0x5555)
#else
FUSER_FN u32 fuser_spread(u32 m) {
  m = (m | m << 4) & 0x0f0f, m = (m | m << 2) & 0x3333;
  return (m | m << 1) & 0x5555;
}
#define FUSER_SPREAD(m) fuser_spread(m)
#endif
template <class V, class I> FUSER_FN V fuser_lanes_second(V low, V high) {
  I from;
  for (int l = 0; l < FUSER_LANES; ++l) from[l] = l < FUSER_LANES / 2 ? 2 * l : 2 * l + 1;
  return __builtin_shuffle(low, high, from);
}
#endif
"""
_LOADS_SECOND = {
    "fuser_lanes_each_second_NAME": """\
#if FUSER_LANES
FUSER_FN lanes_f fuser_lanes_each_second_NAME(const T* p) {
  FUSER_AT(VECTOR, p);
  VECTOR high;
  __builtin_memcpy(&high, p + (FUSER_LANES - 1), sizeof high);
  return fuser_lanes_from_NAME(fuser_lanes_second<VECTOR, INDEX>(at, high));
}
#endif
""",
    "fuser_lanes_part_of_second_NAME": """\
#if FUSER_LANES
FUSER_FN lanes_f fuser_lanes_part_of_second_NAME(const T* p, lanes_m m) {
  const VECTOR low = fuser_lanes_some(p, (lanes_m)FUSER_SPREAD(m & ((1 << FUSER_LANES / 2) - 1)));
  const lanes_m rest = (lanes_m)(FUSER_SPREAD(m >> FUSER_LANES / 2) << 1);
  return fuser_lanes_from_NAME(fuser_lanes_second<VECTOR, INDEX>(low, fuser_lanes_some(p + (FUSER_LANES - 1), rest)));
}
#endif
""",
}


def _loads_second() -> dict[str, str]:
    """The strided loads for each element type."""
    found = {}
    for kind, vector, element, index in (
        ("float", "lanes_f", "float", "lanes_i"), ("half", "lanes_h", "u16", "lanes_h"),
        ("bfloat16", "lanes_h", "u16", "lanes_h"),
    ):  # fmt: skip
        for name, text in _LOADS_SECOND.items():
            text = text.replace("const T*", f"const {element}*").replace("NAME", kind).replace("INDEX", index)
            found[name.replace("NAME", kind)] = text.replace("VECTOR", vector)
    return found


def _piece(head: str, vectors: str, plain: str, machine: Machine) -> str:
    """The text of a piece's function; on machines without such vectors only the plain loop."""
    return f"{head}#if FUSER_LANES\n{vectors}#else\n{plain}#endif\n}}\n" if machine.lanes else f"{head}{plain}}}\n"


HELPERS: dict[str, str | Callable[[Machine], str]] = {
    "FUSER_LANES": _lanes, **{name: partial(_piece, *parts) for name, parts in _PIECES.items()},
    "fuser_lanes_second": _SECOND, **_loads_second(),
}  # fmt: skip

# Elementary functions with a vector form: the text of the scalar form, with other types.
FUNCTIONS = tuple(row.name for row in special.ROWS if row.inline)
_INSIDE = ("exp_near", "exp_below", "log_edges", "half_exp", "log1p_sum", "log1p_unit", "turned")
_FOR_VECTORS = (
    (r"\bfuser_(\w+)", r"fuser_lanes_\1"),
    (r"\bFUSER_FMAF\b", "FUSER_LANES_FMA"),
    (r"\bFUSER_BITS\((\w+), ", r"(\1)("),
    (r"\(float\)(\(\(i32\)b >> 23\)|k\b)", r"fuser_lanes_number(\1)"),
    (r"\b__builtin_fabsf\b", "fuser_lanes_abs"),
    (r"\b__builtin_sqrtf\b", "FUSER_LANES_SQRT"),
    (r"\b__builtin_copysignf\b", "fuser_lanes_copysign"),
    (r"\bfloat\b", "lanes_f"),
    (r"\bu32\b", "lanes_u"),
    (r"\b(?:i32|bool)\b", "lanes_i"),
)


def _for_vectors(text: str) -> str:
    for pattern, to in _FOR_VECTORS:
        text = re.sub(pattern, to, text)
    return text


_SCALE = "fuser_lanes_scale_f32"
# One instruction, on machines that compute p 2^n with one rounding; t is n + 1.5 * 2^23.
_SCALED = f"""\
#if defined(FUSER_LANES_SCALE)
FUSER_FN lanes_f {_SCALE}(lanes_f p, lanes_f t) {{ return FUSER_LANES_SCALE(p, t - 12582912.0f); }}
#else
TEXT#endif
"""


@functools.cache
def _vector_form(name: str) -> str:
    """The vector form of a scalar helper. It is made when a kernel needs it: the patterns take 4 ms."""
    scalar = (float_cpp.HELPERS | inverse_cpp.HELPERS)[name.replace("fuser_lanes_", "fuser_")]
    text = f"#if FUSER_LANES\n{_for_vectors(scalar)}#endif\n"
    return _SCALED.replace("TEXT", text) if name == _SCALE else text


def _vector_helper(name: str, machine: Machine) -> str:
    return _vector_form(name)


for _name in (*(f"fuser_{n}_f32" for n in (*FUNCTIONS, *_INSIDE, "atan2")), "fuser_pow2_of", "fuser_scale_f32"):
    _name = _name.replace("fuser_", "fuser_lanes_")
    HELPERS[_name] = partial(_vector_helper, _name)

# As in float_cpp, the remainder modulo pi/2 is computed in double, by halves of a vector. Vectors with an element in
# one of that helper's buckets, or infinite, call it for each element. The bits are the same. The call comes last, so
# that g++ computes common subexpressions of a number's sine and cosine once.
_SINE = f"""\
static __attribute__((noinline, unused)) lanes_f fuser_lanes_NAME_far(lanes_f x) {{
  for (int i = 0; i < FUSER_LANES; ++i) x[i] = fuser_NAME_f32(x[i]);
  return x;
}}
FUSER_FN lanes_f fuser_lanes_NAME_f32(lanes_f x) {{
  union {{ lanes_f all; lanes_f2 part[2]; }} of = {{x}};
  lanes_d t[2], r[2];
  for (int i = 0; i < 2; ++i) {{
    const lanes_d p = FUSER_LANES_DOUBLE(of.part[i]);
    t[i] = FUSER_LANES_FMAD(p, 0x1.45f306dc9c883p-1, 6755399441055744.0);
    const lanes_d n = t[i] - 6755399441055744.0, h = FUSER_LANES_FMAD(n, -0x1.921fb54442d18p+0, p);
    r[i] = FUSER_LANES_FMAD(n, -0x1.1a62633145c07p-54, h);
  }}
  const lanes_f2 low = __builtin_convertvector(r[0], lanes_f2), high = __builtin_convertvector(r[1], lanes_f2);
  const lanes_u turn = __builtin_shuffle((lanes_u)t[0], (lanes_u)t[1], FUSER_LANES_EVEN);
  const lanes_f y = fuser_lanes_turned_f32(FUSER_LANES_JOIN(low, high), turn + TURN);
  const auto far = FUSER_LANES_ANY_ABOVE(fuser_lanes_abs(x), {float_cpp.FIRST_BUCKET});
  return __builtin_expect(far, 0) ? fuser_lanes_NAME_far(x) : y;
}}
"""
for _name, _turn in (("sin", "0u"), ("cos", "1u")):
    _text = _SINE.replace("NAME", _name).replace("TURN", _turn)
    HELPERS[f"fuser_lanes_{_name}_f32"] = f"#if FUSER_LANES\n{_text}#endif\n"
