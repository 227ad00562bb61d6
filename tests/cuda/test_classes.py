"""How many kernels different sizes take: one for each class of rows, as docs/cuda.md defines them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cuda_cases import Case

from fuser.cuda import tiles
from fuser.kernel_spec import LaunchProgram
from fuser.runtime.python_launcher import match


def norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.gelu(F.layer_norm(x, (x.shape[-1],), w, w))


def softmax(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x * w, -1)


def row_sum(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x * w).sum(-1)


def bias(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x + w) * x


def kernels(fn: Callable[..., Any], shapes: list[tuple[int, int]]) -> int:
    """Kernels that are made if the sizes come in this order."""
    made: list[LaunchProgram] = []
    for r, c in shapes:
        args = torch.empty(r, c), torch.empty(c)
        if all(match(program, args) is None for program in made):
            case = Case("", fn, lambda i, args=args: args)
            program = case.source(case.fake_args()).program
            here = tuple(dataclasses.replace(p, device_type="cpu") for p in program.inputs)
            made.append(dataclasses.replace(program, inputs=here))
            assert match(made[-1], args) is not None
    return len(made)


def gradients(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = torch.softmax(x, -1) * w
    return y, (y * x).sum(0)


SETS = {
    "lengths": [(64, 8 * k) for k in range(1, 129)],
    "odd and long lengths": [(48, 157 * k) for k in range(1, 129)],
    "numbers of rows": [(r, 1000) for r in (2, 3, 5, 16, 17, 100, 144, 255, 256, 257, 298, 1000, 5000, 20000)],
}


@pytest.mark.parametrize("fn", (norm, softmax, row_sum))
@pytest.mark.parametrize("shapes", SETS.values(), ids=SETS)
def test_one_kernel_for_each_class_of_rows(fn: Callable[..., Any], shapes: list[tuple[int, int]]) -> None:
    assert kernels(fn, shapes) == len({tiles.row_class(c) for _, c in shapes})


BY_16 = {"lengths": [(48, 16 * k) for k in range(1, 129)], "rows": [(r, 1008) for r, _ in SETS["numbers of rows"]]}


@pytest.mark.parametrize("shapes", BY_16.values(), ids=BY_16)
def test_reductions_along_rows_and_columns_have_the_classes_of_rows(shapes: list[tuple[int, int]]) -> None:
    assert kernels(gradients, shapes) == len({tiles.row_class(c) for _, c in shapes})


def test_numbers_of_rows_make_no_classes_of_elementwise_kernels() -> None:
    assert kernels(bias, [(r, 100) for r in range(2, 130)]) == 1
