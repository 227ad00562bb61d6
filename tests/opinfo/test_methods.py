"""A method in a graph does what it does on a tensor: every method of torch's test database, as FX writes it.

It runs by the canonical graph, so that only what a call is taken for is compared; no kernel is made.
"""

from __future__ import annotations

import itertools
import os
import warnings

import pytest
import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map

import fuser
from tests.opinfo import database

SAMPLES = 4 if os.environ.get("FUSER_TEST_ALL") else 2
DTYPES = (torch.bool, torch.int64, torch.float32)


def graph_of(name, args, kwargs):
    """A graph that calls a method, and the tensors that it takes."""
    graph, inputs = fx.Graph(), []

    def node_of(v):
        if not isinstance(v, torch.Tensor):
            return v
        inputs.append(v)
        return graph.placeholder(f"x{len(inputs)}")

    graph.output(graph.call_method(name, *tree_map(node_of, (args, kwargs))))
    return fx.GraphModule(torch.nn.Module(), graph), inputs


def result(function, inputs):
    torch.manual_seed(0)
    return tree_leaves(function(*(x.clone() for x in inputs)))


def problem_of(name, args, kwargs):
    """What a graph does otherwise than the method; None if nothing, "" if the method does not run."""
    graph, inputs = graph_of(name, args, kwargs)
    try:
        want = result(graph, inputs)
    except Exception:
        return ""
    handle = fuser.fusion_handle(fuser.register_fusion(graph))
    with fuser.config.override(enabled=False):
        got = result(handle, inputs)
    if len(got) != len(want):
        return f"{len(got)} results: expected {len(want)}"
    pairs = [(a, b) for a, b in zip(got, want, strict=True) if isinstance(b, torch.Tensor) and not b.is_sparse]
    try:
        for a, b in pairs:
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    except AssertionError as e:
        return str(e)
    return None


def methods():
    found = {}
    for op in database.operators():
        name = getattr(op.method_variant, "__name__", op.name) if op.method_variant is not None else ""
        if name and hasattr(torch.Tensor, name) and database.undefined(op, type("", (), {"kwargs": {}})) is not None:
            found.setdefault(name, op)
    return found


def test_methods_do_what_they_do_on_tensors():
    wrong, count = [], 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, op in methods().items():
            for dtype in DTYPES:
                if dtype not in op.supported_dtypes("cpu"):
                    continue
                for sample in itertools.islice(op.sample_inputs("cpu", dtype), SAMPLES):
                    if isinstance(sample.input, torch.Tensor):
                        problem = problem_of(name, (sample.input, *sample.args), sample.kwargs)
                        count += problem is None
                        wrong += [f"{name}, {dtype}: {problem}"] if problem else []
    assert not wrong, "\n".join(wrong)
    assert count > 375 * SAMPLES


A, B, C = (torch.tensor(v) for v in ([[True, False], [False, True]], [True, False], [False, True]))


@pytest.mark.sampled(6, also=("<lambda>2",))
@pytest.mark.parametrize(
    "fn",
    [
        lambda a, b, c: a.where(b, c), lambda a, b, c: a.where(b, a), lambda a, b, c: a.where(condition=b, other=c),
        lambda a, b, c: a.where(b, other=c), lambda a, b, c: a.float().where(b, 2), lambda a, b, c: b.where(a, c),
        lambda a, b, c: torch.where(a, b, c), lambda a, b, c: a.float().polygamma(1), lambda a, b, c: a.nonzero(),
        lambda a, b, c: a.nonzero(as_tuple=True), lambda a, b, c: a.unique_consecutive(),
        lambda a, b, c: a.unique_consecutive(return_counts=True), lambda a, b, c: a.unflatten(0, (1, 2)),
    ],
)  # fmt: skip
def test_arguments_of_methods_come_where_the_operator_takes_them(fn):
    handle = fuser.fusion_handle(fuser.register_fusion(fx.symbolic_trace(fn)))
    for _ in range(2):
        for a, b in zip(tree_leaves(handle(A, B, C)), tree_leaves(fn(A, B, C)), strict=True):
            torch.testing.assert_close(a, b)
