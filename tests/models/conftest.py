"""Each test of models starts with nothing compiled, specifications of its own, and the same random numbers."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def start(clean: None, registry: object) -> None:
    """Fixtures of all tests, asked for by each. A model's groups are small: other tests make some of them fall back."""
