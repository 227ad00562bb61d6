"""Convolutions and products with what follows them: every contestant checked against eager, then timed interleaved."""

from __future__ import annotations

import copy
import dataclasses
import zlib
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import checks, contestants
from benchmarks.contraction_rows import ROWS, Row
from benchmarks.options import Options
from benchmarks.progress import progress
from benchmarks.report import Claim, Report, Table, at_least, ratio, spread
from benchmarks.runner import Budget, Call, Timing, geomean, interleave

TARGET, LEAST = 1.1, 0.95  # of Inductor's speed: the geometric mean, and each row
BY_HAND = "by hand"  # the method `by_hand` of a row's module, in eager: the call that an expert would write
Function = Callable[..., Any]
CallOf = Callable[[torch.nn.Module, Function], Function]  # what is timed of a module and its forward
TOLERANCE_SCALE = 10.0  # sums of another order; float64 bounds the error by eager's own
ROW_SECONDS = 2.0


@dataclasses.dataclass
class Result:
    """One row: timings, and what was wrong, by contestant."""

    row: str
    timings: dict[str, Timing]
    problems: dict[str, str]

    def over(self, rival: str, name: str = "fuser") -> float | None:
        """How many times faster a contestant is."""
        if rival not in self.timings or name not in self.timings:
            return None
        return self.timings[rival].median / self.timings[name].median


def _forward(module: torch.nn.Module, forward: Function) -> Function:
    return forward


def measure(row: Row, names: list[str], options: Options, call_of: CallOf = _forward) -> Result:
    """Compile a row for every contestant, check the results, then time them interleaved."""
    torch._dynamo.reset()
    torch.manual_seed(zlib.crc32(row.name.encode()))
    module, inputs = row.make(options.quick)
    module, inputs = module.to(options.device), tuple(x.to(options.device) for x in inputs)
    wide = copy.deepcopy(module).double()
    eager = checks.tensors(call_of(module, module)(*inputs))
    exact = checks.tensors(call_of(wide, wide)(*checks.to_float64(inputs)))
    calls: dict[str, Call] = {}
    problems: dict[str, str] = {}
    for name in names:
        try:
            own = copy.deepcopy(module)  # Dynamo keeps its cache by code, and frozen weights are kept by module
            step = call_of(own, _contestant(name, own))
            verdict = checks.judge(checks.tensors(step(*inputs)), eager, exact, TOLERANCE_SCALE)
        except Exception as error:  # a contestant that fails must not end the run of the others
            lines = str(error).strip().splitlines()
            problems[name] = f"{type(error).__name__}: {lines[0] if lines else ''}"
            continue
        if verdict.problem:
            problems[name] = verdict.problem
        else:
            calls[name] = Call(step, inputs)
    seconds = 0.2 if options.quick else ROW_SECONDS
    budget = dataclasses.replace(Budget.of(options.quick), row_seconds=seconds)
    return Result(row.name, interleave(calls, budget, options.device, equal=True), problems)


def _contestant(name: str, module: Any) -> Function:
    if name == "eager":
        return module  # type: ignore[no-any-return]
    made: Function = module.by_hand if name == BY_HAND else contestants.compile_for(name, module)
    return made


def _cell(result: Result, name: str) -> str:
    if name in result.problems:
        return "failed"
    return spread(result.timings[name]) if name in result.timings else "–"


def report_of(title: str, results: list[Result], names: list[str], notes: list[str]) -> Report:
    """The table of some rows, and what is promised of them."""
    report = Report(title, notes=notes)
    mine = [n for n in ("fuser", "fuser-frozen") if n in names]
    rivals = [n for n in names if n not in mine]
    columns = ("row", *names, *(f"{m} × {r}" for m in mine for r in rivals))
    rows = [
        (r.row, *(_cell(r, n) for n in names), *(ratio(r.over(rival, m)) for m in mine for rival in rivals))
        for r in results
    ]
    report.tables = [Table(f"{title}: median [p10–p90]; ratios are times faster", columns, rows)]
    report.claims = [c for rival in rivals for c in _claims(results, rival)]
    for r in results:
        times: dict[str, Any] = {n: t.record() for n, t in r.timings.items()}
        report.records.append({"row": r.row, "seconds": times, "problems": r.problems})
        for name, problem in r.problems.items():
            (report.wrong if name in mine else report.notes).append(f"{r.row}, {name}: {problem}")
    return report


_NAMED = 3  # rows below a target that a claim names, the worst first


def _claims(results: list[Result], rival: str) -> list[Claim]:
    found = [(r.row, v) for r in results if (v := r.over(rival)) is not None]
    mean = geomean([v for _, v in found]) if found else None
    target = 1.0 if rival == BY_HAND else TARGET
    least = 1.0 if rival == "eager" else LEAST
    below = [f"{row} {v:.2f}" for row, v in sorted(found, key=lambda pair: pair[1]) if v < least]
    said = "; ".join([*below[:_NAMED], *([f"{len(below) - _NAMED} more"] if len(below) > _NAMED else [])])
    return [
        at_least(f"over {rival} (geometric mean of {len(found)})", mean, target),
        Claim(f"no row below {least:g} of {rival}", "none", said or "none", not below if found else None),
    ]


def run_rows(
    title: str, rows: tuple[Row, ...], options: Options, call_of: CallOf | None = None, by_hand: bool = False
) -> Report:  # fmt: skip
    """All selected rows. `call_of` makes what is timed of a module and its compiled forward; None: the forward."""
    notes: list[str] = []
    frozen = [r for r in contestants.FROZEN if options.has(r)]
    wanted = [*(r for r in ("eager", "inductor") if options.has(r)), *frozen, "fuser"]
    names = contestants.present([*wanted, *(["fuser-frozen"] if frozen else [])], notes)
    names = [*names[:1], BY_HAND, *names[1:]] if by_hand else names
    chosen = [r for r in rows if options.wants(r.name)]
    results = []
    with progress(title, len(chosen)) as bar:
        for row in chosen:
            bar.step(row.name)
            results.append(measure(row, names, options, call_of or _forward))
    return report_of(title, results, names, notes)


def run(options: Options) -> Report:
    """The rows of `contraction_rows`."""
    return run_rows("contractions", ROWS, options)
