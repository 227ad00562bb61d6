"""Results that are views of an input which the program writes.

AOTAutograd returns a view of the input itself to the caller. It takes sizes, strides and the offset of that view from
the traced graph's result, which is a view of the input's new content: a tensor of its own, perhaps with another
layout. With symbolic sizes AOTAutograd does not replay the views, and the caller would get the wrong elements. So the
views are replayed in the graph: the result becomes a view of the input, with its layout. Its content is not read, so
the new content itself is no result, and a kernel may write it into the input.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from fuser.passes.sources import NOTES


class CannotBeViewed(Exception):
    """A result for which AOTAutograd would make another view of an input than eager does."""


def view_written_inputs(module: fx.GraphModule, with_tokens: bool) -> int:
    """Turn results that view a written input's new content into views of the input; returns their number.

    `module` is AOTAutograd's graph of a forward, while it is compiled, with the tokens of effects or without. Raises
    `CannotBeViewed` for a result of another dtype than the input's: without a replay AOTAutograd takes its strides for
    those of the input's dtype.
    """
    meta: Any = getattr(torch._guards.TracingContext.try_get(), "fw_metadata", None)
    if meta is None:
        return 0
    tokens = len(meta.tokens) if with_tokens else 0
    graph = module.graph
    placeholders = [n for n in graph.nodes if n.op == "placeholder"][tokens:]
    output = graph.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    first = tokens + meta.num_mutated_inp_runtime_indices
    if len(placeholders) != len(meta.input_info) or len(results) < first + len(meta.output_info):
        return 0  # inputs are tensor subclasses, of several tensors each, or come with random states
    changed = 0
    for at, info in enumerate(meta.output_info, first):
        views = getattr(info.view_meta_sequence, "sequence", ())
        if info.output_type.name != "alias_of_input" or not views:
            continue
        source = placeholders[info.base_idx]
        if results[at].meta["val"].dtype is not source.meta["val"].dtype:
            if any(v.has_symbolic_inputs for v in views):
                raise CannotBeViewed("a result is a view of an input by another dtype, of symbolic sizes")
            continue
        if meta.input_info[info.base_idx].mutates_data:
            results[at] = _replayed(graph, source, views, results[at])
            changed += 1
    if changed:
        output.args = (tuple(results),)
        module.recompile()
    return changed


def _replayed(graph: fx.Graph, source: fx.Node, views: Any, instead: fx.Node) -> fx.Node:
    """The node of `source` seen through `views`, before the graph's output, with the source lines of `instead`."""
    value, notes = source.meta["val"], {k: instead.meta[k] for k in NOTES if k in instead.meta}
    with graph.inserting_before(graph.output_node()), value.fake_mode, _Recording(graph, source, notes) as recording:
        seen = torch._C._functionalization.apply_view_meta_sequence(value, views)
    node: fx.Node = recording.nodes[id(seen)]
    return node


class _Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Each operator called on values of a graph's nodes becomes a node at the graph's insertion point."""

    def __init__(self, graph: fx.Graph, source: fx.Node, notes: dict[str, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph, self.notes = graph, notes
        self.nodes = {id(source.meta["val"]): source}
        self.kept: list[Any] = []  # while an id stands for a value

    def __torch_dispatch__(self, target: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = target(*args, **(kwargs or {}))
        node = self._add(target, fx.node.map_aggregate(args, self._spelled), found, dict(kwargs or {}))
        for at, value in enumerate(found) if isinstance(found, (list, tuple)) else ():
            self._add(operator.getitem, (node, at), value)
        return found

    def _add(self, target: Any, args: Any, value: Any, kwargs: dict[str, Any] | None = None) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs or {})
        node.meta = {**self.notes, "val": value}
        self.nodes[id(value)] = node
        self.kept.append(value)
        return node

    def _spelled(self, value: Any) -> Any:
        """An operator's argument in the form of the graph."""
        if isinstance(value, torch.Tensor):
            return self.nodes[id(value)]
        return _size(self.graph, value) if isinstance(value, torch.SymInt) else value


def _size(graph: fx.Graph, value: torch.SymInt) -> fx.Node | int:
    """A symbolic size as a node: an existing one, or arithmetic on the graph's symbols."""
    from torch.utils._sympy.interp import sympy_interp  # it imports sympy: not before a kernel's compiler is warm
    from torch.utils._sympy.reference import PythonReferenceAnalysis

    expression = value.node.expr
    if expression.is_number:
        return int(expression)
    known: dict[Any, fx.Proxy] = {}
    for node in graph.nodes:
        if isinstance(node.meta.get("val"), torch.SymInt):
            known.setdefault(node.meta["val"].node.expr, fx.Proxy(node))
    if expression not in known:
        before = set(graph.nodes)
        known[expression] = sympy_interp(PythonReferenceAnalysis, known, expression)
        for node in graph.nodes:
            if node not in before:
                node.meta["val"] = node.target(*fx.node.map_arg(node.args, lambda n: n.meta["val"]))
    return known[expression].node
