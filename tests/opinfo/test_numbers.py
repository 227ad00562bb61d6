"""Numbers and flags that are inputs of a graph: what an operator does with them is what eager does.

Each number of the calls of torch's test database is an input, with some values each. Plans are interpreted, and no
kernel is made.
"""

from __future__ import annotations

import itertools
import math
import operator
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import fuser
from tests import compare
from tests.opinfo import database
from tests.opinfo.runner import Interpreted

SAMPLES, MOST_ELEMENTS = 4, 500
OF = 4  # operators, of which one is looked at
CRASHES = ("batch_norm", "ldl_solve", "lu_unpack")  # in eager, for a flag that does not fit the tensors
OTHERS = {bool: lambda flag: [not flag], int: lambda n: [n + 1, -n], float: lambda x: [2.0, math.inf]}


@dataclass(frozen=True)
class Numbered:
    """A call whose argument `at`, of all leaves, is a number: its function, leaves, and how these are nested."""

    function: Any
    flat: Sequence[Any]
    spec: Any
    at: int

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The call's tensors, in order."""
        return [v for v in self.flat if isinstance(v, torch.Tensor)]

    def arguments(self, number: Any, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with another number and other tensors."""
        own = iter(tensors)
        values = [next(own) if isinstance(v, torch.Tensor) else v for v in self.flat]
        args, kwargs = pytree.tree_unflatten([*values[: self.at], number, *values[self.at + 1 :]], self.spec)
        return tuple(args), kwargs

    def __call__(self, number: Any, *tensors: Any) -> Any:
        args, kwargs = self.arguments(number, tensors)
        return self.function(*args, **kwargs)

    def graph(self, result: Any, number: Any = None) -> torch.fx.Graph:
        """The call as a graph of its number, if none is given, and its tensors."""
        graph = torch.fx.Graph()
        number = graph.placeholder("number") if number is None else number
        tensors = [graph.placeholder(f"x{i}") for i in range(len(self.tensors))]
        node = graph.call_function(self.function, *self.arguments(number, tensors))
        results = range(len(result)) if isinstance(result, (tuple, list)) else ()
        graph.output([graph.call_function(operator.getitem, (node, i)) for i in results] or node)
        return graph


def calls(*dtypes: torch.dtype) -> Iterator[tuple[str, Numbered]]:
    """One call of each form with a number, by the operator's name, in the first of the dtypes that it takes."""
    for op in database.some(OF):
        dtype = next((d for d in dtypes if d in op.supported_dtypes("cpu")), None)
        defined = database.undefined(op, torch.testing._internal.opinfo.core.SampleInput(None)) == ()
        fit = dtype and defined and not any(name in op.name for name in CRASHES)
        made = op.sample_inputs("cpu", dtype, requires_grad=False) if fit else []
        seen = set()
        for sample in itertools.islice(made, SAMPLES):
            flat, spec = pytree.tree_flatten(((sample.input, *sample.args), sample.kwargs))
            tensors = [v for v in flat if isinstance(v, torch.Tensor)]
            if all(type(t) is torch.Tensor and t.layout is torch.strided for t in tensors):
                forms = {(str(spec), i, type(v)): i for i, v in enumerate(flat) if type(v) in (bool, int, float)}
                small = sum(t.numel() for t in tensors) <= MOST_ELEMENTS
                for form, at in forms.items() if small else ():
                    if form not in seen:
                        seen.add(form)
                        yield f"{database.full_name(op)}, {form[2].__name__} {at}", Numbered(op.op, flat, spec, at)


def problems(call: Numbered, number: Any) -> list[str] | None:
    """What a graph's plans do otherwise than eager; None where eager raises or ATen runs."""
    own, mine = (compare.copy_inputs(call.tensors) for _ in range(2))
    try:
        want = call(number, *own)
        if not all(isinstance(v, torch.Tensor) for v in compare.leaves(want)):
            return None
        graph = call.graph(want)
        plans = Interpreted(graph)
    except Exception:  # eager does not take the number, or no graph does
        return None
    got = plans.planned(number, *mine)
    if got is None:
        return None
    return compare.differences(got, compare.leaves(want), strides=False) + compare.differences(mine, own)


def test_numbers_and_flags_are_inputs():
    wrong, flags, numbers = [], 0, 0
    with warnings.catch_warnings(), fuser.config.override(random="eager"):
        warnings.simplefilter("ignore")
        for name, call in calls(torch.float32, torch.int64):
            value = call.flat[call.at]
            for number in dict.fromkeys((value, *OTHERS[type(value)](value))):
                found = problems(call, number)
                flags += type(value) is bool and found is not None
                numbers += type(value) is not bool and found is not None
                wrong += [f"{name}: {number!r}: {found[0]}"] if found else []
    assert not wrong, "\n".join(wrong)
    assert flags > 80 / OF and numbers > 200 / OF, (flags, numbers)


REFUSED = {int: (300, -129, 256), float: (1e39, -1e5, math.nan, -1.0)}
SIZED = tuple("arange linspace logspace repeat expand broadcast tile eye ones zeros nn.functional.interpolate".split())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8, torch.uint8], ids=str)
def test_numbers_that_eager_refuses_are_in_no_kernel(dtype):
    wrong, refused = [], 0
    with warnings.catch_warnings(), fuser.config.override(random="eager"):
        warnings.simplefilter("ignore")
        for name, call in calls(dtype):
            value = call.flat[call.at]
            for number in REFUSED.get(type(value), ()) if not name.startswith(SIZED) else ():
                says = refusal(call, value, number)
                refused += says is not None
                wrong += [f"{name}: {number!r}: {says}"] if says else []
    assert not wrong, "\n".join(wrong)
    assert refused > 5 / OF, refused


def refusal(call: Numbered, value: Any, number: Any) -> str | None:
    """What eager says against a number if plans take it, "" if they do not; None if eager takes the number."""
    try:
        result = call(value, *compare.copy_inputs(call.tensors))
    except Exception:
        return None
    try:
        call(number, *compare.copy_inputs(call.tensors))
    except Exception as error:
        if "not implemented for" in str(error):
            return None
        try:
            plans = Interpreted(call.graph(result, number))
        except Exception:  # no graph takes it
            return ""
        return str(error) if plans.planned(*compare.copy_inputs(call.tensors)) is not None else ""
    return None


def test_a_handle_asks_for_another_kernel_for_another_flag():
    graph = torch.fx.symbolic_trace(lambda x, flag: x.sum(1, keepdim=flag) * 2)
    handle, x = fuser.fusion_handle(fuser.register_fusion(graph)), torch.randn(3, 4)
    for flag in (True, False, True):
        got, want = handle(x, flag), x.sum(1, keepdim=flag) * 2
        assert got.shape == want.shape and torch.allclose(got, want)
