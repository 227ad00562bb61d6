"""Single operators through `torch.compile` beside eager: no program should be slower with it than without.

Each row runs at four sizes, with one thread and with all, in a process for each number of threads. Eager, fuser and
`torch.compile` with a backend that does nothing ("dynamo": what each call costs before any backend has a say) run in
turns; a share of eager's speed is the median over rounds of eager's time by fuser's. With one thread, time is that
thread's CPU time.
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from typing import Any

import torch

from benchmarks import account, checks, contestants
from benchmarks.child import spawn
from benchmarks.kernel_rows import seeded
from benchmarks.options import Options
from benchmarks.progress import progress
from benchmarks.report import Claim, Report, Table, at_least, ratio, seconds
from benchmarks.runner import Budget, Call, Clock, Timing, geomean, interleave
from benchmarks.singles_rows import ROWS, SIZES, Single

LEAST = 0.97
_EXACT = 1 << 21  # elements up to which results are compared with float64, too
_BUDGET = Budget(row_seconds=0.4, sample_seconds=1e-3, min_rounds=7, max_rounds=31)


def thread_counts() -> tuple[int, ...]:
    """One thread, and as many as torch uses here."""
    return tuple(sorted({1, torch.get_num_threads()}))


def _clock() -> Clock:
    """CPU time where one thread does all the work: other processes do not count then."""
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def share(timings: dict[str, Timing], of: str, mine: str = "fuser") -> float:
    """The speed of `mine` as a share of another's: the median over rounds."""
    pairs = zip(timings[of].samples, timings[mine].samples, strict=True)
    return statistics.median(theirs / own for theirs, own in pairs)


def least_share(timings: dict[str, Timing], of: str) -> float:
    """The same by the least time of each, which a busy machine disturbs less."""
    return min(timings[of].samples) / min(timings["fuser"].samples)


def measure(row: Single, size: str, names: list[str], budget: Budget) -> dict[str, Any]:
    """One row at one size as a record."""
    torch._dynamo.reset()
    n = SIZES[size]
    args = row.make(seeded(row.name, size, "cpu"), n)
    record: dict[str, Any] = {"row": row.name, "size": size, "threads": torch.get_num_threads()}
    eager = checks.tensors(row.fn(*args))
    exact = checks.tensors(row.fn(*checks.to_float64(args))) if n <= _EXACT and not row.random else None
    account.start()
    calls = {name: Call(contestants.compile_for(name, row.fn, dynamic=None), args) for name in names}
    try:
        out = checks.tensors(calls["fuser"].fn(*args))
        record["problem"] = None if row.random else checks.judge(out, eager, exact).problem
        if record["problem"] and exact is None:  # of a sum of many numbers eager's may be the one that is off
            exact = checks.tensors(row.fn(*checks.to_float64(args)))
            record["problem"] = checks.judge(out, eager, exact).problem
        del out, eager, exact
        timings = interleave(calls, budget, clock=_clock(), equal=True)
    except Exception as error:  # the other rows are worth having
        return record | {"problem": f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}"}
    fused = account.take()
    record["unfused"] = list(fused.unfused) if fused else ["nothing was compiled"]
    record["seconds"] = {name: t.record() for name, t in timings.items()}
    record["share"] = {name: share(timings, name) for name in names if name != "fuser"}
    record["least_share"] = {name: least_share(timings, name) for name in names if name != "fuser"}
    return record


def child(params: dict[str, Any]) -> list[dict[str, Any]]:
    """All rows of a process with so many threads."""
    torch.set_num_threads(params["threads"])
    options, budget = Options(rows=params["rows"]), Budget(**params["budget"])
    rows = [r for r in ROWS if options.wants(r.name)]
    with progress(f"singles, threads {params['threads']}", len(rows) * len(params["sizes"])) as bar:
        found = []
        for row in rows:
            for size in params["sizes"]:
                bar.step(f"{row.name} {size}")
                found.append(measure(row, size, params["names"], budget))
    return found


def _table(records: list[dict[str, Any]], size: str, threads: int, names: list[str]) -> Table:
    others = [n for n in names if n != "fuser"]
    columns = ("row", *names, *(f"× {n}" for n in others), "× eager, least", "by ATen, because")
    rows = []
    for r in records:
        if r["size"] != size or r["threads"] != threads:
            continue
        if "seconds" not in r:
            rows.append((r["row"], *("–",) * (len(columns) - 2), str(r["problem"])))
            continue
        medians = [seconds(r["seconds"][n]["median"]) for n in names]
        shares = [ratio(r["share"][n]) for n in others]
        why = "WRONG" if r["problem"] else "; ".join(r["unfused"])[:60]
        rows.append((r["row"], *medians, *shares, ratio(r["least_share"]["eager"]), why))
    return Table(f"singles, {size}, threads {threads}: medians; ratios are times faster", columns, rows)


def _claims(records: list[dict[str, Any]], threads: int) -> list[Claim]:
    """Against eager from 1 MB on; at 64 KB against what Dynamo leaves of eager's speed before any backend."""
    claims = []
    for of, what, sizes in (("eager", "from 1 MB", list(SIZES)[1:]), ("dynamo", "64 KB", list(SIZES)[:1])):
        found = [r for r in records if r["threads"] == threads and r["size"] in sizes and of in r.get("share", {})]
        if not found:
            continue
        shares = {f"{r['row']}/{r['size']}": r["share"][of] for r in found}
        low = sorted((v, k) for k, v in shares.items() if v < LEAST)
        names = ", ".join(f"{k} {v:.2f}" for v, k in low) or "none"
        title = f"{what}, threads {threads}, beside {of}"
        claims.append(at_least(f"{title} (geometric mean of {len(shares)})", geomean(list(shares.values())), 1.0))
        reached = f"worst {min(shares.values()):.2f}; below: {names}"
        claims.append(Claim(f"{title}: none slower", f"≥ {LEAST} ×", reached, not low))
    return claims


def run(options: Options) -> Report:
    """All rows; with --quick the two smaller sizes, with few rounds."""
    report = Report("singles")
    wanted = ["eager", "fuser", "dynamo", *(["inductor"] if options.full and options.has("inductor") else [])]
    names = contestants.present(wanted, report.notes)
    sizes = list(SIZES)[: 2 if options.quick else None]
    budget = dataclasses.replace(_BUDGET, row_seconds=0.05, min_rounds=3) if options.quick else _BUDGET
    for threads in thread_counts():
        params = {"threads": threads, "rows": options.rows, "sizes": sizes, "names": names}
        with tempfile.TemporaryDirectory() as cache:
            done: Any = spawn("singles", params | {"budget": dataclasses.asdict(budget)}, cache, timeout=7200.0)
        if isinstance(done, dict):
            report.wrong.append(f"threads {threads}: {done['error']}")
            continue
        report.records += done
        report.tables += [_table(done, size, threads, names) for size in sizes]
        report.claims += _claims(done, threads)
        report.wrong += [f"{r['row']}/{r['size']}, threads {threads}: {r['problem']}" for r in done if r["problem"]]
    return report
