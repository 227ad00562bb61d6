"""`nn.TransformerEncoderLayer` in inference: one operator in eager, kernels and products here."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fuser.frontends.dynamo import compilations, forget_compilations, fuser_backend
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


@pytest.mark.parametrize("dtype, masked", [(torch.bfloat16, False), (torch.float32, True)])
def test_a_layer_that_stays_whole_is_right(dtype, masked):
    model, x = layer(dtype=dtype), torch.randn(2, 5, 32, dtype=dtype)
    mask = nn.Transformer.generate_square_subsequent_mask(5) if masked else None
    with torch.no_grad():
        got = torch.compile(model, backend=fuser_backend)(x, src_mask=mask)
        torch.testing.assert_close(got, model(x, src_mask=mask))
    assert whole()
