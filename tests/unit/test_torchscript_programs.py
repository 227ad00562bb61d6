"""Scripted programs as FX graphs: values, dtypes, structure and errors of the script itself, or a reason for none."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from torch import nn

from fuser.errors import GraphError
from fuser.frontends.torchscript import to_fx
from tests.unit import torchscript_programs as programs

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "ignore::UserWarning")


def scripted(program):
    if inspect.isclass(program) or program.__name__ == "<lambda>":
        torch.manual_seed(0)
        program = program()
    assert callable(program)
    return torch.jit.script(program.eval() if isinstance(program, nn.Module) else program)


def difference(got, want, at="result"):
    """Where two results differ in type, structure, dtype, strides or value; None if nowhere."""
    if isinstance(want, tuple) and hasattr(want, "_fields"):
        if getattr(got, "_fields", None) != want._fields or type(got).__name__ != type(want).__name__:
            return f"{at} is a {type(got)} where {type(want)} is wanted"
    elif type(got) is not type(want):
        return f"{at} is a {type(got)} where {type(want)} is wanted"
    if isinstance(want, torch.Tensor):
        if (got.dtype, got.shape, got.stride()) != (want.dtype, want.shape, want.stride()):
            return f"{at} is {got.dtype} {got.shape} where {want.dtype} {want.shape} is wanted"
        return None if torch.equal(got.nan_to_num(7), want.nan_to_num(7)) else f"{at} has other values"
    if isinstance(want, (list, tuple, dict)):
        keys = list(want) if isinstance(want, dict) else range(len(want))
        if len(got) != len(want) or (isinstance(want, dict) and list(got) != keys):
            return f"{at} has {len(got)} items where {len(want)} are wanted"
        return next((d for k in keys if (d := difference(got[k], want[k], f"{at}[{k}]"))), None)
    same = got == want or (isinstance(want, float) and math.isnan(want) and math.isnan(got))
    return None if same else f"{at} is {got} where {want} is wanted"


def outcome(function, args):
    try:
        return function(*args), None
    except Exception as e:  # any error is an outcome to compare
        return None, e


def copied(args):
    return torch.utils._pytree.tree_map(lambda a: a.clone() if isinstance(a, torch.Tensor) else a, args)


@pytest.mark.parametrize(
    ("program", "args", "refusal"), programs.PROGRAMS,
    ids=[f"{i}-{p.__name__}" for i, (p, _, _) in enumerate(programs.PROGRAMS)],
)  # fmt: skip
def test_as_the_script(program, args, refusal):
    script = scripted(program)
    if refusal:
        with pytest.raises(GraphError, match=f"{refusal}.*torchscript_programs.py"):
            to_fx(script)
        return
    module = to_fx(script)
    want, expected = outcome(script, copied((programs.x(), *args)))
    for _ in range(2):
        got, error = outcome(module, copied((programs.x(), *args)))
        assert (error is None) == (expected is None), (error, expected, module.code)
        assert expected is not None or difference(got, want) is None, (difference(got, want), module.code)
