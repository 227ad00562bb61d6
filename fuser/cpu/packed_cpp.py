"""The C++ of products with packed weights, and the program that launches it; `packed.py` describes the algorithm."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from fuser.cpu import dots
from fuser.cpu.dots import DTYPES, ELEMENTS, EPILOGUES, PAIRS, Epilogue, Shape
from fuser.cpu.routines import Routine, contiguous, slots_of
from fuser.cpu.text import filled
from fuser.ir.loop_body import Row, Value, ops, recording
from fuser.ir.sizes import expr, floordiv
from fuser.kernel_spec import Bind, BufferPattern, Check, InputPattern, LaunchProgram, Step
from fuser.machines import Machine
from fuser.ops import cpp_cell, cpp_constant, cpp_lanes, cpp_load, cpp_store

MOST_ROWS, PANELS = 128, 4  # most rows and panels of a unit
PART_BYTES = 2048  # bytes of a row that one pass over a unit takes

LANES = {torch.float32: "float", torch.bfloat16: "bfloat16"}  # names of loads and stores of vectors
_PLAIN = """\
            #pragma omp simd
            for (int j = 0; j < WIDTH; ++j) to[j] = STORED;"""
_IN_LANES = f"""\
            #if FUSER_LANES
            for (int j = 0; j < WIDTH; j += FUSER_LANES) VECTORS;
            #else
{_PLAIN}
            #endif"""
_PANEL = """\
typedef u32 fuser_word __attribute__((may_alias, aligned(2)));
FUSER_CONTRACT static __attribute__((noinline)) void fuser_panel_NAME(
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
OPENING = """\
HELPER
extern "C" void ENTRY(
    char* const* ptrs, const i64* s, const double* f, i64 begin, i64 end, char* scratch, i32* status) {
  const TYPE* x = (const TYPE*)ptrs[0];
  const TYPE* w = (const TYPE*)ptrs[1];
  GIVEN
  TYPE* out = (TYPE*)ptrs[LAST];
"""
_ENTRY = """\
  const i64 columns = s[0], rows = s[1], inner = s[2], step = s[3], panels = (columns + WIDTH - 1) / WIDTH;
  const i64 blocks = (rows + MOST_ROWS - 1) / MOST_ROWS, each = ((rows + blocks - 1) / blocks + HIGH - 1) / HIGH * HIGH;
  const i64 parts = (inner + PART - 1) / PART, part = ((inner + parts - 1) / parts + PAIR - 1) / PAIR * PAIR;
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
          fuser_panel_NAME(at, w + (p * inner + k0) * WIDTH, (k1 - k0) / PAIR, sums, WIDTH, k0 == 0);
          if (k1 < inner) continue;
          for (i64 r = 0; r < HIGH && m + r < m1; ++r) {
            const float* from = sums + r * WIDTH;
            TYPE* to = out + (m + r) * columns + p * WIDTH;
            if (left < WIDTH) {
              for (int j = 0; j < left; ++j) to[j] = STORED;
              continue;
            }
WHOLE
          }
        }
      }
    }
  }
}
"""


def lowered(step: str, v: Value) -> Value:
    """The lowering of an activation, applied to a value of a loop body."""
    if step == "relu":
        return ops.relu(v)
    from fuser.lowering import activations  # a process that finds its kernels on disk imports no lowerings

    if step == "relu6":
        return ops.minimum(activations.number(6, v), ops.maximum(activations.number(0, v), v))
    by_name: dict[str, Callable[[Value], Value]] = {
        "hardswish": activations.hardswish, "hardsigmoid": activations.hardsigmoid, "silu": activations.silu,
        "sigmoid": activations.logistic, "tanh": ops.tanh, "gelu": activations.gelu, "gelu_tanh": activations.gelu_tanh,
    }  # fmt: skip
    return by_name[step](v)


def routine(
    dtype: torch.dtype, shape: Shape, bias: bool, epilogue: Epilogue | None, machine: Machine
) -> Routine:  # fmt: skip
    name, width = DTYPES[dtype], shape.width
    value, lanes = "from[j]", "fuser_lanes_load_float(from + j)"
    if bias:
        value = f"{value} + {cpp_load(dtype, 'bias[p * WIDTH + j]')}"
        lanes = f"{lanes} + fuser_lanes_load_{LANES[dtype]}(bias + p * WIDTH + j)"
    helper = ""
    if epilogue is not None:
        value, lanes = f"fuser_epilogue({value})", f"fuser_lanes_epilogue({lanes})"
        helper = function_of(functools.partial(lowered, EPILOGUES[epilogue]), 1, machine)
    entry = "_".join(["product_packed", name, *(["bias"] if bias else []), *filter(None, epilogue or ())])
    words: dict[str, object] = {
        "HELPER": panel(name, shape) + helper, "ENTRY": entry,
        "GIVEN": "const TYPE* bias = (const TYPE*)ptrs[2];" if bias else "",
        "WHOLE": _IN_LANES if machine.lanes else _PLAIN,
        "STORED": cpp_store(dtype, value), "VECTORS": store_lanes(dtype, "to + j", lanes),
        "LAST": 3 if bias else 2, "NAME": name, "TYPE": ELEMENTS[name], "WIDTH": width, "HIGH": shape.rows,
        "MOST_ROWS": MOST_ROWS, "PANELS": PANELS, "PART": PART_BYTES // dtype.itemsize, "PAIR": PAIRS[name],
    }  # fmt: skip
    text = dots.words({name}, machine) + filled(OPENING + _ENTRY, words)
    return Routine(text, _program(dtype, bias, width, entry), machine)


def store_lanes(dtype: torch.dtype, to: str, value: str) -> str:
    """C++ that rounds a vector to `dtype` and stores it."""
    value = f"fuser_lanes_nearest_bfloat16({value})" if dtype is torch.bfloat16 else value
    return f"fuser_lanes_store_{LANES[dtype]}({to}, {value})"


def function_of(compute: Callable[..., Value], operands: int, machine: Machine) -> str:
    """C++ of an epilogue, as a function of floats and, where there are vectors, of vectors."""
    with recording() as recorder:
        result = compute(*(recorder.add_row(Row("scalar", (), torch.float32, f"x{n}")) for n in range(operands)))

    def function(name: str, kind: str, constant: str, cell: Callable[..., str | None]) -> str:
        lines = []
        for n, row in enumerate(recorder.rows[operands:], operands):
            if row.op == "const":
                value: str | None = constant.format(cpp_constant(float(row.attr), row.dtype))
            else:
                value = cell(row.op, row.dtype, *(f"t{a}" for a in row.args))
            lines.append(f"  const {kind} t{n} = {value};\n")
        given = ", ".join(f"{kind} t{n}" for n in range(operands))
        return f"FUSER_FN {kind} {name}({given}) {{\n{''.join(lines)}  return t{result.row};\n}}\n"

    plain = function("fuser_epilogue", "float", "{}", cpp_cell)
    if not machine.lanes:
        return plain
    lanes = function("fuser_lanes_epilogue", "lanes_f", "fuser_lanes_all({})", cpp_lanes)
    return f"{plain}#if FUSER_LANES\n{lanes}#endif\n"


def panel(name: str, shape: Shape, places: bool = False) -> str:
    """C++ that adds the products of some rows with a panel to their sums.

    With `places` the function takes `HIGH` rows for each of several kernel positions, starting at an offset; the
    positions' parts of the panel are adjacent. It prefetches from `ahead` on, `step` bytes for every two turns.
    """
    high, registers, lanes = shape.rows, shape.registers, shape.lanes
    cells = [(m, n) for m in range(high) for n in range(registers)]
    vector = "fuser_dot_f" if name == "f32" else "fuser_dot_u"
    word = "float" if name == "f32" else "fuser_word"
    at = {(m, n): f"*(fuser_dot_f*)(sums + {m} * across + {n * lanes})" for m, n in cells}
    move, offset = registers * lanes * PAIRS[name], " + offset" if places else ""

    def turn(number: int) -> list[str]:
        out = []
        for n in range(registers):
            own, from_w = f"w{n}_{number}", number * move + n * lanes * PAIRS[name]
            out.append(f"      {vector} {own} = *(const {vector}*)(w + {from_w}); FUSER_DOT_KEEP({own});")
        for m in range(high):
            adds = " ".join(dots.add(name, f"s{m}_{n}", f"w{n}_{number}", "b") for n in range(registers))
            out.append(f"      {{ {vector} b = x{m}[k + {number}] - ({vector}){{}}; FUSER_DOT_KEEP(b); {adds} }}")
        return out

    ask = ["      __builtin_prefetch(ahead); ahead += step;"] if places else []
    parts = {
        "OF_PLACES": [", i64 places, i64 offset, const char* ahead, i64 step" if places else ""],
        "EACH_PLACE": ["for (i64 place = 0; place < places; ++place, rows += HIGH)" if places else ""],
        "SUMS": [f"  fuser_dot_f {', '.join(f's{m}_{n} = {{}}' for m, n in cells)};"],
        "ROWS_OF": [f"    const {word}* x{m} = (const {word}*)(rows[{m}]{offset});" for m in range(high)],
        "TWO": [*ask, *turn(0), *turn(1), f"      w += {2 * move};"],
        "ONE": [*turn(0), f"      w += {move};"],
        "ADDED": [f"    s{m}_{n} += {at[m, n]};" for m, n in cells],
        "STORE": [f"  {at[m, n]} = s{m}_{n};" for m, n in cells],
    }
    return filled(_PANEL, {k: "\n".join(v) for k, v in parts.items()})


def _program(dtype: torch.dtype, bias: bool, width: int, entry: str) -> LaunchProgram:
    """The program: arguments (columns, x, packed, bias); it returns a new tensor (rows, columns)."""
    (columns, rows, inner, _), code = slots_of(("columns", "rows", "inner", "step"))
    panels = floordiv(columns + (width - 1), expr(width))
    of_x = InputPattern("tensor", dtype, "cpu", (Bind(1), Bind(2)), (Bind(3), Check(code(1))))
    tensors = [of_x, contiguous(dtype, code, panels, inner * width)]
    if bias:
        tensors.append(contiguous(dtype, code, columns))
    blocks = floordiv(rows + (MOST_ROWS - 1), expr(MOST_ROWS))
    units = blocks * floordiv(panels + (PANELS - 1), expr(PANELS))
    scratch = 4 * MOST_ROWS * PANELS * width
    step = Step(entry, code(units), code(rows * columns * inner), code(scratch))
    out = BufferPattern(dtype, (code(rows), code(columns)), (code(columns), code(1)), True)
    number = InputPattern("int", slot=0)
    return LaunchProgram((number, *tensors), 4, 0, (), (out,), (step,), (("buffer", 0),), True)


__all__ = ["LANES", "MOST_ROWS", "OPENING", "PART_BYTES", "function_of", "lowered", "panel", "routine", "store_lanes"]
