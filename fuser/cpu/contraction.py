"""Contractions of few rows: each element of the weight is read once, and all rows take it from a register.

A unit is a block of neighbouring columns. A helper adds up their products with all rows; the results go through a tile
to the epilogue, a row at a time. Partial sums are float32 in register lanes, so a sum has no more sequential terms
than the weight's row fills registers.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

import torch

from fuser.cpu import dots
from fuser.cpu.dots import DTYPES, ELEMENTS
from fuser.cpu.facts import Facts
from fuser.cpu.frame import closed, each_unit, opened, units_of
from fuser.cpu.records import Function
from fuser.cpu.reduction import results
from fuser.cpu.text import filled
from fuser.cpu.vir import nodes as ir
from fuser.ir.sizes import LOOP, ONE, ZERO, Expr, Sym, expr, substitute, symbol
from fuser.machines import Machine
from fuser.scheduler.kernel_plan import KernelPlan

COLUMNS = 16  # of a unit
MOST_ROWS = 8  # of `x`: a product of more rows is no contraction
IN_ORDER_ROWS, IN_ORDER_BYTES = 4, 1 << 14  # of `x`, up to which the weight is read in memory order, without prefetches
WHOLE_BYTES, PART_BYTES = 24 << 10, 8 << 10  # of rows of `x` that the first-level cache keeps; of parts of longer rows
_HELPERS = {f"fuser_dot_{dtype}_{rows}": (dtype, rows) for dtype in ELEMENTS for rows in range(1, MOST_ROWS + 1)}


def whole(facts: Facts) -> Function:
    """The single function of a nest whose reductions are contractions of few rows."""
    found, facts = facts.plan.contraction, replace(facts, lanes=COLUMNS)
    assert found is not None
    row_axis = found.row.name if found.row is not None else ""  # the variable of the rows; "" if there is only one
    count = _rows_of(facts.plan)
    rows = opened(facts)
    out = rows.out
    digits, units = units_of(facts, [a for a in facts.kept_axes if a.sym in found.columns and a is not facts.vector])
    start: dict[Sym, Expr] = {found.inner: ZERO, facts.along.sym: expr(0)}
    if found.row is not None:
        start[found.row] = ZERO
    rows.constants()
    with each_unit(rows, digits):
        for r, (x, w) in zip(facts.plan.reductions, found.operands, strict=True):
            out.scratch("float", f"tile{r.number}", count * COLUMNS)
            step = _step(x.address, start, found.row)
            at_w = substitute(w.address, {**start, facts.along.sym: symbol("v0", LOOP)})
            across = _step(w.address, start, facts.along.sym)
            out.do(
                f"fuser_dot_{DTYPES[w.dtype]}_{count}",
                rows.address(x.buffer, substitute(x.address, start)), rows.index(step, "floor"),
                rows.address(w.buffer, at_w), rows.index(across, "floor"),
                f"n_{found.inner.name}", "count", f"tile{r.number}",
            )  # fmt: skip
        each = ir.For(row_axis, ir.Number(0), ir.Name(f"n_{row_axis}"))
        row = ir.Name(row_axis) * COLUMNS if row_axis else ir.Number(0)
        with out.block(each if row_axis else ir.Plain()):
            results(rows, 0, lambda r: (torch.float32, ir.Name(f"tile{r.number}")[row + "l"]))
            for phase in range(len(facts.passes)):
                rows.after(phase)
    return closed(rows, units)


def _step(address: Expr, start: dict[Sym, Expr], along: Sym | None) -> Expr:
    """The stride of an address along an axis; 0 if `along` is None."""
    return ZERO if along is None else substitute(address, {**start, along: ONE}) - substitute(address, start)


def fits(plan: KernelPlan) -> bool:
    """Whether a plan is a contraction for this nest: few rows, and operands of one dtype."""
    found = plan.contraction
    if found is None or not 1 <= _rows_of(plan) <= MOST_ROWS:
        return False
    return all(x.dtype is w.dtype and w.dtype in DTYPES for x, w in found.operands)


def _rows_of(plan: KernelPlan) -> int:
    """The number of rows; 0 if it is not known at compile time."""
    found = plan.contraction
    if found is None or found.row is None:
        return 1
    return next(a.size.as_int() or 0 for a in plan.axes if a.sym == found.row)


# -- helpers ----------------------------------------------------------------------------------------------------------
# Sums over the lanes of as many registers as one has lanes, in a fixed order: each round adds the upper half of the
# lanes to the lower half, for two registers at once.
_FOLD = """\
FUSER_FN fuser_dot_f fuser_dot_fold(const fuser_dot_f* s) {
  fuser_dot_f t[LANES];
ROUNDS
  return t[0];
}
"""

_FUNCTION = """\
FUSER_CONTRACT static void fuser_dot_NAME_ROWS(
    const TYPE* x, i64 step, const TYPE* w, i64 across, i64 inner, i64 count, float* out) {
  FUSER_CONTRACTS
  fuser_dot_f sums[ROWS * COLUMNS];
  for (int n = 0; n < ROWS * COLUMNS; ++n) sums[n] = fuser_dot_f{};
BLOCKS
  for (int n = 0; n < ROWS * COLUMNS; n += LANES) *(fuser_dot_f*)(out + n) = fuser_dot_fold(sums + n);
  for (i64 k = inner / WIDTH * WIDTH; k < inner; ++k) for (int m = 0; m < ROWS; ++m) for (i64 c = 0; c < count; ++c)
    out[m * COLUMNS + c] += fuser_dot_of(w[c * across + k]) * fuser_dot_of(x[m * step + k]);
}
"""


def helpers(uses: Set[str], machine: Machine) -> str:
    """The functions of `_HELPERS` that are used."""
    calls = sorted(call for name, call in _HELPERS.items() if name in uses)
    if not calls:
        return ""
    lanes = machine.vector_bytes // 4
    head = dots.words({dtype for dtype, _ in calls}, machine)
    head += filled(_FOLD, {"ROUNDS": _rounds(lanes), "LANES": lanes})
    return head + "".join(_function(dtype, rows, machine) for dtype, rows in calls)


def _rounds(lanes: int) -> str:
    """Statements that leave in each lane of `t[0]` the sum over one register of `s`."""
    out, source, length = [], "s", lanes
    while length > 1:
        half = length // 2
        low = [v * lanes + g + l for v in (0, 1) for g in range(0, lanes, length) for l in range(half)]
        picks = (", ".join(str(n + more) for n in low) for more in (0, half))
        first, second = (f"FUSER_DOT_PICK({source}[2 * i], {source}[2 * i + 1], {p})" for p in picks)
        out.append(f"  for (int i = 0; i < {half}; ++i) t[i] = {first} + {second};")
        source, length = "t", half
    return "\n".join(out)


def _together(rows: int, machine: Machine) -> int:
    """Columns taken at once, so that their sums, one register of each column and one of a row stay in registers."""
    return next((n for n in (8, 4, 2) if n * rows + n < machine.registers - 2), 1)


def _function(dtype: str, rows: int, machine: Machine) -> str:
    """C++ of one helper: `rows` rows of `x`, `step` elements apart, times `count` rows of `w`, into `out`.

    Several rows of `w` are taken at once, in parts short enough that the rows of `x` stay in the first-level cache.
    The next unit's rows are prefetched into the second, since a core that computes has few loads in flight. Machines
    without such prefetches read few rows of `w` in memory order.
    """
    lanes = machine.vector_bytes // 4
    width = lanes if dtype == "f32" else 2 * lanes
    blocks = "\n".join(_parts(dtype, rows, width, machine))
    unroll = min(4, machine.registers // (2 * rows))
    if rows <= IN_ORDER_ROWS and unroll > 1 and not machine.prefetches:
        in_order = "\n".join(_block(dtype, rows, width, 1, unroll, ahead=False))
        blocks = f"  if (sizeof(*x) * inner * ROWS <= {IN_ORDER_BYTES}) {{\n{in_order}\n  }} else {{\n{blocks}\n  }}"
    words = {"BLOCKS": blocks, "NAME": dtype, "TYPE": ELEMENTS[dtype], "ROWS": rows, "COLUMNS": COLUMNS}
    words |= {"LANES": lanes, "WIDTH": width}
    return filled(_FUNCTION, words)


def _parts(dtype: str, rows: int, width: int, machine: Machine) -> list[str]:
    """The loop over parts of the rows; each part has a loop over all columns."""
    size = 4 if dtype == "f32" else 2
    part = max(width, PART_BYTES // (rows * size) // width * width)
    return [
        f"  const i64 part = {rows * size} * inner <= {WHOLE_BYTES} ? inner : {part};",
        "  for (i64 first = 0; first < inner; first += part) {",
        "  const i64 last = first + part < inner ? first + part : inner;",
        *_block(dtype, rows, width, _together(rows, machine), 1, machine.prefetches, "first", "last"),
        "  }",
    ]


def _block(
    dtype: str, rows: int, width: int, columns: int, unroll: int, ahead: bool, first: str = "0", last: str = "inner"
) -> list[str]:
    """The loop over columns, `columns` and `unroll` registers of each at a time; results are added to `sums`."""
    element, vector = ELEMENTS[dtype], f"fuser_dot_{'f' if dtype == 'f32' else 'u'}"
    turns, cells = range(unroll), [(i, m) for m in range(rows) for i in range(columns)]
    out = [
        f"  for (i64 c = 0; c < count; c += {columns}) {{",
        *(f"    const {element}* w{i} = w + (c + {i} < count ? c + {i} : count - 1) * across;" for i in range(columns)),
        *(f"    fuser_dot_f s{i}_{m}_{u} = {f'sums[{m} * COLUMNS + c + {i}]' if u == 0 else '{}'};"
          for i, m in cells for u in turns),
        f"    i64 k = {first};",
    ]  # fmt: skip
    for taken in sorted({unroll, 1}, reverse=True):
        out.append(f"    for (; k + {width * taken} <= {last}; k += {width * taken}) {{")
        out += [f"      __builtin_prefetch(w{i} + COLUMNS * across + k, 0, 2);" for i in range(columns) if ahead]
        for u in range(taken):
            at = f"k + {u * width}"
            out += [f"      const {vector} a{i}_{u} = *(const {vector}*)(w{i} + {at});" for i in range(columns)]
            for m in range(rows):
                adds = " ".join(dots.add(dtype, f"s{i}_{m}_{u}", f"a{i}_{u}", "b") for i in range(columns))
                keep = "FUSER_DOT_KEEP(b); " if columns > 1 else ""
                out.append(f"      {{ {vector} b = *(const {vector}*)(x + {m} * step + {at}); {keep}{adds} }}")
        out.append("    }")
    out += [f"    sums[{m} * COLUMNS + c + {i}] = {' + '.join(f's{i}_{m}_{u}' for u in turns)};" for i, m in cells]
    return [*out, "  }"]


__all__ = ["fits", "helpers", "whole"]
