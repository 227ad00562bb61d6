"""Norms in training: their results are computed again from what they read, with the bits that the forward saw."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from fuser import config
from fuser.frontends.dynamo import compilations, fuser_backend
from tests.unit.test_training_memory import saved_elements

pytestmark = pytest.mark.usefixtures("clean")
SIZE, STATISTICS = 64 * 128, 64 * 16  # of what a product gives, and of the largest mean here


def parameters(*size):
    torch.manual_seed(1)
    return [torch.randn(size).add(0.5).requires_grad_(), torch.randn(size).requires_grad_()]


LAST, EIGHT, WIDE = parameters(128), parameters(8), parameters(128)
NORMS = {
    "layer": (lambda x: F.layer_norm(x, (128,), *LAST), LAST),
    "layer without weights": (lambda x: F.layer_norm(x, (128,)), []),
    "layer of two dims": (
        lambda x: F.layer_norm(x.view(64, 2, 64), (2, 64), LAST[0].view(2, 64)).view(64, 128), LAST[:1],
    ),
    "layer of columns": (lambda x: F.layer_norm(x.view(64, 16, 8).transpose(1, 2), (16,)).reshape(64, 128), []),
    "group": (lambda x: F.group_norm(x.view(64, 8, 4, 4), 4, *EIGHT).view(64, 128), EIGHT),
    "group of channels": (lambda x: F.group_norm(x.view(64, 128), 16, *WIDE), WIDE),
    "group, channels last": (
        lambda x: F.group_norm(x.view(64, 4, 4, 8).permute(0, 3, 1, 2), 4, *EIGHT).permute(0, 2, 3, 1).reshape(64, 128),
        EIGHT,
    ),
    "instance": (lambda x: F.instance_norm(x.view(64, 8, 16)).view(64, 128), []),
    "batch": (lambda x: F.batch_norm(x, None, None, *WIDE, training=True), WIDE),
    "batch of images": (lambda x: F.batch_norm(x.view(64, 8, 4, 4), None, None, *EIGHT, True).view(64, 128), EIGHT),
}  # fmt: skip


def changed(name="decompose_norms"):
    return sum(p.changed for c in compilations() for p in c.passes if p.name == name)


def gradients(f, own):
    value = f()
    return [value, *torch.autograd.grad(value.square().sum(), own)]


@pytest.mark.sampled(11, also=("layer of columns-True",))
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", NORMS)
def test_behind_a_product_a_norm_and_what_follows_are_computed_again(name, dynamic):
    norm, own = NORMS[name]
    x, w, v = torch.randn(64, 32), torch.randn(128, 32, requires_grad=True), torch.randn(64, 128)

    def f():
        return (F.hardswish(norm(F.linear(x, w)) * v) * v).sum()

    want = gradients(f, [w, *own])
    loss = torch.compile(f, backend=fuser_backend, dynamic=dynamic)
    torch.testing.assert_close(gradients(loss, [w, *own]), want, rtol=1e-3, atol=1e-3)
    assert saved_elements(loss, [x, w, v, *own]) <= SIZE + 2 * STATISTICS < saved_elements(f, [x, w, v, *own])


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", NORMS)
def test_the_backward_sees_the_bits_of_the_forward(name):
    """The gradient of an extreme goes to the elements that equal it: where none does, it is lost."""
    norm, own = NORMS[name]
    x, w = torch.randn(64, 32), torch.randn(128, 32, requires_grad=True)

    def f():
        y = norm(F.linear(x, w))
        return y / y.abs().amax(1, keepdim=True)

    want = gradients(f, [w, *own])
    loss = torch.compile(f, backend=fuser_backend)
    torch.testing.assert_close(gradients(loss, [w, *own]), want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_group_norms_in_16_bits_are_computed_from_statistics_in_float32(layout):
    """ATen rounds their statistics to 16 bits. The backward sees the bits of the forward: x / max has its gradient."""
    image = torch.randn(2, 8, 16, 16).to(torch.bfloat16).contiguous(memory_format=layout)
    w = torch.randn(32, 8, 3, 3, dtype=torch.bfloat16, requires_grad=True)
    own = [torch.rand(32, dtype=torch.bfloat16).requires_grad_() for _ in range(2)]

    def f():
        y = F.group_norm(F.conv2d(image, w, padding=1), 4, *own)
        return (F.silu(y) + y / y.abs().amax(1, keepdim=True)).float().square().sum()

    def exact():
        wide = [t.detach().double().requires_grad_() for t in (w, *own)]
        y = F.group_norm(F.conv2d(image.double(), wide[0], padding=1), 4, *wide[1:])
        return torch.autograd.grad((F.silu(y) + y / y.abs().amax(1, keepdim=True)).square().sum(), wide)

    loss = torch.compile(f, backend=fuser_backend)
    got, eager = (torch.autograd.grad(g(), [w, *own]) for g in (loss, f))
    for found, theirs, right in zip(got, eager, exact(), strict=True):
        assert (found - right).norm() <= 2 * (theirs - right).norm() + 1e-9
    assert changed() == 1 and saved_elements(loss, [image, w, *own]) < 2 * 2 * 32 * 256


def test_a_result_stays():
    norm, own = NORMS["layer"]
    x, w = torch.randn(64, 32), torch.randn(128, 32, requires_grad=True)

    def f():
        y = norm(F.linear(x, w))
        return y, F.silu(y).sum()

    y, total = torch.compile(f, backend=fuser_backend)()
    want, sum_ = f()
    torch.testing.assert_close((y, total), (want, sum_), rtol=1e-4, atol=1e-4)
    grads = [torch.autograd.grad(a.square().sum() + b, [w, *own]) for a, b in ((y, total), (want, sum_))]
    torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-3)


def test_what_a_product_of_the_backward_reads_is_saved():
    norm, own = NORMS["layer"]
    x, w, v = torch.randn(64, 32), torch.randn(128, 32, requires_grad=True), torch.randn(16, 128, requires_grad=True)

    def f():
        return F.linear(norm(F.linear(x, w)), v).sum()

    loss = torch.compile(f, backend=fuser_backend)
    torch.testing.assert_close(gradients(loss, [w, v, *own]), gradients(f, [w, v, *own]), rtol=1e-3, atol=1e-3)
    assert changed() == 1 and 2 * SIZE <= saved_elements(loss, [x, w, v, *own])


def test_the_users_checkpoints_stay():
    norm, own = NORMS["layer"]
    x, w, v = torch.randn(64, 32), torch.randn(128, 32, requires_grad=True), torch.randn(16, 128, requires_grad=True)

    def f():
        return checkpoint(lambda: F.linear(norm(F.linear(x, w)), v), use_reentrant=False).sum()

    loss = torch.compile(f, backend=fuser_backend)
    torch.testing.assert_close(gradients(loss, [w, v, *own]), gradients(f, [w, v, *own]), rtol=1e-3, atol=1e-3)
    assert saved_elements(loss, [x, w, v, *own]) < SIZE


def test_not_where_every_rounding_is_eagers():
    norm, own = NORMS["layer"]
    x, w = torch.randn(64, 32), torch.randn(128, 32, requires_grad=True)
    with config.override(numerics="eager"):
        gradients(torch.compile(lambda: F.silu(norm(F.linear(x, w))), backend=fuser_backend), [w, *own])
    assert changed() == 0


def test_an_operator_that_uses_given_statistics_stays():
    """ATen's own, called by hand: it has no statistics of its own, so there is nothing to compute the result from."""
    weight, bias, mean, var = torch.rand(4, 8)

    def program(x):
        found = torch.ops.aten._native_batch_norm_legit.default(x * 2, weight, bias, mean, var, False, 0.1, 1e-5)
        return found[0].sigmoid() * x

    x = torch.randn(6, 8, 5, requires_grad=True)
    torch._dynamo.reset()
    compiled = torch.compile(program, backend=fuser_backend)
    torch.testing.assert_close(gradients(lambda: compiled(x), [x]), gradients(lambda: program(x), [x]))
