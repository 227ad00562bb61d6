"""A fusion's IR as FX modules that run, and its stages as one object."""

from __future__ import annotations

import pytest
import torch

import fuser
from fuser import errors
from fuser.debug.opening import lowered_to_fx
from fuser.debug.reference import interpret_lowered
from tests.backend.reference_cases import CASES
from tests.unit.test_ir_parser import MORE, lowered_of


@pytest.mark.parametrize("part", range(4))
def test_modules_give_what_the_interpreter_gives(part):
    for name, (fn, *args) in list({**CASES, **MORE}.items())[part::4]:
        lowered, every = lowered_of(fn, *args)
        module = lowered_to_fx(lowered, single=False)
        module.graph.lint()
        want = interpret_lowered(lowered, every)
        got = module(*every)
        for a, b in zip(got, want, strict=True):
            assert a.dtype is b.dtype and a.stride() == b.stride(), name
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def fusion(function, *args) -> int:
    key = fuser.register_fusion(torch.fx.symbolic_trace(function))
    fuser.run_fusion(key, list(args))
    return key


X, Y = torch.randn(6, 40), torch.randn(6, 40)


def test_a_module_runs_for_other_sizes_and_prints():
    key = fusion(lambda x, y: torch.softmax(torch.relu(x * y + 1), -1), X, Y)
    module = fuser.debug.to_fx(key)
    a, b = torch.randn(3, 70), torch.randn(3, 70)
    torch.testing.assert_close(module(a, b), fuser.run_fusion(key, [a, b])[0])
    assert all(word in module.code for word in ("fx_ops_relu(", "fx_reduce(", "buf0"))


def test_the_body_of_a_loop_is_a_function_of_its_variables():
    key = fusion(lambda x, y: torch.sin(x) * y, X, Y)
    (name,) = (b for b in str(fuser.debug.trace(key).ir).split() if b == "buf1:")
    module = fuser.debug.loop_to_fx(key, name[:-1])
    assert [n.target for n in module.graph.nodes if n.op == "placeholder"][:2] == ["i0", "i1"]
    taken = {"i0": 2, "i1": torch.arange(40), "in0": X, "in1": Y, "buf0": X.sin()}
    names = [n.target for n in module.graph.nodes if n.op == "placeholder"]
    torch.testing.assert_close(module(*(taken[n] for n in names)), (X.sin() * Y)[2])
    with pytest.raises(errors.GraphError, match="has no loop 0 of 'buf9'"):
        fuser.debug.loop_to_fx(key, "buf9")


def test_a_trace_has_every_stage():
    key = fusion(lambda x, y: torch.relu(x * y + 1).sum(-1), X, Y)
    found = fuser.debug.trace(key)
    text = str(found)
    at = [text.index(part) for part in ("aten.relu", "buf0: float32", "kernel red_sum", 'extern "C" void k0_red_sum')]
    assert at == sorted(at) and len(found.plans) == 1 == len(found.sources)
    with pytest.raises(errors.GraphError, match="was compiled for 1 classes"):
        fuser.debug.trace(key, 1)
