"""Kernels beside eager, the rivals and a warm copy of the same bytes: rows of papers, and functions in three sizes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks import account, checks, contestants
from benchmarks.kernel_rows import ROWS, SIZES, Row, moved_bytes, seeded
from benchmarks.options import Options
from benchmarks.papers import PAPERS, SIZE
from benchmarks.progress import progress
from benchmarks.report import Bars, Claim, Report, Table, at_least, ratio, spread
from benchmarks.runner import Budget, Call, Timing, copy_call, geomean, interleave

COPY_TARGET = 0.6
INDUCTOR_TARGET = 3.0
PAPERS_COPY_TARGET = 0.75
PAPERS_TARGET = 4.0


@dataclass(frozen=True)
class Result:
    """One row at one size: timings by contestant, verdicts by contestant, failures to run by contestant."""

    row: Row
    size: str
    shape: tuple[int, ...]
    moved: int
    timings: dict[str, Timing]
    verdicts: dict[str, checks.Verdict]
    failures: dict[str, str]
    fused: account.Account | None
    threads: int = 0

    @property
    def name(self) -> str:
        """row/size."""
        return f"{self.row.name}/{self.size}"

    @property
    def copy_target(self) -> float:
        """The share of the copy's rate that is aimed at."""
        return PAPERS_COPY_TARGET if self.size == SIZE else COPY_TARGET

    def over(self, rival: str, mine: str = "fuser") -> float | None:
        """How many times faster `mine` is than `rival`, by medians."""
        if rival not in self.timings or mine not in self.timings:
            return None
        return self.timings[rival].median / self.timings[mine].median

    def copy_share(self, mine: str) -> float | None:
        """The share of the copy's rate that `mine` reaches."""
        return self.over("copy", mine)


def _xla_call(row: Row, args: tuple[Any, ...]) -> Call | None:
    from benchmarks import xla

    fn = xla.functions().get(row.name)
    return Call(xla.compiled(fn), tuple(map(xla.to_jax, args))) if fn else None


def _call_for(name: str, row: Row, args: tuple[Any, ...]) -> Call | None:
    if name == "xla":
        return _xla_call(row, args)
    mine = checks.clones(args) if row.mutates else args
    return Call(contestants.compile_for(name, row.fn), mine)


def _outputs(name: str, call: Call, row: Row, args: tuple[Any, ...]) -> list[torch.Tensor]:
    if name == "xla":
        from benchmarks import xla

        out = call.fn(*call.args)
        return [xla.to_torch(o) for o in (out if isinstance(out, tuple) else (out,))]
    return checks.run_on_clones(call.fn, args, row.mutates)


def _as_eager_dtype(name: str, out: list[torch.Tensor], eager: list[torch.Tensor]) -> list[torch.Tensor]:
    """JAX has no int64 by default: its integers are compared by value."""
    return [o.to(e.dtype) for o, e in zip(out, eager, strict=True)] if name == "xla" else out


def measure(row: Row, size: str, names: list[str], device: str, budget: Budget) -> Result:
    """Compile a row for every contestant, check the results, then time them and the copy interleaved.

    A sample has as many calls for each contestant and follows a call that is not timed.
    """
    torch._dynamo.reset()
    shape = row.sizes[0 if size == SIZE else SIZES.index(size)]
    args = row.make(seeded(row.name, size, device), shape)
    eager = checks.run_on_clones(row.fn, args, row.mutates)
    exact = checks.run_on_clones(row.fn, checks.to_float64(args), row.mutates)
    account.start()
    calls: dict[str, Call] = {}
    verdicts: dict[str, checks.Verdict] = {}
    failures: dict[str, str] = {}
    for name in names:
        try:
            call = _call_for(name, row, args)
            if call is None:
                continue
            out = _as_eager_dtype(name, _outputs(name, call, row, args), eager)
        except Exception as error:  # a contestant that fails must not end the run of the others
            lines = str(error).strip().splitlines()
            failures[name] = f"{type(error).__name__}: {lines[0] if lines else ''}"
            continue
        verdicts[name] = checks.judge(out, eager, exact)
        calls[name] = call
    moved = moved_bytes(row, args, eager)
    del exact
    calls["copy"] = copy_call(moved, device)
    timings = interleave(calls, budget, device, equal=True)
    return Result(row, size, shape, moved, timings, verdicts, failures, account.take(), torch.get_num_threads())


def _cell(result: Result, name: str) -> str:
    if name in result.failures:
        return "failed"
    verdict = result.verdicts.get(name)
    if verdict and verdict.problem:
        return "WRONG"
    timing = result.timings.get(name)
    return "–" if timing is None else spread(timing)


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f} %"


def _short_of(result: Result, name: str) -> str:
    """What a row does not reach: its rivals' speed, the copy rate that is aimed at, or a kernel at all."""
    short = [rival for rival in ("inductor", "eager") if (v := result.over(rival, name)) is not None and v < 1]
    share = result.copy_share(name)
    if result.row.memory_bound and share is not None and share < result.copy_target:
        short.append("copy")
    if result.fused and result.fused.ops_unfused and name == "fuser":
        short.append("fusion")
    return ", ".join(short)


def _table(results: list[Result], size: str, threads: int, names: list[str]) -> Table:
    best = "fuser" if "fuser" in names else names[-1]
    columns = (
        *("row", "shape", "ops fused", *names, "copy"),
        *(f"{best} of copy", f"{best} × inductor", f"{best} × eager", "short of"),
    )
    rows = []
    for r in results:
        if (r.size, r.threads) != (size, threads):
            continue
        cells = [_cell(r, n) for n in [*names, "copy"]]
        shape = "×".join(map(str, r.shape))
        rows.append(
            (
                r.row.name,
                shape,
                r.fused.text() if r.fused else "–",
                *cells,
                _share(r.copy_share(best)),
                ratio(r.over("inductor", best)),
                ratio(r.over("eager", best)),
                _short_of(r, best),
            )
        )
    title = f"kernels, {size}, {_threads(threads)}: median [p10–p90]; ratios are times faster"
    return Table(title, columns, rows)


def _threads(count: int) -> str:
    return f"{count} thread{'s' * (count != 1)}"


def _lowest(pairs: list[tuple[str, float]]) -> str:
    name, value = min(pairs, key=lambda p: p[1])
    return f"{value:.2f} at {name}"


def _claims(results: list[Result], size: str, threads: int) -> list[Claim]:
    """What is promised of one size's rows with one number of threads."""
    mine = [r for r in results if (r.size, r.threads) == (size, threads) and "fuser" in r.timings]
    if not mine:
        return []
    which = f"{size} rows, {_threads(threads)}"
    over = {rival: [(r.name, v) for r in mine if (v := r.over(rival)) is not None] for rival in ("inductor", "eager")}
    claims = [
        at_least(
            f"{which}, over Inductor (geometric mean of {len(over['inductor'])})",
            geomean([v for _, v in over["inductor"]]) if over["inductor"] else None,
            PAPERS_TARGET if size == SIZE else INDUCTOR_TARGET,
        )
    ]
    for rival, pairs in over.items():
        slower = [f"{name} {value:.2f}" for name, value in pairs if value < 1]
        reached = (f"lowest {_lowest(pairs)}; below: {', '.join(slower) or 'none'}") if pairs else "not measured"
        claims.append(Claim(f"{which}: none below {rival}", "≥ 1 ×", reached, not slower if pairs else None))
    shares = [(r.name, s) for r in mine if r.row.memory_bound and (s := r.copy_share("fuser")) is not None]
    aim = mine[0].copy_target
    low = [f"{name} {100 * s:.0f} %" for name, s in shares if s < aim]
    reached = f"{len(shares) - len(low)} of {len(shares)} rows; below: {', '.join(low) or 'none'}"
    claims.append(
        Claim(
            f"{which}, memory-bound, at the copy rate",
            f"≥ {100 * aim:.0f} % each",
            reached if shares else "not measured",
            not low if shares else None,
        )
    )
    return claims


def _record(r: Result) -> dict[str, Any]:
    return {
        "row": r.name,
        "source": r.row.source,
        "threads": r.threads,
        "shape": r.shape,
        "fused": asdict(r.fused) if r.fused else None,
        "bytes": r.moved,
        "seconds": {name: t.record() for name, t in r.timings.items()},
        "error_over_eager": {name: [v.error, v.eager_error] for name, v in r.verdicts.items() if v.error is not None},
        "problems": {name: v.problem for name, v in r.verdicts.items() if v.problem} | r.failures,
    }


def _report(results: list[Result], names: list[str], notes: list[str]) -> Report:
    report = Report("kernels", notes=notes)
    parts = list(dict.fromkeys((r.size, r.threads) for r in results))
    report.tables = [_table(results, *part, names) for part in parts]
    report.claims = [c for part in parts if part[0] in ("large", SIZE) for c in _claims(results, *part)]
    report.records = [_record(r) for r in results]
    for r in results:
        problems = {name: v.problem for name, v in r.verdicts.items() if v.problem} | r.failures
        for name, problem in problems.items():
            target = report.wrong if name == "fuser" else report.notes
            target.append(f"{r.name}, {name}: {problem}")
        if r.fused and r.fused.unfused:
            reasons = "; ".join(f"{n} × {reason}" for reason, n in r.fused.unfused.items())
            report.notes.append(f"{r.name}: not fused: {reasons}")
    for size, threads in parts:
        mine = [r for r in results if (r.size, r.threads) == (size, threads)]
        groups = {r.row.name: {n: s for n in names if (s := r.copy_share(n)) is not None} for r in mine}
        report.bars.append(Bars(f"kernels, {size}, {_threads(threads)}", "share of the copy rate", groups))
    return report


def run(options: Options) -> Report:
    """All selected rows with each number of threads; with --quick the small and medium sizes, few papers."""
    notes: list[str] = []
    rivals = [r for r in ("eager", "inductor", "xla") if options.has(r)]
    names = contestants.present([*rivals, "fuser"], notes)
    todo = [(row, SIZE) for row in PAPERS[:: 8 if options.quick and not options.rows else 1]]
    todo += [(row, size) for row in ROWS for size in (SIZES[:2] if options.quick else SIZES)]
    todo = [(row, size) for row, size in todo if options.wants(f"{row.name}/{size}")]
    before = torch.get_num_threads()
    counts = options.threads or (before,)
    results = []
    try:
        with progress("kernels", len(todo) * len(counts)) as bar:
            for threads in counts:
                torch.set_num_threads(threads)
                for row, size in todo:
                    bar.step(f"{row.name}/{size}, {_threads(threads)}")
                    results.append(measure(row, size, names, options.device, Budget.of(options.quick)))
    finally:
        torch.set_num_threads(before)
    if not results:
        notes.append(f"no row matches {options.rows!r}")
    return _report(results, names, notes)
