"""Attention with a score modification on the CPU: a few rows of queries at a time, so that their scores stay in cache.

For each chunk of rows a library multiplies queries by keys, one fused kernel modifies, masks and normalises the
scores, and a library multiplies by the values. Keys that the block mask excludes for all rows of the chunk are left
out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from fuser import interface
from fuser.attention.blocks import Blocks, block_map, key_ranges
from fuser.attention.products import Ways, add_pair
from fuser.attention.scores import Mods, of_keys_alone, write_scores
from fuser.lazy_dataclasses import dataclass
from fuser.lowering.shapes import dense_strides, order_like

aten = torch.ops.aten
SCORES = 1 << 20  # bytes of a chunk's scores for each thread, about: what a core's cache holds beside the keys
LEAST_ROWS = 64  # of a chunk; a product of fewer rows is slow
_SMALL = 1 << 31  # below it, numbers fit int32
_LN2 = math.log(2)
# Operators on the index of a key whose recomputation in each row costs less than a load of their result.
_PLAIN = frozenset(
    "add sub rsub mul neg eq ne lt le gt ge bitwise_and bitwise_or bitwise_not logical_and logical_or logical_not"
    " _to_copy".split()
)


@dataclass(frozen=True)
class _Made:
    """The kernel that turns scores into weights, and the one before it for costly values that depend on keys alone."""

    weights: Callable[..., Any]
    before: Callable[..., Any] | None


class ByRows:
    """`(q, k, v, blocks, buffers of mod and mask)` → (result, log2 of the sum of exponentials or None).

    q is [B, H, M, D], k [B or 1, Hk, N, D], v [B or 1, Hk, N, E], where Hk divides H.
    """

    def __init__(self, mods: Mods, sums: bool) -> None:
        self.mods, self.sums = mods, sums
        self._made: dict[Any, _Made] = {}
        self._indices: tuple[Any, tuple[torch.Tensor, ...]] = (None, ())

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: Blocks, buffers: Sequence[Any]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        batch, heads, rows, _ = q.shape
        groups, columns, width = k.shape[1], k.shape[2], v.shape[3]
        working = torch.float64 if q.dtype is torch.float64 else torch.float32
        shape = (batch, heads, rows, width)
        out = q.new_empty_strided(shape, dense_strides(shape, order_like(shape, q.stride())))
        sums = q.new_empty((batch, heads, rows), dtype=torch.float32) if self.sums else None
        if not out.numel():
            return out, sums
        mapped = block_map(blocks) if blocks.partial is not None and not self.mods.masks else None
        ways = Ways.of(q, columns, rounded=False)
        made = self._made_for(buffers, working, ways, mapped is not None)
        keys = k.to(ways.first).expand(batch, -1, -1, -1)
        values = v.to(ways.second).expand(batch, -1, -1, -1)
        b, h, m, n = self._index(batch, heads, rows, columns)
        of_keys = made.before(*buffers, n) if made.before is not None else ()
        for some, (first, last, low, high) in chunks(blocks, batch, heads, rows, columns):
            here, size, several = (some, slice(None), slice(first, last)), last - first, some.stop - some.start
            if low >= high:
                out[here] = 0
                if sums is not None:
                    sums[here] = -math.inf
                continue
            part = q[here].to(ways.first).reshape(several * groups, -1, q.shape[3])
            of_part = keys[some, :, low:high].reshape(several * groups, high - low, -1)
            scores = [s.view(several, heads, size, high - low) for s in ways.scores(part, of_part)]
            index = (b[some], h, m[:, :, first:last], n[..., low:high])
            kept = () if mapped is None else (_spread(mapped, blocks, some, first, low, high),)
            found = made.weights(*buffers, *scores, *index, *kept, *(t[..., low:high] for t in of_keys))
            weights = found[0].view(several * groups, -1, high - low)
            product = torch.bmm(weights, values[some, :, low:high].reshape(several * groups, high - low, width))
            product = product.view(several, heads, size, width)
            whole = several == batch and size == rows and sums is None
            if whole and product.stride() == out.stride() and ways.second is out.dtype:
                return product, None
            out[here] = product
            if sums is not None:
                sums[here] = found[1]
        return out, sums

    def _index(self, *sizes: int) -> tuple[torch.Tensor, ...]:
        known, found = self._indices
        if known != sizes:
            dtype = torch.int32 if sizes[2] * sizes[3] < _SMALL else torch.int64
            found = tuple(
                torch.arange(size, dtype=dtype, device="cpu").view([-1 if d == at else 1 for d in range(4)])
                for at, size in enumerate(sizes)
            )
            self._indices = sizes, found
        return found

    def _made_for(self, buffers: Sequence[Any], working: torch.dtype, ways: Ways, mapped: bool) -> _Made:
        key = (working, ways, mapped)
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = _make(self.mods, len(buffers), working, ways, mapped, self.sums)
        return found


def _make(mods: Mods, buffers: int, working: torch.dtype, ways: Ways, mapped: bool, sums: bool) -> _Made:
    """Compile the kernels between the two products."""
    scores = write_scores(mods, buffers, working)
    graph, masked = scores.graph, scores.masked
    last = list(graph.find_nodes(op="placeholder"))[-1]

    def call(target: Any, *args: Any, **kwargs: Any) -> Any:
        return graph.call_function(target, args, kwargs)

    of_keys = of_keys_alone(scores, _PLAIN)
    before = _before(graph, of_keys) if of_keys else None
    with graph.inserting_after(last):
        for i, node in reversed(list(enumerate(of_keys))):
            node.replace_all_uses_with(graph.placeholder(f"of_keys{i}"))
        kept = graph.placeholder("kept") if mapped else None
    if ways.paired:
        _add_rest(graph)
    if kept is not None:
        masked = call(aten.where.ScalarOther, kept, masked, -math.inf)
    weights, log = softmax(graph, masked)
    results = [call(aten._to_copy.default, weights, dtype=ways.second)]
    if sums:
        log = call(aten.div.Tensor, log, _LN2)
        results.append(call(aten._to_copy.default, call(aten.squeeze.dim, log, -1), dtype=torch.float32))
    graph.output(tuple(results))
    graph.eliminate_dead_code()
    return _Made(interface.register_handle(graph, functional=True)[1], before)


def _add_rest(graph: fx.Graph) -> None:
    """Let the graph read scores as two tensors to add: `score` and the next input, `rest`."""
    (score,) = (n for n in graph.find_nodes(op="placeholder") if n.name == "score")
    readers = list(score.users)
    with graph.inserting_after(score):
        rest = graph.placeholder("rest")
    first = next(n for n in graph.nodes if n.op != "placeholder")
    with graph.inserting_before(first):
        total = add_pair(graph, score, rest)
    for reader in readers:
        reader.replace_input_with(score, total)


def softmax(graph: fx.Graph, scores: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The weights of keys, and the logarithms of sums of exponentials, for scores [..., keys].

    If all scores are minus infinity, weights are 0, and the logarithm is minus infinity.
    """

    def call(target: Any, *args: Any) -> fx.Node:
        return graph.call_function(target, args)

    highest = call(aten.amax.default, scores, [-1], True)
    nothing = call(aten.eq.Scalar, highest, -math.inf)  # no key is attended to: all weights are 0
    base = call(aten.where.ScalarSelf, nothing, 0.0, highest)
    power = call(aten.exp.default, call(aten.sub.Tensor, scores, base))
    total = call(aten.sum.dim_IntList, power, [-1], True)
    divisor = call(aten.where.ScalarSelf, nothing, 1.0, total)
    log = call(aten.add.Tensor, call(aten.log.default, total), highest)
    return call(aten.div.Tensor, power, divisor), log


def _before(graph: fx.Graph, nodes: Sequence[fx.Node]) -> Callable[..., Any]:
    """The handle that computes `nodes` from the captured tensors and the indices of keys."""
    own = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            if node.name.startswith("buffer") or node.name == "index_k":
                env[node] = own.placeholder(node.name)
        elif all(a in env for a in node.all_input_nodes):
            env[node] = own.node_copy(node, env.__getitem__)
    own.output(tuple(env[n] for n in nodes))
    own.eliminate_dead_code()
    return interface.register_handle(own, functional=True)[1]


def chunks(
    blocks: Blocks, batch: int, heads: int, rows: int, columns: int
) -> Iterator[tuple[slice, tuple[int, int, int, int]]]:  # fmt: skip
    """(batches, (first row, end, first key, end)) of each chunk: some rows of some batches, with all heads."""
    most = SCORES * torch.get_num_threads() // (4 * heads * max(columns, 1))  # rows of all batches together
    several = min(max(most // LEAST_ROWS, 1), batch)
    ranges = list(_ranges(blocks, max(most // several, LEAST_ROWS), rows, columns))
    for first in range(0, batch, several):
        for one in ranges:
            yield slice(first, min(first + several, batch)), one


def _ranges(blocks: Blocks, most: int, rows: int, columns: int) -> Iterator[tuple[int, int, int, int]]:
    """(first row, end, first key, end) of chunks of at most `most` rows, with the keys that any row attends to."""
    if blocks.partial is None:
        yield from ((r, min(r + most, rows), 0, columns) for r in range(0, rows, most))
        return
    size, width = blocks.query_size, blocks.key_size
    for number, (low, high) in enumerate(key_ranges(blocks)):
        end = min((number + 1) * size, rows)
        for first in range(number * size, end, min(most, size)):
            yield first, min(first + most, end), min(low * width, columns), min(high * width, columns)


def _spread(mapped: torch.Tensor, blocks: Blocks, some: slice, row: int, low: int, high: int) -> torch.Tensor:
    """The keys from `low` to `high` that the chunk beginning at `row` attends to: bool, [batches, heads, 1, keys]."""
    own = mapped if mapped.shape[0] == 1 else mapped[some]
    whole = own[:, :, row // blocks.query_size, low // blocks.key_size :].unsqueeze(2)
    return whole.repeat_interleave(blocks.key_size, -1)[..., : high - low].contiguous()
