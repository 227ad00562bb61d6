"""The C++ of convolutions by packed weights, and the program that launches it; see `convolve.py`."""

from __future__ import annotations

from itertools import count
from textwrap import indent

import torch

from fuser.cpu.dots import BLOCKS, DTYPES, ELEMENTS, PAIRS, Shape, ceiling, panel
from fuser.cpu.epilogues import PER_CHANNEL, PER_ELEMENT, Epilogue
from fuser.cpu.epilogues_cpp import computed, loaded, stored, with_tail
from fuser.cpu.signatures import Routine, Signature
from fuser.cpu.text import filled
from fuser.machines import Machine

MOST_ROWS = 48  # most output points of a unit: a multiple of the rows of each block shape
PART_BYTES = 2048  # bytes of a point's channels that one pass over a unit takes
_COLUMNS = 64  # columns of a unit, unless a panel is wider

_BODY = f"""\
  const i64 rows = images * down * along;
  // In runs, a line of the kernel is one place.
  const i64 across = run ? 1 : kernel_wide, places = kernel_high * across, channels = run ? run : deep;
  const i64 inner = places * channels;
  const i64 panels = (columns + WIDTH - 1) / WIDTH, spans = (panels + PANELS - 1) / PANELS;
  const i64 {BLOCKS};
""" + """\
  // A part is some places, or some channels of one.
  const i64 fit = channels < PART ? PART / channels : 1, sets = (places + fit - 1) / fit;
  const i64 together = (places + sets - 1) / sets, cuts = (channels + PART - 1) / PART;
  const i64 part = ((channels + cuts - 1) / cuts + PAIR - 1) / PAIR * PAIR;
  float* sums = (float*)scratch;
  const TYPE** table = (const TYPE**)(sums + MOST * PANELS * WIDTH);
  TYPE* zeros = (TYPE*)(table + MOST * places);
  TYPE* edges = zeros + channels;
  for (i64 c = 0; c < channels; ++c) zeros[c] = 0;
  for (i64 unit = begin; unit < end; ++unit) {
    const i64 p0 = unit % spans * PANELS, p1 = p0 + PANELS < panels ? p0 + PANELS : panels;
    const i64 m0 = unit / spans * each, m1 = m0 + each < rows ? m0 + each : rows;
    if (unit == begin || !p0)
      for (i64 m = m0; m < m1; m += HIGH)
        for (i64 r = 0; r < HIGH; ++r) {
          const i64 point = m + r < m1 ? m + r : m1 - 1, line = point / along;
          const i64 top = line % down * step_down - pad_down, left = (point - line * along) * step_along - pad_along;
          const TYPE* image = x + line / down * by_image;
          const TYPE** to = table + (m - m0) * places + r;
          const bool whole = run && left >= 0 && left + kernel_wide <= wide && by_point == deep;
          for (i64 y = top; y < top + kernel_high; ++y) {
            const bool inside = y >= 0 && y < high;
            if (!run || whole || !inside) {
              for (i64 z = left; z < left + across; ++z, to += HIGH)
                *to = inside && (whole || z >= 0 && z < wide) ? image + y * by_line + z * by_point : zeros;
              continue;
            }
            TYPE* edge = edges + ((m - m0 + r) * kernel_high + y - top) * run;
            *to = edge, to += HIGH;
            for (i64 z = left; z < left + kernel_wide; ++z)
              for (i64 c = 0; c < deep; ++c)
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
            fuser_panel(table + (m - m0) * places + t0 * HIGH, panel, count / PAIR, at, WIDTH, first,
                             own, c0, ahead, 2 * PAIR * (i64)sizeof(TYPE) * WIDTH * HIGH / each);
            if (!last) continue;
            for (i64 r = 0; r < HIGH && m + r < m1; ++r) {
              const float* from = at + r * WIDTH;
              const i64 begins = (m + r) * columns + p * WIDTH;
              TYPE* to = out + begins;
STORED
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


def routine(dtype: torch.dtype, shape: Shape, epilogue: Epilogue, machine: Machine) -> Routine:
    """A convolution by a packed weight. Arguments: ten integers, x, the panels, factors for each "times" and "plus", a
    tensor for each "sum". Result: (images, columns, down, along) in channels-last."""
    name, width = DTYPES[dtype], shape.width
    factors, others = sum(s in PER_CHANNEL for s in epilogue), sum(s == PER_ELEMENT for s in epilogue)
    call = Signature()
    call.integers("columns", "kernel_high", "kernel_wide", "step_down", "step_along", "pad_down", "pad_along",
                  "down", "along", "run")  # fmt: skip
    call.tensor("x", dtype, ("images", "deep", "high", "wide"), ("by_image", 1, "by_line", "by_point"))
    columns, places, deep = call["columns"], call["kernel_high"] * call["kernel_wide"], call["deep"]
    panels, inner = ceiling(columns, width), places * deep
    call.tensor("w", dtype, (panels, inner * width))
    if factors:
        call.tensor("factors", torch.float32, (factors, columns))
    along = call["along"] * columns
    of_result = (call["images"], columns, call["down"], call["along"]), (call["down"] * along, 1, along, columns)
    names = [f"other{n}" for n in range(others)]
    for other in names:
        call.tensor(other, dtype, *of_result)
    call.result("out", dtype, *of_result)

    numbers = (loaded(torch.float32, "factors", f"{n} * columns + p * WIDTH + j") for n in count())
    tensors = (loaded(dtype, other, "begins + j") for other in names)
    functions, value = computed(epilogue, loaded(torch.float32, "from", "j"), numbers, tensors, machine)
    most = max(1, _COLUMNS // width)  # panels of a unit
    entry = "_".join(["convolution_packed", name, *epilogue])
    words: dict[str, object] = {
        "STORED": indent(with_tail(stored(dtype, value, "to"), "own_columns", machine), " " * 14),
        "ASK": _ASK if machine.prefetches else "",
        "ASKED": " ".join(f"__builtin_prefetch({tensor} + place);" for tensor in (*names, "out")),
        "MOST": MOST_ROWS, "PANELS": most, "PART": PART_BYTES // dtype.itemsize, "PAIR": PAIRS[name],
        "TYPE": ELEMENTS[name], "WIDTH": width, "HIGH": shape.rows, "LINE": machine.line_bytes // dtype.itemsize,
    }  # fmt: skip
    text = panel(name, shape, machine, places=True) + functions + call.opening(entry) + filled(_BODY, words)
    rows = call["images"] * call["down"] * call["along"]
    edges = MOST_ROWS * call["kernel_high"] * call["run"]
    table = 8 * MOST_ROWS * places + dtype.itemsize * (deep + call["run"] + edges)
    units = ceiling(rows, MOST_ROWS) * ceiling(panels, most)
    program = call.program(entry, units, rows * columns * inner, 4 * MOST_ROWS * most * width + table)
    return Routine(text, program, machine)


__all__ = ["MOST_ROWS", "PART_BYTES", "routine"]
