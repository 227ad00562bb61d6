"""What a call is compiled to does not depend on where torch makes new tensors: every operator's own samples."""

from __future__ import annotations

import itertools
import os
import warnings

import pytest
import torch

from fuser import compiler, pipeline
from fuser.arguments import home_of, why_unfit
from fuser.canonical import canonicalize
from fuser.errors import Unsupported
from tests.opinfo import database
from tests.opinfo.runner import aten_graph, make_sample

OF = 6  # operators, of which one is looked at
SAMPLES = 2 if os.environ.get("FUSER_TEST_ALL") else 1


def graphs():
    """Graphs that are fit for kernels, with their arguments."""
    for op in database.some(OF):
        for dtype in {torch.float32} & op.supported_dtypes("cpu"):
            for sample in itertools.islice(_samples(op, dtype), SAMPLES):
                try:
                    made = make_sample(op, sample)
                    registered = canonicalize(aten_graph(made, True), True)
                except Exception:
                    continue
                args = (*registered.bound, *made.tensors)
                if not registered.blocked and why_unfit(args, home_of(registered.graph)) is None:
                    yield op.name, registered.graph, args


def _samples(op, dtype):
    try:
        yield from op.sample_inputs("cpu", dtype)
    except Exception:  # that needs what is not installed
        return


@pytest.mark.parametrize("device", ["meta"])
def test_the_default_device_makes_no_constants(device):
    backend, wrong, count = compiler.find_backend("cpu"), [], 0
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        for name, graph, args in graphs():
            try:
                want = pipeline.generate(graph, args, backend).text
            except Unsupported:
                continue
            count += 1
            try:
                with torch.device(device):
                    got = pipeline.generate(graph, args, backend).text
            except Exception as e:
                wrong.append(f"{name}: {e}")
            else:
                wrong += [name] if got != want else []
    assert not wrong, "\n".join(wrong)
    assert count > 400 / OF
