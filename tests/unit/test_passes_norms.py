"""Batch norms in training: their activations are not kept for the backward but computed again, bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fuser import config
from fuser.frontends.dynamo import compilations, fuser_backend
from tests.unit.test_training_memory import saved_elements

pytestmark = pytest.mark.usefixtures("clean")
IMAGES = 4 * 8 * 12 * 12  # elements of a convolution's result


class Net(nn.Module):
    """Two convolutions with an activated norm between them."""

    def __init__(self, activation, affine=True):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (nn.Conv2d(c, 8, 3, padding=1, bias=False) for c in (3, 8))
        self.norm, self.activation = nn.BatchNorm2d(8, affine=affine), activation
        if affine:
            nn.init.normal_(self.norm.weight)
            nn.init.normal_(self.norm.bias)

    def forward(self, x):
        return self.second(self.activation(self.norm(self.first(x)))).square().sum()


def changed(name):
    return sum(p.changed for c in compilations() for p in c.passes if p.name == name)


def compared(net, x):
    """The compiled net, after two steps like eager's on a copy of it."""
    eager = copy.deepcopy(net)
    f = torch.compile(net, backend=fuser_backend)
    for _ in range(2):
        want, got = eager(x), f(x)
        want.backward()
        got.backward()
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    for (name, p), q in zip(net.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-3, msg=lambda m, n=name: f"{n}: {m}")
    for b, c in zip(net.buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(b, c, rtol=1e-5, atol=1e-5)
    return f


@pytest.mark.sampled(2)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("activation", [F.relu, F.silu])
def test_an_activation_is_computed_again(activation, affine):
    net, x = Net(activation, affine), torch.randn(4, 3, 12, 12)
    f = compared(net, x)
    assert changed("norms_again") == 2 and changed("norms_apart") > 0
    own = [*net.parameters(), *net.buffers(), x]
    kept = 2 * IMAGES + x.numel() + 2 * 8  # what the convolutions give, the image in channels-last order, statistics
    eager = copy.deepcopy(net)
    more = saved_elements(lambda: eager(x), [*eager.parameters(), *eager.buffers(), x])
    assert saved_elements(lambda: f(x), own) <= kept < more


def test_a_mask_is_taken_from_the_norms_input():
    net, x = Net(F.relu), torch.randn(4, 3, 12, 12)
    net.second = nn.Identity()
    compared(net, x)
    assert changed("norms_again") >= 1


def test_what_is_a_result_is_not_computed_again():
    class Two(Net):
        def forward(self, x):
            y = F.relu(self.norm(self.first(x)))
            return y, self.second(y).sum()

    net, x = Two(F.relu), torch.randn(4, 3, 12, 12)
    eager = copy.deepcopy(net)
    f = torch.compile(net, backend=fuser_backend)
    for g in (f, eager):
        y, total = g(x)
        (total + y.square().sum()).backward()
    for p, q in zip(net.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-3)
    assert changed("norms_again") == 0


def test_not_where_every_rounding_is_eagers():
    net, x = Net(F.relu), torch.randn(4, 3, 12, 12)
    with config.override(numerics="eager"):
        compared(net, x)
    assert changed("norms_again") == 0


def test_a_mask_behind_a_norm_whose_values_are_not_numbers():
    net, x = Net(F.relu), torch.randn(4, 3, 12, 12)
    x[0, 0, 0, 0] = float("nan")
    eager = copy.deepcopy(net)
    f = torch.compile(net, backend=fuser_backend)
    for g in (f, eager):
        g(x).backward()
    for p, q in zip(net.parameters(), eager.parameters(), strict=True):
        assert torch.equal(p.grad.isnan(), q.grad.isnan())
