"""Scripts that run in fused groups beside the scripts themselves: time, first call, and memory over many calls."""

from __future__ import annotations

import gc
import pathlib
import tempfile
import time
import warnings
from typing import Any

import torch

from benchmarks import checks, scripts
from benchmarks.child import spawn
from benchmarks.options import Options
from benchmarks.progress import progress
from benchmarks.report import Bars, Report, Table, at_least, at_most, seconds, spread
from benchmarks.runner import Budget, Call, Timing, interleave

SMALL = 16
CALL_US, FIRST_S, GROWN_MIB = 2.5, 0.5, 20.0


def child(params: dict[str, Any]) -> dict[str, Any]:
    """In a fresh process: "first", seconds of `fuse_script` and of call 1; or "memory", MiB that calls leave."""
    warnings.simplefilter("ignore")
    with torch.no_grad():
        return _first() if params["what"] == "first" else _memory(params["calls"], params["rounds"])


def _first() -> dict[str, Any]:
    import fuser

    row = scripts.ROWS[0]
    script, args = scripts.scripted(row), row.inputs(True)
    start = time.perf_counter()
    fused = fuser.fuse_script(script)
    made = time.perf_counter()
    got = fused(*args)
    end = time.perf_counter()
    return {"fuse": made - start, "call": end - made, "problem": _judge(script, args, got)}


def _memory(calls: int, rounds: int) -> dict[str, Any]:
    import fuser

    script = torch.jit.script(scripts.chain)
    fused = fuser.fuse_script(script)
    inputs = [(torch.ones(64 * n), torch.ones(64 * n)) for n in range(1, 21)]
    for n in range(200):
        fused(*inputs[n % 20])
    before = _resident_mib()
    for n in range(calls):
        fused(*inputs[n % 20])
    called = _resident_mib()
    for n in range(20 + rounds):
        if n == 20:
            begun = _resident_mib()
        fuser.fuse_script(script)(*inputs[n % 20])
    return {"calls": called - before, "rounds": _resident_mib() - begun, "problem": None}


def _resident_mib() -> float:
    gc.collect()
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def _judge(script: Any, args: tuple[Any, ...], got: Any) -> str | None:
    return checks.judge(checks.tensors(got), checks.tensors(script(*args))).problem


def _time(row: scripts.Row, options: Options, budget: Budget, report: Report) -> dict[str, Timing]:
    """The script and its fused copy, interleaved; nothing if results differ."""
    import fuser

    script, args = scripts.scripted(row), row.inputs(options.quick)
    fused = fuser.fuse_script(script)
    for n in range(3):  # TorchScript profiles its first calls and compiles what it saw
        problem = _judge(script, args, fused(*args))
        if problem:
            report.wrong.append(f"{row.name}, call {n + 1}: {problem}")
            return {}
    return interleave({"script": Call(script, args), "fused": Call(fused, args)}, budget, options.device)


def _rows(options: Options, budget: Budget, report: Report, step: Any) -> None:
    cells, bars = [], {}
    small = scripts.Row(
        f"3 ops, {SMALL} elements", lambda: scripts.small, lambda _: (torch.ones(SMALL), torch.ones(SMALL)), 1.0
    )
    for row in (*scripts.ROWS, small):
        if not options.wants(row.name):
            continue
        step(row.name)
        timings = _time(row, options, budget, report)
        if not timings:
            continue
        script, fused = timings["script"], timings["fused"]
        gain = script.median / fused.median
        cells.append((row.name, spread(script), spread(fused), f"{gain:.2f}"))
        bars[row.name] = {n: t.median * 1e6 for n, t in timings.items()}
        report.records.append({"row": row.name, "seconds": {n: t.record() for n, t in timings.items()}})
        if row is small:
            report.claims.append(at_most(f"call of {row.name}", fused.median * 1e6, CALL_US, "µs"))
        else:
            report.claims.append(at_least(row.name, None if options.quick else gain, row.target, "× the script"))
    title = "torchscript: a script and its fused copy"
    report.tables.append(Table(title, ("program", "script median [p10–p90]", "fused", "script / fused"), cells))
    report.bars.append(Bars("TorchScript, µs a call", "µs", bars))


def _children(options: Options, report: Report, step: Any) -> None:
    step("first call")
    with tempfile.TemporaryDirectory() as cache:
        first = spawn("torchscript", {"what": "first"}, cache)
    step("memory")
    few = {"calls": 2000, "rounds": 20} if options.quick else {"calls": 100_000, "rounds": 1000}
    with tempfile.TemporaryDirectory() as cache:
        memory = spawn("torchscript", {"what": "memory"} | few, cache)
    for name, found in (("first call", first), ("memory", memory)):
        problem = found.get("error") or found.get("problem")
        report.records.append({"row": name} | found)
        if problem:
            report.wrong.append(f"{name}: {problem}")
    report.notes += [f"fuse_script itself: {seconds(first['fuse'])}"] if "fuse" in first else []
    grown = f"MiB left by {few['calls']:,} calls with 20 sizes"
    report.claims += [
        at_most("call 1, empty cache, after fuse_script", first.get("call"), FIRST_S),
        at_most(grown, memory.get("calls"), GROWN_MIB, "MiB"),
        at_most(f"MiB left by {few['rounds']:,} rounds of fuse, call, drop", memory.get("rounds"), GROWN_MIB, "MiB"),
    ]


def run(options: Options) -> Report:
    """All rows, then the first call and memory in fresh processes."""
    report = Report("torchscript")
    if options.device != "cpu":
        report.notes.append("torchscript is measured on the CPU")
        return report
    with progress("torchscript", len(scripts.ROWS) + 3) as bar, torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _rows(options, Budget.of(options.quick), report, bar.step)
        if not options.rows:
            _children(options, report, bar.step)
    return report
