"""Reductions x dtype x dims, against eager and float64; many to a graph."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fuser import (
    config,
    debug,
    debug_get_fused_kernel_code,
    machines,
    register_fusion,
    run_fusion,
)
from fuser.interface import kernel_spec
from tests.backend.fused import handle_of
from tests.backend.support import DTYPES, FLOATS, INTS, check, check_all, flat, fused, graph_of, values

Functions = dict[str, Callable[..., Any]]
ANY: Functions = {
    "sum": lambda x: x.sum(),
    "sum02": lambda x: x.sum((0, 2)),
    "sum1": lambda x: x.sum(1, keepdim=True),
    "prod1": lambda x: x.prod(1),
    "amax2": lambda x: x.amax(-1),
    "amin01": lambda x: x.amin((0, 1), keepdim=True),
    "max": lambda x: x.max(),
    "max_dim": lambda x: [x.max(1)[0], x.max(1)[1]],
    "min_dim": lambda x: [x.min(2, True)[0], x.min(2, True)[1]],
    "any": lambda x: x.any(),
    "all1": lambda x: x.all(1),
    "any02": lambda x: x.any((0, 2)),
    "argmax": lambda x: x.argmax(),
    "argmin0": lambda x: x.argmin(0),
    "count_nonzero": lambda x: x.count_nonzero(),
    "count_nonzero12": lambda x: x.count_nonzero((1, 2)),
    "aminmax": lambda x: [torch.aminmax(x, dim=1)[0], torch.aminmax(x, dim=1)[1]],
}
FEW = ("sum02", "prod1", "amax2", "max_dim", "any02", "argmax", "argmin0")  # for dtypes that differ by width alone
NOT_OF_BOOLS = {"prod1", "max_dim", "min_dim", "argmax", "argmin0", "aminmax"}
OF_FLOATS: Functions = {
    "mean": lambda x: x.mean(),
    "mean01": lambda x: x.mean((0, 1), keepdim=True),
    "var": lambda x: x.var(1),
    "std": lambda x: x.std((0, 2), correction=0),
    "var_mean": lambda x: [torch.var_mean(x, -1)[0], torch.var_mean(x, -1)[1]],
    "std_mean": lambda x: [torch.std_mean(x, (0, 1), keepdim=True)[i] for i in range(2)],
    "norm": lambda x: torch.linalg.vector_norm(x, 2, -1),
    "norm1": lambda x: torch.linalg.vector_norm(x, 1, (0, 1)),
    "norm3": lambda x: torch.linalg.vector_norm(x, 3, 1),
    "norm_inf": lambda x: torch.linalg.vector_norm(x, math.inf, 1),
    "norm_neg": lambda x: torch.linalg.vector_norm(x, -math.inf, 1),
    "norm0": lambda x: torch.linalg.vector_norm(x, 0, 1),
    "frobenius": lambda x: x.norm(),
    "logsumexp": lambda x: x.logsumexp(-1),
    "nansum": lambda x: x.nansum(0),
    "sum_as_double": lambda x: x.sum(-1, dtype=torch.float64),
    "cosine": lambda x: torch.cosine_similarity(x, x + 1, 1),
}


def count(functions: Functions) -> list[str]:
    """A name for each result."""
    pairs = {"max_dim", "min_dim", "aminmax", "var_mean", "std_mean"}
    return [name for name in functions for _ in range(2 if name in pairs else 1)]


def whole(dtype: torch.dtype, *size: int) -> torch.Tensor:
    if dtype is torch.bool:
        return torch.rand(size) > 0.4
    if dtype.is_floating_point:
        return torch.randn(size, dtype=torch.float64).to(dtype)
    info = torch.iinfo(dtype)
    return torch.randint(info.min, info.max, size).to(dtype)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype):
    few = dtype in (torch.float16, torch.int32, torch.int16, torch.int8)
    functions = {k: ANY[k] for k in (FEW if few else ANY) if dtype is not torch.bool or k not in NOT_OF_BOOLS}
    if dtype is torch.float32:  # one sum of 777 numbers is as far off as chance has it: see the next test
        del functions["sum"]
    slack = 8 if dtype is torch.float64 else 2
    check_all(count(functions), list(functions.values()), whole(dtype, 3, 7, 37), slack=slack, floor=True)


@pytest.mark.parametrize("f", [lambda x: x.sum(), lambda x: x.mean(), lambda x: x.norm()], ids=["sum", "mean", "norm"])
def test_whole_sums_are_as_exact_as_eagers(f):
    """Root mean squares of the errors of 400 draws: of one draw eager's may be 0."""
    handle = handle_of(graph_of([f], 1))
    draws = [whole(torch.float32, 3, 7, 37) for _ in range(400)]
    exact = torch.stack([f(x.double()) for x in draws])
    own, eager = (torch.stack(r).double() for r in zip(*((handle(x)[0], f(x)) for x in draws)))
    errors = [(r - exact).square().mean().sqrt().item() for r in (own, eager)]
    assert 0 < errors[0] <= 1.2 * errors[1], errors


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_floats(dtype):
    slack = 8 if dtype is torch.float64 else 2
    check_all(count(OF_FLOATS), list(OF_FLOATS.values()), whole(dtype, 3, 7, 37), slack=slack, floor=True)


@pytest.mark.parametrize("dtype", (torch.float32, torch.uint8), ids=str)
def test_no_dims(dtype):
    """Any and all leave each element by itself, other reductions take all elements."""
    names = ["any", "all", "sum", "nansum", "amax", "count_nonzero"] + ["mean", "std"] * dtype.is_floating_point
    functions: list[Any] = [lambda x, n=n: getattr(torch, n)(x, dim=()) for n in names]
    x = whole(dtype, 2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    check_all(names, functions, x, floor=8.0)
    got = fused(graph_of(functions, 1), [x])
    assert [t.stride() for t in got] == [f(x).stride() for f in functions]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("size", [(300_000,), (3, 100_001), (60_000, 5), (7, 257, 65), (1, 1, 1)], ids=str)
def test_sizes(size):
    """Split reductions, odd tails, few and many results."""
    functions: Functions = {"sum": lambda x: x.sum(), "argmin": lambda x: x.argmin(), "amax": lambda x: x.amax()}
    for d in range(len(size)):
        functions[f"sum{d}"] = lambda x, d=d: x.sum(d)
        functions[f"argmax{d}"] = lambda x, d=d: x.argmax(d)
        functions[f"var{d}"] = lambda x, d=d: x.var(d, correction=0)
    # Sums of n numbers of size 1 are as exact as numbers of size sqrt(n) can be.
    x = whole(torch.float32, *size)
    check_all(list(functions), list(functions.values()), x, floor=math.sqrt(max(size)))


@pytest.mark.parametrize("columns", [100, 4001, 100_001])
def test_sums_are_nearer_to_float64_than_eagers(columns):
    """The root of the mean square of many errors, in which single roundings do not show."""
    run, errors = handle_of(lambda x: x.sum(-1)), []
    for _ in range(4_000_000 // (64 * min(columns, 4001))):
        x = torch.randn(64, columns)
        exact = x.double().sum(-1)
        errors.append(torch.stack([run(x).double() - exact, x.sum(-1).double() - exact]))
    mine, its = torch.cat(errors, 1).square().mean(1).sqrt().tolist()
    assert mine <= its


SPECIAL: Functions = {
    "amax": lambda x: x.amax(-1), "amin": lambda x: x.amin(-1), "argmax": lambda x: x.argmax(-1),
    "argmin": lambda x: x.argmin(-1), "sum": lambda x: x.sum(-1), "prod": lambda x: x.prod(-1),
    "mean": lambda x: x.mean(-1), "any": lambda x: x.any(-1), "all": lambda x: x.all(-1),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=-1), "argmax_all": lambda x: x.argmax(),
    "argmax0": lambda x: x.argmax(0), "amin0": lambda x: x.amin(0), "nansum": lambda x: x.nansum(-1),
}  # fmt: skip


def test_special_values():
    """NaN wins, infinities, all -inf, ties, zeros of both signs."""
    x = torch.randn(8, 70)
    x[0, 5], x[0, 60], x[1, 3], x[2, 9], x[2, 10], x[3] = math.nan, math.nan, math.inf, math.inf, -math.inf, -math.inf
    x[4], x[5], x[6], x[7, 33:] = 1.0, 0.0, -0.0, x[7, :37].clone()
    check_all(list(SPECIAL), list(SPECIAL.values()), x, zeros=False, floor=True)
    check_all(list(SPECIAL), list(SPECIAL.values()), x.double(), zeros=False, floor=True, slack=4)


def both(pair: Any) -> list[Any]:
    """A value and its index."""
    return [pair[0], pair[1]]


def few_values(dtype: torch.dtype, *size: int) -> torch.Tensor:
    """Small numbers, so that the extreme ones come again and again; of floats also zeros of both signs."""
    x = torch.randint(0 if dtype is torch.uint8 else -3, 4, size).to(dtype)
    return torch.where(torch.rand(size) < 0.5, -x, x) if dtype.is_floating_point else x


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.int64], ids=str)
def test_the_first_of_equal_extremes(dtype):
    """Where lanes, turns of the loop, columns and chunks end; of zeros of both signs, the one at the index."""
    graphs = [
        graph_of([lambda x, d=d: x.argmax(d), lambda x, d=d: [*both(x.min(d)), *both(x.max(d))]], 1) for d in (0, 1)
    ]
    for size in [(5, 1), (2, 16), (3, 17), (4, 64), (3, 129), (40, 1000), (2, 100_001), (70_001, 3), (300, 300)]:
        x = few_values(dtype, *size)
        for d, graph in enumerate(graphs):
            where, low, at_low, high, at_high = fused(graph, [x])
            assert torch.equal(where, x.argmax(d)) and torch.equal(at_low, x.min(d)[1])
            assert torch.equal(at_high, x.max(d)[1])
            for found, at in ((low, at_low), (high, at_high)):
                there = x.gather(d, at.unsqueeze(d)).squeeze(d)
                assert torch.equal(found, there) and torch.equal(torch.signbit(found), torch.signbit(there))
        assert torch.equal(fused(graph_of([lambda x: x.argmin()], 1), [x])[0], x.argmin())


def test_the_first_nan_is_the_extreme():
    graphs = [graph_of([lambda x, d=d: x.argmax(d), lambda x, d=d: both(x.min(d))], 1) for d in (0, 1)]
    for size in [(3, 16), (3, 1001), (2, 100_001), (70_001, 3), (3, 300)]:
        for fill in (0.0, math.inf, -math.inf):
            x = torch.full(size, fill)
            x[0, size[1] // 2 :] = math.nan
            x[size[0] // 2 :, 1] = math.nan
            for d, graph in enumerate(graphs):
                where, low, at_low = fused(graph, [x])
                assert torch.equal(where, x.argmax(d)) and torch.equal(at_low, x.min(d)[1])
                assert torch.equal(low.isnan(), x.min(d)[0].isnan())


@pytest.mark.parametrize("dtype", INTS, ids=str)
def test_integers_wrap(dtype):
    x = values(dtype, 120).view(4, 30)
    functions = [lambda x: x.sum(1), lambda x: x.prod(1), lambda x: x.sum(0, dtype=dtype), lambda x: x.argmax(1)]
    check_all(["sum", "prod", "sum in its dtype", "argmax"], functions, x)


ROWS: Functions = {
    "sum": lambda x: x.sum(-1), "prod": lambda x: x.prod(-1), "amax": lambda x: x.amax(-1), "any": lambda x: x.any(-1),
    "min": lambda x: both(x.min(-1)), "argmax": lambda x: x.argmax(-1), "strided": lambda x: x[:, ::3].sum(1),
}  # fmt: skip
OF_FLOAT_ROWS: Functions = {"softmax": lambda x: x.softmax(-1), "var": lambda x: x.var(-1, correction=0)}
LENGTHS = (1, 3, 7, 8, 15, 16, 17, 24, 31, 32, 33, 40, 63, 64, 65, 127, 128, 129, 200, 257, 300, 1000)


@pytest.mark.sampled(7, also=("torch.bfloat16-300",))
@pytest.mark.parametrize("first", [3, 40, 100, 300], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.int8], ids=str)
def test_rows_of_any_length(dtype, first):
    """Kernels made for rows of one length take those of any: shorter than the lanes, and no multiple of them."""
    functions = {**ROWS, **(OF_FLOAT_ROWS if dtype.is_floating_point else {})}
    functions["other"] = lambda x: x.sum(-1) * first  # another graph: kernels of the same one are shared
    graph = graph_of(list(functions.values()), 1)
    names = [name for name in functions for _ in range(2 if name == "min" else 1)]
    for n in (first, *LENGTHS):
        x = few_values(dtype, 9, n)
        exact = flat(graph(x.double())) if dtype.is_floating_point else [None] * len(names)
        for name, out, eager, wide in zip(names, flat(fused(graph, [x])), flat(graph(x)), exact, strict=True):
            check(out, eager, wide, f"{name} of {n}", zeros=False, floor=True, slack=4 if name in OF_FLOAT_ROWS else 2)


def test_nothing_to_reduce():
    """Sums of nothing are the neutral element; extremes of nothing raise as eager does."""
    functions = [
        lambda x: x.sum(0), lambda x: x.prod(0), lambda x: x.mean(0), lambda x: x.any(0), lambda x: x.all(0),
        lambda x: x.var(0), lambda x: x.amax(1), lambda x: x.sum(),
    ]  # fmt: skip
    check_all([str(n) for n in range(len(functions))], functions, torch.randn(0, 5))
    with pytest.raises((IndexError, RuntimeError)):
        run_fusion(register_fusion(graph_of([lambda x: x.amax(0)], 1)), [torch.randn(0, 5)])


def test_the_same_bits_on_any_number_of_threads():
    x = whole(torch.float32, 3, 200_000)
    graph = graph_of([lambda x: x.sum(1), lambda x: x.sum(), lambda x: x.exp().mean(0)], 1)
    results = []
    for n in (1, 2, 1):
        torch.set_num_threads(n)
        results.append(fused(graph, [x]))
    assert all(torch.equal(a, b) for r in results[1:] for a, b in zip(results[0], r))


def test_reductions_fuse_with_what_surrounds_them():
    """One kernel for a chain into a sum and out of it."""
    graph = graph_of([lambda x, w: (x * w).exp() / (x * w).exp().sum(-1, keepdim=True)], 2)
    x, w = torch.randn(9, 50), torch.randn(50)
    torch.testing.assert_close(fused(graph, [x, w])[0], torch.softmax(x * w, -1))
    assert debug.report([register_fusion(graph)]).kernels == 1


@pytest.mark.parametrize("cheap", [True, False])
def test_lanes_of_cheap_rows_are_unrolled(cheap):
    """g++ keeps an array of lanes in memory otherwise, and a sum takes 1.8 times as long."""
    key = register_fusion(graph_of([lambda x: (x * 2 if cheap else torch.erfinv(x.sin())).sum(-1)], 1))
    run_fusion(key, [torch.rand(4, 300)])
    (kernel,) = kernel_spec(key).store.kernels
    loop = kernel.source[: kernel.source.index("acc0[l] = (acc0[l]) + ")]
    assert (loop.rindex("#pragma GCC unroll") > loop.rfind("#pragma omp simd")) if cheap else "GCC unroll" not in loop


@pytest.mark.parametrize("plane, asks", [(1024, True), (16384, False)])
def test_the_next_piece_of_a_row_is_asked_for(plane, asks):
    """A channel's planes are far apart: while one is added up the next is asked for, if it is short."""
    f = lambda x, y: (x * y - (x * y).mean((0, 2), keepdim=True)) * y  # noqa: E731
    graph, x, y = graph_of([f], 2), torch.randn(3, 24, plane), torch.randn(3, 24, plane)
    torch.testing.assert_close(fused(graph, [x, y])[0], f(x.double(), y.double()).float(), rtol=1e-5, atol=1e-5)
    if machines.find(config.isa).prefetches:
        source = debug_get_fused_kernel_code(graph, [x, y])
        ahead = re.findall(r"__builtin_prefetch\((in\d) \+ \(.*\), 0\)", source)
        assert (set(ahead) == {"in0", "in1"}) == asks, source


def test_columns_in_chunks_are_read_by_whole_rows():
    """Rows that are added up column by column are read from end to end, up to the columns whose sums stay in cache."""

    def columns(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (x * y).sum(0), y.sum(0)

    graph = graph_of([columns], 2)
    for width, lanes in ((768, 768), (900, 960), (300, 320), (5000, 256)):
        x, y = torch.randn(1024, width), torch.randn(1024, width)
        out = fused(graph, [x, y])
        for got, want in zip(out, columns(x.double(), y.double()), strict=True):
            torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-4)
        source = debug_get_fused_kernel_code(graph_of([columns], 2), [x, y])
        assert f"float acc0[{lanes}]" in source
        assert ("__builtin_prefetch" in source) == (lanes < width and machines.find(config.isa).prefetches)


@pytest.mark.parametrize("name", ["var_mean", "std_mean"])
def test_the_mean_of_one_element_is_itself(name):
    """Infinite, too: there is no difference from itself to add."""
    x = torch.tensor([[1.0, -2.0, torch.inf, -torch.inf, torch.nan]])
    handle = handle_of(lambda x: getattr(torch, name)(x, 0, correction=0)[1])
    torch.testing.assert_close(handle(x), x[0], rtol=0, atol=0, equal_nan=True)
    more = torch.randn(3, 5)
    torch.testing.assert_close(handle(more), more.mean(0))


def test_the_variance_of_nothing_is_nan():
    handle = handle_of(graph_of([lambda x: torch.var(x, 1, correction=-5), lambda x: x.std(correction=-2)], 1))
    for n in (6, 0, 3):
        x = torch.randn(4, n)
        want = torch.var(x, 1, correction=-5), x.std(correction=-2)
        for got, expected in zip(handle(x), want, strict=True):
            torch.testing.assert_close(got, expected, equal_nan=True)
