"""Processes that compile kernels, several at a time, each with a time limit. None outlives this process."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from fuser import config, forks
from fuser.errors import CompileError
from fuser.runtime import process

SCRIPT = pathlib.Path(__file__).with_name("compile_worker.py")
MOST_WORKERS = 8
settings: Any = config


class Gone(Exception):
    """A process ended without an answer. The argument is its exit code."""


class CannotStart(Exception):
    """No process can be started here."""


class Worker:
    """One process. `ask` gives it a request and waits for the answer."""

    def __init__(self, command: list[str]) -> None:
        try:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
        except OSError as e:
            raise CannotStart(str(e)) from None

    def ask(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        """The answer to a request. Gone if the process has ended, TimeoutError if it takes longer."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
        except OSError:
            raise Gone(self._exit_code()) from None
        answer: dict[str, Any] = json.loads(self._line(time.monotonic() + timeout))
        return answer

    def _line(self, deadline: float) -> bytes:
        assert self.process.stdout is not None
        pipe, parts = self.process.stdout.fileno(), [b""]
        ready = select.poll()  # `select.select` accepts no descriptor above 1023
        ready.register(pipe, select.POLLIN)
        while not parts[-1].endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not ready.poll(1000 * left):
                raise TimeoutError
            parts.append(os.read(pipe, 1 << 20))
            if not parts[-1]:
                raise Gone(self._exit_code())
        return b"".join(parts)

    def _exit_code(self) -> int:
        try:
            return self.process.wait(1.0)
        except subprocess.TimeoutExpired:
            return -1

    def stop(self) -> None:
        """Kill the process and all processes that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self.process.wait()


class Pool:
    """At most `size` processes, started on demand."""

    def __init__(self, size: int) -> None:
        self.owner = os.getpid()
        self._free = threading.BoundedSemaphore(size)
        self._lock = forks.lock()
        self._idle: list[Worker] = []
        self._all: set[Worker] = set()
        process.at_end(self, self.stop)

    @property
    def command(self) -> list[str]:
        """The command line of a process."""
        return [sys.executable, str(SCRIPT), str(self.owner)]

    def compile(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        """The answer to a request. CompileError if it takes too long or the compiler crashes; CannotStart."""
        name = request["name"]
        with self._free:
            while True:
                with self._worker() as (worker, is_new):
                    try:
                        return worker.ask(request, timeout)
                    except TimeoutError:
                        worker.stop()
                        raise CompileError(
                            f"Triton ran longer than {timeout:g} s on kernel {name} ({request['path']}) and was stopped"
                        ) from None
                    except Gone as e:
                        worker.stop()
                        if is_new or e.args[0] != 0:  # an idle process may have ended by itself
                            ended = f"Triton's process ended with exit code {e.args[0]}"
                            raise CompileError(f"{ended} on kernel {name} ({request['path']})") from None

    @contextlib.contextmanager
    def _worker(self) -> Iterator[tuple[Worker, bool]]:
        with self._lock:
            worker = self._idle.pop() if self._idle else None
        is_new = worker is None
        if worker is None:
            worker = Worker(self.command)
            with self._lock:
                self._all.add(worker)
        try:
            yield worker, is_new
        except BaseException:
            worker.stop()
            raise
        finally:
            with self._lock:
                if worker.process.poll() is None:
                    self._idle.append(worker)
                else:
                    self._all.discard(worker)

    def stop(self) -> None:
        """End all processes."""
        if os.getpid() == self.owner:  # not in a forked child
            with self._lock:
                workers, self._idle = list(self._all), []
                self._all.clear()
            for worker in workers:
                worker.stop()


_pool: Pool | None = None
_lock = forks.lock()


def pool() -> Pool:
    """The process's pool; a forked child gets its own."""
    global _pool
    with _lock:
        if _pool is None or _pool.owner != os.getpid():
            _pool = Pool(settings.compile_workers or min(os.cpu_count() or 1, MOST_WORKERS))
        return _pool


def workers() -> int:
    """The number of kernels that are compiled in parallel."""
    return int(settings.compile_workers or min(os.cpu_count() or 1, MOST_WORKERS))
