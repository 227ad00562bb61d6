"""A progress bar on stderr: rich's where installed, else one plain line that is rewritten."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Bar(Protocol):
    """One unit of work at a time."""

    def step(self, label: str) -> None:
        """Say what runs next; the work before it counts as done."""


class _Plain:
    def __init__(self, title: str, total: int) -> None:
        self.title, self.total, self.done = title, total, 0
        self.tty = sys.stderr.isatty()

    def step(self, label: str) -> None:
        self.done += 1
        line = f"{self.title} {self.done}/{self.total} {label}"
        if self.tty:
            print(f"\r{line[:100]:<100}", end="", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.tty:
            print("\r" + " " * 100 + "\r", end="", file=sys.stderr, flush=True)


@contextmanager
def progress(title: str, total: int) -> Iterator[Bar]:
    """A bar of `total` steps for the block."""
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        plain = _Plain(title, total)
        try:
            yield plain
        finally:
            plain.close()
        return
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total + 1)

        class _Rich:
            def step(self, label: str) -> None:
                bar.update(task, advance=1, description=f"{title} {label}")

        yield _Rich()
