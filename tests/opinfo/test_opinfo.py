"""A part of the operators' database; `make opinfo` runs all of it.

Every operator, one sample of one or two dtypes, by the interpreter; some through kernels and through torch.compile.
"""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.opinfo import database, runner

SHARES = 8
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    OPERATORS = database.operators()
KERNELS = (
    "add", "clamp", "where", "nn.functional.gelu", "sum", "amax", "argmax", "softmax.with_dtype", "var",
    "nn.functional.layer_norm", "cat", "index_select", "gather", "nn.functional.embedding", "tril", "roll",
    "nn.functional.cross_entropy", "cumsum", "select_scatter", "expand",
)  # fmt: skip
COMPILED = ("mul", "view", "split", "scatter_add", "index_put", "sort", "nn.functional.batch_norm", "fill")


def run(op, dtypes, samples: int, route: str) -> list[str]:
    wrong = []
    for dtype in [d for d in dtypes if d in database.dtypes_of(op)][:1]:
        for n, sample in enumerate(database.samples_of(op, dtype, samples)):
            outcome = runner.run(runner.make_sample(op.op, sample, database.is_undefined(op)), route)
            if outcome.status in (runner.WRONG, runner.REFUSED):
                wrong.append(f"{database.full_name(op)} {dtype} sample {n} by {route}: {outcome}")
    return wrong


@pytest.mark.parametrize("share", range(SHARES))
def test_every_operator_by_the_interpreter(share):
    wrong = []
    for op in OPERATORS[share::SHARES]:
        if database.family_of(op):
            wrong += run(op, (torch.float32, torch.int64, torch.bool), 1, "plans")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", KERNELS)
def test_operators_by_kernels(name):
    op = next(op for op in OPERATORS if database.full_name(op) == name)
    wrong = run(op, (torch.float32,), 2, "call") + run(op, (torch.bfloat16, torch.int64), 1, "copies")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", COMPILED)
def test_operators_through_torch_compile(name):
    op = next(op for op in OPERATORS if database.full_name(op) == name)
    wrong = run(op, (torch.float32,), 2, "compile")
    assert not wrong, "\n".join(wrong)
