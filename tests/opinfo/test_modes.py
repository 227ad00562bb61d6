"""A few operators with symbolic sizes, gradients and other layouts; `python -m tests.opinfo.modes` has all."""

from __future__ import annotations

import pytest
import torch

from tests.opinfo import database, modes

OPERATORS = frozenset(
    "add where softmax amax cumsum gather index_add nn.functional.layer_norm nn.functional.max_pool2d matmul "
    "split_with_sizes nn.functional.pad nn.functional.linear_cross_entropy unfold roll nn.functional.batch_norm".split()
)


@pytest.mark.parametrize("words", ("dynamic+layouts", "dynamic+grad+layouts", "grad+autocast"))
def test_operators_in_other_modes(words):
    ops = [op for op in database.operators() if op.name in OPERATORS]
    found = list(modes.run(modes.Modes(words.split("+")), ops, [torch.float32], 1))
    assert sum(count for count, _ in found) > 20
    assert [line for _, lines in found for line in lines] == []
