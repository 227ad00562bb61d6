"""Complex numbers among the operands of calls with real tensors: no kernel computes with them."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import fx

import fuser

pytestmark = pytest.mark.usefixtures("clean")
DTYPES = (torch.bool, torch.uint8, torch.int64, torch.float32, torch.bfloat16, torch.float64)
NUMBERS = (1 + 2j, 1 + 0j, 0j, 2j, complex("nan"))
CALLS = {
    "eq": torch.eq,
    "ne": torch.ne,
    "==": operator.eq,
    "reversed ==": lambda x, c: c == x,
    "eq_": lambda x, c: x.clone().eq_(c),
    "ne_": lambda x, c: x.clone().ne_(c),
    "count": lambda x, c: (x == c).sum(),
    "of a tensor": lambda x, c: x == torch.tensor(c),
    "add": lambda x, c: (x + c).real,
    "sum": lambda x, c: x + c,
    "difference": lambda x, c: x - c,
    "product": lambda x, c: x * c,
    "quotient": lambda x, c: x / c,
    "power": lambda x, c: x**c,
    "alpha": lambda x, c: torch.add(x, x, alpha=c),
    "mul": lambda x, c: (x * c).abs(),
    "any": lambda x, c: ((x * c) != 0).any(),
    "div": lambda x, c: (x / c).real,
    "pow": lambda x, c: (x**c).real,
    "where": lambda x, c: torch.where(x > 0, x, c).real,
    "full": lambda x, c: torch.full_like(x, c),
    "masked_fill": lambda x, c: x.masked_fill(x > 0, c),
    "fill_": lambda x, c: x.clone().fill_(c),
    "index_fill": lambda x, c: x.index_fill(0, torch.tensor([0]), c),
    "addcmul": lambda x, c: torch.addcmul(x, x, x, value=c),
    "lerp": lambda x, c: torch.lerp(x, x, c),
    "clamp": lambda x, c: x.clamp(min=c),
    "lt": torch.lt,
    "threshold": lambda x, c: F.threshold(x, 0.0, c),
    "pad": lambda x, c: F.pad(x, (1, 1), value=c),
}


def made(f, x):
    """The result, or None where there is none."""
    try:
        return f(x)
    except Exception:
        return None


def assert_same(result, expected):
    assert (result is None) == (expected is None)
    if expected is not None:
        torch.testing.assert_close(result, expected, equal_nan=True)


@pytest.mark.sampled(12, also=("pad-(1+0j)",))
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("name", CALLS)
def test_registered(name, number):
    def program(x):
        return CALLS[name](x, number)

    traced = fx.symbolic_trace(program)
    for dtype in DTYPES:
        x = torch.tensor([0, 1, 2, 3, 1, 0, 1, 1]).to(dtype)
        assert_same(made(fuser.fusion_handle(fuser.register_fusion(traced)), x), made(program, x))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", ["eq", "ne", "count", "any", "sum", "product", "quotient", "power"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_compiled(dtype, name):
    x = (torch.arange(8) % 2 == 0).to(dtype)
    for number in NUMBERS:
        torch._dynamo.reset()

        def program(x, number=number):
            return CALLS[name](x.logical_not().to(dtype), number), x.logical_xor(x[:1])

        for result, expected in zip(torch.compile(program, backend="fuser")(x), program(x), strict=True):
            assert_same(result, expected)
