"""How much memory the kernels of backwards touch: counted in their plans, so that no GPU is needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.backend.planned import compiled

BF16 = torch.bfloat16


def rms_norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    f = x.float()
    return (f * torch.rsqrt(f.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * w


def layer_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, (x.shape[-1],), w, b)


def cross_entropy(x: torch.Tensor, cast: bool = True, **options: Any) -> torch.Tensor:
    target = torch.arange(x.shape[0], device=x.device) * 7 % x.shape[1]
    return F.cross_entropy(x.float() if cast and x.dtype is BF16 else x, target, **options)


ROWS, COLUMNS = 96, 80
CASES = {
    "gelu": (lambda x: F.gelu(x, approximate="tanh"), 1, 0, 3),
    "swiglu": (lambda g, u: F.silu(g) * u, 2, 0, 5),
    "softmax": (lambda x: torch.softmax(x, -1), 1, 0, 3),
    "rms_norm": (rms_norm, 1, 1, 3),
    "layer_norm": (layer_norm, 1, 2, 3),
    "cross_entropy": (cross_entropy, 1, 0, 2),
    "cross_entropy, some ignored": (lambda x: cross_entropy(x, ignore_index=14), 1, 0, 2),
    "cross_entropy, sum": (lambda x: cross_entropy(x, reduction="sum", ignore_index=7), 1, 0, 2),
    "cross_entropy, each": (lambda x: cross_entropy(x, reduction="none", ignore_index=7), 1, 0, 2),
    "cross_entropy of halves": (lambda x: cross_entropy(x, False), 1, 0, 2),
    "cross_entropy of halves, each": (lambda x: cross_entropy(x, False, reduction="none", ignore_index=7), 1, 0, 2),
    "log_softmax of halves": (lambda x: torch.log_softmax(x, -1), 1, 0, 3),
    "log_softmax": (lambda x: torch.log_softmax(x.float(), -1), 1, 0, 3),
}


@pytest.mark.parametrize("name", CASES)
def test_large_tensors_that_a_backward_touches(name: str) -> None:
    fn, large, small, passes = CASES[name]
    made = torch.Generator().manual_seed(3)
    args = [torch.randn(ROWS, COLUMNS, generator=made) for _ in range(large)]
    args += [torch.randn(COLUMNS, generator=made) for _ in range(small)]
    args = tuple(a.to(BF16).requires_grad_() for a in args)
    parts, grads = compiled(fn, args)
    assert parts[1].passes(ROWS * COLUMNS) == passes
    if name.startswith("cross_entropy"):
        assert parts[0].passes(ROWS * COLUMNS) == 1  # the logits are read, and no probabilities written
    exact = tuple(a.detach().double().requires_grad_() for a in args)
    for got, want in zip(grads, torch.autograd.grad(fn(*exact).square().sum(), exact)):
        assert (got.double() - want).norm() <= 0.02 * want.norm()


def test_cross_entropy_of_rows_that_are_not_numbers_or_ignored() -> None:
    x = torch.randn(6, 7, generator=torch.Generator().manual_seed(1))
    x[0, 2], x[1, 3], x[2], x[3, 1] = -torch.inf, torch.nan, -torch.inf, torch.inf
    x.requires_grad_()
    for ignored in (0, 14):
        def fn(x: torch.Tensor, ignored: int = ignored) -> torch.Tensor:
            return F.cross_entropy(x, torch.full_like(x[:, 0], ignored, dtype=torch.int64) % 7, ignore_index=ignored)

        _, (got,) = compiled(fn, (x,))
        (want,) = torch.autograd.grad(fn(x).square(), x)
        torch.testing.assert_close(got, want, equal_nan=True)
