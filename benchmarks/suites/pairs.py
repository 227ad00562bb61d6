"""Each activation before each operator that reads neighbours, through `torch.compile`, in both orders of memory.

A generator's loops are written for what its authors thought of. What comes before a window, a resized image or a sum
changes what a C++ compiler makes of them, by a factor of ten where it finds no vectors. Trials, which would leave such
a kernel to ATen, are off. One thread, and its CPU time: other processes do not count.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks import checks
from benchmarks.options import Options
from benchmarks.progress import progress
from benchmarks.report import Report, Table, at_least, ratio, seconds
from benchmarks.runner import Budget, Call, geomean, interleave

LEAST, WORST = 1.0, 20  # of eager's speed; rows of the table
SHAPE = (2, 64, 56, 56)
_BUDGET = Budget(row_seconds=0.1, sample_seconds=5e-4, min_rounds=5, max_rounds=9)
Function = Callable[[Any], Any]

BEFORE: dict[str, Function] = {
    "scale": lambda x: x * 1.1, "relu": F.relu, "relu6": F.relu6, "clamp": lambda x: x.clamp(-1, 1),
    "leaky_relu": F.leaky_relu, "hardswish": F.hardswish, "hardsigmoid": F.hardsigmoid, "silu": F.silu,
    "gelu": F.gelu, "elu": F.elu, "softplus": F.softplus, "softshrink": F.softshrink, "hardshrink": F.hardshrink,
    "threshold": lambda x: F.threshold(x, 0.1, 0.2), "abs": torch.abs, "sign": torch.sign, "round": torch.round,
    "where": lambda x: torch.where(x > 0, x, -1.0), "maximum": lambda x: torch.maximum(x, x * 0.5),
    "float16": lambda x: x.half().float(), "int32": lambda x: (x * 8).to(torch.int32).float(),
}  # fmt: skip
AFTER: dict[str, Function] = {
    "max_pool 3x3": lambda x: F.max_pool2d(x, 3, 2, 1), "max_pool 2x2": lambda x: F.max_pool2d(x, 2),
    "avg_pool 3x3": lambda x: F.avg_pool2d(x, 3, 2, 1), "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "pad": lambda x: F.pad(x, (1, 1, 1, 1)), "reflect": lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    "circular": lambda x: F.pad(x, (1, 1, 1, 1), mode="circular"), "roll": lambda x: x.roll((3, 3), (2, 3)),
    "flip": lambda x: x.flip(3), "shuffle": lambda x: F.pixel_shuffle(x, 2), "transpose": lambda x: x.mT.contiguous(),
    "cat": lambda x: torch.cat((x, x + 1), 1), "mean": lambda x: x.mean((2, 3)), "amax": lambda x: x.amax(1),
    "argmax": lambda x: x.argmax(1), "softmax": lambda x: x.softmax(1), "group_norm": lambda x: F.group_norm(x, 8),
    "cumsum": lambda x: x.cumsum(3), "stencil": lambda x: x[..., 1:] - x[..., :-1], "glu": lambda x: F.glu(x, 1),
}  # fmt: skip
ORDERS = {"contiguous": torch.contiguous_format, "channels last": torch.channels_last}


def _joined(before: Function, after: Function) -> Function:
    return lambda x: after(before(x))


def measure(before: str, after: str, order: str) -> dict[str, Any]:
    """Eager's time by fuser's, the median of rounds in turns, and a sentence if the result is wrong."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SHAPE, generator=generator).contiguous(memory_format=ORDERS[order])
    function = _joined(BEFORE[before], AFTER[after])
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="fuser", dynamic=False)
    got, want = compiled(x), function(x)
    wide = function(x.double())
    exact = [wide] if wide.dtype is torch.float64 else None  # else it rounds on its way, as eager does
    problem = checks.judge([got], [want], exact).problem
    if problem is None and got.stride() != want.stride():
        problem = f"has the strides {got.stride()}, eager {want.stride()}"
    calls = {"eager": Call(function, (x,)), "fuser": Call(compiled, (x,))}
    timings = interleave(calls, _BUDGET, clock=time.thread_time)
    rounds = zip(timings["eager"].samples, timings["fuser"].samples, strict=True)
    gain = statistics.median(a / b for a, b in rounds)
    times = {name: t.median for name, t in timings.items()}
    return {"row": f"{before}, {after}, {order}", "gain": gain, "problem": problem, **times}


def run(options: Options) -> Report:
    """All pairs; the table has the slowest."""
    import fuser

    report = Report("pairs")
    pairs = [(b, a, o) for a in AFTER for b in BEFORE for o in ORDERS if options.wants(f"{b}, {a}, {o}")]
    pairs = pairs[:: len(pairs) // 6 + 1] if options.quick else pairs
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with progress("pairs", len(pairs)) as bar, fuser.config.override(slowest=0.0), torch.no_grad():
            for pair in pairs:
                bar.step(", ".join(pair))
                report.records.append(measure(*pair))
    finally:
        torch.set_num_threads(threads)
    report.wrong += [f"{r['row']}: {r['problem']}" for r in report.records if r["problem"]]
    found = sorted(report.records, key=lambda r: float(r["gain"]))
    rows = [(r["row"], seconds(r["eager"]), seconds(r["fuser"]), ratio(r["gain"])) for r in found[:WORST]]
    title = f"pairs: the slowest of {len(found)}, {'×'.join(map(str, SHAPE))}, one thread, trials off"
    report.tables.append(Table(title, ("before, after, order", "eager", "fuser", "fuser × eager"), rows))
    below = sum(r["gain"] < LEAST for r in found)
    report.notes.append(f"{below} of {len(found)} pairs are slower than eager")
    if found:
        report.claims.append(at_least("over eager (geometric mean)", geomean([r["gain"] for r in found]), 1.5))
        report.claims.append(at_least(f"the slowest ({found[0]['row']})", found[0]["gain"], LEAST))
    return report
