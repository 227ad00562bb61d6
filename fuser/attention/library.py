"""ATen's attention on the CPU by products of a library with one kernel between them, forward and backward.

ATen's own fused kernel multiplies 16-bit floats slowly on machines without tile instructions for them. Here a library
multiplies some heads or rows at a time, and one kernel computes weights from their scores, or gradients, while these
are in cache.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from fuser import interface
from fuser.attention.by_rows import softmax
from fuser.attention.products import Ways, add_pair
from fuser.attention.reach import BLOCK, Reach, Reaching
from fuser.lazy_dataclasses import dataclass
from fuser.lowering.shapes import dense_strides, order_like
from fuser.reasons import served_by

aten = torch.ops.aten
FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
SCORES = 1 << 21  # bytes of a chunk's scores and weights for each thread, about
LEAST_ROWS = 128  # of a chunk of one head; a product of fewer rows is slow
_MOST_PACKED = 1 << 17  # elements
REACHED_ROWS = 128  # rows of a chunk if the mask gives each block of rows keys of its own
_CAUSAL_PARTS = 4  # chunks of the rows of causal attention, so that later keys are left out
Part = tuple[slice, slice, slice]  # batches, heads of keys, rows of queries


@dataclass(frozen=True)
class _Sizes:
    batch: int
    groups: int  # heads of keys
    group: int  # query heads for each of them
    rows: int
    keys: int
    causal: bool
    reach: Reach | None  # of the mask

    @staticmethod
    def of(q: torch.Tensor, k: torch.Tensor, causal: bool, reach: Reaching | None) -> _Sizes:
        rows, keys = q.shape[2], k.shape[2]
        here = None if reach is None else reach.at(rows, keys)
        return _Sizes(q.shape[0], k.shape[1], q.shape[1] // k.shape[1], rows, keys, causal, here)

    def parts(self, score_bytes: int) -> Iterator[Part]:
        """Chunks: several batches, or several heads of one batch, or rows of some heads."""
        threads = torch.get_num_threads()
        most = max(SCORES * threads // score_bytes, 1)
        rows, keys = self.rows, max(self.keys, 1)
        if self.causal and rows >= 2 * LEAST_ROWS:
            rows = max(-(-rows // _CAUSAL_PARTS), LEAST_ROWS)
        if self.reach is not None:
            rows = min(REACHED_ROWS, rows)
            keys = max(k.stop - k.start for k in map(self.seen, _slices(self.rows, rows)))
        of_row = self.group * keys
        rows = max(min(rows, most // (of_row * min(threads, self.groups))), min(LEAST_ROWS, self.rows))
        rows = _even(self.rows, rows) if self.reach is None else max(rows // BLOCK, 1) * BLOCK
        heads = _even(self.groups, most // (of_row * rows))
        batches = _even(self.batch, most // (of_row * rows * heads)) if heads == self.groups else 1
        for b in _slices(self.batch, batches):
            for h in _slices(self.groups, heads):
                for r in _slices(self.rows, rows):
                    yield b, h, r

    def of_queries(self, heads: slice) -> slice:
        """The heads of queries that belong to heads of keys."""
        return slice(heads.start * self.group, heads.stop * self.group)

    def seen(self, rows: slice) -> slice:
        """The keys that any of the rows attends to."""
        if self.reach is not None:
            return self.reach.of(rows)
        return slice(0, min(rows.stop, self.keys) if self.causal else self.keys)

    def joined(self, t: torch.Tensor) -> torch.Tensor:
        """A packed chunk of queries as matrices: [batches × heads of keys, rows of all their heads, width]."""
        return t.view(-1, self.group * t.shape[2], t.shape[3])

    def apart(self, t: torch.Tensor, part: Part) -> torch.Tensor:
        """The inverse of `joined`."""
        b, h, r = part
        heads = (h.stop - h.start) * self.group
        return t.view(b.stop - b.start, heads, r.stop - r.start, t.shape[2])


def _slices(count: int, size: int) -> Iterator[slice]:
    """Slices of at most `size` that cover `count`."""
    return (slice(n, min(n + size, count)) for n in range(0, count, size))


def _even(count: int, most: int) -> int:
    """The size of the chunks of `count`, at most `most` and at least one, such that all are about equal."""
    chunks = -(-count // max(min(most, count), 1))
    return -(-count // max(chunks, 1))


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, mask: torch.Tensor | None, scale: float | None,
    rounded: bool, sums: bool, reach: Reaching | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """`aten._scaled_dot_product_flash_attention_for_cpu` without dropout: the result, and logarithms if `sums`.

    q is [B, H, M, D], k [B, Hk, N, D], v [B, Hk, N, E], where Hk divides H; `mask`, of up to four dims, is added to
    [B, H, M, N]. `rounded`: scores are rounded to the dtype of q before scale and mask, as by separate products.
    `reach`: the keys that the mask does not exclude.
    """
    if not k.shape[2]:
        found: tuple[torch.Tensor, torch.Tensor] = FORWARD(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
        return found
    sizes = _Sizes.of(q, k, causal, reach)
    ways = Ways.of(q, k.shape[2], rounded)
    first, second = ways.first, ways.second
    made = _forward(causal, mask is not None, _factor(q, scale), ways.paired, second, sums)
    batch, heads, rows, width = *q.shape[:3], v.shape[3]
    shape = (batch, heads, rows, width)
    like = torch.empty_like(q, device="meta")  # in the order of q, or row-major if dims of q are expanded
    strides = dense_strides(shape, order_like(shape, like.stride()))
    out: torch.Tensor | None = None
    logs = q.new_empty((batch, rows, heads), dtype=torch.float32).transpose(1, 2) if sums else None
    heads_of: tuple[slice, ...] = ()
    for part in sizes.parts(ways.score_bytes):
        b, h, r = part
        seen, around = _around(mask, part, sizes)
        here = (b, sizes.of_queries(h), r)
        if heads_of == (b, h):
            (query,) = packed((q[here], first))
        else:
            query, keys, values = packed((q[here], first), (k[b, h], first), (v[b, h], second))
            heads_of = (b, h)
        scores = ways.scores(sizes.joined(query), _matrices(keys, seen))
        results = made(*(sizes.apart(s, part) for s in scores), *around)
        product = sizes.apart(torch.bmm(results[0].view_as(scores[0]), _matrices(values, seen)), part)
        if product.shape == shape and product.stride() == strides and product.dtype is q.dtype:
            out = product
        else:
            out = q.new_empty_strided(shape, strides) if out is None else out
            out[here] = product
        if logs is not None:
            logs[here] = results[1]
    return (q.new_empty_strided(shape, strides) if out is None else out), logs


def attend_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sums: torch.Tensor, causal: bool,
    mask: torch.Tensor | None, scale: float | None, rounded: bool, reach: Reaching | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The gradients of queries, keys and values; `sums` are the logarithms that the forward direction returned."""
    sizes = _Sizes.of(q, k, causal, reach)
    ways = Ways.of(q, k.shape[2], rounded)
    first, second = ways.first, ways.second
    made = _backward(causal, mask is not None, _factor(q, scale), ways.paired, second)
    gradients = tuple(_like(t) for t in (q, k, v))
    logs = sums.unsqueeze(-1)
    parts = list(sizes.parts(2 * ways.score_bytes))
    whole = all(r.stop - r.start == sizes.rows for _, _, r in parts)
    if whole and sizes.seen(slice(0, sizes.rows)) != slice(0, sizes.keys):  # no query attends to the other keys
        for gradient in gradients[1:]:
            gradient.zero_()
    totals = gradients[1:] if whole else tuple(torch.zeros_like(t, dtype=torch.float32) for t in gradients[1:])
    heads_of: tuple[slice, ...] = ()
    for part in parts:
        b, h, r = part
        seen, around = _around(mask, part, sizes)
        here = (b, sizes.of_queries(h), r)
        wanted = [(t, dtype) for dtype in dict.fromkeys((first, second)) for t in (q[here], grad[here])]
        if heads_of == (b, h):
            of_queries = packed(*wanted)
        else:
            *of_queries, key1, value1, key2 = packed(*wanted, (k[b, h], first), (v[b, h], first), (k[b, h], second))
            heads_of = (b, h)
        # With one dtype, both pairs are the same tensors.
        query1, grad1, query2, grad2 = (sizes.joined(t) for t in (*of_queries[:2], *of_queries[-2:]))
        scores = ways.scores(query1, _matrices(key1, seen))
        through = ways.scores(grad1, _matrices(value1, seen))
        found = made(*(sizes.apart(s, part) for s in (*scores, *through)), logs[here], *around)
        weights, slopes = (f.view_as(scores[0]) for f in found)
        gradients[0][here] = sizes.apart(torch.bmm(slopes, _matrices(key2, seen)), part)
        for total, one, other in ((totals[0], slopes, query2), (totals[1], weights, grad2)):
            product = torch.bmm(one.transpose(1, 2), other)
            target = total[b, h, seen]
            product = product.view(target.shape)
            if whole:
                target.copy_(product)
            else:
                target += product
    if not whole:
        for result, total in zip(gradients[1:], totals):
            result.copy_(total)
    return gradients[0], gradients[1], gradients[2]


def _factor(q: torch.Tensor, scale: float | None) -> float:
    return q.shape[3] ** -0.5 if scale is None else float(scale)


def packed(*wanted: tuple[torch.Tensor, torch.dtype]) -> list[torch.Tensor]:
    """Tensors of [B, H, T, D], each contiguous and of its dtype: by one kernel if they are small, else on ATen.

    Large results of a kernel would not be in the cache afterwards.
    """
    if wanted[0][0].numel() > _MOST_PACKED:
        return [t.to(dtype).contiguous() for t, dtype in wanted]
    others = [n for n, (t, dtype) in enumerate(wanted) if t.dtype is not dtype or not t.is_contiguous()]
    out = [t for t, _ in wanted]
    if others:
        made = _packing(tuple(wanted[n][1] for n in others))(*(out[n] for n in others))
        for n, t in zip(others, made):
            out[n] = t
    return out


def _like(t: torch.Tensor) -> torch.Tensor:
    """A new [B, H, T, D] tensor, stored as [B, T, H, D] as ATen's gradients are."""
    b, h, rows, width = t.shape
    return t.new_empty((b, rows, h, width)).transpose(1, 2)


def _matrices(t: torch.Tensor, seen: slice) -> torch.Tensor:
    """The `seen` keys or values of a packed chunk, as matrices."""
    return t.flatten(0, 1)[:, seen]


def _around(mask: torch.Tensor | None, part: Part, sizes: _Sizes) -> tuple[slice, list[torch.Tensor]]:
    """The keys that a chunk attends to, and its kernel's inputs beside scores: the mask, indices of rows and keys."""
    b, h, r = part
    seen = sizes.seen(r)
    found: list[torch.Tensor] = []
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())]
        picked = mask[tuple(s if n > 1 else slice(None) for s, n in zip((b, sizes.of_queries(h), r), mask.shape))]
        single = mask.shape[3] == 1
        if sizes.reach is not None and not sizes.reach.is_enough(picked if single else picked[..., seen]):
            seen = slice(0, sizes.keys)
        found.append(picked if single else picked[..., seen])
    if sizes.causal:
        places = _places(max(sizes.rows, sizes.keys))
        found += [places[r].view(1, 1, -1, 1), places[seen].view(1, 1, 1, -1)]
    return seen, found


@functools.lru_cache(maxsize=8)
def _places(count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int32, device="cpu")


# -- kernels ----------------------------------------------------------------------------------------------------------
def _read(graph: fx.Graph, name: str, paired: bool) -> fx.Node:
    """Products in float32: one input of a new kernel's graph, or two that are added."""
    given = [graph.placeholder(n) for n in ((name, f"{name}_rest") if paired else (name,))]
    if paired:
        return add_pair(graph, *given)
    return graph.call_function(aten._to_copy.default, (given[0],), {"dtype": torch.float32})


def _scaled(graph: fx.Graph, value: fx.Node, causal: bool, masked: bool, scale: float) -> fx.Node:
    """Scores, scaled and masked."""
    value = graph.call_function(aten.mul.Tensor, (value, scale))
    if masked:
        value = graph.call_function(aten.add.Tensor, (value, graph.placeholder("mask")))
    if causal:
        rows, keys = graph.placeholder("rows"), graph.placeholder("keys")
        seen = graph.call_function(aten.ge.Tensor, (rows, keys))
        value = graph.call_function(aten.where.ScalarOther, (seen, value, -float("inf")))
    return value


@functools.lru_cache(maxsize=32)
def _packing(dtypes: tuple[torch.dtype, ...]) -> Any:
    graph = fx.Graph()
    given = [graph.placeholder(f"t{n}") for n in range(len(dtypes))]
    options: list[Any] = [{"dtype": dtype, "memory_format": torch.contiguous_format} for dtype in dtypes]
    graph.output(tuple(graph.call_function(aten._to_copy.default, (t,), o) for t, o in zip(given, options)))
    return interface.register_handle(graph, functional=True)[1]


@functools.lru_cache(maxsize=64)
def _forward(causal: bool, masked: bool, scale: float, paired: bool, dtype: torch.dtype, sums: bool) -> Any:
    graph = fx.Graph()
    weights, log = softmax(graph, _scaled(graph, _read(graph, "scores", paired), causal, masked, scale))
    results = [graph.call_function(aten._to_copy.default, (weights,), {"dtype": dtype})]
    if sums:  # ATen's are 0 if no key is attended to
        nothing = graph.call_function(aten.eq.Scalar, (log, -float("inf")))
        log = graph.call_function(aten.where.ScalarSelf, (nothing, 0.0, log))
        results.append(graph.call_function(aten.squeeze.dim, (log, -1)))
    graph.output(tuple(results))
    return interface.register_handle(graph, functional=True)[1]


@functools.lru_cache(maxsize=64)
def _backward(causal: bool, masked: bool, scale: float, paired: bool, dtype: torch.dtype) -> Any:
    """The kernel that computes weights, and gradients of scores before scaling."""
    graph = fx.Graph()
    scores, wide = (_read(graph, name, paired) for name in ("scores", "through"))
    logs = graph.placeholder("logs")
    value = _scaled(graph, scores, causal, masked, scale)

    def call(target: Any, *args: Any, **kwargs: Any) -> Any:
        return graph.call_function(target, args, kwargs)

    weights = call(aten.exp.default, call(aten.sub.Tensor, value, logs))
    middle = call(aten.sum.dim_IntList, call(aten.mul.Tensor, weights, wide), [-1], True)
    if masked:  # if finite numbers mask all keys of a query, ATen's weights are 1 for each key: the logarithm is lost
        total = call(aten.sum.dim_IntList, weights, [-1], True)
        middle = call(aten.div.Tensor, middle, call(aten.clamp_min.default, total, 1.0))
    slopes = call(aten.mul.Tensor, weights, call(aten.sub.Tensor, wide, middle))
    slopes = call(aten.mul.Tensor, slopes, scale)
    graph.output(tuple(call(aten._to_copy.default, t, dtype=dtype) for t in (weights, slopes)))
    return interface.register_handle(graph, functional=True)[1]


_WHY = "products of a library and kernels of its own in turn"
served_by(attend, "library", _WHY)
served_by(attend_backward, "library", _WHY)

__all__ = ["attend", "attend_backward"]
