"""Pools, windows as columns, and images made larger or smaller."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F

import fuser
from fuser import machines
from tests.backend.fused import check, check_falls_back, compare, fuse, no_fallback, values

aten = torch.ops.aten
X = values(2, 3, 9, 11)
CLOSE = {"rtol": 1e-6, "atol": 1e-6}


def with_places(x, *how):
    results = aten.max_pool2d_with_indices(x, *how)
    return results[0], results[1]


POOLS = {
    "avg": lambda x: (F.avg_pool2d(x, 2), F.avg_pool2d(x, 3, 2, 1), F.avg_pool2d(x, 2, divisor_override=3)),
    "avg_without_pad": lambda x: F.avg_pool2d(x, (3, 2), 1, 1, count_include_pad=False),
    "avg_ceil": lambda x: (F.avg_pool2d(x, 2, 2, 0, True), F.avg_pool2d(x, 3, 2, 1, True, False)),
    "avg_other_ranks": lambda x: (F.avg_pool1d(x[0], 3, 2, 1), F.avg_pool3d(x, 2)),
    "avg_wide": lambda x: (F.avg_pool2d(x, (7, 9), 1, (3, 4)), F.avg_pool2d(x, 6, 5, divisor_override=7)),
    "avg_wide_without_pad": lambda x: F.avg_pool2d(x, 7, 2, 3, True, False),
    "max": lambda x: (F.max_pool2d(x, 2), F.max_pool2d(x, 3, 2, 1), F.max_pool2d(x, 3, 2, 1, 1, True)),
    "max_with_places": lambda x: (*with_places(x, [2, 2]), *with_places(x, [3, 3], [2, 2], [1, 1])),
    "max_dilated": lambda x: with_places(x, [2, 2], [1, 1], [1, 1], [2, 2]),
    "max_of_what_is_computed": lambda x: F.max_pool2d(torch.relu(x * 2 + 1), 3, 2, 1) + 1,
    "windows_that_differ": lambda x: (
        aten._adaptive_avg_pool2d(x, [4, 5]), aten._adaptive_avg_pool2d(x, [7, 12]),
        aten._adaptive_avg_pool2d(x.contiguous(memory_format=torch.channels_last), [3, 4]),
        F.adaptive_avg_pool1d(x[0] * 2, 4), aten._adaptive_avg_pool3d(x, [2, 5, 8]) + 1,
    ),
    "adaptive": lambda x: (aten._adaptive_avg_pool2d(x, [1, 1]), aten._adaptive_avg_pool2d(x, [3, 11])),
    "im2col": lambda x: aten.im2col(x, [3, 2], [1, 1], [1, 0], [2, 1]),
    "im2col_dilated": lambda x: aten.im2col(x, [2, 2], [2, 1], [0, 0], [1, 1]),
    "nearest": lambda x: (aten.upsample_nearest2d(x, [18, 22]), aten.upsample_nearest2d(x, [27, 33], 3.0, 3.0)),
    "nearest_uneven": lambda x: (aten.upsample_nearest2d(x, [5, 30]), aten.upsample_nearest2d(x, [21, 25], 2.4, 2.3)),
    "nearest_exact": lambda x: [aten._upsample_nearest_exact2d(x, size) for size in ([18, 22], [5, 30])],
}


@pytest.mark.sampled(11, also=("avg_ceil", "avg_other_ranks", "avg_wide", "im2col"))
@pytest.mark.parametrize("name", POOLS)
def test_pools(name):
    channels_last = X.to(memory_format=torch.channels_last)
    fn = POOLS[name]

    def both(x, y):
        a, b = fn(x), fn(y)
        return (*a, *b) if isinstance(a, (tuple, list)) else (a, b)

    other = name == "avg_other_ranks" or name.startswith("im2col")
    check(both, X, X.transpose(2, 3) if other else channels_last, tol=CLOSE)


@pytest.mark.parametrize("width", [255, 256, 301])
def test_long_rows(width):
    """Loops that are cut where windows begin and end to be inside."""
    x = values(3, 2, width)
    x[0, 0, 0], x[1, 0, -1], x[2, 1, 100:104] = float("nan"), float("nan"), -float("inf")
    pools = (
        lambda x: (F.avg_pool1d(x, 3, 1, 1), F.avg_pool1d(x, 5, 1, 2, False, False), torch.max_pool1d(x, 3, 1, 1)),
        lambda x: (torch.max_pool1d(x, 5, 1, 2), torch.max_pool1d(x, 3, 1, 1, 2), torch.max_pool1d(x, 4, 3)),
        lambda x: (F.avg_pool1d(x, 4, 3, 2, True), F.avg_pool1d(x, 4, 3, 2, True, False), F.avg_pool1d(x, 2)),
    )
    for pool in pools:
        check(pool, x, tol=CLOSE)


FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.mark.sampled(6, also=("33-float16",))
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("first", [5, 33, 150, 400])
def test_rows_that_are_read_around_each_element(first, dtype):
    """Short rows are one piece under masks, longer ones are cut where windows begin and end to be inside; a kernel made
    for one width takes all."""
    fns = {
        "max": lambda x: (F.max_pool2d(x, 3, 1, 1) * 2, F.max_pool2d(x, 5, 1, 2) + 1),
        "max along rows": lambda x: F.max_pool2d(x, (1, 3), 1, (0, 1)) - 1,
        "second": lambda x: (F.max_pool2d(x, 3, 2, 1) * 2, F.max_pool2d(x, (2, 1), 2) + 1),
        "second along rows": lambda x: F.max_pool2d(x, (1, 3), 2, (0, 1)) - 1,
        "peaks": lambda x: x * (F.max_pool2d(x, 3, 1, 1) == x) + first,
        "avg": lambda x: (F.avg_pool2d(x, 3, 1, 1), F.avg_pool2d(x, (1, 5), 1, (0, 2)) * 2),
        "filled": lambda x: F.pad(x, (1, 2, 1, 0), value=-1.5).sigmoid(),
        "moved": lambda x: F.pad(x, (1, 1))[..., 2:] + F.pad(x, (1, 1))[..., :-2] - 2 * x,
    }  # fmt: skip
    close = CLOSE if dtype == "float32" else {"rtol": 2e-2, "atol": 2e-2}
    for fn in fns.values():
        handle, spec = fuse(fn)
        for width in (first, 1, 16, 17, 64, 79, 161, 300, 1030):
            if width == 1 and fn is fns["moved"]:
                continue  # of no element
            x = values(2, 2, 4, width, dtype=FLOATS[dtype])
            x[0, 0, 0, 0], x[1, 0, -1, -1] = float("nan"), float("nan")
            if width > 1:
                x[1, 1, 1, : width // 2] = -float("inf")
            compare(handle(x), fn(x), tol=close)
        no_fallback(spec)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("width", [20, 100, 500])
def test_windows_are_read_in_vectors(width):
    """g++ writes no vectors where many values are chosen by conditions that hold along the loop: 17 times the time."""
    if not machines.here().lanes:
        pytest.skip("no explicit vectors here")
    for fn in (
        lambda x: F.max_pool2d(x, 3, 1, 1) * 3, lambda x: F.max_pool2d(x, 5, 1, 2) - x,
        lambda x: F.max_pool2d(x * 2, 3, 2, 1),
    ):  # fmt: skip
        handle, spec = fuse(fn)
        handle(values(2, 2, 20, width))
        (kernel,) = spec.store.kernels
        assert "FUSER_LANES" in kernel.source


def test_special_values():
    x = values(2, 2, 6, 7)
    x[0, 0, 2:4, 3:6], x[1] = float("nan"), -float("inf")
    check(lambda x: (*with_places(x, [3, 3], [2, 2], [1, 1]), *with_places(x, [2, 2], [1, 1], [1, 1], [2, 2])), x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int32])
def test_dtypes(dtype):
    x = values(2, 3, 6, 8, dtype=dtype)
    check(lambda x: (F.max_pool2d(x, 2), *with_places(x, [3, 3], [2, 2], [1, 1])), x)
    if dtype.is_floating_point:
        close = {"rtol": 1e-2, "atol": 1e-2} if dtype is torch.bfloat16 else CLOSE
        check(lambda x: (F.avg_pool2d(x, 2), aten._adaptive_avg_pool2d(x, [2, 2])), x, tol=close)
        check(lambda x: aten.upsample_nearest2d(x, [7, 20]), x)


def test_other_sizes_need_no_other_kernel():
    fn = lambda x: (F.max_pool2d(x, 3, 2, 1), F.avg_pool2d(x, 2) * 2)  # noqa: E731
    handle, spec = fuse(fn)
    for size in ((2, 3, 9, 11), (1, 4, 8, 6), (3, 2, 20, 64)):
        compare(handle(values(*size)), fn(values(*size)), tol=CLOSE)
    no_fallback(spec)
    assert len(spec.store.kernels) == 1


def test_what_is_left_to_aten():
    x = values(1, 1, 12, 13)
    check_falls_back(lambda x: F.max_pool2d(x, 6), x, reason="places")
    check_falls_back(lambda x: aten._adaptive_avg_pool2d(x, [1, 2]), x, reason="windows that differ")
    check_falls_back(lambda x: aten.upsample_bilinear2d(x, [24, 26], False), x, reason="left to ATen")


BEFORE = {
    "relu6": F.relu6, "scaled": lambda x: x * 1.5, "leaky": F.leaky_relu, "clamped": lambda x: x.clamp(-1, 1),
    "shrunk": lambda x: F.softshrink(x * 1.25), "in halves": lambda x: x.half() * 2,
}  # fmt: skip
WINDOWS = {
    "max": lambda x: F.max_pool2d(x, 3, 2, 1), "avg": lambda x: F.avg_pool2d(x, 3, 1, 1),
    "dilated": lambda x: F.max_pool2d(x, 2, 1, 1, 2), "padded": lambda x: F.pad(x, (1, 1, 2, 0)) - 1,
}  # fmt: skip


@pytest.mark.sampled(8)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("before", BEFORE)
def test_windows_over_what_is_computed_in_channels_last(window, before):
    """Images that are all border, and images with an inside, whose loops test nothing; channels that fill no vector."""
    fn = lambda x: WINDOWS[window](BEFORE[before](x))  # noqa: E731
    handle, spec = fuse(fn)
    for size in ((1, 21, 3, 2), (2, 37, 9, 8), (1, 64, 1, 5)):
        x = values(*size).contiguous(memory_format=torch.channels_last)
        x[0, 1, 0, 1], x[0, 2] = float("nan"), -float("inf")
        compare(handle(x), fn(x), tol=CLOSE if before != "in halves" else {"rtol": 1e-2, "atol": 1e-2})
    no_fallback(spec)


def test_the_inside_of_an_image_tests_no_conditions():
    """g++ makes jumps of them, and of clamps before them, and then no vectors."""
    x = values(2, 16, 9, 8).contiguous(memory_format=torch.channels_last)
    graph = torch.fx.symbolic_trace(lambda x: F.max_pool2d(F.relu6(x), 3, 2, 1))
    code = fuser.debug_get_fused_kernel_code(graph, [x])
    assert re.search(r"if \(t\d+( & t\d+)+\) \{\n +const bool t\d+ = true;", code)
