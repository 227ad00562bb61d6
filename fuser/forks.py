"""State that a forked child renews: locks that other threads held, and work that these would have finished.

Every lock of the package is created here. A child has one thread, so locks of its parent's other threads are never
released there, and their pending work is never done. Locks of modules that are being imported are Python's own, and a
partially imported module cannot be imported again: a fork waits for these.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from fuser import startup


class Follower(Protocol):
    """An object with state that depends on other threads; `after_fork` restores it."""

    def after_fork(self) -> None: ...


_locks: weakref.WeakSet[Any] = weakref.WeakSet()
_followers: weakref.WeakSet[Any] = weakref.WeakSet()
_functions: list[Callable[[], None]] = []


def _known(made: Any) -> Any:
    _locks.add(made)
    return made


def lock() -> threading.Lock:
    """A lock that is free in a forked child."""
    made: threading.Lock = _known(threading.Lock())
    return made


def rlock() -> Any:
    """A reentrant lock that is free in a forked child."""
    return _known(threading.RLock())


def condition(lock: threading.Lock | None = None) -> threading.Condition:
    """A condition without waiters in a forked child."""
    made: threading.Condition = _known(threading.Condition(lock))
    return made


def event() -> threading.Event:
    """An event that is set in a forked child if it was set before."""
    made: threading.Event = _known(threading.Event())
    return made


def follow(follower: Follower) -> None:
    """Let `follower.after_fork()` be called in a forked child, once all locks are free, while the follower lives."""
    _followers.add(follower)


def in_child(function: Callable[[], None]) -> Callable[[], None]:
    """Let `function` be called in a forked child, once all locks are free."""
    _functions.append(function)
    return function


class Shared:
    """A change for all threads that holds while at least one of them is in a block; a forked child is in none."""

    def __init__(self, change: Callable[[], None], restore: Callable[[], None]) -> None:
        self._change, self._restore = change, restore
        self._lock, self.blocks = lock(), 0
        follow(self)

    @contextlib.contextmanager
    def block(self) -> Iterator[None]:
        """A block in which the change holds."""
        with self._lock:
            if not self.blocks:
                self._change()
            self.blocks += 1
        try:
            yield
        finally:
            with self._lock:
                self.blocks = max(self.blocks - 1, 0)  # 0 already in a child that was forked inside this block
                if not self.blocks:
                    self._restore()

    def after_fork(self) -> None:
        """Undo the change in a forked child, where the threads in blocks do not exist."""
        if self.blocks:
            self.blocks = 0
            self._restore()


def _after_fork() -> None:
    startup.wake_collector()
    for held in list(_locks):
        held._at_fork_reinit()
    if sys.version_info < (3, 12):
        _free_cached_properties()
    for function in _functions:
        function()
    for follower in list(_followers):
        follower.after_fork()


def _free_cached_properties() -> None:
    """Free the lock of each cached property: up to Python 3.11 it is one for all objects."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == __name__.partition(".")[0]:
            for owner in [v for v in vars(module).values() if isinstance(v, type)]:
                for value in vars(owner).values():
                    if isinstance(value, functools.cached_property):
                        value.lock._at_fork_reinit()  # type: ignore[attr-defined]


# Roots of modules that the package's threads import on demand, and the most seconds that a fork waits for an import.
_IMPORTED = frozenset({"fuser", "sympy", "torch"})
_LONGEST_IMPORT = 10.0


def _is_importing() -> bool:
    """Whether another thread is importing such a module."""
    known: dict[str, Any] = getattr(sys.modules.get("_frozen_importlib"), "_module_locks", {})
    me = threading.get_ident()
    for name, ref in list(known.items()):
        if name.partition(".")[0] in _IMPORTED and getattr(ref(), "owner", None) not in (None, me):
            return True
    return False


def _before_fork() -> None:
    end = time.monotonic() + _LONGEST_IMPORT
    while _is_importing() and time.monotonic() < end:
        time.sleep(1e-3)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork)
