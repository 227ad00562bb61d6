"""Handles called with tensors that they were not registered for.

FUSER_OTHER_CALLS=all asks every operator of the database in four dtypes, with three samples each; else a part of them.
"""

from __future__ import annotations

import itertools
import os
import random

import pytest
import torch
import torch.nn.functional as F

import fuser
from tests.opinfo import database, other_calls, runner

ALL = os.environ.get("FUSER_OTHER_CALLS") == "all"
SHARE, SAMPLES = (1, 3) if ALL else (24, 1)
DTYPES = (torch.float32, torch.int64, torch.bfloat16, torch.bool) if ALL else (torch.float32,)
OPERATORS = database.operators()
X = torch.randn(4, 6)
# What had been taken, and read behind the end of a tensor.
REFUSED = {
    "group norm": (lambda x, w: F.group_norm(x, 2, w), (X, torch.ones(6)), (X, torch.ones(5))),
    "cross entropy": (
        lambda x, t, w: F.cross_entropy(x, t, w),
        (X, torch.tensor([0, 1, 2, 5]), torch.ones(6)), (X, torch.tensor([0, 1, 2, 5]), torch.ones(3)),
    ),
    "diagonal": (torch.diagonal_scatter, (X, torch.ones(4)), (X, torch.ones(3))),
    "scatter without dims": (
        lambda x, i, s: torch.scatter_add(x, 0, i, s), (torch.tensor(1.0), torch.tensor(0), torch.tensor(2.0)),
        (torch.tensor(1.0), torch.tensor(7), torch.tensor(2.0)),
    ),
    "softmax's gradient": (
        lambda g, y: torch.ops.aten._softmax_backward_data(g, y, 1, torch.float32), (X, X), (X, X[:, :1].clone()),
    ),
    "logits": (F.binary_cross_entropy_with_logits, (X, X.sigmoid()), (X, X[:1].sigmoid())),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_eager_refuses_is_refused(name):
    function, good, bad = REFUSED[name]
    names = [f"x{i}" for i in range(len(good))]
    graph = torch.fx.Graph()
    graph.output(graph.call_function(function, tuple(map(graph.placeholder, names))))
    key = fuser.register_fusion(torch.fx.GraphModule(torch.nn.Module(), graph))
    (got,) = fuser.run_fusion(key, list(good))
    torch.testing.assert_close(got, function(*good))
    with pytest.raises((RuntimeError, IndexError, ValueError)):
        function(*bad)
    with pytest.raises((RuntimeError, IndexError, ValueError)):
        fuser.run_fusion(key, list(bad))


ROWS = torch.tensor([0, 1, 2, 0])
LOOKUPS = {
    "index": lambda x: x[:, ROWS], "index_select": lambda x: x.index_select(1, ROWS), "take": lambda x: x.take(ROWS),
    "gather": lambda x: x.gather(1, ROWS.view(4, 1)), "embedding": lambda x: F.embedding(ROWS, x.t()),
    "padded embedding": lambda x: F.embedding(ROWS, x.t(), padding_idx=0),
    "take_along_dim": lambda x: torch.take_along_dim(x, ROWS.view(4, 1), 1),
    "nll_loss": lambda x: F.nll_loss(x, ROWS), "cross_entropy": lambda x: F.cross_entropy(x, ROWS),
    "cross_entropy, each": lambda x: F.cross_entropy(x, ROWS, reduction="none", label_smoothing=0.1),
    "gradient": lambda x: torch.ops.aten.nll_loss_backward(ROWS[0] + 1.0, x, ROWS, None, 1, -100, ROWS[1] * 4.0),
    "masked": lambda x: torch.ops.aten._unsafe_masked_index(x, ROWS.view(4, 1) >= 0, [None, ROWS.view(4, 1)], 0.0),
    "index_add": lambda x: x.index_add(1, ROWS, x.new_ones(4, 4)),
    "scatter": lambda x: x.scatter(1, ROWS.view(4, 1), 1.0),
    "index_put": lambda x: x.index_put((ROWS, ROWS), x.new_ones(4)),
}  # fmt: skip


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", LOOKUPS)
def test_lookups_along_an_empty_dim_are_eagers(name):
    """A kernel made for many elements has no address for a lookup among none."""
    key = fuser.register_fusion(torch.fx.symbolic_trace(lambda x: LOOKUPS[name](x * 2)))
    full, empty = torch.randn(4, 6), torch.empty(0).as_strided((4, 0), (0, 1))
    (got,) = fuser.run_fusion(key, [full])
    torch.testing.assert_close(got, LOOKUPS[name](full * 2))
    try:
        want = LOOKUPS[name](empty * 2)
    except (RuntimeError, IndexError):
        with pytest.raises((RuntimeError, IndexError)):
            fuser.run_fusion(key, [empty])
    else:
        assert fuser.run_fusion(key, [empty])[0].shape == want.shape


def test_indices_that_broadcast_below_a_mask():
    x, mask = torch.randn(5, 5), torch.rand(10, 10) > 0.3
    rows, columns = torch.randint(0, 5, (10, 1)), torch.randint(0, 5, (1, 1))
    graph = torch.fx.symbolic_trace(lambda x, m, i, j: torch.ops.aten._unsafe_masked_index(x, m, [i, j], 0.0))
    (got,) = fuser.run_fusion(fuser.register_fusion(graph), [x, mask, rows, columns])
    assert torch.equal(got, torch.where(mask, x[rows, columns], 0.0))


@pytest.mark.sampled(
    16,
    also=(
        "chunk-torch.float32", "istft-torch.float32", "meshgrid.list_of_tensors-torch.float32", "tril-torch.float32",
    ),
)  # fmt: skip
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", OPERATORS[::SHARE], ids=database.full_name)
def test_as_eager_does(op, dtype):
    if dtype not in database.dtypes_of(op):
        pytest.skip("no samples of this dtype")
    torch.manual_seed(0)
    samples = list(itertools.islice(op.sample_inputs("cpu", dtype), 60))
    for sample in random.Random(1).sample(samples, min(SAMPLES, len(samples))):
        made = runner.make_sample(op.op, sample, database.undefined(op, sample))
        outcome = other_calls.run(database.full_name(op), made)
        assert outcome.status != runner.WRONG, outcome.reason
