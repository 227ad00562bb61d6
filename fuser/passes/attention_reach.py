"""Finds the keys that each block of queries attends to, from the mask's own arithmetic: sliding windows, causal masks.

A mask that mixes known values, such as indices, with unknown ones, such as padding, is bounded by the known values.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from fuser.attention.reach import BLOCK, HUGE, RANGES, Reach, Reaching
from fuser.attention.scores import behind
from fuser.passes.bounds import MOST_NODES, ZERO, Bounds, Interval
from fuser.passes.hints import are_numbers, size_hint

aten: Any = torch.ops.aten
_FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
# The argument position of the queries, which the keys follow, and the position or name of the mask.
_PLACES: dict[Any, tuple[int, int | str]] = {
    _FORWARD: (0, "attn_mask"),
    _BACKWARD: (1, "attn_mask"),
    aten._scaled_dot_product_efficient_attention.default: (0, 3),
    aten._scaled_dot_product_efficient_attention_backward.default: (1, 4),
    aten._scaled_dot_product_cudnn_attention.default: (0, 3),
    aten._scaled_dot_product_cudnn_attention_backward.default: (1, 8),
}
_FEWEST_KEYS = 256  # of a call whose mask is looked at
_MOST = 0.8  # share of the scores up to which leaving out the others pays
_MOST_SIZES = 64  # kept for one mask


def bound_attention(module: fx.GraphModule) -> int:
    """Attention whose mask rules out keys at known indices gets a note of the keys that each block of queries has."""
    known: dict[Any, Reaching | None] = {}
    changed = 0
    for node in module.graph.nodes:
        if node.target not in _PLACES:
            continue
        at, place = _PLACES[node.target]
        mask: Any = node.kwargs.get(place) if isinstance(place, str) else node.args[place]
        if not isinstance(mask, fx.Node):
            continue
        q, k = (n.meta.get("val") for n in node.args[at : at + 2])
        if size_hint(k.shape[-2]) < _FEWEST_KEYS:
            continue
        sizes = q.shape[-2], k.shape[-2]
        key = mask, *map(str, sizes)
        if key not in known:
            with _disable_current_modes():
                known[key] = reach_of(mask, *sizes) if are_numbers(*sizes) else _open(mask, *sizes)
        found = known[key]
        if found is not None and found.share <= _MOST:
            node.meta[RANGES] = found
            changed += 1
    return changed


def reach_of(
    mask: fx.Node, rows: int, keys: int, symbols: Mapping[Any, int] | None = None
) -> Reach | None:  # fmt: skip
    """The keys that an additive mask may leave to each block of queries; None if all, or if the mask is not understood.

    `symbols`: the values of symbolic sizes.
    """
    value = mask.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dim() < 2 or not value.dtype.is_floating_point:
        return None
    source = _behind_lost_rows(mask)
    q, k = (_blocks(n) for n in (rows, keys))
    q = Interval(q.low.unsqueeze(1), q.high.unsqueeze(1))
    bounds = Bounds(symbols)
    shape = bounds.sizes(mask)
    batch = [Interval.of(0, n - 1 if isinstance(n, int) else math.inf) for n in shape[:-2]]
    index = [ZERO if n == 1 else i for n, i in zip(shape, (*batch, q, k))]
    found = bounds.operand(mask, source, tuple(index))
    high = found.high.expand(q.low.shape[0], k.low.shape[0])
    left = high > HUGE
    if bool(left.all()):
        return None
    ranges = []
    for row in left.tolist():
        if not any(row):
            ranges.append((0, 0))
            continue
        last = len(row) - row[::-1].index(True)
        ranges.append((row.index(True) * BLOCK, min(last * BLOCK, keys)))
    zero = ((found.low == 0) & (found.high == 0)).expand(high.shape)
    whole = [_longest(row) for row in zero.tolist()]
    finite = bool((~left & (high > -math.inf)).any())
    return Reach(tuple(ranges), rows, keys, finite or source is not mask, tuple(whole))


class _Open:
    """The mask of an attention with symbolic sizes: its part of the graph, evaluated again for each pair of sizes."""

    def __init__(self, mask: fx.Node, rows: Any, keys: Any) -> None:
        self._mask = mask
        self._symbols = [(n.node.expr, at) for at, n in enumerate((rows, keys)) if isinstance(n, torch.SymInt)]
        self._made = functools.lru_cache(_MOST_SIZES)(self._make)
        self._hints = size_hint(rows), size_hint(keys)

    @property
    def share(self) -> float:
        found = self.at(*self._hints)
        return 1.0 if found is None else found.share

    def at(self, rows: int, keys: int) -> Reach | None:
        """The keys of each block of queries; None if all, or nearly all, may be attended to."""
        return self._made(rows, keys)

    def _make(self, rows: int, keys: int) -> Reach | None:
        with _disable_current_modes():
            found = reach_of(self._mask, rows, keys, {symbol: (rows, keys)[at] for symbol, at in self._symbols})
        return None if found is None or found.share > _MOST else found


def _open(mask: fx.Node, rows: Any, keys: Any) -> _Open | None:
    """An `_Open` for a mask with a symbolic size; None if a size is not a plain symbol or the mask's graph is large."""
    if not all(are_numbers(n) or n.node.expr.is_Symbol for n in (rows, keys)):
        return None
    kept = behind(mask)
    if len(kept) > MOST_NODES:
        return None
    graph = fx.Graph()  # a graph of its own, which no pass changes
    env: dict[fx.Node, fx.Node] = {}
    for node in mask.graph.nodes:
        if node in kept:
            env[node] = graph.node_copy(node, env.__getitem__)
    return _Open(env[mask], rows, keys)


def _longest(row: list[bool]) -> tuple[int, int]:
    """The first key of the longest run of blocks that are true, and the end of the run."""
    best = first = 0
    start = 0
    for n, true in enumerate([*row, False]):
        if true:
            continue
        if n - start > best:
            best, first = n - start, start
        start = n + 1
    return first * BLOCK, (first + best) * BLOCK


def _blocks(count: int) -> Interval:
    """The first and the last index of each block."""
    first = torch.arange(0, count, BLOCK, dtype=torch.float64, device="cpu")
    return Interval(first, (first + BLOCK - 1).clamp(max=count - 1))


def _behind_lost_rows(mask: fx.Node) -> fx.Node:
    """The mask without a last step that fills whole rows with NaN."""
    args = mask.args
    if mask.target is aten.masked_fill.Scalar and len(args) == 3 and isinstance(args[2], float) and math.isnan(args[2]):
        source, lost = args[:2]
        value = lost.meta.get("val") if isinstance(lost, fx.Node) else None
        if isinstance(value, torch.Tensor) and value.shape[-1:] == (1,) and isinstance(source, fx.Node):
            return source
    return mask


__all__ = ["bound_attention", "reach_of"]
