"""`nn.TransformerEncoderLayer` in inference: one operator in eager, kernels and products here."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fuser.frontends.dynamo import compilations, forget_compilations, fuser_backend
from fuser.passes import fast_paths
from tests.distances import Distances


@pytest.fixture(autouse=True)
def clean():
    torch._dynamo.reset()
    forget_compilations()
    yield
    torch._dynamo.reset()


def whole() -> bool:
    """Whether the operator is still in a compiled graph."""
    return any("_transformer_encoder_layer_fwd" in u.op for c in compilations() for u in c.unfused)


def layer(activation="gelu", norm_first=False, dtype=torch.float32):
    torch.manual_seed(0)
    made = nn.TransformerEncoderLayer(32, 4, 64, 0.0, activation, batch_first=True, norm_first=norm_first)
    for p in made.parameters():
        nn.init.normal_(p, 0.1, 0.5)
    return made.eval().to(dtype)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "activation, norm_first, dynamic",
    [("relu", False, True), ("relu", True, False), ("gelu", False, False), ("gelu", True, True)],
)  # each two of them in every combination
def test_a_layer_is_taken_apart_and_as_exact_as_eager(activation, norm_first, dynamic):
    model = layer(activation, norm_first)
    fused = torch.compile(model, backend=fuser_backend, dynamic=dynamic)
    distances = Distances()
    with torch.no_grad():
        for batch, tokens in ((2, 5), (1, 1), (3, 17)):
            x = torch.randn(batch, tokens, 32)
            want, got = model(x), fused(x)
            assert got.stride() == want.stride()
            assert distances.add(got, want, model.double()(x.double()))
            model.float()
    assert distances.is_right
    assert not whole()
    assert compilations() or dynamic  # Dynamo of torch 2.11 leaves such a layer to eager


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fast", [False, True], ids=["slow products", "fast products"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_layer_in_16_bits(dtype, fast, monkeypatch):
    monkeypatch.setattr(fast_paths, "product_dtype", lambda d: d if fast or d.itemsize >= 4 else torch.float32)
    model, distances = layer(dtype=dtype), Distances()
    fused = torch.compile(model, backend=fuser_backend, dynamic=False)
    with torch.no_grad():
        for _ in range(5):
            x = torch.randn(3, 17, 32, dtype=dtype)
            want, got = model(x), fused(x)
            assert got.stride() == want.stride()
            assert distances.add(got, want, copy.deepcopy(model).double()(x.double()))
    assert distances.is_right
    assert not whole() and compilations()


def test_a_layer_that_stays_whole_is_right():
    model, x = layer(), torch.randn(2, 5, 32)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    with torch.no_grad():
        got = torch.compile(model, backend=fuser_backend)(x, src_mask=mask)
        torch.testing.assert_close(got, model(x, src_mask=mask))
    assert whole()
