"""Inference with weights that do not change, in two dtypes, beside every rival that takes weights as constants."""

from __future__ import annotations

import functools

import torch

from benchmarks import contestants
from benchmarks.contraction_rows import Built, Row
from benchmarks.models import build
from benchmarks.options import Options
from benchmarks.progress import progress
from benchmarks.report import Claim, Report
from benchmarks.suites import contractions
from benchmarks.suites.contractions import Result

MODELS = ("gpt2", "bert", "llama", "resnet50")
DTYPES = (torch.float32, torch.bfloat16)
MINE, LEAST = "fuser-frozen", 0.97  # of the fastest rival's speed


def _make(model: str, dtype: torch.dtype, quick: bool) -> Built:
    module, inputs = build(model, quick, "cpu")
    return module.to(dtype), tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs)


ROWS = tuple(
    Row(f"{model}, {str(dtype)[6:]}", functools.partial(_make, model, dtype)) for model in MODELS for dtype in DTYPES
)


def _claim(name: str, results: list[Result]) -> Claim:
    """What is promised: no rival is clearly faster."""
    found = []
    for r in results:
        rivals = [v for n in r.timings if n != MINE and (v := r.over(n, MINE)) is not None]
        if rivals:
            found.append((r.row, min(rivals)))
    said = ", ".join(f"{row} {v:.2f}" for row, v in found) or "not measured"
    what = f"{name}: speed over the fastest rival's"
    return Claim(what, f"≥ {LEAST:g} each", said, all(v >= LEAST for _, v in found) if found else None)


def run(options: Options) -> Report:
    """All rows with each number of threads, beside eager and the rivals that are installed."""
    notes: list[str] = []
    rivals = [r for r in contestants.FROZEN if options.has(r)] or list(contestants.FROZEN)
    names = contestants.present([*(["eager"] if options.has("eager") else []), *rivals, MINE], notes)
    rows = [r for r in ROWS if options.wants(r.name)]
    before = torch.get_num_threads()
    counts = options.threads or (before,)
    whole = Report("frozen", notes=notes)
    try:
        with progress("frozen", len(rows) * len(counts)) as bar:
            for threads in counts:
                torch.set_num_threads(threads)
                results = []
                for row in rows:
                    bar.step(row.name)
                    results.append(contractions.measure(row, names, options))
                title = f"frozen, {threads} thread{'s' if threads > 1 else ''}"
                _add(whole, contractions.report_of(title, results, names, []), results)
    finally:
        torch.set_num_threads(before)
    return whole


def _add(whole: Report, part: Report, results: list[Result]) -> None:
    whole.tables += part.tables
    whole.claims.append(_claim(part.suite, results))
    whole.records += [{**r, "part": part.suite} for r in part.records]
    whole.wrong += part.wrong
    whole.notes += part.notes
