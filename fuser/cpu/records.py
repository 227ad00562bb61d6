"""Records of the generator: functions, temporaries of split reductions, and the slots of arguments."""

from __future__ import annotations

import functools

import torch

from fuser.cpu.vir.nodes import Kernel
from fuser.cpu.vir.printer import Text, printed
from fuser.ir.sizes import Expr, Sym
from fuser.lazy_dataclasses import dataclass
from fuser.machines import Machine


@dataclass(frozen=True)
class Function:
    """One C++ function and how to launch it: `units`, `work`, `scratch` as `kernel_spec.Step` has them."""

    code: Kernel
    units: Expr
    work: Expr
    scratch: Expr

    @property
    def name(self) -> str:
        """The function's name."""
        return self.code.name

    @functools.cached_property
    def printed(self) -> Text:
        """The function's C++."""
        return printed(self.code)


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
    partials: tuple[Partial, ...] = ()


@dataclass(frozen=True)
class Bindings:
    """Indices of a function's arguments: pointers by buffer, int64 slots by symbol, float64 slots by scalar.

    `machine` is the row of the machine that runs the function. `counts`, if offsets are checked (`checked.py`), has
    the number of elements that each buffer spans.
    """

    pointers: dict[str, int]
    slots: dict[Sym, int]
    floats: dict[str, int]
    machine: Machine
    counts: dict[str, Expr] | None = None
