"""Operators that users define, between operators that are fused: forward and backward, sizes, settings, autocast."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fuser.frontends.dynamo import last_compilation
from tests.pairwise import pairwise

pytestmark = pytest.mark.usefixtures("clean")


@torch.library.custom_op("fuser_test_custom::scaled", mutates_args=())
def scaled(x: torch.Tensor, by: float) -> torch.Tensor:
    return x * by


scaled.register_fake(lambda x, by: torch.empty_like(x))
scaled.register_autograd(
    lambda ctx, grad: (scaled(grad, ctx.by), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "by", inputs[1]),
)


@torch.library.custom_op("fuser_test_custom::halves", mutates_args=())
def halves(x: torch.Tensor, at: int) -> tuple[torch.Tensor, torch.Tensor]:
    return x[:, :at].clone(), x[:, at:].clone()


@halves.register_fake
def _(x, at):
    return x.new_empty(x.shape[0], at), x.new_empty(x.shape[0], x.shape[1] - at)


halves.register_autograd(lambda ctx, a, b: (torch.cat([a, b], 1), None))


@torch.library.custom_op("fuser_test_custom::rows", mutates_args=())
def rows(xs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [x.sum(1) for x in xs]


rows.register_fake(lambda xs: [x.new_empty(x.shape[0]) for x in xs])


def setup_rows(ctx, inputs, output):
    ctx.sizes = [x.shape for x in inputs[0]]


rows.register_autograd(
    lambda ctx, grads: [g.unsqueeze(1).expand(s) for g, s in zip(grads, ctx.sizes)], setup_context=setup_rows
)


@torch.library.custom_op("fuser_test_custom::bump", mutates_args=("x",))
def bump(x: torch.Tensor, by: float) -> None:
    x.add_(by)


class Clipped(torch.autograd.Function):
    """A gradient that is not the function's: that of eager's clamp would be 0 outside."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp(-1, 1)

    @staticmethod
    def backward(ctx, grad):
        return grad * torch.where(ctx.saved_tensors[0] > 0, 2.0, 3.0)


def middle(x):
    return scaled(x.sigmoid() + 1, 3.0).tanh() * x


def alone(x):
    return scaled(x, 2.0)


def several(x):
    a, b = halves(x * 2, x.shape[1] // 2)
    return a.sigmoid() * 3, (b + 1).relu().sum(1), a.t()


def lists(x):
    a, b = rows([x.exp(), x.abs() + 1])
    return a * b + a, x.t()


def written(x):
    y = x.sigmoid() * 2
    bump(y, 1.5)
    return y * x


def written_view(x):
    y = x * 2
    bump(y.detach()[1:], 4.0)
    return y.mean(0) * x, y


def function(x):
    return Clipped.apply(x * 2 + 1) * x.sigmoid()


def again(x):
    return checkpoint(lambda x: scaled(x.sigmoid() * 2, 0.5).exp(), x * 2, use_reentrant=False) + x


PROGRAMS = (middle, alone, several, lists, written, written_view, function, again)
SETTINGS = {"none": {}, "bits": {"numerics": "eager"}, "memory": {"memory": 0.5}, "by python": {"sequences": "none"}}


def run(program, shape, gradients):
    leaf = torch.linspace(-2, 2, shape[0] * shape[1]).reshape(shape).requires_grad_(gradients)
    results = program(leaf)
    results = results if isinstance(results, tuple) else (results,)
    found = [r.detach() for r in results]
    if gradients:
        sum((r * r).mean() for r in results if r.requires_grad).backward()
        found.append(leaf.grad)
    return found


@pytest.mark.sampled(21, also=("lists-True-memory",))
@pytest.mark.parametrize(("program", "dynamic", "settings"), pairwise(PROGRAMS, (False, True), SETTINGS))
def test_like_eager(program, dynamic, settings):
    torch._dynamo.reset()
    compiled = torch.compile(program, backend="fuser", dynamic=dynamic, options=SETTINGS[settings])
    for gradients, shape in itertools.product((True, False), ((4, 6), (7, 10), (1500, 400))):
        got, want = run(compiled, shape, gradients), run(program, shape, gradients)
        assert len(got) == len(want)
        for a, b in zip(got, want):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
            assert a.stride() == b.stride()
    assert last_compilation().route != "eager"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("program", (middle, several, function))
def test_under_autocast(program):
    torch._dynamo.reset()
    compiled = torch.compile(program, backend="fuser", dynamic=True)
    with torch.autocast("cpu", torch.bfloat16):
        for a, b in zip(run(compiled, (40, 60), True), run(program, (40, 60), True)):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
