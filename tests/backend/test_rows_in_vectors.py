"""Passes over rows in explicit vectors: tails of every length, every float, and numbers that only some lanes have."""

from __future__ import annotations

import pytest
import torch

from fuser import config, machines
from tests.backend.fused import fuse, no_fallback
from tests.backend.support import FLOATS

LENGTHS = (*range(2, 36), 47, 63, 64, 65, 127, 128, 129, 255, 300, 513, 1025, 5000)
EXTREMES = {"amax": lambda x: x.amax(-1), "amin": lambda x: x.amin(-1)}
FUNCTIONS = {
    "sum": lambda x: x.sum(-1),
    "norm": lambda x: torch.linalg.vector_norm(x, 2, -1),
    "softmax": lambda x: torch.softmax(x, -1),
    "log_softmax": lambda x: torch.log_softmax(x, -1),
    "shifted": lambda x: (x - x.mean(-1, keepdim=True)) * x.abs().amax(-1, keepdim=True),
    "where": lambda x: torch.where(x > 0, x, x * 0.5).sum(-1),
}


def close_to_float64(handle, fn, x: torch.Tensor) -> None:
    got, want, exact = handle(x), fn(x), fn(x.double())
    assert got.dtype is want.dtype and got.shape == want.shape
    off, eager = ((r.double() - exact).abs().max() for r in (got, want))
    assert off <= 2 * eager + 4 * torch.finfo(x.dtype).eps * exact.abs().max(), (tuple(x.shape), off, eager)


@pytest.mark.sampled(9, also=("shifted-dtype2",))
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_rows_of_every_length(name, dtype):
    """One kernel takes all of them; those of its first call fill no vector, or end with a part of one."""
    for first in (19, 200):
        handle, spec = fuse(FUNCTIONS[name], functional=True)
        for n in (first, *LENGTHS):
            close_to_float64(handle, FUNCTIONS[name], torch.randn(5, n).to(dtype))
        no_fallback(spec)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", EXTREMES)
def test_a_nan_in_any_lane(name, dtype):
    handle, spec = fuse(EXTREMES[name], functional=True)
    for n in (19, 33, 70):
        x = torch.randn(n + 4, n).to(dtype)
        x[:n].diagonal().fill_(torch.nan)
        x[n], x[n + 1], x[n + 2, -1] = -torch.inf, torch.inf, -torch.inf
        torch.testing.assert_close(handle(x), EXTREMES[name](x), rtol=0, atol=0, equal_nan=True)
    no_fallback(spec)
    if machines.find(config.isa).lanes:
        assert "#if FUSER_LANES" in spec.store.kernels[-1].source


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_number_that_all_lanes_share(dtype):
    """What is read once for a row is no load that a mask cuts off."""
    fn = lambda x, y: (x + y[:, :1].expand(-1, x.shape[1])).sum(-1) + y[:, :1].expand(-1, x.shape[1]).sum(-1)  # noqa: E731
    handle, spec = fuse(fn, functional=True)
    for n in (19, 24, 31, 64, 100):
        x, y = torch.randn(6, n).to(dtype), torch.randn(6, 3).to(dtype)
        torch.testing.assert_close(handle(x, y).double(), fn(x.double(), y.double()), rtol=2e-2, atol=0.2)
    no_fallback(spec)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", FLOATS)
def test_rows_of_several_pieces(dtype):
    """Sums of pieces share registers, and go to totals after some of them."""
    fn = lambda x: x - x.mean((1, 3), keepdim=True)  # noqa: E731
    handle, spec = fuse(fn, functional=True)
    for channels, n in ((4, 17), (40, 9), (3, 64), (100, 33), (2, 1000)):
        close_to_float64(handle, fn, torch.randn(2, channels, 3, n).to(dtype))
    no_fallback(spec)


def test_many_terms_are_as_exact_as_few():
    """No lane adds up more than a few float32, however long the row is."""
    handle, spec = fuse(lambda x: x.sum(-1), functional=True)
    for n in (100, 1_000_003):
        x = torch.rand(20, n)
        exact = x.double().sum(-1)
        assert ((handle(x).double() - exact).abs() / exact).max() < 1e-6
    no_fallback(spec)
