"""Out-of-bounds accesses that kernels compiled with `config.check_bounds` report."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

from fuser.errors import BoundsError
from fuser.kernel_spec import LaunchProgram
from fuser.runtime.libraries import Library


def violation(library: str, program: LaunchProgram) -> str | None:
    """The first out-of-bounds access of a program's kernels since the last call of this function, or None."""
    opened = Library(library)
    loaded = opened.library
    for entry in dict.fromkeys(step.entry for step in program.steps):
        try:
            found = (ctypes.c_longlong * 3).in_dll(loaded, f"{entry}_bounds")
        except ValueError:  # without checks, or for another device
            continue
        if found[0]:
            buffer = ctypes.string_at(found[0]).decode()
            text = f"{entry} uses offset {found[1]} of {buffer}, which has {found[2]} elements"
            found[:] = [0, 0, 0]
            return text
    return None


def bounds_error(kernels: Iterable[tuple[str, LaunchProgram]]) -> BoundsError:
    """The error for the first report of the kernels, each given as (library, program)."""
    found = (violation(library, program) for library, program in kernels)
    text = next((text for text in found if text is not None), "a kernel uses an offset outside of its buffer")
    return BoundsError(f"{text}: a defect of fuser, not of the program")


__all__ = ["bounds_error", "violation"]
