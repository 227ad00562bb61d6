"""The canonical form of a fusion group: what it computes, without names, metadata, devices or sizes.

Two graphs that make the same calls have one canonical graph, one text and one hash, in every process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import field
from typing import Any

import torch

from fuser.lazy_dataclasses import dataclass

FORMAT = "fuser graph 1"
ROUNDED = "rounded"  # key in the meta of an FX node whose result is always rounded to its dtype


@dataclass(frozen=True, slots=True)
class Ref:
    """The value of node `index`."""

    index: int

    def __repr__(self) -> str:
        return f"%{self.index}"


@dataclass(frozen=True, slots=True)
class Opaque:
    """A Python object without canonical text: number `index` among the graph's opaque objects."""

    index: int
    label: str

    def __repr__(self) -> str:
        return f"<{self.label} #{self.index}>"


@dataclass(frozen=True, slots=True, eq=False)
class CanonicalNode:
    """One call.

    `op` is "input"; an operator's packet ("aten.add"), with ".overload" only if the packet alone would bind the
    arguments differently; "getitem" (one of several results, by its number); "host.<name>" or "sizes.<name>" (Python on
    numbers and sizes, see `HOST_OPS`); "prim.dtype" or "prim.device" of a tensor; or "call.<name>", "method.<name>",
    "attribute.<name>": Python that only the fallback can run.

    `args` are positional as in the schema, without trailing defaults; `kwargs` are the keyword-only arguments that
    differ from their defaults, sorted. Sequences are tuples; values of other nodes are `Ref`s. `rounded`: the result
    has eager's bits even if a kernel keeps it in a register (see `lowering.decisive`).
    """

    index: int
    op: str
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()
    rounded: bool = False

    def __str__(self) -> str:
        parts = [text_of(a) for a in self.args] + [f"{k}={text_of(v)}" for k, v in self.kwargs]
        return f"%{self.index} = {self.op}({', '.join(parts)}){' rounded' if self.rounded else ''}"

    def refs(self) -> Iterator[int]:
        """The indices of the nodes that this node reads, with repeats."""
        for a in self.args:
            yield from refs_of(a)
        for _, v in self.kwargs:
            yield from refs_of(v)


@dataclass(frozen=True, slots=True, eq=False)
class CanonicalGraph:
    """A fusion group. The first `n_inputs` nodes are its inputs, in order; `output` is a `Ref`, a tuple or a constant.

    `functional` is the caller's promise that inputs and outputs are not written, so that a copy may replace a view.
    `==` compares texts.
    """

    nodes: tuple[CanonicalNode, ...]
    n_inputs: int
    output: Any
    functional: bool = False
    text: str = field(init=False, repr=False)
    hash: str = field(init=False)

    def __post_init__(self) -> None:
        lines = [f"{FORMAT}{' functional' if self.functional else ''}"]
        lines += [str(n) for n in self.nodes]
        lines.append(f"return {text_of(self.output)}")
        text = "\n".join(lines) + "\n"
        object.__setattr__(self, "text", text)
        object.__setattr__(self, "hash", hashlib.sha256(text.encode()).hexdigest())

    def __eq__(self, other: object) -> bool:
        return self.text == other.text if isinstance(other, CanonicalGraph) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.hash)

    def __str__(self) -> str:
        return self.text

    @property
    def calls(self) -> tuple[CanonicalNode, ...]:
        """The nodes after the inputs."""
        return self.nodes[self.n_inputs :]

    @property
    def written(self) -> frozenset[int]:
        """The inputs that the graph writes as a whole, by `copy_`."""
        targets = (n.args[0] for n in self.calls if n.op == "aten.copy_")
        return frozenset(t.index for t in targets if isinstance(t, Ref) and t.index < self.n_inputs)

    @property
    def single(self) -> bool:
        """Whether the graph returns one value rather than a tuple."""
        return not isinstance(self.output, tuple)

    @property
    def outputs(self) -> tuple[Any, ...]:
        """The results as a tuple, even if there is only one."""
        return self.output if isinstance(self.output, tuple) else (self.output,)


def refs_of(value: Any) -> Iterator[int]:
    """The indices that a canonical value refers to."""
    if isinstance(value, Ref):
        yield value.index
    elif isinstance(value, (tuple, list)):
        for v in value:
            yield from refs_of(v)
    elif isinstance(value, dict):
        for v in value.values():
            yield from refs_of(v)
    elif isinstance(value, slice):
        yield from refs_of((value.start, value.stop, value.step))


def map_refs(value: Any, fn: Callable[[Ref], Any]) -> Any:
    """`value` with each `Ref` replaced by `fn(ref)`."""
    if isinstance(value, Ref):
        return fn(value)
    if isinstance(value, tuple):
        return tuple(map_refs(v, fn) for v in value)
    if isinstance(value, list):
        return [map_refs(v, fn) for v in value]
    if isinstance(value, dict):
        return {k: map_refs(v, fn) for k, v in value.items()}
    if isinstance(value, slice):
        return slice(*(map_refs(v, fn) for v in (value.start, value.stop, value.step)))
    return value


class IntLiteral(int):
    """An integer literal in a call of the graph, compared by identity; arithmetic on it gives plain integers."""


class FloatLiteral(float):
    """A float literal in a call of the graph."""


_PLAIN = (
    int, float, bool, complex, str, type(None), torch.dtype, torch.layout, torch.memory_format, IntLiteral,
    FloatLiteral,
)  # fmt: skip


def is_constant(value: Any) -> bool:
    """Whether canonical text can spell `value`."""
    kind = type(value)
    if kind in _PLAIN or kind in (Ref, Opaque, torch.device, type(Ellipsis)):
        return True
    if isinstance(value, (tuple, list)):
        return all(is_constant(v) for v in value)
    if isinstance(value, slice):
        return is_constant((value.start, value.stop, value.step))
    return isinstance(value, dict) and all(isinstance(k, str) and is_constant(v) for k, v in value.items())


def text_of(value: Any) -> str:
    """The stable spelling of a canonical value; 2, 2.0 and True differ."""
    if isinstance(value, tuple):
        inner = ", ".join(text_of(v) for v in value)
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, list):
        return f"[{', '.join(text_of(v) for v in value)}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!r}: {text_of(v)}" for k, v in sorted(value.items())) + "}"
    if isinstance(value, slice):
        return f"slice({text_of(value.start)}, {text_of(value.stop)}, {text_of(value.step)})"
    return repr(value)
