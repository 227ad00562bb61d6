"""Tensors with a conjugate or negative bit: a copy that clears the bit is not a copy that changes nothing."""

from __future__ import annotations

import pytest
import torch

import fuser

pytestmark = pytest.mark.usefixtures("clean")
VIEWS = {
    "conj": lambda z: (z * 2).conj(),
    "conj of a view": lambda z: z.conj(),
    "conj of a transposed view": lambda z: z.mH,
    "negative": lambda z: (z * 2).conj().imag,
    "negative of a view": lambda z: z.conj().imag,
}
COPIES = {
    "resolved": lambda t: t.resolve_conj().resolve_neg(),
    "cloned": lambda t: t.resolve_conj().resolve_neg().clone(),
    "cast": lambda t: t.to(t.dtype, copy=True).resolve_conj().resolve_neg(),
    "copied": lambda t: torch.empty_like(t).copy_(t),
}


def as_bits(t):
    """Something that only a tensor without the bit allows."""
    return torch.view_as_real(t) * 2 if t.is_complex() else t.view(torch.int32) + 1


@pytest.mark.sampled(10, also=("conj-copied-True-True", "negative-resolved-True-True"))
@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("view", VIEWS)
def test_copies_that_clear_the_bit_stay(view, copy, requires_grad, check):
    def f(z):
        return as_bits(COPIES[copy](VIEWS[view](z)))

    z = torch.randn(4, 4, dtype=torch.complex64).requires_grad_(requires_grad)
    with fuser.config.override(check_passes=check):
        result = torch.compile(f, backend="fuser")(z)
        expected = f(z)
        torch.testing.assert_close(result, expected)
        if expected.requires_grad:
            (gradient,) = torch.autograd.grad(result.sum(), z)
            torch.testing.assert_close(gradient, torch.autograd.grad(expected.sum(), z)[0])
