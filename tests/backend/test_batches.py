"""Row nests in batches: the bits of one row after the other, whatever the number of rows and their length."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fuser
from fuser import config, interface, kernel_cache, metrics
from fuser.cpu import batches
from fuser.debug import explaining, reporting


def norm(x):
    return (x - x.mean(-1, keepdim=True)) * (x.var(-1, keepdim=True) + 1e-5).rsqrt() * 1.5 + 0.5


FUNCTIONS = {
    "softmax": lambda x: F.softmax(x, -1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "sums too": lambda x: (x.logsumexp(-1), x.softmax(-1).square().sum(-1), x.amax(-1)),
    "norm": norm,
    "three passes": lambda x: (x - x.amax(-1, True)).exp() / (x.std(-1, keepdim=True) + x.abs().mean(-1, True)),
    "gradient": lambda x: x * (x - (x * x.exp()).sum(-1, keepdim=True)),
}  # fmt: skip
# Rows of several numbers and lengths; the number of a strided row has two digits.
INPUTS = (
    lambda: torch.randn(37, 33), lambda: torch.randn(1, 64), lambda: torch.randn(16, 100), lambda: torch.randn(5, 250),
    lambda: torch.randn(5, 9, 64)[:, :7],
)  # fmt: skip


def ran(function, inputs, monkeypatch, batched):
    """Results of a handle for each of some tensors, of kernels with batches or without."""
    made = kernel_cache.Registry()
    for module in (interface, metrics, reporting, explaining):
        monkeypatch.setattr(module, "REGISTRY", made)
    if not batched:
        monkeypatch.setattr(batches, "pays", lambda facts: False)
    key = fuser.register_fusion(torch.fx.symbolic_trace(function))
    with config.override(cache_dir=""):
        out = [fuser.run_fusion(key, [x]) for x in inputs]
    report = fuser.debug.report([key])
    assert not report.fallback_calls, report
    return out


@pytest.mark.sampled(16, also=("norm-dtype6",))
@pytest.mark.parametrize(("name", "dtype"), [
    *((name, dtype) for name in FUNCTIONS for dtype in (torch.float32, torch.bfloat16)),
    ("log_softmax", torch.float64), ("norm", torch.float64), ("softmax", torch.float16), ("sums too", torch.float16),
])  # fmt: skip
def test_bits_are_those_of_rows_by_themselves(name, dtype, monkeypatch):
    function = FUNCTIONS[name]
    inputs = [make().to(dtype) for make in INPUTS]
    own, alone = (ran(function, inputs, monkeypatch, batched) for batched in (True, False))
    near = 4e-2 if dtype.itemsize == 2 else 1e-4
    for x, results, others in zip(inputs, own, alone, strict=True):
        assert all(map(torch.equal, results, others)), tuple(x.shape)
        want = function(x.double())
        want = want if isinstance(want, (tuple, list)) else [want]
        torch.testing.assert_close([r.double() for r in results], [w.double() for w in want], rtol=near, atol=near)


@pytest.mark.parametrize("threads", [1, 2])
def test_one_kernel_for_rows_of_all_lengths(threads):
    """Made for short rows, it takes long ones one by one, and none at all."""
    torch.set_num_threads(threads)
    sizes = ((40, 64), (3, 5000), (17, 700), (0, 64), (1, 90), (300, 257), (2, 70_000))
    inputs = [torch.randn(size) for size in sizes]
    key = fuser.register_fusion(torch.fx.symbolic_trace(FUNCTIONS["softmax"]))
    for x in inputs:
        (got,) = fuser.run_fusion(key, [x])
        torch.testing.assert_close(got, torch.softmax(x.double(), -1).float(), rtol=1e-5, atol=1e-7)


def test_indices_are_checked_in_batches():
    table, index = torch.randn(50, 64), torch.randint(0, 50, (37,))
    key = fuser.register_fusion(torch.fx.symbolic_trace(lambda t, i: F.log_softmax(t[i], -1)))
    (got,) = fuser.run_fusion(key, [table, index])
    torch.testing.assert_close(got, F.log_softmax(table[index], -1))
    index[20] = 50
    with pytest.raises(IndexError):
        fuser.run_fusion(key, [table, index])
