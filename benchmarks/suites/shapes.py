"""A hundred sizes of one function, 0 and 1 among them: how many compilations, and how long until all results are in."""

from __future__ import annotations

import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import account, checks, contestants
from benchmarks.child import spawn
from benchmarks.options import Options
from benchmarks.progress import progress
from benchmarks.report import Bars, Claim, Report, Table, ratio, seconds
from fuser.cuda import tiles
from fuser.scheduler.choices import LARGE

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """A function of tensors and how their sizes follow from (rows, columns)."""

    name: str
    fn: Callable[..., Any]
    shapes: Callable[[int, int], tuple[Shape, ...]]
    reduces: bool = False


def _pointwise(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.relu(x * y + 1)


def _bias(x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x + b) * x


def _row_sum(x: torch.Tensor) -> torch.Tensor:
    return (x * x).sum(-1)


def _softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


CASES = (
    Case("pointwise", _pointwise, lambda n, m: ((n, m), (n, m))),
    Case("row bias", _bias, lambda n, m: ((n, m), (m,))),
    Case("row sum", _row_sum, lambda n, m: ((n, m),), True),
    Case("softmax", _softmax, lambda n, m: ((n, m),), True),
)
# contestant -> (who compiles, the `dynamic` of torch.compile)
CONTESTANTS: dict[str, tuple[str, bool | None]] = {
    "eager": ("eager", None),
    "fuser handle": ("fuser handle", None),
    "fuser": ("fuser", None),
    "inductor dynamic": ("inductor", True),
    "inductor": ("inductor", None),
}


def sizes(count: int) -> list[tuple[int, int]]:
    """`count` pairs (rows, columns), each different, starting with those of 0 and 1."""
    edges = [(3, 5), (0, 5), (1, 5), (5, 0), (5, 1), (0, 0), (1, 1), (0, 1), (1, 0)]
    draw = random.Random(0)
    found = dict.fromkeys(edges[:count])
    while len(found) < count:
        found[draw.randint(0, 300), draw.randint(0, 600)] = None
    return list(found)


def _compilations(name: str) -> int | None:
    """Kernels that fuser compiled, or graphs that Dynamo handed to a rival."""
    if "fuser" in name:
        return contestants.kernels_compiled()
    if name == "eager":
        return 0
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def child(params: dict[str, Any]) -> dict[str, Any]:
    """In a fresh process: every case, every size, through one compiled function for each case."""
    name, dynamic = CONTESTANTS[params["contestant"]]
    generator = torch.Generator().manual_seed(0)
    results = {}
    for case in CASES:
        before, fell_back = _compilations(name) or 0, Counter(account.fallbacks())
        fn = contestants.compile_for(name, case.fn, dynamic)
        spent, problems = 0.0, []
        for n, m in sizes(params["count"]):
            args = tuple(torch.randn(s, generator=generator).to(params["device"]) for s in case.shapes(n, m))
            start = time.perf_counter()
            out = fn(*args)
            if params["device"] == "cuda":
                torch.cuda.synchronize()
            spent += time.perf_counter() - start
            problem = checks.judge(checks.tensors(out), checks.tensors(case.fn(*args))).problem
            if problem:
                problems.append(f"{case.name} at ({n}, {m}): {problem}")
        after = _compilations(name)
        results[case.name] = {
            "compilations": None if after is None else after - before,
            "seconds": spent,
            "problems": problems,
            "fallbacks": dict(Counter(account.fallbacks()) - fell_back),
        }
    return results


def classes(case: Case, count: int, device: str) -> int:
    """How many classes of `docs/cuda.md` the sizes are. On a CPU small calls are one, and large ones by their rows."""
    if device != "cuda":
        ends = (8, 9, 16, 32, 128) if case.reduces else (8, 9, 32) if case.fn is _bias else ()
        return len({sum(m >= end for end in ends) if n * m >= LARGE else -1 for n, m in sizes(count)})
    found = set()
    for n, m in sizes(count):
        seen: dict[int, int] = {}
        tokens = tuple(k if k <= 1 else 2 + seen.setdefault(k, len(seen)) for s in case.shapes(n, m) for k in s)
        along = tiles.row_class(m) if case.reduces else (m < tiles.SHORT_VECTOR, m % 16 == 0)
        found.add((tokens, along))
    return len(found)


def _claims(results: dict[str, dict[str, Any]], count: int, device: str) -> list[Claim]:
    what, target = "compilations for all sizes through fusion_handle", "at most 1 for each class"
    cases = {case: r for case, r in results.get("fuser handle", {}).items() if isinstance(r, dict)}
    if not cases or any(r["compilations"] is None for r in cases.values()):
        return [Claim(what, target, "not measured", None)]
    parts = []
    most = {case.name: classes(case, count, device) for case in CASES}
    for case, r in cases.items():
        fell_back = sum(r["fallbacks"].values())
        of = f" for {most[case]} classes" if device == "cuda" else ""
        parts.append(f"{case} {r['compilations']}{of}{f' and {fell_back} calls by ATen' if fell_back else ''}")
    met = all(r["compilations"] <= most[case] and not r["fallbacks"] for case, r in cases.items())
    return [Claim(what, target, ", ".join(parts), met)]


def _report(results: dict[str, dict[str, Any]], count: int, notes: list[str], device: str = "cpu") -> Report:
    report = Report("shapes", notes=notes, claims=_claims(results, count, device))
    rows = []
    for name, by_case in results.items():
        target = report.wrong if name.startswith("fuser") else report.notes
        if "error" in by_case:
            target.append(f"{name}: {by_case['error']}")
            continue
        for case, r in by_case.items():
            rows.append((case, name, str(r["compilations"]), seconds(r["seconds"]), ratio(r["seconds"] / count * 1e3)))
            target.extend(f"{name}, {p}" for p in r["problems"][:3])
            report.notes.extend(f"{name}, {case}: {n} calls by ATen: {why}" for why, n in r["fallbacks"].items())
        report.records.append({"contestant": name, "cases": by_case})
    rows.sort(key=lambda r: [c.name for c in CASES].index(r[0]))
    columns = ("function", "contestant", "compilations", "all results", "ms each")
    report.tables = [Table(f"shapes: {count} sizes of (rows, columns), fresh process, empty caches", columns, rows)]
    groups = {case.name: {n: r[case.name]["seconds"] for n, r in results.items() if case.name in r} for case in CASES}
    report.bars = [Bars(f"shapes, {count} sizes", "seconds", groups)]
    report.notes.append(
        "for rivals a compilation is a graph that Dynamo handed over; past its limit of 8 it runs eagerly"
    )
    return report


def run(options: Options) -> Report:
    """Each contestant in a fresh process."""
    notes: list[str] = []
    bases = {name: base for name, (base, _) in CONTESTANTS.items() if base.startswith("fuser") or options.has(base)}
    here = contestants.present(list(dict.fromkeys(bases.values())), notes)
    names = [n for n, base in bases.items() if base in here and options.wants(n)]
    count = 20 if options.quick else 100
    results = {}
    with progress("shapes", len(names)) as bar:
        for name in names:
            bar.step(name)
            with tempfile.TemporaryDirectory(prefix="benchmark-") as cache:
                params = {"contestant": name, "device": options.device, "count": count}
                results[name] = spawn("shapes", params, cache)
    return _report(results, count, notes, options.device)
