"""Replaces calls of `flex_attention`, whose score modification and mask are graphs, by calls that fuse these graphs."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fuser import targets
from fuser.attention.scores import Mods, write_scores
from fuser.attention.served import Backward, Forward
from fuser.errors import Unsupported
from fuser.passes.classify import WHY
from fuser.passes.hints import are_numbers
from fuser.reasons import because

_RESULTS = {"flex_attention": (0, 1), "flex_attention_backward": (0, 1, 2)}  # results that kernels compute
_BLOCKS = {"flex_attention": 4, "flex_attention_backward": 9}  # position of the block mask among the arguments
_INDEX = 3  # position of the blocks' indices in the block mask


def drop_single_blocks(module: fx.GraphModule) -> int:
    """The tensors of a block mask of one block, which masks nothing, are dropped; torch passes one without a mask."""
    changed = 0
    for node in module.graph.nodes:
        at = _BLOCKS.get(_called(node))
        if at is not None and _is_single(node.args[at]):
            blocks = node.args[at]
            given = [None if _is_tensor(b) else b for b in blocks[:-1]]
            node.args = (*node.args[:at], (*given, blocks[-1]), *node.args[at + 1 :])
            changed += 1
    if changed:
        module.graph.eliminate_dead_code()
    return changed


def _is_tensor(value: Any) -> bool:
    return isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.Tensor)


def _is_single(blocks: Any) -> bool:
    """Whether a block mask has one row and one column of blocks, for all sizes."""
    index = blocks[_INDEX].meta.get("val") if isinstance(blocks[_INDEX], fx.Node) else None
    return isinstance(index, torch.Tensor) and index.dim() == 4 and are_numbers(*index.shape[2:]) and (
        index.shape[2] == index.shape[3] == 1
    )  # fmt: skip


def serve_flex_attention(module: fx.GraphModule) -> int:
    """`flex_attention` runs with its score modification fused: row by row on the CPU, in one kernel on CUDA."""
    changed = 0
    for node in list(module.graph.nodes):
        name = _called(node)
        if name in _RESULTS and _is_served(module, node, name):
            changed += 1
    return changed


def _called(node: fx.Node) -> str:
    """The name of the higher-order operator that a node calls, or ""."""
    hop = node.op == "call_function" and isinstance(node.target, torch._ops.HigherOrderOperator)
    return str(node.target) if hop else ""


def _is_served(module: fx.GraphModule, node: fx.Node, name: str) -> bool:
    """Whether the call was replaced; if not, the node's meta holds the reason."""
    try:
        target, args = _served(module, node, name)
    except Unsupported as error:
        node.meta[WHY] = because("arguments", error.reason)
        return False
    with module.graph.inserting_before(node):
        new = module.graph.call_function(target, args)
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    module.graph.erase_node(node)
    return True


def _served(module: fx.GraphModule, node: fx.Node, name: str) -> tuple[Any, tuple[Any, ...]]:
    """The callable that runs a call with kernels, and its arguments. Unsupported if there is none."""
    value = node.args[0].meta.get("val") if isinstance(node.args[0], fx.Node) else None
    device = targets.known(value.device.type) if isinstance(value, torch.Tensor) else None
    if value is None or device is None or value.dtype not in device.scores:
        raise Unsupported("no kernel of attention takes tensors of this device and dtype")
    forward = name == "flex_attention"
    if not forward and not device.score_gradients:
        raise Unsupported("the gradients of attention with a score modification have no kernels on the CPU")
    read = _results_read(node)
    if read is None or not read <= set(_RESULTS[name]):
        raise Unsupported("the maxima, or gradients of captured tensors, are needed")
    tensors, graphs = node.args[: 3 if forward else 7], node.args[3 if forward else 7 : 4 if forward else 9]
    rest: Any = node.args[4 if forward else 9 :]
    blocks, scale, options, of_mod, of_mask = rest
    mods = _mods(module, (*graphs, blocks[-1]), scale, len(of_mod), len(of_mask))
    target = Forward(mods, options, 1 in read) if forward else Backward(mods, options)
    return target, (*tensors, blocks[:-1], of_mod, of_mask)


def _results_read(node: fx.Node) -> set[int] | None:
    """The indices of the results that are used; None if a node uses the tuple itself."""
    out: set[int] = set()
    for user in node.users:
        if user.target is not operator.getitem or not isinstance(user.args[1], int):
            return None
        if user.users:
            out.add(user.args[1])
    return out


def _mods(module: fx.GraphModule, graphs: tuple[Any, ...], scale: Any, of_mod: int, of_mask: int) -> Mods:
    """The modifications of a call. Unsupported if no kernel can be made of their graphs."""
    held: list[Any] = [module.get_submodule(str(g.target)) for g in graphs]
    if not isinstance(scale, (int, float)):
        raise Unsupported("its scale is no number that the graph knows")
    mods = Mods(held[0], held[-1], of_mod, of_mask, float(scale), held[1] if len(held) == 3 else None)
    write_scores(mods, of_mod + of_mask)
    return mods
