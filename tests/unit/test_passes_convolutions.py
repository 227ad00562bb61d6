"""Convolutional nets in channels-last memory: results and their strides as eager's, copies only where they pay."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fuser import config
from fuser.frontends.dynamo import compilations, forget_compilations, fuser_backend, last_compilation


@pytest.fixture(autouse=True)
def clean():
    torch._dynamo.reset()
    torch.manual_seed(0)
    forget_compilations()
    yield
    torch._dynamo.reset()


def same(got, want):
    assert got.shape == want.shape and got.stride() == want.stride()
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def converted():
    return next(p.changed for p in last_compilation().passes if p.name == "convolutions_channels_last")


def check(model, *inputs):
    with torch.no_grad():
        got, want = torch.compile(model, backend=fuser_backend)(*inputs), model(*inputs)
    for g, w in zip(got, want) if isinstance(want, tuple) else [(got, want)]:
        same(g, w)
    return converted()


class Net(nn.Module):
    """A stem, two blocks with a shortcut, and a head that `finish` chooses."""

    def __init__(self, finish, groups=1, bias=False):
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 7, 2, 3, bias=bias)
        self.norm = nn.BatchNorm2d(32)
        self.up = nn.Conv2d(32, 64, 1, bias=bias)
        self.conv = nn.Conv2d(64, 64, 3, padding=1, groups=groups, bias=bias)
        self.short = nn.Conv2d(32, 64, 1, 2, bias=bias)
        self.deep = nn.Conv2d(64, 256, 3, 4, bias=bias)
        self.finish = finish
        for b in (self.norm.running_mean, self.norm.running_var):
            nn.init.uniform_(b, 0.5, 1.5)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm(self.stem(x))), 3, 2, 1)
        y = F.avg_pool2d(self.conv(F.silu(self.up(x))), 2)
        return self.finish(self.deep(y + self.short(x)))


FINISHES = {
    "images": lambda y: y,
    "flat": lambda y: y.flatten(1),
    "view": lambda y: y.view(y.shape[0], -1).sum(1),
    "mean": lambda y: y.mean((2, 3)),
    "views": lambda y: (y.permute(0, 2, 3, 1), y[:, 3], y),
    "tokens": lambda y: y.flatten(2).transpose(1, 2) @ torch.ones(256, 8),
    "channels split": lambda y: y.view(y.shape[0], 16, 16, *y.shape[2:]).amax(2),
    "upsampled": lambda y: F.interpolate(y, scale_factor=2, mode="nearest"),
    "group norm": lambda y: F.group_norm(y, 8),
    "softmax": lambda y: torch.softmax(y, 1).argmax(1),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", FINISHES)
def test_results(name):
    assert check(Net(FINISHES[name]).eval(), torch.randn(2, 3, 96, 80)) == 5


@pytest.mark.parametrize("groups", [1, 64])
def test_bias_groups_and_channels_last_input(groups):
    x = torch.randn(2, 3, 96, 96).to(memory_format=torch.channels_last)
    assert check(Net(FINISHES["images"], groups, bias=True).eval(), x) == 5


def test_one_copy_at_the_entry_and_pointwise_convolutions_are_linears():
    with torch.no_grad():
        f = torch.compile(Net(FINISHES["mean"]).eval(), backend=fuser_backend)
        f(torch.randn(4, 3, 192, 192))
    record = last_compilation()
    assert [op for g in record.groups for op in g.ops].count("aten.clone") <= 2  # the entry, the strided shortcut
    assert sum(u.op == "mkldnn._linear_pointwise" for u in record.unfused) == 2


def test_heavy_weights_keep_the_usual_order():
    model = nn.Sequential(nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(), nn.Conv2d(256, 256, 3, padding=1)).eval()
    with torch.no_grad():
        f = torch.compile(model, backend=fuser_backend)
        x = torch.randn(1, 256, 7, 7)
        same(f(x), model(x))
    assert not any("aten.clone" in g.ops for g in last_compilation().groups)


def test_left_alone():
    a, b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)
    x = torch.randn(2, 3, 32, 32)
    assert check(a.eval(), x) == 0
    assert check(nn.Sequential(a, b).double().eval(), x.double()) == 0
    a.float(), b.float()
    with config.override(numerics="eager"):
        assert check(nn.Sequential(a, nn.ReLU(), b).eval(), x) == 0


def test_copies_that_do_not_pay_are_not_made():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.convs = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in range(3))

        def forward(self, x):
            for conv in self.convs:
                x = conv(x)
                x = x.view(x.shape[0], 4, 4 * 24, 24).softmax(2).view(x.shape)
            return x

    assert check(Mixed().eval(), torch.randn(2, 16, 24, 24)) == 0


def test_sizes_change():
    model = Net(FINISHES["mean"]).eval()
    f = torch.compile(model, backend=fuser_backend)
    with torch.no_grad():
        for n, h in ((2, 96), (5, 64), (1, 64)):
            x = torch.randn(n, 3, h, h)
            same(f(x), model(x))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("changes", ("images", "sides"))
@pytest.mark.parametrize("train", (False, True))
def test_graphs_of_free_sizes_are_converted(changes, train):
    """Their sizes stay free: later calls of other sizes find the same graph."""
    model = Net(FINISHES["mean"]).train(train)
    f, known = torch.compile(model, backend=fuser_backend), []
    with config.override(convolution_layout="channels_last"):
        for n, h in ((8, 64), (6, 64), (7, 64)) if changes == "images" else ((8, 64), (8, 96), (8, 128)):
            x = torch.randn(n, 3, h, h)
            with torch.set_grad_enabled(train):
                got, want = f(x), model(x)
            same(got, want)
            if train:
                of = [torch.autograd.grad(out.square().sum(), list(model.parameters())) for out in (got, want)]
                for g, w in zip(*of, strict=True):
                    assert g.stride() == w.stride()
                    torch.testing.assert_close(g, w, rtol=1e-3, atol=1e-3)
            known.append(len(compilations()))
        passes = [p for r in compilations() for p in r.passes if p.name == "convolutions_channels_last"]
        assert len(passes) == 2 and passes[1].changed
    assert known[0] < known[1] == known[2]


def test_written_weights_are_seen():
    model = Net(FINISHES["mean"]).eval()
    f = torch.compile(model, backend=fuser_backend)
    x = torch.randn(2, 3, 96, 96)
    with torch.no_grad():
        f(x)
        model.up.weight.data.mul_(3)
        model.norm.running_var.fill_(4)
        same(f(x), model(x))


class Trained(nn.Module):
    """Convolutions, plain and pointwise, with batch norms in training mode and a shortcut."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32)
        self.up, self.norm2 = nn.Conv2d(32, 64, 1), nn.BatchNorm2d(64)
        self.conv = nn.Conv2d(64, 64, 3, padding=1, groups=2)
        self.short = nn.Conv2d(32, 64, 1, bias=False)

    def forward(self, x):
        x = F.relu(self.norm(self.stem(x)))
        y = self.conv(F.relu(self.norm2(self.up(x))))
        return (y + self.short(x)).mean((2, 3))


def _step(model, f, x):
    """Output, and everything that a step in training writes."""
    x = x.clone().requires_grad_()
    out = f(x)
    out.square().sum().backward()
    found = [out.detach(), x.grad, *(p.grad for p in model.parameters()), *model.buffers()]
    return [t.clone(memory_format=torch.preserve_format) for t in found]


def test_training_runs_in_channels_last_and_gradients_lie_as_eagers():
    model, x = Trained().train(), torch.randn(4, 3, 96, 96)
    twin = copy.deepcopy(model)
    want = _step(twin, twin, x)
    got = _step(model, torch.compile(model, backend=fuser_backend), x)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-4)
        assert g.stride() == w.stride()
    forward, backward = compilations()
    assert changed_of(forward)["convolutions_channels_last"] == 4
    assert changed_of(forward)["forget_statistics"] == 2
    assert "aten.copy_" not in {u.op for u in forward.unfused}, "running statistics are written by kernels"
    assert sum(u.op == "aten.convolution_backward" for u in backward.unfused) == 4


def changed_of(record):
    return {p.name: p.changed for p in record.passes}


def test_statistics_in_use_are_kept():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3)).eval()
    nn.init.uniform_(model[1].running_var, 0.5, 1.5)
    twin, x = copy.deepcopy(model), torch.randn(2, 3, 16, 16)
    want = _step(twin, twin, x)
    for g, w in zip(_step(model, torch.compile(model, backend=fuser_backend), x), want, strict=True):
        same(g, w)
    assert changed_of(compilations()[0])["forget_statistics"] == 0
