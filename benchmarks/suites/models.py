"""Whole models: compile seconds in fresh processes with empty caches, steady milliseconds interleaved, memory."""

from __future__ import annotations

import dataclasses
import pathlib
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import account, checks, contestants
from benchmarks.child import spawn
from benchmarks.models import MODELS, build
from benchmarks.options import Options
from benchmarks.progress import progress
from benchmarks.report import Bars, Claim, Report, Table, at_least, ratio, seconds, spread
from benchmarks.runner import Budget, Call, Timing, geomean, interleave

COMPILE_SHARE = 0.1
STEADY_TARGET = 1.1
TOLERANCE_SCALE = 10.0  # a model's matmuls may reassociate; float64 still bounds the error by eager's own
FIRST = ("aot_eager", "eager", "fuser", "inductor")
REPEATS = {"aot_eager": 3, "fuser": 3, "eager": 1, "inductor": 1}
MIB = 1 << 20
STEPS = 3

Step = Callable[..., Any]


def infer_step(name: str, model: torch.nn.Module) -> Step:
    """The model's forward as the contestant runs it: inputs to outputs. A training step would be its twin."""
    return contestants.compile_for(name, model)


STEP_OF_MODE: dict[str, Callable[[str, torch.nn.Module], Step]] = {"infer": infer_step}


def _reset_peak() -> bool:
    try:
        pathlib.Path("/proc/self/clear_refs").write_text("5")
        return True
    except OSError:
        return False


def _peak_mib() -> float:
    """The most resident memory since the last reset, in MiB."""
    try:
        for line in pathlib.Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _first(params: dict[str, Any]) -> dict[str, Any]:
    """Seconds of the first call, and peak memory: of everything, and of steps after it."""
    model, inputs = build(params["model"], params["quick"], params["device"])
    start = time.perf_counter()
    step = STEP_OF_MODE[params["mode"]](params["contestant"], model)
    step(*inputs)
    if params["device"] == "cuda":
        torch.cuda.synchronize()
    first = time.perf_counter() - start
    whole = _peak_mib()
    reset = _reset_peak()
    for _ in range(STEPS):
        step(*inputs)
    return {"first": first, "peak_mib": whole, "steady_peak_mib": _peak_mib() if reset else None}


def _steady(params: dict[str, Any]) -> dict[str, Any]:
    """All contestants on one model: results checked, then timed interleaved. Finds the caches of the first calls."""
    model, inputs = build(params["model"], params["quick"], params["device"])
    exact = checks.run_on_clones(model.double(), checks.to_float64(inputs))
    model.float()
    eager = checks.tensors(model(*inputs))
    account.start()
    calls, problems = {}, {}
    for name in params["contestants"]:
        step = STEP_OF_MODE[params["mode"]](name, model)
        try:
            verdict = checks.judge(checks.tensors(step(*inputs)), eager, exact, TOLERANCE_SCALE)
        except Exception as error:  # a contestant that fails must not end the run of the others
            problems[name] = f"{type(error).__name__}: {error}"
            continue
        if verdict.problem:
            problems[name] = verdict.problem
        calls[name] = Call(step, inputs)
    del exact
    budget = dataclasses.replace(
        Budget.of(params["quick"]), row_seconds=1.0 if params["quick"] else 30.0, max_rounds=21
    )
    timings = interleave(calls, budget, params["device"])
    samples = {name: t.samples for name, t in timings.items()}
    fused = account.take()
    return {"samples": samples, "problems": problems, "fuser": dataclasses.asdict(fused) if fused else None}


def child(params: dict[str, Any]) -> dict[str, Any]:
    """In a fresh process: one contestant's first call, or everybody's steady state."""
    return _first(params) if params["part"] == "first" else _steady(params)


@dataclasses.dataclass
class Result:
    """One model: first calls by contestant (each process's), timings, what was wrong."""

    model: str
    first: dict[str, list[dict[str, Any]]]
    timings: dict[str, Timing]
    problems: list[tuple[str, str]]
    fuser: dict[str, Any] | None

    def median(self, name: str, field: str = "first") -> float | None:
        """The median over processes of a figure of the first calls."""
        values = [r[field] for r in self.first.get(name, ()) if r.get(field) is not None]
        return statistics.median(values) if values else None

    def own(self, name: str) -> float | None:
        """Own compile seconds: the first call less that of aot_eager, which only traces."""
        mine, tracing = self.median(name), self.median("aot_eager")
        return None if mine is None or tracing is None else mine - tracing

    def over(self, rival: str) -> float | None:
        """How many times faster fuser's steady step is."""
        if rival not in self.timings or "fuser" not in self.timings:
            return None
        return self.timings[rival].median / self.timings["fuser"].median


def measure(model: str, names: list[str], options: Options, step: Callable[[str], None]) -> Result:
    """First calls in turn, each in a fresh process; then the steady states in one more, which reuses the caches."""
    base = {"model": model, "quick": options.quick, "device": options.device, "mode": options.mode}
    first: dict[str, list[dict[str, Any]]] = {n: [] for n in FIRST if n in names}
    problems = []
    with tempfile.TemporaryDirectory(prefix="benchmark-") as cache:
        for repeat in range(1 if options.quick else max(REPEATS.values())):
            for name in first:
                if repeat and repeat >= REPEATS[name]:
                    continue
                step(f"{model}, first call, {name}")
                result = spawn("models", {**base, "part": "first", "contestant": name}, f"{cache}/{repeat}")
                first[name].append(result)
                if "error" in result:
                    problems.append((name, result["error"]))
        step(f"{model}, steady")
        steady = [n for n in ("eager", "inductor", "fuser") if n in names]
        result = spawn("models", {**base, "part": "steady", "contestants": steady}, f"{cache}/0")
    problems += list(result.get("problems", {}).items())
    if "error" in result:
        problems.append(("fuser" if "fuser" in names else "all", f"steady run: {result['error']}"))
    timings = {name: Timing(tuple(s)) for name, s in result.get("samples", {}).items()}
    return Result(model, first, timings, problems, result.get("fuser"))


def _compile_table(results: list[Result], names: list[str]) -> Table:
    compilers = [n for n in ("inductor", "fuser") if n in names]
    columns = (
        "model",
        "aot_eager",
        *(f"{n}{part}" for n in compilers for part in ("", ", own")),
        "own, share of inductor's",
    )
    rows = []
    for r in results:
        cells = [seconds(v) for n in compilers for v in (r.median(n), r.own(n))]
        rows.append((r.model, seconds(r.median("aot_eager")), *cells, ratio(_share(r))))
    return Table("models: first call, empty caches; own = less aot_eager's, which only traces", columns, rows)


def _share(r: Result) -> float | None:
    mine, theirs = r.own("fuser"), r.own("inductor")
    return mine / theirs if mine is not None and theirs else None


def _steady_table(results: list[Result], names: list[str]) -> Table:
    steady = [n for n in ("eager", "inductor", "fuser") if n in names]
    columns = ("model", *steady, "fuser × inductor", "fuser × eager", "peak MiB eager", "fuser", "fuser, with compile")
    rows = []
    for r in results:
        cells = [spread(r.timings[n]) if n in r.timings else "failed" for n in steady]
        peaks = (
            r.median("eager", "steady_peak_mib"),
            r.median("fuser", "steady_peak_mib"),
            r.median("fuser", "peak_mib"),
        )
        peak_cells = ["–" if p is None else f"{p:.0f}" for p in peaks]
        rows.append((r.model, *cells, ratio(r.over("inductor")), ratio(r.over("eager")), *peak_cells))
    return Table(
        "models: steady step, median [p10–p90]; ratios are times faster; peak resident memory of steps", columns, rows
    )


def _fuser_table(results: list[Result]) -> Table | None:
    said = [(r.model, r.fuser) for r in results if r.fuser]
    if not said:
        return None
    rows = []
    for model, f in said:
        unfused = f["unfused"]
        most = ", ".join(f"{n} × {reason}" for reason, n in sorted(unfused.items(), key=lambda p: -p[1])[:3])
        rows.append((model, str(f["groups"]), str(f["kernels"]), str(f["ops_fused"]), str(sum(unfused.values())), most))
    return Table("models: what fuser made", ("model", "groups", "kernels", "ops fused", "not", "mostly because"), rows)


def _claims(results: list[Result]) -> list[Claim]:
    shares = [(r.model, s) for r in results if (s := _share(r)) is not None]
    over = [(r.model, v) for r in results if (v := r.over("inductor")) is not None]
    eager = [(r.model, v) for r in results if (v := r.over("eager")) is not None]
    memory = [
        (r.model, (mine - theirs))
        for r in results
        if (mine := r.median("fuser", "steady_peak_mib")) and (theirs := r.median("eager", "steady_peak_mib"))
    ]

    def listing(pairs: list[tuple[str, float]], digits: int = 2) -> str:
        return ", ".join(f"{n} {v:.{digits}f}" for n, v in pairs) or "not measured"

    limit = _pool_limit_mib()
    return [
        Claim(
            "own compile time over Inductor's",
            f"≤ {COMPILE_SHARE:g} each",
            listing(shares),
            all(s <= COMPILE_SHARE for _, s in shares) if shares else None,
        ),
        at_least(
            "steady over Inductor (geometric mean)",
            geomean([v for _, v in over]) if over else None,
            STEADY_TARGET,
            detail=f" ({listing(over)})",
        ),
        Claim("no model below eager", "≥ 1 ×", listing(eager), all(v >= 1 for _, v in eager) if eager else None),
        Claim(
            "peak resident memory above eager's, MiB",
            f"≤ {limit:.0f}, the limits of the pools" if limit else "the limits of the pools",
            listing(memory, 0),
            all(v <= limit for _, v in memory) if memory and limit else None,
        ),
    ]


def _pool_limit_mib() -> float | None:
    try:
        import fuser.config

        return float(fuser.config.pool_limit_bytes + fuser.config.output_limit_bytes) / MIB
    except (ImportError, AttributeError):
        return None


def _report(results: list[Result], names: list[str], notes: list[str]) -> Report:
    report = Report("models", notes=notes)
    tables = [_compile_table(results, names), _steady_table(results, names), _fuser_table(results)]
    report.tables = [t for t in tables if t]
    report.claims = _claims(results)
    for r in results:
        for name, problem in r.problems:
            (report.wrong if name in ("fuser", "all") else report.notes).append(f"{r.model}, {name}: {problem}")
        times = {n: t.record() for n, t in r.timings.items()}
        report.records.append({"model": r.model, "first": r.first, "seconds": times, "fuser": r.fuser})
    steady = {r.model: {n: t.median * 1e3 for n, t in r.timings.items()} for r in results}
    own = {r.model: {n: v for n in ("inductor", "fuser") if (v := r.own(n)) is not None} for r in results}
    report.bars = [Bars("models, steady step", "ms", steady), Bars("models, own compile time", "seconds", own)]
    return report


def run(options: Options) -> Report:
    """All selected models."""
    notes: list[str] = []
    wanted = ["aot_eager", *(r for r in ("eager", "inductor") if options.has(r)), "fuser"]
    names = contestants.present(wanted, notes)
    models = [m for m in MODELS if options.wants(m)]
    each = 1 + sum(1 if options.quick else REPEATS[n] for n in FIRST if n in names)
    with progress("models", each * len(models)) as bar:
        results = [measure(m, names, options, bar.step) for m in models]
    return _report(results, names, notes)
