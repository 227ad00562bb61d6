"""malloc keeps freed memory between calls: counted in page faults, in processes of their own."""

from __future__ import annotations

import os
import pathlib
import platform

import pytest

from tests import forked

ROOT = pathlib.Path(__file__).parents[2]

SCRIPT = """
import resource, sys, torch
from fuser.runtime import heap
if sys.argv[1] == "warm":
    heap.keep_warm()
def work():
    return [torch.ones(3 << 18) for _ in range(6)]
for _ in range(3):
    work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str, **environment: str) -> int:
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return int(forked.run(["-c", SCRIPT, how], env, check=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another malloc")
def test_pages_stay():
    # With a fixed threshold malloc does not learn from what is freed: what it then keeps would depend on chance.
    cold, warm = faults("cold", MALLOC_MMAP_THRESHOLD_=str(128 << 10)), faults("warm")
    assert warm < cold / 4, (cold, warm)
