"""`torch.func` and forward-mode AD inside and around compiled functions give eager's results."""

from __future__ import annotations

import os

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from fuser.frontends.dynamo import compilations, fuser_backend
from tests.versions import IS_OLD

pytestmark = pytest.mark.usefixtures("clean")

W = torch.linspace(-1, 1, 16).view(4, 4)
KERNEL = torch.linspace(-1, 1, 54).view(3, 2, 3, 3)
AT = torch.tensor([2, 0, 1, 1])
CAUSAL = torch.ones(3, 3).triu(1).bool()


def written_slices(x):
    y = x.clone()
    y[:, 1] = x[:, 0] * 2
    y[0] += 1
    return y.sin()


# Programs that passes over Dynamo's graph look at or rewrite, operators that are traced in other forms, and others.
PROGRAMS = {
    "attention": (lambda x: F.softmax(x @ x.mT / 2, -1) @ x, (2, 3, 4)),
    "masked attention": (lambda x: F.softmax((x @ x.mT).masked_fill(CAUSAL, -1e9), -1) @ x, (2, 3, 4)),
    "expand and scatter": (lambda x: torch.zeros(3, 4).scatter(1, AT[None].expand(3, 4), x * 2) + x, (3, 4)),
    "expand and write": (lambda x: x.clone().add_(x[:1].expand(3, 4)).mul_(2), (3, 4)),
    "windows": (lambda x: x.unfold(1, 2, 1).sum(-1) * 2, (3, 4)),
    "slices": (written_slices, (3, 4)),
    "one_hot": (lambda x: F.one_hot(AT[:3], 4) * x, (3, 4)),
    "circular": (lambda x: F.pad(x * 2, (1, 1), mode="circular").exp(), (1, 3, 4)),
    "no dropout": (lambda x: F.dropout(x, 0.0) * F.dropout(x, 0.5, False), (3, 4)),
    "resized": (lambda x: F.interpolate(x * 2, scale_factor=2, mode="bilinear").sin(), (1, 2, 3, 3)),
    "convolution": (lambda x: F.gelu(F.conv2d(x, KERNEL, padding=1)), (1, 2, 4, 4)),
    "norm": (lambda x: F.rms_norm(x @ W, (4,)) * x, (3, 4)),
    "indices": (lambda x: (x * 2).index_put((AT[:3],), x.cos(), accumulate=True), (3, 4)),
}
TRANSFORMS = {
    "vmap": lambda f: lambda x, t: vmap(f)(torch.stack([x, t])),
    "grad": lambda f: lambda x, t: grad(lambda x: f(x).sum())(x),
    "vmap of grad": lambda f: lambda x, t: vmap(grad(lambda x: f(x).sum()))(torch.stack([x, t])),
    "vjp": lambda f: lambda x, t: vjp(f, x)[1](f(x).sin()),
    "jvp": lambda f: lambda x, t: jvp(f, (x,), (t,)),
    "jacrev": lambda f: lambda x, t: jacrev(f)(x),
    "jacfwd": lambda f: lambda x, t: jacfwd(f)(x),
    "hessian": lambda f: lambda x, t: hessian(lambda x: f(x).sum())(x),
    "dual": lambda f: lambda x, t: in_duals(f, x, t),
}


def in_duals(f, x, t):
    with forward_ad.dual_level():
        return tuple(forward_ad.unpack_dual(f(forward_ad.make_dual(x, t))))


def compiled(f, **kwargs):
    return torch.compile(f, backend=fuser_backend, **kwargs)


# With torch before 2.12 `aot_eager` is wrong there, too.
WRONG_BEFORE = {("one_hot", "vjp"), ("one_hot", "jacrev")} if IS_OLD else set()
# An eighth of the pairs, in which each program and each transform takes turns with the others; `make sweeps` has all.
TURNS = 1 if os.environ.get("FUSER_TEST_ALL") else 8
# They reach lines that no other pair does.
ALSO = {("masked attention", "vjp"), ("expand and scatter", "vmap of grad"), ("convolution", "vmap of grad")}
PAIRS = [
    (n, t) for i, n in enumerate(PROGRAMS) for k, t in enumerate(TRANSFORMS) if (i + k) % TURNS == 0 or (n, t) in ALSO
]
INSIDE = [pair for pair in PAIRS if pair not in WRONG_BEFORE]
old_levels = pytest.mark.skipif(IS_OLD, reason="torch drops the error, with aot_eager too")


@pytest.mark.sampled(11, also=("convolution-jacfwd",))
@pytest.mark.parametrize("name, transform", INSIDE)
def test_inside(name, transform):
    f, shape = PROGRAMS[name]
    x, t = torch.randn(shape), torch.randn(shape)
    whole = TRANSFORMS[transform](f)
    torch.testing.assert_close(compiled(whole)(x, t), whole(x, t))
    assert all(c.route != "eager" for c in compilations())


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", PROGRAMS)
def test_around(name):
    """Calls with tangents between calls without."""
    f, shape = PROGRAMS[name]
    x, t = torch.randn(shape), torch.randn(shape)
    g = compiled(f)
    for _ in range(2):
        torch.testing.assert_close(g(x), f(x))
        torch.testing.assert_close(in_duals(g, x, t), in_duals(f, x, t))
    torch.testing.assert_close(vmap(g)(torch.stack([x, t])), vmap(f)(torch.stack([x, t])))
    torch.testing.assert_close(jvp(g, (x,), (t,)), jvp(f, (x,), (t,)))
    assert sum(c.route != "eager" for c in compilations()) == 1


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", PROGRAMS)
def test_many_gradients_at_once(name):
    f, shape = PROGRAMS[name]
    x = torch.randn(shape, requires_grad=True)
    found = []
    for g in (compiled(f), f):
        y = g(x)
        many = torch.stack([torch.ones_like(y), y.detach().sin()])
        found.append(torch.autograd.grad(y, x, many, is_grads_batched=True, retain_graph=True))
        found.append(torch.autograd.grad(y, x, many[1]))  # and then one
    torch.testing.assert_close(found[:2], found[2:])


def level():
    """How many transforms are open. Raises where the state that they change is not as it was."""
    assert torch._C._is_fwd_grad_enabled()
    with forward_ad.dual_level(), torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        return torch._C._functorch.get_dynamic_layer_stack_depth()


@pytest.mark.sampled(3)
@old_levels
@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp", "dual"])
def test_levels_are_left_after_an_error(transform):
    whole = TRANSFORMS[transform](lambda x: torch.linalg.cholesky(x * 1) * 2)
    bad = -torch.eye(3)
    with pytest.raises(torch.linalg.LinAlgError):
        compiled(whole)(bad, bad)
    assert level() == 0


@pytest.mark.parametrize("transform", ["vmap", "grad", "dual"])
def test_levels_are_left_where_no_graph_can_be_made(transform, monkeypatch):
    def refuse(*args, **kwargs):
        raise RuntimeError("refused")

    whole = TRANSFORMS[transform](lambda x: F.one_hot(AT[:3], 4) * x)
    monkeypatch.setattr("fuser.passes.dispatched._one_hot", refuse)
    x = torch.randn(3, 4)
    torch.testing.assert_close(compiled(whole)(x, x), whole(x, x))
    assert [c.route for c in compilations()] == ([] if IS_OLD and transform == "grad" else ["eager"])
    assert level() == 0


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, given):
        (x,) = ctx.saved_tensors
        return given * 3 * x**2


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x @ W

    @staticmethod
    def backward(ctx, given):
        return given @ W.T


@pytest.mark.parametrize("f", [lambda x: Cube.apply(x.sin()) * 2, lambda x: Product.apply(x)], ids=["fused", "bare"])
def test_functions_with_their_own_gradients_have_second_ones(f):
    def found(g):
        x = torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_()
        (first,) = torch.autograd.grad(g(x).square().sum(), x, create_graph=True)
        return first, *torch.autograd.grad(first.square().sum(), x)

    for got, want in zip(found(compiled(f)), found(f), strict=True):
        torch.testing.assert_close(got, want)
