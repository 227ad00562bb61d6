"""`python -m benchmarks.public FOLDER`: public models beside eager and TorchInductor, on a GPU or with `--device cpu`.

Each row and mode is a process: contestants compile beside those of other rows, and take turns with the device for
times. A row has the milliseconds of a step (median of interleaved rounds), those of the device alone, the peak memory
of a step, the seconds of the first call and those of CPU time, the distance to eager's results, and the kernels that
took most of the time. On the CPU the milliseconds of the device are those of all threads, and the memory is that of
tensors. Ratios are medians of those of the rounds. Each row writes `FOLDER/NAME.MODE.json`; at the end, a table and the
geometric means.
"""

from __future__ import annotations

import argparse
import copy
import fcntl
import gc
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils import _pytree as pytree

from benchmarks.memory import peak_tensor_mib
from benchmarks.public_models import ROWS, Inputs
from benchmarks.runner import geomean, synchronize
from tests.zoo.libraries import prepare

MODES = ("inference", "training")
ROUNDS, STEPS, KERNELS = 7, 2, 16
Step = Callable[[], list[torch.Tensor]]


def _step(call: Callable[..., Any], model: nn.Module, inputs: Inputs, mode: str) -> Step:
    """A step that returns the results, or in training the gradients of their mean squares."""

    def infer() -> list[torch.Tensor]:
        with torch.no_grad():
            return [t for t in pytree.tree_leaves(call(**inputs)) if isinstance(t, torch.Tensor)]

    def train() -> list[torch.Tensor]:
        model.zero_grad(set_to_none=True)
        out = [t for t in pytree.tree_leaves(call(**inputs)) if isinstance(t, torch.Tensor)]
        sum((o.float().square().mean() for o in out if o.is_floating_point()), torch.zeros(())).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    return infer if mode == MODES[0] else train


def _distance(found: list[torch.Tensor], eager: list[torch.Tensor]) -> float:
    """Relative, over all tensors."""
    apart = sum(float((f.double() - e.double()).square().sum()) for f, e in zip(found, eager, strict=True))
    return float((apart / max(sum(float(e.double().square().sum()) for e in eager), 1e-30)) ** 0.5)


def _made(name: str, mode: str, device: str, dtype: torch.dtype | None) -> tuple[nn.Module, Inputs]:
    row = next(r for r in ROWS if r.name == name)
    floats = dtype or (row.dtype if device == "cuda" else torch.float32)
    torch.manual_seed(0)
    with torch.device(device):
        model, inputs = row.make(device == "cpu")
    model = model.to(device, floats).train(mode == MODES[1])
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        if type(part).__name__ == "DropPath":
            part.drop_prob = 0.0  # type: ignore[assignment]

    def placed(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.to(device, floats) if value.is_floating_point() else value.to(device)

    return model, pytree.tree_map(placed, inputs)


@contextmanager
def turn(lock: pathlib.Path) -> Iterator[None]:
    """Nobody else who takes this lock uses the device meanwhile."""
    with open(lock, "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def measure(name: str, mode: str, options: argparse.Namespace) -> dict[str, Any]:
    """All figures of a row, for each contestant that does not fail."""
    import fuser  # noqa: F401

    prepare()
    device = options.device
    model, inputs = _made(name, mode, device, getattr(torch, options.dtype) if options.dtype else None)
    record: dict[str, Any] = {"row": name, "mode": mode, "threads": torch.get_num_threads()}
    steps: dict[str, Step] = {}
    eager: list[torch.Tensor] = []
    for backend in options.who.split(","):
        own = copy.deepcopy(model)
        call = own if backend == "eager" else torch.compile(own, backend=backend, dynamic=False)
        step, begin, began = _step(call, own, inputs, mode), time.monotonic(), sum(os.times()[:4])
        found = step()
        synchronize(device)
        record[backend] = {"first": time.monotonic() - begin, "first_cpu": sum(os.times()[:4]) - began}
        eager = eager or [t.clone() for t in found]
        record[backend]["distance"] = _distance(found, eager)
        steps[backend] = step
        del found
    del eager
    for step in steps.values():
        for _ in range(3):
            step()
    with turn(options.lock or options.folder / f"{device}.lock"):
        times = _timed(steps, device)
    for backend, step in steps.items():
        record[backend] |= times[backend] | {"peak": _peak(step, backend, device)} | _top(step, device)
    return record


def _timed(steps: dict[str, Step], device: str) -> dict[str, dict[str, Any]]:
    """Milliseconds of a step in each round, and on the CPU those of all threads."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    busy: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            synchronize(device)
            begin, began = time.perf_counter(), time.process_time()
            for _ in range(STEPS):
                step()
            synchronize(device)
            times[name].append((time.perf_counter() - begin) / STEPS * 1e3)
            busy[name].append((time.process_time() - began) / STEPS * 1e3)
    middle = statistics.median
    return {n: {"rounds": t, "ms": middle(t), "device": middle(busy[n])} for n, t in times.items()}


def _peak(step: Step, backend: str, device: str) -> float:
    """MiB that a step takes beyond those taken before."""
    gc.collect()
    if device == "cpu":
        return peak_tensor_mib(step) - (0 if backend == "fuser" else peak_tensor_mib(lambda: None))
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = step()
    torch.cuda.synchronize()
    del kept
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def _top(step: Step, device: str) -> dict[str, Any]:
    """The kernels that take most of a step, and on a GPU the milliseconds of all."""
    with profile(activities=[ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU]) as found:
        for _ in range(STEPS):
            step()
        synchronize(device)
    events = found.key_averages()
    own = {e.key: e.self_device_time_total if device == "cuda" else e.self_cpu_time_total for e in events}
    kernels = sorted(events, key=lambda e: -own[e.key])
    took = [(e.key[:80], e.count // STEPS, own[e.key] / STEPS / 1e3) for e in kernels]
    return {"top": took[:KERNELS]} | ({"device": sum(t for *_, t in took)} if device == "cuda" else {})


def _ratio(other: dict[str, Any], own: dict[str, Any]) -> float:
    """How many times the speed of `other` a step has: the median of the rounds' ratios."""
    return float(statistics.median(o / f for o, f in zip(other["rounds"], own["rounds"])))


def _run_all(folder: pathlib.Path, jobs: list[tuple[str, str]], options: argparse.Namespace) -> None:
    """Processes for all jobs, `--width` at a time, until the time is over."""
    end = time.monotonic() + options.seconds
    running: list[tuple[tuple[str, str], subprocess.Popen[bytes]]] = []
    while (jobs or running) and time.monotonic() < end:
        while jobs and len(running) < options.width:
            job = jobs.pop(0)
            command = [sys.executable, "-m", "benchmarks.public", str(folder), "--one", *job, "--who", options.who]
            command += ["--device", options.device, "--dtype", options.dtype]
            command += ["--lock", str(options.lock)] if options.lock else []
            with open(folder / f"{job[0]}.{job[1]}.log", "wb") as log:
                running.append((job, subprocess.Popen(command, stdout=log, stderr=log)))
        time.sleep(0.2)
        for job, process in running:
            if process.poll():
                print(f"{' '.join(job)}: failed, see {folder / '.'.join((*job, 'log'))}", flush=True)
        running = [(job, process) for job, process in running if process.poll() is None]
    for job, process in running:
        process.kill()
        jobs.append(job)
    if jobs:
        print("left out:", ", ".join(map(" ".join, jobs)))


def _print_table(folder: pathlib.Path, rival: str) -> None:
    records = [json.loads(p.read_text()) for p in sorted(folder.glob("*.json"))]
    for mode in MODES:
        rows = [r for r in records if r["mode"] == mode and "fuser" in r and rival in r and rival != "fuser"]
        if not rows:
            continue
        print(f"\n| {mode} | × eager | × {rival} | × {rival}, device | peak, MiB | of {rival}'s | distance |")
        print("|---|---:|---:|---:|---:|---:|---:|")
        shares = []
        for r in rows:
            own, other, eager = r["fuser"], r[rival], r.get("eager", {})
            faster = _ratio(other, own), other["device"] / own["device"], own["peak"] / max(other["peak"], 1e-9)
            shares.append(faster)
            beside = f"{_ratio(eager, own):.2f}" if eager else "–"
            print(f"| {r['row']} | {beside} | {faster[0]:.2f} | {faster[1]:.2f} | {own['peak']:.1f} | {faster[2]:.2f} "
                  f"| {own['distance']:.1e} |")  # fmt: skip
        means = [geomean(column) for column in zip(*shares)]
        print(f"geometric means of {len(rows)}: {means[0]:.2f}, device {means[1]:.2f}, peak {means[2]:.2f}")


def main() -> int:
    """Run one row, or all that are asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.public")
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--rows", default="", help="names, with commas; all if left out")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--who", default="eager,fuser,inductor")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", default="", help="of floats; each row's on a GPU and float32 on the CPU if left out")
    parser.add_argument("--lock", type=pathlib.Path, help="file that is locked in timings; in the folder if left out")
    parser.add_argument("--width", type=int, help="rows that compile at a time: 8 on a GPU, 1 on the CPU")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop then")
    parser.add_argument("--one", nargs=2, metavar=("ROW", "MODE"), help="this row, in this process")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("python -m benchmarks.public needs a GPU, or --device cpu")
        return 1
    options.width = options.width or (8 if options.device == "cuda" else 1)
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.one:
        name, mode = options.one
        record = measure(name, mode, options)
        (options.folder / f"{name}.{mode}.json").write_text(json.dumps(record))
        return 0
    wanted = options.rows.split(",") if options.rows else [r.name for r in ROWS]
    unknown = set(wanted) - {r.name for r in ROWS} | set(options.modes.split(",")) - set(MODES)
    if unknown:
        parser.error(f"no row or mode {', '.join(sorted(unknown))}; rows: {', '.join(r.name for r in ROWS)}")
    rows = [r for r in ROWS if r.name in wanted]
    jobs = [(r.name, m) for m in options.modes.split(",") for r in rows if r.trains or m == MODES[0]]
    _run_all(options.folder, jobs, options)
    _print_table(options.folder, options.who.split(",")[-1])
    return 0


if __name__ == "__main__":
    sys.exit(main())
