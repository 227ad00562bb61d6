"""Kernels without a plan: a module's own C++, launched like a group's kernel.

A kind of routine has one module that writes it (`signatures.Routine`) and one function that computes the same on ATen.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Hashable
from typing import Any

import torch

from fuser import machines, notices
from fuser.cpu import dots, toolchain
from fuser.errors import CompileError
from fuser.runtime import launcher


class Routines:
    """The routines of one kind, and their handles. Each is written and compiled when it is first requested.

    `writer` names the module of this folder whose `routine(dtype, shape, *key, machine)` writes them; it is imported
    when one is needed. `otherwise(*key, *arguments)` computes on ATen. Calls that no kernel accepts go there.
    """

    def __init__(self, writer: str, otherwise: Callable[..., Any]) -> None:
        self._writer, self._otherwise = writer, otherwise
        self.handle = functools.lru_cache(maxsize=256)(self._handle)
        self.made = functools.lru_cache(maxsize=64)(self._made)

    def _handle(self, isa: str, dtype: torch.dtype, columns: int | None, *key: Hashable) -> Callable[..., Any]:
        """The handle, looked up at each call. Column counts with one block shape share a handle."""
        return self.made(isa, dtype, dots.shape_of(columns, machines.find(isa)), *key)

    def _made(self, isa: str, dtype: torch.dtype, shape: dots.Shape, *key: Hashable) -> Callable[..., Any]:
        """A new handle; if its library cannot be made, the handle always computes on ATen."""
        machine, otherwise = machines.find(isa), self._otherwise

        def slow(args: tuple[Any, ...], status: int) -> Any:
            return otherwise(*key, *args)

        handle: Any = launcher.make_handle(slow)
        routine = importlib.import_module(f"fuser.cpu.{self._writer}").routine(dtype, shape, *key, machine)
        entries = [step.entry for step in routine.program.steps]
        try:
            handle.add_kernel(routine.program, toolchain.compile_library((routine.source,), machine, entries))
        except (CompileError, OSError) as e:
            notices.warn_once(f"calls of {entries[0]} run on ATen, because {e}", entries[0])
        made: Callable[..., Any] = handle
        return made


__all__ = ["Routines"]
