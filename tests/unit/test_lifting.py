"""Graphs that differ in constants alone share a kernel, and each gives what eager gives."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fuser
from fuser import debug, interface
from fuser.kernel_cache import KernelSpec
from fuser.kernel_spec import LaunchProgram

aten = torch.ops.aten
Function = Callable[..., Any]


def register(function: Function) -> int:
    return fuser.register_fusion(torch.fx.symbolic_trace(function))


def outcome(function: Function, *inputs: Any) -> Any:
    """The results, or the exception."""
    try:
        found = function(*inputs)
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        return error
    return found if isinstance(found, tuple) else (found,)


def specifications(
    make: Callable[[Any], Function], constants: Iterable[Any], *inputs: Any, close: float = 0.0
) -> list[KernelSpec]:  # fmt: skip
    """Register and run `make(constant)` for each; the specifications of all."""
    found: dict[int, KernelSpec] = {}
    for constant in constants:
        function = make(constant)
        key = register(function)
        want, got = outcome(function, *inputs), outcome(fuser.fusion_handle(key), *inputs)
        if isinstance(want, Exception):
            assert type(got) is type(want) and str(got) == str(want), (constant, got, want)
            continue
        assert not isinstance(got, Exception), (constant, got)
        for g, w in zip(got, want, strict=True):
            assert g.dtype is w.dtype and g.stride() == w.stride(), constant
            torch.testing.assert_close(g, w, equal_nan=True, rtol=close, atol=close)
        spec = interface.kernel_spec(key)
        found[spec.key] = spec
    return list(found.values())


def n_kernels(specs: list[KernelSpec]) -> int:
    return sum(len(spec.store.kernels) for spec in specs)


X = torch.randn(70, 41)

INDICES: dict[str, Callable[[int], Function]] = {
    "item": lambda t: lambda x: torch.relu(x[t]) + 1,
    "select": lambda t: lambda x: torch.select(x, 1, t % 41) * 2,
    "window": lambda t: lambda x: torch.relu(x[t : t + 5]) * 3,
    "window_from_the_end": lambda t: lambda x: torch.relu(x[t - 80 : t - 77]) * 3,
    "tail": lambda t: lambda x: x[t:] * 2 + 1,
    "narrow": lambda t: lambda x: torch.narrow(x, 0, t, 4) * 2,
    "item_of_columns": lambda t: lambda x: x[:, t % 41] - x[:, 3],
    "written": lambda t: lambda x: aten.select_scatter(x * 2, x[0], 0, t),
    "slice_written": lambda t: lambda x: aten.slice_scatter(x * 2, x[:3], 0, t, t + 3),
    "joined": lambda t: lambda x: torch.cat([x[t] * 2, x[t + 1]]),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", INDICES)
def test_indices_share_kernels(name):
    specs = specifications(INDICES[name], range(2, 52, 4), X)
    assert n_kernels(specs) <= 5  # what begins or ends at the tensor's own end is another kernel
    assert not any(spec.store.fallbacks for spec in specs)


def test_ends_share_kernels():
    specs = specifications(lambda t: lambda x: torch.relu(x[:, :t]) * 2, range(20, 41), X)
    assert n_kernels(specs) <= 3


def test_indices_at_the_edges():
    """First, last, from the end, outside: results and errors are eager's, whatever came before."""
    places = (5, 7, 0, -1, -70, 69, 70, -71, 1000, 12)
    for make in (INDICES["item"], INDICES["written"]):
        specs = specifications(make, places, X)
        assert n_kernels(specs) <= 6
    for make in (INDICES["tail"], INDICES["window"], INDICES["window_from_the_end"], INDICES["narrow"]):
        specifications(make, (5, 7, 0, 66, 67, 69, 70, 71, 200, -3, -69, -75), X)


def test_sizes_of_slices_are_known():
    """One row broadcasts, and a few are unrolled, wherever they begin."""
    specs = specifications(lambda t: lambda x: x[t : t + 1] * x + x[t : t + 3].sum(0), range(2, 12), X, close=1e-5)
    assert n_kernels(specs) == 2


def scalars(c: Any) -> Function:
    """Every operator that takes a scalar of any type."""

    def function(x):
        compared = x == c, x < c, x >= c
        arithmetic = x + c, x - c, c - x, x * c
        chosen = torch.where(x > 1, c, x), x.masked_fill(x > 1, c), torch.clamp(x, -3, c), torch.clamp_min(x, c)
        made = F.pad(x, (1, 2), value=c), torch.full_like(x, c) + x, aten.full.default([60], c) + x, torch.fill(x, c)
        return (*compared, *arithmetic, *chosen, *made)

    return function


def float_scalars(c: float) -> Function:
    def function(x):
        scaled = torch.add(x, x, alpha=c), torch.sub(x, x, alpha=c), x / c
        activated = F.leaky_relu(x, c), F.threshold(x, c, c), aten.threshold_backward(x, x, c)
        return (*scaled, *activated, torch.addcmul(x, x, x, value=c), torch.lerp(x, x * 3, c))

    return function


FLOATS = (0.3, 0.7, 1 / 3, 1 + 2**-8 + 2**-30, 1 + 2**-11 + 2**-40)
ODD = (-0.6, 1e-7, 65000.0, 1e30, -0.0, 0.0, 0.5, math.inf, math.nan, 5e-324)
WHOLE = (3, 5, 100, 0, 1, 2, 1 << 40)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.uint8)


@pytest.mark.sampled(9, also=("hardtanh-torch.int16",))
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.bool], ids=str)
@pytest.mark.parametrize("form", ["clamp", "clamp_min", "clamp_max", "both", "hardtanh"])
def test_limits_that_do_not_fit_are_what_eager_makes_of_them(dtype, form):
    """They wrap, saturate or raise, as torch's version has it; limits of one form run in turn."""
    x = torch.arange(-130, 130).to(dtype)
    made: dict[str, Callable[[Any], Function]] = {
        "clamp": lambda c: lambda x: (torch.clamp(x, c), torch.clamp(x, None, c)),
        "clamp_min": lambda c: lambda x: (torch.clamp_min(x, c),),
        "clamp_max": lambda c: lambda x: (torch.clamp_max(x, c),),
        "both": lambda c: lambda x: (torch.clamp(x, -c, c),),
        "hardtanh": lambda c: lambda x: (F.hardtanh(x, min(c, 5), max(c, 7)),),
    }
    specifications(made[form], (3, 100, -3, -5, -100, 120, 127, -128, 200, -200, 255, 300, -(1 << 20), 1 << 40), x)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scalars_share_kernels(dtype):
    """Of one type and then in turn; some of them stay constants, and 1 << 40 does not fit every dtype."""
    x = torch.arange(-30, 30).to(dtype) if dtype is not torch.uint8 else torch.arange(60).to(dtype)
    eps = torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
    whole = WHOLE if dtype in (torch.float32, torch.int64) else WHOLE[:3]
    for constants in ((*FLOATS, *ODD) if dtype is torch.float32 else FLOATS, whole, (3, 0.3, True, 5, 0.7)):
        specs = specifications(scalars, constants, x, close=8 * eps)
        assert any(spec.registered.bound for spec in specs)
        assert all(len(entry.kernels) == 1 for spec in specs for entry in spec.store.entries)
    if dtype in (torch.float32, torch.float16):
        specifications(float_scalars, (0.3, 0.7, -0.6, 1 / 3), x, close=16 * eps)


def test_fifty_scales_share_a_kernel():
    specs = specifications(lambda t: lambda x: torch.tanh(x * (0.1 + t / 7)) + t / 9, range(1, 51), X, close=1e-6)
    assert n_kernels(specs) <= 5  # powers of two stay
    (lifted,) = (s for s in specs if len(s.registered.bound) == 2)
    assert "input('float')" in lifted.graph.text


def test_an_equal_graph_has_an_equal_key():
    first, second, third = (register(scale(c)) for c in (0.31, 0.32, 0.33))
    assert len({first, second, third}) == 3
    assert [register(scale(c)) for c in (0.33, 0.31, 0.32)] == [third, first, second]


def scale(c: float) -> Function:
    return lambda x: torch.sigmoid(x * c) - c


def test_a_lifted_constant_is_shown_and_can_be_reproduced(tmp_path):
    keys = [register(scale(c)) for c in (0.41, 0.42)]
    for key in keys:
        fuser.run_fusion(key, [X])
    assert "(0.42, 0.42)" in debug.explain(keys[1])
    spec = interface.kernel_spec(keys[1])
    assert torch.equal(spec.fallback(0.3, 0.4, X), torch.sigmoid(X * 0.3) - 0.4)
    (kernel,) = spec.store.kernels
    assert isinstance(kernel.program, LaunchProgram) and kernel.program.n_floats == 2


def test_a_loop_over_time():
    def rnn(x, h, w, b):
        for t in range(x.shape[0]):
            h = torch.tanh(torch.addmm(b, torch.cat([x[t], h], 1), w))
        return h

    inputs = torch.randn(48, 3, 5), torch.randn(3, 7), torch.randn(12, 7), torch.randn(7)
    torch._dynamo.reset()
    before = fuser.interface.num_compiled_kernels()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(torch.compile(rnn, backend="fuser")(*inputs), rnn(*inputs))
    assert fuser.interface.num_compiled_kernels() - before <= 5


def test_a_split_group_takes_lifted_constants():
    """Around a call that no kernel makes, the pieces take the numbers of the whole."""

    def make(c):
        return lambda x: torch.relu(torch.linalg.inv(torch.relu(x * c) + x) - c) * c

    x = torch.eye(9) * 0.2
    specs = specifications(make, (0.3, 0.7, 0.9, 1.3), x, close=1e-5)
    assert len(specs) == 2
