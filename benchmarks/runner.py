"""Interleaved timing: every contestant runs once per round, so that a noisy machine is noisy for all of them."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Call:
    """A function and the arguments it is timed with."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Timing:
    """Seconds per call, one sample per round."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle sample, in seconds."""
        return statistics.median(self.samples)

    def quantile(self, q: float) -> float:
        """The sample at rank q of 0..1, in seconds, interpolated."""
        ordered = sorted(self.samples)
        at = q * (len(ordered) - 1)
        low = math.floor(at)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (at - low)

    def record(self) -> dict[str, float]:
        """What goes into the JSON file, in seconds."""
        return {"median": self.median, "p10": self.quantile(0.1), "p90": self.quantile(0.9), "n": len(self.samples)}


@dataclass(frozen=True)
class Budget:
    """How long to measure: per row and sample in seconds, and the bounds on rounds."""

    row_seconds: float = 3.0
    sample_seconds: float = 2e-3
    min_rounds: int = 9
    max_rounds: int = 41

    @staticmethod
    def of(quick: bool) -> Budget:
        """The usual budget, or one for checking that things run."""
        return Budget(0.3, 5e-4, 3, 7) if quick else Budget()


def synchronize(device: str) -> None:
    """Wait for the device's queue; nothing on the CPU."""
    if device == "cuda":
        torch.cuda.synchronize()


Clock = Callable[[], float]


def sample(call: Call, inner: int, device: str, clock: Clock = time.perf_counter) -> float:
    """Seconds per call of `inner` calls in a row; results are dropped inside the timed region, as a user's would be."""
    fn, args = call.fn, call.args
    synchronize(device)
    start = clock()
    for _ in range(inner):
        fn(*args)
    synchronize(device)
    return (clock() - start) / inner


def calibrate(call: Call, budget: Budget, device: str, clock: Clock = time.perf_counter) -> int:
    """Calls per sample so that a sample lasts `sample_seconds`; warms the call up on the way."""
    sample(call, 2, device, clock)
    once = min(sample(call, 1, device, clock) for _ in range(3))
    return max(1, min(100_000, math.ceil(budget.sample_seconds / max(once, 1e-7))))


def interleave(
    calls: Mapping[str, Call],
    budget: Budget,
    device: str = "cpu",
    clock: Clock = time.perf_counter,
    equal: bool = False,
) -> dict[str, Timing]:
    """Time the calls round by round (A B C, A B C, ...) and return a Timing for each.

    With `time.thread_time` as the clock, calls that run in this thread alone are not disturbed by other processes. With
    `equal` a sample has as many calls for each, behind one that is not timed: two contestants whose results come from
    the same heap would keep each other's memory in the caches, and a third one would pay for both.
    """
    inner = {name: calibrate(call, budget, device, clock) for name, call in calls.items()}
    if equal:
        inner = dict.fromkeys(inner, max(inner.values()))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    start = time.perf_counter()
    for done in range(budget.max_rounds):
        if done >= budget.min_rounds and time.perf_counter() - start > budget.row_seconds:
            break
        for name, call in calls.items():
            if equal:
                call.fn(*call.args)
            samples[name].append(sample(call, inner[name], device, clock))
    return {name: Timing(tuple(s)) for name, s in samples.items()}


def copy_call(num_bytes: int, device: str) -> Call:
    """The limit: a warm copy that moves `num_bytes` in all, half read and half written."""
    half = max(1, num_bytes // 2)
    source = torch.ones(half, dtype=torch.uint8, device=device)
    target = torch.zeros(half, dtype=torch.uint8, device=device)
    return Call(target.copy_, (source,))


def geomean(values: Sequence[float]) -> float:
    """The geometric mean; nan of nothing."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan
