"""Creates calls in a functional graph, with their values."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from fuser.passes.classify import is_view
from fuser.passes.layouts import new_fake, signature

_KNOWN = "_fuser_written"  # a fake tensor mode's values of calls


class Writer:
    """Creates calls before a node, with the node's notes and their own values."""

    def __init__(self, at: fx.Node) -> None:
        self.at = at
        self.mode: Any = getattr(at.meta["val"], "fake_mode", None)

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        with self.at.graph.inserting_before(self.at):
            node = self.at.graph.call_function(target, args, kwargs)
        values: Any = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        node.meta = {**self.at.meta, "val": self._value(target, *values)}
        return node

    def _value(self, target: Any, args: Any, kwargs: Any) -> Any:
        """The call's value, like that of an earlier call on such arguments: torch takes a millisecond for one."""
        known = vars(self.mode).setdefault(_KNOWN, {})
        key = _key(target, args, kwargs)
        if key in known:
            return new_fake(self.mode, known[key], known[key].device)
        with torch.no_grad(), self.mode:
            value = target(*args, **kwargs)
        if key is not None and type(value) is FakeTensor and not _shares(value, (args, kwargs)):
            known[key] = value
        return value

    def size(self, node: fx.Node, dim: int) -> Any:
        """A size of a tensor: a number, or a node that computes a symbol."""
        known = node.meta["val"].shape[dim]
        return known if type(known) is int else self(torch.ops.aten.sym_size.int, node, dim)

    def instead(self, node: fx.Node) -> None:
        """Replace the node that calls were put before by `node`."""
        node.meta = {**self.at.meta, **node.meta}
        self.at.replace_all_uses_with(node)
        self.at.graph.erase_node(self.at)


def _shares(value: torch.Tensor, given: Any) -> bool:
    """Whether a call's value has the memory of one of its arguments."""
    own = value.untyped_storage()._cdata
    return any(t.untyped_storage()._cdata == own for t in pytree.tree_leaves(given) if isinstance(t, torch.Tensor))


def _key(target: Any, args: Any, kwargs: Any) -> Any:
    """A key of calls whose values are alike; None with symbols, for views, and for complex tensors or without strides.

    A view has its argument's memory, and passes ask which values share theirs.
    """
    tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    if is_view(target) or any(t.layout is not torch.strided or t.dtype.is_complex for t in tensors):
        return None
    key = target, torch.get_default_dtype(), signature(args), signature(kwargs)
    try:
        hash(key)
    except TypeError:
        return None
    return key
