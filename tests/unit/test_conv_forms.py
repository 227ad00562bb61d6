"""Layouts of convolutions by measurement: the faster form is taken if it pays for its copies; results stay eager's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fuser
from fuser import config
from fuser.contests import race, records
from fuser.contests.deciding import Decisions
from fuser.cpu import convolve
from fuser.frontends.dynamo import fuser_backend, last_compilation
from fuser.passes import conv_forms, providers
from fuser.passes.conv_forms import LAST, LINEAR, PACKED, USUAL

pytestmark = pytest.mark.skipif(providers.linear_op() is None, reason="this torch has no oneDNN")


@pytest.fixture(autouse=True)
def measured(clean):
    with config.override(convolution_layout="measured"):
        yield


def taking(monkeypatch, usual, others, copies=0.0):
    """Times of the usual form, of all others, and of copying a byte, in place of contests. The classes asked for."""
    asked = []

    def seconds(c):
        asked.append(c)
        names = [LAST] + [LINEAR] * c.is_pointwise + [PACKED] * (c.frozen and not c.transposed)
        return {USUAL: usual, **{name: others[name] for name in names}}

    monkeypatch.setattr(conv_forms, "seconds", seconds)
    monkeypatch.setattr(conv_forms, "seconds_a_byte", lambda: copies)
    return asked


FAST_LAST = {LAST: 1.0, LINEAR: 9.0, PACKED: 9.0}


def check(model, x, **options):
    model = model.eval()
    with torch.no_grad():
        compiled = torch.compile(model, backend=fuser_backend, options=options)
        got, want = compiled(x), model(x)
        assert got.shape == want.shape and got.stride() == want.stride() and got.dtype == want.dtype
        tolerance = 3e-2 if got.dtype is torch.bfloat16 else 1e-4
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
        assert compiled(x).equal(got)
    return next(p.changed for p in last_compilation().passes if p.name == "convolutions_channels_last")


MODELS = {
    "single": lambda: nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.Hardswish(), nn.ReLU()),
    "transposed": lambda: nn.Sequential(nn.ConvTranspose2d(16, 32, 3, 2, 1, output_padding=1), nn.ReLU()),
    "depthwise": lambda: nn.Conv2d(16, 16, 3, padding=1, groups=16),
    "grouped, dilated": lambda: nn.Conv2d(16, 32, 3, dilation=2, groups=4),
    "pointwise": lambda: nn.Sequential(nn.Conv2d(16, 256, 1, 2, bias=False), nn.SiLU()),
    "one channel": lambda: nn.Conv2d(16, 1, 3),
    "one channel, pointwise": lambda: nn.Sequential(nn.Conv2d(16, 1, 1), nn.ReLU()),
    "one point": lambda: nn.Conv2d(16, 8, 48),
    "one point, then another": lambda: nn.Sequential(nn.Conv2d(16, 8, 48), nn.ReLU(), nn.Conv2d(8, 4, 1)),
}


@pytest.mark.sampled(20, also=("depthwise-channels last, packed",))
@pytest.mark.parametrize(
    ("name", "form"), [("single", USUAL), *((n, f) for n in MODELS for f in (LAST, PACKED)), ("pointwise", LINEAR)]
)
def test_each_form_gives_eagers_result(monkeypatch, name, form):
    taking(monkeypatch, 0.5 if form == USUAL else 2.0, {LAST: 1.0, LINEAR: 1.0, PACKED: 1.0} | {form: 0.6})
    changed = check(MODELS[name](), torch.randn(2, 16, 48, 48), freeze=form == PACKED)
    assert bool(changed) is (form != USUAL)
    assert ("PACKED_CONVOLUTION" in last_compilation().source) is (form == PACKED and name != "transposed")
    linear = form == LINEAR and name == "pointwise"
    assert ("LINEAR_POINTWISE" in last_compilation().source) is linear


@pytest.mark.parametrize(("copies", "changed"), [(0.0, 1), (1.0, 0)])
def test_copies_have_to_pay(monkeypatch, copies, changed):
    taking(monkeypatch, 2.0, FAST_LAST, copies)
    assert check(MODELS["single"](), torch.randn(2, 16, 24, 24)) == changed


@pytest.mark.parametrize("saved, changed", [(3e-6, 0), (3e-5, 1)])
def test_a_copy_costs_a_call(monkeypatch, saved, changed):
    """Small convolutions: two copies of nearly nothing are two kernels."""
    taking(monkeypatch, 4e-5, {LAST: 4e-5 - saved, LINEAR: 9.0, PACKED: 9.0})
    assert check(nn.Conv2d(3, 4, 3), torch.randn(2, 3, 16, 16)) == changed


def test_a_model_in_channels_last_is_compared_with_itself(monkeypatch):
    """Nothing is gained there: what the program runs now is the channels-last form."""
    taking(monkeypatch, 2.0, FAST_LAST)
    x = torch.randn(2, 16, 24, 24).to(memory_format=torch.channels_last)
    assert check(MODELS["single"]().to(memory_format=torch.channels_last), x) == 0


def test_one_contest_without_a_verdict_leaves_the_others_theirs(monkeypatch):
    """The first convolution goes by the rule; that the second is slower in channels-last still counts."""

    last = {"seconds": 0.0}

    def seconds(c):
        return {} if c.weight[0] == 32 else {USUAL: 1.0, LAST: last["seconds"]}

    monkeypatch.setattr(conv_forms, "seconds", seconds)
    monkeypatch.setattr(conv_forms, "seconds_a_byte", lambda: 0.0)
    model = nn.Sequential(nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Conv2d(32, 16, 3), nn.ReLU())
    for taken, changed in ((2.0, 0), (0.5, 2)):
        last["seconds"] = taken
        torch._dynamo.reset()
        assert check(model, torch.randn(2, 16, 20, 20)) == changed


def test_gradients_count_and_lie_as_eagers(monkeypatch):
    asked = taking(monkeypatch, 2.0, FAST_LAST)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.ConvTranspose2d(8, 4, 2, 2))
    x = torch.randn(2, 3, 20, 20, requires_grad=True)
    found = []
    for f in (torch.compile(model, backend=fuser_backend), model):
        f(x).square().sum().backward()
        found.append([x.grad, *(p.grad for p in model.parameters())])
        x.grad = None
        model.zero_grad(set_to_none=True)
    for got, want in zip(*found, strict=True):
        assert got.stride() == want.stride()
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert {(c.mask is not None, c.transposed) for c in asked} == {(a, b) for a in (True, False) for b in (True, False)}


@pytest.mark.parametrize(("image", "bias", "last"), [(True, True, False), (False, False, True)])
def test_gradients_of_pointwise_convolutions_as_products(monkeypatch, image, bias, last):
    asked = taking(monkeypatch, 2.0, {LAST: 1.0, LINEAR: 0.5, PACKED: 9.0})
    model = nn.Sequential(nn.Conv2d(16, 256, 1, bias=bias), nn.SiLU(), nn.Conv2d(256, 16, 1, 2))
    if last:
        model = model.to(memory_format=torch.channels_last)
    x, found = torch.randn(2, 16, 48, 48, requires_grad=image), []
    for f in (torch.compile(model, backend=fuser_backend), model):
        f(x).square().sum().backward()  # compiles
        x.grad = None
        model.zero_grad(set_to_none=True)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            f(x).square().sum().backward()
        calls = sum(e.count for e in profile.key_averages() if e.key == "aten::convolution_backward")
        found.append((calls, [x.grad] * image + [p.grad for p in model.parameters()]))
        x.grad = None
        model.zero_grad(set_to_none=True)
    (calls, own), (eager_calls, eager) = found
    assert (calls, eager_calls) == (1, 2)  # the one with a stride is left
    assert [c.is_pointwise for c in asked if c.mask is not None] == [False, True]
    for got, want in zip(own, eager, strict=True):
        assert got.stride() == want.stride()
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mask", [(True, True, True), (True, False, False), (False, True, False), (False, False, True)])
def test_the_contest_of_gradients_compares_equal_results(mask):
    c = conv_forms.Convolution(
        x=(2, 64, 32, 32), weight=(128, 64, 1, 1), out=(128, 32, 32), dtype=torch.float32, bias=True, stride=(1, 1),
        padding=(0, 0), dilation=(1, 1), transposed=False, output_padding=(0, 0), groups=1, mask=mask,
    )  # fmt: skip
    forms = [USUAL, LAST, LINEAR]
    contestants = [conv_forms._contestants(c, forms)[form] for form in forms]
    usual, *others = [contestant.run() for contestant in contestants]
    for got in others:
        for mine, theirs, wanted in zip(got, usual, mask, strict=True):
            if wanted:
                torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    first, *others = [contestant.result() for contestant in contestants]
    for got in others:
        torch.testing.assert_close(got, first, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("settings", [{"numerics": "eager"}, {"deterministic": "yes"}, {"convolution_layout": "eager"}])
def test_settings_without_a_contest(monkeypatch, settings):
    monkeypatch.setattr(conv_forms, "seconds", lambda c: pytest.fail("a contest"))
    with config.override(**settings):
        check(MODELS["single"](), torch.randn(2, 16, 24, 24))


def test_contests_are_held_once(monkeypatch, fresh_cache_dir):
    monkeypatch.setattr(records, "_made", {})
    monkeypatch.setattr(race, "_LEAST_SHARE", 0.0)  # tests run where others do
    monkeypatch.setattr(conv_forms, "_convolutions", Decisions("convolution"))
    monkeypatch.setattr(conv_forms, "_copies", Decisions("copy"))
    first, last = nn.Conv2d(16, 64, 3, padding=1), nn.ConvTranspose2d(16, 4, 2)
    model = nn.Sequential(first, nn.SiLU(), nn.Conv2d(64, 16, 1), last)
    check(model, torch.randn(1, 16, 40, 40), freeze=True)
    found = [c for c in fuser.debug.choices() if "convolution" in c.what]
    own = convolve.why_not(torch.float32, 16) is None
    assert [len(c.times) for c in found] == [3 + own, 3 + own, 2], found
    assert not any("left out" in c.reason for c in found), found
    torch._dynamo.reset()
    check(model, torch.randn(1, 16, 40, 40), freeze=True)
    assert [c for c in fuser.debug.choices() if "convolution" in c.what] == found


def test_frozen_weights_of_convolutions_are_packed_again(monkeypatch):
    taking(monkeypatch, 2.0, {LAST: 1.0, LINEAR: 1.0, PACKED: 0.5})
    model, x = nn.Sequential(nn.Conv2d(16, 32, 3), nn.ReLU()).eval(), torch.randn(2, 16, 24, 24)
    compiled = torch.compile(model, backend=fuser_backend, options={"freeze": True})
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
        model[0].weight.mul_(2)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)


def test_bf16(monkeypatch):
    if not providers.takes_dtype(torch.bfloat16):
        pytest.skip("oneDNN has no bfloat16 here")
    taking(monkeypatch, 2.0, FAST_LAST)
    model = nn.Sequential(nn.Conv2d(16, 32, 3), nn.GELU()).bfloat16()
    assert check(model, torch.randn(2, 16, 24, 24, dtype=torch.bfloat16)) == 1


@pytest.mark.parametrize(
    ("channels", "size", "batch", "images"), [(512, 14, 2, 2), (512, 14, 32, 4), (512, 14, 1, 1), (64, 224, 8, 1)]
)
def test_heavy_weights_compete_over_several_images(channels, size, batch, images):
    """oneDNN turns weights once a call: the time of one image times the batch would count that for each image."""
    c = conv_forms.Convolution(
        x=(batch, channels, size, size), weight=(channels, channels, 3, 3), out=(channels, size, size),
        dtype=torch.float32, bias=True, stride=(1, 1), padding=(1, 1), dilation=(1, 1), transposed=False,
        output_padding=(0, 0), groups=1,
    )  # fmt: skip
    assert c._images() == images
