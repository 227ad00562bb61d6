"""Models of the benchmarks, shrunk, on a GPU: results and gradients no further from float64 than eager's."""

from __future__ import annotations

import copy

import pytest
import torch

from benchmarks.models import MODELS, build
from fuser.frontends.dynamo import compilations, forget_compilations, fuser_backend
from fuser.interface import kernel_spec

pytestmark = pytest.mark.cuda


@pytest.fixture(autouse=True)
def clean():
    torch._dynamo.reset()
    forget_compilations()
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield
    torch._dynamo.reset()


def double(t):
    return t.double() if t.is_floating_point() else t


def kernels_ran():
    return any(kernel_spec(k).store.kernels for c in compilations() for k in c.keys)


@pytest.mark.parametrize("mode", ("default", "reduce-overhead"))
@pytest.mark.parametrize("name", MODELS)
def test_results(name, mode):
    model, inputs = build(name, True, "cuda")
    exact_model = copy.deepcopy(model).double()
    with torch.no_grad():
        f = torch.compile(model, backend=fuser_backend, mode=mode)
        outs = [f(*inputs).clone() for _ in range(4)]
        eager, exact = model(*inputs), exact_model(*map(double, inputs))
    for got in outs:
        assert got.shape == eager.shape and got.dtype == eager.dtype
        assert (got - exact).abs().max() <= 4 * (eager - exact).abs().max() + 1e-6
    assert kernels_ran()


@pytest.mark.parametrize("name", MODELS)
def test_gradients(name):
    model, inputs = build(name, True, "cuda")
    exact_model, mine = copy.deepcopy(model).double(), copy.deepcopy(model)
    for m, x, f in ((model, inputs, model), (mine, inputs, torch.compile(mine, backend=fuser_backend)),
                    (exact_model, tuple(map(double, inputs)), exact_model)):  # fmt: skip
        torch.manual_seed(0)
        m.requires_grad_(True)
        f(*x).square().mean().backward()
    for (n, a), b, e in zip(mine.named_parameters(), model.parameters(), exact_model.parameters()):
        assert (a.grad is None) == (b.grad is None), n
        if b.grad is not None:
            error, allowed = (a.grad - e.grad).abs().max(), (b.grad - e.grad).abs().max()
            assert error <= 4 * allowed + 1e-5 * e.grad.abs().max() + 1e-9, (n, float(error), float(allowed))
    assert kernels_ran()


@pytest.mark.parametrize("channels", (1, 3, 4))
@pytest.mark.parametrize("mode", ("nearest", "bilinear", "trilinear"))
def test_resized_images_keep_their_layout(mode, channels):
    layout, size = (torch.channels_last_3d, (6, 5, 4)) if mode == "trilinear" else (torch.channels_last, (6, 5))
    x = torch.randn(2, channels, *size, device="cuda").contiguous(memory_format=layout)
    program = lambda x: torch.nn.functional.interpolate(torch.sin(x), scale_factor=2, mode=mode) * 2 + 1  # noqa: E731
    compiled = torch.compile(program, backend=fuser_backend)
    inputs = x.clone().requires_grad_(), x.clone().requires_grad_()
    for got, want in ((compiled(x), program(x)), (compiled(inputs[0]), program(inputs[1]))):
        torch.testing.assert_close(got, want)
        assert got.stride() == want.stride()
