"""A few operators with symbolic sizes, gradients and other layouts, half of them in a mode; `make modes` has all."""

from __future__ import annotations

import pytest
import torch

from tests.opinfo import database, modes

OPERATORS = frozenset(
    "add where softmax amax cumsum gather index_add nn.functional.layer_norm nn.functional.max_pool2d matmul "
    "split_with_sizes nn.functional.pad nn.functional.linear_cross_entropy unfold roll nn.functional.batch_norm".split()
)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("words, turn", (("dynamic+layouts", 0), ("dynamic+grad+layouts", 1), ("grad+autocast", 0)))
def test_operators_in_other_modes(words, turn):
    ops = [op for op in database.operators() if op.name in OPERATORS][turn::2]
    found = list(modes.run(modes.Modes(words.split("+")), ops, [torch.float32], 1))
    assert sum(count for count, _ in found) > 10
    assert [line for _, lines in found for line in lines] == []
