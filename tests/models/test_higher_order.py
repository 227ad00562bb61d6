"""Gradients of gradients of compiled functions are eager's, or an error that says what is missing."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fuser import notices
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
    monkeypatch.setattr(notices, "_logged", {})
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


@pytest.mark.sampled(15, also=("views of one base",))
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


def test_an_input_whose_content_no_gradient_needs_may_be_written_or_gone():
    def found(f):
        x, w = X.clone().requires_grad_(), W.clone()
        y = f(x, w, W.sum(0))
        w.add_(1)
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        g.sin().sum().backward()
        return x.grad

    def f(x, w, b):
        return x.sin() @ torch.ones(4, 5) + w.sum(0) + b

    torch.testing.assert_close(found(compiled(f, dynamic=True)), found(f))


@pytest.mark.skipif(IS_OLD, reason="autograd of this torch keeps the input")
def test_an_input_that_is_gone_is_an_error():
    x, f = X.clone().requires_grad_(), compiled(lambda x, w: (x + w).softmax(-1))
    y = f(x, X.clone())
    with pytest.raises(RuntimeError, match="one of them is gone"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


class Saved(torch.autograd.Function):
    """The gradient is computed from the result, and from a number."""

    @staticmethod
    def forward(ctx, x, k):
        y = (k * x).exp()
        ctx.save_for_backward(y)
        ctx.k = k
        return y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return g * y * ctx.k, None


class Powers(nn.Module):
    """A weight divided by its norm, which one step of a power iteration estimates from the last call's."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 2, 24).view(6, 4))
        self.register_buffer("u", F.normalize(torch.ones(6), dim=0))

    def forward(self, x):
        with torch.no_grad():
            v = F.normalize(self.weight.t() @ self.u, dim=0)
            self.u.copy_(F.normalize(self.weight @ v, dim=0))
        return torch.tanh(x @ (self.weight / (self.u.clone() @ (self.weight @ v))).t())


def behind_a_break(x):
    h = x @ X.t() + 1
    torch._dynamo.graph_break()
    h.mul_(x.sum(-1, keepdim=True))
    return h.sin()


def cast(x):
    return (x @ X.t()).float().tanh()


# What a second run must not do again, or must do as the first: writes, draws, casts, gradients of the program's own.
STATES = {
    "batch norm": lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2)),
    "a power iteration": Powers,
    "an input written behind a break": lambda: behind_a_break,
    "a result computed of an input and its function": lambda: lambda x: joined(x, (x * x).sin()),
    "dropout": lambda: lambda x: F.dropout(torch.tanh(x @ X.T), 0.3).exp(),
    "noise": lambda: lambda x: (x * torch.rand_like(x) + torch.randn(3, 4)).sin() * torch.empty(3, 4).uniform_(1, 2),
    "autocast": lambda: cast,
    "a function's own gradient": lambda: lambda x: Saved.apply(x.sin(), 2).sin(),
    "grad mode": lambda: lambda x: (x.sin() * x, torch._C._set_grad_enabled(False))[0],
}  # fmt: skip


@torch.compile(backend=fuser_backend)
def joined(x, y):
    return (x * y).sin() * y


@pytest.mark.sampled(6, also=("an input written behind a break",))
@pytest.mark.parametrize("name", STATES)
def test_states_that_a_second_run_must_not_change(name):
    def found(fused):
        torch.manual_seed(3)
        f, results = STATES[name](), []
        if name != "batch norm":
            torch.manual_seed(4)
        inner = list(f.parameters()) if isinstance(f, nn.Module) else []
        g = compiled(f, options={"random": "eager"}) if fused else f
        for _ in range(2):
            x = X.clone().requires_grad_()
            with torch.autocast("cpu", enabled=name == "autocast"):
                y = g(x)
            torch.set_grad_enabled(True)
            first = torch.autograd.grad(y.sin().sum(), [x, *inner], create_graph=True)
            sum((t**2).sum() for t in first).backward()
            results += [y.detach(), x.grad, *(t.detach() for t in first), torch.rand(2)]
            results += [p.grad.clone() for p in inner]
        return [*results, *(f.buffers() if isinstance(f, nn.Module) else [])]

    torch._dynamo.reset()
    limits = {"rtol": 3e-2, "atol": 3e-2} if name == "autocast" else {"rtol": 1e-3, "atol": 1e-4}
    torch.testing.assert_close(found(True), found(False), **limits)


def test_numbers_drawn_in_kernels_are_those_of_the_call():
    """Gradients of a second run are the compiled backward's: the same elements were dropped."""

    def drawn(x):
        y = F.dropout(x, 0.5) * torch.bernoulli(torch.full_like(x, 0.5)) * torch.rand(64, dtype=torch.float64)
        return (y + torch.randn_like(x) * x).sin() * F.gumbel_softmax(x, hard=True)

    found = []
    for again in (False, True):
        torch.manual_seed(0)
        x = torch.linspace(0, 1, 64).requires_grad_()
        (first,) = torch.autograd.grad(compiled(drawn)(x).sum(), x, create_graph=again)
        found.append((first.detach(), torch.rand(2)))
    torch.testing.assert_close(*found)
    first.sum().backward()


def test_a_function_that_is_differentiable_once_says_so():
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, g):
            return g * ctx.saved_tensors[0].cos()

    x = X.clone().requires_grad_()
    (g,) = torch.autograd.grad(compiled(lambda x: Once.apply(x) * x)(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
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
