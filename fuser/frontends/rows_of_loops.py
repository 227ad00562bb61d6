"""Steps of `scan` and `map` that store into rows of the results.

Such a step's graph takes these rows as inputs and ends with copies into them, so its kernels store there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fuser.runtime.loops import Form


def store_rows(node: fx.Node, body: fx.GraphModule) -> tuple[Form, ...] | None:
    """Let a step's graph write its rows into further inputs instead of returning them; returns the forms of the rows.

    None, with the graph unchanged, for operators without rows, and if a form is not known before a step runs.
    """
    if str(node.target) not in ("scan", "map_impl"):
        return None
    graph = body.graph
    (results,) = graph.output_node().args
    init: Any = node.args[1] if str(node.target) == "scan" else ()
    assert isinstance(results, tuple)
    kept, rows = results[: len(init)], results[len(init) :]
    known = _places(graph.find_nodes(op="placeholder"))
    forms = [f for f in (_form(r, known) for r in rows) if f is not None]
    if not rows or not known or len(forms) < len(rows):
        return None
    for i, row in enumerate(rows):
        assert isinstance(row, fx.Node)
        value = torch.empty_like(row.meta["val"], memory_format=torch.contiguous_format)
        with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
            target = graph.placeholder(f"fuser_row_{i}")
        target.meta["val"] = value
        with graph.inserting_before(graph.output_node()):
            copy = graph.call_function(torch.ops.aten.copy_.default, (target, row))
        copy.meta.update(row.meta, val=value)
    graph.output_node().args = (kept,)
    body.recompile()
    return tuple(forms)


def _places(inputs: Sequence[fx.Node]) -> dict[str, tuple[int, int | None]]:
    """For each symbolic size, the input of a step and its dim from which the size can be read."""
    found: dict[str, tuple[int, int | None]] = {}
    for i, node in enumerate(inputs):
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            found[str(value)] = i, None
        elif isinstance(value, torch.Tensor):
            for dim, n in enumerate(value.shape):
                found.setdefault(str(n), (i, dim))
    return found


def _form(row: Any, known: dict[str, tuple[int, int | None]]) -> Form | None:
    value = row.meta.get("val") if isinstance(row, fx.Node) else None
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    sizes = [n if type(n) is int else known.get(str(n)) for n in value.shape]
    places = tuple(n for n in sizes if n is not None)
    return Form(value.dtype, value.device, places) if len(places) == len(sizes) else None


__all__ = ["store_rows"]
