"""No operator takes its neighbours to ATen: elementwise calls on all sides of it are in groups, whatever becomes of it.

FUSER_NEIGHBOURS=all asks every operator of the database in five dtypes, with four samples each; else a part of them.
"""

from __future__ import annotations

import os
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from tests.opinfo import database, neighbours, runner

ALL = os.environ.get("FUSER_NEIGHBOURS") == "all"
SHARES = 8
DTYPES = (torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.complex64)
# What had taken a whole group with it, beside what the database holds.
X, INDEX = torch.randn(4, 6), torch.tensor([[0, 2, 1, 0, 1, 3]])
IMAGE = torch.randn(2, 3, 12, 10)
CALLS = {
    "copy of a broadcasting source": (torch.ops.aten.copy.default, X, X[0].clone()),
    "copy of another dtype": (torch.ops.aten.copy.default, X, torch.arange(6)),
    "index_put behind a whole dim": (torch.ops.aten.index_put.default, X, [None, torch.tensor([1, 3])], torch.ones(2)),
    "scatter_add of masks": (torch.scatter_add, X > 0, 0, INDEX, X[:1] > 0),
    "bits": (torch.ops.aten.view.dtype, X, torch.int32),
    "bits of another width": (torch.ops.aten.view.dtype, X, torch.int16),
    "own bits": (torch.ops.aten.view.dtype, X, torch.float32),
    "gradient of upsampling": (torch.ops.aten.upsample_nearest2d_backward.default, IMAGE, [12, 10], [2, 3, 5, 7]),
    "windows that differ": (F.adaptive_avg_pool2d, IMAGE, (1, 7)),
    "maxima of windows that differ": (F.adaptive_max_pool2d, IMAGE, (5, 7)),
    "large windows": (F.max_pool2d, IMAGE, 7),
    "means of large windows": (F.avg_pool2d, IMAGE, 7),
    "gammainc": (torch.special.gammainc, X.abs(), X.abs()),
    "lookup by a mask": (lambda x, m: x[m], X, X > 0),
    "lookup by integers": (lambda x, i: x[i], X, torch.tensor([1, 0, 3])),
    "complex numbers": (lambda x: torch.view_as_real(torch.view_as_complex(x.view(4, 3, 2)) * 1j), X),
}
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    OPERATORS = database.operators()


def lost(sample: runner.Sample) -> list[str]:
    with torch.no_grad():
        try:
            module = neighbours.surrounded(sample)
        except Exception:  # it cannot be traced: it reads values, or wants a GPU
            return []
        return neighbours.lost_neighbours(module)[1]


@pytest.mark.sampled(4, also=("large windows", "scatter_add of masks"))
@pytest.mark.parametrize("name", CALLS)
def test_neighbours_of_calls_that_cannot_be_fused(name):
    function, *args = CALLS[name]
    sample = runner.make_sample(function, SimpleNamespace(input=args[0], args=tuple(args[1:]), kwargs={}))
    neighbours.SPLIT.clear()
    with torch.no_grad():
        count, found = neighbours.lost_neighbours(neighbours.surrounded(sample))
    assert count and not found, found
    assert not neighbours.SPLIT or "large windows" in name, "it is refused when its group is formed already"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", DTYPES if ALL else (torch.float32, torch.bool, torch.complex64), ids=str)
@pytest.mark.parametrize("share", range(SHARES) if ALL else [1])
def test_neighbours_of_operators(share, dtype):
    found = []
    for op in [op for op in OPERATORS if dtype in database.dtypes_of(op)][share :: SHARES if ALL else 29]:
        for sample in database.samples_of(op, dtype, 4 if ALL else 1):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                reasons = lost(runner.make_sample(op.op, sample))
            found += [f"{database.full_name(op)}: {reason}" for reason in reasons]
    assert not found, "\n".join(found)
