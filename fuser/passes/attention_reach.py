"""Which keys each block of queries attends to, where the graph's own arithmetic says so: sliding windows, causal masks.

A mask that mixes what is known, such as places, with what is not, such as padding, is bounded by what is known.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from fuser.attention.reach import BLOCK, RANGES, Reach
from fuser.passes.bounds import ZERO, Bounds, Interval
from fuser.passes.hints import are_numbers

aten: Any = torch.ops.aten
_FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_QUERIES = {_FORWARD: 0, _BACKWARD: 1}  # the place of the queries; keys are behind
_FEWEST_KEYS = 256
_MOST = 0.8  # of the scores, so that leaving out the others is worth while


def bound_attention(module: fx.GraphModule) -> int:
    """Attention whose mask leaves out keys at places known to the graph notes which keys each block of queries has."""
    known: dict[Any, Reach | None] = {}
    changed = 0
    for node in module.graph.nodes:
        at = _QUERIES.get(node.target)
        mask = node.kwargs.get("attn_mask")
        if at is None or not isinstance(mask, fx.Node):
            continue
        q, k = (n.meta.get("val") for n in node.args[at : at + 2])
        if not are_numbers(q.shape[-2], k.shape[-2]) or k.shape[-2] < _FEWEST_KEYS:
            continue
        source = _behind_lost_rows(mask)
        if source is not mask and node.target is _BACKWARD:
            continue  # such a row has gradients of NaN for every key
        key = source, q.shape[-2], k.shape[-2]
        if key not in known:
            with _disable_current_modes():
                known[key] = reach_of(*key)
        found = known[key]
        if found is not None and found.share <= _MOST:
            node.meta[RANGES] = found
            changed += 1
    return changed


def reach_of(mask: fx.Node, rows: int, keys: int) -> Reach | None:
    """The keys of each block of queries that a mask, which is added to scores, may leave; None if nothing is known."""
    value = mask.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dim() < 2 or not value.dtype.is_floating_point:
        return None
    q, k = (_blocks(n) for n in (rows, keys))
    q = Interval(q.low.unsqueeze(1), q.high.unsqueeze(1))
    shape = value.shape
    batch = [Interval.of(0, n - 1) if type(n) is int else Interval.of(0, math.inf) for n in shape[:-2]]
    index = [ZERO if type(n) is int and n == 1 else i for n, i in zip(shape, (*batch, q, k))]
    found = Bounds().of(mask, tuple(index))
    left = (found.high > -math.inf).expand(q.low.shape[0], k.low.shape[0])
    if bool(left.all()):
        return None
    ranges = []
    for row in left.tolist():
        if not any(row):
            ranges.append((0, 0))
            continue
        last = len(row) - row[::-1].index(True)
        ranges.append((row.index(True) * BLOCK, min(last * BLOCK, keys)))
    return Reach(tuple(ranges), rows, keys)


def _blocks(count: int) -> Interval:
    """The first and the last place of each block."""
    first = torch.arange(0, count, BLOCK, dtype=torch.float64, device="cpu")
    return Interval(first, (first + BLOCK - 1).clamp(max=count - 1))


def _behind_lost_rows(mask: fx.Node) -> fx.Node:
    """The mask without a last step that makes whole rows NaN: each row keeps a key, and so is NaN."""
    args = mask.args
    if mask.target is aten.masked_fill.Scalar and len(args) == 3 and isinstance(args[2], float) and math.isnan(args[2]):
        source, lost = args[:2]
        value = lost.meta.get("val") if isinstance(lost, fx.Node) else None
        if isinstance(value, torch.Tensor) and value.shape[-1:] == (1,) and isinstance(source, fx.Node):
            return source
    return mask


__all__ = ["bound_attention", "reach_of"]
