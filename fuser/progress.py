"""A progress line on a terminal during long compilations: how many are done, and what is being compiled."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

from fuser import forks
from fuser.runtime import workers

AFTER, EVERY = 3.0, 0.5  # seconds before the first line, and between two lines
_WIDTH = 100
_lock = forks.lock()
_running: dict[object, Callable[[], str]] = {}
_state = {"began": 0.0, "done": 0, "shown": 0}
_thread: threading.Thread | None = None


def on_terminal() -> bool:
    """Whether stderr is a terminal."""
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # stderr is closed or missing
        return False


@contextlib.contextmanager
def working(on: Callable[[], str]) -> Iterator[None]:
    """A block that compiles what `on()` names. It costs nothing unless stderr is a terminal."""
    if not on_terminal():
        yield
        return
    token = object()
    _begin(token, on)
    try:
        yield
    finally:
        with _lock:
            _running.pop(token, None)
            _state["done"] += 1


def _begin(token: object, on: Callable[[], str]) -> None:
    global _thread
    with _lock:
        if not _running and (_thread is None or not _thread.is_alive()):
            _state.update(began=time.monotonic(), done=0, shown=0)
        _running[token] = on
        if _thread is None or not _thread.is_alive():
            _thread = workers.start(_watch, "fuser-progress")  # None if no thread can be started: then there is no line


def _watch() -> None:
    """Update the line until nothing is compiled, then erase it."""
    global _thread
    idle = 0
    while idle < 2:  # between two kernels of one graph nothing may be running
        time.sleep(EVERY)
        with _lock:
            names = list(_running.values())
            seconds, done = time.monotonic() - _state["began"], _state["done"]
            idle = 0 if names else idle + 1
            if idle == 2:
                _thread = None
        if names and seconds > AFTER:
            _write(line(seconds, int(done), [_named(n) for n in names]))
            _state["shown"] = 1
    if _state["shown"]:
        _write("")


def _named(on: Callable[[], str]) -> str:
    try:
        return on()
    except Exception:  # a name must not cause a failure
        return "?"


def line(seconds: float, done: int, names: list[str]) -> str:
    """The text of the line."""
    text = f"fuser: {seconds:.0f} s, {done} compilations done, {len(names)} under way: {'; '.join(names)}"
    return text if len(text) < _WIDTH else text[: _WIDTH - 1] + "…"


def _write(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()


__all__ = ["AFTER", "line", "on_terminal", "working"]
