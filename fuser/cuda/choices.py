"""What races on the device found out, kept on disk: good for one device, one pair of versions, one class of inputs."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fuser import forks
from fuser.cuda import toolchain
from fuser.runtime import files

FORMAT = 2
MARGIN = 0.97  # a rival has to take less than this of the incumbent's time
ROUNDS = 15
_FLUSH_BYTES = 1 << 28  # more than any cache


@dataclass(frozen=True)
class Choice:
    """Who won, why it was decided so, each contestant's microseconds in order of speed, and what it was about."""

    winner: str
    reason: str
    times: tuple[tuple[str, float], ...]
    what: str = ""

    def __str__(self) -> str:
        times = ", ".join(f"{name} {t:.1f} µs" for name, t in self.times[:4])
        return f"{self.what}: {self.winner} ({self.reason}{'; ' if times else ''}{times})"


_racing = forks.lock()  # kernels are compiled in many threads, and race alone
_made: dict[str, Choice] = {}  # by name, in this process


def choices() -> tuple[Choice, ...]:
    """What was decided by races: those of this process, and those that it took from the disk."""
    return tuple(_made.values())


def name_of(*parts: Any) -> str:
    """The name of a choice: what it is about, on this device with these versions."""
    device = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    text = repr((FORMAT, device, torch.__version__, torch.version.cuda, toolchain.triton_version(), *parts))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def find(name: str) -> Choice | None:
    """An earlier choice; None if there is none that can be read."""
    if name in _made:
        return _made[name]
    folder = toolchain.cache_folder()
    if folder is None:
        return None
    try:
        found = json.loads(files.read(folder / f"{name}.choice.json") or b"")
        times = tuple((str(n), float(t)) for n, t in found["times"])
        choice = Choice(str(found["winner"]), str(found["reason"]), times, str(found["what"]))
    except (ValueError, KeyError, TypeError):
        return None
    _made[name] = choice
    return choice


def remember(name: str, choice: Choice) -> None:
    """Remember a choice in this process."""
    _made[name] = choice


def keep(name: str, choice: Choice) -> None:
    """Remember a choice here and on disk."""
    remember(name, choice)
    folder = toolchain.cache_folder()
    if folder is not None:
        toolchain.write(folder / f"{name}.choice.json", json.dumps(dataclasses.asdict(choice)).encode())


def decide(times: Mapping[str, float], incumbent: str, failed: Sequence[tuple[str, str]] = ()) -> Choice:
    """The fastest by microseconds, if it beats the incumbent by a margin; else the incumbent."""
    ordered = tuple(sorted(times.items(), key=lambda item: item[1]))
    best = ordered[0][0]
    reason = "raced"
    if best != incumbent and times[best] > MARGIN * times[incumbent]:
        best, reason = incumbent, "raced; nothing was clearly faster"
    if failed:
        reason += f"; {len(failed)} did not compile"
    return Choice(best, reason, ordered)


def race(runs: Mapping[str, Callable[[], Any]], incumbent: str, failed: Sequence[tuple[str, str]] = ()) -> Choice:
    """Time `runs` on the current device, turn by turn, each with the cache flushed before.

    All run once before that, while others may race: a first call compiles kernels, which may have races of their own.
    """
    with torch.no_grad():
        for fn in runs.values():
            fn()
    with _racing:
        return _timed(runs, incumbent, failed)


def _timed(runs: Mapping[str, Callable[[], Any]], incumbent: str, failed: Sequence[tuple[str, str]]) -> Choice:
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    found: dict[str, list[float]] = {name: [] for name in runs}
    with torch.no_grad():
        for _ in range(ROUNDS):
            for name, fn in runs.items():
                begin, end = _event(), _event()
                flush.zero_()
                begin.record()
                fn()
                end.record()
                end.synchronize()
                found[name].append(1000 * begin.elapsed_time(end))
    return decide({name: statistics.median(times) for name, times in found.items()}, incumbent, failed)


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call,unused-ignore]
