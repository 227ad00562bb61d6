"""Inputs that no differentiated result depends on have no gradient: on AOTAutograd's node and on a thin one."""

from __future__ import annotations

import itertools

import pytest
import torch

from fuser.frontends.dynamo import fuser_backend


def inputs():
    torch.manual_seed(0)
    sizes = (4, 4), (4, 4), (4, 3), (4,)
    return [torch.randn(size, requires_grad=True) for size in sizes]


def apart(x, w, v, u):
    """Results of different inputs, one without a gradient, one that detaches an input."""
    h = x @ w
    k = (x * u).sin()
    return h.relu(), (k @ v).sum(-1), h.sum(0).argmax(), (u.detach() * k[0]).cos(), w * 2


def views(x, w, v, u):
    h = (x @ w).relu()
    k = (x * u).sin()
    return h, h[:2], k.t(), (k @ v).view(-1)


def written_pieces(x, w, v, u):
    y = x.clone()
    y[0] = w[0]
    return y, (w * v.sum()).sum(), u.cos()


def written_input(x, w, v, u):
    b = v.sum() * u
    torch._dynamo.graph_break()
    return _writes(b, x, w, v)


def _writes(b, x, w, v):
    b.mul_(w[0])
    return b, x * 2, v.sin(), b * 2


def gradients(f, used):
    """The gradients of all inputs where the results `used` alone are differentiated."""
    leaves = inputs()
    results = f(*leaves)
    sum(results[i].sum() for i in used if results[i].requires_grad).backward()
    return [leaf.grad for leaf in leaves]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("function", (apart, views, written_pieces, written_input))
def test_inputs_of_unused_results_have_no_gradient(function):
    torch._dynamo.reset()
    compiled = torch.compile(function, backend=fuser_backend)
    results = [i for i, r in enumerate(function(*inputs())) if r.requires_grad]
    for used in [*((i,) for i in results), *itertools.pairwise(results)]:
        for got, want in zip(gradients(compiled, used), gradients(function, used), strict=True):
            assert (got is None) == (want is None), (used, got)
            if want is not None:
                torch.testing.assert_close(got, want)


def test_an_optimiser_skips_a_head_that_is_not_used():
    """Weight decay moves a parameter whose gradient is zero, but not one without a gradient."""
    torch.manual_seed(0)
    model = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
    other = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
    other.load_state_dict(model.state_dict())

    def step(model, x):
        h = model[0](x).relu()
        return model[1](h).sin(), model[2](h).cos()

    x = torch.randn(5, 4)
    for m, f in (model, step), (other, torch.compile(step, backend=fuser_backend)):
        optimiser = torch.optim.SGD(m.parameters(), 0.1, momentum=0.9, weight_decay=0.1)
        for _ in range(3):
            optimiser.zero_grad()
            f(m, x)[0].square().sum().backward()
            optimiser.step()
    for got, want in zip(other.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(got, want)
    assert model[2].weight.grad is None and other[2].weight.grad is None


def test_gradients_of_gradients_of_some_results():
    torch._dynamo.reset()
    compiled = torch.compile(apart, backend=fuser_backend)
    found = []
    for f in (compiled, compiled, apart):
        x, w, v, u = inputs()
        first = torch.autograd.grad(f(x, w, v, u)[1].sum(), (x, w, v), create_graph=True, allow_unused=True)
        found.append((first[1], *torch.autograd.grad(first[0].square().sum(), (x, v), allow_unused=True)))
    assert all(got[0] is None for got in found)
    for got in found[:2]:
        torch.testing.assert_close(got[1:], found[2][1:])


DETACHED = {
    "data": lambda b: b.unflatten(0, (1, -1)).data,
    "detach": lambda b: b.detach(),
    "of a view": lambda b: b.view(-1).detach(),
    "part": lambda b: b.data[:1],
    "bits": lambda b: b.view(torch.int32).view(torch.float32),
}


@pytest.mark.parametrize("write", [torch.relu_, torch.Tensor.zero_, lambda v: v.mul_(2)], ids=["relu", "zero", "mul"])
@pytest.mark.parametrize("name", DETACHED)
def test_gradients_pass_by_writes_of_detached_views(name, write):
    def program(x, y):
        base = x * 2
        view = base.unflatten(0, (1, -1))
        write(DETACHED[name](base))
        return view, base, (view * 1).sum(), y.detach() * 2

    x, y = (torch.randn(3, 4, requires_grad=True) for _ in range(2))
    compiled = torch.compile(program, backend="fuser")
    for n in range(3):
        want, got = (torch.autograd.grad(f(x, y)[n].sum(), (x, y), allow_unused=True) for f in (program, compiled))
        assert got[1] is None and want[1] is None
        torch.testing.assert_close(got[0], want[0])
