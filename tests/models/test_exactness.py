"""Pieces of models are no less exact than eager: each in one dtype, layout and way of tracing, all of which take turns.

`make exactness` runs every piece in every way.
"""

import pytest

from tests.models.exactness import DTYPES, DYNAMIC, LAYOUTS, PIECES, worse

CHOSEN = (
    "normalised classes", "softmax over the batch", "layer norm far from 0", "group norm", "batch norm", "convolution",
    "attention by hand", "cross entropy", "spread", "running sums", "norms", "sums over dims",
)  # fmt: skip


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", CHOSEN)
def test_no_further_from_float64_than_eager(name):
    turn = tuple(PIECES).index(name)
    found = [*worse(name, DTYPES[turn % 3], DYNAMIC[turn // 3 % 3], LAYOUTS[turn // 2 % 2], (6, 11))]
    assert not found, "\n".join(found)
