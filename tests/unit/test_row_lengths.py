"""On the CPU many rows of 3, of 9 and of 1024 elements have kernels of their own; few rows share one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fuser
from fuser import interface

FUNCTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "softmax": lambda x: x.softmax(-1),
    "sums": lambda x: ((x * 2).sum(0), (x * 3).sum(1)),
    "bias": lambda x: (x + x[0]).relu() * 2,
    "reversed": lambda x: x.flip(1) + 1,
    "padded": lambda x: torch.nn.functional.pad(x, (1, 2, 1, 0)) * 2,
    "scan": lambda x: x.cumsum(0),
    "largest": lambda x: x.argmax(0),
}
# Sizes, and the most kernels behind the call: rows of 8 and of 32 elements begin other classes, from 256 rows on.
CALLS = ((64, 1024), 1), ((40, 3), 1), ((200, 9), 1), ((2000, 3), 2), ((2000, 9), 3), ((300, 90), 3), ((2000, 4), 4)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_kernels_of_classes_of_rows(name: str) -> None:
    f = FUNCTIONS[name]
    key = fuser.register_fusion(torch.fx.symbolic_trace(f))
    for size, most in CALLS:
        x = torch.randn(size)
        want, got = f(x), fuser.run_fusion(key, (x,))
        for w, g in zip(torch.utils._pytree.tree_leaves(want), got, strict=True):
            torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-3)
        assert len(interface.kernel_spec(key).store.kernels) <= most
    assert len(interface.kernel_spec(key).store.kernels) > 1
