"""Each test of models starts with nothing compiled and the same random numbers."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def start(clean: None) -> None:
    """`clean` of all tests, asked for by each."""
