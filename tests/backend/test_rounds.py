"""Rows of a few elements that meet vectors of as many: lanes run over many rows, and the vectors go round."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fuser import config, machines
from tests.backend.fused import compare, fuse, no_fallback

HERE = [row.name for row in machines.ROWS if machines.why_not(row) is None]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8]
SIZES = [(500, 3), (1, 3), (7, 5), (170, 3), (171, 3), (100, 1), (0, 3), (4, 0), (3, 1000), (2, 5000)]
GAINED = ("scaled", "counted", "compared", "several")


def scaled(x, w):
    return x * w + w


def counted(x, w):
    return x + torch.arange(x.shape[-1])


def compared(x, w):
    return torch.where(x > w, x, w.abs())


def several(x, w):
    return x * w, x - w[0] * w, (x > w)


def sliced(x, w):
    """Rows that do not follow each other in memory."""
    return x[:, 1:] * w[1:] + x[:, :-1]


def conditions(x, w):
    """Conditions on the index within a row are masks, no tables."""
    return torch.where(torch.arange(x.shape[-1]) < 2, x, x + x)


def of_rows(x, w):
    """Vectors of one element for each row do not go round."""
    return (x + x[:, :1]) * w


FUNCTIONS = {f.__name__: f for f in (scaled, counted, compared, several, sliced, conditions, of_rows)}


def drawn(dtype: torch.dtype, *size: int) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.randn(size, dtype=torch.float64).to(dtype)
    return torch.randint(0, 100, size).to(dtype)


@pytest.mark.sampled(12, also=("conditions-torch.float16",))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_are_eagers_at_all_sizes(name: str, dtype: torch.dtype) -> None:
    fn = FUNCTIONS[name]
    handle, spec = fuse(fn, functional=True)
    tol = {"rtol": 1e-2, "atol": 1e-2} if dtype.itemsize == 2 else {"rtol": 1e-5, "atol": 1e-4}
    for rows, k in SIZES:
        args = drawn(dtype, rows, k), drawn(dtype, k)
        if name == "several" and k == 0 or name == "sliced" and k < 2:
            continue
        compare(handle(*args), fn(*args), args, tol if dtype.is_floating_point else None)
    no_fallback(spec)
    assert ("i64 ready = -1" in spec.store.kernels[0].source) is (name in GAINED), spec.store.kernels[0].source


@pytest.mark.parametrize("isa", HERE)
def test_each_machine_has_the_same_bits(isa: str) -> None:
    image, mean, std = torch.rand(3, 40, 50, 3), torch.rand(3), torch.rand(3) + 0.5
    boxes = torch.randn(301, 4)
    with config.override(isa=isa):
        for fn, args in (
            (lambda x, m, s: (x - m) * s, (image, mean, std)),
            (lambda x, m, s: (x * 255).to(torch.uint8) + (m > s), (image, mean, std)),
            (lambda x, w: F.relu(x * w) - w, (boxes, torch.randn(4))),
        ):
            handle, spec = fuse(fn, functional=True)
            compare(handle(*args), fn(*args), args)
            no_fallback(spec)


@pytest.mark.parametrize("k", [2, 3, 7, 8, 17, 63])
def test_a_channels_last_image_is_one_long_row(k: int) -> None:
    """Also where a unit begins in the middle, on any thread, and where the last table is a part of one."""
    x = torch.randn(2, k, 37, 41).contiguous(memory_format=torch.channels_last)
    scale, shift = torch.randn(k, 1, 1), torch.randn(k, 1, 1)

    def fn(x, a, b):
        return x * a + b

    handle, spec = fuse(fn, functional=True)
    threads = torch.get_num_threads()
    try:
        for n in (1, 2, 5):
            torch.set_num_threads(n)
            compare(handle(x, scale, shift), fn(x, scale, shift), (x, scale, shift), {"rtol": 1e-6, "atol": 1e-6})
    finally:
        torch.set_num_threads(threads)
    assert "i64 ready = -1" in spec.store.kernels[-1].source


def test_rows_of_several_planes() -> None:
    """A plane's last block is a part of one, and the next plane's first block is whole."""
    handle, spec = fuse(lambda x, w: scaled(x[:, 3:], w), functional=True)
    for size in ((4, 703, 3), (5, 203, 3), (1, 900, 3), (3, 690, 7), (2, 4, 3)):
        x, w = torch.randn(size), torch.randn(size[-1])
        compare(handle(x, w), scaled(x[:, 3:], w), (x, w), {"rtol": 1e-6, "atol": 1e-6})
    assert "i64 ready = -1" in spec.store.kernels[0].source


def channels(x, w):
    return torch.tanh(x * w) + w


@pytest.mark.parametrize("first, around", [((16, 16, 31, 3), False), ((64, 40, 7, 7), False), ((512, 3, 2, 2), True)])
def test_lanes_run_along_planes_that_fill_them_whatever_came_first(first: tuple[int, ...], around: bool) -> None:
    """Lanes along the channels of large planes would read and write elements that are a plane apart."""
    handle, spec = fuse(channels, functional=True)
    w = torch.randn(first[1], 1, 1)
    for size in (first, (16, first[1], 40, 25)):
        args = torch.randn(size), w
        compare(handle(*args), channels(*args), args, {"rtol": 1e-5, "atol": 1e-5})
    no_fallback(spec)
    found = ["i64 ready = -1" in kernel.source for kernel in spec.store.kernels]
    assert sorted(found) == ([False, True] if around else [False])
