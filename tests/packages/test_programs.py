"""The comparison itself, with functions of this file in place of a package's: it finds arguments and what is wrong."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.packages import arguments
from tests.packages.programs import Program, check


def blur(image, sigma: float):
    if image.dim() != 4 or not 0 < sigma < 2:
        raise ValueError("four dims")
    return image * sigma + image.mean((2, 3), keepdim=True)


class Block(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.inner = nn.Linear(dim, dim * heads)

    def forward(self, x):
        return self.inner(x).relu()


def wrong(gm, example_inputs):
    """A backend that is off by a thousandth."""
    return lambda *a: [r * 1.001 if isinstance(r, torch.Tensor) else r for r in gm(*a)]


def programs():
    values = arguments.for_function(blur)
    assert values is not None and values[0].shape == (2, 3, 32, 32)
    module, rest = arguments.for_module(Block)
    return Program("blur", blur, values), Program("block", lambda m, *a: m(*a), [module, *rest])


@pytest.mark.parametrize("mode", ["plain", "grad", "dynamic"])
def test_what_is_wrong_is_found(mode):
    for program in programs():
        assert check(program, mode) is None
        assert "instead of" in check(program, mode, wrong)


def test_what_raises_is_found():
    def refuses(gm, example_inputs):
        raise ValueError("no")

    assert "raised" in check(programs()[0], "plain", refuses)


def test_programs_that_eager_does_not_run_are_left_out():
    with pytest.raises(LookupError):
        check(Program("no", lambda x: x @ x, [torch.randn(2, 3)]), "plain")
