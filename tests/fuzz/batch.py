"""Kernels of many programs in one run of the compiler, most of them without optimisation: fuzzing in bulk.

A compiler's start costs more than a small kernel, and `-O2` more than all the rest of a program. `collecting()` has the
kernels that are prepared in its block wait for each other; `flush` compiles what has come. Outside of such a block, and
where the common source does not compile, a kernel is compiled on its own as ever.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

import fuser.orders
from fuser.compiler import CpuBackend, register_backend
from fuser.cpu import fused_kernel, toolchain
from fuser.errors import CompileError
from fuser.runtime import process

_ENTRY = re.compile(r'^extern "C" void (\w+)\(char\* const\*', re.M)
_SYMBOL = re.compile(r"_any\b")  # the end of what helpers define by the assembler's names, which know no namespaces


class _Request:
    def __init__(self, source: fused_kernel.Source) -> None:
        self.source = source
        self.done = threading.Event()
        self.kernel: fused_kernel.FusedKernel | None = None


class _Pool(ThreadPoolExecutor):
    """Threads that compile ahead, as many as there are requests; counts those that are not done."""

    def __init__(self) -> None:
        super().__init__(max_workers=512, thread_name_prefix="fuser-compile")
        self.pending: set[Future[Any]] = set()

    def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:  # type: ignore[override]
        future = super().submit(*args, **kwargs)
        self.pending.add(future)
        future.add_done_callback(self.pending.discard)
        return future


class BatchBackend(CpuBackend):
    """Compiles kernels together. `level` is the optimisation: "-O0", or "-O2" as for users."""

    def __init__(self) -> None:
        self.level = "-O0"
        self.compiled = 0
        self._lock = threading.Lock()
        self._waiting: list[_Request] = []
        self._collecting = False
        self._pool = _Pool()
        self._folder = tempfile.TemporaryDirectory(prefix="fuser-fuzz-")

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """In this block all kernels of the process are compiled here."""
        before = fuser.orders.POOL
        fuser.orders.POOL = self._pool  # type: ignore[assignment]
        register_backend("cpu", self)
        try:
            yield
        finally:
            register_backend("cpu", None)
            fuser.orders.POOL = before

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """Kernels prepared in this block wait for `flush`, which runs at its end."""
        self._collecting = True
        try:
            yield
            self.flush()  # what comes meanwhile waits for it, too
        finally:
            self._collecting = False

    def machine(self) -> str | None:
        """Nothing is kept for other processes."""
        return None

    def compile(self, source: fused_kernel.Source) -> fused_kernel.FusedKernel:
        request = _Request(source)
        with self._lock:
            together = self._collecting and threading.current_thread() is not threading.main_thread()
            if together:
                self._waiting.append(request)
        if not together:
            self._compile([request])
        while not request.done.wait(300.0):  # never: but nobody waits for ever for a flush that went wrong
            with self._lock:
                alone = request in self._waiting
                self._waiting = [r for r in self._waiting if r is not request]
            if alone:
                self._compile([request])
        return request.kernel or fused_kernel.compile_source(source)

    def rehearse(self, call: Callable[[], Any]) -> None:
        """Have a call made by a thread, so that whatever it needs beyond what was prepared is compiled with the rest:
        pieces of a group that is split come to light one after the other. Nothing where kernels do not wait."""
        if not self._collecting:
            return

        def run() -> None:
            with contextlib.suppress(Exception), torch.no_grad(), warnings.catch_warnings():
                call()

        self._pool.submit(run)

    def flush(self) -> None:
        """Compile all that waits, until nothing that was begun is pending."""
        seen, changed, patience = -1, time.monotonic(), 0.1
        while self._pool.pending:
            with self._lock:
                n = len(self._waiting)
                everyone = n >= len(self._pool.pending)
            if n != seen:
                seen, changed = n, time.monotonic()
            # Some wait for each other: two programs with one kernel. Where a compiler takes long, so do all others.
            if n and (everyone or time.monotonic() - changed > patience):
                with self._lock:
                    batch, self._waiting = self._waiting, []
                began = time.monotonic()
                self._compile(batch)
                seen, changed = -1, time.monotonic()
                patience = max(0.1, (changed - began) / 4)
            time.sleep(0.002)

    def _compile(self, batch: list[_Request]) -> None:
        try:
            self._compile_parts(batch)
        finally:
            for r in batch:
                r.done.set()

    def _compile_parts(self, batch: list[_Request]) -> None:
        """All of a batch; its halves where that does not compile, down to the one at fault, which is left to others."""
        try:
            library = self._library([r.source for r in batch])
        except CompileError:
            for half in (batch[: len(batch) // 2], batch[len(batch) // 2 :]) if len(batch) > 1 else ():
                self._compile_parts(half)
            return
        for n, r in enumerate(batch):
            r.kernel = _renamed(r.source, n, library)
        self.compiled += len(batch)

    def _library(self, sources: list[fused_kernel.Source]) -> str:
        compiler = toolchain.find_compiler()
        flags, libraries = toolchain.flags_for(compiler)
        flags = tuple(self.level if f == "-O2" else f for f in flags)
        stem = Path(self._folder.name) / f"batch{time.monotonic_ns()}"
        text = "\n".join(_enclosed(part, n, k) for n, s in enumerate(sources) for k, part in enumerate(s.parts))
        stem.with_suffix(".cpp").write_text(text)
        made = str(stem.with_suffix(".so"))
        command = [*compiler, *flags, "-pipe", str(stem.with_suffix(".cpp")), "-o", made, *libraries]
        code, log = process.run(command, 300.0)
        if code:
            raise CompileError(f"{len(sources)} sources together do not compile", log)
        return made


def _enclosed(text: str, n: int, k: int) -> str:
    """A source in a namespace of its own, its entries under other names."""
    names = _ENTRY.findall(text)
    text = _SYMBOL.sub(f"_any_p{n}_{k}", text)
    macros = re.findall(r"^#define (\w+)", text, re.M)
    return "\n".join([
        *(f"#define {name} {name}_p{n}" for name in names),
        *(f"#define {name}_bounds {name}_p{n}_bounds" for name in names),
        f"namespace p{n}_{k} {{", text, "}",
        *(f"#undef {name}" for name in dict.fromkeys([*names, *(f"{name}_bounds" for name in names), *macros])),
    ])  # fmt: skip


def _renamed(source: fused_kernel.Source, n: int, library: str) -> fused_kernel.FusedKernel:
    steps = tuple(dataclasses.replace(s, entry=f"{s.entry}_p{n}") for s in source.program.steps)
    program = dataclasses.replace(source.program, steps=steps)
    return fused_kernel.FusedKernel(source.name, program, source.text, library, source.n_kernels, source.reasons)
