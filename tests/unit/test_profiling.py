"""`fuser.profile()`: kernels with calls, times and bytes; parts that add up; a warning where times say little."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace

import pytest
import torch

import fuser
from fuser import errors
from fuser.debug import traffic
from fuser.debug.profile_report import KernelRow, ProfileReport
from fuser.debug.relowering import entry_of, lowered_of
from fuser.runtime import launcher

pytestmark = pytest.mark.skipif(not launcher.wait(60), reason="there is no native launcher")
X, Y = torch.randn(64, 1000), torch.randn(64, 1000)


def handle_of(function):
    return fuser.fusion_handle(fuser.register_fusion(torch.fx.symbolic_trace(function)))


def recorded(run, steps: int = 6, **options) -> ProfileReport:
    run()
    with fuser.profile(**options) as found:
        for _ in range(steps):
            run()
            found.step()
    return found.report()


BYTES = {
    "pointwise": (lambda x, y: torch.relu(x * y + 2), 3 * 64000 * 4),
    "a row for all": (lambda x, y: torch.sin(x + y[0]), 2 * 64000 * 4 + 1000 * 4),
    "reduction": (lambda x, y: (x * y).sum(-1), 2 * 64000 * 4 + 64 * 4),
    "several passes": (lambda x, y: torch.softmax(x - y, -1), 3 * 64000 * 4),
    "bytes": (lambda x, y: torch.gt(x, y), 2 * 64000 * 4 + 64000),
}


@pytest.mark.parametrize("name", BYTES)
def test_bytes_are_those_of_the_plan_at_the_calls_own_sizes(name):
    function, wanted = BYTES[name]
    handle = handle_of(function)
    handle(torch.randn(8, 900), torch.randn(8, 900))  # the class that the kernel was made for
    (row,) = recorded(lambda: handle(X, Y)).kernels
    assert (row.calls, row.bytes) == (6, wanted)
    assert row.bytes_per_second == pytest.approx(wanted / row.median) and 0 < row.median <= row.seconds


def test_calls_of_several_sizes_have_no_bytes():
    handle = handle_of(lambda x, y: torch.cos(x * y))

    def run():
        handle(X, Y)
        handle(X[:7], Y[:7])

    (row,) = recorded(run).kernels
    assert (row.calls, row.bytes, row.bytes_per_second) == (12, None, None)


def test_parts_add_up_to_the_time_on_the_clock_and_name_the_rest():
    layers = torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.LayerNorm(64), torch.nn.Linear(64, 8)
    model = torch.nn.Sequential(*layers)
    compiled = torch.compile(model, backend="fuser")
    x = torch.randn(32, 64)

    @torch.no_grad()
    def step():
        compiled(x)

    for _ in range(2):
        step()
    report = recorded(step)
    assert math.fsum(report.parts.values()) == pytest.approx(report.seconds, rel=0.02)
    assert set(report.parts) >= {"kernels", "ATen and libraries", "torch.compile", "Python and the rest"}
    assert len(report.steps) == 6 and math.fsum(report.steps) <= report.seconds
    assert report.kernels and all(row.calls % 6 == 0 and row.keys for row in report.kernels)
    assert any(o.name in ("aten::addmm", "aten::mm") or "mkldnn" in o.name for o in report.others)
    assert all(k.name in str(report) for k in report.kernels) and "GB/s" in str(report)


def test_parts_add_up_to_the_wall_time_of_a_training_step():
    """By a clock of the test's own, within 5 %; backward and optimiser are in it."""
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.LayerNorm(256))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    compiled, x = torch.compile(model, backend="fuser"), torch.randn(512, 256)

    def step():
        optimizer.zero_grad()
        compiled(x).square().sum().backward()
        optimizer.step()

    for _ in range(3):
        step()
    with fuser.profile() as found:
        began = time.perf_counter()
        for _ in range(8):
            step()
            found.step()
        seconds = time.perf_counter() - began
    report = found.report()
    assert math.fsum(report.steps) == pytest.approx(seconds, rel=0.05)
    assert math.fsum(report.parts.values()) == pytest.approx(seconds, rel=0.05)
    assert report.parts["autograd"] > 0 and report.parts["kernels"] > 0
    inside = [e for e in report.timeline if e.kind == "kernels"]
    assert inside and all(0 <= e.begin and e.begin + e.seconds <= max(report.steps) * 1.05 for e in inside)


def test_json_has_every_row():
    handle = handle_of(lambda x, y: torch.exp(x) - y)
    report = recorded(lambda: handle(X, Y), beside_aten=True, memory=True)
    assert len(report.memory) == 7 and "memory at" in str(report)
    assert all(a.seconds < b.seconds and b.process > 1 << 20 for a, b in zip(report.memory, report.memory[1:]))
    found = json.loads(report.to_json())
    (kernel,) = found["kernels"]
    assert kernel["of_copy_rate"] == pytest.approx(kernel["bytes_per_second"] / found["copy_rate"])
    assert found["step_median"] > 0 and set(found["parts"]) >= {"kernels", "recording"}
    (beside,) = found["beside"]
    assert beside["seconds"] > 0 and beside["aten_seconds"] > 0 and not beside["why"]


def test_a_group_that_may_not_be_repeated_says_so():
    def add_to(x, y):
        x.copy_(torch.relu(x + y))
        return x * 2

    handle = fuser.fusion_handle(fuser.register_fusion(torch.fx.symbolic_trace(add_to), in_place=True))
    x = X.clone()
    (beside,) = recorded(lambda: handle(x, Y), beside_aten=True).beside
    assert beside.seconds is None and "not run repeatedly" in beside.why


def test_noise_is_said():
    row = KernelRow("k0_pw_d1_0000", (1,), 4, 1.0, 0.25, 0.0, 100)
    quiet = ProfileReport(1.0, (0.25, 0.25, 0.26, 0.25), {"kernels": 1.0}, (row,), (), (), 1e9, 0.01, 2)
    assert not quiet.noise and "noisy" not in str(quiet)
    assert "half of the steps" in replace(quiet, steps=(0.1, 0.2, 0.4, 0.8)).noise
    assert "equal copies" in str(replace(quiet, copy_spread=0.5))


def test_misuse_is_said():
    found = fuser.profile()
    with pytest.raises(errors.GraphError, match="inside of the profile's block"):
        found.step()
    with pytest.raises(errors.GraphError, match="before the end"):
        found.report()
    with found:
        pass
    with pytest.raises(errors.GraphError, match="records one block"), found:
        pass
    assert "no kernel ran" in str(found)


def test_the_copy_rate_is_measured_once():
    assert traffic.copy_rate() is traffic.copy_rate() and traffic.copy_rate().bytes_per_second > 1e8


def test_the_class_that_was_asked_for_is_needed():
    key = fuser.register_fusion(torch.fx.symbolic_trace(lambda x: torch.tan(x)))
    with pytest.raises(errors.GraphError, match="was compiled for 0 classes"):
        entry_of(key)
    fuser.run_fusion(key, [X])
    spec, entry = entry_of(key)
    assert traffic.plan_bytes(*lowered_of(spec, entry.example)) == [2 * 64000 * 4]
