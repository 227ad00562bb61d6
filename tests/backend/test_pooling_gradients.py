"""Gradients of average poolings: kernels gather from windows that overlap, end behind the tensor, or lie apart."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fuser

CASES = [
    ([2, 2], [2, 2], [0, 0], False, True, None),
    ([3, 3], [2, 2], [1, 1], True, False, None),
    ([3, 2], [1, 3], [1, 0], False, False, None),
    ([2, 2], [3, 3], [0, 0], False, True, None),
    ([5, 3], [2, 2], [2, 1], True, True, 7),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("how", CASES, ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 11, 12), (3, 9, 8)], ids=str)
def test_average_of_two_dims(how, shape):
    x = torch.randn(shape)
    grad = torch.randn_like(F.avg_pool2d(x, *how))

    def gradient(g, x):
        return torch.ops.aten.avg_pool2d_backward(g, x, *how)

    handle = fuser.fusion_handle(fuser.register_fusion(torch.fx.symbolic_trace(gradient)))
    got, want = handle(grad, x), gradient(grad, x)
    torch.testing.assert_close(got, want)
    assert got.stride() == want.stride() and handle.hits


def test_gradients_through_autograd_in_channels_last():
    x = torch.randn(2, 4, 9, 8).contiguous(memory_format=torch.channels_last).requires_grad_()

    def step(pool):
        pool(x).square().sum().backward()
        grad, x.grad = x.grad, None
        return grad

    def pool(x):
        return F.avg_pool2d(x.sin(), 3, 2, 1)

    torch.testing.assert_close(step(torch.compile(pool, backend=fuser.backend)), step(pool))
