"""Chooses what computes attention on the CPU: ATen's kernel, the package's, or products with a kernel in between.

ATen's kernel took 1.1 to 3 times as long forward on two AMD cores, and up to 20 times backward in float16, whose
products it computes one by one; other machines differ. So a contest decides for each class of sizes (`fuser.contests`).
Attention whose scores ATen leaves unrounded keeps them unrounded here. Attention that was written as products
(`passes.attention`) may round them to 16 bits, as its product does.

If results must not depend on a clock (`config.is_deterministic`), ATen computes it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from fuser import config
from fuser.attention.library import BACKWARD, FORWARD, attend, attend_backward
from fuser.attention.products import product_dtype
from fuser.attention.reach import RANGES, Reach
from fuser.contests.deciding import Decisions, numbers
from fuser.contests.race import Contestant
from fuser.cpu import attention as own
from fuser.lazy_dataclasses import dataclass
from fuser.passes.calls import put_for
from fuser.passes.hints import size_hint

aten: Any = torch.ops.aten
ATEN, OWN, WRITTEN = "aten", "own kernel", "as written"
PARTS, ROUNDED_PARTS = "by parts", "by parts, scores rounded"
ROUNDED = "fuser_rounded_scores"  # in the metadata `custom` of attention that was written as products
LEAST_WRITTEN, MOST_WRITTEN = 1 << 12, 1 << 19  # numbers of scores for which plain products may be faster
LEAST_SCORES = 1 << 15  # with fewer, call overhead dominates
_MOST_SCORES = 1 << 22  # in a contest
_DTYPES = (torch.bfloat16, torch.float16)
_ALL_DTYPES = (*_DTYPES, torch.float32)


@dataclass(frozen=True)
class Attention:
    """A class of attentions: q of (batch, heads, rows, width), k of (batch, groups, keys, width).

    mask: which of its four dims have one element; None without a mask. rounded: scores may be rounded. reach: the keys
    that the mask may leave.
    """

    batch: int
    heads: int
    groups: int
    rows: int
    keys: int
    width: int
    dtype: torch.dtype
    causal: bool
    mask: tuple[bool, ...] | None
    scale: float | None
    backward: bool
    rounded: bool
    reach: Reach | None = None

    def key(self) -> tuple[Any, ...]:
        """The key that attentions of one class share."""
        sizes = tuple(max(n - 1, 0).bit_length() for n in (self.batch, self.rows, self.keys))
        left = 8 if self.reach is None else round(8 * self.reach.share)
        flags = self.causal, self.mask, self.backward, self.rounded, left
        return sizes, self.heads, self.groups, self.width, str(self.dtype), flags

    def __str__(self) -> str:
        named = {"causal": self.causal, "masked": self.mask is not None, "backward": self.backward}
        named["some keys"] = self.reach is not None
        sizes = f"{self.batch}×{self.heads}×{self.rows}×{self.keys}×{self.width}"
        return " ".join([f"attention of {sizes} {str(self.dtype)[6:]}", *(n for n, there in named.items() if there)])

    @property
    def scores(self) -> int:
        """Number of all scores."""
        return self.batch * self.heads * self.rows * self.keys


_attentions, _written = Decisions("attention"), Decisions("written attention")


def choose(attention: Attention) -> str:
    """The name of the candidate for a class: a known decision, or the winner of a contest that runs now."""
    if attention.scores < LEAST_SCORES or config.is_deterministic():
        return ATEN
    names = [ATEN]
    if attention.reach is not None or attention.dtype in _DTYPES:
        names += [PARTS, *([ROUNDED_PARTS] if attention.rounded else [])]
    if not attention.backward and own.why_not(attention.dtype, attention.width) is None:
        names.append(OWN)
    if len(names) == 1:
        return ATEN
    return _attentions.choice(
        attention.key(), names, str(attention), lambda: _contestants(attention, names)
    ).winner  # fmt: skip


def is_faster_written(attention: Attention) -> bool:
    """Whether the forward with few scores is faster as products than as ATen's attention."""
    if not LEAST_WRITTEN <= attention.scores < MOST_WRITTEN or config.is_deterministic():
        return False
    names = [ATEN, WRITTEN]
    enter = lambda: _contestants(attention, names)  # noqa: E731
    return _written.choice(attention.key(), names, f"written {attention}", enter).winner == WRITTEN


def _contestants(a: Attention, names: list[str]) -> Mapping[str, Contestant]:
    q, k, v, grad, mask = _operands(a)
    out, sums = FORWARD(q, k, v, 0.0, a.causal, attn_mask=mask, scale=a.scale)
    given = a.causal, mask, a.scale

    def by_aten() -> tuple[torch.Tensor, ...]:
        named = {"attn_mask": mask, "scale": a.scale}
        if a.backward:
            return tuple(BACKWARD(grad, q, k, v, out, sums, 0.0, a.causal, **named))
        return tuple(FORWARD(q, k, v, 0.0, a.causal, **named)[:1])

    def by_parts(rounded: bool) -> tuple[torch.Tensor, ...]:
        if a.backward:
            return attend_backward(grad, q, k, v, sums, *given, rounded, a.reach)
        return attend(q, k, v, *given, rounded, sums=False, reach=a.reach)[:1]

    def written() -> tuple[torch.Tensor, ...]:
        keys, values = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
        weights = torch.softmax(torch.matmul(q, keys.transpose(-1, -2)) * q.shape[-1] ** -0.5, -1)
        return (torch.matmul(weights, values),)

    calls: dict[str, Callable[[], tuple[torch.Tensor, ...]]] = {
        ATEN: by_aten,
        OWN: lambda: own.attend(q, k, v, *given)[:1],
        PARTS: lambda: by_parts(False),
        ROUNDED_PARTS: lambda: by_parts(True),
        WRITTEN: written,
    }
    with config.override(slowest=0.0, compile_mode="wait"):  # kernels are made at once, and without a trial
        for name in {PARTS, ROUNDED_PARTS}.intersection(names):
            calls[name]()
    return {n: Contestant(calls[n], lambda n=n: torch.cat([t.flatten() for t in calls[n]()])) for n in names}  # type: ignore[misc]


def _operands(a: Attention) -> list[Any]:
    """Queries, keys, values, the result's gradient and the mask, with batches and heads reduced if there are many."""
    batch, groups, group = a.batch, a.groups, a.heads // a.groups
    least = min(a.groups, torch.get_num_threads())
    while batch * groups * group * a.rows * a.keys > _MOST_SCORES and (batch > 1 or groups >= 2 * least):
        batch, groups = (batch // 2, groups) if batch > 1 else (batch, groups // 2)
    made: list[Any] = []
    of_queries, of_keys = (groups * group, a.rows), (groups, a.keys)
    for n, (heads, rows) in enumerate((of_queries, of_keys, of_keys, of_queries)):
        flat = numbers(batch * heads * rows * a.width, a.dtype, n)
        made.append(flat.view(batch, rows, heads, a.width).transpose(1, 2))
    if a.mask is None:
        return [*made, None]
    whole = (batch, groups * group, a.rows, a.keys)
    shape = [1 if one else n for one, n in zip(a.mask, whole)]
    mask = numbers(torch.Size(shape).numel(), a.dtype, 5).view(shape)
    return [*made, mask if a.reach is None else a.reach.masked(mask)]


def attention_by_parts(module: fx.GraphModule) -> int:
    """Attention on the CPU becomes one kernel, or products with a kernel in between, where that is faster."""
    found = [n for n in module.graph.nodes if n.target in (FORWARD, BACKWARD)]
    return sum(_replaced(node) for node in found)


@dataclass(frozen=True)
class _Call:
    """The arguments of a call of ATen's attention or of its gradient."""

    q: fx.Node
    k: fx.Node
    v: fx.Node
    grad: Any
    sums: Any
    causal: bool
    mask: fx.Node | None
    scale: float | None

    @staticmethod
    def of(node: fx.Node) -> _Call | None:
        """The arguments; None if the call has dropout, or a scale that is not a number."""
        backward = node.target is BACKWARD
        rest: list[Any] = list(node.args[6 if backward else 3 :])
        dropout, causal = rest + [0.0, False][len(rest) :]
        given: list[Any] = list(node.args[1:4] if backward else node.args[:3])
        mask: Any = node.kwargs.get("attn_mask")
        scale: Any = node.kwargs.get("scale")
        if dropout or not isinstance(scale, (int, float, type(None))):
            return None
        grad, sums = (node.args[0], node.args[5]) if backward else (None, None)
        return _Call(given[0], given[1], given[2], grad, sums, bool(causal), mask, scale)


def _class_of(node: fx.Node, call: _Call) -> Attention | None:
    """The class of a call; None if only ATen supports it."""
    q, k, mask = (None if n is None else n.meta.get("val") for n in (call.q, call.k, call.mask))
    if not isinstance(q, torch.Tensor) or not isinstance(k, torch.Tensor) or q.dim() != 4:
        return None
    reach = node.meta.get(RANGES)
    if q.dtype not in _ALL_DTYPES:
        return None
    if call.mask is not None and not (isinstance(mask, torch.Tensor) and mask.dtype.is_floating_point):
        return None
    batch, heads, rows, width = map(size_hint, q.shape)
    groups, keys = map(size_hint, k.shape[1:3])
    if not groups or heads % groups or not width:
        return None
    rounded = ROUNDED in node.meta.get("custom", {}) and product_dtype(q.dtype) is q.dtype
    of_mask = None
    if mask is not None:
        of_mask = (True,) * (4 - mask.dim()) + tuple(size_hint(n) == 1 for n in mask.shape)
    backward = node.target is BACKWARD
    here = None if reach is None else reach.at(rows, keys)
    return Attention(
        batch, heads, groups, rows, keys, width, q.dtype, call.causal, of_mask, call.scale, backward, rounded, here
    )  # fmt: skip


def _replaced(node: fx.Node) -> bool:
    """Whether the call was given to a candidate other than ATen."""
    call = _Call.of(node)
    attention = None if call is None else _class_of(node, call)
    if call is None or attention is None or any(u.target is not operator.getitem for u in node.users):
        return False
    winner = choose(attention)
    if winner == ATEN:
        return False
    tensors, given = (call.q, call.k, call.v), (call.causal, call.mask, call.scale, winner == ROUNDED_PARTS)
    reach = () if attention.reach is None else (node.meta[RANGES],)
    if winner == OWN:
        put_for(node, own.attend, (*tensors, *given[:3]))
    elif attention.backward:
        put_for(node, attend_backward, (call.grad, *tensors, call.sums, *given, *reach))
    else:
        read = any(u.args[1] == 1 and u.users for u in node.users)
        put_for(node, attend, (*tensors, *given, read, *reach))
    return True


__all__ = [
    "ATEN", "OWN", "PARTS", "ROUNDED", "ROUNDED_PARTS", "Attention", "attention_by_parts", "choose",
    "is_faster_written",
]  # fmt: skip
