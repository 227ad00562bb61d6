"""Graphs that cannot be traced or that raise at a call, where eager works: its result, and a reason that is kept."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo import decorators

from fuser.frontends.dynamo import compilations, fuser_backend

pytestmark = pytest.mark.usefixtures("clean")


@pytest.fixture
def turned():
    """A custom operator whose description promises strides that its result has not."""
    with torch.library._scoped_library("fuser_tests", "FRAGMENT") as library:
        library.define("turned(Tensor x) -> Tensor")
        library.impl("turned", lambda x: (x * 2).t().contiguous().t(), "CPU")
        library.impl("turned", lambda x: torch.empty_like(x), "Meta")
        library.impl("turned", _Turned.apply, "Autograd")
        yield torch.ops.fuser_tests.turned.default


class _Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.fuser_tests.turned(x)

    @staticmethod
    def backward(ctx, grad):
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.fuser_tests.turned(grad)


@pytest.mark.parametrize("requires_grad", [False, True], ids=["inference", "training"])
def test_strides_other_than_promised(turned, requires_grad):
    def f(x):
        return turned(x.sin() + 1).reshape(-1).cos(), turned(x).reshape(3, 2, 2).sum(1)

    x = torch.randn(3, 4).requires_grad_(requires_grad)
    same = x.detach().clone().requires_grad_(requires_grad)
    got, want = torch.compile(f, backend=fuser_backend)(x), f(same)
    torch.testing.assert_close(got, want)
    if requires_grad:
        (got[0].sum() + got[1].sum()).backward()
        (want[0].sum() + want[1].sum()).backward()
        torch.testing.assert_close(x.grad, same.grad)


def test_a_graph_that_raises_runs_by_eager():
    calls = []

    def impl(x):
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("not this time")
        return x * 2

    with torch.library._scoped_library("fuser_tests", "FRAGMENT") as library:
        library.define("moody(Tensor x) -> Tensor")
        library.impl("moody", impl, "CPU")
        library.impl("moody", lambda x: torch.empty_like(x), "Meta")
        moody = torch.ops.fuser_tests.moody.default
        f = torch.compile(lambda x: moody(x.sin()) + 1, backend=fuser_backend)
        x = torch.randn(5)
        for _ in range(2):
            torch.testing.assert_close(f(x), x.sin() * 2 + 1)
    (reason,) = {r for c in compilations() for r in c.by_eager}
    assert "not this time" in reason


@pytest.mark.parametrize("requires_grad", [False, True], ids=["inference", "training"])
def test_an_error_is_eagers_and_all_that_a_user_sees(requires_grad, capfd):
    table = torch.randn(4, 3).requires_grad_(requires_grad)
    f = torch.compile(lambda i: F.embedding(i, table).cumsum(0).sort(0)[0] + 1, backend=fuser_backend)
    with pytest.raises(IndexError, match="out of range") as raised:
        f(torch.tensor([1, 9]))
    assert raised.value.__suppress_context__ or raised.value.__context__ is None
    assert capfd.readouterr() == ("", "")


def test_what_cannot_be_traced_runs_by_eager():
    def f(x):
        return x.cumsum(1)

    x = torch.randn(10, 8).requires_grad_()
    decorators.mark_unbacked(x, 0)
    same = x.detach().clone().requires_grad_()
    got = torch.compile(f, backend=fuser_backend, fullgraph=True)(x)
    (got.sum() + f(same).sum()).backward()
    torch.testing.assert_close((got, x.grad), (f(same), same.grad))
    assert any("cannot be traced" in c.reason for c in compilations())


def test_a_gradient_that_cannot_be_traced_is_eagers_without_a_warning(recwarn):
    def f(x, k):
        return x.pow(k).sin()  # torch compares such a k with numbers, which it cannot where k is a symbol

    compiled = torch.compile(f, backend=fuser_backend)
    for k in (2, 3, 5):
        x = torch.rand(5, requires_grad=True)
        same = x.detach().clone().requires_grad_()
        (compiled(x, k).sum() + f(same, k).sum()).backward()
        torch.testing.assert_close(x.grad, same.grad)
    assert any("cannot be traced" in c.reason for c in compilations())
    assert not [w for w in recwarn if "Error detected" in str(w.message)]
