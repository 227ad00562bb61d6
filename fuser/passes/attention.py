"""Attention spelled out becomes `scaled_dot_product_attention`, which never writes the matrix of scores.

What models write differs in spelling alone: `matmul`, `@`, `bmm` or `einsum`; the scale before or after the product, as
a factor or a divisor, a number or a tensor made of one; the mask added, filled in or chosen by `where`; the softmax in
float32 between two casts; a dropout. Read backwards from the softmax, all are one chain of nodes.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from fuser import config
from fuser.passes.calls import (
    Autocast,
    Call,
    autocasts,
    call_of,
    emit,
    number_of,
    position_of_writes,
    shape_of,
    value_of,
)
from fuser.passes.hints import depends_on_data
from fuser.passes.masks import HUGE, is_mask

_CASTS = frozenset({"float", "to", "type", "type_as", "half", "bfloat16", "contiguous"})
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_LIMITS = (torch.float32, torch.float64)  # dtypes in which "score + huge negative number" equals that number


@dataclass
class _Found:
    """What a chain of nodes computes: softmax(q @ k.T * scale, masked) @ v."""

    first: fx.Node
    last: fx.Node
    q: fx.Node
    k_transposed: fx.Node
    v: fx.Node
    scale: float = 1.0
    dropout: float = 0.0
    biases: list[fx.Node] = field(default_factory=list)  # added to the scores
    fills: list[tuple[fx.Node, bool, float]] = field(default_factory=list)  # (condition, fill where it is, value)


class _Mismatch(Exception):
    """This is no attention, or one that cannot be rewritten safely."""


def fuse_attention(module: fx.GraphModule) -> int:
    """Attention written as products and a softmax becomes `scaled_dot_product_attention`."""
    nodes = list(module.graph.nodes)
    if config.numerics == "eager":
        return 0
    casts = autocasts(nodes)
    order = {node: i for i, node in enumerate(nodes)}
    writes = position_of_writes(nodes)
    changed = 0
    for node in nodes:
        call = call_of(node)
        if call is None or call.name != "softmax":
            continue
        try:
            found = _match(call, casts[order[node]])
            if casts[order[found.first]].region != casts[order[found.last]].region:
                raise _Mismatch
            inside = _between(found)
            if any(order[found.first] < w < order[found.last] and nodes[w] not in inside for w in writes):
                raise _Mismatch
            _rewrite(module.graph, found)
            _erase(inside, order)
            changed += 1
        except (_Mismatch, LookupError):
            continue
    return changed


# -- reading ----------------------------------------------------------------------------------------------------------
def _match(softmax: Call, autocast: Autocast) -> _Found:
    scores, dim = softmax.arg(0, "input"), softmax.arg(1, "dim")
    shape = shape_of(scores)
    if shape is None or len(shape) not in (3, 4) or dim not in (-1, len(shape) - 1):
        raise _Mismatch
    found = _weights_reader(softmax.node)
    _read_scores(scores, shape, found)
    _check(found, shape, autocast)
    return found


def _readers(node: fx.Node) -> list[fx.Node]:
    """Users of a node that read its elements; `x.type_as(node)` asks for the dtype alone."""
    return [u for u in node.users if not (u.target == "type_as" and u.args[0] is not node)]


def _only_user(node: fx.Node) -> fx.Node:
    if len(node.users) != 1:
        raise _Mismatch
    return next(iter(node.users))


def _weights_reader(node: fx.Node) -> _Found:
    """The product of the softmax's result with the values, through casts and one dropout."""
    dropout = 0.0
    while True:
        user = _only_user(node)
        call = call_of(user)
        if call is None:
            raise _Mismatch
        if call.name == "matmul":
            weights, v = _product(call, "qk,kd->qd")
            if weights is not node or v is node:
                raise _Mismatch
            return _Found(user, user, user, user, v, dropout=dropout)
        if call.args[:1] != (node,) or call.name not in (*_CASTS, "dropout"):
            raise _Mismatch
        if call.name == "dropout" and not is_dead_dropout(call):
            dropout = _live_dropout(call, dropout)
        node = user


def _live_dropout(call: Call, before: float) -> float:
    """The share of weights that a dropout takes away. Fused attention draws on CUDA alone, and its own numbers."""
    share, value = call.arg(1, "p", 0.5), value_of(call.node)
    fused = value is not None and value.device.type == "cuda" and getattr(config, "random", "") != "eager"
    if not fused or before or not isinstance(share, float) or not 0 < share < 1:
        raise _Mismatch
    return share


def is_dead_dropout(call: Call) -> bool:
    """Whether a dropout gives back its argument."""
    return call.name == "dropout" and (call.arg(2, "training", True) is False or call.arg(1, "p", 0.5) == 0)


def _product(call: Call, form: str) -> tuple[fx.Node, fx.Node]:
    """The two factors of a product of matrices; of an einsum if it is the product `form` under leading dims."""
    equation, operands = call.args[0] if call.args else None, call.args
    if isinstance(equation, str):
        operands = call.args[1:]
        if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
            operands = tuple(operands[0])
        if len(operands) != 2 or _canonical(equation) != _canonical(_with_batch(form, operands[0])):
            raise _Mismatch
    if len(operands) != 2 or not all(isinstance(o, fx.Node) for o in operands) or call.kwargs:
        raise _Mismatch
    return operands[0], operands[1]


def _with_batch(form: str, operand: Any) -> str:
    rank = len(shape_of(operand) or ())
    batch = "xyzw"[: max(rank - 2, 0)]
    left, right = form.split("->")
    return ",".join(batch + part for part in left.split(",")) + "->" + batch + right


def _canonical(equation: str) -> str:
    """An einsum's equation with its letters renamed in order of appearance."""
    names: dict[str, str] = {}
    return "".join(names.setdefault(c, chr(97 + len(names))) if c.isalpha() else c for c in equation if c != " ")


def _read_scores(node: Any, shape: tuple[Any, ...], found: _Found) -> None:
    """From the softmax's argument back to the product of queries and keys."""
    scaled = False
    while True:
        call = call_of(node)
        if call is None or len(_readers(node)) != 1 or shape_of(node) != shape:
            raise _Mismatch
        match call.name:
            case "matmul":
                found.first = node
                found.q, found.k_transposed = _scores_product(call)
                return
            case "mul" | "div":
                node = _read_scale(call, found)
                scaled = True
            case "add" if not scaled:
                node = _read_bias(call, shape, found)
            case "masked_fill" | "where" if not scaled:
                node = _read_fill(call, found)
            case name if name in _CASTS and not _narrows(call):
                node = call.args[0]
            case _:
                raise _Mismatch


def _scores_product(call: Call) -> tuple[fx.Node, fx.Node]:
    if call.args and isinstance(call.args[0], str):
        q, k = _product(call, "qd,kd->qk")
        with k.graph.inserting_after(k):
            swapped = k.graph.call_method("transpose", (k, -1, -2))
        value = value_of(k)
        if value is not None:
            swapped.meta["example_value"] = value.transpose(-1, -2)
        return q, swapped
    return _product(call, "")


def _narrows(call: Call) -> bool:
    """Whether a cast loses precision: the scores would be rounded, or become integers."""
    before, after = value_of(call.args[0]), value_of(call.node)
    return before is None or after is None or torch.promote_types(before.dtype, after.dtype) != after.dtype


def _read_scale(call: Call, found: _Found) -> fx.Node:
    if len(call.args) != 2 or call.kwargs:
        raise _Mismatch
    left, right = call.args
    number = number_of(right)
    if number is None and call.name == "mul":
        left, number = right, number_of(left)
    if number is None or number == 0 or not math.isfinite(number) or not isinstance(left, fx.Node):
        raise _Mismatch
    found.scale *= number if call.name == "mul" else 1 / number
    return left


def _read_bias(call: Call, shape: tuple[Any, ...], found: _Found) -> fx.Node:
    """The operand of an addition that leads to the product; the other is the bias."""
    if len(call.args) != 2 or call.kwargs or not all(isinstance(a, fx.Node) for a in call.args):
        raise _Mismatch
    left: fx.Node
    right: fx.Node
    left, right = call.args
    if shape_of(left) != shape or (shape_of(right) == shape and not _leads_to_product(left)):
        left, right = right, left
    found.biases.append(right)
    return left


def _leads_to_product(node: Any) -> bool:
    for _ in range(6):
        call = call_of(node)
        if call is None or call.name == "matmul":
            return call is not None
        node = next((a for a in call.args if isinstance(a, fx.Node)), None)
    return False


def _read_fill(call: Call, found: _Found) -> fx.Node:
    first, second, third = (call.arg(i, name) for i, name in enumerate(_FILL_ARGS[call.name]))
    if call.name == "masked_fill":
        node, condition, filled, value = first, second, True, number_of(third)
    else:
        value = number_of(third)
        filled = value is None
        condition, node = first, third if filled else second
        value = number_of(second) if filled else value
    truth = value_of(condition)
    if value is None or value > HUGE or not isinstance(node, fx.Node):
        raise _Mismatch
    if truth is None or truth.dtype is not torch.bool:
        raise _Mismatch
    found.fills.append((condition, filled, value))
    return node


_FILL_ARGS = {"masked_fill": ("input", "mask", "value"), "where": ("condition", "input", "other")}


# -- judging ----------------------------------------------------------------------------------------------------------
def _check(found: _Found, shape: tuple[Any, ...], autocast: Autocast) -> None:
    q, k, v, out = (value_of(n) for n in (found.q, found.k_transposed, found.v, found.last))
    if q is None or k is None or v is None or out is None:
        raise _Mismatch
    if any(map(depends_on_data, (q, k, v))):
        raise _Mismatch  # the fused operator asks whether a size is 0
    low = autocast.dtype(q.device.type)
    if low is None:
        same = q.dtype == k.dtype == v.dtype == out.dtype and q.dtype in _DTYPES
    else:  # products are cast to `low`, and so is what the fused operator is given
        same = out.dtype == low and all(t.dtype in (low, torch.float32) for t in (q, k, v))
    if not same or q.device != v.device:
        raise _Mismatch
    batch = [tuple(map(str, t.shape[:-2])) for t in (q, k, v)]
    if len(set(batch)) != 1 or not q.dim() == k.dim() == v.dim() == len(shape):
        raise _Mismatch
    if found.scale <= 0:
        raise _Mismatch
    for _, _, value in found.fills:
        _check_fill(value, q.dtype, low)
    for i, bias in enumerate(found.biases):
        if low is not None and is_mask(bias):
            found.biases[i] = _clamped(bias, torch.finfo(low).min)
        else:
            _check_bias(bias, q.dtype if low is None else low, shape)


def _check_fill(value: float, dtype: torch.dtype, low: torch.dtype | None) -> None:
    """A fill is added to the scores, in float32: that gives the fill itself, as eager has it, if it is large enough."""
    if value == -math.inf:
        return
    if low is None and dtype not in _LIMITS:
        raise _Mismatch
    if low is not None and value < torch.finfo(low).min:
        raise _Mismatch  # it would become minus infinity, and a row of it NaN


def _clamped(mask: fx.Node, least: float) -> fx.Node:
    """A mask whose huge numbers stay finite when they are rounded to `least`'s dtype."""
    value = value_of(mask)
    assert value is not None
    if value.requires_grad:
        raise _Mismatch
    with mask.graph.inserting_after(mask):
        return emit(mask.graph, torch.clamp, mask, least)


def _check_bias(bias: fx.Node, dtype: torch.dtype, shape: tuple[Any, ...]) -> None:
    """Under autocast a bias in float32 stays apart: eager adds it as it is, the fused operator would round it."""
    value = value_of(bias)
    if value is None or not value.dtype.is_floating_point or value.dim() > len(shape) or value.dtype != dtype:
        raise _Mismatch
    if value.requires_grad and torch.is_grad_enabled():
        raise _Mismatch  # no fused attention computes its gradient


def _between(found: _Found) -> set[fx.Node]:
    """The nodes of the chain, in-place spellings of its own steps included."""
    chain = {found.first}
    for node in found.first.graph.nodes:
        if node is found.last:
            break
        call = call_of(node)
        if call is not None and any(a in chain for a in call.args if isinstance(a, fx.Node)):
            chain.add(node)
    return chain | {found.last}


# -- writing ----------------------------------------------------------------------------------------------------------
def _rewrite(graph: fx.Graph, found: _Found) -> None:
    with graph.inserting_before(found.last):
        mask = _mask(graph, found)
        k = _untransposed(graph, found.k_transposed)
        operands = [found.q, k, found.v]
        flat = len(shape_of(found.q) or ()) == 3
        if flat:
            operands = [emit(graph, torch.unsqueeze, o, 0) for o in operands]
            mask = emit(graph, torch.unsqueeze, mask, 0) if mask is not None else None
        kwargs: dict[str, Any] = {"attn_mask": mask, "scale": found.scale}
        if found.dropout:
            kwargs["dropout_p"] = found.dropout
        new = emit(graph, F.scaled_dot_product_attention, *operands, **kwargs)
        if flat:
            new = emit(graph, torch.squeeze, new, 0)
        if not _has_eager_strides(new, found) and not _is_swapped_and_copied(found.last):
            new = graph.call_method("contiguous", (new,))
    new.meta = dict(found.last.meta)
    found.last.replace_all_uses_with(new)


def _has_eager_strides(new: fx.Node, found: _Found) -> bool:
    """Whether fused attention writes its result as eager does, contiguous, for static and for symbolic sizes.

    Kernels differ: on the CPU and in flash attention the result has the queries' layout, in memory-efficient attention
    that of (batch, tokens, heads, width) whatever the queries have.
    """
    query, value = value_of(found.q), value_of(new)
    assert query is not None and value is not None
    contiguous = [t.is_contiguous() for t in (query, value) if all(isinstance(s, int) for s in t.stride())]
    return len(contiguous) == 2 and all(contiguous)


def _is_swapped_and_copied(node: fx.Node) -> bool:
    """Whether all that reads a result swaps its dims and copies it, so that its own layout is not seen."""
    names = [u.target for user in node.users for u in user.users]
    swaps = all(u.target in ("transpose", "permute", torch.transpose, torch.permute) for u in node.users)
    return swaps and bool(names) and all(n in ("contiguous", "reshape", "flatten", torch.flatten) for n in names)


def _erase(inside: set[fx.Node], order: dict[fx.Node, int]) -> None:
    """Remove the chain, steps that write into the scores too: nobody reads those any more."""
    for node in sorted(inside, key=lambda n: -order.get(n, len(order))):
        if not node.users:
            node.graph.erase_node(node)


def _untransposed(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """The keys whose last two dims, swapped, are `node`."""
    call = call_of(node)
    rank = len(shape_of(node) or ())
    if call is not None and call.name == "transpose" and isinstance(call.args[0], fx.Node):
        dims = {d % rank for d in call.args[1:] if isinstance(d, int)}
        if dims == {rank - 1, rank - 2}:
            return call.args[0]
    return emit(graph, torch.transpose, node, -1, -2)


def _mask(graph: fx.Graph, found: _Found) -> fx.Node | None:
    """All biases and fills as one tensor to add; None if there is none.

    A row that is masked as a whole by minus infinity is NaN, as a softmax of nothing is: the fused operator gives 0.
    """
    query = value_of(found.q)
    assert query is not None
    total: fx.Node | None = None
    for bias in found.biases:
        total = bias if total is None else emit(graph, operator.add, total, bias)
    for condition, filled, value in found.fills:
        like = {"dtype": query.dtype, "device": query.device}
        full = emit(graph, torch.full, (), value, **like)
        zero = total if total is not None else emit(graph, torch.full, (), 0.0, **like)
        chosen = (full, zero) if filled else (zero, full)
        total = emit(graph, torch.where, condition, *chosen)
    if total is None:
        return None
    if total.meta["example_value"].dim() < 2:
        total = emit(graph, torch.Tensor.expand, total, (1, -1))
    lost = emit(graph, torch.all, emit(graph, operator.eq, total, -math.inf), dim=-1, keepdim=True)
    total = emit(graph, torch.Tensor.masked_fill, total, lost, math.nan)
    for _ in range(len(shape_of(found.q) or ()) - total.meta["example_value"].dim()):
        total = emit(graph, torch.unsqueeze, total, 0)
    return total
