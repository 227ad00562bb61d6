"""Groups whose kernels held the compiler for seconds. `conftest` judges the compiler runs of every test."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests import compilers
from tests.backend.fused import check

aten = torch.ops.aten
FUNCTIONS = (torch.sin, torch.tanh, torch.exp, torch.sigmoid, F.gelu, torch.log1p, lambda x: x / (1 + x.abs()))


def group_norm_backward(groups: int):
    def backward(grad, x, mean, rstd, weight):
        n, c = x.shape
        return aten.native_group_norm_backward(grad, x, mean, rstd, weight, n, c, 1, groups, [True, True, True])

    x, statistics = torch.randn(2, 64, 2048).unbind(), torch.rand(2, 64, groups).unbind()
    return backward, (*x, *statistics, torch.randn(2048))


def nested_windows(dtype: torch.dtype):
    def pools(x):
        return F.max_pool3d(F.max_pool3d(x, 3, 1, 1), 3, 1, 1)

    return pools, (torch.randint(0, 99, (2, 3, 4, 9, 9)).to(dtype),)


def long_chain(dtype: torch.dtype):
    def chain(x):
        for n in range(40):
            x = FUNCTIONS[n % len(FUNCTIONS)](x)
        return x

    return chain, (torch.rand(50).to(dtype),)


CASES = {
    **{f"group_norm_{2048 // g}": lambda g=g: group_norm_backward(g) for g in (256, 512)},
    **{f"windows_{dtype}": lambda dtype=dtype: nested_windows(dtype) for dtype in (torch.uint8, torch.bfloat16)},
    "chain": lambda: long_chain(torch.bfloat16),
}


@pytest.mark.parametrize("name", CASES)
def test_the_compiler_is_done_soon(name):
    function, inputs = CASES[name]()
    before = len(compilers.runs)
    check(function, *inputs, aten=True, tol={"rtol": 2e-2 if "chain" in name else 1e-4, "atol": 1e-3})
    assert len(compilers.runs) > before and not compilers.too_slow(before)


def test_a_slow_compiler_is_named(monkeypatch):
    before = len(compilers.runs)
    check(lambda x: x * x, torch.randn(3))
    monkeypatch.setattr(compilers, "BOUND", 0.0)
    (sentence,) = compilers.too_slow(before)
    assert "k0_pw_d1" in sentence
