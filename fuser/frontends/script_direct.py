"""Fused scripts that are a single group: a call runs the handle, without TorchScript's interpreter."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fuser.frontends.script_fusion import Fused
from fuser.lazy_dataclasses import dataclass

_TYPES: dict[str, tuple[type, ...]] = {
    "TensorType": (torch.Tensor, torch.nn.Parameter), "IntType": (int,), "FloatType": (float,), "BoolType": (bool,),
}  # fmt: skip
_LETTERS = {"TensorType": "t", "IntType": "i", "FloatType": "f", "BoolType": "b"}
_MOST_TENSORS = 6  # of a call that may have parameters among them: all type combinations are listed


@dataclass(frozen=True)
class Direct:
    """How to call a handle in place of a script: for positional arguments whose types are among `kinds`.

    All other calls go to the script, which converts arguments or reports errors. `chosen` gives the handle's arguments
    from the script's; None if they are the same.
    """

    handle: Callable[..., Any]
    chosen: Callable[[tuple[Any, ...]], tuple[Any, ...]] | None
    kinds: frozenset[tuple[type, ...]]
    letters: str  # the same types for the native launcher, which makes the call itself
    order: tuple[int, ...]


def direct_call(fused: Fused) -> Direct | None:
    """How to call a fused graph's only group in place of the graph; None if the graph does anything else."""
    nodes = [n for n in fused.graph.nodes() if n.kind() != "prim::Constant"]
    if len(fused.groups) != 1 or not nodes or nodes[0].kind() != fused.groups[0].operator.name:
        return None
    call, inputs = nodes[0], list(fused.graph.inputs())
    taken = list(call.inputs())[: call.inputsSize() - (fused.groups[0].operator.number is not None)]
    if not _returns(fused.graph, call, nodes[1:]) or any(v not in inputs for v in taken):
        return None
    kinds = [v.type().kind() for v in inputs]
    if any(k not in _TYPES for k in kinds):
        return None
    order = [inputs.index(v) for v in taken]
    letters = "".join(_LETTERS[k] for k in kinds)
    return Direct(fused.groups[0].operator.handle, _choice(order, len(inputs)), _allowed(kinds), letters, tuple(order))


def _returns(graph: Any, call: Any, rest: Sequence[Any]) -> bool:
    """Whether a graph returns the results of a call as the handle does: a single one directly, several as a tuple."""
    results = list(graph.outputs())
    if call.outputsSize() == 1:
        return not rest and results == list(call.outputs())
    if [n.kind() for n in rest] != ["prim::TupleConstruct"] or results != list(rest[0].outputs()):
        return False
    named = rest[0].output().type().annotation_str.startswith("__torch__.")
    return not named and list(rest[0].inputs()) == list(call.outputs())


def _choice(order: list[int], given: int) -> Callable[[tuple[Any, ...]], tuple[Any, ...]] | None:
    if order == list(range(given)):
        return None
    if len(order) == 1:
        return operator.itemgetter(slice(order[0], order[0] + 1))
    return operator.itemgetter(*order)


def _allowed(kinds: Sequence[str]) -> frozenset[tuple[type, ...]]:
    few = kinds.count("TensorType") <= _MOST_TENSORS
    return frozenset(itertools.product(*(_TYPES[k] if few else _TYPES[k][:1] for k in kinds)))
