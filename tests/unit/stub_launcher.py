"""Handles and kernels in plain Python, so that tests of the cache need neither compiler nor launcher."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from fuser import compiler, config, executor, interface, kernel_cache, metrics
from fuser.debug import explaining, reporting


@dataclass(frozen=True)
class StubProgram:
    """Takes the calls that `matches`; answers with `run`. A status other than 0 sends the call to `slow`."""

    matches: Callable[..., bool]
    run: Callable[..., Any]
    status: int = 0


@dataclass(frozen=True)
class StubKernel:
    program: StubProgram
    name: str = "stub"
    library: str = "stub.so"
    source: str = "stub source"


class StubHandle:
    def __init__(self, slow: Callable[[tuple[Any, ...], int], Any]) -> None:
        self.slow = slow
        self.programs: list[StubProgram] = []
        self.hits = 0

    def add_kernel(self, program: StubProgram, library_path: str, magnitudes: int = -1) -> int:
        self.programs.append(program)
        return len(self.programs) - 1

    def __call__(self, *args: Any) -> Any:
        for program in self.programs if config.enabled else ():
            if program.matches(*args):
                if program.status:
                    return self.slow(args, program.status)
                self.hits += 1
                return program.run(*args)
        return self.slow(args, 0)


@dataclass
class StubCompiler:
    """Counts compilations. `make(spec, args)` gives the kernel or raises; `before` runs first, in the same thread."""

    make: Callable[[Any, tuple[Any, ...]], Any]
    before: Callable[[], None] = lambda: None
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, spec: Any, args: tuple[Any, ...]) -> Any:
        with self.lock:
            self.calls.append(args)
        self.before()
        return self.make(spec, args)


def same_class(args: tuple[Any, ...]) -> Callable[..., bool]:
    """Takes calls with tensors of the ranks and dtypes of `args`."""
    wanted = [(a.dim(), a.dtype) if isinstance(a, torch.Tensor) else type(a) for a in args]
    return lambda *given: wanted == [(a.dim(), a.dtype) if isinstance(a, torch.Tensor) else type(a) for a in given]


def by_fallback(spec: Any, args: tuple[Any, ...]) -> StubKernel:
    """A kernel for the class of `args` that computes the right thing."""
    return StubKernel(StubProgram(same_class(args), spec.fallback))


def install(monkeypatch: Any, make: Callable[[Any, tuple[Any, ...]], Any] = by_fallback) -> StubCompiler:
    """Stubs in place of launcher and compiler, and an empty registry."""
    registry = kernel_cache.Registry()
    for module in (interface, metrics, reporting, explaining):
        monkeypatch.setattr(module, "REGISTRY", registry)
    stub = StubCompiler(make)
    monkeypatch.setattr(compiler, "compile_runtime", stub)
    monkeypatch.setattr(compiler, "why_not", lambda device_type: None)
    monkeypatch.setattr(executor.launcher, "make_handle", StubHandle)
    return stub
