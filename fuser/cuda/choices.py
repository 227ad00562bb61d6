"""Races on a GPU. Their choices are kept on disk, for one device, one pair of versions and one class of inputs."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fuser import forks
from fuser.contests import records
from fuser.contests.records import MARGIN, Choice, choices, decide, remember
from fuser.cuda import toolchain

ROUNDS = 15  # of a race: each runs every contestant once
_FLUSH_BYTES = 1 << 28  # more than any cache
_racing = forks.lock()  # kernels are compiled in many threads, but only one race runs at a time


def name_of(*parts: Any) -> str:
    """The name of a choice: its subject, the device and the versions."""
    device = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    return records.name_of(device, torch.version.cuda, toolchain.triton_version(), *parts)


def find(name: str) -> Choice | None:
    """An earlier choice; None if there is none or it cannot be read."""
    return records.find(name, toolchain.cache_folder())


def keep(name: str, choice: Choice) -> None:
    """Store a choice in this process and on disk."""
    records.keep(name, choice, toolchain.cache_folder())


def of_class(
    device: torch.device, parts: Sequence[Any], runs: Callable[[], Mapping[str, Callable[[], Any]]], incumbent: str,
    what: str,
) -> Choice | None:  # fmt: skip
    """The choice for a class of calls on a device; the first call of a class is raced. `runs()` makes the contestants.

    None where nothing can be raced: without a GPU, while a CUDA graph is recorded, or without memory for them.
    """
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    if not torch.cuda.is_available() or torch.cuda.is_current_stream_capturing():
        return None
    with torch.cuda.device(device), unset_fake_temporarily():
        name = name_of(*parts)
        found = find(name)
        if found is None:
            try:
                found = race(runs(), incumbent)
            except torch.cuda.OutOfMemoryError:
                return None
            found = dataclasses.replace(found, what=what)
            keep(name, found)
        return found


def race(runs: Mapping[str, Callable[[], Any]], incumbent: str, failed: Sequence[tuple[str, str]] = ()) -> Choice:
    """Time `runs` on the current device in turns, each with the cache flushed before.

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


__all__ = [
    "MARGIN", "ROUNDS", "Choice", "choices", "decide", "find", "keep", "name_of", "of_class", "race", "remember",
]  # fmt: skip
