"""Loop-level ops: the tables `OPS`, `REDUCTIONS` and `SCANS` by name, and the C++ and Triton text of their rows."""

from __future__ import annotations

from typing import TypeVar

import torch

from fuser.errors import Unsupported
from fuser.ops import depthwise, pointwise, pools, products, random, reductions, scans, special
from fuser.ops.cells import (
    CPP_TYPEDEFS,
    CPP_TYPES,
    FLOAT8,
    LOW,
    atom,
    compute_dtype,
    cpp_constant,
    cpp_convert,
    cpp_load,
    cpp_round,
    cpp_store,
    cpp_text,
    wrap_int,
)
from fuser.ops.prelude import PRELUDE, cell_helpers, helpers_in, known_helpers, load, prelude_for
from fuser.ops.table import (
    ALL,
    BOOL,
    FLOATS,
    INTS,
    JOINING,
    LOGIC,
    NO_INDEX,
    SAME,
    TURNING,
    OpRow,
    ReductionRow,
    ScanRow,
)
from fuser.ops.triton_cells import (
    TRITON_POINTERS,
    TRITON_TYPES,
    triton_constant,
    triton_convert,
    triton_load,
    triton_number,
    triton_store,
    triton_text,
)
from fuser.ops.triton_helpers import triton_prelude
from fuser.reasons import because

OPS: dict[str, OpRow] = {row.name: row for row in (*pointwise.ROWS, *special.ROWS, *random.ROWS)}
REDUCTIONS: dict[str, ReductionRow] = {row.name: row for row in reductions.ROWS}
NO_OP = OpRow("", 0, torch.clone, None)  # stands for kinds of row that are no op of the table: no traits
SCANS: dict[str, ScanRow] = {row.name: row for row in scans.ROWS}

_Row = TypeVar("_Row", OpRow, ReductionRow, ScanRow)


def _row(table: dict[str, _Row], name: str, what: str) -> _Row:
    if name not in table:
        raise Unsupported(f"{name} is not {what}")
    return table[name]


def cpp_cell(name: str, dtype: torch.dtype, *args: str) -> str:
    """The C++ expression of op `name` on `args`, of compute dtype `dtype`; Unsupported if there is none.

    Arguments are used more than once and should be names or constants. `prelude_for(helpers_in(source))` gives the
    helpers that the expressions of a source call.
    """
    row = _row(OPS, name, "a loop-level op")
    if len(args) != row.arity:
        raise TypeError(f"{name} takes {row.arity} arguments, not {len(args)}")
    if row.text:
        load(row.text)
    return cpp_text(row, row.cpp, dtype, args)


def cpp_lanes(name: str, dtype: torch.dtype, *args: str) -> str | None:
    """The C++ expression of op `name` on explicit vectors of float32, or of flags for bools; None if there is none.

    Arguments should be names of vectors; a source with such expressions has `#if FUSER_LANES` around them.
    """
    row = OPS.get(name)
    cell = row.lanes(dtype) if row is not None and callable(row.lanes) else None
    return cpp_cell(name, dtype, *args) if cell == SAME else cell.format(*args) if cell is not None else None


def has_lanes(name: str, dtype: torch.dtype) -> bool:
    """Whether op `name` has a cell for explicit vectors (see `cpp_lanes`)."""
    row = OPS.get(name)
    return row is not None and callable(row.lanes) and row.lanes(dtype) is not None


def cpp_near(name: str, dtype: torch.dtype, *args: str) -> str | None:
    """The C++ expression of op `name` for float32 arguments in the interval of its row's `near`; None without one."""
    return _near("fuser", name, dtype, args)


def cpp_lanes_near(name: str, dtype: torch.dtype, *args: str) -> str | None:
    """`cpp_near` on explicit vectors."""
    return _near("fuser_lanes", name, dtype, args)


def _near(family: str, name: str, dtype: torch.dtype, args: tuple[str, ...]) -> str | None:
    near = OPS[name].near
    return f"{family}_{near.helper}({', '.join(args)})" if near is not None and dtype is torch.float32 else None


def cpp_combine(name: str, dtype: torch.dtype, *args: str) -> str:
    """The C++ expression of reduction `name`'s combine cell, for an accumulator of `dtype` (see `ReductionRow`)."""
    row = _row(REDUCTIONS, name, "a reduction")
    return cpp_text(row, row.combine, dtype, args)


def cpp_overtakes(name: str, dtype: torch.dtype, accumulator: str, value: str) -> str:
    """The C++ condition for a value at a higher index to replace the accumulator of index reduction `name`."""
    row = REDUCTIONS[name]
    return cpp_text(row, row.overtakes, dtype, (accumulator, value))


def cpp_step(name: str, dtype: torch.dtype, *args: str) -> str:
    """The C++ expression of scan `name`'s combine cell, for an accumulator of `dtype` (see `ScanRow`)."""
    row = _row(SCANS, name, "a scan")
    return cpp_text(row, row.combine, dtype, args)


def triton_cell(name: str, dtype: torch.dtype, fast: bool, *args: str) -> str:
    """The Triton expression of op `name` on `args`, of compute dtype `dtype`; Unsupported if there is none.

    `fast` selects the hardware's approximations if the table has them. Arguments should be names or constants.
    """
    row = _row(OPS, name, "a loop-level op")
    is_fast = fast and dtype is torch.float32 and bool(row.fast)
    return triton_text(row, row.fast if is_fast else row.triton, dtype, args)


def triton_folder(name: str) -> str:
    """The Triton function that combines two accumulators of reduction `name`; Unsupported if there is none."""
    if not REDUCTIONS[name].folder:
        raise Unsupported(because("dtype", f"reduction {name} has no Triton function that joins two accumulators"))
    return REDUCTIONS[name].folder


def triton_combine(name: str, dtype: torch.dtype, *args: str) -> str:
    """The Triton expression that combines accumulators of reduction `name` (see `ReductionRow.combine`)."""
    row = _row(REDUCTIONS, name, "a reduction")
    return triton_text(row, row.triton, dtype, args)


__all__ = [
    "ALL", "BOOL", "CPP_TYPEDEFS", "CPP_TYPES", "FLOAT8", "FLOATS", "INTS", "JOINING", "LOGIC", "LOW", "NO_INDEX",
    "NO_OP", "depthwise", "pools", "products", "OPS", "PRELUDE", "REDUCTIONS", "SCANS", "TURNING", "atom", "OpRow",
    "ReductionRow", "ScanRow", "compute_dtype", "cpp_cell", "cpp_combine", "cpp_constant", "cpp_convert", "cpp_lanes",
    "cpp_lanes_near", "cpp_load", "cpp_near", "cpp_overtakes", "cpp_round", "cpp_step", "cpp_store", "has_lanes",
    "helpers_in", "cell_helpers", "known_helpers", "prelude_for", "wrap_int", "TRITON_POINTERS", "TRITON_TYPES",
    "triton_cell", "triton_combine", "triton_folder", "triton_constant", "triton_convert", "triton_load",
    "triton_number", "triton_prelude", "triton_store",
]  # fmt: skip
