"""Makes this folder's helper modules importable, and each graph the first of its form."""

import pathlib
import sys

import pytest

from fuser.kernel_cache import REGISTRY

sys.path.insert(0, str(pathlib.Path(__file__).parent))


@pytest.fixture(autouse=True)
def first_of_its_form():
    """Graphs keep their constants, whatever graphs other tests registered: their handles count hits themselves."""
    REGISTRY._forms.clear()
