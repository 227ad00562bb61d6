"""The C++ of products with packed weights, and the program that launches it; `packed.py` describes the algorithm."""

from __future__ import annotations

from textwrap import indent

import torch

from fuser.cpu.dots import BLOCKS, DTYPES, ELEMENTS, PAIRS, Shape, ceiling, panel
from fuser.cpu.epilogues_cpp import computed, loaded, stored, whole
from fuser.cpu.packed import EPILOGUES, Activation
from fuser.cpu.signatures import Routine, Signature
from fuser.cpu.text import filled
from fuser.ir.sizes import expr
from fuser.machines import Machine

MOST_ROWS, PANELS = 128, 4  # most rows and panels of a unit
PART_BYTES = 2048  # bytes of a row that one pass over a unit takes

_BODY = f"""\
  const i64 panels = (columns + WIDTH - 1) / WIDTH, {BLOCKS};
  const i64 parts = (inner + PART - 1) / PART, part = ((inner + parts - 1) / parts + PAIR - 1) / PAIR * PAIR;
""" + """\
  for (i64 unit = begin; unit < end; ++unit) {
    const i64 p0 = unit / blocks * PANELS, p1 = p0 + PANELS < panels ? p0 + PANELS : panels;
    const i64 m0 = unit % blocks * each, m1 = m0 + each < rows ? m0 + each : rows;
    for (i64 k0 = 0; k0 < inner; k0 += part) {
      const i64 k1 = k0 + part < inner ? k0 + part : inner;
      for (i64 p = p0; p < p1; ++p) {
        const i64 left = columns - p * WIDTH;
        for (i64 m = m0; m < m1; m += HIGH) {
          const TYPE* at[HIGH];
          for (int r = 0; r < HIGH; ++r) at[r] = x + (m + r < m1 ? m + r : m1 - 1) * step + k0;
          float* sums = (float*)scratch + ((p - p0) * each + m - m0) * WIDTH;
          fuser_panel(at, w + (p * inner + k0) * WIDTH, (k1 - k0) / PAIR, sums, WIDTH, k0 == 0);
          if (k1 < inner) continue;
          for (i64 r = 0; r < HIGH && m + r < m1; ++r) {
            const float* from = sums + r * WIDTH;
            TYPE* to = out + (m + r) * columns + p * WIDTH;
            if (left < WIDTH) {
              for (int j = 0; j < left; ++j) STORED
              continue;
            }
ALL
          }
        }
      }
    }
  }
}
"""


def routine(
    dtype: torch.dtype, shape: Shape, bias: bool, epilogue: Activation | None, machine: Machine
) -> Routine:  # fmt: skip
    """The product of rows with a packed weight. Arguments: columns, x, the panels, bias. Result: (rows, columns)."""
    name, width = DTYPES[dtype], shape.width
    call = Signature()
    call.integers("columns")
    call.tensor("x", dtype, ("rows", "inner"), ("step", 1))
    columns, rows, inner = call["columns"], call["rows"], call["inner"]
    panels = ceiling(columns, width)
    call.tensor("w", dtype, (panels, inner * width))
    if bias:
        call.tensor("bias", dtype, (columns,))
    call.result("out", dtype, (rows, columns))

    steps = *(("plus",) if bias else ()), *(() if epilogue is None else (EPILOGUES[epilogue],))
    of_bias = (loaded(dtype, "bias", "p * WIDTH + j"),)
    functions, value = computed(steps, loaded(torch.float32, "from", "j"), of_bias, (), machine)
    made = stored(dtype, value, "to")
    entry = "_".join(["product_packed", name, *(["bias"] if bias else []), *filter(None, epilogue or ())])
    words: dict[str, object] = {
        "ALL": indent(whole(made, "WIDTH", machine), " " * 12), "STORED": made.plain, "MOST": MOST_ROWS,
        "PANELS": PANELS, "PART": PART_BYTES // dtype.itemsize, "PAIR": PAIRS[name], "TYPE": ELEMENTS[name],
        "WIDTH": width, "HIGH": shape.rows,
    }  # fmt: skip
    text = panel(name, shape, machine) + functions + call.opening(entry) + filled(_BODY, words)
    units = ceiling(rows, MOST_ROWS) * ceiling(panels, PANELS)
    program = call.program(entry, units, rows * columns * inner, expr(4 * MOST_ROWS * PANELS * width))
    return Routine(text, program, machine)


__all__ = ["MOST_ROWS", "PART_BYTES", "routine"]
