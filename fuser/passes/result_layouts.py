"""Strides of a rewritten node's result: whether a reader can observe them, and copies that restore eager's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from fuser.passes.calls import call_of, emit, value_of
from fuser.passes.hints import size_hint

_SWAPS = ("transpose", "permute")
_COPIES = ("contiguous", "reshape", "flatten")


def ordered_copy(graph: fx.Graph, node: fx.Node, dims: Sequence[int], like: torch.Tensor) -> fx.Node:
    """The dims of a node in another order, in memory that has the order of `like`, whose dims they are."""
    order = _order(like)
    first, second = [dims[d] for d in order], _inverse(order)
    for step in (first, None, second):
        if step is None:
            node = emit(graph, torch.Tensor.contiguous, node)
        elif step != list(range(len(step))):
            node = emit(graph, torch.permute, node, step)
    return node


def is_copied(node: fx.Node, likes: Sequence[torch.Tensor]) -> bool:
    """Whether every reader of a node swaps dims and makes a contiguous copy, for each layout of the node in `likes`.

    A reshape of swapped dims copies in one layout, and in another it is a view with strides of its own.
    """
    own = value_of(node)
    if own is None or not node.users:
        return False
    sizes = list(map(size_hint, own.shape))
    layouts = [_order(t) for t in (own, *likes)]
    for user in node.users:
        call = call_of(user)
        if call is None or call.name not in _SWAPS or call.kwargs or not user.users:
            return False
        for order in layouts:
            dense = torch.empty([sizes[d] for d in order], device="meta").permute(_inverse(order))
            swapped = getattr(dense, call.name)(*call.args[1:])
            if not all(_is_contiguous_copy(reader, swapped) for reader in user.users):
                return False
    return True


def _order(t: torch.Tensor) -> list[int]:
    """The dims from outermost to innermost, as far as strides tell."""
    sizes, strides = (list(map(size_hint, n)) for n in (t.shape, t.stride()))
    return sorted(range(len(sizes)), key=lambda d: (-strides[d], -sizes[d], d))


def _inverse(order: list[int]) -> list[int]:
    return [order.index(d) for d in range(len(order))]


def _is_contiguous_copy(reader: fx.Node, swapped: torch.Tensor) -> bool:
    """Whether a node that reads `swapped` makes a contiguous tensor of it."""
    call, value = call_of(reader), value_of(reader)
    if call is None or value is None or call.name not in _COPIES or call.kwargs.get("memory_format") is not None:
        return False
    return call.name == "contiguous" or swapped.reshape(list(map(size_hint, value.shape))).is_contiguous()
