"""Calls while kernels are compiled in the background by a compiler that hangs: their times beside eager's; the exit.

The time that a thread waits for a core, which other processes have, is left out: Linux counts it for each thread.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.child import spawn
from benchmarks.options import Options
from benchmarks.progress import progress
from benchmarks.report import Report, Table, at_most

SLOWEST, EXIT_S = 1.2, 1.0
SECONDS = 3.0  # of calls, from the first one on
SIZES = (16, 256, 1 << 16)
CALLS = 10  # to a time
SLOW_US = 100.0
AT = (("median", 0.5), ("p90", 0.9), ("p99", 0.99), ("p99.9", 0.999), ("max", 1.0))


def group(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """What is called."""
    return torch.relu(x * y + 1)


def chain(x: torch.Tensor) -> torch.Tensor:
    """What takes long to lower: it is ordered at the same time."""
    for n in range(60):
        x = torch.softmax(x, -1) * (n + 2)
    return x


def child(params: dict[str, Any]) -> dict[str, Any]:
    """Times of calls in a fresh process, in microseconds; when it reached its end."""
    if params["does"] == "nothing":
        return {"end": time.monotonic()}
    import fuser
    from fuser import config

    config.compile_mode = "background"
    torch.set_num_threads(1)
    x, y = torch.randn(params["size"]), torch.randn(params["size"])
    alone = _times([lambda: group(x, y)], params["seconds"] / 3)[0]
    handle, slow = (fuser.fusion_handle(fuser.register_fusion(torch.fx.symbolic_trace(f))) for f in (group, chain))
    slow(torch.randn(4, 50))
    first = _first_calls(x, y)
    handle(x, y)
    mine, eager = _times([lambda: handle(x, y), lambda: group(x, y)], params["seconds"])
    hangs = not fuser.wait(0) and not handle.hits
    found = {"alone": _percentiles(alone), "fuser": _percentiles(mine), "eager": _percentiles(eager)}
    found |= {"first": _percentiles(first)}
    return {**found, "hangs": hangs, "lowerings": fuser.stats()["lowerings"], "end": time.monotonic()}


def _first_calls(x: torch.Tensor, y: torch.Tensor) -> list[float]:
    """Microseconds of the first call of each of some groups that nothing was compiled for."""
    import fuser

    found = []
    with _waited() as waited:
        for first, second in itertools.product((torch.sin, torch.exp, torch.tanh, torch.cos, torch.erf), repeat=2):
            graph = torch.fx.symbolic_trace(_three_operators(first, second))
            handle = fuser.fusion_handle(fuser.register_fusion(graph))
            before, start = waited(), time.perf_counter_ns()
            handle(x, y)
            taken = time.perf_counter_ns() - start
            found.append((taken - (waited() - before)) / 1e3)
    return found


def _three_operators(first: Any, second: Any) -> Callable[[Any, Any], Any]:
    return lambda x, y: first(second(x * y) + 1)


def _times(calls: list[Callable[[], Any]], seconds: float) -> list[list[float]]:
    """Microseconds of a call, over `CALLS` at a time, made in turns."""
    found: list[list[float]] = [[] for _ in calls]
    end = time.perf_counter() + seconds
    with _waited() as waited:
        while time.perf_counter() < end:
            for call, times in zip(calls, found, strict=True):
                before, start = waited(), time.perf_counter_ns()
                for _ in range(CALLS):
                    call()
                taken = time.perf_counter_ns() - start
                times.append((taken - (waited() - before)) / 1e3 / CALLS)
    return found


@contextlib.contextmanager
def _waited() -> Iterator[Callable[[], int]]:
    """The nanoseconds that this thread has waited for a core so far; always 0 where the system does not count them."""
    try:
        handle = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
    except OSError:
        yield lambda: 0
        return
    try:
        yield lambda: int(os.pread(handle, 100, 0).split()[1])
    finally:
        os.close(handle)


def _percentiles(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    found = {name: ordered[int(at * (len(ordered) - 1))] for name, at in AT}
    return found | {"slow": sum(t > SLOW_US for t in ordered), "times": len(ordered)}


def _spawn(params: dict[str, Any], place: str) -> dict[str, Any]:
    """One process, whose compiler sleeps for 30 s unless it is asked what it can do."""
    compiler = pathlib.Path(place, "c++")
    compiler.write_text('#!/bin/sh\ncase "$*" in *probe*) exec g++ "$@";; esac\nexec sleep 30\n')
    compiler.chmod(0o755)
    before = os.environ.get("CXX")
    os.environ["CXX"] = str(compiler)
    try:
        found = spawn("background", params, place)
    finally:
        os.environ.pop("CXX")
        os.environ.update({"CXX": before} if before is not None else {})
    return found | ({"exit": time.monotonic() - found["end"]} if "end" in found else {})


def run(options: Options) -> Report:
    """A process for each size; three more that only import torch, for the time that such an exit takes."""
    report = Report("background")
    sizes, seconds = (SIZES[:1], 1.0) if options.quick else (SIZES, SECONDS)
    with progress("background", len(sizes) + 3) as bar, tempfile.TemporaryDirectory() as place:
        idle = []
        for n in range(3):
            bar.step(f"a process that only imports torch, {n + 1}")
            idle.append(_spawn({"does": "nothing"}, place))
        rows, exits = [], []
        for size in sizes:
            bar.step(f"{size} elements")
            found = _spawn({"does": "calls", "size": size, "seconds": seconds}, place)
            if "error" in found or not found["hangs"]:
                report.wrong.append(f"{size} elements: {found.get('error', 'the compiler did not hang')}")
                continue
            report.records.append({"row": f"{size} elements"} | found)
            exits.append(found["exit"])
            for way in ("alone", "eager", "fuser", "first"):
                cells = [f"{found[way][n]:.1f}" for n, _ in AT]
                counts = (str(found[way]["slow"]), str(found[way]["times"]))
                rows.append((f"{size} elements, {way}", *cells, *counts))
            first = found["first"]["median"] / found["eager"]["median"]
            report.claims.append(at_most(f"{size} elements, first calls of groups beside eager's", first, SLOWEST, "×"))
            for name, _ in AT:
                what, gain = f"{size} elements, {name} beside eager's", found["fuser"][name] / found["eager"][name]
                report.claims.append(at_most(what, gain, SLOWEST, "×"))
    title = "background: microseconds of a call of three operators; eager before (alone) and meanwhile"
    report.tables.append(Table(title, ("calls", *(n for n, _ in AT), f"over {SLOW_US:g}", "times"), rows))
    report.records.append({"row": "exit", "idle": [f.get("exit") for f in idle], "fuser": exits})
    if exits:
        middle = sorted(f["exit"] for f in idle)[1]
        found = ", ".join(f"{e:.2f}" for e in exits)
        report.notes.append(f"seconds to exit: {found}; of a process that only imports torch: {middle:.2f}")
        report.claims.append(at_most("seconds to exit", max(exits), EXIT_S))
    return report
