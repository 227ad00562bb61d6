"""Graphs in different spellings share kernels; what each gives of numbers is what its own words mean."""

from __future__ import annotations

import itertools
import operator

import pytest
import torch

import fuser
from fuser import interface
from fuser.errors import InputError

SPELLINGS = {
    "operator": lambda x: x * 3 + 1,
    "function": lambda x: torch.add(torch.mul(x, 3), 1),
    "method": lambda x: x.mul(3).add(1),
    "mixed": lambda x: torch.mul(x, 3) + 1,
    "overload": lambda x: torch.ops.aten.add.Tensor(torch.ops.aten.mul.Tensor(x, 3), 1),
    "operator function": lambda x: operator.add(operator.mul(x, 3), 1),
}


def raised(function, value):
    """The result, or the error."""
    try:
        return function(value)
    except Exception as error:
        return error


VALUES = (2.5, 4, True, torch.tensor(2.5), torch.ones(3), 2.5)


@pytest.mark.parametrize("first, second", [*itertools.permutations(SPELLINGS, 2)])
def test_each_is_what_eager_does(first, second):
    keys = [fuser.register_fusion(torch.fx.symbolic_trace(SPELLINGS[name])) for name in (first, second)]
    handles = [fuser.fusion_handle(key) for key in keys]
    assert len({id(interface.kernel_spec(key)) for key in keys}) == 1
    for value, (name, key, handle) in itertools.product(VALUES, zip((first, second), keys, handles)):
        want = raised(SPELLINGS[name], value)
        for call in (handle, lambda x, key=key: fuser.run_fusion(key, [x])[0]):
            got = raised(call, value)
            assert type(got) is type(want), (name, value, got, want)
            assert isinstance(want, Exception) or (got == want if not torch.is_tensor(want) else torch.equal(got, want))


def test_the_reason_is_kept(registry):
    keys = [fuser.register_fusion(torch.fx.symbolic_trace(SPELLINGS[name])) for name in ("function", "operator")]
    for key in keys:
        fuser.fusion_handle(key)(2.5)
    second = keys[1]
    assert sum(interface.kernel_spec(second).store.fallbacks.values()) == 2
    assert any("a number" in reason for reason in interface.kernel_spec(second).store.fallbacks)


def test_keywords_and_defaults_reach_the_own_words(registry):
    def graph(words):
        made = torch.fx.Graph()
        x, y = made.placeholder("x"), made.placeholder("y", default_value=3)
        made.output(made.call_function(words, (x, y)))
        return fuser.fusion_handle(fuser.register_fusion(made))

    functions, operators = graph(torch.mul), graph(operator.mul)
    for _ in range(2):
        assert torch.equal(functions(2.5), torch.tensor(7.5)) and operators(2.5) == 7.5 == operators(x=2.5)
        assert operators(2.5, y=4) == 10.0 and type(operators(y=4, x=2)) is int
        assert torch.equal(operators(x=torch.ones(3)), torch.full((3,), 3.0))
    with pytest.raises(InputError):
        operators(2.5, 3, 4)
