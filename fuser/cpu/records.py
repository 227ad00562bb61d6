"""What the generator returns: functions, the temporaries of split reductions, and where arguments are found."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fuser.ir.sizes import Expr, Sym
from fuser.machines import Machine

# The parameters of each function: pointers, int64 and float64 slots, units, memory of its own, what it reports.
SIGNATURE = (
    "char* const* ptrs, const i64* s, const double* f, i64 begin, i64 end, char* scratch, i32* status"
)  # fmt: skip


@dataclass(frozen=True)
class Function:
    """One C++ function and how to launch it: `units`, `work`, `scratch` as `kernel_spec.Step` has them."""

    name: str
    text: str
    units: Expr
    work: Expr
    scratch: Expr


@dataclass(frozen=True)
class Partial:
    """A temporary of a split reduction: `size` elements of `dtype`."""

    name: str
    dtype: torch.dtype
    size: Expr


@dataclass(frozen=True)
class Generated:
    """The functions of one plan, in launch order, and the temporaries they share."""

    functions: tuple[Function, ...]
    partials: tuple[Partial, ...]


@dataclass(frozen=True)
class Bindings:
    """Where a function finds its arguments: pointers by buffer, int64 slots by symbol, float64 slots by scalar.

    `machine` is the row of the machine that runs them.
    `counts` has the elements of memory that each buffer spans, where functions check their offsets (`checked.py`).
    """

    pointers: dict[str, int]
    slots: dict[Sym, int]
    floats: dict[str, int]
    machine: Machine
    counts: dict[str, Expr] | None = None
