"""The C++ of attention forward in one kernel, and its launch program; `attention.py` describes the algorithm."""

from __future__ import annotations

import torch

from fuser.cpu.dots import BLOCKS, DTYPES, ELEMENTS, PAIRS, Shape, ceiling, panel
from fuser.cpu.epilogues_cpp import Element, either, loaded, stored
from fuser.cpu.signatures import Routine, Signature
from fuser.cpu.text import filled
from fuser.cpu.transposes import edge_of, transposition
from fuser.machines import Machine

ROWS, KEYS = 192, 256  # rows of a unit, keys of a block

_BODY = f"""\
  const i64 {BLOCKS};
  const i64 panels = (values + WIDTH - 1) / WIDTH, wide = panels * WIDTH;
""" + """\
  TYPE* const packed_k = (TYPE*)scratch;
  TYPE* const packed_v = packed_k + KEYS * width;
  float* const results = (float*)(packed_v + KEYS * wide);
  float* const scores = results + MOST * wide;
  TYPE* const weights = (TYPE*)(scores + HIGH * KEYS);
  float highest[MOST], total[MOST];
  for (i64 unit = begin; unit < end; ++unit) {
    const i64 m0 = unit % blocks * each, m1 = m0 + each < rows ? m0 + each : rows;
    const i64 head = unit / blocks % heads, batch = unit / blocks / heads, group = head / (heads / groups);
    const TYPE* own_q = q + batch * q_batch + head * q_head;
    const TYPE* own_k = k + batch * k_batch + group * k_group;
    const TYPE* own_v = v + batch * v_batch + group * v_group;
    TYPE* own_out = out + batch * out_batch + head * out_head;
    float* own_logs = logs + batch * logs_batch + head * logs_head;
    OWN_MASK
    for (i64 m = m0; m < m1; ++m) { highest[m - m0] = -__builtin_inff(); total[m - m0] = 0.0f; }
    const i64 seen = LAST_SEEN;
    for (i64 n0 = 0; n0 < seen; n0 += KEYS) {
      const i64 n1 = n0 + KEYS < seen ? n0 + KEYS : seen;
      fuser_pack_keys(own_k + n0 * k_row, k_row, n1 - n0, width, packed_k);
      fuser_pack_values(own_v + n0 * v_row, v_row, n1 - n0, values, packed_v);
      for (i64 m = FIRST_ROW; m < m1; m += HIGH) {
        const i64 high = m + HIGH < m1 ? HIGH : m1 - m, last = m + high - 1;
        const i64 count = SEEN_BY_LAST, turns = (count + PAIR - 1) / PAIR;
        const TYPE* at[HIGH];
        for (int r = 0; r < HIGH; ++r) at[r] = own_q + (r < high ? m + r : last) * q_row;
        for (i64 n = 0; n < count; n += WIDTH)
          fuser_panel(at, packed_k + n * width, width / PAIR, scores + n, KEYS, true);
        for (i64 r = 0; r < high; ++r) {
          const i64 left = SEEN_BY_ROW, own = left > 0 ? left : 0;
          float* result = results + (m + r - m0) * wide;
          fuser_weigh(scores + r * KEYS, own, turns * PAIR, scale, MASK_OF_ROW, weights + r * KEYS,
                      &highest[m + r - m0], &total[m + r - m0], n0 ? result : 0, wide);
        }
        for (int r = 0; r < HIGH; ++r) at[r] = weights + (r < high ? r : high - 1) * KEYS;
        for (i64 p = 0; p < panels; ++p)
          fuser_panel(at, packed_v + p * KEYS * WIDTH, turns, results + (m - m0) * wide + p * WIDTH, wide, !n0);
      }
    }
    for (i64 m = m0; m < m1; ++m) {
      const float sum = total[m - m0], by = 1.0f / (sum == 0.0f ? 1.0f : sum);
      const float* result = results + (m - m0) * wide;
      TYPE* to = own_out + m * out_row;
      if (sum == 0.0f) {
        for (i64 j = 0; j < values; ++j) to[j] = 0;
      } else {
        #pragma omp simd
        for (i64 j = 0; j < values; ++j) STORED
      }
      own_logs[m * logs_row] = sum == 0.0f ? 0.0f : highest[m - m0] + fuser_log_f32(sum);
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
    PLAIN
  }
  for (i64 j = count; j < filled; ++j) weights[j] = 0;"""
# Whole vectors: scores in the tail are minus infinity, so their weights are 0.
_IN_LANES = """\
  const i64 length = (filled + FUSER_LANES - 1) / FUSER_LANES * FUSER_LANES;
  for (i64 j = count; j < length; ++j) x[j] = -__builtin_inff();
  lanes_f sums = {};
  for (i64 j = 0; j < length; j += FUSER_LANES) {
    const lanes_f e = fuser_lanes_exp_down_f32(fuser_lanes_load_float(x + j) - base);
    sums += e;
    VECTOR
  }
  for (int l = 0; l < FUSER_LANES; ++l) sum += sums[l];"""
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


def routine(
    dtype: torch.dtype, shape: Shape, causal: bool, mask: torch.dtype | None, machine: Machine
) -> Routine:  # fmt: skip
    """Attention forward. Arguments: scale, q, k, v, out, logs, mask, of which out and logs are written."""
    name, call = DTYPES[dtype], Signature()
    call.float("scale")
    call.tensor("q", dtype, ("batches", "heads", "rows", "width"), ("q_batch", "q_head", "q_row", 1))
    call.tensor("k", dtype, ("batches", "groups", "keys", "width"), ("k_batch", "k_group", "k_row", 1))
    call.tensor("v", dtype, ("batches", "groups", "keys", "values"), ("v_batch", "v_group", "v_row", 1))
    of_out = ("out_batch", "out_head", "out_row", 1)
    call.tensor("out", dtype, ("batches", "heads", "rows", "values"), of_out, written=True)
    of_logs = ("logs_batch", "logs_head", "logs_row")
    call.tensor("logs", torch.float32, ("batches", "heads", "rows"), of_logs, written=True)
    if mask is not None:
        of_mask = ("mask_batch", "mask_head", "mask_row", "mask_key")
        call.tensor("mask", mask, ("batches", "heads", "rows", "keys"), of_mask)

    result, one = Element("result[j] * by", ""), Element("e", "e")
    weight = stored(dtype, one, "weights")
    seen = "({0} + 1 < n1 ? {0} + 1 : n1) - n0" if causal else "n1 - n0"
    words: dict[str, object] = {
        "OWN_MASK": "" if mask is None else "const MASK* own_mask = mask + batch * mask_batch + head * mask_head;",
        "MASK_OF_ROW": "0, 0" if mask is None else "own_mask + (m + r) * mask_row + n0 * mask_key, mask_key",
        "LAST_SEEN": "m1 < keys ? m1 : keys" if causal else "keys",
        "FIRST_ROW": "(n0 > m0 ? m0 + (n0 - m0) / HIGH * HIGH : m0)" if causal else "m0",
        "SEEN_BY_LAST": seen.format("last"), "SEEN_BY_ROW": seen.format("m + r"),
        "EXPONENTIALS": either(_IN_LANES, _PLAIN, machine), "VECTOR": weight.lanes, "PLAIN": weight.plain,
        "STORED": stored(dtype, result, "to").plain, "MASKED": _masked(mask),
        "MASK": "float" if mask is None else ELEMENTS[DTYPES[mask]], "PAIRED": _PAIRED[name],
        "WORD": "float" if name == "f32" else "fuser_word", "TYPE": ELEMENTS[name], "WIDTH": shape.width,
        "HIGH": shape.rows, "MOST": ROWS, "KEYS": KEYS, "PAIR": PAIRS[name], "EDGE": edge_of(4, machine),
    }  # fmt: skip
    entry = f"attention_{name}{'_causal' if causal else ''}{'' if mask is None else '_masked'}"
    helpers = panel(name, shape, machine) + transposition(4, machine, shape.width)
    text = helpers + filled(_HELPERS, words) + call.opening(entry) + filled(_BODY, words)
    heads, width = call["batches"] * call["heads"], call["width"]
    wide = ceiling(call["values"], shape.width) * shape.width
    work = heads * call["rows"] * call["keys"] * width
    scratch = (width + wide) * (KEYS * dtype.itemsize) + wide * (4 * ROWS) + (4 + dtype.itemsize) * shape.rows * KEYS
    return Routine(text, call.program(entry, heads * ceiling(call["rows"], ROWS), work, scratch), machine)


def _masked(mask: torch.dtype | None) -> str:
    """The loop that scales and masks scores. The mask is contiguous along the keys, or has one number for each row."""
    if mask is None:
        return filled(_SCALED, {"MORE": ""})
    along, single = (filled(_SCALED, {"MORE": f"+ {loaded(mask, 'mask', at).plain}"}) for at in ("j", "0"))
    return f"  if (step) {{\n{along}  }} else {{\n{single}  }}"


__all__ = ["KEYS", "ROWS", "routine"]
