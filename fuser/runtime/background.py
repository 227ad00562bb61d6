"""Compilations in the background, with little delay for other threads."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from fuser import config, forks
from fuser.runtime import workers

settings: Any = config  # its attributes are made from a table

# Threads that compile ahead; the C++ compilers they wait for run beside Python.
COMPILERS = workers.Pool(
    lambda: settings.compile_workers or os.cpu_count() or 1, "fuser-compile", "the process was forked while it compiled"
)
_SWITCH_SECONDS = 1e-4  # Python's own is 5e-3: each operator of a call in another thread might wait as long


class _Yielding:
    """The thread switch interval, shortened while some threads run in `yielding`."""

    def __init__(self) -> None:
        self.lock, self.inside, self.before = forks.lock(), 0, 0.0
        forks.follow(self)

    def enter(self) -> None:
        with self.lock:
            if not self.inside and sys.getswitchinterval() > _SWITCH_SECONDS:
                self.before = sys.getswitchinterval()
                sys.setswitchinterval(_SWITCH_SECONDS)
            self.inside += 1

    def leave(self) -> None:
        with self.lock:
            self.inside -= 1
            if not self.inside:
                self.restore()

    def restore(self) -> None:
        if self.before and abs(sys.getswitchinterval() - _SWITCH_SECONDS) < 1e-6:  # else others have set it
            sys.setswitchinterval(self.before)
        self.before = 0.0

    def after_fork(self) -> None:
        self.restore()
        self.inside = 0


_yielding = _Yielding()


@contextlib.contextmanager
def yielding() -> Iterator[None]:
    """Shorten Python's thread switch interval in this block, so that its Python code delays other threads little."""
    _yielding.enter()
    try:
        yield
    finally:
        _yielding.leave()


def as_here(function: Callable[[], object]) -> Callable[[], None]:
    """A function for another thread that calls `function` under the settings of this thread."""
    current = config.snapshot()

    def call() -> None:
        with config.override(**current):
            function()

    return call
