"""Optimiser steps over a whole model's parameters, compiled, beside eager's three ways and TorchInductor.

All contestants of a row share one set of parameters, gradients and states, so that memory holds only one of each. Each
is checked on its first step from the same start, parameter by parameter, against eager and against float64.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks import checks, contestants
from benchmarks.child import spawn
from benchmarks.options import Options
from benchmarks.progress import progress
from benchmarks.report import Bars, Claim, Report, Table, at_least, ratio, seconds, spread
from benchmarks.runner import Budget, Call, Timing, copy_call, interleave

COPY_SHARE = 0.6
OVER_INDUCTOR = 2.0
RIVAL_SECONDS = 420.0  # for Inductor's first call of a row, which takes longer the more parameters there are
EAGER = {"eager": {"foreach": False}, "eager foreach": {"foreach": True}, "eager fused": {"fused": True}}
Shape = tuple[int, ...]
Optimizer = torch.optim.Optimizer


def gpt2_shapes(quick: bool) -> list[Shape]:
    """The parameters of GPT-2 (124 million in 148 tensors), tied as in the model."""
    layers, d, vocabulary = (2, 64, 500) if quick else (12, 768, 50257)
    each = [(d,), (d,), (d, 3 * d), (3 * d,), (d, d), (d,), (d,), (d,), (d, 4 * d), (4 * d,), (4 * d, d), (d,)]
    return [(vocabulary, d), (1024, d), *each * layers, (d,), (d,)]


def small_shapes(quick: bool) -> list[Shape]:
    """Five hundred matrices of 64 to 2,000 elements."""
    return [(8 + i % 37, 8 + i % 41) for i in range(20 if quick else 500)]


@dataclass(frozen=True)
class Row:
    """One optimiser over one list of shapes. `moved` counts elements read and written for each of a parameter."""

    name: str
    shapes: Callable[[bool], list[Shape]]
    optimizer: type[Optimizer]
    moved: int
    options: Callable[[], dict[str, Any]] = dict
    how: dict[str, Any] = field(default_factory=dict)  # of what is compiled


_SGD = {"lr": 1e-2, "momentum": 0.9}
ROWS = (
    Row("adam, gpt2", gpt2_shapes, torch.optim.Adam, 7),
    Row("adamw, gpt2", gpt2_shapes, torch.optim.AdamW, 7),
    Row("sgd momentum, gpt2", gpt2_shapes, torch.optim.SGD, 5, lambda: dict(_SGD)),
    Row("adam foreach, gpt2", gpt2_shapes, torch.optim.Adam, 7, how={"foreach": True}),
    Row("adam lr tensor, gpt2", gpt2_shapes, torch.optim.Adam, 7, lambda: {"lr": torch.tensor(1e-3)}),
    Row(
        "adam capturable, gpt2",
        gpt2_shapes,
        torch.optim.Adam,
        7,
        lambda: {"lr": torch.tensor(1e-3)},
        {"capturable": True, "foreach": True},
    ),
    Row("adam, 500 small", small_shapes, torch.optim.Adam, 7),
    Row("adam foreach, 500 small", small_shapes, torch.optim.Adam, 7, how={"foreach": True}),
    Row("sgd momentum, 500 small", small_shapes, torch.optim.SGD, 5, lambda: dict(_SGD)),
)


class Problem:
    """A row's tensors: where every contestant starts from, and what eager makes of it in one step."""

    def __init__(self, row: Row, options: Options) -> None:
        self.row, self.device = row, options.device
        generator = torch.Generator().manual_seed(0)

        def draw(shape: Shape) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(options.device)

        self.parameters = [torch.nn.Parameter(draw(s)) for s in row.shapes(options.quick)]
        for p in self.parameters:
            p.grad = draw(tuple(p.shape))
        first = self.optimizer({"foreach": False}, None)
        first.step()  # fills the states
        self.state = first.state
        self.start = [t.clone() for t in self.tensors()]
        first.step()
        self.eager = [t.clone() for t in self.tensors()]

    @property
    def nbytes(self) -> int:
        """What a step has to move: read and written."""
        return sum(p.nbytes for p in self.parameters) * self.row.moved

    def optimizer(self, how: dict[str, Any], state: Any) -> Optimizer:
        """An optimiser of the row's kind over the shared tensors."""
        made = self.row.optimizer(self.parameters, **{**self.row.options(), **how})  # type: ignore[call-arg]
        for p in self.parameters if state else ():
            made.state[p] = dict(state[p])
        return made

    def tensors(self) -> list[torch.Tensor]:
        """Parameters and states, parameter by parameter."""
        return [t for p in self.parameters for t in (p.detach(), *_states(self.state[p]))]

    def restart(self) -> None:
        """Everything as it was before the first step."""
        for t, start in zip(self.tensors(), self.start, strict=True):
            t.copy_(start)

    def judge(self) -> str | None:
        """What is wrong with the tensors after one step; None if nothing is."""
        now, at = self.tensors(), 0
        for p in self.parameters:
            each = 1 + len(_states(self.state[p]))
            part = slice(at, at + each)
            verdict = checks.judge(now[part], self.eager[part], self._exact(p, self.start[part]))
            if verdict.problem:
                return f"the parameter of sizes {tuple(p.shape)}: {verdict.problem}"
            at += each
        return None

    def _exact(self, p: torch.nn.Parameter, start: list[torch.Tensor]) -> list[torch.Tensor]:
        """One step of one parameter in float64."""
        wide = torch.nn.Parameter(start[0].double())
        assert p.grad is not None
        wide.grad = p.grad.double()
        one = self.row.optimizer([wide], foreach=False, **self.row.options())  # type: ignore[call-arg]
        names = [n for n, v in self.state[p].items() if isinstance(v, torch.Tensor)]
        one.state[wide] = {n: t.clone() if n == "step" else t.double() for n, t in zip(names, start[1:], strict=True)}
        one.step()
        return [wide.detach(), *(t.double() for t in _states(one.state[wide]))]


def _states(state: dict[str, Any]) -> list[torch.Tensor]:
    return [v for v in state.values() if isinstance(v, torch.Tensor)]


def _step(name: str, problem: Problem) -> Callable[[], Any]:
    made = problem.optimizer(EAGER[name] if name in EAGER else problem.row.how, problem.state)
    return made.step if name in EAGER else contestants.compile_for(name, lambda: made.step(), None)


def child(params: dict[str, Any]) -> dict[str, Any]:
    """In a fresh process: all contestants on one row, checked, then timed unless only the first calls are asked for."""
    options = Options(params["device"], quick=params["quick"])
    problem = Problem(next(r for r in ROWS if r.name == params["row"]), options)
    calls, first, problems = {}, {}, {}
    for name in params["contestants"]:
        problem.restart()
        try:
            step = _step(name, problem)
            start = time.perf_counter()
            step()
            first[name] = time.perf_counter() - start
            wrong = problem.judge()
        except Exception as error:  # a contestant that cannot do this row must not end the run of the others
            problems[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            continue
        if wrong:
            problems[name] = wrong
        if name != "aot_eager":
            calls[name] = Call(step, ())
    if params.get("only_first"):
        return {"first": first, "problems": problems}
    del problem.start, problem.eager
    calls["copy"] = copy_call(problem.nbytes, options.device)
    timings = interleave(calls, Budget.of(options.quick), options.device)
    samples = {name: t.samples for name, t in timings.items()}
    return {"first": first, "samples": samples, "problems": problems, "bytes": problem.nbytes}


@dataclass
class Result:
    """One row: seconds of first calls, steady timings, the copy of the same bytes."""

    row: Row
    nbytes: int
    first: dict[str, float]
    timings: dict[str, Timing]

    def over(self, rival: str) -> float | None:
        """How many times faster fuser's step is."""
        mine, theirs = self.timings.get("fuser"), self.timings.get(rival)
        return theirs.median / mine.median if mine and theirs else None

    def over_eager(self) -> float | None:
        """The same, of the fastest of eager's ways."""
        return min((v for n in EAGER if (v := self.over(n)) is not None), default=None)


def _first_of_inductor(params: dict[str, Any], cache: str, options: Options, report: Report) -> dict[str, float]:
    """Seconds of Inductor's first call, whose caches the others' process then finds; none if it took too long."""
    alone = {**params, "contestants": ["inductor"], "only_first": True}
    found = spawn("optimizers", alone, cache, timeout=RIVAL_SECONDS, inductor=options.caches)
    if "inductor" not in found.get("first", {}):
        said = found.get("error") or found["problems"]["inductor"]
        report.notes.append(f"{params['row']}, inductor is left out: {said}")
    return dict(found.get("first", {}))


def measure(row: Row, names: list[str], options: Options, report: Report) -> Result:
    """One row in a process of its own."""
    params = {"row": row.name, "contestants": names, "device": options.device, "quick": options.quick}
    with tempfile.TemporaryDirectory(prefix="benchmark-") as cache:
        first = _first_of_inductor(params, cache, options, report) if "inductor" in names else {}
        params["contestants"] = [n for n in names if n != "inductor" or n in first]
        found = spawn("optimizers", params, cache, timeout=3600.0, inductor=options.caches)
    found["first"] = {**found.get("first", {}), **first}
    if "error" in found:
        report.wrong.append(f"{row.name}: {found['error']}")
    for name, problem in found.get("problems", {}).items():
        (report.wrong if name == "fuser" else report.notes).append(f"{row.name}, {name}: {problem}")
    timings = {n: Timing(tuple(s)) for n, s in found.get("samples", {}).items()}
    return Result(row, found.get("bytes", 0), found.get("first", {}), timings)


def _tables(results: list[Result], names: list[str]) -> list[Table]:
    timed = [n for n in (*names, "copy") if n != "aot_eager"]
    rows = [
        (
            r.row.name,
            *(spread(r.timings[n]) if n in r.timings else "–" for n in timed),
            ratio(r.over("inductor")),
            ratio(r.over_eager()),
            ratio(r.over("copy")),
        )
        for r in results
    ]
    columns = ("optimiser, parameters", *timed, "fuser × inductor", "× best eager", "of the copy rate")
    title = "optimizers: a step, median [p10–p90]; ratios are times faster"
    compiled = [n for n in ("aot_eager", "inductor", "fuser") if n in names]
    first = [(r.row.name, *(seconds(r.first.get(n)) for n in compiled)) for r in results]
    return [
        Table(title, columns, rows),
        Table("optimizers: the first call; aot_eager only traces", ("optimiser, parameters", *compiled), first),
    ]


def _claims(results: list[Result]) -> list[Claim]:
    found = {r.row.name: r for r in results}
    adam = found.get("adam, gpt2")
    slowest = [(r.row.name, v) for r in results if (v := r.over_eager()) is not None]
    worst = min(slowest, key=lambda pair: pair[1], default=None)
    return [
        at_least("adam over GPT-2's parameters", adam.over("inductor") if adam else None, OVER_INDUCTOR, "× Inductor"),
        at_least("the same", adam.over("copy") if adam else None, COPY_SHARE, "of the copy rate"),
        at_least(
            "no step slower than eager's fastest",
            worst[1] if worst else None,
            1.0,
            detail=f" ({worst[0]})" if worst else "",
        ),
    ]


def run(options: Options) -> Report:
    """All selected rows."""
    report = Report("optimizers")
    wanted = [n for n in EAGER if options.has("eager")]
    wanted += ["aot_eager", *(("inductor",) if options.has("inductor") else ()), "fuser"]
    names = [n for n in wanted if n in EAGER or not (why := contestants.why_absent(n)) or report.notes.append(why)]
    rows = [r for r in ROWS if options.wants(r.name)]
    results = []
    with progress("optimizers", len(rows)) as bar:
        for row in rows:
            bar.step(row.name)
            results.append(measure(row, names, options, report))
    report.tables = _tables(results, names)
    report.claims = _claims(results)
    for r in results:
        times = {n: t.record() for n, t in r.timings.items()}
        report.records.append({"row": r.row.name, "bytes": r.nbytes, "first": r.first, "seconds": times})
    steady = {r.row.name: {n: t.median * 1e3 for n, t in r.timings.items()} for r in results}
    report.bars = [Bars("optimizers, a step", "ms", steady)]
    return report
