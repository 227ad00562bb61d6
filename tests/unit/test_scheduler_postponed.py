"""A kernel runs after a later one that needs nothing of it, where one loop can then go on with the results of both."""

from __future__ import annotations

import torch

from tests.backend.fused import check


def renormalised(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    own, other = x.mean(-1, keepdim=True), y.mean(-1, keepdim=True)
    return (x - own) * y.square().mean(-1, keepdim=True) + other


def test_a_norm_with_anothers_statistics_is_two_kernels():
    x, y = torch.randn(64, 512), torch.randn(64, 700)
    check(renormalised, x, y, tol={"rtol": 1e-5, "atol": 1e-5}, kernels=2)


def test_a_kernel_that_is_read_meanwhile_stays_where_it_is():
    def function(x, y):
        own = (x - x.mean(-1, keepdim=True)) * 2
        other = (y * own.sum()).mean(-1, keepdim=True)
        return own * other + own

    check(function, torch.randn(64, 512), torch.randn(64, 700), tol={"rtol": 1e-4, "atol": 1e-3})


def test_a_join_that_a_postponed_kernel_fills_in_part_is_read_after_it():
    def function(x, y):
        own = x - x.mean(-1, keepdim=True)
        other = y - y.mean(-1, keepdim=True)
        joined = torch.cat((own, other), -1)
        late = own * y.square().mean(-1, keepdim=True)
        return joined.amax(-1), late, joined * 2

    check(function, torch.randn(64, 512), torch.randn(64, 700), tol={"rtol": 1e-4, "atol": 1e-3})
