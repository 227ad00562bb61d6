"""An ahead-of-time file of GPT-2: the first result in a fresh process, and steady calls beside `torch.compile`."""

from __future__ import annotations

import pathlib
import sys
import tempfile
import time
import warnings
from typing import Any

import torch

from benchmarks import checks
from benchmarks.child import spawn
from benchmarks.options import Options
from benchmarks.progress import progress
from benchmarks.report import Report, Table, at_least, at_most, seconds, spread
from benchmarks.runner import Budget, Call, interleave
from examples.gpt2 import GPT2Config, build

FIRST_S, STEADY = 0.5, 0.97
TOKENS = 8  # of the first result: one sequence
ABSENT = ("torch._dynamo", "torch._inductor", "triton", "sympy")


def child(params: dict[str, Any]) -> dict[str, Any]:
    """In a fresh process, after `import torch`: seconds of importing fuser.aot, of loading, and of the first result."""
    from torch import load as read  # torch is there before the clock starts

    ids, want = read(params["case"])
    start = time.perf_counter()
    from fuser import aot

    imported = time.perf_counter()
    program = aot.load(params["file"])
    loaded = time.perf_counter()
    got = program(ids)
    end = time.perf_counter()
    found = [name for name in ABSENT if name in sys.modules]
    problem = f"{found} were imported" if found else checks.judge([got], [want]).problem
    parts = {"import": imported - start, "load": loaded - imported, "call": end - loaded, "first": end - start}
    return {**parts, "misses": program.kernel_misses, "problem": problem}


def _write(options: Options, folder: pathlib.Path) -> tuple[torch.nn.Module, torch.Tensor, dict[str, Any]]:
    from fuser import aot

    model, ids = build(GPT2Config(layers=2) if options.quick else None)
    dynamic = torch.export.Dim.AUTO
    exported = torch.export.export(model, (ids,), dynamic_shapes=({0: dynamic, 1: dynamic},))
    start = time.perf_counter()
    aot.compile(exported, folder / "gpt2.fuser")
    taken = time.perf_counter() - start
    small = ids[:1, :TOKENS]
    torch.save((small, model(small)), folder / "case")
    params = {"file": str(folder / "gpt2.fuser"), "case": str(folder / "case")}
    return model, ids, params | {"written": taken}


def run(options: Options) -> Report:
    """The file is written once; three fresh processes load it, then it runs beside `torch.compile` here."""
    report = Report("aot")
    if options.device != "cpu":
        report.notes.append("ahead-of-time files hold programs of the CPU")
        return report
    with progress("aot", 5) as bar, torch.no_grad(), warnings.catch_warnings(), tempfile.TemporaryDirectory() as place:
        warnings.simplefilter("ignore")
        folder = pathlib.Path(place)
        bar.step("export and write")
        model, ids, params = _write(options, folder)
        found = []
        for n in range(3):
            bar.step(f"fresh process {n + 1}")
            found.append(spawn("aot", params, str(folder / "empty")))
        for one in found:
            if problem := one.get("error") or one.get("problem"):
                report.wrong.append(f"fresh process: {problem}")
        bar.step("steady")
        _steady(model, ids, params["file"], options, report)
    whole = sorted((f for f in found if "first" in f), key=lambda f: float(f["first"]))
    report.records += [{"row": "fresh process"} | f for f in found]
    if whole:
        middle = whole[len(whole) // 2]
        cells = [(name, seconds(middle[name])) for name in ("import", "load", "call", "first")]
        title = f"aot: GPT-2, a fresh process after `import torch`, {TOKENS} tokens; no compiler is used"
        report.tables.append(Table(title, ("step", "median process"), cells))
        report.claims.append(at_most("first result of a fresh process", middle["first"], FIRST_S))
    report.notes.append(f"writing the file, after torch.export: {seconds(params['written'])}")
    return report


def _steady(model: torch.nn.Module, ids: torch.Tensor, file: str, options: Options, report: Report) -> None:
    from fuser import aot

    program, compiled = aot.load(file), torch.compile(model, backend="fuser")
    problem = checks.judge([program(ids)], [compiled(ids)]).problem
    if problem:
        report.wrong.append(f"steady: {problem}")
        return
    calls = {"torch.compile": Call(compiled, (ids,)), "aot": Call(program, (ids,)), "eager": Call(model, (ids,))}
    timings = interleave(calls, Budget.of(options.quick), options.device)
    cells = [(name, spread(timing)) for name, timing in timings.items()]
    report.tables.append(Table(f"aot: GPT-2, steady, {tuple(ids.shape)} tokens", ("way", "median [p10–p90]"), cells))
    gain = timings["torch.compile"].median / timings["aot"].median
    report.claims.append(at_least("steady speed beside torch.compile", None if options.quick else gain, STEADY))
    report.records.append({"row": "steady", "seconds": {n: t.record() for n, t in timings.items()}})
