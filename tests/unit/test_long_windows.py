"""Convolutions of rows by long windows: the products give ATen's results, and the pass takes no others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fuser.passes import long_windows
from fuser.passes.long_windows import grouped_by_windows, long_windows_to_products, runs_of

aten = torch.ops.aten


@pytest.mark.parametrize("groups, length, padding, bias", [(2, 16, 8, True), (4, 17, 8, False), (2, 16, 0, True)])
def test_products_give_atens_results(monkeypatch, groups: int, length: int, padding: int, bias: bool) -> None:
    x, w = torch.randn(5, 16, 30, dtype=torch.float64), torch.randn(8, 16 // groups, length, dtype=torch.float64)
    b = torch.randn(8, dtype=torch.float64) if bias else None
    want = aten.convolution.default(x, w, b, [1], [padding], [1], False, [0], groups)
    for part in (1, 1 << 17, 1 << 30):  # one row of the batch, two or three, all
        monkeypatch.setattr(long_windows, "PART_BYTES", part)
        got = grouped_by_windows(x, w, b, padding, groups)
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
        assert got.stride() == want.stride()
        turned = x.transpose(1, 2).contiguous().transpose(1, 2)
        filters = w.permute(2, 1, 0).contiguous().permute(2, 1, 0)
        found = grouped_by_windows(turned, filters, b, padding, groups)
        torch.testing.assert_close(found, want, rtol=1e-10, atol=1e-10)


def conv(x, w, b=None, groups=2, stride=1, padding=8, dilation=1):
    return aten.convolution.default(x, w, b, [stride], [padding], [dilation], False, [0], groups)


def traced(f, *shapes, dtype=torch.bfloat16, device="cuda"):
    with FakeTensorMode():
        return make_fx(f)(*(torch.empty(s, device=device, dtype=dtype) for s in shapes))


def plain(x, w):
    return conv(x, w)


LONG = (64, 16, 128), (16, 8, 16)
CASES: dict[str, Any] = {
    "long": (plain, LONG, {}, 1),
    "bias": (lambda x, w, b: conv(x, w, b).relu(), (*LONG, (16,)), {}, 1),
    "one group": (lambda x, w: conv(x, w, groups=1), (LONG[0], (16, 16, 16)), {}, 0),
    "few channels": (lambda x, w: conv(x, w, groups=4), (LONG[0], (16, 4, 16)), {}, 0),
    "short": (plain, (LONG[0], (16, 8, 15)), {}, 0),
    "stride": (lambda x, w: conv(x, w, stride=2), LONG, {}, 0),
    "dilation": (lambda x, w: conv(x, w, dilation=2), LONG, {}, 0),
    "double": (plain, LONG, {"dtype": torch.float64}, 0),
    "cpu": (plain, LONG, {"device": "cpu"}, 0),
}


@pytest.mark.parametrize("name", CASES)
def test_which_convolutions(monkeypatch, name: str) -> None:
    f, shapes, how, number = CASES[name]
    monkeypatch.setattr(long_windows, "is_faster", lambda node: True)
    monkeypatch.setattr(long_windows, "_LEAST_WORK", 1 << 20)
    module = traced(f, *shapes, **how)
    assert long_windows_to_products(module) == number
    module.graph.lint()
    if number:
        args = [torch.randn(s) for s in shapes]
        torch.testing.assert_close(torch.fx.Interpreter(module).run(*args), f(*args), rtol=1e-4, atol=1e-4)


def test_contestants_do_the_same_work() -> None:
    first, second = (run() for run in runs_of((2, 16, 40), (8, 8, 16), torch.float64, True, 8, 2, "cpu").values())
    torch.testing.assert_close(first, second, rtol=1e-10, atol=1e-10)
