"""Models of the benchmarks, shrunk, without gradients: results no further from float64 than eager's, few kernels."""

from __future__ import annotations

import copy

import pytest
import torch

from benchmarks.models import MODELS, build
from fuser.frontends.dynamo import compilations, fuser_backend, last_compilation
from fuser.interface import kernel_spec

# Operators that may stay on ATen: libraries' work, and what has no lowering.
LIBRARY = {
    "mkldnn._linear_pointwise", "aten.addmm", "aten.mm", "aten.bmm", "aten.convolution", "aten.max_pool2d_with_indices",
    "aten._scaled_dot_product_flash_attention_for_cpu",
}  # fmt: skip


def double(t):
    return t.double() if t.is_floating_point() else t


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "context"),
    [*((name, torch.inference_mode) for name in MODELS), ("gpt2", torch.no_grad), ("resnet50", torch.no_grad)],
)
def test_results(name, context):
    model, inputs = build(name, True, "cpu")
    exact_model = copy.deepcopy(model).double()
    with context():
        f = torch.compile(model, backend=fuser_backend)
        got, again, eager = f(*inputs), f(*inputs), model(*inputs)
        exact = exact_model(*map(double, inputs))
    assert got.shape == eager.shape and got.stride() == eager.stride() and got.dtype == eager.dtype
    assert torch.equal(got, again), "the same bits at each call"
    error, allowed = (got - exact).abs().max(), (eager - exact).abs().max()
    assert error <= 4 * allowed + 1e-6
    (record,) = compilations()
    assert record.route == "direct"
    assert {u.op for u in record.unfused} <= LIBRARY
    stores = [kernel_spec(k).store for k in record.keys]
    assert not [(s.fallbacks, s.entries) for s in stores if s.fallbacks or not s.kernels]


def test_layers_share_kernels():
    model, inputs = build("gpt2", True, "cpu")
    with torch.no_grad():
        torch.compile(model, backend=fuser_backend)(*inputs)
    record = last_compilation()
    assert len(record.keys) < len(record.groups)


def test_gpt2_logits_at_other_lengths():
    model, (ids,) = build("gpt2", True, "cpu")
    f = torch.compile(model, backend=fuser_backend)
    with torch.no_grad():
        for tokens in (ids.shape[1], 7, 20, 1):
            torch.testing.assert_close(f(ids[:, :tokens]), model(ids[:, :tokens]), rtol=1e-4, atol=1e-4)
    assert len(compilations()) <= 3
