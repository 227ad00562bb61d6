"""Rewrites of Dynamo's graph that unify different spellings. All of them keep the order of writes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from fuser.canonical.mutation import Effect, effect
from fuser.passes.calls import Call, call_of, is_dead_dropout, shape_of, value_of


def name_written(module: fx.GraphModule) -> int:
    """Readers of a tensor after an in-place write read the result of the write, which is the same tensor."""
    order = {node: i for i, node in enumerate(module.graph.nodes)}
    changed = 0
    for node in module.graph.nodes:
        if not _returns_what_it_writes(node):
            continue
        written = node.args[0]
        for user in [u for u in written.users if order[u] > order[node]]:
            user.replace_input_with(written, node)
            changed += 1
    return changed


def _returns_what_it_writes(node: fx.Node) -> bool:
    written = value_of(node.args[0]) if node.args else None
    if written is None or shape_of(node) != shape_of(node.args[0]):
        return False  # `n += 1` of a number makes a new one
    return effect(node.op, node.target, node.args, node.kwargs) is Effect.RETURNS_WRITTEN


# Calls for which eager returns the very tensor that they are given.
_CASTS = {"float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16}


def drop_identities(module: fx.GraphModule) -> int:
    """Dead dropouts, casts to the same dtype and `contiguous` of contiguous tensors go: eager returns their input."""
    changed = 0
    for node in list(module.graph.nodes):
        call = call_of(node)
        if call is None or any(u.op == "output" for u in node.users) or not _is_identity(call):
            continue
        node.replace_all_uses_with(call.arg(0, "input"))
        module.graph.erase_node(node)
        changed += 1
    return changed


def _is_identity(call: Call) -> bool:
    source = call.arg(0, "input")
    before, after = value_of(source), value_of(call.node)
    if before is None or after is None or before.dtype is not after.dtype or shape_of(source) != shape_of(call.node):
        return False
    if call.name == "dropout":
        return is_dead_dropout(call)
    if len(call.args) != 1 or call.kwargs:
        return False
    if call.name == "contiguous":
        return all(isinstance(n, int) for n in (*before.shape, *before.stride())) and before.is_contiguous()
    return _CASTS.get(call.name) is before.dtype


def put_known_numbers(module: fx.GraphModule) -> int:
    """An integer that is the same in each call becomes a constant: `as_tensor` would truncate it to 32 bits."""
    values = {n: n.meta.get("example_value") for n in module.graph.nodes}
    symbols = {n: v.node.maybe_as_int() for n, v in values.items() if isinstance(v, torch.SymInt)}
    known = {n: number for n, number in symbols.items() if number is not None}
    made = dict.fromkeys(u for n in known for u in n.users if isinstance(values[u], torch.Tensor))
    users = [u for u in made if not isinstance(u.target, torch._ops.HigherOrderOperator)]  # these accept no constants
    for user in users:
        user.args, user.kwargs = fx.map_arg((user.args, user.kwargs), lambda n: known.get(n, n))
    return len(users)


def keep_loss_weights(module: fx.GraphModule) -> int:
    """A weighted `l1_loss` is called without torch's function modes, to which it does not pass its weights."""
    changed = 0
    for node in module.graph.nodes:
        if node.target is F.l1_loss and (len(node.args) > 5 or node.kwargs.get("weight") is not None):
            node.target = weighted_l1_loss
            changed += 1
    return changed


def weighted_l1_loss(*args: Any, **kwargs: Any) -> torch.Tensor:
    """`F.l1_loss`, which no mode intercepts."""
    with torch._C.DisableTorchFunction():
        return F.l1_loss(*args, **kwargs)
