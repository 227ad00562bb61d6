"""Results that kernels write into products and convolutions that nothing reads later; here on the CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from benchmarks import memory
from fuser.frontends import functional
from fuser.passes import dying_inputs

X, W, V = torch.randn(2, 8, 16, 16), torch.randn(8, 8, 3, 3), torch.randn(8)
A, B = torch.randn(32, 24), torch.randn(24, 40)


@pytest.fixture(autouse=True)
def groups(monkeypatch):
    """The pass takes tensors of all sizes on the CPU; the numbers of the groups that write inputs, for each graph."""
    found: list[frozenset[int]] = []

    def write_dying(plan, grouping):
        plan, writing = dying_inputs.write_dying(plan, grouping)
        found.append(writing)
        return plan, writing

    monkeypatch.setattr(functional, "write_dying", write_dying)
    monkeypatch.setattr(dying_inputs, "is_raced", lambda device_type: False)
    monkeypatch.setattr(dying_inputs, "LEAST_BYTES", 0)
    return found


def conv(x=X):
    return F.conv2d(x, W, padding=1)


def norm(y):
    return F.batch_norm(y, V, V.abs() + 1, V, V)


IN_PLACE = {
    "channels last": lambda: norm(conv(X.to(memory_format=torch.channels_last))).relu(),
    "residual": lambda: (conv() + X).relu(),
    "several results": lambda: ((y := conv()).relu() * 2, y.sigmoid() + X),
    "beside a transposed one": lambda: (A @ B).relu() + (B.t() @ A.t()).t(),
    "linear": lambda: F.gelu(F.linear(A.view(4, 8, 24), B.t())) @ B.t(),
    "linear, then a factor": lambda: F.linear(A.view(4, 8, 24), B.t()) * 0.125,
    "in two sizes": lambda: (y := F.linear(A.view(4, 8, 24), B.t())) * 2 + y.view(32, 40).abs().view(4, 8, 40),
    "both operands": lambda: conv().relu() * conv(X + 1),
    "two readers of one result": lambda: (z := conv().exp(), conv(z).relu())[1] + z,
    "rows beside it": lambda: ((y := A @ B).relu() + A.softmax(-1).sum(), y.abs() + B.mean()),
}
APART = {
    "transposed": lambda: (A @ B).t().relu().contiguous(),
    "a sum": lambda: ((y := conv()).relu() * 2, (y + X).sum()),
    "read by a library too": lambda: ((y := A @ B).relu(), y @ B.t()),
    "a result": lambda: ((y := A @ B).relu(), y),
    "other sizes": lambda: (A @ B)[None] + torch.ones(3, 1, 1),
    "pool": lambda: F.max_pool2d(conv().relu(), 2),
    "other order": lambda: F.linear(A.view(4, 8, 24), B.t()).transpose(0, 1).relu().contiguous(),
    "shifted": lambda: (y := A @ B).relu() + y.roll(1, 0),
}


def check(f):
    torch._dynamo.reset()
    fused = torch.compile(f, backend="fuser")
    with torch.no_grad():
        for _ in range(2):  # inputs are unharmed
            found, want = fused(), f()
            for mine, eager in zip(*(r if isinstance(r, tuple) else (r,) for r in (found, want))):
                assert mine.stride() == eager.stride()
                torch.testing.assert_close(mine, eager, rtol=1e-4, atol=1e-4)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place(name, groups):
    check(IN_PLACE[name])
    assert any(groups)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", APART)
def test_apart(name, groups):
    check(APART[name])
    assert groups and not any(groups)


def test_gradients(groups):
    """What the backward saves is not written; its own products may be."""
    x, a = torch.randn(32, 24, requires_grad=True), torch.randn(24, 24, requires_grad=True)

    def f(x, a):
        return ((x @ a).tanh() @ a).sigmoid().sum()

    torch._dynamo.reset()
    found = torch.autograd.grad(torch.compile(f, backend="fuser")(x, a), (x, a))
    for mine, eager in zip(found, torch.autograd.grad(f(x, a), (x, a))):
        torch.testing.assert_close(mine, eager)
    assert any(groups)


def test_less_memory(monkeypatch):
    """A step has the product alone at its peak, not the product and the kernel's result, which has 1 MiB."""
    a, b = torch.randn(512, 64), torch.randn(64, 512)
    options = {"output_limit_bytes": 0, "deterministic": "yes"}  # ATen makes the product
    peaks = []
    for is_raced in (True, False):
        monkeypatch.setattr(dying_inputs, "is_raced", lambda device_type, raced=is_raced: raced)
        torch._dynamo.reset()
        fused = torch.compile(lambda a, b: (a @ b).relu() + 1, backend="fuser", options=options)
        with torch.no_grad():
            fused(a, b)
            peaks.append(memory.peak_tensor_mib(lambda fused=fused: fused(a, b)))
    assert peaks[0] - peaks[1] >= 0.9
