"""Dtypes of results for operands of different dtypes, with and without dims, and numbers: those of eager's kernels."""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fuser
from fuser.errors import Unsupported
from fuser.lowering.corrections import corrected
from fuser.lowering.graph import run_meta
from fuser.lowering.registry import LOWERINGS
from tests.compare import leaves

DTYPES = (torch.float32, torch.float16, torch.float64, torch.int8, torch.bool)
FEW_DTYPES = (torch.float32, torch.float16, torch.int64)  # of three operands
NUMBERS = (2, 1.5, True)
HALF = not os.environ.get("FUSER_TEST_ALL")  # of several operands: any two dtypes meet, with and without dims


def overloads() -> Iterator[tuple[str, Any, list[str]]]:
    """Functional overloads of lowered operators that take up to three tensors or numbers, gradients left out."""
    for name in sorted(n for n in LOWERINGS if n.startswith("aten.") and n.count(".") == 1):
        packet = getattr(torch.ops.aten, name.removeprefix("aten."), None)
        for overload in [getattr(packet, o) for o in packet.overloads()] if packet is not None else ():
            given = [str(a.type) for a in overload._schema.arguments if not a.has_default_value()]
            fits = 1 <= len(given) <= 3 and "Tensor" in given and {"Tensor", "number"} >= set(given)
            random = torch.Tag.nondeterministic_seeded in overload.tags
            if fits and not random and not overload._schema.is_mutable and "backward" not in name and name != "aten.to":
                yield name, overload, given


def operands(kind: str, many: bool) -> list[Any]:
    if kind == "number":
        return list(NUMBERS)
    return [torch.ones(size, dtype=d) for d in (FEW_DTYPES if many else DTYPES) for size in ((), (3,))]


def calls(kinds: list[str]) -> Iterator[tuple[Any, ...]]:
    """Operands of these kinds."""
    for numbered in itertools.product(*(enumerate(operands(kind, len(kinds) > 2)) for kind in kinds)):
        if not (HALF and kinds[1:]) or sum(n for n, _ in numbered) % 2 == 0:
            yield tuple(operand for _, operand in numbered)


def dtypes_of(value: Any) -> list[torch.dtype]:
    return [t.dtype for t in leaves(value) if isinstance(t, torch.Tensor)]


def test_results_have_eagers_dtypes():
    wrong, compared = set(), 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, overload, kinds in overloads():
            for args in calls(kinds):
                metas = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in args]
                try:
                    want = dtypes_of(overload(*args))
                    got = dtypes_of(corrected(name, "cpu", run_meta(name, metas, {}), metas))
                except (RuntimeError, IndexError, ValueError, Unsupported):  # eager or the shape function refuses them
                    continue
                compared += 1
                if got != want:
                    wrong.add((name, str(want), str(got)))
    assert not wrong, "\n".join(map(str, sorted(wrong)))
    assert compared > 5_000 // (1 + HALF), compared


def test_addcdiv_divides_no_integers():
    graph = torch.fx.symbolic_trace(lambda x, a, b: torch.addcdiv(x, a, b) * 2)
    handle = fuser.fusion_handle(fuser.register_fusion(graph))
    for dtype in (torch.bool, torch.int32):
        with pytest.raises(RuntimeError, match="Integer division"):
            handle(torch.ones(3), torch.ones(3, dtype=dtype), torch.ones(3, dtype=dtype))


@pytest.mark.parametrize("function", [torch.sub, torch.ops.aten.sub.Tensor])
def test_truth_values_are_subtracted_from_no_number(clean, function):
    """By a named overload, too, as it stands in a graph of ATen's operators."""
    truth = torch.ones(3, dtype=torch.bool)
    handle = fuser.fusion_handle(fuser.register_fusion(torch.fx.symbolic_trace(lambda x: function(0, x) + 1)))
    compiled = torch.compile(lambda x: function(0, x) + 1, backend="fuser")
    for call in (handle, compiled):
        with pytest.raises(RuntimeError, match="Subtraction"):
            call(truth)
