"""OpenTelemetry spans of compilations, in programs that have imported its API; in others nothing.

A program without `opentelemetry.trace` in `sys.modules` has configured no receiver of spans, so it is not imported for
one. Calls that a kernel answers have no spans.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from fuser.lazy_dataclasses import dataclass

_API = "opentelemetry.trace"
_timed = threading.local()


@dataclass(frozen=True)
class Stage:
    """One finished stage of a compilation, in seconds on the clock of `time.perf_counter`."""

    name: str
    label: str
    begin: float
    seconds: float
    thread: str


_collecting: list[list[Stage]] = []


@contextlib.contextmanager
def collected() -> Iterator[list[Stage]]:
    """The stages that end in this block, in any thread."""
    found: list[Stage] = []
    _collecting.append(found)
    try:
        yield found
    finally:
        _collecting[:] = [other for other in _collecting if other is not found]


@contextlib.contextmanager
def timed(stages: dict[str, float]) -> Iterator[None]:
    """Add the seconds of each stage that this thread begins and ends in this block to `stages`."""
    before = getattr(_timed, "stages", None)
    _timed.stages = stages
    try:
        yield
    finally:
        _timed.stages = before


class span:
    """A stage of a compilation, as `fuser.<stage>` with attributes `fuser.<name>`. A failing tracer is ignored.

    The span has `note(name=value)` for attributes known later.
    """

    __slots__ = ("_inner", "_made", "_name", "_attributes", "_began")

    def __init__(self, stage: str, /, **attributes: str | int | float | bool) -> None:
        self._name, self._attributes = stage, attributes
        self._inner: Any = None
        self._made: Any = None
        self._began = 0.0

    def __enter__(self) -> span:
        self._began = time.perf_counter()
        api = sys.modules.get(_API)
        if api is None:
            return self
        try:
            inner = api.get_tracer("fuser").start_as_current_span(
                f"fuser.{self._name}", attributes={f"fuser.{k}": v for k, v in self._attributes.items()}
            )
            self._made = inner.__enter__()
            self._inner = inner
        except Exception:  # raised by the program's own tracer
            self._made = None
        return self

    def note(self, **attributes: str | int | float | bool) -> None:
        """Add attributes."""
        if self._made is not None:
            try:
                for name, value in attributes.items():
                    self._made.set_attribute(f"fuser.{name}", value)
            except Exception:
                self._made = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:  # fmt: skip
        stages = getattr(_timed, "stages", None)
        if stages is not None or _collecting:
            self._add(stages, time.perf_counter() - self._began)
        inner, self._inner = self._inner, None
        if inner is not None:
            try:
                inner.__exit__(kind, error, trace)
            except BaseException as e:
                if e is not error and not isinstance(e, Exception):
                    raise


    def _add(self, stages: dict[str, float] | None, seconds: float) -> None:
        if stages is not None:
            stages[self._name] = stages.get(self._name, 0.0) + seconds
        label = ", ".join(f"{k} {v}" for k, v in self._attributes.items())
        for found in _collecting:
            found.append(Stage(self._name, label, self._began, seconds, threading.current_thread().name))


__all__ = ["Stage", "collected", "span", "timed"]
