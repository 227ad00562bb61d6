"""The C++ of attention forward in one kernel, and its launch program; `attention.py` describes the algorithm."""

from __future__ import annotations

from typing import Any

import torch

from fuser.cpu import dots, packed_cpp
from fuser.cpu.dots import DTYPES, ELEMENTS, PAIRS
from fuser.cpu.routines import Routine, slots_of
from fuser.cpu.text import filled
from fuser.cpu.transposes import edge_of, transposition
from fuser.ir.sizes import expr, floordiv
from fuser.kernel_spec import Bind, Check, InputPattern, LaunchProgram, Step
from fuser.machines import Machine
from fuser.ops import cpp_load, cpp_store

ROWS, KEYS = 192, 256  # rows of a unit, keys of a block

_ENTRY = """\
HELPER
extern "C" void ENTRY(
    char* const* ptrs, const i64* s, const double* f, i64 begin, i64 end, char* scratch, i32* status) {
  const i64 heads = s[1], rows = s[2], width = s[3], groups = s[8], keys = s[9], values = s[13];
  const float scale = (float)f[0];
  const i64 blocks = (rows + ROWS - 1) / ROWS, each = ((rows + blocks - 1) / blocks + HIGH - 1) / HIGH * HIGH;
  const i64 panels = (values + WIDTH - 1) / WIDTH, wide = panels * WIDTH;
  TYPE* const packed_k = (TYPE*)scratch;
  TYPE* const packed_v = packed_k + KEYS * width;
  float* const results = (float*)(packed_v + KEYS * wide);
  float* const scores = results + ROWS * wide;
  TYPE* const weights = (TYPE*)(scores + HIGH * KEYS);
  float most[ROWS], total[ROWS];
  for (i64 unit = begin; unit < end; ++unit) {
    const i64 m0 = unit % blocks * each, m1 = m0 + each < rows ? m0 + each : rows;
    const i64 head = unit / blocks % heads, batch = unit / blocks / heads, group = head / (heads / groups);
    const TYPE* q = (const TYPE*)ptrs[0] + batch * s[4] + head * s[5];
    const TYPE* k = (const TYPE*)ptrs[1] + batch * s[10] + group * s[11];
    const TYPE* v = (const TYPE*)ptrs[2] + batch * s[14] + group * s[15];
    TYPE* out = (TYPE*)ptrs[3] + batch * s[17] + head * s[18];
    float* logs = (float*)ptrs[4] + batch * s[20] + head * s[21];
    OF_MASK
    for (i64 m = m0; m < m1; ++m) { most[m - m0] = -__builtin_inff(); total[m - m0] = 0.0f; }
    const i64 seen = LAST_SEEN;
    for (i64 n0 = 0; n0 < seen; n0 += KEYS) {
      const i64 n1 = n0 + KEYS < seen ? n0 + KEYS : seen;
      fuser_pack_keys(k + n0 * s[12], s[12], n1 - n0, width, packed_k);
      fuser_pack_values(v + n0 * s[16], s[16], n1 - n0, values, packed_v);
      for (i64 m = FIRST_ROW; m < m1; m += HIGH) {
        const i64 high = m + HIGH < m1 ? HIGH : m1 - m, last = m + high - 1;
        const i64 count = SEEN(last), turns = (count + PAIR - 1) / PAIR;
        const TYPE* at[HIGH];
        for (int r = 0; r < HIGH; ++r) at[r] = q + (r < high ? m + r : last) * s[6];
        for (i64 n = 0; n < count; n += WIDTH)
          fuser_panel_NAME(at, packed_k + n * width, width / PAIR, scores + n, KEYS, true);
        for (i64 r = 0; r < high; ++r) {
          const i64 left = SEEN(m + r), own = left > 0 ? left : 0;
          float* result = results + (m + r - m0) * wide;
          fuser_weigh(scores + r * KEYS, own, turns * PAIR, scale, MASK_OF_ROW, weights + r * KEYS,
                      &most[m + r - m0], &total[m + r - m0], n0 ? result : 0, wide);
        }
        for (int r = 0; r < HIGH; ++r) at[r] = weights + (r < high ? r : high - 1) * KEYS;
        for (i64 p = 0; p < panels; ++p)
          fuser_panel_NAME(at, packed_v + p * KEYS * WIDTH, turns, results + (m - m0) * wide + p * WIDTH, wide, !n0);
      }
    }
    for (i64 m = m0; m < m1; ++m) {
      const float sum = total[m - m0], by = 1.0f / (sum == 0.0f ? 1.0f : sum);
      const float* result = results + (m - m0) * wide;
      TYPE* to = out + m * s[19];
      if (sum == 0.0f) {
        for (i64 j = 0; j < values; ++j) to[j] = 0;
      } else {
        #pragma omp simd
        for (i64 j = 0; j < values; ++j) to[j] = STORED;
      }
      logs[m * s[22]] = sum == 0.0f ? 0.0f : most[m - m0] + fuser_log_f32(sum);
    }
  }
}
"""
_HELPERS = """\
static __attribute__((noinline)) void fuser_pack_keys(
    const TYPE* k, i64 step, i64 count, i64 width, TYPE* out) {
  const i64 words = width / PAIR;
  for (i64 n = 0; n < count; n += WIDTH) {
    WORD* to = (WORD*)(out + n * width);
    if (n + WIDTH <= count && step % PAIR == 0 && words % EDGE == 0) {
      transpose_u32(k + n * step, step / PAIR, to, words, WIDTH);
      continue;
    }
    for (i64 l = 0; l < WIDTH; ++l) {
      const WORD* from = (const WORD*)(k + (n + l < count ? n + l : count - 1) * step);
      for (i64 j = 0; j < words; ++j) to[j * WIDTH + l] = from[j];
    }
  }
}
static __attribute__((noinline)) void fuser_pack_values(
    const TYPE* v, i64 step, i64 count, i64 width, TYPE* out) {
  for (i64 p = 0; p < width; p += WIDTH, out += KEYS * WIDTH) {
    const i64 own = p + WIDTH < width ? WIDTH : width - p;
    for (i64 n = 0; n < count; n += PAIR) {
PAIRED
    }
  }
}
// Weights of one row's scores, and what its earlier results and sums are scaled by.
static __attribute__((noinline)) void fuser_weigh(
    float* __restrict x, i64 count, i64 filled, float scale, const MASK* mask, i64 step, TYPE* __restrict weights,
    float* most, float* total, float* __restrict result, i64 wide) {
  float high = -__builtin_inff();
  MASKED
  const float old = *most, now = old > high ? old : high, base = now == -__builtin_inff() ? 0.0f : now;
  float sum = 0.0f;
EXPONENTIALS
  if (result) {
    const float by = fuser_exp_down_f32(old - base);
    *total = *total * by + sum;
    #pragma omp simd
    for (i64 j = 0; j < wide; ++j) result[j] *= by;
  } else {
    *total = sum;
  }
  *most = now;
}
"""
_PLAIN = """\
  #pragma omp simd reduction(+ : sum)
  for (i64 j = 0; j < count; ++j) {
    const float e = fuser_exp_down_f32(x[j] - base);
    sum += e;
    weights[j] = ROUNDED;
  }
  for (i64 j = count; j < filled; ++j) weights[j] = 0;"""
# Whole vectors: scores in the tail are minus infinity, so their weights are 0.
_IN_LANES = f"""\
  #if FUSER_LANES
  const i64 length = (filled + FUSER_LANES - 1) / FUSER_LANES * FUSER_LANES;
  for (i64 j = count; j < length; ++j) x[j] = -__builtin_inff();
  lanes_f sums = {{}};
  for (i64 j = 0; j < length; j += FUSER_LANES) {{
    const lanes_f e = fuser_lanes_exp_down_f32(fuser_lanes_load_float(x + j) - base);
    sums += e;
    VECTORS;
  }}
  for (int l = 0; l < FUSER_LANES; ++l) sum += sums[l];
  #else
{_PLAIN}
  #endif"""
_PAIRED = {
    "f32": """\
      const float* a = v + n * step + p;
      for (i64 j = 0; j < own; ++j) out[n * WIDTH + j] = a[j];
      for (i64 j = own; j < WIDTH; ++j) out[n * WIDTH + j] = 0;
""",
    "bf16": """\
      const u16* a = v + n * step + p;
      const u16* b = n + 1 < count ? a + step : 0;
      fuser_word* to = (fuser_word*)(out + n * WIDTH);
      if (b && own == WIDTH) {
        for (i64 j = 0; j < WIDTH; ++j) to[j] = (u32)a[j] | (u32)b[j] << 16;
      } else {
        for (i64 j = 0; j < WIDTH; ++j) to[j] = j < own ? (u32)a[j] | (b ? (u32)b[j] << 16 : 0) : 0;
      }
""",
}
_SCALED = """\
  #pragma omp simd reduction(max : high)
  for (i64 j = 0; j < count; ++j) {
    const float y = x[j] * scale MORE;
    x[j] = y;
    high = high > y ? high : y;
  }
"""


def routine(dtype: torch.dtype, causal: bool, mask: torch.dtype | None, machine: Machine) -> Routine:
    name, shape = DTYPES[dtype], dots.wide_shape(machine)
    seen = "(ROW + 1 < n1 ? ROW + 1 : n1) - n0" if causal else "n1 - n0"
    entry = f"attention_{name}{'_causal' if causal else ''}{'' if mask is None else '_masked'}"
    of_mask = "const MASK* mask = (const MASK*)ptrs[5] + batch * s[23] + head * s[24];" if mask is not None else ""
    words: dict[str, object] = {
        "HELPER": packed_cpp.panel(name, shape) + transposition(4, machine, shape.width) + _HELPERS,
        "ENTRY": entry, "OF_MASK": of_mask,
        "MASK_OF_ROW": "mask + (m + r) * s[25] + n0 * s[26], s[26]" if mask is not None else "0, 0",
        "LAST_SEEN": "m1 < keys ? m1 : keys" if causal else "keys",
        "FIRST_ROW": "(n0 > m0 ? m0 + (n0 - m0) / HIGH * HIGH : m0)" if causal else "m0",
        "SEEN(last)": seen.replace("ROW", "last"), "SEEN(m + r)": seen.replace("ROW", "m + r"),
        "EXPONENTIALS": _IN_LANES if machine.lanes else _PLAIN,
        "VECTORS": packed_cpp.store_lanes(dtype, "weights + j", "e"),
        "STORED": cpp_store(dtype, "result[j] * by"), "ROUNDED": cpp_store(dtype, "e"),
        "MASKED": _masked(mask), "MASK": "float" if mask is None else _MASKS[mask], "PAIRED": _PAIRED[name],
        "WORD": "float" if name == "f32" else "fuser_word", "NAME": name, "TYPE": ELEMENTS[name],
        "WIDTH": shape.width, "HIGH": shape.rows, "ROWS": ROWS, "KEYS": KEYS, "PAIR": PAIRS[name],
        "EDGE": edge_of(4, machine),
    }  # fmt: skip
    text = dots.words({name}, machine) + filled(_ENTRY, words)
    return Routine(text, _program(dtype, mask, shape.width, shape.rows, entry), machine)


_MASKS = {torch.float32: "float", torch.bfloat16: "u16"}


def _masked(mask: torch.dtype | None) -> str:
    """The loop that scales and masks scores. The mask is contiguous along the keys, or has one number for each row."""
    if mask is None:
        return _SCALED.replace("MORE", "")
    along, single = (f"+ {cpp_load(mask, f'mask[{at}]')}" for at in ("j", "0"))
    return f"  if (step) {{\n{_SCALED.replace('MORE', along)}  }} else {{\n{_SCALED.replace('MORE', single)}  }}"


def _program(dtype: torch.dtype, mask: torch.dtype | None, width: int, high: int, entry: str) -> LaunchProgram:
    """The program: arguments (scale, q, k, v, out, logs, mask), of which out and logs are written."""
    at, code = slots_of(f"s{n}" for n in range(27))

    def tensor(dtype: torch.dtype, sizes: tuple[int, ...], known: tuple[int, ...], strides: tuple[Any, ...]) -> Any:
        own = tuple(Check(code(at[n])) if n in known else Bind(n) for n in sizes)
        return InputPattern("tensor", dtype, "cpu", own, strides)

    one = Check(code(1))
    batch, heads, rows, _, groups, keys, values = 0, 1, 2, 3, 8, 9, 13
    inputs = [
        tensor(dtype, (batch, heads, rows, 3), (), (Bind(4), Bind(5), Bind(6), one)),
        tensor(dtype, (batch, groups, keys, 3), (batch, 3), (Bind(10), Bind(11), Bind(12), one)),
        tensor(dtype, (batch, groups, keys, values), (batch, groups, keys), (Bind(14), Bind(15), Bind(16), one)),
        tensor(dtype, (batch, heads, rows, values), (batch, heads, rows, values), (Bind(17), Bind(18), Bind(19), one)),
        tensor(torch.float32, (batch, heads, rows), (batch, heads, rows), (Bind(20), Bind(21), Bind(22))),
    ]
    if mask is not None:
        strides = (Bind(23), Bind(24), Bind(25), Bind(26))
        inputs.append(tensor(mask, (batch, heads, rows, keys), (batch, heads, rows, keys), strides))
    units = at[batch] * at[heads] * floordiv(at[rows] + (ROWS - 1), expr(ROWS))
    work = at[batch] * at[heads] * at[rows] * at[keys] * at[3]
    wide = floordiv(at[values] + (width - 1), expr(width)) * width
    scratch = (at[3] + wide) * (KEYS * dtype.itemsize) + wide * (4 * ROWS) + (4 + dtype.itemsize) * high * KEYS
    step = Step(entry, code(units), code(work), code(scratch))
    number = InputPattern("float", slot=0)
    outputs = (("input", 4), ("input", 5))
    return LaunchProgram((number, *inputs), 27, 1, (), (), (step,), outputs, False)


__all__ = ["KEYS", "ROWS", "routine"]
