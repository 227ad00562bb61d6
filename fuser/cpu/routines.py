"""Kernels without a plan: a module's own C++, launched like a group's kernel.

A routine is C++ with one entry and the program that launches it. Its handle is compiled when it is first requested;
calls that the program does not accept go to `otherwise`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fuser import notices
from fuser.cpu import toolchain
from fuser.errors import CompileError
from fuser.kernel_spec import LaunchProgram
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


__all__ = ["Routine", "handle_of"]
