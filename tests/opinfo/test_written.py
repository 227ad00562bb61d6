"""Results that a graph copies into its inputs: plans store there all that each operator computes.

Some samples of each operator of torch's test database; plans are interpreted, and no kernel is made.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator

import torch

from fuser import config
from tests import compare
from tests.opinfo import database
from tests.opinfo.runner import Interpreted, Sample, call_graph, make_sample

SAMPLES, COMPARED = 6, 1
OF = 4  # operators, of which one is looked at


def calls() -> Iterator[tuple[str, Sample]]:
    """Calls of most dims."""
    for op in database.some(OF):
        dtype = next((d for d in (torch.float32, torch.int64) if d in op.supported_dtypes("cpu")), None)
        made = op.sample_inputs("cpu", dtype, requires_grad=False) if dtype else []
        samples = [make_sample(op.op, s, database.undefined(op, s)) for s in itertools.islice(made, SAMPLES)]
        samples = [s for s in samples if s.undefined == () and all(t.layout is torch.strided for t in s.tensors)]
        samples.sort(key=lambda s: -max((t.dim() for t in s.tensors), default=0))
        yield from ((database.full_name(op), sample) for sample in samples[:COMPARED])


def written(graph: torch.fx.Graph) -> torch.fx.Graph:
    """The graph with its results copied into new inputs, which it gives back."""
    *_, last = (n for n in graph.nodes if n.op == "placeholder")
    (output,) = (n for n in graph.nodes if n.op == "output")
    results = output.args[0] if isinstance(output.args[0], tuple) else (output.args[0],)
    with graph.inserting_after(last):
        targets = [graph.placeholder(f"into{i}") for i in reversed(range(len(results)))][::-1]
    with graph.inserting_before(output):
        output.args = (tuple(graph.call_method("copy_", pair) for pair in zip(targets, results, strict=True)),)
    return graph


def problems(sample: Sample) -> list[str] | None:
    """What plans do otherwise than eager; None where eager raises, or ATen or no graph runs."""
    try:
        result = sample.call(*compare.copy_inputs(sample.tensors))
        want = [result] if isinstance(result, torch.Tensor) else list(result)
        graph = written(call_graph(sample, result))
        into = [torch.zeros_like(t) for t in want]
    except Exception:
        return None
    got = Interpreted(graph, in_place=True).planned(*compare.copy_inputs(sample.tensors), *into)
    return None if got is None else compare.differences(into, want, strides=False)


def test_results_are_stored_in_inputs():
    wrong, compared = [], 0
    with torch.no_grad(), warnings.catch_warnings(), config.override(random="eager"):
        warnings.simplefilter("ignore")
        for name, sample in calls():
            found = problems(sample)
            compared += found is not None
            wrong += [f"{name}: {found[0]}"] if found else []
    assert not wrong, "\n".join(wrong)
    assert compared > 250 / OF, compared
