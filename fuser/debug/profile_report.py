"""The results of `fuser.profile()` as records, as a table and as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import Any

from fuser.debug.traffic import cache_bytes, spread
from fuser.lazy_dataclasses import dataclass

NOISY = 0.15  # interquartile range of equal work relative to its median, from which numbers are unreliable
_SHOWN = 25  # rows of each table


@dataclass(frozen=True)
class KernelRow:
    """One step of a kernel: `seconds` of all its events, median and interquartile range of single ones.

    `bytes`: memory traffic of one call by the plan, each element once; None if calls had several sizes or were
    batched, or the plan is unknown. `operations` are a call's scalar operations, each op of the table counted as one.
    `keys`: the fusions whose kernels have this name.
    """

    name: str
    keys: tuple[int, ...]
    calls: int
    seconds: float
    median: float
    apart: float
    bytes: int | None
    operations: int | None = None

    @property
    def bytes_per_second(self) -> float | None:
        """By the median; None if the bytes are unknown."""
        return self.bytes / self.median if self.bytes is not None and self.median else None


@dataclass(frozen=True)
class OtherRow:
    """Work other than kernels: an operator of ATen, a library's kernel on a GPU, or a part of torch.compile."""

    name: str
    kind: str
    calls: int
    seconds: float


@dataclass(frozen=True)
class Beside:
    """A group's time beside ATen's, on arguments like those it was compiled for; `why`: it was not timed."""

    key: int
    seconds: float | None
    aten_seconds: float | None
    why: str


@dataclass(frozen=True)
class MemoryPoint:
    """Bytes held at the end of a step: by the process, the pool in use and idle, warm results, and torch on the GPU."""

    seconds: float
    process: int
    pool_used: int
    pool_idle: int
    results: int
    gpu: int


@dataclass(frozen=True)
class Event:
    """One event of a step: `begin` in seconds after the step's, `kind` as in `parts`, `thread` "GPU" for a GPU's."""

    name: str
    kind: str
    begin: float
    seconds: float
    thread: str


@dataclass(frozen=True)
class ProfileReport:
    """`parts` are seconds of this thread by kind; they add up to `seconds`, the block's own time on the clock.

    `timeline` holds the events of the step with the median time, or of the block if it has no steps; at most 5,000.

    The part "recording" is the profiler's own time: an event costs up to a microsecond, which unprofiled calls do not
    pay.
    """

    seconds: float
    steps: tuple[float, ...]
    parts: dict[str, float]
    kernels: tuple[KernelRow, ...]
    others: tuple[OtherRow, ...]
    beside: tuple[Beside, ...]
    copy_rate: float
    copy_spread: float
    threads: int
    device: str = "cpu"
    memory: tuple[MemoryPoint, ...] = ()
    timeline: tuple[Event, ...] = ()

    @property
    def noise(self) -> str:
        """The reason why the numbers are unreliable; "" if they are reliable."""
        said = []
        middle, apart = spread(list(self.steps))
        if len(self.steps) >= 4 and apart > NOISY * middle:
            said.append(f"half of the steps differ by {apart / middle:.0%} of their median")
        if self.copy_spread > NOISY:
            said.append(f"half of some equal copies differ by {self.copy_spread:.0%} of their median")
        return f"this machine is too noisy for small differences: {' and '.join(said)}" if said else ""

    def to_json(self) -> str:
        """All fields, and for each kernel its rate, also relative to the copy rate."""
        found = dataclasses.asdict(self)
        for row, kernel in zip(found["kernels"], self.kernels):
            rate = kernel.bytes_per_second
            row.update(bytes_per_second=rate, of_copy_rate=rate / self.copy_rate if rate is not None else None)
        middle, apart = spread(list(self.steps))
        found.update(noise=self.noise, step_median=middle, step_apart=apart)
        return json.dumps(found, indent=1)

    def __str__(self) -> str:
        parts = self._head(), [""], self._kernels(), self._others(), self._besides(), self._held(), self._warning()
        return "\n".join(line for part in parts for line in part) + "\n"

    def _head(self) -> list[str]:
        lines = []
        if self.steps:
            middle, apart = spread(list(self.steps))
            lines.append(f"{len(self.steps)} steps, {_time(middle)} each (median; half of them within {_time(apart)})")
        shares = [f"{name} {_time(s)} ({s / self.seconds:.0%})" for name, s in _sorted(self.parts.items())]
        copies = f"copy rate of this machine, {self.threads} threads: {self.copy_rate / 1e9:,.1f} GB/s"
        return [*lines, f"{_time(self.seconds)} on the clock: {', '.join(shares)}", copies]

    def _kernels(self) -> list[str]:
        rows, cache = sorted(self.kernels, key=lambda k: -k.seconds), cache_bytes(self.device)
        cells = [
            (k.name, str(k.calls), _time(k.seconds), _time(k.median), _time(k.apart), _bytes(k.bytes),
             *_rate(k, self.copy_rate, cache))
            for k in rows[:_SHOWN]
        ]  # fmt: skip
        head = ("kernel", "calls", "all", "median", "spread", "bytes", "GB/s", "of copy")
        return [*_table(head, cells), *_more(rows)] if rows else ["no kernel ran"]

    def _others(self) -> list[str]:
        rows = sorted(self.others, key=lambda o: -o.seconds)
        cells = [(o.name, o.kind, str(o.calls), _time(o.seconds)) for o in rows[:_SHOWN]]
        return ["", *_table(("beside kernels", "kind", "calls", "all"), cells), *_more(rows)] if rows else []

    def _besides(self) -> list[str]:
        cells = [
            (str(b.key), _time(b.seconds), _time(b.aten_seconds), f"{b.aten_seconds / b.seconds:.2f} ×", "")
            if b.seconds and b.aten_seconds else (str(b.key), "", "", "", b.why)
            for b in self.beside
        ]  # fmt: skip
        return ["", *_table(("fusion", "its time", "ATen's", "faster", "not timed"), cells)] if cells else []

    def _held(self) -> list[str]:
        """Ten points of the timeline, evenly spaced."""
        at = sorted({n * (len(self.memory) - 1) // 9 for n in range(10)}) if self.memory else []
        cells = [
            (_time(m.seconds), *(_bytes(n) for n in (m.process, m.pool_used, m.pool_idle, m.results, m.gpu)))
            for m in (self.memory[n] for n in at)
        ]
        head = ("memory at", "process", "pool used", "idle", "warm results", "GPU")
        return ["", *_table(head, cells)] if cells else []

    def _warning(self) -> list[str]:
        return ["", self.noise] if self.noise else []


def _sorted(items: Iterable[tuple[str, float]]) -> list[tuple[str, float]]:
    return sorted(items, key=lambda item: -item[1])


def _more(rows: Sequence[Any]) -> list[str]:
    return [f"and {len(rows) - _SHOWN} more"] if len(rows) > _SHOWN else []


def _time(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}" if seconds < 1000 * scale else f"{seconds / scale:,.0f} {unit}"
    return f"{seconds / 1e-6:.3g} µs"


def _bytes(count: int | None) -> str:
    if count is None:
        return ""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count} B"


def _rate(row: KernelRow, copies: float, cache: int) -> tuple[str, str]:
    rate, count = row.bytes_per_second, row.bytes
    if rate is None or count is None:
        return "", ""
    return f"{rate / 1e9:.3g}", f"{rate / copies:.0%}" if count > cache else "in cache"


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(r[i]) for r in (head, *rows)) for i in range(len(head))]

    def line(cells: tuple[str, ...]) -> str:
        return "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths))).rstrip()

    return [line(head), line(tuple("-" * w for w in widths)), *map(line, rows)]


__all__ = ["NOISY", "Beside", "Event", "KernelRow", "MemoryPoint", "OtherRow", "ProfileReport"]
