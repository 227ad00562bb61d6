"""Races: which of several calls on the CPU is the fastest. All give the same result, and run in turns.

A contestant's time is its fastest sample; to replace the incumbent, its median has to be smaller, too. A contestant
that raises or gives another result is left out, with the reason. If memory does not suffice, the incumbent stays, and
nothing is kept on disk.

The clock is this thread's CPU time if libraries use one thread: calls that wait for a processor then take no longer.
With several threads it is the wall clock, and calls that were stalled are timed again. Of calls that take long, the
one that gives the result to compare is the first sample, and one more suffices if it agrees.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any

import torch

from fuser import forks
from fuser.contests import records
from fuser.contests.middle import median
from fuser.contests.records import Choice
from fuser.lazy_dataclasses import dataclass
from fuser.runtime import process

_SAMPLE_SECONDS = 1.5e-4  # a sample is several short calls, or one long call
_FEWEST, _MOST = 3, 15  # samples, rounds
_SECONDS, _NOISY_SECONDS = 0.02, 0.06  # seconds after which no round begins, except the fewest
_NOISE = 1.25  # median over fastest time, from which a machine counts as noisy
_BUSY = 2.0  # the same, from which nothing is kept on disk
_LOADED = 1.25  # load per processor, from which nothing is kept on disk
_CLEARLY = 1.05  # a contestant whose fastest time is this times the best one's median is not timed further
_LONG, _FEWEST_LONG = 0.005, 2  # seconds of a call from which fewer samples suffice, if they agree
# The largest difference of two contestants' results, relative to the largest absolute value.
_TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
# A call that ran less than this share of its time on a processor was stalled: a library's threads waited for
# processors.
_LEAST_SHARE = 0.6
_PAUSES = (0.05, 0.15)  # seconds before calls that were stalled are timed again
_QUIET_SECONDS = 1.5  # most seconds that a contest waits for this process's compilers to end
_MOST_SAMPLE = 0.005  # seconds on the wall clock after which a sample has enough calls by any clock
_racing = forks.lock()
_stalled_to_the_end = False  # the last contest: on a machine that stays busy, later ones try once
Clock = Callable[[], float]


@dataclass(frozen=True)
class Contestant:
    """`run` is timed; `result` gives the value to compare with the incumbent's, by default `run` itself."""

    run: Callable[[], Any]
    result: Callable[[], Any] | None = None


@dataclass
class _Samples:
    run: Callable[[], Any]
    calls: int = 1  # in a sample
    seconds: list[float] = field(default_factory=list)
    share: float = 0.0  # the largest share of a sample that this thread was on a processor

    def take(self, now: Clock) -> None:
        while not self._is_taken(self.run, now):
            self.calls *= 2

    def check(self, result: Callable[[], Any], now: Clock) -> Any:
        """The result, from a call that is the first sample if it takes long."""
        made: list[Any] = []
        if not self._is_taken(lambda: made.append(result()), now) or self.seconds[0] < _LONG:
            self.seconds.clear()
            self.share = 0.0
        return made[0]

    def _is_taken(self, run: Callable[[], Any], now: Clock) -> bool:
        """Time calls. False if they are too few for a first sample, which is then not taken."""
        wall, cpu = time.perf_counter(), time.thread_time()
        start = now()
        for _ in range(self.calls):
            run()
        spent = now() - start
        wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
        if not self.seconds and spent < _SAMPLE_SECONDS and wall < _MOST_SAMPLE:
            return False
        self.seconds.append(spent / self.calls)
        self.share = max(self.share, cpu / max(wall, 1e-9))
        return True

    def is_stalled(self, now: Clock) -> bool:
        """Whether its calls waited for processors in all samples, and the clock counts that."""
        return now is not time.thread_time and self.share < _LEAST_SHARE


def failing(error: Exception) -> Contestant:
    """A contestant that could not be built, with the error to report."""

    def run() -> Any:
        raise error

    return Contestant(run)


class Unfinished(Exception):
    """A contest that ended without a verdict: the reason as a sentence, and the contestant to take, None for none."""

    def __init__(self, why: str, stays: str | None = None) -> None:
        super().__init__(why)
        self.stays = stays


def race(
    contestants: Mapping[str, Contestant], incumbent: str, what: str = "", now: Clock | None = None,
    favoured: str = "",
) -> tuple[Choice, bool]:  # fmt: skip
    """The fastest of some contestants, and whether the machine was quiet enough to keep that for other processes.

    All have to give the result of `incumbent`, one of them, which stays unless another is clearly faster. If
    `favoured` gives that result, it stays in place of the incumbent. Unfinished if memory does not suffice, the
    incumbent itself fails, or calls are stalled whenever they are timed.
    """
    with _racing, torch.no_grad():
        try:
            _wait_for_compilers()
            now = now or _clock()
            fit, failed = _checked(contestants, incumbent, now)
            incumbent = favoured if favoured in fit else incumbent
            seconds = _unstalled(fit, now, incumbent)
        except (MemoryError, RuntimeError) as e:
            if _is_lack_of_memory(e):
                raise Unfinished("too little memory for a contest") from e
            raise
    choice = _judged(seconds, incumbent)
    lasting = all(median(s) <= _BUSY * min(s) for s in seconds.values()) and not _is_loaded()
    reason = "; ".join([choice.reason, *([] if lasting else ["the machine was busy"]), *failed])
    return dataclasses.replace(choice, what=what, reason=reason), lasting


def _clock() -> Clock:
    """The clock of calls: CPU time of this thread if it does all the work."""
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def _is_loaded() -> bool:
    """Whether more threads are running than the machine has processors, so that a library's threads take turns.

    That slows down contestants unequally, but each one's samples evenly, so they do not show it.
    """
    try:
        return os.getloadavg()[0] > _LOADED * (os.cpu_count() or 1)
    except OSError:
        return False


def _checked(
    contestants: Mapping[str, Contestant], incumbent: str, now: Clock = time.perf_counter
) -> tuple[dict[str, _Samples], list[str]]:  # fmt: skip
    """Contestants that give the incumbent's result, and the reasons why others do not compete."""
    samples = {name: _Samples(c.run) for name, c in contestants.items()}
    first = contestants[incumbent]
    try:
        want = samples[incumbent].check(first.result or first.run, now)
    except Exception as e:
        if _is_lack_of_memory(e):
            raise
        raise Unfinished(f"{incumbent} failed: {said(e)}") from e
    fit, failed = {incumbent: samples[incumbent]}, []
    for name, c in contestants.items():
        if name == incumbent:
            continue
        try:
            why = difference(samples[name].check(c.result or c.run, now), want)
        except Exception as e:
            if _is_lack_of_memory(e):
                raise
            why = said(e)
        if why is None:
            fit[name] = samples[name]
        else:
            failed.append(f"{name} left out: {why}")
    return fit, failed


def said(e: BaseException) -> str:
    """An error as one line."""
    return f"{type(e).__name__}: {(str(e).strip() or '.').splitlines()[0]}"


def _is_lack_of_memory(e: BaseException) -> bool:
    if isinstance(e, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(e, RuntimeError) and ("can't allocate memory" in str(e) or "not enough memory" in str(e))


def difference(got: torch.Tensor, want: torch.Tensor) -> str | None:
    """How a result differs from another by more than rounding, as a sentence; None if it does not."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"its result is {got.dtype} of {tuple(got.shape)}, not {want.dtype} of {tuple(want.shape)}"
    if not want.numel():
        return None
    allowed = _TOLERANCES.get(want.dtype, 0.0) * float(want.abs().max())
    error = float((got - want).abs().max())
    return None if error <= allowed else f"its result differs by up to {error:.3g}, {allowed:.3g} is allowed"


def _wait_for_compilers() -> None:
    """Wait for this process's compilers: they take processors from the threads of libraries."""
    end = time.perf_counter() + _QUIET_SECONDS
    while process.are_running() and time.perf_counter() < end:
        time.sleep(0.005)


def _unstalled(samples: dict[str, _Samples], now: Clock, incumbent: str) -> dict[str, list[float]]:
    """The seconds of each contestant's calls, taken when calls are not stalled."""
    global _stalled_to_the_end
    stalled = samples
    for pause in (0.0, *(() if _stalled_to_the_end else _PAUSES)):
        time.sleep(pause)
        _time(stalled, now)
        stalled = {name: _Samples(s.run) for name, s in samples.items() if s.is_stalled(now)}
        if not stalled:
            break
        samples = samples | stalled
    _stalled_to_the_end = bool(stalled)
    if stalled:
        raise Unfinished("the machine was busy: threads waited for processors whenever calls were timed", incumbent)
    return {name: s.seconds for name, s in samples.items()}


def _time(samples: Mapping[str, _Samples], now: Clock) -> None:
    """Take samples of each contestant, in rounds."""
    racing = list(samples)
    start = now()
    for n in range(_MOST):
        for name in racing if n % 2 == 0 else racing[::-1]:
            samples[name].take(now)
        best = min((s.seconds for s in samples.values()), key=min)
        if any(len(samples[name].seconds) < _fewest(samples[name].seconds) for name in racing):
            continue
        racing = [name for name in racing if min(samples[name].seconds) <= _CLEARLY * median(best)]
        if len(racing) < 2 or now() - start > (_SECONDS if _is_steady(best) else _NOISY_SECONDS):
            break


def _fewest(seconds: Sequence[float]) -> int:
    """The number of samples after which a contestant may be out: fewer if calls take long and the samples agree."""
    return _FEWEST_LONG if min(seconds) >= _LONG and _is_steady(seconds) else _FEWEST


def _is_steady(seconds: Sequence[float]) -> bool:
    return median(seconds) <= _NOISE * min(seconds)


def _judged(seconds: Mapping[str, list[float]], incumbent: str) -> Choice:
    """The contestant with the fastest time, unless the incumbent's median is not longer than its own."""
    choice = records.decide({name: 1e6 * min(s) for name, s in seconds.items()}, incumbent)
    if choice.winner == incumbent:
        return choice
    if median(seconds[choice.winner]) > records.MARGIN * median(seconds[incumbent]):
        return dataclasses.replace(choice, winner=incumbent, reason="raced; too noisy to tell")
    return choice


__all__ = ["Contestant", "Unfinished", "difference", "failing", "race", "said"]
