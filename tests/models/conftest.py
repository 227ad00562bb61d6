"""Each test of models starts with nothing compiled and the same random numbers."""

from __future__ import annotations

import pytest
import torch

from fuser.frontends.dynamo import forget_compilations


@pytest.fixture(autouse=True)
def clean():
    torch._dynamo.reset()
    forget_compilations()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
