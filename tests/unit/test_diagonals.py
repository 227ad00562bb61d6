"""Diagonals that `fill_diagonal_` spells by offsets in memory: parts of kernels, with eager's results."""

from __future__ import annotations

import math

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fuser.frontends.dynamo import last_compilation
from fuser.passes.diagonals import diagonals_by_name

pytestmark = pytest.mark.usefixtures("clean")


def computed(x):
    y = x * 2
    y.fill_diagonal_(0)
    return y + 1


def written(x):
    """An input."""
    x.fill_diagonal_(1.5)
    return x.sum(0)


def similarities(x):
    y = x @ x.t()
    y.fill_diagonal_(-math.inf)
    return y.softmax(-1)


def rows(x):
    """Of which the first is left out."""
    y = x.exp()
    y[1:].fill_diagonal_(3.0)
    return y * 2


def turned(x):
    y = x.sin()
    y.t().fill_diagonal_(3.0, wrap=True)
    return y


PROGRAMS = (computed, written, similarities, rows, turned)
SIZES = ((6, 5), (5, 6), (6, 6))


def tensors():
    return [torch.randn(size) for size in SIZES for _ in PROGRAMS]


def all_of(xs):
    return [f(x) for f, x in zip(PROGRAMS * len(SIZES), xs)]


@pytest.mark.parametrize("dynamic", [False, True])
def test_diagonals_are_filled_in_kernels(dynamic):
    xs = tensors()
    copies = [x.clone() for x in xs]
    got, want = torch.compile(all_of, backend="fuser", dynamic=dynamic)(xs), all_of(copies)
    torch.testing.assert_close((got, xs), (want, copies))
    assert [t.stride() for t in got] == [t.stride() for t in want]
    assert not [u.op for u in last_compilation().unfused if "as_strided" in u.op]


def test_gradients():
    def program(x):
        y = x.sin()
        y.fill_diagonal_(2.0)
        return y * y

    x = torch.randn(5, 4, requires_grad=True)
    weights = torch.randn(5, 4)
    got, want = (torch.autograd.grad(f(x), x, weights) for f in (torch.compile(program, backend="fuser"), program))
    torch.testing.assert_close(got, want)


OTHERS = {
    "an offset": lambda x: x.as_strided((3,), (5,), 1),
    "a shorter one": lambda x: x.as_strided((3,), (5,)),
    "other steps": lambda x: x.as_strided((4,), (4,)),
    "a row": lambda x: x.as_strided((4,), (1,)),
    "a square": lambda x: x.as_strided((2, 2), (5, 1)),
    "of equal rows": lambda x: torch.as_strided_scatter(x[:1].expand(4, 4), x[0] * 2, (4,), (1,)),
    "of windows": lambda x: x.view(-1).unfold(0, 4, 1).as_strided((4,), (2,)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_places_stay(name):
    module = make_fx(OTHERS[name])(torch.randn(5, 4))
    assert diagonals_by_name(module) == 0


@pytest.mark.parametrize("begin", [0, 1, 2])
@pytest.mark.parametrize("dynamic", [False, True])
def test_inputs_at_an_offset_that_are_written_before(begin, dynamic):
    """Their new content has no offset in the graph, where the diagonal's places count from the old one."""

    def fn(x):
        x.add_(1)
        x.fill_diagonal_(0.5)
        return x * 2

    x, y = (torch.arange(60.0)[begin : begin + 48].view(6, 8) for _ in range(2))
    assert torch.equal(torch.compile(fn, backend="fuser", dynamic=dynamic)(x), fn(y)) and torch.equal(x, y)
