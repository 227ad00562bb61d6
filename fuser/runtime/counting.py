"""Events of this process, counted by name. All threads share the counts; a forked child continues its parent's."""

from __future__ import annotations

from collections import Counter

from fuser import forks


class Counts:
    """Numbers by name that only increase."""

    def __init__(self) -> None:
        self._lock = forks.lock()
        self._numbers: Counter[str] = Counter()

    def add(self, name: str, number: float = 1) -> None:
        """Add `number` to the count `name`."""
        with self._lock:
            self._numbers[name] += number  # type: ignore[assignment]

    def __getitem__(self, name: str) -> float:
        with self._lock:
            return self._numbers[name]


COUNTS = Counts()
