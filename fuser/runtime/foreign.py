"""Kernels on devices that the package does not know: a `Runtime` from outside allocates, loads and launches.

The native launcher reads CPU and CUDA tensors. Calls on any other device go to Python code, which matches the
arguments with each kernel's launch program as the launchers do, and has the device's own runtime run the steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Any, Protocol, runtime_checkable

import torch

from fuser import forks
from fuser.errors import BackendError
from fuser.ir.sizes import run_program
from fuser.kernel_spec import LaunchProgram
from fuser.lazy_dataclasses import dataclass
from fuser.runtime import events


@runtime_checkable
class Runtime(Protocol):
    """Runs kernels of one device type. Any thread may call any method, and no lock is held meanwhile.

    allocate: uninitialised memory of these sizes and strides, in elements, on `device`.
    encode: the data that `launch` needs about a launch program, made once. BackendError if the program cannot run.
    load: the code in a kernel's library, one entry for each step. OSError if it is gone.
    launch: run step `step` over `units` units. `tensors` are the tensor inputs in order, then the buffers; `slots` and
      `floats` are the numbers bound by the arguments. It returns 0, or a status of `kernel_spec.STATUS`, on which ATen
      runs the call. Later steps read results of earlier ones, so steps run in order.
    """

    def allocate(
        self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor: ...

    def encode(self, program: LaunchProgram) -> Any: ...

    def load(self, library: Any, entries: tuple[str, ...]) -> Any: ...

    def launch(
        self, code: Any, encoded: Any, step: int, units: int, tensors: Sequence[torch.Tensor], slots: Sequence[int],
        floats: Sequence[float],
    ) -> int: ...  # fmt: skip


RUNTIMES: dict[str, Runtime] = {}  # by device type


@dataclass(eq=False)
class Kernel:
    """One program, encoded and loaded by its runtime."""

    program: LaunchProgram
    runtime: Runtime
    encoded: Any
    code: Any

    def run(self, slots: tuple[int, ...], floats: tuple[float, ...], args: Sequence[Any]) -> tuple[int, Any]:
        """Status and result of one call with matching arguments."""
        given = [a for a in args if isinstance(a, torch.Tensor)]
        made = [self._buffer(i, slots, given[0].device) for i in range(len(self.program.buffers))]
        watched = events.is_watched()
        for n, step in enumerate(self.program.steps):
            units = run_program(step.units, slots)
            with events.event(step.entry, watched):
                status = self.runtime.launch(self.code, self.encoded, n, units, [*given, *made], slots, floats)
            if status:
                return status, None
        named = [args[i] if kind == "input" else made[i] for kind, i in self.program.outputs]
        return 0, named[0] if self.program.single else tuple(named)

    def _buffer(self, i: int, slots: tuple[int, ...], device: torch.device) -> torch.Tensor:
        pattern = self.program.buffers[i]
        size, stride = ([run_program(code, slots) for code in codes] for codes in (pattern.sizes, pattern.strides))
        return self.runtime.allocate(size, stride, pattern.dtype, device)


@dataclass
class Kernels:
    """The kernels of one handle, the newest first."""

    _kernels: tuple[Kernel, ...] = ()
    _lock: Any = field(default_factory=forks.lock)

    def add(self, program: LaunchProgram, library: Any, runtime: Runtime) -> None:
        """Add a kernel for later calls that match `program`."""
        encoded = runtime.encode(program)
        code = runtime.load(library, tuple(step.entry for step in program.steps))
        with self._lock:
            self._kernels = (Kernel(program, runtime, encoded, code), *self._kernels)

    def run(self, args: Sequence[Any]) -> tuple[int, Any] | None:
        """Status and result of a call; None if no kernel matches it."""
        if not self._kernels:
            return None
        from fuser.runtime.python_launcher import match  # only devices from outside need it

        for kernel in self._kernels:
            bound = match(kernel.program, args)
            if bound is not None:
                return kernel.run(*bound, args)
        return None


def runtime_of(program: LaunchProgram) -> Runtime | None:
    """The runtime from outside that runs a program; None if a launcher of the package runs it."""
    if not RUNTIMES:
        return None
    device = next((p.device_type for p in program.inputs if p.kind == "tensor"), "")
    return RUNTIMES.get(device)


def check(runtime: Any, device_type: str) -> Runtime:
    """`runtime` if it has all methods of the protocol, else BackendError."""
    if isinstance(runtime, Runtime):
        return runtime
    missing = [name for name in ("allocate", "encode", "load", "launch") if not hasattr(runtime, name)]
    raise BackendError(
        f"{type(runtime).__name__} is no runtime for {device_type!r}: it lacks {', '.join(missing)}; "
        "see fuser.runtime.foreign.Runtime"
    )


__all__ = ["RUNTIMES", "Kernels", "Runtime", "check", "runtime_of"]
