"""Operators that may give their very input, which no schema says: a write under either name is seen under both."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fuser
from tests.unit.test_fuse_script import assert_alike

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "ignore::UserWarning")


def written_input(x: Tensor, y: Tensor, flag: bool):
    v = y.type_as(x)
    if flag:
        y[1:].sub_(x[1:])
        x = v + 0.5
    return torch.where(y > 0, y, x) * 2 + 1


def written_result(x: Tensor, y: Tensor, flag: bool):
    v = y.type_as(x)
    a = y * 2 + 1
    v.add_(1)
    return a, y * 2 + 1, (y * x).tanh() + v


def written_dropout(x: Tensor, y: Tensor, flag: bool):
    v = torch.dropout(y, 0.5, flag)
    a = v * 2 + x
    v.mul_(3.0)  # TorchScript itself drops it if nothing reads `v` after it
    return a, (y * 2 + x).relu(), v


def written_through_two(x: Tensor, y: Tensor, flag: bool):
    v = torch.atleast_2d(y.sum_to_size([3, 4]))
    a = (y + x) * 2
    v[0].zero_()
    return a, (y + x) * 2, v.t() * 2 + 1


def written_in_a_loop(x: Tensor, y: Tensor, flag: bool):
    v = y.type_as(x)
    for _ in range(3):
        x = (v * x).tanh() + 1
        y += 1
    return x, v * 2 + 1


def written_cast(x: Tensor, y: Tensor, flag: bool):
    z = torch.tanh(y) + 1
    v = z.float()
    w = v.expand_as(z)
    a = w.exp() * 2
    w[1:].zero_()
    return a, z * 2 + 1


PROGRAMS = (written_cast, written_input, written_result, written_dropout, written_through_two, written_in_a_loop)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_writes_that_no_schema_shows(program):
    fused = fuser.fuse_script(torch.jit.script(program))
    x, y = torch.linspace(-1, 1, 12).view(3, 4), torch.linspace(2, -1, 12).view(3, 4)
    for other, flag in ((x, True), (x, False), (x.double(), True), (x.double(), False)):
        given, passed = y.clone(), y.clone()
        torch.manual_seed(0)
        want = program(other, given, flag)
        torch.manual_seed(0)
        assert_alike(fused(other, passed, flag), want)
        assert passed.equal(given)


def test_without_a_write_they_are_fused():
    def f(x: Tensor, y: Tensor):
        z = torch.relu(x * y)
        z.add_(1)
        return (z.type_as(y) * 2 + x).tanh()

    fused = fuser.fuse_script(torch.jit.script(f))
    x = torch.randn(3, 4)
    assert_alike(fused(x, x), f(x, x))
    assert sum(len(g.calls) for g in fused.fusion.groups) >= 3
