"""Strides of every function's results, in every kind of memory: what the package says is what eager does.

FUSER_STRIDES=full compares all samples of torch's database in all layouts, not some of them. FUSER_TEST_DEVICE=cuda
compares what a GPU's kernels and the package's for CUDA give.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fuser.arguments import home_of, why_unfit
from fuser.canonical import canonicalize
from fuser.codegen.program import result_strides
from fuser.errors import Unsupported
from fuser.kernel_spec import memory_order
from fuser.lowering.graph import lower_graph
from fuser.lowering.registry import supports
from fuser.lowering.shapes import dense_strides
from tests.compare import copy_inputs, leaves
from tests.device import test_device
from tests.opinfo.database import full_name, operators
from tests.opinfo.runner import Sample, call_graph, make_sample
from tests.unit.memory_layouts import LAYOUTS, in_layouts, some_layouts

FULL = os.environ.get("FUSER_STRIDES") == "full"
SAMPLES, PER_SAMPLE = (None, len(LAYOUTS)) if FULL else (1, 1)
# Eager reads outside of tensors whose sizes do not fit, or crashes on tensors without elements. On CUDA a place out of
# range ends all that the process does there: nothing is cut.
UNCUT = ("batch_norm", "lu_unpack", "linalg", "geqrf", "ormqr", "householder", "segment", "unpool", "embedding_bag")


def calls() -> Iterator[tuple[str, Sample]]:
    """Each operator's samples, those of most dims, in some layouts: its name with the layout, and the call."""
    for op in operators():
        dtypes = op.supported_dtypes(test_device())
        dtype = next((d for d in (torch.float32, torch.int64, torch.bool) if d in dtypes), None)
        made = op.sample_inputs(test_device(), dtype, requires_grad=False) if dtype else []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = [make_sample(op.op, s) for s in itertools.islice(made, None if FULL else 5)]
        found = [s for s in found if all(type(t) is torch.Tensor and t.layout is torch.strided for t in s.tensors)]
        if not any(is_lowered(sample) for sample in found):
            continue
        found.sort(key=lambda s: -max((t.dim() for t in s.tensors), default=0))
        for i, sample in enumerate(found[:SAMPLES]):
            layouts = some_layouts((full_name(op), i), PER_SAMPLE)
            cut = test_device() == "cpu" and not any(word in op.name for word in UNCUT)
            for name, tensors in in_layouts(sample.tensors, layouts, cut):
                yield f"{full_name(op)}: {name}", dataclasses.replace(sample, tensors=tensors)


def is_lowered(sample: Sample) -> bool:
    """Whether each operator of a call has a lowering."""
    if not hasattr(sample.function, "__name__"):
        return False
    registered = canonicalize(call_graph(sample, None), False)
    return not registered.blocked and all(supports(n.op) is None or "." not in n.op for n in registered.graph.calls)


def lowered_strides(sample: Sample, result: Any) -> list[tuple[int, ...]] | None:
    """The strides that the results of a call's kernel will have; None where ATen makes them."""
    registered = canonicalize(call_graph(sample, result), False)
    args = (*registered.bound, *sample.tensors)
    if registered.blocked or why_unfit(args, home_of(registered.graph)):
        return None
    try:
        lowered = lower_graph(registered.graph, args)
    except Unsupported:
        return None
    buffers = {b.name: b for b in lowered.ctx.buffers}
    return [
        args[at].stride() if kind == "input" else tuple(map(lowered.ctx.hint, result_strides(lowered.ctx, buffers[at])))
        for kind, at in lowered.outputs
    ]


def differs(want: torch.Tensor, got: tuple[int, ...]) -> bool:
    """Whether strides that say where elements are differ; of images all, by which kernels tell channels-last memory.

    A stride in a dim of one element that is of no order of dims, as a piece of a tensor has it, tells nothing.
    """
    if not want.numel():
        return False
    size, strides = tuple(want.shape), want.stride()
    order = memory_order(size, strides)
    all_tell = len(size) > 3 and order is not None and dense_strides(size, order) == strides
    return any(a != b for n, a, b in zip(size, strides, got) if n > 1 or all_tell)


@pytest.mark.filterwarnings("ignore")
def test_results_of_kernels_have_eagers_strides():
    compared, wrong = 0, []
    for name, sample in calls():
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                result = sample.call(*copy_inputs(sample.tensors))
            except Exception:  # whatever eager has against the arguments
                continue
            want = [t for t in leaves(result) if isinstance(t, torch.Tensor)]
            if not want or any(t.layout is not torch.strided for t in want):
                continue
            got = lowered_strides(sample, result)
        if got is not None:
            compared += 1
            wrong += [(name, t.stride(), g) for t, g in zip(want, got) if differs(t, g)]
    names = sorted({name.split(": ")[0] for name, *_ in wrong})
    assert not wrong, (len(names), names, wrong[:4])
    assert compared > 333 * PER_SAMPLE
