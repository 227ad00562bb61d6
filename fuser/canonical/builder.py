"""Creates canonical nodes: one `Builder` per graph, and the methods that translations of calls use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from fuser.canonical.aliases import main_overload, main_packet, packet_named
from fuser.canonical.graph import CanonicalNode, Opaque, Ref, is_constant, map_refs
from fuser.canonical.lifting import is_literal, lifted_places, map_literals, plain
from fuser.canonical.schemas import Call, Kind, bind_overload, bind_packet
from fuser.lazy_dataclasses import dataclass


class Untranslatable(Exception):
    """Raised for a call without an operator; the fallback runs it as it is."""


@dataclass
class Builder:
    """Nodes created so far, in order. `impure` are those that must stay even if their values are unused.

    With `lifting`, constants that may be arguments become inputs; `lifted` holds (number of the input, constant).
    """

    lifting: bool = False
    nodes: list[CanonicalNode] = field(default_factory=list)
    kinds: list[Kind] = field(default_factory=list)
    impure: set[int] = field(default_factory=set)
    opaque: list[Any] = field(default_factory=list)
    mutations: list[str] = field(default_factory=list)
    writes: list[str] = field(default_factory=list)  # whole inputs written by copy_
    unknown: list[str] = field(default_factory=list)
    pointwise: set[int] = field(default_factory=set)
    lifted: list[tuple[int, int | float]] = field(default_factory=list)
    results: dict[int, int] = field(default_factory=dict)  # by call: how many tensors it returns, if several

    def add(self, op: str, args: Sequence[Any], kwargs: Sequence[tuple[str, Any]], kind: Kind) -> Ref:
        """A new node with these arguments."""
        index = len(self.nodes)
        arguments = tuple(args), tuple(kwargs)
        self.nodes.append(CanonicalNode(index, op, *(map_literals(arguments) if self.lifting else arguments)))
        self.kinds.append(kind)
        return Ref(index)

    def round_from(self, first: int) -> None:
        """Mark the nodes from number `first` on as rounded."""
        self.nodes[first:] = [replace(n, rounded=True) for n in self.nodes[first:]]

    def kind(self, value: Any) -> Kind:
        """What is known of a canonical value."""
        if isinstance(value, Ref):
            return self.kinds[value.index]
        if isinstance(value, (bool, int, float, complex)):
            return Kind.NUMBER
        if isinstance(value, torch.dtype):
            return Kind.DTYPE
        return Kind.SIZES if isinstance(value, tuple) else Kind.ANY

    def is_number(self, value: Any) -> bool:
        """Whether `value` is certainly a number."""
        return self.kind(value) is Kind.NUMBER

    def aten(self, name: str, *args: Any, **kwargs: Any) -> Ref:
        """A call of the packet `name` of ATen. Untranslatable if it does not exist or does not accept the arguments."""
        packet = packet_named(name)
        if packet is None:
            raise Untranslatable(f"aten.{name} does not exist")
        return self.packet(packet, args, kwargs)

    def packet(self, packet: OpOverloadPacket, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Ref:
        """A call of the overload of `packet` that accepts the arguments."""
        call = bind_packet(main_packet(packet), args, kwargs, self.kinds)
        if call is None:
            raise Untranslatable(f"no overload of {packet} takes these arguments")
        return self._call(call, args)

    def overload(self, overload: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Ref | None:
        """A call of exactly this overload; None if the arguments do not fit its schema."""
        call = bind_overload(main_overload(overload), args, kwargs, self.kinds)
        return None if call is None else self._call(call, args)

    def _call(self, call: Call, args: Sequence[Any]) -> Ref:
        if not is_constant(call.args) or not is_constant([v for _, v in call.kwargs]):
            raise Untranslatable(f"{call.op} has an argument without a canonical spelling")
        s = call.signature
        kind = s.result
        if s.pointwise and kind is Kind.TENSOR and args and all(self.is_number(a) for a in args):
            kind = Kind.NUMBER
        arguments = self._lift(call) if self.lifting else (call.args, call.kwargs)
        ref = self.add(call.op, *arguments, kind)
        if s.pointwise:
            self.pointwise.add(ref.index)
        if s.results > 1 and not s.mutable:
            self.results[ref.index] = s.results
        if s.mutable:
            (self.writes if self._writes_an_input(call) else self.mutations).append(call.op)
        if s.mutable or s.random or kind is Kind.NONE:
            self.impure.add(ref.index)
        return ref

    def _lift(self, call: Call) -> tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]:
        """The arguments of a call, with constants that can be lifted replaced by inputs."""
        args, kwargs = list(call.args), dict(call.kwargs)
        places = list(lifted_places(call.op, call.args, call.kwargs))
        holders: list[Any] = [args if isinstance(place, int) else kwargs for place, _ in places]
        if not all(is_literal(holder[place]) for holder, (place, _) in zip(holders, places)):
            return call.args, call.kwargs  # computed by a translation: the fallback's row does not have them
        before = Ref(-1)
        for holder, (place, behind) in zip(holders, places):
            value = holder[place]
            own = self.add("input", (type(plain(value)).__name__,), (), Kind.NUMBER)
            self.lifted.append((own.index, value))
            before = own if behind is None else self.add("host.add", (before, behind), (), Kind.NUMBER)
            holder[place] = before
        return tuple(args), tuple(kwargs.items())

    def _writes_an_input(self, call: Call) -> bool:
        target = call.args[0] if call.args else None
        return call.op == "aten.copy_" and isinstance(target, Ref) and self.nodes[target.index].op == "input"

    def opaque_call(self, op: str, what: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Ref:
        """A call that only Python can run: `op` names it; `what` is the callable, unless the name is enough."""
        head: tuple[Any, ...] = () if what is None else (self.object(what),)
        spelled = tuple(self.spell(a) for a in args)
        named = sorted((k, self.spell(v)) for k, v in kwargs.items())
        ref = self.add(op, (*head, *spelled), named, Kind.ANY if op.startswith("attribute.") else Kind.INPUT)
        self.impure.add(ref.index)
        self.unknown.append(op)
        return ref

    def object(self, what: Any) -> Opaque:
        """`what` as one of the graph's opaque objects, which are compared by identity."""
        for i, known in enumerate(self.opaque):
            if known is what:
                return Opaque(i, type(what).__name__)
        self.opaque.append(what)
        return Opaque(len(self.opaque) - 1, type(what).__name__)

    def spell(self, value: Any) -> Any:
        """`value`, with parts that have no canonical spelling replaced by `Opaque`."""
        if is_constant(value):
            return value
        if isinstance(value, (tuple, list)):
            return tuple(self.spell(v) for v in value)
        if isinstance(value, dict) and all(isinstance(k, str) for k in value):
            return {k: self.spell(v) for k, v in value.items()}
        return self.object(value)


def renumber(nodes: Sequence[CanonicalNode], order: Sequence[int], output: Any) -> tuple[list[CanonicalNode], Any]:
    """The nodes of `order`, in that order, numbered from 0; and the output with the new numbers."""
    new = {old: Ref(i) for i, old in enumerate(order)}
    refs: Callable[[Ref], Ref] = lambda r: new[r.index]  # noqa: E731
    kept = [
        CanonicalNode(i, n.op, map_refs(n.args, refs), map_refs(n.kwargs, refs), n.rounded)
        for i, n in enumerate(nodes[old] for old in order)
    ]
    return kept, map_refs(output, refs)
