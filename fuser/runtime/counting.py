"""What happened in this process, counted by name. Threads count together; a forked child goes on from its parent's."""

from __future__ import annotations

from collections import Counter

from fuser import forks


class Counts:
    """Numbers that only rise, by name."""

    def __init__(self) -> None:
        self._lock = forks.lock()
        self._numbers: Counter[str] = Counter()

    def add(self, name: str, number: float = 1) -> None:
        """Count `number` more."""
        with self._lock:
            self._numbers[name] += number  # type: ignore[assignment]

    def __getitem__(self, name: str) -> float:
        with self._lock:
            return self._numbers[name]


COUNTS = Counts()
