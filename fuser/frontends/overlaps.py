"""Overlaps of inputs in graphs that write some of them: on an overlap the graph runs in eager.

AOTAutograd makes a graph functional for the memory of its example inputs and does not check later calls, and its graph
for examples that overlap is often wrong. So every call of a graph that writes inputs is checked here: first the ranges
of bytes, which is quick, and for ranges that overlap, whether they share an element.

Writes through `expand`, `unfold` and other views with repeated elements are detected before the graph is made
functional: in the functional form a repeated element gets the sum of the values written to it, and one between windows
gets 0.
"""

from __future__ import annotations

import logging
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from fuser import notices
from fuser.passes.calls import value_of, writes
from fuser.passes.classify import has_gaps
from fuser.passes.hints import size_hint
from fuser.reasons import because

THROUGH = because("not_traced", "it writes through expand or unfold, whose writes are not traced right")
BY_OFFSET = because("not_traced", "it reads a written input by offsets, and the traced content is not in its memory")
REASON = because("not_traced", "an input that is written overlaps another one in memory")
Function = Callable[..., Any]
Span = tuple[int, int, int]  # first byte, one past the last, number of the tensor

_log = logging.getLogger(__name__)


class Watched:
    """Calls `compiled` if no written input overlaps another, else `eager`, which is counted in `calls`.

    `written`: the numbers of the inputs that the graph may write to. `examples` are its inputs, which may be fake.
    """

    def __init__(
        self, compiled: Function, eager: Function, examples: Sequence[Any], written: frozenset[int],
        calls: Counter[str],
    ) -> None:  # fmt: skip
        self.compiled, self.eager, self.calls = compiled, eager, calls
        self.tensors = [i for i, x in enumerate(examples) if is_strided(x)]
        self.written = frozenset(at for at, i in enumerate(self.tensors) if i in written)
        self.sizes = _fixed_lengths([examples[i] for i in self.tensors])
        self.all = len(self.tensors) == len(examples)
        self.known: list[int] = []  # addresses of the last valid call; sizes are the same in all calls

    def call(self, *args: Any) -> Any:
        """The graph on `args`."""
        tensors = args if self.all else [args[i] for i in self.tensors]
        try:
            addresses = [t.data_ptr() for t in tensors]
        except (RuntimeError, AttributeError):  # no memory of its own: this is a trace
            return self.compiled(*args)
        if addresses == self.known or self._fits(tensors, addresses):
            return self.compiled(*args)
        _tell()
        self.calls[REASON] += 1
        return self.eager(*args)

    def _fits(self, tensors: Sequence[torch.Tensor], addresses: list[int]) -> bool:
        lengths = self.sizes or [length_of(t) for t in tensors]
        if not _are_apart(addresses, lengths):
            spans = [(a, a + n, at) for at, (a, n) in enumerate(zip(addresses, lengths)) if a and n]
            if overlap(tensors, spans, self.written):
                return False
        if self.sizes:
            self.known = addresses
        return True


def writes_through(writers: Iterable[fx.Node]) -> bool:
    """Whether one of the nodes that write may write to repeated elements or overlapping windows."""
    return any(_is_through(node.all_input_nodes[0]) for node in writers if node.all_input_nodes)


def reads_written_by_offset(graph: fx.Graph) -> bool:
    """Whether a call by offsets in Dynamo's graph sees an input that another call writes and that has more memory.

    The offset of `as_strided` counts from the beginning of the memory, and it sees elements between those of the
    input. AOTAutograd takes the offset in the new content, a tensor of its own, and copies only the input's own
    elements back.
    """
    readers = [n for n in graph.nodes if _is_by_offset(n)]
    if not readers:
        return False
    values = [value_of(n) for n in graph.nodes if n.op == "placeholder"]
    inputs = {_memory(v) for v in values if v is not None and not _fills(v)}
    seen = [(n, inputs & _memories(n)) for n in readers]
    return any(n is not m and not own.isdisjoint(_memories(m)) for m in graph.nodes if writes(m) for n, own in seen)


def _memory(value: torch.Tensor) -> int:
    return int(value.untyped_storage()._cdata)


def _memories(node: fx.Node) -> set[int]:
    return {_memory(v) for v in map(value_of, node.all_input_nodes) if v is not None}


def name_of(node: fx.Node) -> str:
    """What Dynamo's graph calls, by name alone."""
    return str(getattr(node.target, "__name__", node.target))


def _is_by_offset(node: fx.Node) -> bool:
    name = name_of(node)
    return name.startswith("as_strided") or name == "fill_diagonal_"  # whose form in ATen is `as_strided`


def _fills(value: torch.Tensor) -> bool:
    """Whether a tensor's elements are its whole memory, in each call of the graph."""
    offset = value.storage_offset()
    return isinstance(offset, int) and offset == 0 and not has_gaps(value)


def _is_through(node: fx.Node | None) -> bool:
    """Whether a tensor, or a base of it, has elements at several indices or overlapping windows."""
    memory = None
    while node is not None:
        value = value_of(node)
        while value is not None and torch._C._functorch.is_functorch_wrapped_tensor(value):
            value = torch._C._functorch.get_unwrapped(value)
        if value is not None:
            own = value.untyped_storage()._cdata
            if memory not in (None, own):
                return False  # this tensor was computed from that one, into memory of its own
            memory = own
            if name_of(node) == "unfold" or _repeats(value):
                return True
        node = node.all_input_nodes[0] if node.all_input_nodes else None
    return False


def _repeats(value: torch.Tensor) -> bool:
    """Whether a tensor may have elements at several indices. Symbolic sizes count as those of the traced call."""
    if any(type(s) is int and s == 0 for s in value.stride()):
        return True
    if not all(type(n) is int or type(n.node.hint) is int for n in (*value.shape, *value.stride())):
        return False
    reach = 0
    for stride, size in sorted((size_hint(s), size_hint(n)) for n, s in zip(value.shape, value.stride(), strict=True)):
        if size == 0 or size > 1 and stride <= reach:
            return size != 0
        reach += (size - 1) * stride
    return False


def overlap_of_examples(examples: Sequence[Any], written: frozenset[int] | None) -> bool:
    """Whether a written input overlaps another one. Fake tensors have no addresses, but share storages.

    None: AOTAutograd does not say which inputs are written, as it merges inputs, even those that only interleave.
    """
    storages: dict[int, int] = {}
    spans = []
    for i, t in enumerate(examples):
        if is_strided(t) and (length := length_of(t)):
            base = storages.setdefault(t.untyped_storage()._cdata, len(storages) << 48)
            start = base + int(t.storage_offset()) * t.element_size()
            spans.append((start, start + length, i))
    every = frozenset(range(len(examples)))
    return overlap(examples, spans, every if written is None else written, exact=written is not None)


def overlap(tensors: Sequence[Any], spans: Sequence[Span], written: frozenset[int], exact: bool = True) -> bool:
    """Whether two tensors, one of them `written`, share elements or (if not `exact`) their ranges overlap."""
    near: list[Span] = []  # earlier ranges that extend into the next
    for span in sorted(spans):
        start, _, i = span
        near = [s for s in near if s[1] > start]
        for first, _, j in near:
            if i not in written and j not in written:
                continue
            if not exact or not _interleaved(tensors[j], tensors[i], start - first):
                return True
        near.append(span)
    return False


def is_strided(value: Any) -> bool:
    """Whether a value has memory of its own: it is not sparse, and not inside a transform of `torch.func`."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(value)


def _are_apart(addresses: list[int], lengths: list[int]) -> bool:
    """Whether no ranges overlap: before each starts, all earlier ones have ended. Hundreds of tensors take 0.1 ms."""
    starts = sorted(addresses)
    return all(map(operator.le, sorted(map(operator.add, addresses, lengths)), starts[1:]))


def _interleaved(a: torch.Tensor, b: torch.Tensor, distance: int) -> bool:
    """Whether two tensors, `b` starting `distance` bytes after `a`, provably have no byte in common.

    Columns of one matrix are such: modulo the row length, or another common stride, their ranges are disjoint.
    """
    steps = [{s * t.element_size() for n, s in zip(t.shape, t.stride()) if n > 1} for t in (a, b)]
    common = math.gcd(*steps[0], *steps[1])
    if common and _apart_modulo(common, distance, a.element_size(), b.element_size()):
        return True
    for step in steps[0] & steps[1]:
        lengths = [_length_below(t, step) for t in (a, b)]
        if all(s % step == 0 for own in steps for s in own if s > step) and _apart_modulo(step, distance, *lengths):
            return True
    return False


def _apart_modulo(step: int, distance: int, a: int, b: int) -> bool:
    """Whether `a` bytes from 0 and `b` bytes from `distance` are disjoint modulo `step` bytes."""
    return a <= distance % step and distance % step + b <= step


def _length_below(t: torch.Tensor, step: int) -> int:
    """The bytes from the first to the last element along the dims whose stride is smaller than `step` bytes."""
    size = t.element_size()
    return (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride()) if s * size < step)) * size


def length_of(t: torch.Tensor) -> int:
    """The bytes from a tensor's first element to its last one; 0 if it has none."""
    if t.is_contiguous():
        return int(t.numel()) * t.element_size()
    if not t.numel():
        return 0
    return int(1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride()))) * t.element_size()


def _fixed_lengths(examples: Sequence[torch.Tensor]) -> list[int]:
    """The lengths in bytes if all sizes and strides are numbers, so later calls have the same; else empty."""
    symbolic = any(type(n) is not int for t in examples for n in (*t.shape, *t.stride()))
    return [] if symbolic else [length_of(t) for t in examples]


def _tell() -> None:
    if notices.is_first(REASON):
        _log.warning("a call runs by eager: %s", REASON)
