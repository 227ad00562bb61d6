"""Products in scripts that run in fused groups: large ones by oneDNN, others by ATen, with its errors and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fuser
from fuser.passes.providers import linear_op
from tests.unit.test_fuse_script import assert_alike
from tests.unit.test_torchscript_programs import outcome

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "ignore::UserWarning"),
    pytest.mark.skipif(linear_op() is None, reason="this torch has no oneDNN"),
]


def of_transposed(x: Tensor, w: Tensor):
    return torch.mm(x, w.t())


def plain(x: Tensor, w: Tensor):
    if x.size(0) > 2:
        return torch.mm(x, w.t().contiguous())
    return torch.mm(x, w.t()) + 1


def linear(x: Tensor, w: Tensor):
    return nn.functional.linear(x, w)


def ran_by_onednn(function, *args):
    with torch.profiler.profile() as profile:
        got = function(*args)
    return got, any("linear_pointwise" in e.key for e in profile.key_averages())


@pytest.mark.parametrize("program", [of_transposed, plain, linear], ids=lambda p: p.__name__)
def test_large_products(program):
    script = torch.jit.script(program)
    fused = fuser.fuse_script(script)
    w = torch.randn(256, 512)
    x = torch.randn(128, 512)
    got, by_onednn = ran_by_onednn(fused, x, w)
    assert by_onednn
    torch.testing.assert_close(got, script(x, w), rtol=1e-4, atol=1e-4)
    assert fused(x, w).equal(got)
    near = (script(x.double(), w.double()) - got).abs().max()
    assert near < 4 * (script(x.double(), w.double()) - script(x, w)).abs().max()
    for args in ((x[:3], w), (x.double(), w.double()), (x.to(torch.bfloat16), w.to(torch.bfloat16)), (x[:0], w)):
        got, by_onednn = ran_by_onednn(fused, *args)
        assert not by_onednn
        assert_alike(got, script(*args))
    for args in ((x, w[:, :500]), (x, w[0]), (x, w.double()), (x[0, 0], w), (x, w.to("meta"))):
        want, expected = outcome(script, args)
        got, error = outcome(fused, args)
        assert type(error) is type(expected), (error, expected)
    found = []
    for f in (fused, script):
        a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
        found.append(torch.autograd.grad(f(a, b).sin().sum(), (a, b)))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    with fuser.config.override(linear_backend="aten"):
        assert fused(x, w).equal(script(x, w))


def test_linear_modules_of_three_dims():
    script = torch.jit.script(nn.Sequential(nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 512, bias=False)).eval())
    fused = fuser.fuse_script(script)
    x = torch.randn(4, 64, 512)
    with torch.no_grad():
        got, by_onednn = ran_by_onednn(fused, x)
        assert by_onednn
        torch.testing.assert_close(got, script(x), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(fused(x.mT.contiguous().mT), script(x), rtol=1e-4, atol=1e-4)
    assert fused(x).requires_grad
