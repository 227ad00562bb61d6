"""Training through `torch.compile(backend="fuser")`: gradients, losses and state against eager's."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.models import ResNet
from examples.gpt2 import GPT2Config
from examples.gpt2 import build as build_gpt2
from fuser import interface
from fuser.frontends.dynamo import compilations, fuser_backend


def compiled(f, **kwargs):
    return torch.compile(f, backend=fuser_backend, **kwargs)


class MLP(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(48, 16)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


def language_loss(model, ids):
    logits = model(ids)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def mlp():
    model = MLP()
    return model, lambda m, x: (m(x) ** 2).mean(), torch.randn(8, 16)


def gpt2():
    model, ids = build_gpt2(GPT2Config(2, 64, 4, 500, 64), tokens=32)
    return model.train(), language_loss, ids


def resnet():
    model = ResNet((1, 1), 8, 10).train()
    target = torch.tensor([3, 5, 1, 9])
    return model, lambda m, x: F.cross_entropy(m(x), target), torch.randn(4, 3, 32, 32)


STEPS = 10
MODELS = {"mlp": mlp, "gpt2": gpt2, "resnet": resnet}


def no_worse_than_eager(got, eager, exact, scale=4.0):
    """Within the distance that eager itself has from float64, times `scale`, or within float32's own rounding."""
    for g, e, x in zip(got, eager, exact, strict=True):
        assert g.dtype == e.dtype and g.shape == e.shape
        size = x.abs().max().item() + 1e-30
        allowed = scale * (e.double() - x).abs().max().item() + 1e-6 * size
        assert (g.double() - x).abs().max().item() <= allowed


def no_fallbacks():
    """Each group of the graphs compiled so far has run, and by kernels alone."""
    stores = [interface.kernel_spec(k).store for c in compilations() for k in c.keys]
    assert stores and all(s.kernels for s in stores)
    assert not [dict(s.fallbacks) for s in stores if s.fallbacks]


def state_after(model, loss, x, f=None):
    """Loss, gradients and buffers after one forward and backward of a copy."""
    model = copy.deepcopy(model)
    value = (f or loss)(model, x)
    value.backward()
    buffers = [b for b in model.buffers() if b.is_floating_point()]
    return [value.detach(), *(p.grad for p in model.parameters()), *buffers]


def train(model, loss, x, steps, f=None, lr=1e-2):
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses = []
    for i in range(steps):
        value = (f or loss)(model, x.roll(i, 0))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return torch.tensor(losses)


@pytest.mark.parametrize(("name", "lr"), [("mlp", 1e-2), ("gpt2", 1e-3), ("resnet", 1e-3)])
def test_states_and_losses(name, lr):
    """Gradients and buffers of a step, and the losses of several; the same two graphs serve both."""
    model, loss, x = MODELS[name]()
    eager, follows = state_after(model, loss, x), train(model, loss, x, STEPS, lr=lr)
    f = compiled(loss)
    got, losses = state_after(model, loss, x, f), train(model, loss, x, STEPS, f, lr=lr)
    exact = state_after(model.double(), loss, x.double() if x.is_floating_point() else x)
    no_worse_than_eager(got, eager, exact)
    assert follows[-1] < follows[0]
    torch.testing.assert_close(losses, follows, rtol=2e-3, atol=2e-3)
    assert [c.stage for c in compilations()] == ["forward", "backward"], "one of each serves every step"
    assert all(c.route == "wrapped" for c in compilations())
    no_fallbacks()


@pytest.mark.parametrize("dynamic", [False, True])
def test_gradients_for_several_sizes(dynamic):
    model, loss, _ = mlp()
    f = compiled(loss, dynamic=dynamic)
    for n in (8, 3, 1):
        x = torch.randn(n, 16)
        torch.testing.assert_close(state_after(model, loss, x, f), state_after(model, loss, x))


def grads(model):
    return [p.grad.clone() for p in model.parameters()]


def test_gradients_accumulate():
    model, loss, x = mlp()
    f = compiled(loss)
    for _ in range(3):
        f(model, x).backward()
    got = grads(model)
    model.zero_grad()
    for _ in range(3):
        loss(model, x).backward()
    torch.testing.assert_close(got, grads(model))


@pytest.mark.parametrize("used_before", [False, True])
def test_retained_graph_runs_backward_twice(used_before):
    model, loss, x = mlp()
    f = compiled(loss)
    if used_before:
        f(model, x).backward()
        model.zero_grad()
    value = f(model, x)
    value.backward(retain_graph=True)
    once = grads(model)
    value.backward()
    torch.testing.assert_close(grads(model), [2 * g for g in once])
    with pytest.raises(RuntimeError, match="second time"):
        value.backward()


def test_two_forwards_before_their_backwards():
    model, loss, x = mlp()
    y = torch.randn(8, 16)
    f = compiled(loss)
    a, b = f(model, x), f(model, y)
    (a * 2 + b).backward()
    got = grads(model)
    model.zero_grad()
    (loss(model, x) * 2 + loss(model, y)).backward()
    torch.testing.assert_close(got, grads(model))


def test_one_module_used_twice():
    model, _, x = mlp()

    def loss(m, x):
        return m(m(x)).sum()

    torch.testing.assert_close(state_after(model, loss, x, compiled(loss)), state_after(model, loss, x))


def test_some_outputs_get_no_gradient():
    def f(x, y):
        return x * y, torch.sin(x) + y, x.detach() + 1

    x, y = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
    _, second, third = compiled(f)(x, y)
    assert not third.requires_grad
    second.sum().backward()
    torch.testing.assert_close((x.grad, y.grad), (torch.cos(x.detach()), torch.ones(4)))


def test_modes_are_switched():
    model, loss, x = mlp()
    f = compiled(loss)
    with torch.no_grad():
        assert not f(model, x).requires_grad
    f(model, x).backward()
    want = grads(model)
    with torch.inference_mode():
        assert f(model, x).is_inference()
    model.zero_grad()
    f(model, x).backward()
    torch.testing.assert_close(grads(model), want)
    assert {c.stage for c in compilations()} == {"inference", "forward", "backward"}


def test_frozen_parameters_get_no_gradient():
    model, loss, x = mlp()
    model.up.requires_grad_(False)
    compiled(loss)(model, x).backward()
    assert model.up.weight.grad is None and model.down.weight.grad is not None


def test_hooks_fire():
    model, loss, x = mlp()
    seen = []
    model.up.weight.register_hook(lambda g: seen.append(g.shape))
    x = x.requires_grad_()
    x.register_hook(lambda g: g * 0)
    compiled(loss)(model, x).backward()
    assert seen == [(48, 16)] and not x.grad.any()


def test_saved_tensor_changed_in_place_is_an_error_as_in_eager():
    x, w = torch.randn(4, requires_grad=True), torch.randn(4)
    y = compiled(lambda x, w: (x * w).sum())(x, w)
    w.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_an_input_is_written_under_gradients():
    def f(x, buffer):
        buffer.mul_(0.5)
        return (x * buffer).sum()

    x, buffer = torch.randn(4, requires_grad=True), torch.randn(4)
    other = buffer.clone()
    compiled(f)(x, buffer).backward()
    torch.testing.assert_close(buffer, other * 0.5)
    torch.testing.assert_close(x.grad, other * 0.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    model, loss, x = mlp()

    def step(m, x):
        with torch.autocast("cpu", dtype=dtype):
            return loss(m, x)

    eager, got = state_after(model, step, x), state_after(model, step, x, compiled(step))
    exact = state_after(model.double(), loss, x.double())
    no_worse_than_eager(got, eager, exact)
    no_fallbacks()


def test_checkpointed_region_is_computed_again():
    model, _, x = mlp()

    def loss(m, x):
        first, second = (checkpoint(m, y, use_reentrant=False) for y in (x, x * 2))
        return first.square().sum() + second.mean()

    torch.testing.assert_close(state_after(model, loss, x, compiled(loss)), state_after(model, loss, x))
    forward, backward = compilations()
    matmuls = [sum(u.op in ("aten.mm", "aten.addmm") for u in c.unfused) for c in (forward, backward)]
    assert matmuls[0] == 4 and matmuls[1] > 6, "the regions' own products run again in the backward"


def test_checkpoint_around_a_compiled_module():
    model, _, x = mlp()
    inner = compiled(model)
    x.requires_grad_()
    checkpoint(inner, x, use_reentrant=False).sum().backward()
    got = [x.grad.clone(), *grads(model)]
    model.zero_grad()
    x.grad = None
    model(x).sum().backward()
    torch.testing.assert_close(got, [x.grad, *grads(model)])


def test_dropout_mask_is_the_same_in_backward():
    x = torch.randn(64, 64, requires_grad=True)
    y = compiled(lambda x: F.dropout(x, 0.5) * 3)(x)
    y.sum().backward()
    kept = y.detach() != 0
    assert 0.4 < kept.float().mean() < 0.6
    torch.testing.assert_close(x.grad, kept * 6.0)


def test_graph_break_inside_a_training_step():
    model, _, x = mlp()

    def loss(m, x):
        h = m(x)
        torch._dynamo.graph_break()
        return m(h).sum()

    torch.testing.assert_close(state_after(model, loss, x, compiled(loss)), state_after(model, loss, x))


def test_options_hold_in_the_backward():
    model, loss, x = mlp()
    value = compiled(loss, options={"numerics": "eager"})(model, x)
    value.backward()
    assert all(c.options == {"numerics": "eager"} for c in compilations())
