"""Peak memory: what the process has resident, and what tensors take, which the machine's mood does not change."""

from __future__ import annotations

import pathlib
import resource
from collections.abc import Callable
from typing import Any

import torch


def reset_peak() -> bool:
    """Start a new count of the most resident memory; False where the system cannot."""
    try:
        pathlib.Path("/proc/self/clear_refs").write_text("5")
        return True
    except OSError:
        return False


def peak_mib() -> float:
    """The most resident memory since the last reset, in MiB."""
    try:
        for line in pathlib.Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def peak_tensor_mib(call: Callable[[], Any]) -> float:
    """The most MiB that tensors made during a call take at once, with all that fuser keeps warm.

    torch's allocator tells each block as it comes and goes. Blocks that fuser keeps between calls count in full: those
    of large results that were there before, and those of its pool for temporaries whenever they were taken.
    """
    before = _kept_bytes()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        call()
    results = profile.profiler.kineto_results  # type: ignore[union-attr]
    blocks = sorted((e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]")
    now = peak = 0
    for _, nbytes in blocks:
        now += nbytes
        peak = max(peak, now)
    return (before + peak + _pool_bytes()) / (1 << 20)


def _kept_bytes() -> int:
    try:
        from fuser.runtime import warm
    except ImportError:
        return 0
    return int(warm.outputs.stats()["held_bytes"])


def _pool_bytes() -> int:
    try:
        from fuser.runtime import pool
    except ImportError:
        return 0
    return int(pool.stats()["peak_bytes"])
