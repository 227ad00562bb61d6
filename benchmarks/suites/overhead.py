"""What a call costs beside the kernel: three operations on 16 elements, with 1 to 10,000 registered specifications."""

from __future__ import annotations

import math
import time
from typing import Any

import torch

from benchmarks import checks, contestants, gradients
from benchmarks.options import Options
from benchmarks.progress import progress
from benchmarks.report import Bars, Claim, Report, Table, at_most, seconds, spread
from benchmarks.runner import Budget, Call, Timing, interleave

ELEMENTS = 16
COUNTS = (1, 10, 100, 1000, 10_000)
FLAT = 1.25
UNARY = (torch.sin, torch.tanh)


def three_ops(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """What is called."""
    return torch.relu(x * y + 1)


def distinct_graph(number: int) -> torch.fx.GraphModule:
    """A graph unlike every other number's: the bits of `number` chosen as a chain of two operations, then three_ops."""
    graph = torch.fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    value = x
    for bit in f"{number:b}":
        value = graph.call_function(UNARY[int(bit)], (value,))
    value = graph.call_function(torch.mul, (value, y))
    value = graph.call_function(torch.add, (value, 1))
    graph.output(graph.call_function(torch.relu, (value,)))
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def _inputs(device: str) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(ELEMENTS, generator=generator).to(device) for _ in range(2))


def _calls(names: list[str], args: tuple[Any, ...], report: Report) -> dict[str, Call]:
    calls = {}
    eager = checks.tensors(three_ops(*args))
    for name in names:
        try:
            if name == "xla":
                from benchmarks import xla

                fn = xla.compiled(xla.functions()["relu_mul_add"])
                calls[name] = Call(fn, tuple(map(xla.to_jax, args)))
                out = [xla.to_torch(fn(*calls[name].args))]
            else:
                calls[name] = Call(contestants.compile_for(name, three_ops, dynamic=None), args)
                out = checks.tensors(calls[name].fn(*args))
            problem = checks.judge(out, eager).problem
        except Exception as error:  # a contestant that fails must not end the run of the others
            calls.pop(name, None)
            problem = f"{type(error).__name__}: {error}"
        if problem:
            (report.wrong if name.startswith("fuser") else report.notes).append(f"{name}: {problem}")
    return calls


def _flatness(options: Options, budget: Budget, report: Report, step: Any) -> dict[int, dict[str, Timing]]:
    """Handle and run_fusion timed again while more and more specifications are registered."""
    import fuser

    args = _inputs(options.device)
    key = fuser.register_fusion(torch.fx.symbolic_trace(three_ops))
    calls = {
        "fuser handle": Call(fuser.fusion_handle(key), args),
        "run_fusion": Call(fuser.run_fusion, (key, list(args))),
    }
    keys = {key}
    timings: dict[int, dict[str, Timing]] = {}
    for count in COUNTS[:4] if options.quick else COUNTS:
        step(f"{count} specifications")
        graphs = [distinct_graph(n) for n in range(len(keys) + 1, count + 1)]
        start = time.perf_counter()
        keys.update(fuser.register_fusion(g) for g in graphs)
        each = (time.perf_counter() - start) / len(graphs) if graphs else None
        if len(keys) != count:
            report.wrong.append(f"{count} different graphs gave {len(keys)} keys: expected one for each")
            break
        timings[count] = interleave(calls, budget, options.device)
        report.records.append({"specs": count, "register_seconds_each": each} | _seconds(timings[count]))
    return timings


def _seconds(timings: dict[str, Timing]) -> dict[str, Any]:
    return {"seconds": {name: t.record() for name, t in timings.items()}}


def _flat_table(timings: dict[int, dict[str, Timing]], report: Report) -> Table:
    each = {r["specs"]: r["register_seconds_each"] for r in report.records if "specs" in r}
    rows = [
        (f"{count:,}", spread(t["fuser handle"]), spread(t["run_fusion"]), seconds(each[count]))
        for count, t in timings.items()
    ]
    return Table(
        "the same with more specifications registered", ("specs", "handle", "run_fusion", "register one"), rows
    )


def _claims(timings: dict[str, Timing], flat: dict[int, dict[str, Timing]]) -> list[Claim]:
    handle, mine, inductor = (timings.get(n) for n in ("fuser handle", "fuser", "inductor"))
    medians = [t["fuser handle"].median for t in flat.values()]
    growth = max(medians) / medians[0] if medians else None
    most = max(flat, default=0)
    return [
        at_most("fusion_handle, 3 ops, 16 elements", handle.median * 1e6 if handle else None, 1.5, "µs"),
        Claim(
            "flat over the number of specs",
            f"≤ {FLAT} × of one spec's at 10,000",
            f"{growth:.2f} × over 1 to {most:,}" if growth else "not measured",
            growth <= FLAT if growth and most == COUNTS[-1] else None,
        ),
        at_most(
            "the same through torch.compile",
            mine.median / inductor.median if mine and inductor else None,
            0.75,
            "× Inductor",
        ),
    ]


def run(options: Options) -> Report:
    """All contestants interleaved, then the number of registered specifications grown."""
    report = Report("overhead")
    budget = Budget.of(options.quick)
    wanted = [
        "fuser handle",
        "fuser",
        *(r for r in ("eager", "inductor", "xla") if options.has(r)),
        "dynamo",
        "aot_eager",
    ]
    names = contestants.present([n for n in wanted if options.wants(n)], report.notes)
    flat: dict[int, dict[str, Timing]] = {}
    with progress("overhead", 2 + len(COUNTS)) as bar:
        bar.step("calls")
        calls = _calls(names, _inputs(options.device), report)
        timings = interleave(calls, budget, options.device)
        if "fuser handle" in calls:
            flat = _flatness(options, budget, report, bar.step)
        bar.step("gradients")
        trained = [n for n in gradients.NAMES if n in names]
        gradients.add(trained, options.device, budget, report)
    least = min((t.median for t in timings.values()), default=math.nan)
    rows = [(n, spread(t), f"{t.median / least:.2f}") for n, t in timings.items()]
    title = "overhead: a call, 3 ops, 16 elements (dynamo and aot_eager: torch.compile with do-nothing backends)"
    report.tables.insert(0, Table(title, ("contestant", "median [p10–p90]", "× of least"), rows))
    if flat:
        report.tables.append(_flat_table(flat, report))
    report.records.append(_seconds(timings))
    report.claims = [*_claims(timings, flat), *report.claims]
    report.bars = [Bars("overhead, 16 elements", "µs", {"call": {n: t.median * 1e6 for n, t in timings.items()}})]
    return report
