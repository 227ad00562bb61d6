"""Batch norms folded into convolutions: where nothing else would take them, never in training, from live parameters."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fuser import config
from fuser.frontends.dynamo import compilations, forget_compilations, fuser_backend, last_compilation

pytestmark = pytest.mark.usefixtures("clean")


def settled(norm):
    nn.init.normal_(norm.running_mean, std=0.3)
    nn.init.uniform_(norm.running_var, 0.5, 2)
    if norm.affine:
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    return norm


class Net(nn.Module):
    """Convolution, batch norm, and what `after` does to it."""

    def __init__(self, after, bias=False, affine=True, groups=1):
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, groups=groups, bias=bias)
        self.norm = settled(nn.BatchNorm2d(8, affine=affine))
        self.next = nn.Conv2d(8, 4, 1)
        self.after = after

    def forward(self, x):
        return self.after(self, self.norm(self.conv(x)))


X = torch.linspace(-1, 1, 2 * 4 * 12 * 12).view(2, 4, 12, 12).sin()


def folded():
    return next(p.changed for c in compilations() for p in c.passes if p.name == "fold_batch_norms")


def check(model, x=X):
    got, want = torch.compile(model, backend=fuser_backend)(x), model(x)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert got.stride() == want.stride()
    return folded()


FIRES = {
    "before a convolution": Net(lambda m, y: m.next(y)),
    "at the end": Net(lambda m, y: y),
    "with a bias": Net(lambda m, y: m.next(y), bias=True),
    "without factors": Net(lambda m, y: m.next(y), affine=False),
    "in groups": Net(lambda m, y: m.next(y), groups=4),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FIRES)
def test_folded(name):
    with torch.no_grad():
        assert check(FIRES[name].eval()) == 1


def used_twice(m, y):
    return m.next(y) + m.conv(X).sum()


def without_statistics(m, y):
    return F.conv2d(F.batch_norm(y, None, None, training=True), m.next.weight)


STAYS = {
    "a kernel takes it": lambda: Net(lambda m, y: F.relu(y)).eval(),
    "a shortcut is added": lambda: Net(lambda m, y: y + 1).eval(),
    "training": lambda: Net(lambda m, y: m.next(y)).train(),
    "no statistics": lambda: Net(without_statistics).train(),
    "heavy weights": lambda: nn.Sequential(nn.Conv2d(4, 64, 12), settled(nn.BatchNorm2d(64))).eval(),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", STAYS)
def test_left_alone(name):
    with torch.no_grad():
        model = STAYS[name]()
        got, want = torch.compile(copy.deepcopy(model), backend=fuser_backend)(X), model(X)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert folded() == 0


def test_left_alone_by_setting_and_autocast():
    model = FIRES["at the end"].eval()
    with torch.no_grad(), config.override(numerics="eager"):
        check(model)
    assert folded() == 0
    torch._dynamo.reset()
    forget_compilations()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        torch.compile(model, backend=fuser_backend)(X)
    assert folded() == 0


def test_convolution_that_is_read_twice_stays():
    class Twice(Net):
        def forward(self, x):
            y = self.conv(x)
            return self.norm(y), y.amax()

    model = Twice(None).eval()
    with torch.no_grad():
        got, want = torch.compile(model, backend=fuser_backend)(X), model(X)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert folded() == 0


def test_an_image_written_in_between_stays():
    class Writes(Net):
        def forward(self, x):
            x = x.clone()
            y = self.conv(x)
            x.zero_()
            return self.norm(y), x

    model = Writes(None).eval()
    with torch.no_grad():
        got, want = torch.compile(model, backend=fuser_backend)(X), model(X)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert folded() == 0


def test_later_updates_of_parameters_and_statistics_are_seen():
    model = Net(lambda m, y: m.next(y)).eval()
    f = torch.compile(model, backend=fuser_backend)
    with torch.no_grad():
        f(X)
        for t in (model.conv.weight, model.norm.weight, model.norm.running_var):
            t.data.mul_(1.5)
        torch.testing.assert_close(f(X), model(X), rtol=1e-4, atol=1e-5)
    assert len(compilations()) == 1 and folded() == 1


def test_gradients_in_eval_mode():
    model = Net(lambda m, y: m.next(y), bias=True).eval()
    twin = copy.deepcopy(model)
    torch.compile(model, backend=fuser_backend)(X).square().sum().backward()
    twin(X).square().sum().backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-4)
    assert folded() == 1


def identities():
    return next(p.changed for p in last_compilation().passes if p.name == "drop_identities")


@pytest.mark.parametrize(
    ("f", "count"),
    [
        (lambda x: F.dropout(x, 0.5, training=False) * 2, 1),
        (lambda x: F.dropout(x, 0.0) * 2, 1),
        (lambda x: x.contiguous().float() * 2, 2),
        (lambda x: x.transpose(0, 1).contiguous() * 2, 0),
        (lambda x: x.double() * 2, 0),
        (lambda x: x.float(), 0),
    ],
)
def test_calls_that_give_back_their_argument(f, count):
    torch.testing.assert_close(torch.compile(f, backend=fuser_backend)(X), f(X))
    assert identities() == count


def test_writing_through_an_identity_writes_the_argument():
    def f(x):
        F.dropout(x, 0.3, training=False).mul_(2)
        return x + 1

    a, b = X.clone(), X.clone()
    torch.testing.assert_close(torch.compile(f, backend=fuser_backend)(a), f(b))
    torch.testing.assert_close(a, b)
    assert identities() == 1
