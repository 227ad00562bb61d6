"""Traces for this backend see eager's strides: what eager views, torch.compile views."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from fuser.frontends.dynamo import fuser_backend, last_compilation
from fuser.frontends.fakes import correct
from tests.unit.memory_layouts import LAYOUTS

CHANNELS = {
    "channel_shuffle": lambda x: F.channel_shuffle(x, 2),
    "native_channel_shuffle": lambda x: torch.native_channel_shuffle(x, 2),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x, 2),
    "reflect": lambda x: F.pad(x, (1, 1, 1, 1), "reflect"),
    "replicate": lambda x: F.pad(x, (1, 1, 1, 1), "replicate"),
    "max_unpool2d": lambda x: F.max_unpool2d(x, torch.arange(16).view(4, 4).expand(2, 8, 4, 4), (4, 4), (4, 4)),
}


@pytest.mark.parametrize("backend", [fuser_backend, "fuser"])
def test_views_of_channels_last_results(backend):
    x = torch.randn(2, 8, 4, 4).contiguous(memory_format=torch.channels_last)

    def fn(x):
        return [g(x).permute(0, 2, 3, 1).view(-1) + 1 for g in CHANNELS.values()]

    torch._dynamo.reset()
    compiled = torch.compile(fn, backend=backend, fullgraph=True)
    for got, want in zip(compiled(x), fn(x)):
        assert torch.equal(got, want)


def test_a_shape_function_that_views_what_eager_copies():
    x = torch.randn(2, 4, 4, 8).transpose(1, 3)
    torch._dynamo.reset()
    got = torch.compile(lambda x: torch.native_channel_shuffle(x, 2) + 1, backend=fuser_backend)(x)
    want = torch.native_channel_shuffle(x, 2) + 1
    assert torch.equal(got, want) and got.stride() == want.stride()


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_backward_of_a_loss_of_a_permuted_embedding(dynamic):
    """Eager's `mse_loss_backward` is row-major, torch's shape function keeps the order of its arguments."""

    def fn(w, i, t):
        return F.mse_loss(F.embedding(i, w).view(*i.shape, 2, 4).permute(0, 2, 1, 3), t)

    w, t = torch.randn(10, 8, requires_grad=True), torch.randn(4, 2, 6, 4)
    i = torch.randint(0, 10, (4, 6))
    (want,) = torch.autograd.grad(fn(w, i, t), w)
    torch._dynamo.reset()
    (got,) = torch.autograd.grad(torch.compile(fn, backend=fuser_backend, dynamic=dynamic)(w, i, t), w)
    torch.testing.assert_close(got, want)


VIEWED = {
    "channel_shuffle": lambda x: torch.native_channel_shuffle(x, 2).permute(0, 2, 3, 1).view(-1) + 1,
    "any of no dims": lambda x: (x > 0).any(dim=()).view(-1) * 1,
    "elu_backward": lambda x: torch.ops.aten.elu_backward(torch.ones(2, 8, 4, 4), 1, 1, 1, False, x).view(-1) + 1,
    "hardswish_backward": lambda x: torch.ops.aten.hardswish_backward(torch.ones(2, 8, 4, 4), x).view(-1) + 1,
}


@pytest.mark.parametrize("name", VIEWED)
def test_views_in_graphs_that_dynamo_did_not_capture(name):
    """Without Dynamo AOTAutograd makes the mode of the fake tensors."""
    fn, x = VIEWED[name], torch.randn(2, 8, 4, 4).contiguous(memory_format=torch.channels_last)
    (got,) = fuser_backend(torch.fx.symbolic_trace(lambda x: (fn(x),)), [x])(x)
    torch.testing.assert_close(got, fn(x))
    assert last_compilation().route != "eager"


def _loss_of_an_embedding(w):
    i = torch.arange(24).view(4, 6) % 10
    return (F.mse_loss(F.embedding(i, w).view(4, 6, 2, 4).permute(0, 2, 1, 3), torch.ones(4, 2, 6, 4)),)


GRADIENTS = {
    "embedding": (_loss_of_an_embedding, (10, 8)),
    "unfold": (lambda x: (F.hardswish(x.unfold(0, 3, 1)),), (34, 3)),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_views_of_gradients_in_graphs_that_dynamo_did_not_capture(name):
    """The backward views a gradient that eager's kernel makes row-major."""
    fn, size = GRADIENTS[name]
    x = torch.randn(size, requires_grad=True)
    (want,) = fn(x)
    weights = torch.randn(want.shape)
    (got,) = fuser_backend(torch.fx.symbolic_trace(fn), [x])(x)
    torch.testing.assert_close(torch.autograd.grad(got, x, weights), torch.autograd.grad(want, x, weights))


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", LAYOUTS)
def test_views_have_eagers_strides_in_dims_of_one_element(name):
    """By which a join or a pool tells channels-last memory (seeds 23026904 and 23046056)."""
    mode = torch._subclasses.FakeTensorMode()
    correct(mode)
    for size in itertools.product((1, 2), (1, 3), (1, 2), (1, 3)):
        x = LAYOUTS[name](torch.ones(size))
        if x is None:
            continue
        same, split = lambda x: x.view(x.shape), lambda x: x.unflatten(0, (1, -1))
        for fn in (same, split, lambda x: x.flatten(1, 2), torch.ravel):
            try:
                want = fn(x)
            except RuntimeError:  # of a view that would be a copy
                continue
            with mode:
                assert fn(mode.from_tensor(x)).stride() == want.stride(), (x.shape, x.stride())


def test_a_join_of_a_view_of_one_image():
    x = torch.ones(1, 2, 2, 2).contiguous(memory_format=torch.channels_last)
    fn = lambda x: (torch.cat((x.view_as(x), x), 1),)  # noqa: E731
    (got,) = fuser_backend(torch.fx.symbolic_trace(fn), [x])(x)
    assert got.stride() == fn(x)[0].stride()


def test_other_backends_see_torchs_strides():
    seen = []

    def backend(gm, inputs):
        seen.extend(n.meta["example_value"].stride() for n in gm.graph.nodes if "shuffle" in n.name)
        return gm.forward

    x = torch.randn(2, 8, 4, 4).contiguous(memory_format=torch.channels_last)
    torch._dynamo.reset()
    torch.compile(lambda x: torch.channel_shuffle(x, 2), backend=backend)(x)
    with torch._subclasses.FakeTensorMode() as mode:
        assert seen == [torch.channel_shuffle(mode.from_tensor(x), 2).stride()]


WRITTEN = {
    "cumprod_": lambda x: x.cumprod_(2),
    "cumsum_": lambda x: x.cumsum_(0),
    "masked_fill_": lambda x: x.masked_fill_(x > 0, 2.0),
    "tril_": lambda x: x.tril_(),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_writes_keep_layouts_in_graphs_that_dynamo_did_not_capture(name):
    """Seed 23029368: what is computed from the written tensor lies as it does."""

    def fn(x):
        y = x.contiguous(memory_format=torch.channels_last).clone()
        WRITTEN[name](y)
        return y, F.interpolate(y, scale_factor=2, mode="nearest")

    x = torch.randn(2, 3, 4, 5)
    for got, want in zip(fuser_backend(torch.fx.symbolic_trace(fn), [x])(x), fn(x)):
        assert torch.equal(got, want) and got.stride() == want.stride()


ROWS, NUMBERS = torch.tensor([1, 1]), torch.arange(24.0).view(6, 4).sin()
WRITTEN_WITH_GRADIENTS = {
    "cumprod_": lambda v: v.cumprod_(0),
    "cumsum_": lambda v: v.cumsum_(1),
    "index_add_": lambda v: v.index_add_(0, ROWS, NUMBERS[:2]),
    "index_copy_": lambda v: v.index_copy_(0, ROWS[:1], NUMBERS[:1]),
    "index_put_": lambda v: v.index_put_((ROWS,), NUMBERS[:2], accumulate=True),
    **{
        f"index_reduce_ {how}": lambda v, how=how: v.index_reduce_(0, ROWS, NUMBERS[:2], how)
        for how in ("prod", "mean", "amax", "amin")
    },
    "masked_scatter_": lambda v: v.masked_scatter_(NUMBERS > 0, NUMBERS),
    "put_": lambda v: v.put_(ROWS[:1], NUMBERS[0, :1]),
    "renorm_": lambda v: v.renorm_(2, 0, 0.5),
    "scatter_": lambda v: v.scatter_(0, torch.zeros(2, 4, dtype=torch.int64), NUMBERS[:2]),
    "scatter_add_": lambda v: v.scatter_add_(0, torch.zeros(2, 4, dtype=torch.int64), NUMBERS[:2]),
    **{
        f"scatter_reduce_ {how}": lambda v, how=how: v.scatter_reduce_(
            0, torch.zeros(2, 4, dtype=torch.int64), v.detach()[:2] * 2, how
        )
        for how in ("sum", "prod", "mean", "amax", "amin")
    },
    "addmm_": lambda v: v.addmm_(v.detach() * 2, NUMBERS[:4]),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", WRITTEN_WITH_GRADIENTS)
def test_writes_that_keep_layouts_leave_what_their_gradients_need(name):
    """The functional operator may save its argument, which the copy of its result writes."""

    def fn(x):
        y = x * 1.5
        v = y.t()
        return WRITTEN_WITH_GRADIENTS[name](v) * 1.0, v, y * 2

    x = torch.arange(1.0, 25).view(4, 6).cos().requires_grad_()
    want = fn(x)
    torch._dynamo.reset()
    got = torch.compile(fn, backend=fuser_backend)(x)
    assert last_compilation().route != "eager"
    for g, w in zip(got, want):
        torch.testing.assert_close(g, w)
        assert g.stride() == w.stride()
    torch.testing.assert_close(*(torch.autograd.grad([r.square().sum() for r in rs], x) for rs in (got, want)))


def test_a_cast_weight_of_one_channel_makes_a_convolution_channels_last():
    """Seed 32005375: a kernel's result has eager's strides in dims of one element, by which the library decides."""
    x, weight = torch.randn(2, 1, 5, 5), torch.randn(2, 1, 2, 2).to(memory_format=torch.channels_last)

    def fn(x, weight):
        return F.conv2d(x.relu().to(torch.bfloat16), weight.to(torch.bfloat16))

    torch._dynamo.reset()
    with torch.no_grad():
        assert torch.compile(fn, backend="fuser")(x, weight).stride() == fn(x, weight).stride()


def test_values_of_nodes_are_those_before_later_changes_of_sizes():
    """Random program 70071: `unsqueeze_` changes the tensor that an earlier node gave."""

    def fn(x):
        z = x.neg_()
        y = torch.amax(x, (0, 1), keepdim=True)
        w = z.cumsum_(-1)
        y.unsqueeze_(0)
        return (torch.fmin(y, w),)

    x = torch.arange(12).view(3, 4)
    (got,) = fuser_backend(torch.fx.symbolic_trace(fn), [x.clone()])(x.clone())
    assert torch.equal(got, fn(x.clone())[0]) and last_compilation().route != "eager"


@pytest.mark.parametrize("gradients", [True, False])
def test_what_reads_a_drawn_slope_row_by_row_is_no_error(gradients):
    """Eager's `rrelu` gives a row-major result for each argument, its functional form one like the argument."""

    def f(x):
        return F.rrelu(x * 1.0, 0.3, 0.3, training=True).flatten(1) * 2

    x = torch.randn(2, 8, 4, 4).contiguous(memory_format=torch.channels_last).requires_grad_(gradients)
    want, got = f(x), torch.compile(f, backend="fuser")(x)
    torch.testing.assert_close(got, want)
    assert got.stride() == want.stride()
    if gradients:
        assert all(map(torch.equal, *(torch.autograd.grad(y.sum(), x) for y in (want, got))))


def test_slices_of_fixed_sizes_have_symbols_for_strides():
    """Their sizes are no symbols."""

    def fn(x):
        y = x * 2
        return torch.kron(y, y[:2, :2]), y[:1, :2].reshape(2, 1) + y[:2, :1]

    x = torch.randn(4, 6)
    torch._dynamo.reset()
    for got, want in zip(torch.compile(fn, backend=fuser_backend, dynamic=True)(x), fn(x)):
        assert torch.equal(got, want) and got.stride() == want.stride()
