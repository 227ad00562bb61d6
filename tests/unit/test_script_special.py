# ruff: noqa: UP006, UP035, UP045 (TorchScript reads these annotations)
"""Groups of scripts whose code depends on values of a call: dims, dtypes, flags, optional arguments, numbers."""

from __future__ import annotations

import math
import os
from typing import List, Optional

import pytest
import torch
from torch import Tensor

import fuser
from fuser.frontends import script_special
from tests.unit.test_fuse_script import assert_alike
from tests.unit.test_torchscript_programs import outcome

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "ignore::UserWarning")
_ALL = bool(os.environ.get("FUSER_TEST_ALL"))


def dim(x: Tensor, d: int):
    return (x * 2).softmax(d) + 1


def dim_and_flag(x: Tensor, d: int, keep: bool):
    return (x * 2).sum(d, keep) + 1


def optional_bound(x: Tensor, low: Optional[float]):
    return torch.clamp(x * 2, min=low, max=1.0) * 2


def optional_tensor(x: Tensor, w: Optional[Tensor]):
    return torch.nn.functional.layer_norm(x * 2, [6], w) + 1


def dtype(x: Tensor, to: int):
    return (x * 2).to(to) + 1


def dims(x: Tensor, d: List[int]):
    return (x * 2).mean(d) + 1


def mode(x: Tensor, rounding: str):
    return torch.div(x * 2, 3.0, rounding_mode=rounding) + 1


def of_a_dim(x: Tensor, d: int):
    return (x * 2).softmax(d - 1) + 1


def new_of_dtype(x: Tensor, to: int):
    return torch.zeros([4, 6], dtype=to) + x * 2


_W = torch.linspace(0.5, 1.5, 6)
CASES = [
    (dim, [(0,), (1,), (-1,), (5,)]),
    (dim_and_flag, [(0, True), (1, False)]),
    (optional_bound, [(None,), (0.5,), (0.25,)]),
    (optional_tensor, [(None,), (_W,)]),
    (dtype, [(6,), (7,), (3,)]),
    (dims, [([0],), ([0, 1],)]),
    (mode, [("floor",), ("trunc",), ("bad",)]),
    (of_a_dim, [(0,), (1,)]),
    (new_of_dtype, [(6,), (7,)]),
]
_SOME = CASES if _ALL else [(p, several[:2]) for p, several in CASES if p in (optional_bound, new_of_dtype)]


@pytest.mark.parametrize(("program", "several"), _SOME, ids=[p.__name__ for p, _ in _SOME])
def test_values_that_decide_code(program, several):
    x = torch.randn(4, 6)
    script = torch.jit.script(program)
    fused = fuser.fuse_script(script)
    (group,) = fused.fusion.groups
    assert len(group.calls) > 1
    for args in (*several, *several):
        want, expected = outcome(script, (x, *args))
        got, error = outcome(fused, (x, *args))
        assert type(error) is type(expected), (error, expected)
        if expected is None:
            assert_alike(got, want)
            assert not want.is_floating_point() or _same_gradient(fused, script, x, args)
    assert not group.operator.handle.reasons
    assert len(group.operator.handle.keys) <= len(several)
    if program is optional_bound:  # a number's value is an argument of the kernel
        assert len(group.operator.handle.keys) == 2


def _same_gradient(fused, script, x, args):
    found = []
    for f in (fused, script):
        v = x.clone().requires_grad_()
        found.append(torch.autograd.grad(f(v, *args).sum(), v)[0])
    return torch.allclose(*found, atol=1e-5)


def test_no_more_than_a_few_combinations(monkeypatch):
    monkeypatch.setattr(script_special, "MOST", 1)
    x = torch.randn(4, 6)
    script = torch.jit.script(dim)
    fused = fuser.fuse_script(script)
    for d in (0, 1, 0, 1, -1):
        assert_alike(fused(x, d), script(x, d))
    handle = fused.fusion.groups[0].operator.handle
    assert list(handle.keys) == [(0,)]
    assert list(handle.reasons) == ["more than 1 combinations of values"]
    assert "for (0,):" in fuser.debug.graph_for(fused) and "more than 1 combinations" in fuser.debug.graph_for(fused)


def test_arithmetic_on_numbers_keeps_nothing_apart():
    def f(x: Tensor, w: Tensor, p: float, n: int):
        y = x * 2 + 1
        z = y.mm(w)
        return y * (1 / p) + p**2 * x * math.sqrt(p) - x / float(n), z

    script = torch.jit.script(f)
    fused = fuser.fuse_script(script)
    assert len(fused.fusion.groups) == 1
    x, w = torch.randn(4, 6), torch.randn(6, 6)
    for p in (2.0, 0.5, 0.0):
        assert_alike(fused(x, w, p, 3), script(x, w, p, 3))
