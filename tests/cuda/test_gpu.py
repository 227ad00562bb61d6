"""Kernels on a real GPU: as right as eager, through both launchers, on the caller's stream and in CUDA graphs."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import torch
from cuda_cases import CASES, Case, readable, same_bits
from memory_orders import order_case
from reduction_chains import chain_case, chain_problem, pair_case

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


def results(tree: Any) -> list[torch.Tensor]:
    return readable(checks.tensors(tree))


@pytest.mark.parametrize("seed", range(80))
def test_reductions_where_memory_turns(seed: int) -> None:
    check_random(order_case(seed, scale=16 if seed % 2 else 1))


@pytest.mark.parametrize("seed", range(120))
def test_chains_of_reductions(seed: int) -> None:
    check_random(chain_case(seed))


@pytest.mark.parametrize("seed", range(80))
def test_pairs_of_chains(seed: int) -> None:
    check_random(pair_case(seed))


def check_random(case: Case) -> None:
    """A random case has a kernel, whose results are as near as eager's."""
    key, handle = handle_of(case)
    args, before = case.args("cuda"), handle.hits  # of other numbers with the same graph, if this process ran them
    out = checks.tensors(handle(*args))
    assert handle.hits == before + 1, why_no_kernel(key)
    exact = checks.tensors(case.fn(*checks.to_float64(args)))
    assert chain_problem(out, checks.tensors(case.fn(*args)), exact) is None


@pytest.mark.parametrize("name", CASES)
def test_as_right_as_eager(name: str) -> None:
    case = CASES[name]
    key, handle = handle_of(case)
    if interface.kernel_spec(key).blocked:
        pytest.skip(interface.kernel_spec(key).blocked[0])
    args = case.args("cuda")
    try:
        eager = results(case.fn(*args))
    except NotImplementedError as error:
        pytest.skip(f"not in eager: {error}")
    exact = results(case.fn(*checks.to_float64(args)))
    assert launcher.wait(60), launcher.reason()
    before = handle.hits
    out = results(handle(*args))
    assert handle.hits == before + 1, why_no_kernel(key)
    assert checks.judge(out, eager, exact).problem is None, checks.judge(out, eager, exact).problem
    if name.startswith("exact/"):
        assert all(map(same_bits, checks.tensors(handle(*args)), checks.tensors(case.fn(*args))))
    again = results(handle(*args))
    assert all(torch.equal(a, b) for a, b in zip(out, again) if not a.isnan().any()), "the bits differ between two runs"
    # Other tests of this process may have added kernels for other sizes to the same spec, before and after this one.
    kernels = interface.kernel_spec(key).store.kernels
    kernel = next(k for k in kernels if python_launcher.match(k.program, args) is not None)
    other = python_launcher.Handle(lambda args, status: pytest.fail("the Python launcher does not take the call"))
    other.add_kernel(kernel.program, kernel.library)
    third = results(other(*args))
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


def sums(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.sum(0), (x * 2).sum()


def sums_of(n: int, rows: int = 3000) -> tuple[Any, list[torch.Tensor], list[list[torch.Tensor]]]:
    """A handle of sums in one kernel each, `n` inputs, and what it gives for each alone."""
    key, handle = handle_of(Case("sums", sums, lambda i: ()))
    generator = torch.Generator("cuda").manual_seed(5)
    inputs = [torch.randn(rows, 300, device="cuda", generator=generator) for _ in range(n)]
    before = handle.hits  # of other tests, if this process ran them
    alone = [results(handle(x)) for x in inputs]
    torch.cuda.synchronize()
    assert handle.hits == before + n, why_no_kernel(key)
    assert any(b.counters for b in interface.kernel_spec(key).store.kernels[-1].program.buffers)
    return handle, inputs, alone


def same(found: list[list[torch.Tensor]], alone: list[list[torch.Tensor]]) -> bool:
    return all(torch.equal(a, b) for x, y in zip(found, alone, strict=True) for a, b in zip(x, y, strict=True))


def test_programs_of_several_streams_count_apart() -> None:
    handle, inputs, alone = sums_of(4)
    streams = [torch.cuda.Stream() for _ in inputs]
    for _ in range(100):
        found = []
        for stream, x in zip(streams, inputs):
            with torch.cuda.stream(stream):
                found.append(results(handle(x)))
        torch.cuda.synchronize()
        assert same(found, alone)


def test_programs_of_several_recordings_count_apart() -> None:
    handle, inputs, alone = sums_of(3)
    graphs, found = [], []
    for x in inputs:
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            found.append(results((handle(x), handle(x))))
    streams = [torch.cuda.Stream() for _ in inputs]
    for _ in range(50):
        for results_ in found:
            for t in results_:
                t.zero_()
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        assert same(found, [[*a, *a] for a in alone])


def test_programs_of_many_sets_count_apart() -> None:
    handle, inputs, alone = sums_of(140)
    for _ in range(3):
        found = handle.each(1, True, *inputs)
        assert same([results(out) for out in found], alone)


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


# -- errors, in processes of their own: they end with the process's CUDA context --------------------------------------
OUT_OF_RANGE = """
import torch, fuser
key = fuser.register_fusion(torch.fx.symbolic_trace({fn}))
x, y = torch.ones(40, 8, device="cuda"), torch.ones(6, 8, device="cuda")
good = torch.arange(6, device="cuda")
for at in (good, good + {far}):
    try:
        out = fuser.run_fusion(key, [x, at, y])[0]
        torch.cuda.synchronize()
        print("RAN", fuser.num_compiled_kernels(), flush=True)
    except RuntimeError as e:
        print("RAISED", str(e).replace(chr(10), " "), flush=True)
"""


@pytest.mark.parametrize("far", (40, -60))
@pytest.mark.parametrize("fn", ("lambda x, i, y: x[i] * y", "lambda x, i, y: x.index_add(0, i, y)"))
def test_a_place_out_of_range_is_an_assertion_that_names_the_kernel(fn: str, far: int) -> None:
    out, said = run_script(OUT_OF_RANGE.format(fn=fn, far=far), CUDA_LAUNCH_BLOCKING="1")
    assert out[0] == "RAN 1", (out, said[-2000:])
    assert out[1].startswith("RAISED"), (out, said[-2000:])
    everything = "\n".join(out) + said
    assert "index out of range" in everything and ".py" in everything, everything[-2000:]
    assert "k0_" in everything or "k1_" in everything, everything[-2000:]


DETERMINISTIC = """
import torch, fuser
key = fuser.register_fusion(torch.fx.symbolic_trace(lambda x, i, y: x.index_add(0, i, y)))
torch.use_deterministic_algorithms(True)
other = fuser.register_fusion(torch.fx.symbolic_trace(lambda x, i, y: x.index_add(0, i, y)))
x, y = torch.randn(7, 64, device="cuda"), torch.randn(5000, 64, device="cuda")
at = torch.arange(5000, device="cuda") % 7
first, second = (fuser.run_fusion(other, [x, at, y])[0] for _ in range(2))
print(key != other, torch.equal(first, second), fuser.num_compiled_kernels())
"""


def test_sums_in_one_order_where_torch_wants_it() -> None:
    out, said = run_script(DETERMINISTIC, CUBLAS_WORKSPACE_CONFIG=":4096:8")
    assert out == ["True True 0"], (out, said[-2000:])


def run_script(text: str, **environment: str) -> tuple[list[str], str]:
    """The lines that a Python process prints, and its errors."""
    root = str(pathlib.Path(__file__).parent.parent.parent)
    path = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )  # fmt: skip
    return done.stdout.splitlines(), done.stderr


def test_atomic_sums_are_as_right_as_eager() -> None:
    """Of values that do not add up exactly: no further from float64 than eager's, which uses atomics too."""
    generator = torch.Generator().manual_seed(11)
    x, y = torch.randn(40, 96, generator=generator), torch.randn(20000, 96, generator=generator)
    at = torch.randint(40, (20000,), generator=generator)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        case = Case("sums", lambda x, i, y: x.index_add(0, i, y), lambda i: ())
        key, handle = handle_of(case)
        args = (x.to("cuda", dtype), at.cuda(), y.to("cuda", dtype))
        before = handle.hits
        out = handle(*args)
        assert handle.hits == before + 1, why_no_kernel(key)
        exact = args[0].double().index_add(0, args[1], args[2].double())
        mine, theirs = ((t.double() - exact).square().mean().sqrt() for t in (out, case.fn(*args)))
        assert mine <= 1.5 * theirs + 1e-12, (dtype, float(mine), float(theirs))


# None that puts several values in one place: which of them stays is nobody's promise on a GPU.
SOME = "add clamp where sum amax argmax softmax cumsum gather index_add index_select scatter_add cat roll tril".split()
RUNS = {
    "fuzz": ["tests.fuzz", "40", "--workers", "2"],
    "opinfo": ["tests.opinfo", "--dtypes", "float32", "bfloat16", "int64", "--routes", "call:2", "--ops", *SOME],
}


@pytest.mark.parametrize("name", RUNS)
def test_some_of_the_random_programs_and_of_the_operators(name: str) -> None:
    root = str(pathlib.Path(__file__).parent.parent.parent)
    done = subprocess.run(
        [sys.executable, "-m", *RUNS[name], "--device", "cuda"], capture_output=True, text=True, timeout=400, cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])},
    )  # fmt: skip
    if done.returncode:
        pytest.fail(f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}", pytrace=False)


def test_tensors_made_of_nothing_are_kernels() -> None:
    """A mask, which reads no tensor, is one kernel beside the operators that read it."""

    def masked(x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[0], device="cuda")
        return torch.where(places[:, None] >= places, 0.0, -1.0) @ x

    x = torch.randn(64, 64, device="cuda")
    before = fuser.num_compiled_kernels()
    torch.testing.assert_close(torch.compile(masked, backend="fuser")(x), masked(x))
    assert fuser.num_compiled_kernels() == before + 1
