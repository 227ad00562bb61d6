"""The C++ of convolutions by packed weights, and the program that launches it; see `convolve.py`."""

from __future__ import annotations

import torch

from fuser.cpu import dots, packed_cpp
from fuser.cpu.dots import DTYPES, ELEMENTS, PAIRS, Shape
from fuser.cpu.epilogues import PER_CHANNEL, PER_ELEMENT, Epilogue, folded
from fuser.cpu.routines import Routine, contiguous, slots_of
from fuser.cpu.text import filled
from fuser.ir.loop_body import Value, ops
from fuser.ir.sizes import expr, floordiv
from fuser.kernel_spec import Bind, BufferPattern, Check, InputPattern, LaunchProgram, Step
from fuser.machines import Machine
from fuser.ops import cpp_load, cpp_store

MOST_ROWS = 48  # most output points of a unit: a multiple of the rows of each block shape
PART_BYTES = 2048  # bytes of a point's channels that one pass over a unit takes
_COLUMNS = 64  # columns of a unit, unless a panel is wider

_ENTRY = """\
  const i64 columns = s[0], down = s[7], along = s[8], run = s[9], rows = s[10] * down * along;
  const i64 high = s[12], wide = s[13], by_line = s[15], by_point = s[16];
  // In runs, a line of the kernel is one place.
  const i64 across = run ? 1 : s[2], places = s[1] * across, channels = run ? run : s[11], inner = places * channels;
  const i64 panels = (columns + WIDTH - 1) / WIDTH, spans = (panels + PANELS - 1) / PANELS;
  const i64 blocks = (rows + MOST_ROWS - 1) / MOST_ROWS, each = ((rows + blocks - 1) / blocks + HIGH - 1) / HIGH * HIGH;
  // A part is some places, or some channels of one.
  const i64 fit = channels < PART ? PART / channels : 1, sets = (places + fit - 1) / fit;
  const i64 together = (places + sets - 1) / sets, cuts = (channels + PART - 1) / PART;
  const i64 part = ((channels + cuts - 1) / cuts + PAIR - 1) / PAIR * PAIR;
  float* sums = (float*)scratch;
  const TYPE** table = (const TYPE**)(sums + MOST_ROWS * PANELS * WIDTH);
  TYPE* zeros = (TYPE*)(table + MOST_ROWS * places);
  TYPE* edges = zeros + channels;
  for (i64 c = 0; c < channels; ++c) zeros[c] = 0;
  for (i64 unit = begin; unit < end; ++unit) {
    const i64 p0 = unit % spans * PANELS, p1 = p0 + PANELS < panels ? p0 + PANELS : panels;
    const i64 m0 = unit / spans * each, m1 = m0 + each < rows ? m0 + each : rows;
    if (unit == begin || !p0)
      for (i64 m = m0; m < m1; m += HIGH)
        for (i64 r = 0; r < HIGH; ++r) {
          const i64 point = m + r < m1 ? m + r : m1 - 1, line = point / along;
          const i64 top = line % down * s[3] - s[5], left = (point - line * along) * s[4] - s[6];
          const TYPE* image = x + line / down * s[14];
          const TYPE** to = table + (m - m0) * places + r;
          const bool whole = run && left >= 0 && left + s[2] <= wide && by_point == s[11];
          for (i64 y = top; y < top + s[1]; ++y) {
            const bool inside = y >= 0 && y < high;
            if (!run || whole || !inside) {
              for (i64 z = left; z < left + across; ++z, to += HIGH)
                *to = inside && (whole || z >= 0 && z < wide) ? image + y * by_line + z * by_point : zeros;
              continue;
            }
            TYPE* edge = edges + ((m - m0 + r) * s[1] + y - top) * run;
            *to = edge, to += HIGH;
            for (i64 z = left; z < left + s[2]; ++z)
              for (i64 c = 0; c < s[11]; ++c)
                *edge++ = z >= 0 && z < wide ? image[y * by_line + z * by_point + c] : (TYPE)0;
          }
        }
    for (i64 t0 = 0; t0 < places; t0 += together) {
      const i64 own = t0 + together < places ? together : places - t0;
      for (i64 c0 = 0; c0 < channels; c0 += part) {
        const i64 count = c0 + part < channels ? part : channels - c0;
        const bool first = !t0 && !c0, last = t0 + own == places && c0 + count == channels;
        for (i64 p = p0; p < p1; ++p) {
          const TYPE* panel = w + (p * inner + t0 * channels + c0) * WIDTH;
          const TYPE* next = p + 1 < p1 ? panel + inner * WIDTH : panel + ((p0 - p) * inner + own * count) * WIDTH;
          const int own_columns = columns - p * WIDTH < WIDTH ? (int)(columns - p * WIDTH) : WIDTH;
          for (i64 m = m0; m < m1; m += HIGH) {
            float* at = sums + ((p - p0) * each + m - m0) * WIDTH;
            ASK
            // While the points of a unit take one part of a panel, they ask for the next one.
            const char* ahead = (const char*)next + (m - m0) * own * count * (i64)sizeof(TYPE) * WIDTH / each;
            fuser_panel_NAME(table + (m - m0) * places + t0 * HIGH, panel, count / PAIR, at, WIDTH, first,
                             own, c0, ahead, 2 * PAIR * (i64)sizeof(TYPE) * WIDTH * HIGH / each);
            if (!last) continue;
            for (i64 r = 0; r < HIGH && m + r < m1; ++r) {
              const float* from = at + r * WIDTH;
              const i64 begins = (m + r) * columns + p * WIDTH;
              TYPE* to = out + begins;
              int j = 0;
WHOLE
            }
          }
        }
      }
    }
  }
}
"""
_ASK = """\
if (last)
              for (i64 r = 0; r < HIGH && m + r < m1; ++r)
                for (i64 j = 0; j < own_columns; j += LINE) {
                  const i64 place = (m + r) * columns + p * WIDTH + j;
                  ASKED
                }"""
_PLAIN = """\
              #pragma omp simd
              for (int j = 0; j < own_columns; ++j) to[j] = STORED;"""
_IN_LANES = """\
              #if FUSER_LANES
              for (; j + FUSER_LANES <= own_columns; j += FUSER_LANES) VECTORS;
              #endif
              for (; j < own_columns; ++j) to[j] = STORED;"""


def _computed(epilogue: Epilogue, v: Value, *operands: Value) -> Value:
    """The value of an epilogue for `v`; `operands` are those of its steps, in order."""
    rest = iter(operands)
    made: Value = folded(epilogue, v, rest, rest, ops.mul, ops.add, packed_cpp.lowered)
    return made


def routine(dtype: torch.dtype, shape: Shape, epilogue: Epilogue, machine: Machine) -> Routine:
    name, width = DTYPES[dtype], shape.width
    factors, others = _operands(epilogue)
    given = ["const float* factors = (const float*)ptrs[2];"] if factors else []
    first = 2 + len(given)
    given += [f"const TYPE* other{n} = (const TYPE*)ptrs[{first + n}];" for n in range(others)]
    plain, lanes, helper = ["from[j]"], ["fuser_lanes_load_float(from + j)"], ""
    row = other = 0
    for step in epilogue:
        if step in PER_CHANNEL:
            at, row, kind = f"factors[{row} * columns + p * WIDTH + j]", row + 1, torch.float32
        elif step == PER_ELEMENT:
            at, other, kind = f"other{other}[begins + j]", other + 1, dtype
        else:
            continue
        plain.append(cpp_load(kind, at))
        lanes.append(f"fuser_lanes_load_{packed_cpp.LANES[kind]}(&{at})")
    if epilogue:
        helper = packed_cpp.function_of(lambda *v: _computed(epilogue, *v), len(plain), machine)
        plain, lanes = [f"fuser_epilogue({', '.join(plain)})"], [f"fuser_lanes_epilogue({', '.join(lanes)})"]
    asked = [f"__builtin_prefetch({t} + place);" for t in (*(f"other{n}" for n in range(others)), "out")]
    entry = "_".join(["convolution_packed", name, *epilogue])
    words: dict[str, object] = {
        "HELPER": packed_cpp.panel(name, shape, places=True) + helper, "ENTRY": entry, "GIVEN": "\n  ".join(given),
        "WHOLE": _IN_LANES if machine.lanes else _PLAIN, "ASK": _ASK if machine.prefetches else "",
        "ASKED": " ".join(asked), "STORED": cpp_store(dtype, plain[0]),
        "VECTORS": packed_cpp.store_lanes(dtype, "to + j", lanes[0]), "LAST": first + others,
        "NAME": name, "TYPE": ELEMENTS[name], "WIDTH": width, "HIGH": shape.rows, "MOST_ROWS": MOST_ROWS,
        "PANELS": _panels(width), "PART": PART_BYTES // dtype.itemsize, "PAIR": PAIRS[name],
        "LINE": machine.line_bytes // dtype.itemsize,
    }  # fmt: skip
    text = dots.words({name}, machine) + filled(packed_cpp.OPENING + _ENTRY, words)
    return Routine(text, _program(dtype, factors, others, width, entry), machine)


def _panels(width: int) -> int:
    """The number of panels of a unit."""
    return max(1, _COLUMNS // width)


def _operands(epilogue: Epilogue) -> tuple[int, int]:
    """The number of rows of factors, and of other tensors, that an epilogue takes."""
    return sum(step in PER_CHANNEL for step in epilogue), sum(step == PER_ELEMENT for step in epilogue)


_NAMES = (
    "columns", "kernel_high", "kernel_wide", "step_down", "step_along", "pad_down", "pad_along", "down", "along", "run",
    "images", "channels", "high", "wide", "by_image", "by_line", "by_point",
)  # fmt: skip


def _program(dtype: torch.dtype, factors: int, others: int, width: int, entry: str) -> LaunchProgram:
    """Arguments (ten numbers, x, panels, factors, others) to a new (images, columns, down, along) in channels-last."""
    names, code = slots_of(_NAMES)
    columns, kernel_high, kernel_wide, _, _, _, _, down, along, run, images, channels, *_ = names
    numbers = [InputPattern("int", slot=n) for n in range(10)]
    panels, inner = floordiv(columns + (width - 1), expr(width)), kernel_high * kernel_wide * channels
    sizes = images, columns, down, along
    strides = down * along * columns, expr(1), along * columns, columns
    of_x = tuple(map(Bind, range(10, 14))), (Bind(14), Check(code(1)), Bind(15), Bind(16))
    tensors = [InputPattern("tensor", dtype, "cpu", *of_x), contiguous(dtype, code, panels, inner * width)]
    if factors:
        tensors.append(contiguous(torch.float32, code, factors, columns))
    like = tuple(Check(code(e)) for e in sizes), tuple(Check(code(e)) for e in strides)
    tensors += [InputPattern("tensor", dtype, "cpu", *like) for _ in range(others)]
    rows = images * down * along
    most = _panels(width)
    units = floordiv(rows + (MOST_ROWS - 1), expr(MOST_ROWS)) * floordiv(panels + (most - 1), expr(most))
    edges = MOST_ROWS * kernel_high * run
    table = 8 * MOST_ROWS * kernel_high * kernel_wide + dtype.itemsize * (channels + run + edges)
    scratch = 4 * MOST_ROWS * most * width + table
    step = Step(entry, code(units), code(rows * columns * inner), code(scratch))
    out = BufferPattern(dtype, tuple(map(code, sizes)), tuple(map(code, strides)), True)
    return LaunchProgram((*numbers, *tensors), len(names), 0, (), (out,), (step,), (("buffer", 0),), True)


__all__ = ["MOST_ROWS", "PART_BYTES", "routine"]
