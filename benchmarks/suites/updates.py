"""States that public models write in place, beside eager and TorchInductor; results and states are compared."""

from __future__ import annotations

from benchmarks import contestants
from benchmarks.options import Options
from benchmarks.papers import SIZE
from benchmarks.progress import progress
from benchmarks.report import Claim, Report, Table, ratio, spread
from benchmarks.runner import Budget, geomean
from benchmarks.suites.kernels import Result, measure
from benchmarks.update_rows import ROWS

LEAST = 0.97  # of eager's speed


def _cell(r: Result, name: str) -> str:
    verdict = r.verdicts.get(name)
    if name in r.failures or (verdict and verdict.problem):
        return "failed" if name in r.failures else "WRONG"
    return spread(r.timings[name]) if name in r.timings else "–"


def _table(results: list[Result], names: list[str]) -> Table:
    rivals = [n for n in names if n != "fuser"]
    columns = ("update", *names, *(f"fuser × {n}" for n in rivals), "source")
    rows = [
        (r.row.name, *(_cell(r, n) for n in names), *(ratio(r.over(n)) for n in rivals), r.row.source) for r in results
    ]
    return Table("updates: median [p10–p90]; ratios are times faster", columns, rows)


def _claim(results: list[Result]) -> Claim:
    found = [(r.row.name, v) for r in results if (v := r.over("eager")) is not None]
    below = ", ".join(f"{name} {v:.2f}" for name, v in found if v < LEAST) or "none"
    said = f"geometric mean {geomean([v for _, v in found]):.2f}; below: {below}" if found else "not measured"
    return Claim("speed over eager's", f"≥ {LEAST:g} each", said, below == "none" if found else None)


def run(options: Options) -> Report:
    """All selected rows."""
    report = Report("updates")
    wanted = [*(r for r in ("eager", "inductor") if options.has(r)), "fuser"]
    names = contestants.present(wanted, report.notes)
    rows = [r for r in ROWS if options.wants(r.name)]
    results = []
    with progress("updates", len(rows)) as bar:
        for row in rows:
            bar.step(row.name)
            results.append(measure(row, SIZE, names, options.device, Budget.of(options.quick)))
    report.tables, report.claims = [_table(results, names)], [_claim(results)]
    for r in results:
        problems = {n: v.problem for n, v in r.verdicts.items() if v.problem} | r.failures
        for name, problem in problems.items():
            (report.wrong if name == "fuser" else report.notes).append(f"{r.row.name}, {name}: {problem}")
        times = {n: t.record() for n, t in r.timings.items()}
        report.records.append({"row": r.row.name, "source": r.row.source, "seconds": times, "problems": problems})
    return report
