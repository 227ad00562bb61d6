"""Whether noise can make a good kernel lose, or a slow one stay: contests on simulated machines."""

from __future__ import annotations

import random

import pytest

from fuser.contests import trial as contest


class Machine:
    """A clock that work moves on. `noise(machine, seconds)` gives the CPU and the waiting time of some work."""

    def __init__(self, noise, seed: int) -> None:
        self.random, self.noise = random.Random(seed), noise
        self.wall = self.cpu = 0.0
        self.calls = 0

    def work(self, seconds: float):
        def call() -> None:
            self.calls += 1
            busy, waiting = self.noise(self, seconds)
            self.cpu += busy
            self.wall += busy + waiting

        return call

    def now(self) -> tuple[float, float]:
        return self.wall, self.cpu


def quiet(machine: Machine, seconds: float) -> tuple[float, float]:
    return seconds * machine.random.uniform(1.0, 1.02), 0.0


def jitter(machine: Machine, seconds: float) -> tuple[float, float]:
    """Caches and memory shared with others: CPU time itself varies by up to half."""
    return seconds * machine.random.uniform(1.0, 1.5), 0.0


def loaded(machine: Machine, seconds: float) -> tuple[float, float]:
    """Eight processes on two processors: after 3 ms of work on average the thread waits for others."""
    busy, waiting = seconds * machine.random.uniform(1.0, 1.1), 0.0
    left = machine.random.expovariate(1 / 3e-3)
    while left < busy:
        waiting += machine.random.uniform(3e-3, 20e-3)
        left += machine.random.expovariate(1 / 3e-3)
    return busy, waiting


def bursts(machine: Machine, seconds: float) -> tuple[float, float]:
    """Every other 5 ms somebody else takes most of the memory's bandwidth."""
    return seconds * (3.0 if int(machine.wall / 5e-3) % 2 else 1.0) * machine.random.uniform(1.0, 1.05), 0.0


def slowing(machine: Machine, seconds: float) -> tuple[float, float]:
    """The processor's clock falls to half within 20 ms."""
    return seconds * (1 + min(machine.wall / 20e-3, 1.0)), 0.0


NOISES = (quiet, jitter, loaded, bursts, slowing)


def losses(noise, seconds: float, ratio: float, contests: int) -> int:
    """How many of so many contests a kernel loses that takes `ratio` times `seconds`."""
    found = 0
    for seed in range(contests):
        machine = Machine(noise, seed)
        kernel, other = machine.work(seconds * ratio), machine.work(seconds)
        found += contest.compete(kernel, other, (), 1.05, machine.now).slower
    return found


@pytest.mark.parametrize("seconds", [5e-6, 4e-4, 2e-2])
@pytest.mark.parametrize("noise", NOISES)
def test_noise_does_not_make_a_good_kernel_lose(noise, seconds):
    assert losses(noise, seconds, 1.0, 100) == losses(noise, seconds, 0.6, 20) == 0


@pytest.mark.parametrize("seconds", [5e-6, 4e-4, 2e-2])
@pytest.mark.parametrize("noise", NOISES)
def test_a_slow_kernel_loses_where_anyone_can_tell(noise, seconds):
    assert losses(quiet, seconds, 1.15, 20) == 20
    assert losses(noise, seconds, 40.0, 20) >= (12 if noise is loaded else 19)
    if noise is not loaded or seconds < 1e-3:  # else nobody can tell a call that waits from one that is slow
        assert losses(noise, seconds, 4.0, 20) >= 19


def test_a_contest_costs_few_calls():
    """A kernel that is clearly faster is called thrice, another one 6 times where calls are long."""
    for ratio, rounds in ((0.5, 3), (1.0, 6), (2.0, 6)):
        machine = Machine(quiet, 0)
        contest.compete(machine.work(ratio * 0.1), machine.work(0.1), (), 1.05, machine.now)
        assert machine.calls == 2 * rounds
    machine = Machine(quiet, 0)
    contest.compete(machine.work(1e-5), machine.work(1e-5), (), 1.05, machine.now)
    assert machine.wall < 2 * 15 * 6e-4


def stalled(machine: Machine, seconds: float) -> tuple[float, float]:
    """Another process on each processor: every parallel region waits 16 ms for its threads, and spins for a part."""
    return seconds + machine.random.uniform(1e-3, 6e-3), machine.random.uniform(9e-3, 15e-3)


def test_a_kernel_that_is_faster_by_either_clock_is_not_timed_long_where_all_calls_wait():
    calls = []
    for seed in range(20):
        machine = Machine(stalled, seed)
        one = machine.work(4e-4)
        found = contest.compete(one, lambda one=one: [one() for _ in range(4)], (), 1.05, machine.now)
        assert not found.slower
        calls.append(machine.calls // 5)
    assert sorted(calls)[10] <= 3, calls
    for seed in range(20):
        machine = Machine(stalled, seed)
        one = machine.work(4e-4)
        assert contest.compete(lambda one=one: [one() for _ in range(16)], one, (), 1.05, machine.now).slower


@pytest.mark.parametrize("seconds", [2e-5, 4e-4])
@pytest.mark.parametrize("noise", [quiet, jitter])
def test_new_pages_of_the_first_calls_decide_nothing(monkeypatch, noise, seconds):
    """Both contestants write into new pages at first, the other one more often: the kernel is slower all the same."""
    for seed in range(20):
        machine, faults = Machine(noise, seed), [0]

        def cold(calls: int, seconds: float, machine: Machine = machine, faults: list[int] = faults):
            warm, left = machine.work(seconds), [calls]

            def call() -> None:
                if left[0] > 0:
                    left[0] -= 1
                    faults[0] += 1000
                    machine.work(8 * seconds)()
                else:
                    warm()

            return call

        monkeypatch.setattr(contest, "_page_faults", lambda faults=faults: faults[0])
        found = contest.compete(cold(1, seconds * 1.3), cold(5, seconds), (), 1.05, machine.now)
        assert found.slower or noise is jitter and 1.0 < found.ratio


@pytest.mark.parametrize("noise", [quiet, jitter, slowing])
def test_with_a_limit_below_1_a_kernel_has_to_be_faster(noise):
    for seconds in (5e-6, 4e-4, 2e-2):
        for ratio, slower in ((0.8, False), (1.0, True), (1.3, True)):
            found = []
            for seed in range(20):
                machine = Machine(noise, seed)
                kernel, other = machine.work(seconds * ratio), machine.work(seconds)
                found.append(contest.compete(kernel, other, (), 0.97, machine.now).slower)
            assert found.count(slower) >= (20 if noise is quiet else 14), (seconds, ratio)


@pytest.mark.parametrize("seconds", [5e-6, 4e-4, 2e-2])
@pytest.mark.parametrize("noise", NOISES)
def test_a_kernel_that_is_clearly_faster_loses_by_no_limit(noise, seconds):
    """Nor is a verdict told with a number that contradicts it."""
    for seed in range(100):
        machine = Machine(noise, seed)
        found = contest.compete(machine.work(seconds * 0.4), machine.work(seconds), (), 0.97, machine.now)
        assert not found.slower or found.ratio > 0.97
        assert not found.slower or noise in (loaded, bursts) and seconds > 1e-3  # its own few calls all were disturbed


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_few_rounds_are_no_proof(n):
    assert not contest.is_slower([9.0] * n, [1.0] * n, 1.05)


def test_some_long_calls_of_the_other_are_left_out():
    assert contest.is_slower([1.2] * 10, [1.0] * 7 + [9.0] * 3, 1.05)
    assert not contest.is_slower([1.2] * 10, [1.0] * 5 + [9.0] * 5, 1.05)
    assert not contest.is_slower([1.0] + [9.0] * 9, [1.0] * 10, 1.05)
