"""From a fresh process to the first result, after `import torch`, with empty caches and again with warm ones."""

from __future__ import annotations

import statistics
import tempfile
import time
from typing import Any

import torch

from benchmarks import account, checks, contestants
from benchmarks.child import spawn
from benchmarks.options import Options
from benchmarks.progress import progress
from benchmarks.report import Bars, Claim, Report, Table, at_most, seconds

SHAPE = (512, 512)
# "fuser" is backend="fuser" where that is installed, "fuser function" is backend=fuser.backend; "dynamo" compiles
# nothing: the floor under "fuser".
NAMES = ("fuser handle", "fuser function", "fuser", "dynamo", "inductor", "xla")


def four_ops(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The first kernel: four operations."""
    return torch.relu(x * y + 1) * x


def _sigmoid(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(x) * y - x


def _tanh(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x + y) * (x - y)


def _bell(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.exp(-(x * x)) + y


def _where(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.where(x > y, x, y * 0.5) * 2


def _row_dot(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x * y).sum(-1) + 1


SMALL = (four_ops, _sigmoid, _tanh, _bell, _where, _row_dot)


def child(params: dict[str, Any]) -> dict[str, Any]:
    """In the fresh process: seconds to the first result of each kernel in turn, and what was wrong, if anything."""
    name = params["contestant"]
    generator = torch.Generator().manual_seed(0)
    args = tuple(torch.randn(SHAPE, generator=generator).to(params["device"]) for _ in range(2))
    if name == "xla":
        return _xla_child(args)
    times, problems = [], []
    for fn in SMALL:
        start = time.perf_counter()
        out = contestants.compile_for(name, fn, dynamic=None)(*args)
        if params["device"] == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        problem = checks.judge(checks.tensors(out), [fn(*args)]).problem
        if problem:
            problems.append(f"{fn.__name__}: {problem}")
    return {"times": times, "problems": problems, "fallbacks": account.fallbacks() if "fuser" in name else {}}


def _xla_child(args: tuple[torch.Tensor, ...]) -> dict[str, Any]:
    """As `child`; the first time includes the start of JAX's CPU client, which its import puts off."""
    import jax  # noqa: F401  as with torch, the import itself is not counted

    from benchmarks import xla

    times, problems = [], []
    mine: tuple[Any, ...] = ()
    for fn, reference in zip(xla.small_functions(), SMALL, strict=True):
        start = time.perf_counter()
        mine = mine or tuple(map(xla.to_jax, args))
        out = xla.compiled(fn)(*mine)
        times.append(time.perf_counter() - start)
        problem = checks.judge([xla.to_torch(out)], [reference(*args)]).problem
        if problem:
            problems.append(f"{reference.__name__}: {problem}")
    return {"times": times, "problems": problems, "fallbacks": {}}


Runs = dict[str, dict[str, list[dict[str, Any]]]]


def _first(runs: list[dict[str, Any]]) -> list[float]:
    return [r["times"][0] for r in runs if "times" in r]


def _further(runs: list[dict[str, Any]]) -> list[float]:
    return [t for r in runs if "times" in r for t in r["times"][1:]]


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def _cell(values: list[float]) -> str:
    return f"{seconds(_median(values))} [{min(values):.3g}–{max(values):.3g}]" if values else "failed"


def _claims(runs: Runs) -> list[Claim]:
    def median(name: str, pick: Any) -> float | None:
        results = runs[name]["cold"] if name in runs else []
        return None if any(r.get("fallbacks") for r in results) else _median(pick(results))

    return [
        at_most("empty cache: register + first result, 4-op kernel", median("fuser handle", _first), 1.0),
        at_most("the same through torch.compile, backend=fuser.backend", median("fuser function", _first), 1.5),
        at_most('the same through torch.compile, backend="fuser"', median("fuser", _first), 1.5),
        at_most("each further small kernel, registered", median("fuser handle", _further), 0.35),
        at_most("each further small kernel, through torch.compile", median("fuser", _further), 0.35),
    ]


def _report(runs: Runs, notes: list[str]) -> Report:
    report = Report("coldstart", notes=notes)
    rows = []
    for name, states in runs.items():
        cold, warm = states["cold"], states["warm"]
        rows.append((name, *(_cell(pick(state)) for state in (cold, warm) for pick in (_first, _further))))
        for state, results in states.items():
            report.records.append({"contestant": name, "cache": state, "processes": results})
            problems = [p for r in results for p in [*r.get("problems", ()), *filter(None, [r.get("error")])]]
            target = report.wrong if name.startswith("fuser") else report.notes
            target.extend(f"{name}, {state} cache: {p}" for p in dict.fromkeys(problems))
            reasons = dict.fromkeys(f for r in results for f in r.get("fallbacks", ()))
            report.notes.extend(f"{name}, {state} cache: a kernel fell back: {reason}" for reason in reasons)
    columns = ("contestant", "first, empty cache", "each further", "first, warm disk", "each further, warm disk")
    report.tables = [
        Table("coldstart: seconds after `import torch`, median [least–most] of fresh processes", columns, rows)
    ]
    report.claims = _claims(runs)
    groups = {
        label: {n: m for n, states in runs.items() if (m := _median(pick(states[state]))) is not None}
        for label, state, pick in (
            ("first, empty cache", "cold", _first),
            ("each further", "cold", _further),
            ("first, warm disk", "warm", _first),
        )
    }
    report.bars = [Bars("coldstart", "seconds", groups)]
    return report


def run(options: Options) -> Report:
    """Each contestant in fresh processes, in turn: one with empty caches, then one with the caches it left."""
    notes: list[str] = []
    wanted = [n for n in NAMES if n.startswith("fuser") or n == "dynamo" or options.has(n)]
    names = [n for n in contestants.present(wanted, notes) if options.wants(n)]
    repeats = 1 if options.quick else 3
    runs: Runs = {n: {"cold": [], "warm": []} for n in names}
    with progress("coldstart", repeats * len(names) * 2) as bar:
        for _ in range(repeats):
            for name in names:
                with tempfile.TemporaryDirectory(prefix="benchmark-") as cache:
                    for state in ("cold", "warm"):
                        bar.step(f"{name}, {state} cache")
                        params = {"contestant": name, "device": options.device}
                        runs[name][state].append(spawn("coldstart", params, cache))
    return _report(runs, notes)
