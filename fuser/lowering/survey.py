"""Finds all calls of a graph that cannot be lowered, so that the graph can be split around them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field
from typing import Any

import torch

from fuser import config
from fuser.canonical.graph import CanonicalGraph, CanonicalNode, Ref, map_refs
from fuser.errors import Unsupported, is_defect
from fuser.ir.nodes import TensorBox
from fuser.lazy_dataclasses import dataclass
from fuser.lowering import graph as lowering
from fuser.lowering.graph import State
from fuser.lowering.host import is_host
from fuser.lowering.inputs import new_input
from fuser.reasons import because


class _Nothing:
    """Represents a value that is not fused, or the meta of a result without a shape function."""


NOTHING = _Nothing()


@dataclass
class Survey:
    """Why nodes cannot be lowered, by index; and each value as a meta tensor, a number, a tuple, or `NOTHING`."""

    refused: dict[int, str] = field(default_factory=dict)
    metas: list[Any] = field(default_factory=list)


def survey(graph: CanonicalGraph, examples: Sequence[Any], numerics: str = "fast") -> Survey:
    """Lower `graph` for inputs like `examples`, and go on after each refusal.

    The result of a refused call becomes an additional input. A call is skipped if one of its arguments is not known.
    """
    state = lowering.begin(graph, examples, numerics, refused=_not_fused)
    surveyor = _Surveyor(state, Survey(metas=state.metas), itertools.count(len(graph.nodes)))
    with torch._C.DisableTorchFunction():
        for node in graph.calls:
            state.add(node, *surveyor.value(node))
        if not any(v is NOTHING for v in state.values):
            lowering.place_outputs(state, surveyor.found.refused)
    for index in [i for i in surveyor.found.refused if i < graph.n_inputs]:
        del surveyor.found.refused[index]
    return surveyor.found


def _not_fused(example: Any) -> tuple[Any, Any]:
    if not isinstance(example, torch.Tensor):
        return NOTHING, NOTHING
    return NOTHING, torch.empty_strided(example.shape, example.stride(), dtype=example.dtype, device="meta")


@dataclass(frozen=True)
class _Surveyor:
    """Lowers the nodes of a graph one by one. `numbers` are the numbers of inputs that replace results."""

    state: State
    found: Survey
    numbers: Iterator[int]

    def value(self, node: CanonicalNode) -> tuple[Any, Any]:
        """Value and meta of the next node."""
        state, refused = self.state, self.found.refused
        if any(state.metas[i] is NOTHING for i in node.refs()):
            return NOTHING, NOTHING
        known = not any(state.values[i] is NOTHING for i in node.refs())
        if is_host(node.op) and not known:
            return NOTHING, NOTHING
        try:
            if known:
                return lowering.lower_node(state, node)
            refused[node.index] = self._about_dtypes(node)
        except Exception as e:
            if is_defect(e) and config.strict:
                raise
            refused[node.index] = (
                e.reason if isinstance(e, Unsupported) else because("defect", f"a defect of fuser, {e}")
            )
        try:
            return self._result(node)
        except Exception:
            return NOTHING, NOTHING

    def _about_dtypes(self, node: CanonicalNode) -> str:
        metas = [m for i in node.refs() for m in lowering.leaves(self.state.metas[i]) if isinstance(m, torch.Tensor)]
        dtypes = [str(m.dtype) for m in metas if not self.state.ctx.takes(m.dtype)]
        return (
            because("dtype", f"a tensor has dtype {dtypes[0]}, which is not fused")
            if dtypes
            else because("follows", "it reads what is not fused")
        )

    def _result(self, node: CanonicalNode) -> tuple[Any, Any]:
        """The result of a refused call, as an input of the same sizes. Raises without a shape function."""
        metas = self.state.metas
        args, kwargs = (map_refs(v, lambda r: metas[r.index]) for v in (node.args, dict(node.kwargs)))
        if node.op == "getitem":
            meta = args[0][args[1]]
        else:
            device = self.state.ctx.target.like
            meta = lowering.run_meta(node.op, on_meta(args), on_meta(kwargs), fused=False, device=device)
        for i in node.refs():  # an in-place operator may have changed its argument's sizes
            box = self.state.values[i]
            if isinstance(box, TensorBox) and tuple(map(self.state.ctx.hint, box.size)) != tuple(metas[i].shape):
                self.state.values[i] = self._stand_in(metas[i])
        return self._stand_in(meta), meta

    def _stand_in(self, meta: Any) -> Any:
        if isinstance(meta, (tuple, list)):
            made = [self._stand_in(m) for m in meta]
            return NOTHING if any(m is NOTHING for m in made) else made
        try:
            return new_input(self.state.ctx, next(self.numbers), meta)[1]
        except Unsupported:
            return NOTHING


def on_meta(value: Any) -> Any:
    """Arguments with devices replaced by "meta"."""
    if isinstance(value, torch.device):
        return torch.device("meta")
    if isinstance(value, dict):
        return {k: on_meta(v) for k, v in value.items() if k != "pin_memory"}
    return type(value)(map(on_meta, value)) if type(value) in (tuple, list) else value


# -- one call by itself ------------------------------------------------------------------------------------------------
def alone(graph: CanonicalGraph, index: int, metas: Sequence[Any]) -> tuple[CanonicalGraph, list[Any]] | None:
    """A call of `graph` as a graph of its own, with its inputs; None unless inputs and results are tensors or numbers.

    Results may be copies: the graph is for what the call computes, not for aliasing.
    """
    node = graph.nodes[index]
    refs = list(dict.fromkeys(node.refs()))
    values = metas[index] if isinstance(metas[index], (tuple, list)) else [metas[index]]
    if not all(isinstance(metas[i], (torch.Tensor, int, float)) for i in refs):
        return None
    if not values or not all(isinstance(v, torch.Tensor) for v in values):
        return None
    new: Callable[[Ref], Ref] = lambda r: Ref(refs.index(r.index))  # noqa: E731
    n = len(refs)
    call = CanonicalNode(n, node.op, map_refs(node.args, new), map_refs(node.kwargs, new))
    nodes = [*(CanonicalNode(i, "input") for i in range(n)), call]
    if isinstance(metas[index], (tuple, list)):
        nodes += [CanonicalNode(n + 1 + i, "getitem", (Ref(n), i)) for i in range(len(values))]
    output = tuple(Ref(i) for i in range(n + 1, len(nodes))) or Ref(n)
    return CanonicalGraph(tuple(nodes), n, output, functional=True), [metas[i] for i in refs]


__all__ = ["NOTHING", "Survey", "alone", "survey"]
