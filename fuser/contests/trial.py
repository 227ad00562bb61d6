"""Trials: whether a kernel is slower than what it replaces, beyond noise.

Both run in turns. The time of a call is at most its seconds on the clock and at least the CPU seconds of its thread:
the two differ if the thread waited for a processor. A kernel is slower if two conditions hold. The least CPU time of
its calls exceeds, by a margin, the clock time of most of the other's calls. And calls of equal length would show this
order in fewer than one of `1 / _CHANCE` contests (a rank test, which assumes no distribution of noise). So noise makes
contests end without a verdict; it does not make a kernel lose.

With a limit below 1 the kernel has to prove itself: it also loses if its least time exceeds the limit times the
other's, or if its median does while its least time is not clearly below. This is for single operators, where only
better loops can gain, and the other is the very code that eager runs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any

import torch

from fuser import targets
from fuser.contests.middle import median
from fuser.lazy_dataclasses import dataclass

Clock = Callable[[], tuple[float, float]]  # seconds on the clock, and CPU seconds of this thread

_CHANCE = 0.005  # of an order among equal times that ends a contest
_SAMPLE_SECONDS = 2e-4  # a sample is several short calls, or one long call
_FEWEST, _MOST = 5, 15  # rounds: the fewest if a call takes long, and the most
_SECONDS = 0.02  # CPU seconds after which no round begins, except the fewest
_CLEARLY, _CLEAR_ROUNDS = 0.9, 3  # a kernel that takes less than this share of the other's time is not timed further
_FAR = 0.25  # nor is one that takes less than this share in the second call already
# A call with more page faults wrote to new pages, as the first calls do wherever malloc puts their results.
_FAULTS = 16
_COLD_SECONDS = 0.04  # of CPU time, as long as each call does so: malloc maps blocks of 32 MiB anew
_MAPPED = (32 << 20) // 4096  # page faults of such a block with the smallest pages
_SETTLING_SECONDS = 0.12  # the same for smaller blocks, which malloc reuses after a few calls
_COLD = 6  # samples
_PATIENCE = 3  # factor on these two limits in seconds on the clock, for threads that wait for processors


def clock() -> tuple[float, float]:
    """The present time: seconds on the clock, and CPU seconds of this thread."""
    return time.perf_counter(), time.thread_time()


def _page_faults() -> int:
    """The number of minor page faults of this process; 0 if the system does not tell."""
    try:
        import resource  # most processes find their kernels judged already
    except ImportError:  # not a Unix system
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@dataclass
class Samples:
    """Seconds of a call of one contestant in each round: upper bounds (clock) and lower bounds (CPU)."""

    most: list[float] = field(default_factory=list)
    least: list[float] = field(default_factory=list)
    calls: int = 1  # in a sample
    cold: int = 0  # samples that were repeated

    def take(self, function: Callable[..., Any], args: Sequence[Any], now: Clock) -> None:
        """Run one more sample. The first also finds the number of calls in a sample. Up to `_COLD` samples in all are
        repeated because they wrote to new pages that stay in the heap."""
        while True:
            faults, (start, began) = _page_faults(), now()
            for _ in range(self.calls):
                function(*args)
            end, ended = now()
            long = bool(self.most) or end - start >= _SAMPLE_SECONDS
            cold = self.cold < _COLD and _FAULTS * self.calls < _page_faults() - faults < _MAPPED * self.calls
            if long and not cold:
                break
            self.calls *= 1 if long else 2
            self.cold += long
        self.most.append((end - start) / self.calls)
        self.least.append(min(ended - began, end - start) / self.calls)


@dataclass(frozen=True)
class Outcome:
    """The kernel's time relative to the other's, and whether it is certainly slower.

    `faster`: it is certainly faster, even by the worse of the two clocks. The ratio is of the least times, or of the
    medians if these decided.
    """

    ratio: float
    slower: bool
    faster: bool = False


def compete(
    kernel: Callable[..., Any], other: Callable[..., Any], args: Sequence[Any], limit: float, now: Clock = clock
) -> Outcome:
    """Time two functions of `args` in turns, until it is known whether the kernel is `limit` times slower.

    3 rounds (5 with a limit below 1, 2 of long calls) if the kernel is clearly faster; else up to 15 within 20 ms of
    CPU time, and at least 5. Calls before the rounds (`_warm_up`) decide differences of a factor of 4. If both wait
    for processors, 2 rounds suffice for a kernel that is faster by each clock.
    """
    clear = _warm_up(kernel, other, args, limit, now)
    if clear is not None:
        return Outcome(clear[0], slower=False, faster=clear[1])
    mine, theirs = Samples(), Samples()
    turns = ((mine, kernel), (theirs, other))
    start = now()
    slower, enough = False, _FEWEST if limit < 1 else _CLEAR_ROUNDS
    for n in range(_MOST):
        for samples, function in turns if n % 2 == 0 else turns[::-1]:
            samples.take(function, args, now)
        late, waits = _is_over(start, now(), _SECONDS)
        slower = is_slower(mine.least, theirs.most, max(limit, 1.0))
        faster = _is_faster(mine, theirs, min(_CLEARLY, limit), waits)
        if slower or faster and n + 1 >= (2 if late or waits else enough) or late and n + 1 >= _FEWEST:
            break
    ratio = min(mine.most) / min(theirs.most)
    if limit < 1 and not slower:
        usual = median(mine.most) / median(theirs.most)
        slower = ratio > limit or usual > limit and ratio > _CLEARLY * limit
        ratio = max(ratio, usual) if slower else ratio
    return Outcome(ratio, slower, not slower and _is_faster(mine, theirs, min(_CLEARLY, limit), waits=False))


def _is_over(start: tuple[float, float], end: tuple[float, float], seconds: float) -> tuple[bool, bool]:
    """Whether `seconds` of CPU time have passed, and whether `_PATIENCE` times as many have on the clock."""
    wall, cpu = _between(start, end)
    return cpu > seconds, wall > _PATIENCE * seconds


def _is_faster(mine: Samples, theirs: Samples, limit: float, waits: bool) -> bool:
    """Whether the kernel's least time is at worst below `limit` of the other's; if both wait, by each clock."""
    fastest = min(mine.most)
    if fastest < limit * min(theirs.least):
        return True
    return waits and fastest < limit * min(theirs.most) and min(mine.least) < limit * min(theirs.least)


def _warm_up(
    kernel: Callable[..., Any], other: Callable[..., Any], args: Sequence[Any], limit: float, now: Clock
) -> tuple[float, bool] | None:
    """Call both in turns, at least twice, until they write to no new pages; once suffices if a call takes long.

    Returns the ratio of the kernel's time to the other's once a call after the first decides: below `_FAR` by the
    worse clock, which is certain, or if both wait for processors, below twice that by each clock. None if no call
    does.
    """
    far, start = _FAR * min(limit, 1.0), now()
    for n in range(_MOST):
        faults, begun = _page_faults(), now()
        kernel(*args)
        middle, before = now(), _page_faults()
        other(*args)
        done, after = now(), _page_faults()
        mine, theirs = _between(begun, middle), _between(middle, done)
        if n > 0 and after - before <= _FAULTS:
            if mine[0] < far * theirs[1]:
                return mine[0] / theirs[1], True
            waits = _is_over(start, done, _SECONDS)[1]
            if waits and mine[0] < 2 * far * theirs[0] and mine[1] < 2 * far * theirs[1]:
                return mine[0] / theirs[0], False
        new = after - faults > _FAULTS
        settles = new and max(before - faults, after - before) < _MAPPED
        if n > 0 and not new or any(_is_over(start, done, _SETTLING_SECONDS if settles else _COLD_SECONDS)):
            break
    return None


def _between(start: tuple[float, float], end: tuple[float, float]) -> tuple[float, float]:
    return end[0] - start[0], end[1] - start[1]


def is_slower(mine: Sequence[float], theirs: Sequence[float], limit: float) -> bool:
    """Whether the times of equally many calls show that the first take more than `limit` times as long.

    All of the first have to exceed `limit` times the second without its `m` longest. Of all orders of 2n equally
    distributed numbers, a share of C(n + m, m) / C(2n, n) has this property; `m` is the largest with a share of at
    most `_CHANCE`.
    """
    n = len(mine)
    orders = math.comb(2 * n, n)
    allowed = [m for m in range(n) if math.comb(n + m, m) <= _CHANCE * orders]
    return bool(allowed) and min(mine) > limit * sorted(theirs)[n - 1 - allowed[-1]]


def seconds_a_call(function: Callable[..., Any], args: Sequence[Any], least: float) -> float:
    """Seconds of a call, averaged over as many as take `least` seconds; a GPU is synchronised."""
    away = (a.device for a in args if isinstance(a, torch.Tensor) and not targets.is_host(a.device))
    device = next(away, None)
    done: Callable[[], Any] = (lambda: None) if device is None else torch.get_device_module(device).synchronize
    calls = 0
    done()
    start = time.perf_counter()
    while True:
        for _ in range(max(1, calls)):
            function(*args)
        done()
        calls += max(1, calls)
        spent = time.perf_counter() - start
        if spent >= least:
            return spent / calls


__all__ = ["Clock", "Outcome", "clock", "compete", "is_slower", "seconds_a_call"]
