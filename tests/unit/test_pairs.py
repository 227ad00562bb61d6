"""The suite of pairs of operators says what is wrong, and its functions are what they are called."""

from __future__ import annotations

import pytest
import torch

import fuser
from benchmarks import checks
from benchmarks.suites import pairs

pytestmark = pytest.mark.skipif(not fuser.can_fuse_on_cpu(), reason="needs a C++ compiler")


@pytest.mark.parametrize("order", pairs.ORDERS)
def test_a_right_pair(clean, order):
    found = pairs.measure("relu6", "max_pool 3x3", order)
    assert found["problem"] is None and found["gain"] > 0 and found["row"] == f"relu6, max_pool 3x3, {order}"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda y: y + 1, "off eager's by up to 1"),
        (lambda y: y.double(), "torch.float64"),
        (lambda y: y.contiguous(memory_format=torch.channels_last), "has the strides"),
    ],
)
def test_a_wrong_pair_is_said(monkeypatch, wrong, said):
    monkeypatch.setattr(torch, "compile", lambda function, **_: lambda x: wrong(function(x)))
    assert said in pairs.measure("relu", "roll", "contiguous")["problem"]


def test_who_is_nearer_to_float64_than_eager_is_right():
    exact = torch.rand(100, dtype=torch.float64)
    far, near = (exact + d for d in (1e-2, 1e-6))
    off, close, other = far.float(), near.float(), (exact - 1e-2).float()
    nan = torch.where(exact > 0.5, float("nan"), close)
    verdicts = [checks.judge([out], [off], [exact]).problem for out in (close, off, other, nan)]
    assert [v is None for v in verdicts] == [True, True, False, False]
    assert checks.judge([close], [off]).problem is not None
