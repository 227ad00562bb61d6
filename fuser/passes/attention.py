"""Attention written as products and a softmax becomes `scaled_dot_product_attention`, which never stores the scores.

Models spell attention differently: `matmul`, `@`, `bmm`, `baddbmm` or `einsum`; the scale on queries, keys or scores,
as a factor or a divisor, a number or a tensor made of one; the mask added, filled in or selected by `where`; 16-bit
operands, or only the softmax in float32 between casts; a dropout. Read backwards from the softmax, all of these are one
chain of nodes. `products.py` reads the products, `attention_masks.py` the masks and biases.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from fuser import config, targets
from fuser.attention.products import product_dtype
from fuser.lazy_dataclasses import dataclass
from fuser.passes import attention_masks as masks
from fuser.passes import attention_providers as providers
from fuser.passes.attention_masks import Bias, Fill, Step
from fuser.passes.calls import (
    Autocast,
    Call,
    autocasts,
    call_of,
    emit,
    is_dead_dropout,
    number_of,
    position_of_writes,
    shape_of,
    value_of,
)
from fuser.passes.hints import are_numbers, depends_on_data, size_hint
from fuser.passes.peeling import CASTS, SIXTEEN, narrowed, peeled, requires_grad, without_scale
from fuser.passes.products import Factor, Mismatch, scores_product, weighted_product
from fuser.passes.result_layouts import is_copied, ordered_copy

_DTYPES = {torch.float32, torch.float64, *SIXTEEN}


@dataclass
class _Found:
    """A matched chain of nodes: softmax(q @ k.T * scale, masked) @ v, with its dims in the order `out`.

    `steps`: the masks and biases applied to the scaled scores, in order. `wide`: the result is cast to float32.
    """

    first: fx.Node
    last: fx.Node
    q: Factor
    k: Factor
    v: Factor
    out: tuple[int, ...]
    scale: float = 1.0
    dropout: float = 0.0
    steps: list[Step] = field(default_factory=list)
    wide: bool = False


def fuse_attention(module: fx.GraphModule) -> int:
    """Attention written as products and a softmax becomes `scaled_dot_product_attention`."""
    nodes = list(module.graph.nodes)
    casts = autocasts(nodes)
    order = {node: i for i, node in enumerate(nodes)}
    writes = position_of_writes(nodes)
    changed = 0
    for node in nodes:
        call = call_of(node)
        if node.target is F.scaled_dot_product_attention:
            changed += masks.without_mask(node)
        if call is None or call.name != "softmax":
            continue
        try:
            found = _match(call, casts[order[node]], _calm(order, writes))
            if casts[order[found.first]].region != casts[order[found.last]].region:
                raise Mismatch
            inside = _between(found)
            if any(order[found.first] < w < order[found.last] and nodes[w] not in inside for w in writes):
                raise Mismatch
            _rewrite(module.graph, found)
            _erase(inside, order)
            changed += 1
        except (Mismatch, LookupError):
            continue
    return changed


# -- reading ----------------------------------------------------------------------------------------------------------
Calm = Callable[[fx.Node, fx.Node], bool]


def _calm(order: dict[fx.Node, int], writes: list[int]) -> Calm:
    """A predicate of two nodes: whether no node between them writes."""
    return lambda first, last: not any(order[first] < w < order[last] for w in writes)


def _match(softmax: Call, autocast: Autocast, calm: Calm) -> _Found:
    scores, dim = softmax.arg(0, "input"), softmax.arg(1, "dim")
    shape = shape_of(scores)
    if shape is None or len(shape) not in (3, 4) or dim not in (-1, len(shape) - 1):
        raise Mismatch
    found = _weights_reader(softmax.node)
    _read_scores(scores, shape, found)
    _peel(found, autocast, calm)
    _check(found, shape, autocast)
    return found


def _readers(node: fx.Node) -> list[fx.Node]:
    """The users of a node that read its elements; `x.type_as(node)` reads only the dtype."""
    return [u for u in node.users if not (u.target == "type_as" and u.args[0] is not node)]


def _only_user(node: fx.Node) -> fx.Node:
    if len(node.users) != 1:
        raise Mismatch
    return next(iter(node.users))


def _weights_reader(node: fx.Node) -> _Found:
    """A match that holds the product of the softmax's result with the values, found through casts and one dropout."""
    dropout = 0.0
    while True:
        user = _only_user(node)
        call = call_of(user)
        if call is None:
            raise Mismatch
        if call.name == "matmul":
            v, out = weighted_product(call, node)
            return _Found(user, user, v, v, v, out, dropout=dropout)
        if call.args[:1] != (node,) or call.name not in (*CASTS, "dropout"):
            raise Mismatch
        if call.name == "dropout" and not is_dead_dropout(call):
            dropout = _live_dropout(call, dropout)
        node = user


def _live_dropout(call: Call, before: float) -> float:
    """The dropout's probability. Fused attention supports dropout on CUDA alone, with random numbers of its own."""
    share, value = call.arg(1, "p", 0.5), value_of(call.node)
    fused = value is not None and targets.has(value.device, "flash") and getattr(config, "random", "") != "eager"
    if not fused or before or not isinstance(share, float) or not 0 < share < 1:
        raise Mismatch
    return share


def _read_scores(node: Any, shape: tuple[Any, ...], found: _Found) -> None:
    """Match the chain from the softmax's argument back to the product of queries and keys."""
    scaled = False
    while True:
        call = call_of(node)
        if call is None or len(_readers(node)) != 1 or shape_of(node) != shape:
            raise Mismatch
        match call.name:
            case "matmul":
                found.first = node
                found.q, found.k = scores_product(call, len(shape))
                break
            case "baddbmm":
                _read_baddbmm(call, found, scaled)
                break
            case "mul" | "div":
                node, factor = without_scale(call)
                found.scale *= factor
                scaled = True
            case "add" if not scaled:
                node = _read_bias(call, shape, found)
            case "masked_fill" | "where" if not scaled:
                node = _read_fill(call, found)
            case name if name in CASTS and not _narrows(call):
                node = call.args[0]
            case _:
                raise Mismatch
    found.steps.reverse()


def _read_baddbmm(call: Call, found: _Found, scaled: bool) -> None:
    """Match `beta * bias + alpha * q @ k`."""
    beta, alpha = call.kwargs.get("beta", 1), call.kwargs.get("alpha", 1)
    bias = call.arg(0, "input")
    if not all(isinstance(n, (int, float)) for n in (beta, alpha)) or alpha == 0 or beta not in (0, 1):
        raise Mismatch
    if beta:
        if scaled or not isinstance(bias, fx.Node):
            raise Mismatch
        found.steps.append(Bias(bias))
    found.scale *= alpha
    found.first = call.node
    product = Call(call.node, "matmul", (call.arg(1, "batch1"), call.arg(2, "batch2")), {})
    found.q, found.k = scores_product(product, 3)


def _narrows(call: Call) -> bool:
    """Whether a cast loses precision: the scores would be rounded, or become integers."""
    before, after = value_of(call.args[0]), value_of(call.node)
    return before is None or after is None or torch.promote_types(before.dtype, after.dtype) != after.dtype


def _read_bias(call: Call, shape: tuple[Any, ...], found: _Found) -> fx.Node:
    """The operand of an addition that leads to the product; the other operand becomes a bias."""
    if len(call.args) != 2 or call.kwargs or not all(isinstance(a, fx.Node) for a in call.args):
        raise Mismatch
    left: fx.Node
    right: fx.Node
    left, right = call.args
    if shape_of(left) != shape or (shape_of(right) == shape and not _leads_to_product(left)):
        left, right = right, left
    found.steps.append(Bias(right))
    return left


def _leads_to_product(node: Any) -> bool:
    for _ in range(6):
        call = call_of(node)
        if call is None or call.name in ("matmul", "baddbmm"):
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
    if value is None or not isinstance(node, fx.Node):
        raise Mismatch
    if truth is None or truth.dtype is not torch.bool:
        raise Mismatch
    found.steps.append(Fill(condition, filled, value))
    return node


_FILL_ARGS = {"masked_fill": ("input", "mask", "value"), "where": ("condition", "input", "other")}


def _peel(found: _Found, autocast: Autocast, calm: Calm) -> None:
    """Move scales and casts to float32 off queries, keys and values, if the result is the same without them."""
    value = value_of(found.last)
    device = value.device.type if value is not None else ""
    casts = autocast.dtype(device) is None
    q, k, v = (peeled(f, casts, lambda n: calm(n, found.last)) for f in (found.q, found.k, found.v))
    if any(p.wide for p in (q, k, v)):
        last = narrowed(found.last)
        values = [value_of(n) for n in (*(p.factor.node for p in (q, k, v)), last)]
        dtypes = {None if t is None else t.dtype for t in values}
        needed = torch.is_grad_enabled() and any(requires_grad(p.factor.node) for p in (q, k, v))
        if len(dtypes) == 1 and dtypes <= SIXTEEN and not needed:
            found.wide = last is not found.last
        else:
            q, k, v = (peeled(f, casts=False, calm=lambda n: calm(n, found.last)) for f in (found.q, found.k, found.v))
    found.q, found.k = q.factor, k.factor
    if v.scale == 1:
        found.v = v.factor
    elif v.wide:
        raise Mismatch
    found.scale *= q.scale * k.scale


# -- judging ----------------------------------------------------------------------------------------------------------
def _check(found: _Found, shape: tuple[Any, ...], autocast: Autocast) -> None:
    q, k, v, out = (value_of(n) for n in (found.q.node, found.k.node, found.v.node, found.last))
    if q is None or k is None or v is None or out is None:
        raise Mismatch
    if any(map(depends_on_data, (q, k, v))):
        raise Mismatch  # the fused operator asks whether a size is 0
    if any("0" in (shape_of(f.node) or ()) for f in (found.q, found.k, found.v)):
        raise Mismatch  # for empty operands in 16-bit floats on CUDA it returns no tensor at all
    low = autocast.dtype(q.device.type)
    if low is None:
        same = q.dtype == k.dtype == v.dtype == (q.dtype if found.wide else out.dtype) and q.dtype in _DTYPES
    else:  # autocast casts products to `low`, and the fused operator's operands too
        same = out.dtype == low and all(t.dtype in (low, torch.float32) for t in (q, k, v))
    if not same or not q.device == k.device == v.device:
        raise Mismatch
    if None in found.q.order or found.scale <= 0 or low is None and not (found.dropout or _is_exact(q, shape)):
        raise Mismatch
    batch = [str(q.shape[d]) for d in found.q.order[:-2] if d is not None]
    for factor, value in ((found.k, k), (found.v, v)):
        for size, dim in zip(batch, factor.order[:-2]):
            if dim is None or str(value.shape[dim]) != size:
                if not are_numbers(*q.shape) or dim is not None and str(value.shape[dim]) != "1":
                    raise Mismatch
    masks.check(found.steps, q.dtype, low, shape)
    if _is_slower(found, q.dtype if low is None else low, shape):
        raise Mismatch


def _is_slower(found: _Found, dtype: torch.dtype, shape: Sequence[str]) -> bool:
    """Whether fused attention is slower than products: on CUDA in training for wide heads, on the CPU for few keys.

    In training, products keep the weights and recompute no score. With many keys they are bound by memory.
    """
    q, k, v, scores = (value_of(n) for n in (found.q.node, found.k.node, found.v.node, found.first))
    if q is None or v is None or scores is None:
        return False
    trained = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (q, k, v))
    if targets.has(q.device, "flash"):
        widths = [size_hint(t.shape[f.order[-1]]) for t, f in ((q, found.q), (v, found.v)) if f.order[-1] is not None]
        return trained and max(widths) > _WIDEST_HEAD
    if not targets.has(q.device, "onednn") or product_dtype(dtype) is not dtype or not shape[-1].isdigit():
        return False
    narrow, keys = dtype.itemsize < 4, int(shape[-1])
    *batch, rows, _ = map(size_hint, scores.shape)
    at = found.q.order[-1]
    assert at is not None, "queries without the dim that is multiplied"
    n, heads, width = math.prod(batch[:1]), math.prod(batch[1:]), size_hint(q.shape[at])
    a = providers.Attention(
        n, heads, heads, rows, keys, width, dtype, causal=False, mask=None, scale=None, backward=trained, rounded=True
    )
    if not trained:
        return providers.is_faster_written(a)
    if keys < _MANY_KEYS[narrow]:
        return True
    return narrow and keys < _MOST_KEYS and providers.choose(a) != providers.ATEN


def _is_exact(query: torch.Tensor, shape: Sequence[str]) -> bool:
    """Whether fused attention is as near to float64 as products are, by root mean squares of errors on an H200.

    In float32 on CUDA torch has one fused kernel. Its error divided by that of products: result 2.0 and gradients 3.4
    for 7 keys, 1.8 and 3.4 for 64, 1.6 and 2.5 for 197, 1.0 and 1.4 for 1024. In 16-bit floats all fused kernels have
    smaller errors than products, except in single gradients with very few keys.
    """
    if not targets.has(query.device, "flash"):
        return True
    kind = query.dtype in SIXTEEN or torch.get_float32_matmul_precision() != "highest"
    least = _FEWEST_KEYS[kind][torch.is_grad_enabled() and query.requires_grad]
    return int(shape[-1]) >= least if shape[-1].isdigit() else kind


# Width of heads above which CUDA's kernels with gradients keep sums in memory: on an H200 the backward of attention
# between 32 channels of 3,136 points, as in DaViT, takes 1.9 ms.
_WIDEST_HEAD = 256
# Number of keys from which fused attention may be faster: by whether floats have 16 bits. Two AMD cores, 16 Intel ones.
_MANY_KEYS = {True: 1024, False: 256}
_MOST_KEYS = 2048  # number of keys from which every fused attention is faster
_FEWEST_KEYS = {True: (0, 32), False: (128, 1024)}  # (inference, training), by whether 16-bit floats or TF32


def _between(found: _Found) -> set[fx.Node]:
    """The nodes of the chain, and all nodes that use them before its end, such as in-place spellings of its steps."""
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
        q = _placed(graph, found.q, None)
        k, v = (_placed(graph, f, q) for f in (found.k, found.v))
        q, kwargs = masks.arguments(graph, found.steps, q, k)
        operands = [_in_rows(graph, o) for o in (q, k, v)]
        flat = len(shape_of(q) or ()) == 3
        if flat:
            operands = [emit(graph, torch.unsqueeze, o, 0) for o in operands]
            if kwargs.get("attn_mask") is not None:
                kwargs["attn_mask"] = emit(graph, torch.unsqueeze, kwargs["attn_mask"], 0)
        kwargs["scale"] = found.scale
        if found.dropout:
            kwargs["dropout_p"] = found.dropout
        new = attention = emit(graph, F.scaled_dot_product_attention, *operands, **kwargs)
        if flat:
            new = emit(graph, torch.squeeze, new, 0)
        expected = value_of(found.last)
        assert expected is not None
        if found.out != tuple(range(len(found.out))):
            new = ordered_copy(graph, new, found.out, expected)
        elif not _has_eager_strides(new, q) and not is_copied(found.last, _layouts(q)):
            new = emit(graph, torch.Tensor.contiguous, new)
        if found.wide:
            new = emit(graph, torch.Tensor.float, new)
    if (value := value_of(found.first)) is not None and value.dtype in SIXTEEN:
        attention.meta["custom"] = {**attention.meta.get("custom", {}), providers.ROUNDED: True}
    new.meta = {**found.last.meta, **{n: new.meta[n] for n in ("custom",) if n in new.meta}}
    found.last.replace_all_uses_with(new)


def _placed(graph: fx.Graph, factor: Factor, like: fx.Node | None) -> fx.Node:
    """A factor with its dims in order. Missing dims are inserted, and expanded to the sizes of `like`."""
    node = factor.node
    there = [d for d in factor.order if d is not None]
    if there != list(range(len(there))):
        swapped = [*range(len(there) - 2), len(there) - 1, len(there) - 2]
        if there == swapped:
            node = emit(graph, torch.transpose, node, -1, -2)
        else:
            node = emit(graph, torch.permute, node, there)
    for at, d in enumerate(factor.order):
        if d is None:
            node = emit(graph, torch.unsqueeze, node, at)
    if like is None:
        return node
    batch, own = like.meta["example_value"].shape[:-2], shape_of(node) or ()
    if list(own[:-2]) != list(map(str, batch)):
        node = emit(graph, torch.Tensor.expand, node, (*batch, -1, -1))
    return node


def _in_rows(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """An operand whose last dim has stride 1. For any other, torch has no fused kernel: it computes products, and those
    of 16-bit floats in float32."""
    value = value_of(node)
    stride = None if value is None else value.stride(-1)
    return node if isinstance(stride, int) and stride == 1 else emit(graph, torch.Tensor.contiguous, node)


def _has_eager_strides(new: fx.Node, query: fx.Node) -> bool:
    """Whether fused attention writes its result contiguously, as eager does, for static and for symbolic sizes.

    Kernels differ: on the CPU and in flash attention the result has the queries' layout. In memory-efficient attention
    it has the layout (batch, tokens, heads, width) for any queries.
    """
    values = [value_of(n) for n in (query, new)]
    contiguous = [t.is_contiguous() for t in values if t is not None and are_numbers(*t.stride())]
    return len(contiguous) == 2 and all(contiguous)


def _layouts(query: fx.Node) -> list[torch.Tensor]:
    """Tensors whose dims are in memory as those of fused attention's result may be: see `_has_eager_strides`."""
    value = value_of(query)
    assert value is not None
    return [value, torch.empty_like(value.transpose(-2, -3), memory_format=torch.contiguous_format).transpose(-2, -3)]


def _erase(inside: set[fx.Node], order: dict[fx.Node, int]) -> None:
    """Remove the chain's unused nodes, including in-place steps on the scores."""
    for node in sorted(inside, key=lambda n: -order.get(n, len(order))):
        if not node.users:
            node.graph.erase_node(node)
