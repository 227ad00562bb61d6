"""Products of matrices of a few elements are arithmetic in kernels, and as exact as a library's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fuser
from fuser import config

pytestmark = pytest.mark.skipif(not fuser.can_fuse_on_cpu(), reason="needs a C++ compiler")

MANY = 64
PROGRAMS = {
    "matrices": (lambda a, b: a @ b, (MANY, 3, 3), (MANY, 3, 4)),
    "turned": (lambda a, b: (a.mT @ b.mT).relu(), (MANY, 2, 3), (MANY, 4, 2)),
    "vectors": (lambda m, x: torch.einsum("nij,nj->ni", m, x) + x, (MANY, 2, 2), (MANY, 2)),
    "clouds": (lambda x, r, t: torch.baddbmm(t, x, r), (2, MANY, 3), (2, 3, 3), (2, 1, 3)),
    "linear": (lambda x, w, b: F.linear(x, w, b).relu(), (MANY, 4), (2, 4), (2,)),
    "columns": (lambda r, x: r @ x, (3, 3), (3, MANY)),
}


def compare(fn, tensors, tol):
    args = [t.clone().requires_grad_() for t in tensors]
    compiled = torch.compile(lambda *args: fn(*args), backend="fuser", dynamic=False)
    wide = fn(*(t.double() for t in tensors))
    out, want = compiled(*args), fn(*args)
    assert out.stride() == want.stride() and out.dtype is want.dtype
    torch.testing.assert_close(out.double(), wide, rtol=tol, atol=tol)
    weights = torch.linspace(0.5, 1, out.numel()).to(out.dtype).view_as(out)
    found, expected = (torch.autograd.grad((r * weights).sum(), args) for r in (out, want))
    for own, other in zip(found, expected, strict=True):
        assert own.stride() == other.stride()
        torch.testing.assert_close(own.double(), other.double(), rtol=tol, atol=tol * 8)


@pytest.mark.sampled(6, also=("vectors",))
@pytest.mark.parametrize("name", PROGRAMS)
def test_results_and_gradients_are_those_of_a_library(name):
    fn, *sizes = PROGRAMS[name]
    torch.manual_seed(0)
    compare(fn, [torch.randn(s) for s in sizes], 1e-5)


def test_products_of_16_bits_are_rounded_once():
    torch.manual_seed(0)
    fn, *sizes = PROGRAMS["linear"]
    compare(fn, [torch.randn(s).bfloat16() for s in sizes], 2e-2)


def calls_of_libraries(fn, *sizes, **settings):
    args = [torch.randn(s) for s in sizes]
    with config.override(**settings), torch.no_grad():
        torch._dynamo.reset()
        told = fuser.explain(fn, *args)
    return str(told).count("[library]")


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_library_is_called(name):
    fn, *sizes = PROGRAMS[name]
    assert calls_of_libraries(fn, *sizes) == 0


def test_larger_products_and_eager_numerics_keep_the_library():
    product = PROGRAMS["matrices"][0]
    assert calls_of_libraries(product, (MANY, 8), (8, 3)) == 1
    assert calls_of_libraries(product, (MANY, 3, 3), (MANY, 3, 3), numerics="eager") == 1
