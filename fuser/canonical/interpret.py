"""Runs a canonical graph node by node with torch: the meaning of its text, independent of fallback and kernels."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fuser.canonical.calls import HOST_OPS
from fuser.canonical.graph import CanonicalGraph, CanonicalNode, map_refs
from fuser.errors import Unsupported
from fuser.reasons import because

# Operators without a packet that can be called on plain tensors.
_FACTS: dict[str, Callable[..., Any]] = {
    "aten.sym_size": lambda x, dim=None: tuple(x.shape) if dim is None else x.shape[dim],
    "aten.sym_stride": lambda x, dim=None: x.stride() if dim is None else x.stride(dim),
    "aten.sym_numel": lambda x: x.numel(),
    "aten.sym_storage_offset": lambda x: x.storage_offset(),
    "prim.dtype": lambda x: x.dtype,
    "prim.device": lambda x: x.device,
    "getitem": operator.getitem,
}


def interpret(graph: CanonicalGraph, inputs: Sequence[Any]) -> Any:
    """The results of `graph` on all its inputs, bound ones first. Unsupported for calls that only Python can run."""
    values = list(inputs)
    for node in graph.calls:
        args = map_refs(node.args, lambda r: values[r.index])
        kwargs = {k: map_refs(v, lambda r: values[r.index]) for k, v in node.kwargs}
        values.append(find_operator(node)(*args, **kwargs))
    return map_refs(graph.output, lambda r: values[r.index])


def find_operator(node: CanonicalNode) -> Callable[..., Any]:
    """The function that torch runs for a canonical node. Unsupported if only the fallback can run it."""
    if node.op in _FACTS or node.op in HOST_OPS:
        return _FACTS.get(node.op) or HOST_OPS[node.op]
    found: Any = torch.ops
    for part in node.op.split("."):
        found = getattr(found, part, None)
        if found is None:
            raise Unsupported(because("python", "only the fallback can run this"), node.op)
    operator_found: Callable[..., Any] = found
    return operator_found
