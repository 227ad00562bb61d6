"""What programs compute from numbers alone: tables, masks and grids that a model makes anew in each call."""

import math

import pytest
import torch
from torch.nn import functional as F

from fuser.frontends import dynamo


def positions(x):
    """Sines and cosines of positions, as transformers add them."""
    at = torch.arange(float(x.shape[1]))[:, None]
    rate = torch.exp(torch.arange(0, 32, 2.0) * (-math.log(10000.0) / 32))
    return torch.cat([torch.sin(at * rate), torch.cos(at * rate)], 1)


def causal(x):
    n = x.shape[1]
    return torch.full((n, n), float("-inf")).triu(1)


def grid(x):
    y, z = torch.meshgrid(torch.linspace(-1, 1, x.shape[0]), torch.linspace(-1, 1, x.shape[1]), indexing="ij")
    return torch.stack([z, y], -1)


def camera(x):
    """A matrix that is filled in place."""
    k = torch.eye(3).repeat(2, 1, 1)
    k[..., 0, 0] *= 0.5
    k[..., 1, 1] *= 0.5
    k[..., 0, 2] += x.shape[0] / 2
    return k


def window(x):
    return torch.hann_window(16, periodic=False).outer(torch.ones(3)) / 2


def kernel(x):
    """A Gaussian kernel of a blur."""
    at = torch.arange(5) - 2
    row = torch.exp(-at.pow(2.0) / 4.5)
    row = row / row.sum()
    return row[:, None] * row[None]


def steps(x):
    """The noise of a diffusion model's steps."""
    betas = torch.linspace(1e-4, 2e-2, 50, dtype=torch.float64)
    return torch.cumprod(1 - betas, 0).sqrt().float(), betas.float()


def distances(x):
    at = torch.arange(x.shape[1])
    return (at[:, None] - at[None]).clamp(-4, 4) + 4, F.one_hot(at % 3, 3)


PROGRAMS = (positions, causal, grid, camera, window, kernel, steps, distances)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dynamic", [False, True])
def test_as_in_eager(program, dynamic):
    """At several sizes, in float64 as the default, too."""
    compiled = torch.compile(lambda x: program(x), backend="fuser", dynamic=dynamic)
    for n in (6, 9, 6):
        x = torch.randn(4, n)
        torch.testing.assert_close(compiled(x), program(x))
    torch.set_default_dtype(torch.float64)
    try:
        torch.testing.assert_close(compiled(x), program(x))
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("program", [positions, causal, grid, kernel])
def test_one_kernel(program):
    torch.compile(lambda x: program(x), backend="fuser")(torch.randn(4, 6))
    record = dynamo.last_compilation()
    assert len(record.groups) == 1 and not record.unfused


def test_one_operator_is_left_to_aten():
    torch.compile(lambda: torch.eye(3), backend="fuser")()
    (only,) = dynamo.last_compilation().unfused
    assert only.code == "from_numbers"
