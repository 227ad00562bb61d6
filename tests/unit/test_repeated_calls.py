"""Every operator with several results, called twice: results share memory where eager's do, and nowhere else.

FUSER_TEST_ALL=1 takes all operators of torch's database, not some of them.
"""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Iterator

import pytest
import torch

from fuser.frontends.dynamo import fuser_backend
from tests.compare import leaves
from tests.opinfo.database import full_name, operators
from tests.opinfo.runner import Sample, make_sample

FULL = os.environ.get("FUSER_TEST_ALL") == "1"
SOME = {"sort", "split", "unbind", "var_mean", "frexp", "max.reduction_with_dim"}


def _samples() -> Iterator[tuple[str, Sample]]:
    """By name the first call of each operator that gives several tensors."""
    for op in operators():
        if torch.float32 not in op.supported_dtypes("cpu") or not (FULL or full_name(op) in SOME):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for made in itertools.islice(op.sample_inputs("cpu", torch.float32, requires_grad=False), 3):
                sample = make_sample(op.op, made)
                if _gives_several(sample):
                    yield full_name(op), sample
                    break


def _gives_several(sample: Sample) -> bool:
    if not all(type(t) is torch.Tensor and t.layout is torch.strided for t in sample.tensors):
        return False
    try:
        return len(_tensors(sample.call(*(t.clone() for t in sample.tensors)))) > 1
    except Exception:  # whatever eager has against them: some need a GPU, or the memory of a larger tensor
        return False


def _tensors(result: object) -> list[torch.Tensor]:
    return [t for t in leaves(result) if isinstance(t, torch.Tensor)]


def _shared(tensors: list[torch.Tensor]) -> list[int]:
    """For each tensor the first one in the same memory."""
    places = [t.untyped_storage().data_ptr() for t in tensors]
    return [places.index(p) for p in places]


SAMPLES = dict(_samples())


@pytest.mark.sampled(6)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", SAMPLES)
def test_results_are_as_far_apart_as_in_eager(name, requires_grad, clean):
    sample = SAMPLES[name]

    def program(weight, *inputs):
        """Gradients of the last result alone keep the others in the training route."""
        called = [sample.call(*inputs), sample.call(*inputs), sample.call(*(x * 1 for x in inputs))]
        return [*(t for results in called for t in _tensors(results)), weight * 2]

    inputs = [t.clone().requires_grad_(requires_grad and t.is_floating_point()) for t in sample.tensors]
    weight = torch.ones(2, requires_grad=True)
    want = program(weight, *inputs)
    if not all(t.numel() for t in want):
        pytest.skip("tensors without elements have no memory")
    got = torch.compile(program, backend=fuser_backend)(weight, *inputs)
    assert _shared(got) == _shared(want)


def test_the_operators_are_there():
    assert set(SAMPLES) >= SOME
