"""Gradients of gradients of compiled functions are eager's, or an error that says what is missing."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fuser.frontends import higher_order
from fuser.frontends.dynamo import compilations, forget_compilations, fuser_backend
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


def hidden(x):
    return torch.tanh(x @ X.T) * x.sum(-1, keepdim=True)


RESULTS = {
    "flat": lambda x: hidden(x).view(-1),
    "squeezed": lambda x: hidden(x).sum(-1, keepdim=True).sin().squeeze(-1),
    "column": lambda x: hidden(x)[:, 0],
    "rows": lambda x: hidden(x).unbind(1),
    "parts": lambda x: hidden(x).split(2, 1),
    "view of a view": lambda x: hidden(x).view(-1)[::2].unsqueeze(0),
    "views of one base": lambda x: (lambda y: (y.view(-1), y.T, y.sin()))(hidden(x)),
    "a base and its view": lambda x: (lambda y: (y, y.T))(hidden(x)),
    "views of two bases": lambda x: (hidden(x).T, (x * x).sin().view(-1)),
    "written through a view": lambda x: (lambda y: (y.view(-1).mul_(2), y))((x * x).sin()),
    "the input": lambda x: (x, (x * x).sin()),
    "a view of the input": lambda x: (x.view(-1), (x * x).sin()),
    "a view without history": lambda x: ((x * x).sin().detach().view(-1), (x * x).exp()),
    "repeated": lambda x: (x * x).sum(0).sin().expand(3, 4),
    "size": lambda x: (x * x).sin() * x.shape[0],
}


@pytest.mark.parametrize("name", RESULTS)
def test_results_that_are_views_and_sizes_that_vary(name):
    def found(f):
        results = []
        for n in (4, 6, 3):
            x = torch.linspace(-1, 1, 4 * n).view(n, 4).requires_grad_()
            given = f(x)
            given = given if isinstance(given, tuple) else (given,)
            total = sum(t.sin().sum() for t in given if t.requires_grad)
            (first,) = torch.autograd.grad(total, x, create_graph=True)
            first.sin().sum().backward()
            results += [first.detach(), x.grad]
        return results

    torch._dynamo.reset()
    torch.testing.assert_close(found(compiled(RESULTS[name])), found(RESULTS[name]), rtol=1e-4, atol=1e-5)


def test_attention_written_as_products():
    """It becomes one call, which has no second gradient; the program's own operators have."""

    def attention(q, k, v):
        return (torch.softmax(q @ k.mT / 4, -1) @ v).flatten(1)

    forget_compilations()
    made = [torch.randn(2, 300, 16) for _ in range(3)]
    f = compiled(attention)
    torch.testing.assert_close(penalty(lambda *a: f(*a).sin().sum(), *made),
                               penalty(lambda *a: attention(*a).sin().sum(), *made), rtol=1e-4, atol=1e-4)  # fmt: skip
    q, k, v = (a.clone().requires_grad_() for a in made)
    many = torch.randn(3, 2, 300 * 16)
    found = [torch.autograd.grad(g(q, k, v), (q, k, v), many, is_grads_batched=True) for g in (f, attention)]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    passes = [p for c in compilations() for p in c.passes if p.name == "fuse_attention"]
    assert any(p.changed for p in passes)


def test_a_compiled_function_of_anothers_result():
    def found(f, g):
        x = X.clone().requires_grad_()
        a, b = g(f(x))
        (first,) = torch.autograd.grad(a.exp().sum() + b.sum(), x, create_graph=True)
        (first**2).sum().backward()
        return first.detach(), x.grad

    def second(y):
        return y.view(3, -1), y.sin() * 2

    torch.testing.assert_close(found(compiled(RESULTS["flat"]), compiled(second)), found(RESULTS["flat"], second))


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
