"""Convolutions in channels-last memory on a real GPU: no further from float64 than eager."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.cuda


def blocks(channels: int, number: int) -> nn.Sequential:
    """Convolutions with group norms between, as in diffusion networks."""
    return nn.Sequential(
        *(
            nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.GroupNorm(8, channels), nn.SiLU())
            for _ in range(number)
        ),
        nn.Conv2d(channels, 4, 3, padding=1),
    )


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_group_norms_between_convolutions(dtype: torch.dtype) -> None:
    from fuser.frontends.dynamo import fuser_backend
    from fuser.frontends.records import last_compilation

    torch.manual_seed(1)
    model = blocks(64, 10).cuda().to(dtype).eval()
    x = torch.randn(2, 64, 32, 32, device="cuda", dtype=dtype)
    with torch.no_grad():
        found, eager = torch.compile(model, backend=fuser_backend)(x), model(x)
        exact = copy.deepcopy(model).double()(x.double())
    assert found.stride() == eager.stride()
    assert (found - exact).square().mean() <= 2 * (eager - exact).square().mean()
    assert any(p.name == "tensor_cores_channels_last" and p.changed for p in last_compilation().passes)
