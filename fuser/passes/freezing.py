"""Frozen weights: calls whose contest was won by packed weights use weights that are packed once.

`options={"freeze": True}` marks the parameters and buffers of an inference graph (`mark_frozen`). The passes that
choose a library mark its calls (`PACKED`). `pack_weights` gives these calls a function that packs at its first call.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from fuser import config
from fuser.passes import conv_forms, providers
from fuser.passes.convolutions import class_of
from fuser.passes.onednn import FROZEN, PACKED
from fuser.runtime import packing

aten = torch.ops.aten


def mark_frozen(graph: fx.Graph, numbers: Iterable[int]) -> None:
    """Under `config.freeze`, mark the inputs with these numbers as unchanged between calls."""
    if not config.freeze:
        return
    chosen = set(numbers)
    for i, node in enumerate(n for n in graph.nodes if n.op == "placeholder"):
        if i in chosen:
            node.meta[FROZEN] = True


def pack_weights(module: fx.GraphModule) -> int:
    """Products and convolutions with frozen weights use packed weights, where a contest found that faster."""
    changed = 0
    for node in module.graph.nodes:
        if PACKED not in node.meta:
            continue
        if node.target is providers.linear_op():
            node.target = packing.packed_call(node.target._op, providers.pack_op()._op, "packed_linear")
        elif node.target is aten.convolution.default:
            make = conv_forms.pack(class_of(node))
            node.target = packing.packed_call(conv_forms.packed_convolution, make, "packed_convolution")
        else:
            continue
        changed += 1
    return changed
