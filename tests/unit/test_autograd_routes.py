"""Gradients asked for in unusual ways: inside a compiled function, twice, by `torch.func`, by compiled autograd."""

from __future__ import annotations

import pathlib
import warnings

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch._dynamo.utils import clear_compilation_metrics, get_compilation_metrics
from torch.func import functional_call, grad, hessian, jvp, vmap
from torch.utils._pytree import tree_leaves

import fuser
from fuser.frontends.dynamo import compilations, fuser_backend
from tests.versions import IS_OLD

pytestmark = pytest.mark.usefixtures("clean")


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 2))


def x():
    torch.manual_seed(1)
    return torch.randn(5, 4)


def gradients(m):
    return [p.grad for p in m.parameters()]


def backward_inside(compiled):
    m = model()

    def step(a):
        loss = (m(a) * 2).sigmoid().sum()
        loss.backward()
        return loss.detach()

    f = compiled(step)
    return f(x()), f(x()), gradients(m)


def whole_step(compiled):
    m = model()
    optimiser = torch.optim.SGD(m.parameters(), lr=0.1)

    def step(a):
        optimiser.zero_grad()
        loss = F.gelu(m(a)).pow(2).mean()
        loss.backward()
        optimiser.step()
        return loss.detach()

    f = compiled(step)
    return f(x()), f(x()), [p.detach() for p in m.parameters()]


def gradient_penalty(compiled):
    m = model()

    def step(a):
        (found,) = torch.autograd.grad(m(a).sum(), a, create_graph=True)
        loss = (found.norm(dim=1) - 1).pow(2).mean()
        loss.backward()
        return loss.detach()

    return compiled(step)(x().requires_grad_()), gradients(m)


def kept_graph(compiled):
    a = x().requires_grad_()
    y = compiled(lambda a: (a.sin() * a).sum())(a)
    y.backward(retain_graph=True)
    y.backward()
    return a.grad


def nested(compiled):
    inner = compiled(lambda a: a.sin() * 2)
    return compiled(lambda a: inner(a).cos() + 1)(x())


def functional(compiled):
    m = model()
    parameters = {k: v.detach() for k, v in m.named_parameters()}

    def loss(parameters, row):
        return functional_call(m, parameters, (row[None],)).pow(2).sum()

    def each(parameters, a):
        twice = grad(grad(lambda t: t.sin() * t))(a[0, 0])
        forward = jvp(lambda z: z.tanh() * z, (a,), (a * 2,))
        second = hessian(lambda z: z.tanh().sum())(a[0])
        return vmap(grad(loss), in_dims=(None, 0))(parameters, a), twice, forward, second

    return compiled(each)(parameters, x())


def transformed_outside(compiled):
    f = compiled(lambda a: (a.sin() * a).sum())
    return grad(f)(x()), vmap(f)(x())


def compiled_autograd(compiled):
    m = model()
    f = compiled(m)
    losses = []
    with torch._dynamo.compiled_autograd._enable(compiled):
        for _ in range(2):  # gradients are made, then added to
            losses.append(f(x()).sigmoid().sum())
            losses[-1].backward()
    return losses, gradients(m)


def test_graphs_of_compiled_autograd_are_fused():
    m = model()
    loss = m(x()).sigmoid().sum()  # not compiled: its whole backward is the graph that has a list of inputs
    with torch._dynamo.compiled_autograd._enable(lambda f: torch.compile(f, backend=fuser_backend)):
        loss.backward()
    want = torch.autograd.grad(m(x()).sigmoid().sum(), list(m.parameters()))
    torch.testing.assert_close(gradients(m), list(want))
    (graph,) = compilations()
    assert graph.route != "eager" and graph.groups


ROUTES = [
    backward_inside, whole_step, gradient_penalty, kept_graph, nested, functional, transformed_outside,
    compiled_autograd,
]  # fmt: skip
_FRAMES = {whole_step: 13, gradient_penalty: 4}  # others take at most three: the function, and around a graph break


@pytest.mark.sampled(6)
@pytest.mark.parametrize("route", ROUTES, ids=lambda f: f.__name__)
def test_route(route):
    want = route(lambda f: f if route is not compiled_autograd else torch.compile(f, backend="eager"))
    torch._dynamo.reset()
    clear_compilation_metrics()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        got = route(lambda f: torch.compile(f, backend=fuser_backend))
    torch.testing.assert_close(tree_leaves(got), tree_leaves(want))
    assert not [w for w in said if "does not know how to trace" in str(w.message)]
    files = [pathlib.Path(m.co_filename) for m in get_compilation_metrics() if m.co_filename]
    assert not [f for f in files if pathlib.Path(fuser.__file__).parent in f.parents]
    # Frames of `typing` are not counted: their number depends on what Python's caches still hold.
    files = [f for f in files if f.name not in ("typing.py", "typing_extensions.py")]
    assert len(files) <= _FRAMES.get(route, 3) + 2 * IS_OLD


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_weighted_loss_keeps_its_weights(dynamic):
    """Of torch's functions, `l1_loss` does not hand its weights to the function mode under which AOTAutograd traces."""
    a, y, weight = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4), torch.rand(3, 4)

    def fn(x, y, weight):
        each = F.l1_loss(x * 2, y, None, None, "none", weight)
        return F.l1_loss(x * 2, y, weight=weight) + each.sum()

    got, want = torch.compile(fn, backend=fuser_backend, dynamic=dynamic)(a, y, weight), fn(a, y, weight)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got, a), torch.autograd.grad(want, a))


def _without_grad(x, state):
    with torch.no_grad():
        told = state.sin() * 2
    return torch.tanh(x + told)


def _halved(x, state):
    with torch.no_grad():
        state.mul_(0.5)
    return torch.tanh(x) + state.detach().exp()


STATES = {
    "detached": lambda x, state: torch.tanh(x + state.detach() * 2),
    "read without grad": _without_grad,
    "compared": lambda x, state: torch.tanh(x) + (state > 0),
    "sizes alone": lambda x, state: torch.tanh(x) * state.shape[0] + torch.zeros_like(state),
    "written": _halved,
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("starts_as_leaf", [False, True])
@pytest.mark.parametrize("name", [*STATES, "detached, symbolic sizes"])
def test_a_state_without_a_gradient_ends_the_graph(name, starts_as_leaf):
    """Each step's backward runs its own nodes alone, and no step keeps the nodes of earlier ones."""
    found = []
    fn = STATES[name.split(",")[0]]
    for f in (torch.compile(fn, backend=fuser_backend, dynamic="symbolic" in name), fn):
        torch.manual_seed(0)
        state, sums = torch.zeros(3, requires_grad=starts_as_leaf and name != "written"), []
        for _ in range(4):
            x = torch.randn(3, requires_grad=True)
            state = f(x, state)
            state.sum().backward()
            sums.append(x.grad)
        found.append((state.detach(), sums))
        left, seen = [state.grad_fn], set()
        while left:
            node = left.pop()
            left += [n for n, _ in node.next_functions if n is not None and n not in seen]
            seen.add(node)
        assert len(seen) < 6
    torch.testing.assert_close(*found)
