"""Gradients of gradients of compiled functions are eager's, or an error that says what is missing."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fuser.frontends import higher_order
from fuser.frontends.dynamo import fuser_backend
from tests.versions import IS_OLD


def compiled(f, **kwargs):
    return torch.compile(f, backend=fuser_backend, **kwargs)


def waves(x, w):
    return (torch.sin(x @ w) ** 2).sum()


X, W = torch.linspace(-1, 1, 12).view(3, 4), torch.linspace(-2, 1, 20).view(4, 5)


def penalty(f, *args):
    """Gradients, and the gradients of their squares."""
    args = [a.clone().requires_grad_() for a in args]
    first = torch.autograd.grad(f(*args), args, create_graph=True)
    sum((g**2).sum() for g in first).backward()
    return [*(g.detach() for g in first), *(a.grad for a in args)]


def test_gradient_penalty_is_eagers_and_is_said(caplog, monkeypatch):
    monkeypatch.setattr(higher_order, "_said", False)
    f = compiled(waves)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            torch.testing.assert_close(penalty(f, X, W), penalty(waves, X, W))
    assert sum("runs again, by eager" in r.message for r in caplog.records) == 1


def test_double_backward_through_a_module():
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 1))

    def step(f):
        model.zero_grad()
        x = X.clone().requires_grad_()
        (slope,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
        ((slope.norm(dim=1) - 1) ** 2).mean().backward()
        return [x.grad, *(p.grad for p in model.parameters())]

    torch.testing.assert_close(step(compiled(model)), step(model))


def test_third_order_and_several_results():
    def f(x):
        return x**4, torch.exp(x), x.detach() + 1

    def third(h):
        x = torch.tensor([0.5, -1.5], requires_grad=True)
        a, b, _ = h(x)
        y = (a + b).sum()
        for _ in range(3):
            (y,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y.detach()

    torch.testing.assert_close(third(compiled(f)), third(f))


def test_plain_backward_stays_compiled(monkeypatch):
    monkeypatch.setattr(higher_order, "by_eager", lambda *args: pytest.fail("eager was asked"))
    x = X.clone().requires_grad_()
    compiled(waves)(x, W).backward()
    assert x.grad is not None


def test_an_input_that_was_written_is_an_error():
    x, w = X.clone().requires_grad_(), W.clone()
    y = compiled(waves)(x, w)
    w.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y, x, create_graph=True)


@pytest.mark.skipif(IS_OLD, reason="autograd of this torch keeps the input")
def test_an_input_that_is_gone_is_an_error():
    x, f = X.clone().requires_grad_(), compiled(lambda x, w: x * 2 + w.sum())
    y = f(x, W.clone())
    with pytest.raises(RuntimeError, match="one of them is gone"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_random_numbers_are_not_drawn_again():
    x = torch.ones(64, requires_grad=True)
    y = compiled(lambda x: (F.dropout(x, 0.5) ** 2).sum())(x)
    (g,) = torch.autograd.grad(y, x, create_graph=True)
    assert set(g.detach().unique().tolist()) <= {0.0, 8.0}
    with pytest.raises(RuntimeError):
        g.sum().backward()


TRANSFORMS = {
    "grad": lambda f: torch.func.grad(f)(X, W),
    "grad of grad": lambda f: torch.func.grad(lambda x: torch.func.grad(f)(x, W).square().sum())(X),
    "hessian": lambda f: torch.func.hessian(f)(X, W),
    "jvp": lambda f: torch.func.jvp(lambda x: f(x, W), (X,), (X + 1,)),
    "vmap": lambda f: torch.func.vmap(lambda x: f(x, W))(torch.stack([X, X + 1])),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_compiled_functions(name):
    torch.testing.assert_close(TRANSFORMS[name](compiled(waves)), TRANSFORMS[name](waves))


def test_a_compiled_function_of_transforms():
    def f(x):
        return torch.func.grad(lambda x: torch.func.grad(waves)(x, W).square().sum())(x)

    torch.testing.assert_close(compiled(f)(X), f(X))
