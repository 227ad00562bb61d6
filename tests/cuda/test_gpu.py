"""Kernels on a real GPU: as right as eager, through both launchers, on the caller's stream and in CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cuda_cases import CASES, Case

import fuser
from benchmarks import checks
from fuser import interface
from fuser.runtime import launcher, python_launcher

pytestmark = pytest.mark.cuda


def handle_of(case: Case) -> tuple[int, Any]:
    key = interface.register_fusion(torch.fx.symbolic_trace(case.fn))
    return key, interface.fusion_handle(key)


def why_no_kernel(key: int) -> str:
    spec = interface.kernel_spec(key)
    return f"{spec.blocked} {spec.store.fallbacks} {[e.reason for e in spec.store.entries]}"


@pytest.mark.parametrize("name", CASES)
def test_as_right_as_eager(name: str) -> None:
    case = CASES[name]
    key, handle = handle_of(case)
    if interface.kernel_spec(key).blocked:
        pytest.skip(interface.kernel_spec(key).blocked[0])
    args = case.args("cuda")
    eager, exact = checks.tensors(case.fn(*args)), checks.tensors(case.fn(*checks.to_float64(args)))
    assert launcher.wait(60), launcher.reason()
    before = handle.hits
    out = checks.tensors(handle(*args))
    assert handle.hits == before + 1, why_no_kernel(key)
    assert checks.judge(out, eager, exact).problem is None, checks.judge(out, eager, exact).problem
    again = checks.tensors(handle(*args))
    assert all(torch.equal(a, b) for a, b in zip(out, again) if not a.isnan().any()), "the bits differ between two runs"
    kernel = interface.kernel_spec(key).store.kernels[-1]
    other = python_launcher.Handle(lambda args, status: pytest.fail("the Python launcher does not take the call"))
    other.add_kernel(kernel.program, kernel.library)
    third = checks.tensors(other(*args))
    assert all(torch.equal(a, b) for a, b in zip(out, third) if not a.isnan().any()), "the launchers disagree"


def test_current_stream_is_used() -> None:
    case = CASES["relu_mul_add/2"]
    _, handle = handle_of(case)
    x, y = case.args("cuda")
    handle(x, y)
    stream = torch.cuda.Stream()
    z = torch.zeros_like(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        z.copy_(x)
        out = handle(z, y)
    stream.synchronize()
    torch.testing.assert_close(out, case.fn(x, y))


def test_graph_capture() -> None:
    case = CASES["layer_norm/0"]
    _, handle = handle_of(case)
    args = case.args("cuda")
    handle(*args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = handle(*args)
    args[0].normal_()
    graph.replay()
    torch.testing.assert_close(out, case.fn(*args))


def test_other_sizes_share_a_kernel() -> None:
    case = CASES["layer_norm/0"]
    key, handle = handle_of(case)
    _, weight, bias = case.args("cuda")
    handle(torch.randn(3, weight.numel(), device="cuda"), weight, bias)
    n = len(interface.kernel_spec(key).store.kernels)
    for rows in range(4, 132):
        x = torch.randn(rows, weight.numel(), device="cuda")
        torch.testing.assert_close(handle(x, weight, bias), case.fn(x, weight, bias))
    assert len(interface.kernel_spec(key).store.kernels) == n


def test_compiled_function() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.softmax(torch.nn.functional.gelu(x) @ y, -1) * 2

    x, y = torch.randn(64, 32, device="cuda"), torch.randn(32, 48, device="cuda")
    from fuser.frontends.dynamo import fuser_backend

    out = torch.compile(f, backend=fuser_backend)(x, y)
    torch.testing.assert_close(out, f(x, y), rtol=2e-5, atol=2e-5)
    assert fuser.num_compiled_kernels() > 0
