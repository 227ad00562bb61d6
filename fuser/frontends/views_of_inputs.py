"""Results that are views of an input which the program writes.

AOTAutograd gives the caller a view of the input itself. It reads sizes, strides and the offset of that view from the
traced graph's result, which is a view of the input's new content: a tensor of its own that may be laid out otherwise.
Where sizes are symbolic and the views cannot be replayed, the caller would get the wrong elements. So the result
becomes a view of the input, whose layout it then has. Its content is not read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fuser.passes.classify import is_view
from fuser.passes.hints import same


def view_written_inputs(module: fx.GraphModule, with_tokens: bool) -> int:
    """Make results that are views of a written input's new content views of the input; how many there are.

    `module` is AOTAutograd's graph of a forward, while it is compiled, with the tokens of effects or without.
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
        return 0  # inputs are tensor subclasses, of several tensors each, or come with states of random numbers
    changed = 0
    for at, info in enumerate(meta.output_info, first):
        if info.output_type.name != "alias_of_input" or not meta.input_info[info.base_idx].mutates_data:
            continue
        seen = _seen_through(graph, results[at], placeholders[info.base_idx])
        if seen is not None:
            results[at], changed = seen, changed + 1
    if changed:
        output.args = (tuple(results),)
        module.recompile()
    return changed


def _seen_through(graph: fx.Graph, result: Any, source: fx.Node) -> fx.Node | None:
    """The views that make `result`, of `source` instead; None if they are its already, or do not fit."""
    views: list[fx.Node] = []
    node = result
    while isinstance(node, fx.Node) and is_view(node.target):
        views.append(node)
        node = node.args[0]
    if not views or node is source or not isinstance(node, fx.Node) or not _have_equal_sizes(node, source):
        return None
    value = source.meta["val"]
    values = []
    for view in reversed(views):
        rest: Any = fx.node.map_arg(view.args[1:], lambda n: n.meta["val"])
        try:
            with value.fake_mode:
                value = view.target(value, *rest, **view.kwargs)  # type: ignore[operator]
        except Exception:
            return None
        values.append(value)
    made = source
    with graph.inserting_before(graph.output_node()):
        for view, value in zip(reversed(views), values, strict=True):
            made = graph.call_function(view.target, (made, *view.args[1:]), view.kwargs)  # type: ignore[arg-type]
            made.meta = {**view.meta, "val": value}
    return made


def _have_equal_sizes(a: fx.Node, b: fx.Node) -> bool:
    """Whether the values of two nodes have the same sizes and dtype by spelling, which adds no guard."""
    one, two = a.meta.get("val"), b.meta.get("val")
    if not isinstance(one, torch.Tensor) or not isinstance(two, torch.Tensor) or not hasattr(two, "fake_mode"):
        return False
    return one.dtype is two.dtype and same(one.shape, two.shape)
