"""Masks, fills and biases of attention scores as arguments of `scaled_dot_product_attention`.

If the graph makes a mask of numbers alone, the mask is evaluated: a causal mask needs no tensor at all.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fuser import targets
from fuser.lazy_dataclasses import dataclass
from fuser.passes.calls import emit, value_of
from fuser.passes.constants import distinct, evaluated
from fuser.passes.masks import HUGE, is_mask
from fuser.passes.products import Mismatch

_LIMITS = (torch.float32, torch.float64)  # dtypes in which a huge negative number is added to scores
_LARGEST_SCORE = 1e6  # in magnitude, as far as scores of a model go


@dataclass(frozen=True)
class Bias:
    """A tensor added to the scores."""

    node: fx.Node
    least: float | None = None  # clamp its huge negative numbers here, so that they stay finite in a narrower dtype


@dataclass(frozen=True)
class Fill:
    """Replaces the scores by `value` where `condition` equals `filled`."""

    condition: fx.Node
    filled: bool
    value: float


Step = Bias | Fill


# -- judging ----------------------------------------------------------------------------------------------------------
def check(steps: list[Step], dtype: torch.dtype, low: torch.dtype | None, shape: Sequence[str]) -> None:
    """Raise Mismatch unless the steps form one tensor to add to scores of queries in `dtype`; `low` is autocast's."""
    if is_causal(steps, dtype, shape):
        return
    fills = [s for s in steps if isinstance(s, Fill) and s.value != -math.inf]
    if torch.is_grad_enabled() and fills:  # see `_with_equal_weights`
        added = any(isinstance(s, Bias) for s in steps[steps.index(fills[0]) :])
        if len({s.value for s in fills}) > 1 or added and not _absorbs(fills[0].value, dtype):
            raise Mismatch
    for i, step in enumerate(steps):
        if isinstance(step, Fill):
            _check_fill(step, dtype, low, alone=len(steps) == 1)
        elif low is not None and is_mask(step.node):
            if (value := value_of(step.node)) is None or value.requires_grad:
                raise Mismatch
            steps[i] = Bias(step.node, torch.finfo(low).min)
        else:
            _check_bias(step.node, dtype if low is None else low, shape)


def _check_fill(fill: Fill, dtype: torch.dtype, low: torch.dtype | None, alone: bool) -> None:
    """Raise Mismatch unless adding the fill to the scores, in float32, gives the fill itself, as eager's result."""
    if fill.value == -math.inf:
        return
    if low is None and dtype not in _LIMITS:
        if not alone or fill.value > least(dtype):
            raise Mismatch
        return
    if fill.value > HUGE or low is not None and fill.value < torch.finfo(low).min:
        raise Mismatch  # it would become minus infinity, and a row of such values NaN


def _absorbs(value: float, dtype: torch.dtype) -> bool:
    """Whether any score that is added to a number vanishes, so that rows of this number alone have equal weights."""
    return value < -_LARGEST_SCORE / torch.finfo(dtype).eps


def least(dtype: torch.dtype) -> float:
    """The largest fill that makes a score negligible beside others."""
    return max(torch.finfo(dtype).min, HUGE)


def _check_bias(bias: fx.Node, dtype: torch.dtype, shape: Sequence[str]) -> None:
    """Raise Mismatch for a bias that needs a gradient, or that the fused operator would round, as under autocast."""
    value = value_of(bias)
    if value is None or not value.dtype.is_floating_point or value.dim() > len(shape):
        raise Mismatch
    if value.dtype != dtype and not _is_exact_in(bias, dtype):
        raise Mismatch
    if value.requires_grad and torch.is_grad_enabled():
        raise Mismatch  # no fused attention computes its gradient


def _is_exact_in(bias: fx.Node, dtype: torch.dtype) -> bool:
    """Whether a bias made of numbers is exact in another dtype."""
    found = evaluated(bias)
    return found is not None and torch.equal(found.to(dtype).to(found.dtype), found)


# -- values -----------------------------------------------------------------------------------------------------------
def _total(steps: Sequence[Step]) -> torch.Tensor | None:
    """The steps applied to scores of 0; None if they are not made of numbers alone."""
    total = torch.zeros(())
    for step in steps:
        found = evaluated(step.node if isinstance(step, Bias) else step.condition)
        if found is None:
            return None
        found = distinct(found)
        if isinstance(step, Bias):
            total = total + found.float()
        else:
            total = torch.where(found == step.filled, torch.full((), step.value), total)
    return total


def is_causal(steps: Sequence[Step], dtype: torch.dtype, shape: Sequence[str]) -> bool:
    """Whether the steps mask, for each query, exactly the keys after its own index, with as many keys as queries."""
    if not steps or shape[-1] != shape[-2]:
        return False
    total = _total(steps)
    if total is None or total.dim() < 2 or list(map(str, total.shape[-2:])) != list(shape[-2:]):
        return False
    seen = torch.ones(total.shape[-2:], dtype=torch.bool).tril_()
    return bool(((total == 0) == seen).all() and (seen | (total <= least(dtype))).all())


def without_mask(node: fx.Node) -> int:
    """Drop a mask made of numbers that is causal or masks nothing from fused attention; 1 if the call changed, else 0.

    Fused kernels accept no mask, or one whose rows are aligned.
    """
    mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
    if not isinstance(mask, fx.Node) or len(node.args) > 4 or node.kwargs.get("is_causal") or len(node.args) < 3:
        return 0
    q, k, value = value_of(node.args[0]), value_of(node.args[1]), value_of(mask)
    if q is None or k is None or value is None:
        return 0
    step: Step = Fill(mask, filled=False, value=-math.inf) if value.dtype is torch.bool else Bias(mask)
    causal = is_causal([step], q.dtype, (str(q.shape[-2]), str(k.shape[-2])))
    if not causal:
        total = _total([step])
        if total is None or value.dim() > q.dim():
            return 0
        if total.any():
            infinite = value.dtype is torch.bool and targets.has(q.device, "flash")
            return _infinite(node, mask, total, q) if infinite else 0
    node.args = node.args[:3]
    node.kwargs = {**{n: v for n, v in node.kwargs.items() if n != "attn_mask"}, "is_causal": causal}
    return 1


def _infinite(node: fx.Node, mask: fx.Node, total: torch.Tensor, query: torch.Tensor) -> int:
    """Replace a bool mask that leaves each query a key by 0 and minus infinity; 1 if it was replaced, else 0.

    cuDNN receives a finite number for False, so nothing shows that such keys have no weight.
    """
    if total.dim() < 2 or bool((total == -math.inf).all(-1).any()):
        return 0
    with node.graph.inserting_before(node):
        node.replace_input_with(mask, _filled(node.graph, Fill(mask, filled=False, value=-math.inf), query, -math.inf))
    return 1


# -- writing ----------------------------------------------------------------------------------------------------------
def arguments(graph: fx.Graph, steps: Sequence[Step], q: fx.Node, k: fx.Node) -> tuple[fx.Node, dict[str, Any]]:
    """The queries, and the keyword arguments of fused attention that express the steps.

    A row masked entirely by minus infinity is NaN in eager, but 0 in the fused operator. A row masked entirely by a
    finite number is the mean of all values: such a row gets queries of 0 and no mask.
    """
    query, keys = value_of(q), value_of(k)
    assert query is not None and keys is not None
    if not steps:
        return q, {"attn_mask": None}
    if is_causal(steps, query.dtype, (str(query.shape[-2]), str(keys.shape[-2]))):
        return q, {"attn_mask": None, "is_causal": True}
    known = _total(steps)
    whole = known is None or known.dim() < 2 or bool((known <= least(query.dtype)).all(-1).any())
    (first, *others) = steps
    if isinstance(first, Fill) and not others and first.value != -math.inf and query.dtype not in _LIMITS:
        return _with_means(graph, first, q) if whole else (q, {"attn_mask": _filled(graph, first, query, -math.inf)})
    total = _sum(graph, steps, query)
    trained = torch.is_grad_enabled() and (query.requires_grad or keys.requires_grad)
    if whole and (trained or any(isinstance(s, Fill) and not _absorbs(s.value, query.dtype) for s in steps)):
        q, total = _with_equal_weights(graph, steps, q, total, trained)
    if whole:
        lost = emit(graph, torch.all, emit(graph, operator.eq, total, -math.inf), dim=-1, keepdim=True)
        total = emit(graph, torch.Tensor.masked_fill, total, lost, math.nan)
    elif known is not None and _has_finite(known, query.dtype):
        gone = emit(graph, operator.le, total, 0.75 * least(query.dtype))
        total = emit(graph, torch.Tensor.masked_fill, total, gone, -math.inf)
    return q, {"attn_mask": _of_rank(graph, total, query.dim())}


def _has_finite(known: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a mask of numbers has huge finite values, far from all others, that mask like minus infinity."""
    gone = known <= least(dtype)
    return bool((gone & (known > -math.inf)).any()) and not bool((~gone & (known <= least(dtype) / 2)).any())


def _of_rank(graph: fx.Graph, mask: fx.Node, rank: int) -> fx.Node:
    for _ in range(rank - mask.meta["example_value"].dim()):
        mask = emit(graph, torch.unsqueeze, mask, 0)
    return mask


def _sum(graph: fx.Graph, steps: Sequence[Step], query: torch.Tensor) -> fx.Node:
    """All steps as one tensor to add, with at least two dims."""
    total: fx.Node | None = None
    for step in steps:
        if isinstance(step, Fill):
            total = _filled(graph, step, query, step.value, total)
            continue
        bias = step.node
        if step.least is not None:
            bias = emit(graph, torch.clamp, bias, step.least)
        elif bias.meta["example_value"].dtype != query.dtype and not torch.is_autocast_enabled(query.device.type):
            bias = emit(graph, torch.Tensor.to, bias, query.dtype)
        total = bias if total is None else emit(graph, operator.add, total, bias)
    assert total is not None
    if total.meta["example_value"].dim() < 2:
        total = emit(graph, torch.Tensor.expand, total, (1, -1))
    return total


def _filled(
    graph: fx.Graph, fill: Fill, query: torch.Tensor, value: float, total: fx.Node | None = None
) -> fx.Node:  # fmt: skip
    """`total`, or 0, with `value` where the fill applies."""
    like = {"dtype": query.dtype, "device": query.device}
    full = emit(graph, torch.full, (), value, **like)
    zero = total if total is not None else emit(graph, torch.full, (), 0.0, **like)
    chosen = (full, zero) if fill.filled else (zero, full)
    return emit(graph, torch.where, fill.condition, *chosen)


def _with_equal_weights(
    graph: fx.Graph, steps: Sequence[Step], q: fx.Node, total: fx.Node, trained: bool
) -> tuple[fx.Node, fx.Node]:  # fmt: skip
    """Queries with 0 in rows that finite fills cover entirely: scores of 0, whatever is added, are the filled ones.

    If the attention is trained, the mask is 0 there, too: a fused backward recomputes weights from sums that absorb
    the scores. No gradient passes through a filled score.
    """
    gone: fx.Node | None = None
    for step in steps:
        if isinstance(step, Fill) and step.value != -math.inf:
            condition = step.condition if step.filled else emit(graph, torch.logical_not, step.condition)
            gone = condition if gone is None else emit(graph, torch.logical_or, gone, condition)
    if gone is None:
        return q, total
    gone = _of_rank(graph, gone, q.meta["example_value"].dim())
    lost = emit(graph, torch.all, gone, dim=-1, keepdim=True)
    fill = torch.Tensor.masked_fill
    return emit(graph, fill, q, lost, 0.0), emit(graph, fill, total, lost, 0.0) if trained else total


def _with_means(graph: fx.Graph, fill: Fill, q: fx.Node) -> tuple[fx.Node, dict[str, Any]]:
    """The queries and arguments for one finite fill, in a dtype where adding it would not absorb the score."""
    query = value_of(q)
    assert query is not None
    condition = _of_rank(graph, fill.condition, max(query.dim(), 2))
    gone = condition if fill.filled else emit(graph, torch.logical_not, condition)
    lost = emit(graph, torch.all, gone, dim=-1, keepdim=True)
    left = emit(graph, torch.logical_and, gone, emit(graph, torch.logical_not, lost))
    mask = _filled(graph, Fill(left, filled=True, value=-math.inf), query, -math.inf)
    return emit(graph, torch.Tensor.masked_fill, q, lost, 0.0), {"attn_mask": mask}
