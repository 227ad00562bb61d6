"""What a call costs beside its kernels where gradients are needed: forward, forward that saves, and both ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks import checks, contestants
from benchmarks.report import Claim, Report, Table, at_most, spread
from benchmarks.runner import Budget, Call, Timing, interleave

ROWS, WIDTH = 2, 8
KINDS = ("forward, no gradients", "forward", "forward and backward")
NAMES = ("eager", "dynamo", "aot_eager", "inductor", "fuser")


def rms_norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A reduction in both directions."""
    return F.rms_norm(x, (x.shape[-1],), w, 1e-6)


def three_ops(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Pointwise, with a sum over rows in the backward."""
    return torch.relu(x * w + 1)


FUNCTIONS = (rms_norm, three_ops)


def _inputs(device: str) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = (ROWS, WIDTH), (WIDTH,), (ROWS, WIDTH)
    return tuple(torch.randn(s, generator=generator).to(device) for s in shapes)


def _calls(f: Callable[..., Any], device: str) -> dict[str, Callable[[], Any]]:
    """The three kinds of calls, each with leaves of its own."""
    plain = _inputs(device)
    x, w, gradient = (t.clone().requires_grad_() for t in plain)
    gradient = gradient.detach()

    def both() -> tuple[Any, ...]:
        x.grad = w.grad = None
        out = f(x, w)
        out.backward(gradient)
        return out, x.grad, w.grad

    return dict(zip(KINDS, (lambda: f(*plain[:2]), lambda: f(x, w), both), strict=True))


def measure(names: list[str], device: str, budget: Budget, report: Report) -> dict[str, dict[str, dict[str, Timing]]]:
    """Timings by function, kind and contestant; results are compared with eager's first."""
    found: dict[str, dict[str, dict[str, Timing]]] = {}
    with torch.enable_grad():
        for f in FUNCTIONS:
            want = checks.tensors(_calls(f, device)[KINDS[2]]())
            calls: dict[str, dict[str, Callable[[], Any]]] = {}
            for name in names:
                calls[name] = _calls(contestants.compile_for(name, f, dynamic=None), device)
                problem = checks.judge(checks.tensors(calls[name][KINDS[2]]()), want).problem
                if problem:
                    (report.wrong if name == "fuser" else report.notes).append(f"{f.__name__}, {name}: {problem}")
            found[f.__name__] = {
                kind: interleave({n: Call(c[kind], ()) for n, c in calls.items()}, budget, device) for kind in KINDS
            }
    return found


def add(names: list[str], device: str, budget: Budget, report: Report) -> None:
    """Measure, and add table, records and claims to a report. Dynamo's share is the row of its idle backend."""
    found = measure(names, device, budget, report)
    rows = [
        (f"{f}, {name}", *(spread(kinds[k][name]) for k in KINDS))
        for f, kinds in found.items()
        for name in kinds[KINDS[0]]
    ]
    title = f"overhead with gradients: {ROWS}×{WIDTH} elements (dynamo: an idle backend, whose graph runs in eager)"
    report.tables.append(Table(title, ("function, contestant", *KINDS), rows))
    for f, kinds in found.items():
        report.records.append({"gradients": f} | {k: {n: t.record() for n, t in kinds[k].items()} for k in KINDS})
    report.claims += _claims(found["rms_norm"][KINDS[2]])


def _claims(both: dict[str, Timing]) -> list[Claim]:
    mine, eager, inductor = (both.get(n) for n in ("fuser", "eager", "inductor"))
    what = "rms norm, forward and backward, 16 elements"
    return [
        at_most(what, mine.median / eager.median if mine and eager else None, 1.1, "× eager"),
        at_most(what, mine.median / inductor.median if mine and inductor else None, 0.4, "× Inductor"),
    ]
