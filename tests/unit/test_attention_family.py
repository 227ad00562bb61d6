"""Attention over spellings, layouts of operands, readers of the result, dtypes and modes: as eager's."""

from __future__ import annotations

import pytest
import torch

from fuser.passes import attention
from fuser.passes import attention_providers as providers
from fuser.passes.registry import run_stage
from tests.attention_family import DTYPES, MODES, Case, problems, sampled

pytestmark = pytest.mark.usefixtures("clean")


def rewritten(module, inputs):
    run_stage("pre_grad", module)
    module.recompile()
    return module.forward


@pytest.fixture
def every_size(monkeypatch):
    """Attention of any size is rewritten."""
    monkeypatch.setattr(attention, "_MANY_KEYS", {True: 0, False: 0})
    monkeypatch.setattr(providers, "is_faster_written", lambda a: False)


@pytest.mark.sampled(45)
@pytest.mark.parametrize("seed", range(8 * len(MODES) * len(DTYPES)))
def test_samples(seed, every_size):
    """By the passes alone."""
    assert not list(problems(sampled(seed), rewritten))


@pytest.mark.sampled(56)
@pytest.mark.parametrize("seed", range(2 * len(MODES) * len(DTYPES)))
def test_samples_with_kernels(seed, every_size):
    assert not list(problems(sampled(1000 + seed)[: 4 if seed else 1], "fuser"))


ROWS, TOKENS, COLUMNS = (("rows",) * 3, ("tokens first",) * 3, ("columns",) * 3)


@pytest.mark.parametrize(
    "case",
    [
        Case("visformer", TOKENS, "none", torch.float32, "inference"),
        Case("scale_divides", TOKENS, "columns", torch.float32, "inference"),
        Case("scale_divides", TOKENS, "heads merged in channels", torch.bfloat16, "dynamic"),
        Case("einsum_to_tokens_first", ROWS, "none", torch.float32, "inference"),
        Case("einsum_to_tokens_first", COLUMNS, "none", torch.bfloat16, "training"),
    ],
    ids=str,
)
def test_strides_of_results(case, every_size):
    """A reshape of swapped dims is a view in one layout and a copy in another; an einsum's result has its own order."""
    assert not list(problems([case], rewritten))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("factor", [1, 10])
def test_rows_without_keys(factor, dtype, every_size):
    """A score does not always vanish beside the number that fills it."""

    def filled(q, k, v, keep):
        scores = (q @ k.mT).masked_fill(~keep, -1e9)
        return scores.softmax(-1) @ v

    def then_biased(q, k, v, keep):
        scores = (q @ k.mT).masked_fill(~keep, -1e9) + torch.arange(0, 1200, 100, dtype=q.dtype)
        return scores.softmax(-1) @ v

    keep = torch.rand(2, 1, 12, 12) < 0.7
    keep[1, :, 3] = False
    q, k, v = (torch.randn(2, 3, 12, 16, dtype=dtype) for _ in range(3))
    for f in (filled, then_biased):
        with torch.no_grad():
            got = torch.compile(f, backend=rewritten)(q * factor, k * factor, v, keep)
        torch.testing.assert_close(got, f(q * factor, k * factor, v, keep))
