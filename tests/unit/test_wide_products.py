"""Products and convolutions of dtypes that the machine has no fast ones for: in float32, rounded once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fuser
from fuser.frontends.dynamo import compilations
from fuser.passes import wide_products
from tests.peers.judge import widened

pytestmark = pytest.mark.usefixtures("clean")
DTYPES = (torch.float16, torch.bfloat16)
PROGRAMS = {
    "product": (lambda x, w: torch.relu(x @ w), (40, 64), (64, 48)),
    "linear": (lambda x, w, b: F.gelu(F.linear(x, w, b)), (40, 64), (48, 64), (48,)),
    "rows behind one another": (lambda x, w: F.linear(x, w) * 2, (3, 20, 64), (48, 64)),
    "factors": (lambda c, x, w: torch.addmm(c, x, w, beta=0.5, alpha=2.0), (48,), (40, 64), (64, 48)),
    "batches": (lambda x, w: torch.bmm(x, w).sin(), (3, 40, 32), (3, 32, 24)),
    "batches added": (lambda c, x, w: torch.baddbmm(c, x, w, beta=2), (3, 40, 24), (3, 40, 32), (3, 32, 24)),
    "transposed": (lambda x, w: x.t() @ w.t(), (64, 40), (48, 64)),
    "convolution": (lambda x, w, b: F.conv2d(x, w, b, padding=1).relu(), (2, 8, 12, 12), (16, 8, 3, 3), (16,)),
    "of groups": (lambda x, w: F.conv2d(x, w, stride=2, groups=4), (2, 8, 12, 12), (16, 2, 3, 3)),
    "of lines": (lambda x, w: F.conv1d(x, w, dilation=2), (2, 8, 40), (16, 8, 3)),
    "of volumes": (lambda x, w: F.conv3d(x, w), (1, 4, 6, 7, 8), (8, 4, 2, 3, 3)),
    "transposed convolution": (lambda x, w: F.conv_transpose2d(x, w, stride=2), (2, 8, 9, 9), (8, 4, 2, 2)),
}


@pytest.fixture(autouse=True)
def slow_products(monkeypatch):
    """A machine without fast products of 16-bit floats."""
    monkeypatch.setattr(wide_products, "product_dtype", lambda dtype: torch.float32 if dtype.itemsize < 4 else dtype)


def changed():
    return [r.changed for c in compilations() for r in c.passes if r.name == "products_in_float32"]


def with_gradients(fn, args):
    args = [a.detach().clone().requires_grad_() for a in args]
    out = fn(*args)
    out.backward(torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(out))
    return [out.detach(), *(a.grad for a in args)]


@pytest.mark.sampled(10)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_results_and_gradients(name, dtype, dynamic):
    fn, *shapes = PROGRAMS[name]
    args = [torch.randn(shape).to(dtype) for shape in shapes]
    got = with_gradients(torch.compile(fn, backend="fuser", dynamic=dynamic), args)
    assert changed() and all(changed())
    right = widened(lambda *a: with_gradients(fn, a), args)
    for a, b, exact in zip(got, with_gradients(fn, args), right):
        far, near = (float((t.double() - exact).abs().max()) for t in (a, b))
        assert a.dtype is dtype and far <= 2 * near + torch.finfo(dtype).eps * float(exact.abs().max())
        assert a.stride() == b.stride()


@pytest.mark.parametrize("name", ["convolution", "of groups"])
def test_channels_last(name):
    fn, *shapes = PROGRAMS[name]
    args = [torch.randn(shape, dtype=torch.float16) for shape in shapes]
    args[0] = args[0].to(memory_format=torch.channels_last)
    with torch.no_grad():
        got, want = torch.compile(fn, backend="fuser")(*args), fn(*args)
    torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
    assert got.stride() == want.stride()


@pytest.mark.parametrize("how", ["float32", "tiny", "one row", "eager numerics", "fast products"])
def test_products_stay(how, monkeypatch):
    dtype = torch.float32 if how == "float32" else torch.float16
    if how == "fast products":
        monkeypatch.setattr(wide_products, "product_dtype", lambda dtype: dtype)
    rows, inner = {"tiny": (4, 8), "one row": (1, 512)}.get(how, (40, 64))
    x, w = torch.randn(rows, inner).to(dtype), torch.randn(96, inner).to(dtype)
    with torch.no_grad(), fuser.config.override(**({"numerics": "eager"} if how == "eager numerics" else {})):
        torch.compile(lambda x, w: F.linear(x, w).relu(), backend="fuser")(x, w)
    assert not any(changed())
