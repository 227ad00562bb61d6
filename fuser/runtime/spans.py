"""OpenTelemetry spans of compilations, in programs that have imported its API; elsewhere nothing.

A program without `opentelemetry.trace` in `sys.modules` has configured nobody to receive a span, so nothing is imported
for one. Calls that a kernel answers have no spans.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

_API = "opentelemetry.trace"


class span:
    """A stage of a compilation, as `fuser.<stage>` with attributes `fuser.<name>`. A failing tracer changes nothing.

    The block's span has `note(name=value)` for what is known later.
    """

    __slots__ = ("_inner", "_made", "_name", "_attributes")

    def __init__(self, stage: str, /, **attributes: str | int | float | bool) -> None:
        self._name, self._attributes = stage, attributes
        self._inner: Any = None
        self._made: Any = None

    def __enter__(self) -> span:
        api = sys.modules.get(_API)
        if api is None:
            return self
        try:
            inner = api.get_tracer("fuser").start_as_current_span(
                f"fuser.{self._name}", attributes={f"fuser.{k}": v for k, v in self._attributes.items()}
            )
            self._made = inner.__enter__()
            self._inner = inner
        except Exception:  # of a tracer of the program's own
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
        inner, self._inner = self._inner, None
        if inner is not None:
            try:
                inner.__exit__(kind, error, trace)
            except BaseException as e:
                if e is not error and not isinstance(e, Exception):
                    raise


__all__ = ["span"]
