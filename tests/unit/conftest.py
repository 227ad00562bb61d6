"""Stand-ins for parts that are not there yet, which give way to the real ones by themselves; and a clean start."""

import pytest
import torch

from fuser.frontends.dynamo import forget_compilations
from tests.unit import dynamo_support  # noqa: F401


@pytest.fixture
def clean():
    """Nothing compiled, and the same random numbers."""
    torch._dynamo.reset()
    forget_compilations()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
