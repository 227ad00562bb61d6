"""What the C++ compiler costs: CPU seconds of each run in this process, and the kernels that it compiled.

CPU time of the compiler's own processes, not time that passed: machines that run tests are busy.
"""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from fuser.runtime import process

# 2 on a quiet machine. On shared ones with AVX2 the same sources took between 4.2 and 6.0 from run to run.
BOUND = float(os.environ.get("FUSER_TEST_COMPILER_SECONDS", "8"))
MANY = 20  # functions in one source: more are several programs that the fuzzer compiles together


@dataclass(frozen=True)
class Run:
    """One run of the compiler: CPU seconds, and the functions of its sources."""

    seconds: float
    kernels: tuple[str, ...]


runs: list[Run] = []
OPTIMISED = "-O2"  # as for users
level = OPTIMISED  # what takes its place


class _Measured(subprocess.Popen):  # type: ignore[type-arg]
    """A process whose end adds its CPU seconds, and those of the processes that it started, to `runs`."""

    def __init__(self, command: list[str], **options: Any) -> None:
        self._kernels = tuple(k for word in command if word.endswith(".cpp") for k in _kernels_of(pathlib.Path(word)))
        if self._kernels:
            command = [level if word == OPTIMISED else word for word in command]
        super().__init__(command, **options)

    def _try_wait(self, flags: int) -> tuple[int, int]:
        try:
            pid, status, usage = os.wait4(self.pid, flags)
        except ChildProcessError:  # somebody else has waited for it
            return self.pid, 0
        if pid == self.pid and self._kernels:
            runs.append(Run(usage.ru_utime + usage.ru_stime, self._kernels))
        return pid, status


def _kernels_of(source: pathlib.Path) -> list[str]:
    text = source.read_text() if source.exists() else ""
    return re.findall(r'extern "C" void (\w+)\(', text)


def watch() -> None:
    """Measure every compiler that this process starts from now on."""
    names = {name: getattr(subprocess, name) for name in ("DEVNULL", "PIPE", "STDOUT", "TimeoutExpired")}
    process.subprocess = SimpleNamespace(**names, Popen=_Measured)  # type: ignore[assignment]


def too_slow(first: int = 0) -> list[str]:
    """A sentence for each run from number `first` on that took more than `BOUND` CPU seconds for `MANY` functions."""
    slow = (r for r in runs[first:] if r.seconds > BOUND * max(1.0, len(r.kernels) / MANY))
    text = "the compiler took {:.1f} CPU seconds, more than {:g}, for {}"
    return [text.format(r.seconds, BOUND, ", ".join(r.kernels)) for r in slow]
