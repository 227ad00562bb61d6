"""Kernels without a plan: a module's own C++, launched like a group's kernel.

A routine is C++ with one entry and the program that launches it. Its handle is compiled when it is first requested;
calls that the program does not accept go to `otherwise`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from fuser import notices
from fuser.cpu import toolchain
from fuser.errors import CompileError
from fuser.ir.sizes import STRIDE, Expr, IntLike, Sym, expr, program
from fuser.kernel_spec import Check, InputPattern, LaunchProgram
from fuser.lazy_dataclasses import dataclass
from fuser.machines import Machine
from fuser.ops import CPP_TYPEDEFS, helpers_in, prelude_for
from fuser.runtime import launcher


@dataclass(frozen=True)
class Routine:
    """The C++ of helpers and entry, without the op table's typedefs and helpers, and its launch program."""

    text: str
    program: LaunchProgram
    machine: Machine

    @property
    def source(self) -> str:
        """The complete source."""
        return f"{CPP_TYPEDEFS}{prelude_for(helpers_in(self.text), self.machine)}{self.text}"


Code = Callable[[IntLike], tuple[int, ...]]  # the program that computes a number from a routine's slots


def slots_of(names: Iterable[str]) -> tuple[list[Expr], Code]:
    """The integers that a routine takes or binds, in the order of their slots, and programs over them."""
    slots = {Sym(name, STRIDE): n for n, name in enumerate(names)}
    return [expr(s) for s in slots], lambda e: program(e, slots)


def contiguous(dtype: torch.dtype, code: Code, *sizes: IntLike) -> InputPattern:
    """The pattern of a contiguous argument of these sizes."""
    strides, behind = list[Expr](), expr(1)
    for n in reversed(sizes):
        strides.insert(0, behind)
        behind = behind * n
    size, stride = (tuple(Check(code(e)) for e in each) for each in (sizes, strides))
    return InputPattern("tensor", dtype, "cpu", size, stride)


def handle_of(routine: Routine, otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """A launcher's handle of a routine; if its library cannot be made, the handle always calls `otherwise`."""

    def slow(args: tuple[Any, ...], status: int) -> Any:
        return otherwise(*args)

    handle: Any = launcher.make_handle(slow)
    entries = [step.entry for step in routine.program.steps]
    try:
        handle.add_kernel(routine.program, toolchain.compile_library((routine.source,), routine.machine, entries))
    except (CompileError, OSError) as e:
        notices.warn_once(f"calls of {entries[0]} run on ATen, because {e}", entries[0])
    made: Callable[..., Any] = handle
    return made


__all__ = ["Code", "Routine", "contiguous", "handle_of", "slots_of"]
