# ruff: noqa: UP006, UP035 (TorchScript reads these annotations)
"""What `fuse_script` leaves to the script: its values and errors, and a reason that `graph_for` shows."""

from __future__ import annotations

from typing import Any, Dict, List

import pytest
import torch
from torch import Tensor

import fuser
from fuser.errors import InputError
from tests.unit.test_fuse_script import assert_alike
from tests.unit.test_torchscript_programs import copied, outcome

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "ignore::UserWarning")

_LIBRARY = torch.library.Library("fuser_test_reasons", "DEF")
_LIBRARY.define("odd(Tensor x) -> Tensor")
_LIBRARY.impl("odd", lambda x: x * 3 + 1, "CompositeExplicitAutograd")


def unknown_operator(x: Tensor):
    return torch.ops.fuser_test_reasons.odd(x * 2 + 1) * 2 + 1


def mutated_input(x: Tensor, y: Tensor):
    a = x * 2 + 1
    x.add_(y)
    return a, x * 2 + 1


def unsupported_types(x: Tensor, d: Dict[str, Tensor], s: List[Tensor], c: complex):
    return (x * 2 + 1) * d["a"], torch.stack(s) * 2 + 1, x * c


def anything(x: Tensor, y: Any):
    if isinstance(y, Tensor):
        return x * y + 1
    return x * 2 + 1


_X = torch.linspace(-1, 1, 12).view(3, 4)
CASES = [
    (unknown_operator, (_X,), 2, "no lowering for fuser_test_reasons.odd"),
    (mutated_input, (_X, _X + 1), 2, "aten::add_ writes one of its arguments"),
    (unsupported_types, (_X, {"a": _X}, [_X, _X], 2j), 2, "reads a complex made at run time"),
    (anything, (_X, _X), 2, "prim::isinstance cannot be translated"),
    (anything, (_X, 3), 2, "prim::isinstance"),
]


@pytest.mark.parametrize(("program", "args", "groups", "reason"), CASES, ids=[c[0].__name__ for c in CASES])
def test_what_is_left_has_a_reason(program, args, groups, reason):
    script = torch.jit.script(program)
    fused = fuser.fuse_script(script)
    given, passed = copied(args), copied(args)
    assert_alike(fused(*passed), script(*given))
    assert_alike(passed, given)
    assert len(fused.fusion.groups) == groups
    told = fuser.debug.graph_for(fused)
    assert reason in told.partition("not fused:")[2]
    assert "test_script_reasons.py" in told


def test_what_no_call_of_the_script_takes():
    script = torch.jit.script(mutated_input)
    fused = fuser.fuse_script(script)
    for args in ((), (_X,), (_X, "a"), (_X, _X[:2].clone()), (None, _X)):
        _, expected = outcome(script, copied(args))
        _, error = outcome(fused, copied(args))
        assert expected is not None and type(error) is type(expected)


def test_what_is_no_script():
    def wrong(x: Tensor):
        return x + "a"

    with pytest.raises(InputError, match="expected what torch.jit.script"):
        fuser.fuse_script(wrong)
    with pytest.raises(RuntimeError):  # it has no script to fuse
        fuser.fuse_script(torch.jit.script(wrong))
