"""No pass changes how a result is laid out: every operator with a gradient, on inputs that are not row-major.

`config.check_passes` compares shapes and strides of a graph's results before and after each pass. No kernel is made.
"""

from __future__ import annotations

import itertools
import warnings

import torch
from torch.utils._pytree import tree_leaves

import fuser
from fuser import compiler, config
from fuser.errors import Unsupported
from fuser.reasons import because
from tests.opinfo import database
from tests.opinfo.runner import call_graph, make_sample

OF = 24  # operators, of which one is looked at


def turned(x):
    """A copy whose first and last dimensions have changed places in memory."""
    return x.detach().clone().transpose(0, -1).contiguous().transpose(0, -1) if x.dim() > 1 else x.detach().clone()


def samples():
    for op in database.some(OF):
        if torch.float32 not in op.supported_dtypes("cpu") or not op.supports_autograd:
            continue
        try:
            for sample in itertools.islice(op.sample_inputs("cpu", torch.float32), 20):
                made = make_sample(op.op, sample)
                if any(v.dim() > 1 and min(v.shape) > 1 for v in made.tensors):
                    yield op.name, made
                    break
        except Exception:  # that needs what is not installed
            continue


def run(sample, result=None):
    """The call of a sample and its backward; with `result`, as a graph through AOTAutograd."""
    inputs = [turned(x) for x in sample.tensors]
    for x in inputs:
        x.requires_grad_(x.is_floating_point())
    call = sample.call
    if result is not None:
        call = fuser.backend(torch.fx.GraphModule(torch.nn.Module(), call_graph(sample, result)), inputs)
    torch.manual_seed(0)
    results = call(*inputs)
    found = [v for v in tree_leaves(results) if isinstance(v, torch.Tensor) and v.requires_grad]
    if found:
        torch.autograd.grad([v.sum() for v in found], [x for x in inputs if x.requires_grad], allow_unused=True)
    return results


def test_passes_keep_strides(registry, monkeypatch):
    def no_code(self, *args):
        raise Unsupported(because("backend", "graphs alone are looked at"))

    monkeypatch.setattr(compiler.CpuBackend, "codegen", no_code)
    wrong, count, ran = [], 0, 0
    with warnings.catch_warnings(), config.override(check_passes=True, cache_dir=""):
        warnings.simplefilter("ignore")
        for name, sample in samples():
            try:
                result = run(sample)
            except Exception:
                continue
            count += 1
            try:
                run(sample, result)
                ran += 1
            except Exception as e:  # others are torch's own
                wrong += [f"{name}: {e}"] if "PassError" in f"{type(e).__name__} {e}" else []
    assert not wrong, "\n".join(wrong)
    assert ran > 200 / OF and ran > 0.8 * count
