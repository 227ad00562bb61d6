"""`fuser.profile()`: the time of a block of calls by kernel, and the kernels' rates relative to a copy.

torch's profiler records the events; this module adds what the profiler does not know: the group of each kernel, the
bytes that its plan reads and writes at the sizes of the calls, and the machine's own copy rate.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import pathlib
import re
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity

from fuser.debug.profile_report import Beside, Event, KernelRow, MemoryPoint, OtherRow, ProfileReport
from fuser.debug.relowering import lowered_of
from fuser.debug.timing import measure
from fuser.debug.traffic import copy_rate, plan_bytes, plan_operations, spread
from fuser.errors import FuserError, GraphError
from fuser.kernel_cache import REGISTRY, Registration
from fuser.runtime import pool, warm

_ROOT, _STEP = "fuser.profile", "fuser.profile step"
_NUMBER = re.compile(r"k(\d+)_")
_COMPILED = ("TorchDynamo", "Torch-Compiled", "Pregraph", "CompiledFunction", "AOTDispatcher", "## Call")
_LIBRARIES = ("aten::", "mkldnn::", "onednn::", "prims::", "cu")
AUTOGRAD, COMPILED, LIBRARY, PYTHON = "autograd", "torch.compile", "ATen and libraries", "Python and the rest"
KERNELS, RECORDING = "kernels", "recording"
_PROBES = 500
_MOST_EVENTS = 5000


_running: list[profile] = []
finished: list[ProfileReport] = []  # the last report


class profile:
    """A block whose calls are recorded; after its end, `print` it, or call `.report()` and `.to_json()`.

    `step()`, called at the end of each step of a loop, separates steps, so that the report has their median and
    spread. `beside_aten` times each group that ran beside ATen on arguments like those it was compiled for, 0.1 s
    each. `memory` records the memory held at the end of each step, and of the block. Calls of this thread are
    recorded, and those of autograd's threads for it. Kernels should be compiled before. A block that `gives_way` ends
    without a report when another begins.
    """

    def __init__(self, beside_aten: bool = False, memory: bool = False, *, gives_way: bool = False) -> None:
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
        self._profiler = torch.profiler.profile(activities=activities, acc_events=True)
        self._beside_aten, self._memory = beside_aten, memory
        self._held: list[MemoryPoint] = []
        self._open: list[Any] = []
        self._before: dict[int, tuple[int, ...]] = {}
        self._report: ProfileReport | None = None
        self._stepped, self._gives_way = False, gives_way
        self._event_seconds = self._began = 0.0

    def __enter__(self) -> profile:
        if self._report is not None or self._open:
            raise GraphError("a profile records one block: make another by fuser.profile()")
        for other in [p for p in _running if p._gives_way]:
            other.stop()
        for registration in _alive():
            handle: Any = registration.runner.handle
            with contextlib.suppress(AttributeError):
                handle.forget()
            self._before[id(registration.spec)] = getattr(handle, "kernel_hits", ())
        once = _cost_of_a_call(0.0)
        self._profiler.start()
        self._event_seconds = _cost_of_a_call(once)
        self._began = time.perf_counter()
        for name in (_ROOT, _STEP):
            self._begin(name)
        _running.append(self)
        return self

    def stop(self) -> None:
        """End the block without a report."""
        self.__exit__(KeyboardInterrupt)

    @property
    def running(self) -> bool:
        """Whether the block has begun and not ended."""
        return bool(self._open)

    def __exit__(self, *error: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if not self._open:  # it gave way to another profile
            return
        self._note_memory()
        while self._open:
            self._open.pop().__exit__(None, None, None)
        self._profiler.stop()
        _running[:] = [p for p in _running if p is not self]
        if error[0] is None:
            self._report = self._made()
            finished[:] = [self._report]

    def _begin(self, name: str) -> None:
        event: Any = torch.profiler.record_function(name)
        event.__enter__()
        self._open.append(event)

    def step(self) -> None:
        """End a step of a loop, and begin the next."""
        if not self._open:
            raise GraphError("step() belongs inside of the profile's block")
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._open.pop().__exit__(None, None, None)
        self._note_memory()
        self._begin(_STEP)
        self._stepped = True

    def _note_memory(self) -> None:
        if self._memory:
            self._held.append(memory_now(time.perf_counter() - self._began))

    def report(self) -> ProfileReport:
        """The report. GraphError before the block's end."""
        if self._report is None:
            raise GraphError("there is no report before the end of the profile's block, or after an error in it")
        return self._report

    def to_json(self) -> str:
        """The report as JSON; docs/profiling.md has the fields."""
        return self.report().to_json()

    def __str__(self) -> str:
        return str(self._report) if self._report is not None else "a profile that was not finished"

    def export_chrome_trace(self, path: str) -> None:
        """Write the events for chrome://tracing or Perfetto."""
        self._profiler.export_chrome_trace(path)

    # -- from events to the report -------------------------------------------------------------------------------------
    def _made(self) -> ProfileReport:
        profiler: Any = self._profiler  # untyped in torch
        found = list(profiler.events())
        root = next(e for e in found if e.name == _ROOT)
        begin = root.time_range.start
        found = [e for e in found if e.time_range.start >= begin]
        mine = [e for e in found if e.device_type == DeviceType.CPU and e.thread == root.thread]
        on_gpu = [e for e in found if e.device_type != DeviceType.CPU]
        steps = [e.cpu_time_total / 1e6 for e in mine if e.name == _STEP]
        steps = steps[:-1] if self._stepped else steps  # events after the last step() belong to no step
        sources = _sources(self._before)
        kernels = _kernel_rows(sources, found)
        names = set(sources)
        parts: dict[str, float] = defaultdict(float)
        others: dict[tuple[str, str], list[float]] = defaultdict(list)
        for e in mine:
            kind = KERNELS if e.name in names else _kind(e.name)
            inside = len(e.cpu_children) * self._event_seconds  # the time to record its children
            seconds = max(e.self_cpu_time_total / 1e6 - inside, 0.0)
            parts[RECORDING] += e.self_cpu_time_total / 1e6 - seconds
            parts[kind] += seconds
            if kind not in (KERNELS, PYTHON):
                others[kind, e.name].append(seconds)
        for e in on_gpu:
            if e.name not in names and e.name not in (_ROOT, _STEP):
                others["GPU", e.name].append(e.self_device_time_total / 1e6)
        device = "cuda" if on_gpu else "cpu"
        rate = copy_rate(device)
        return ProfileReport(
            seconds=root.cpu_time_total / 1e6,
            steps=tuple(steps) if self._stepped else (),
            parts=dict(parts),
            kernels=tuple(kernels),
            others=tuple(_other(kind, name, seconds) for (kind, name), seconds in others.items()),
            beside=tuple(_beside(sources)) if self._beside_aten else (),
            copy_rate=rate.bytes_per_second,
            copy_spread=rate.spread,
            threads=torch.get_num_threads(),
            device=device,
            memory=tuple(self._held),
            timeline=_timeline(found, root, names, self._stepped),
        )


def _timeline(found: list[Any], root: Any, names: set[str], stepped: bool) -> tuple[Event, ...]:
    """The events of the step with the median time; of the whole block if `step()` was not called."""
    steps = sorted((e for e in found if e.name == _STEP), key=lambda e: e.time_range.start)
    steps = sorted(steps[:-1] if stepped else [], key=lambda e: e.cpu_time_total)
    whole = steps[len(steps) // 2].time_range if steps else root.time_range
    inside = (e for e in found if whole.start <= e.time_range.start <= whole.end and e.name not in (_ROOT, _STEP))
    return tuple(
        Event(
            e.name, KERNELS if e.name in names else _kind(e.name), (e.time_range.start - whole.start) / 1e6,
            e.time_range.elapsed_us() / 1e6, f"thread {e.thread}" if e.device_type == DeviceType.CPU else "GPU",
        )
        for e in itertools.islice(inside, _MOST_EVENTS)
    )  # fmt: skip


def _cost_of_a_call(plain: float) -> float:
    """Seconds beyond `plain` that a torch call of one event takes while a profiler records."""
    x = torch.empty(1)
    best = math.inf
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(_PROBES):
            x.view(1)
        best = min(best, (time.perf_counter() - start) / _PROBES)
    return max(best - plain, 0.0)


def memory_now(seconds: float) -> MemoryPoint:
    """The memory held now, `seconds` after the block's begin."""
    blocks = pool.stats()
    on_gpu = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    results = warm.outputs.stats()["held_bytes"]
    return MemoryPoint(seconds, _resident(), blocks["used_bytes"], blocks["idle_bytes"], results, on_gpu)


def _resident() -> int:
    """Resident bytes of this process; 0 if the system does not tell."""
    try:
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _kind(name: str) -> str:
    if name in (_ROOT, _STEP):
        return PYTHON
    if name.startswith(_COMPILED):
        return COMPILED
    if name.startswith(("autograd::", "torch::autograd")) or re.search(r"Backward\d*$", name):
        return AUTOGRAD
    return LIBRARY if name.startswith(_LIBRARIES) else PYTHON


def _other(kind: str, name: str, seconds: list[float]) -> OtherRow:
    return OtherRow(name, kind, len(seconds), math.fsum(seconds))


# -- kernels -----------------------------------------------------------------------------------------------------------
class _Source:
    """A kernel that ran: its group and class, the number of its calls, and the bytes of each of its plans."""

    def __init__(self, registration: Registration, kernel: Any, calls: int, seen: Any) -> None:
        self.registration, self.kernel, self.calls, self.seen = registration, kernel, calls, seen
        self._counts: list[tuple[int, int]] | None = None

    def counts(self, number: int) -> tuple[int | None, int | None]:
        """Bytes and operations of plan `number` in a call; None if calls had several sizes, or the plan is unknown."""
        if self.seen is None or self.seen[1]:
            return None, None
        if self._counts is None:
            spec = self.registration.spec
            entry = next((e for e in spec.store.entries if any(k is self.kernel for k in e.kernels)), None)
            self._counts = self._counted(entry.example) if entry is not None else []
        return self._counts[number] if number < len(self._counts) else (None, None)

    def _counted(self, example: tuple[Any, ...]) -> list[tuple[int, int]]:
        try:
            lowered, plans = lowered_of(self.registration.spec, example)
            sizes = self.seen[0]
            return list(zip(plan_bytes(lowered, plans, sizes), plan_operations(lowered, plans, sizes)))
        except (FuserError, KeyError, IndexError):
            return []


def _alive() -> list[Registration]:
    """One registration of each specification: several share a handle."""
    return list({id(r.spec): r for r in REGISTRY.registrations()}.values())


def _sources(before: dict[int, tuple[int, ...]]) -> dict[str, list[_Source]]:
    """The kernels that answered calls since `before`, by the names of their steps."""
    out: dict[str, list[_Source]] = defaultdict(list)
    for registration in _alive():
        handle: Any = registration.runner.handle
        past = before.get(id(registration.spec), ())
        hits, seen = getattr(handle, "kernel_hits", ()), getattr(handle, "seen", ())
        for n, kernel in enumerate(getattr(registration.runner, "admitted", ())):
            calls = hits[n] - (past[n] if n < len(past) else 0) if n < len(hits) else 0
            if calls or (n < len(seen) and seen[n] is not None):
                source = _Source(registration, kernel, calls, seen[n] if n < len(seen) else None)
                for name in dict.fromkeys(step.entry for step in kernel.program.steps):
                    out[name].append(source)
    return out


def _kernel_rows(sources: dict[str, list[_Source]], found: list[Any]) -> Iterator[KernelRow]:
    spent: dict[str, list[float]] = defaultdict(list)
    on_gpu: dict[str, list[float]] = defaultdict(list)
    for e in found:
        if e.name in sources:
            gpu = e.device_type != DeviceType.CPU
            (on_gpu if gpu else spent)[e.name].append((e.self_device_time_total if gpu else e.cpu_time_total) / 1e6)
    for name, own in sources.items():
        seconds = on_gpu.get(name) or spent.get(name) or []
        if not seconds:
            continue
        first, number = own[0], int(match[1]) if (match := _NUMBER.match(name)) else 0
        is_first = next(s.entry for s in first.kernel.program.steps if _same_plan(s.entry, number)) == name
        together = sum(s.calls for s in own) > len(seconds)  # batched calls, perhaps of several sizes
        known = first.counts(number) if len(own) == 1 and is_first and not together else (None, None)
        keys = tuple(s.registration.key for s in own)
        yield KernelRow(name, keys, len(seconds), sum(seconds), *spread(seconds), *known)


def _same_plan(name: str, number: int) -> bool:
    match = _NUMBER.match(name)
    return match is not None and int(match[1]) == number


# -- beside ATen -------------------------------------------------------------------------------------------------------
def _beside(sources: dict[str, list[_Source]]) -> Iterator[Beside]:
    """Each group that ran, timed beside ATen on arguments like those of its first class."""
    registrations = {id(s.registration.spec): s.registration for own in sources.values() for s in own}
    for registration in registrations.values():
        entry = next((e for e in registration.spec.store.entries if e.example and e.kernels), None)
        if entry is None:
            continue
        given = entry.example[len(registration.bound) :]
        try:
            timing = measure(registration.key, [example_of(a) for a in given])
        except (FuserError, RuntimeError) as e:
            yield Beside(registration.key, None, None, str(e))
        else:
            yield Beside(registration.key, timing.seconds, timing.aten_seconds, "")


def example_of(described: Any) -> Any:
    """An argument like the one described; integers are 0, a valid index of anything."""
    if not isinstance(described, tuple):
        return described
    dtype, device, size, stride = described
    t = torch.empty_strided(size, stride, dtype=dtype, device=device)
    return t.normal_() if dtype.is_floating_point else t.zero_()


__all__ = ["example_of", "finished", "profile"]
