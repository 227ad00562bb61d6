"""Kernels run in teams of as many threads as torch's: a smaller one would end threads that libraries start again."""

from __future__ import annotations

import os
import sys

import pytest
import torch

import fuser
from fuser.runtime import launcher, python_launcher

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="threads are listed by /proc"),
    pytest.mark.skipif(not fuser.can_fuse_on_cpu(), reason="needs a C++ compiler"),
    pytest.mark.skipif(python_launcher._openmp() is None, reason="torch has no OpenMP of its own here"),
]
MANY = 6


def threads() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def started_between(function) -> set[str]:
    """Threads that are new once `function` and a call of ATen's by all threads have run."""
    large = torch.ones(1 << 20)
    found: set[str] = set()
    for _ in range(3):
        large.exp()
        before = threads()
        function()
        large.exp()
        found |= threads() - before
    return found


@pytest.fixture(autouse=True)
def many():
    torch.set_num_threads(MANY)
    assert launcher.wait(120)


def test_a_kernel_of_few_threads_ends_no_others():
    handle = fuser.fusion_handle(fuser.register_fusion(torch.fx.symbolic_trace(lambda x: x + 1.5)))
    x = torch.randn(4, 20000)  # worth two threads
    assert handle(x).equal(x + 1.5) and handle(x).equal(x + 1.5) and handle.hits >= 1
    assert not started_between(lambda: handle(x))


def test_several_calls_at_once_end_no_others():
    handle = fuser.fusion_handle(fuser.register_fusion(torch.fx.symbolic_trace(lambda x: x * 2.5)))
    calls = [torch.randn(1, 1 << 19) for _ in range(5)]  # worth two threads
    if getattr(handle, "each", None) is None:
        pytest.skip("the launcher in Python has no calls at once")
    handle(calls[0])
    got = handle.each(1, True, *calls)
    assert all(g.equal(x * 2.5) for g, x in zip(got, calls))
    assert not started_between(lambda: handle.each(1, False, *calls))


def test_the_launcher_in_python_does_as_the_native_one(monkeypatch):
    run = python_launcher._Run(None, None, None)
    seen = []
    monkeypatch.setattr(python_launcher._Run, "part", lambda self, entry, a, b, i: seen.append((a, b, i)) or 0)
    units, work = 3, 1 << 20
    assert python_launcher.thread_count(units, work) == 3
    assert run.step(None, units, work) == 0
    assert sorted(seen) == [(0, 1, 0), (1, 2, 1), (2, 3, 2)]
    assert not started_between(lambda: run.step(None, units, work))
