"""`numerics="eager"` beside `numerics="fast"`: what eager's very bits cost, and whether they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from benchmarks.options import Options
from benchmarks.progress import progress
from benchmarks.report import Claim, Report, Table, at_most, ratio, spread
from benchmarks.runner import Budget, Call, Timing, copy_call, interleave
from fuser import config, fusion_handle, register_fusion

LIMIT = 1.15
SIZES = {"1 Mi": 1 << 20, "8 Mi": 1 << 23}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _three(x: Any, y: Any, z: Any) -> Any:
    return x * y + z


def _select(x: Any, y: Any, z: Any) -> Any:
    return torch.where(x > 0, torch.maximum(x, y), torch.minimum(y, z) * 0.5)


def _casts(x: Any, y: Any, z: Any) -> Any:
    return (x.to(torch.bfloat16) + y.to(torch.bfloat16)).to(torch.float32) * z


def _eight(x: Any, y: Any, z: Any) -> Any:
    a = (x + y) * z - x
    return (a * 0.3 + y) * (z - 1.5) + a * x


def _divide(x: Any, y: Any, z: Any) -> Any:
    return (x - y) / (z * z + 1)


CHAINS: dict[str, Callable[..., Any]] = {
    "mul, add": _three, "compare, select, extremes": _select, "casts": _casts, "eight": _eight,
    "with a division": _divide,
}  # fmt: skip


@dataclass(frozen=True)
class Result:
    """One chain in one dtype and size: timings by mode, and whether the bits of numerics="eager" are eager's."""

    name: str
    size: str
    timings: dict[str, Timing]
    same_bits: bool

    @property
    def price(self) -> float:
        """The time of "eager" over that of "fast": the median of the rounds' ratios."""
        pairs = zip(self.timings["eager mode"].samples, self.timings["fast mode"].samples, strict=True)
        found = sorted(a / b for a, b in pairs)
        return found[len(found) // 2]


def _call(fn: Callable[..., Any], mode: str, args: tuple[torch.Tensor, ...]) -> Call:
    with config.override(numerics=mode):
        return Call(fusion_handle(register_fusion(fx.symbolic_trace(fn))), args)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    whole = {2: torch.int16, 4: torch.int32}[a.dtype.itemsize]
    equal = (a.view(whole) == b.view(whole)) | (a.isnan() & b.isnan())
    return a.dtype is b.dtype and bool(equal.all())


def measure(name: str, dtype: torch.dtype, size: str, n: int, options: Options) -> Result:
    """One row: both modes, eager and a copy of the same bytes, interleaved."""
    generator = torch.Generator().manual_seed(0)
    x, y, z = (torch.randn(n, generator=generator).to(options.device, dtype) for _ in range(3))
    fn = CHAINS[name]
    modes = {f"{mode} mode": _call(fn, mode, (x, y, z)) for mode in ("fast", "eager")}
    want = fn(x, y, z)
    same = _same_bits(modes["eager mode"].fn(x, y, z), want)
    moved = 3 * x.nbytes + want.nbytes
    # Either mode comes after a kernel that has just read the same inputs: what lies in cache must not tell them apart.
    calls = {
        "copy": copy_call(moved, options.device),
        "eager": Call(fn, (x, y, z)),
        "before": modes["fast mode"],
        **modes,
    }
    timings = interleave(calls, Budget.of(options.quick), options.device)
    del timings["before"]
    label = f"{name}, {str(dtype).removeprefix('torch.')}"
    return Result(label, size, timings, same)


def _judge(report: Report, results: list[Result]) -> None:
    """The target is about what memory bounds: the larger size, 64 MiB of halves. What lies in caches is a note."""
    for size, in_memory in zip(SIZES, (False, True), strict=True):
        worst = max((r for r in results if r.size == size), key=lambda r: r.price)
        if in_memory:
            what = f"the price of eager's bits in memory ({worst.name}, {worst.size})"
            report.claims.append(at_most(what, worst.price, LIMIT, "×"))
        else:
            text = f"In the caches ({size}) arithmetic counts: the highest price is {ratio(worst.price)}, {worst.name}."
            report.notes.append(text)


def run(options: Options) -> Report:
    """All chains, dtypes and sizes."""
    sizes = {"4 Ki": 1 << 12} if options.quick else SIZES
    wanted = [(c, d, s) for c in CHAINS for d in DTYPES for s in sizes if options.wants(f"{c}, {d}")]
    results = []
    with progress("numerics", len(wanted)) as bar:
        for chain, dtype, size in wanted:
            bar.step(f"{chain}, {dtype}, {size}")
            results.append(measure(chain, dtype, size, sizes[size], options))
    columns = ("chain", "size", "fast", 'numerics="eager"', "price", "eager", "copy", "bits")
    rows = [
        (r.name, r.size, *(spread(r.timings[k]) for k in ("fast mode", "eager mode")), ratio(r.price),
         *(spread(r.timings[k]) for k in ("eager", "copy")), "eager's" if r.same_bits else "DIFFERENT")
        for r in results
    ]  # fmt: skip
    report = Report("numerics", [Table('numerics="eager" beside "fast"', columns, rows)])
    report.wrong = [f"{r.name}, {r.size}: its bits are not eager's" for r in results if not r.same_bits]
    if results and not options.quick:
        _judge(report, results)
    elif results:
        report.claims.append(Claim("the price of eager's bits", f"≤ {LIMIT} ×", "not measured at these sizes", None))
    report.records = [
        {"name": r.name, "size": r.size, "price": r.price, "same_bits": r.same_bits,
         "timings": {k: t.record() for k, t in r.timings.items()}}
        for r in results
    ]  # fmt: skip
    return report
