"""Frozen weights: calls whose contest was won by packed weights use weights that are packed once.

`options={"freeze": True}` marks the parameters and buffers of an inference graph (`mark_frozen`). The passes that
choose a provider mark its calls (`PACKED`, `OWN_MARK`). `pack_weights` gives these calls a function that packs at its
first call.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from fuser import config
from fuser.cpu import convolve
from fuser.passes import conv_forms, providers
from fuser.passes.calls import put_for
from fuser.passes.conv_epilogues import following, numbered
from fuser.passes.convolutions import class_of
from fuser.passes.onednn import FROZEN, OWN_MARK, PACKED
from fuser.runtime import packing

aten = torch.ops.aten
_NAME = "packed_convolution_and_more"


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
    for node in list(module.graph.nodes):
        if OWN_MARK in node.meta and node.target is aten.convolution.default:
            changed += _by_own_kernel(node)
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


def _by_own_kernel(conv: fx.Node) -> bool:
    """Replace a convolution and its epilogue by a call of the package's kernel, if the strides are channels-last."""
    value, behind = conv.meta["val"], following(conv)
    columns, height, width = value.shape[1:]
    if behind is None or value.stride() != (columns * height * width, 1, width * columns, columns):
        return False
    x, w, _, stride, padding, *_ = conv.args
    sizes = columns, tuple(w.meta["val"].shape[2:]), tuple(stride), tuple(padding)  # type: ignore[union-attr, arg-type]
    settings, make = (*sizes, behind.steps), numbered(behind.vectors)
    call = packing.followed_call(convolve.convolution, convolve.pack, settings, make, len(behind.others), _NAME)
    put_for(behind.nodes[-1], call, (x, w, *behind.others, *behind.tensors))
    for node in reversed(behind.nodes[:-1]):
        node.graph.erase_node(node)
    return True
