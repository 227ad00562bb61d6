"""Whole models: compile seconds in fresh processes with empty caches, steady milliseconds interleaved, memory."""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import account, checks, contestants, memory, training
from benchmarks.child import spawn
from benchmarks.models import MODELS, build
from benchmarks.options import Options
from benchmarks.progress import progress
from benchmarks.report import Bars, Claim, Report, Table, at_least, ratio, seconds, spread
from benchmarks.runner import Budget, Call, Timing, geomean, interleave

COMPILE_SHARE = 0.1
STEADY_TARGET = 1.1
EAGER_TARGET = 1.15  # of training steps
TOLERANCE_SCALE = 10.0  # a model's matmuls may reassociate; float64 still bounds the error by eager's own
STEADY = ("eager", "inductor", *contestants.FROZEN, "fuser", "fuser-frozen")
FIRST = ("aot_eager", "eager", "fuser", "inductor")
REPEATS = {"aot_eager": 3, "fuser": 3, "eager": 1, "inductor": 1}
MIB = 1 << 20
STEPS = 3

Step = Callable[..., Any]


def _infer_step(contestant: str, model: torch.nn.Module, name: str) -> Step:
    """The model's forward as the contestant runs it: inputs to outputs."""
    return contestants.compile_for(contestant, model)


def _infer_results(step: Step, model: torch.nn.Module, inputs: tuple[Any, ...]) -> list[torch.Tensor]:
    return checks.tensors(step(*inputs))


@dataclasses.dataclass(frozen=True)
class Mode:
    """What a step is: how a model and its arguments are made, a contestant's step, and what of it is compared."""

    build: Callable[[str, bool, str], tuple[torch.nn.Module, tuple[torch.Tensor, ...]]]
    step: Callable[[str, torch.nn.Module, str], Step]
    results: Callable[[Step, torch.nn.Module, tuple[Any, ...]], list[torch.Tensor]]
    seconds: float
    what: str


MODES = {
    "infer": Mode(build, _infer_step, _infer_results, 30.0, "steady step"),
    "train": Mode(
        training.build, training.train_step, training.results, 60.0,
        "training step (gradients to None, forward, loss, backward; no optimizer)",
    ),
}  # fmt: skip


def _first(params: dict[str, Any]) -> dict[str, Any]:
    """Seconds of the first call, and peak memory: of everything, and of steps after it."""
    mode = MODES[params["mode"]]
    model, inputs = mode.build(params["model"], params["quick"], params["device"])
    start = time.perf_counter()
    step = mode.step(params["contestant"], model, params["model"])
    step(*inputs)
    if params["device"] == "cuda":
        torch.cuda.synchronize()
    first = time.perf_counter() - start
    whole = memory.peak_mib()
    reset = memory.reset_peak()
    for _ in range(STEPS):
        step(*inputs)
    resident = memory.peak_mib() if reset else None
    model.zero_grad(set_to_none=True)
    tensors = memory.peak_tensor_mib(lambda: step(*inputs)) if params["device"] == "cpu" else None
    return {"first": first, "peak_mib": whole, "steady_peak_mib": resident, "tensor_peak_mib": tensors}


def _steady(params: dict[str, Any]) -> dict[str, Any]:
    """All contestants on one model: results checked, then timed interleaved. Finds the caches of the first calls."""
    mode = MODES[params["mode"]]
    model, inputs = mode.build(params["model"], params["quick"], params["device"])
    wide = checks.to_float64(inputs)
    exact = mode.results(mode.step("eager", model.double(), params["model"]), model, wide)
    model.float()
    eager = mode.results(mode.step("eager", model, params["model"]), model, inputs)
    account.start()
    calls, problems = {}, {}
    for name in params["contestants"]:
        step = mode.step(name, model, params["model"])
        try:
            found = mode.results(step, model, inputs)
            verdict = checks.judge(found, eager, exact, TOLERANCE_SCALE, together=params["mode"] == "train")
        except Exception as error:  # a contestant that fails must not end the run of the others
            problems[name] = f"{type(error).__name__}: {error}"
            continue
        if verdict.problem:
            problems[name] = verdict.problem
        calls[name] = Call(step, inputs)
    del exact, wide, eager
    seconds = 1.0 if params["quick"] else mode.seconds
    budget = dataclasses.replace(Budget.of(params["quick"]), row_seconds=seconds, max_rounds=21)
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
        steady = [n for n in STEADY if n in names]
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


def _steady_table(results: list[Result], names: list[str], mode: str) -> Table:
    steady = [n for n in STEADY if n in names]
    columns = ("model", *steady, "fuser × inductor", "fuser × eager")
    rows = []
    for r in results:
        cells = [spread(r.timings[n]) if n in r.timings else "failed" for n in steady]
        rows.append((r.model, *cells, ratio(r.over("inductor")), ratio(r.over("eager"))))
    return Table(f"models: {MODES[mode].what}, median [p10–p90]; ratios are times faster", columns, rows)


def _memory_table(results: list[Result], names: list[str]) -> Table:
    kinds = (("tensors", "tensor_peak_mib"), ("resident", "steady_peak_mib"), ("with compile", "peak_mib"))
    steady = [n for n in STEADY if n in names]
    columns = ("model", *(f"{n}, {kind}" for kind, _ in kinds for n in steady))
    rows = []
    for r in results:
        values = [r.median(n, field) for _, field in kinds for n in steady]
        rows.append((r.model, *("–" if v is None else f"{v:.0f}" for v in values)))
    title = "models: peak MiB; tensors: what a step makes, and what fuser keeps warm; resident: the process in steps"
    return Table(title, columns, rows)


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


def _listing(pairs: list[tuple[str, float]], digits: int = 2) -> str:
    return ", ".join(f"{n} {v:.{digits}f}" for n, v in pairs) or "not measured"


def _found(results: list[Result], figure: Callable[[Result], float | None]) -> list[tuple[str, float]]:
    return [(r.model, v) for r in results if (v := figure(r)) is not None]


def _mean(pairs: list[tuple[str, float]], what: str, target: float) -> Claim:
    mean = geomean([v for _, v in pairs]) if pairs else None
    return at_least(f"{what} (geometric mean)", mean, target, detail=f" ({_listing(pairs)})")


def _memory_over(rival: str, field: str) -> Callable[[Result], float | None]:
    """fuser's peak as a multiple of a rival's."""

    def figure(r: Result) -> float | None:
        mine, theirs = r.median("fuser", field), r.median(rival, field)
        return mine / theirs if mine is not None and theirs else None

    return figure


def _each(pairs: list[tuple[str, float]], what: str, target: str, holds: Callable[[float], bool]) -> Claim:
    return Claim(what, target, _listing(pairs), all(holds(v) for _, v in pairs) if pairs else None)


def _claims(results: list[Result], mode: str) -> list[Claim]:
    eager = _found(results, lambda r: r.over("eager"))
    first = [
        _each(
            _found(results, _share), "own compile time over Inductor's", f"≤ {COMPILE_SHARE:g} each",
            lambda v: v <= COMPILE_SHARE,
        ),
        _mean(_found(results, lambda r: r.over("inductor")), "steady over Inductor", STEADY_TARGET),
    ]  # fmt: skip
    if mode == "train":
        peaks = {n: _found(results, _memory_over(n, "tensor_peak_mib")) for n in ("eager", "inductor")}
        return [
            *first,
            _mean(eager, "steady over eager", EAGER_TARGET),
            _each(peaks["eager"], "peak memory of tensors over eager's", "≤ 1 each", lambda v: v <= 1),
            _each(peaks["inductor"], "peak memory of tensors over Inductor's", "≤ 1.02 each", lambda v: v <= 1.02),
        ]
    return [*first, _each(eager, "no model below eager", "≥ 1 ×", lambda v: v >= 1), _resident_claim(results)]


def _resident_claim(results: list[Result]) -> Claim:
    def above(r: Result) -> float | None:
        mine, theirs = r.median("fuser", "steady_peak_mib"), r.median("eager", "steady_peak_mib")
        return mine - theirs if mine and theirs else None

    memory, limit = _found(results, above), _pool_limit_mib()
    return Claim(
        "peak resident memory above eager's, MiB",
        f"≤ {limit:.0f}, the limits of the pools" if limit else "the limits of the pools",
        _listing(memory, 0),
        all(v <= limit for _, v in memory) if memory and limit else None,
    )


def _pool_limit_mib() -> float | None:
    try:
        import fuser.config

        return float(fuser.config.pool_limit_bytes + fuser.config.output_limit_bytes) / MIB
    except (ImportError, AttributeError):
        return None


def _report(results: list[Result], names: list[str], notes: list[str], mode: str) -> Report:
    report = Report("models" if mode == "infer" else "models, training", notes=notes)
    tables = [
        _compile_table(results, names),
        _steady_table(results, names, mode),
        _memory_table(results, names),
        _fuser_table(results),
    ]
    report.tables = [t for t in tables if t]
    report.claims = _claims(results, mode)
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
    frozen = [r for r in contestants.FROZEN if options.has(r) and options.mode == "infer"]
    wanted = ["aot_eager", *(r for r in ("eager", "inductor") if options.has(r)), *frozen, "fuser"]
    wanted += ["fuser-frozen"] if frozen else []
    names = contestants.present(wanted, notes)
    models = [m for m in MODELS if options.wants(m)]
    each = 1 + sum(1 if options.quick else REPEATS[n] for n in FIRST if n in names)
    with progress("models", each * len(models)) as bar:
        results = [measure(m, names, options, bar.step) for m in models]
    return _report(results, names, notes, options.mode)
