"""On CUDA, attention whose mask rules out many keys runs in kernels that visit only the other blocks of keys."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fuser import targets
from fuser.attention.reach import RANGES, Reaching
from fuser.attention.reached import BACKWARD, CUDNN_BACKWARD, FORWARD, Reached
from fuser.lowering.shapes import dense_strides, order_like
from fuser.passes.calls import put_for
from fuser.passes.hints import size_hint

_DTYPES = (torch.bfloat16, torch.float16)
# By whether it is backward: the fewest queries and keys, and the largest share of scores. Beyond, ATen is faster
# (H200).
_FEWEST = {False: 1024, True: 2048}
_MOST = {False: 0.55, True: 0.4}
_LONGEST_HEAD = 128


def attention_by_blocks(module: fx.GraphModule) -> int:
    """Attention of 16-bit floats on CUDA skips the blocks of keys that its mask rules out, if these are many."""
    changed = 0
    for node in list(module.graph.nodes):
        reach = node.meta.get(RANGES)
        if reach is None or node.target not in (*FORWARD, *BACKWARD):
            continue
        found = _reached(node, reach)
        if found is not None:
            put_for(node, found, node.args, node.kwargs)
            changed += 1
    return changed


def _reached(node: fx.Node, reach: Reaching) -> Reached | None:
    """The kernel's parameters for a call; None if ATen is faster or if no kernel supports the call."""
    backward = node.target in BACKWARD
    args: Any = node.args
    q, k, v = args[1:4] if backward else args[:3]
    bias = args[8 if node.target is CUDNN_BACKWARD else 4 if backward else 3]
    values: list[Any] = [n.meta.get("val") if isinstance(n, fx.Node) else None for n in (q, k, v, bias)]
    if not all(isinstance(t, torch.Tensor) and t.dtype in _DTYPES for t in values):
        return None
    query, key, value, mask = values
    if not query.dim() == key.dim() == value.dim() == 4 or not 2 <= mask.dim() <= 4:
        return None
    if not targets.has(query.device, "flash") or reach.share > _MOST[backward] or not _is_plain(node, backward):
        return None
    sizes = size_hint(query.shape[2]), size_hint(key.shape[2])
    here = reach.at(*sizes)
    if here is None or here.checked or min(sizes) < _FEWEST[backward]:
        return None
    if max(size_hint(t.shape[3]) for t in (query, value)) > _LONGEST_HEAD:
        return None
    if str(query.shape[1]) != str(key.shape[1]) or not all(u.target is operator.getitem for u in node.users):
        return None
    if not _has_its_strides(node, values[:3] if backward else values[:1]):
        return None
    scale = node.kwargs.get("scale")
    scale = size_hint(query.shape[3]) ** -0.5 if scale is None else scale
    if not isinstance(scale, (int, float)):
        return None
    first = 4 - mask.dim()
    own = [str(n) != "1" and str(s) != "0" for n, s in zip(mask.shape, mask.stride())]
    dims = tuple(first + d for d, n in enumerate(own) if n)
    return Reached(node.target, reach, dims, float(scale))


def _is_plain(node: fx.Node, backward: bool) -> bool:
    """Whether a call has no dropout, is not also causal, and needs no gradient of its mask."""
    args: list[Any] = list(node.args)
    if node.target is CUDNN_BACKWARD:
        return not args[13] and not args[14]
    if backward:
        dropout, wanted, causal = (args[9:] + [False])[:3]
        return not dropout and not causal and not wanted[3]
    dropout, causal = (args[5:] + [0.0, False][len(args[5:7]) :])[:2]
    return not dropout and not causal


def _has_its_strides(node: fx.Node, operands: list[torch.Tensor]) -> bool:
    """Whether results are stored in the operands' dim order, which the kernels follow."""
    made: Any = node.meta.get("val")
    if not isinstance(made, (tuple, list)):
        return False
    for result, operand in zip(made, operands):
        size, stride, own = (list(map(size_hint, n)) for n in (result.shape, operand.stride(), result.stride()))
        if tuple(own) != dense_strides(tuple(size), order_like(size, stride)):
            return False
    return True


__all__ = ["attention_by_blocks"]
