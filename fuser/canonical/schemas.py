"""Operators' schemas: the overload that a call means, and its arguments in the schema's order without defaults."""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch._ops import OpOverload, OpOverloadPacket

from fuser.canonical.graph import Opaque, Ref
from fuser.lazy_dataclasses import dataclass


class Kind(enum.Enum):
    """What is known of a node's value before any input is seen."""

    INPUT = "a tensor or a number"
    TENSOR = "a tensor"
    NUMBER = "a number"
    TENSORS = "several tensors"
    SIZES = "a tuple of numbers"
    DTYPE = "a dtype"
    DEVICE = "a device"
    NONE = "nothing"
    ANY = "anything"


@dataclass(frozen=True, slots=True)
class Param:
    """One argument of a schema. `length` is the n of `int[n]`, which accepts a single number for n equal ones."""

    name: str
    element: str
    is_list: bool
    optional: bool
    element_optional: bool
    length: int | None
    kwarg_only: bool
    required: bool
    default: Any


@dataclass(frozen=True, slots=True)
class Signature:
    """The relevant parts of an overload's schema. `varargs`: the last positional argument is a list of any length."""

    packet: str
    overload: str
    params: tuple[Param, ...]
    n_positional: int
    varargs: bool
    mutable: bool
    random: bool
    pointwise: bool
    result: Kind
    results: int  # number of tensors, if it returns several; else 1


@dataclass(frozen=True, slots=True)
class Call:
    """A call bound to its schema."""

    op: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    signature: Signature


_ELEMENT_KINDS: dict[str, tuple[Kind, ...]] = {
    "Tensor": (Kind.TENSOR,),
    "number": (Kind.NUMBER,),
    "int": (Kind.NUMBER,),
    "float": (Kind.NUMBER,),
    "bool": (Kind.NUMBER,),
    "ScalarType": (Kind.DTYPE,),
    "Device": (Kind.DEVICE,),
}
_ELEMENT_TYPES: dict[str, tuple[type, ...]] = {
    "number": (int, float, complex, bool),
    "int": (int,),
    "float": (float, int),
    "bool": (bool,),
    "str": (str,),
    "ScalarType": (torch.dtype,),
    "Device": (torch.device, str),
    "Layout": (torch.layout,),
    "MemoryFormat": (torch.memory_format,),
}
_RESULTS = {"Tensor": Kind.TENSOR, "List[Tensor]": Kind.TENSORS, "List[int]": Kind.SIZES}
# Arguments with a value that means the same as leaving them out.
_NEUTRAL = {"layout": torch.strided, "pin_memory": False, "non_blocking": False}
# Names that torch's Python functions accept for a schema's own.
_ALIASES = {"input": "self", "axis": "dim", "keepdims": "keepdim", "x": "self", "x1": "self", "x2": "other"}
# Operators for which eager accepts a number where the schema says Tensor.
NUMBERS_AS_TENSORS = frozenset(
    f"aten.{name}" for name in "add sub mul div subtract multiply divide true_divide floor_divide".split()
)


def _param(a: Any) -> Param:
    text = str(a.real_type)
    optional = text.startswith("Optional[")
    text = text[9:-1] if optional else text
    is_list = text.startswith("List[")
    text = text[5:-1] if is_list else text
    element_optional = text.startswith("Optional[")
    text = text[9:-1] if element_optional else text
    default = a.default_value if a.has_default_value() else None
    default = tuple(default) if isinstance(default, list) else default
    text = {"SymInt": "int", "Scalar": "number"}.get(text, text)
    return Param(
        a.name, text, is_list, optional, element_optional, a.N, a.kwarg_only, not a.has_default_value(), default
    )


@functools.cache
def signature(overload: OpOverload) -> Signature:
    """The signature of an overload."""
    schema = overload._schema
    params = tuple(_param(a) for a in schema.arguments)
    n_positional = sum(not p.kwarg_only for p in params)
    last = params[n_positional - 1] if n_positional else None
    returns = [str(r.real_type) for r in schema.returns]
    if len(returns) == 1:
        result = _RESULTS.get(returns[0], Kind.NUMBER if returns[0] in ("int", "number", "float", "bool") else Kind.ANY)
    else:
        result = Kind.TENSORS if returns and all(r == "Tensor" for r in returns) else Kind.ANY if returns else Kind.NONE
    return Signature(
        packet=overload._schema.name.replace("::", "."),
        overload=overload._overloadname,
        params=params,
        n_positional=n_positional,
        varargs=last is not None and last.is_list and last.element == "int" and not last.length and not last.optional,
        mutable=schema.is_mutable,
        random=torch.Tag.nondeterministic_seeded in overload.tags,
        pointwise=is_pointwise(overload),
        result=result,
        results=len(returns) if len(returns) > 1 and result is Kind.TENSORS else 1,
    )


def is_pointwise(target: Any) -> TypeGuard[OpOverload]:
    """Whether `target` is tagged as an elementwise operator, or is one that torch 2.11 does not tag."""
    tagged = isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags
    return tagged or target is torch.ops.aten.leaky_relu.default


@functools.cache
def signatures(packet: OpOverloadPacket) -> tuple[Signature, ...]:
    """The overloads of a packet that compute on tensors or create them; those that write into `out` come last."""
    every = [signature(getattr(packet, name)) for name in packet.overloads()]  # type: ignore[no-untyped-call]
    about = [s for s in every if _about_tensors(s)]
    return tuple(sorted(about or every, key=lambda s: s.mutable))


def _about_tensors(s: Signature) -> bool:
    return s.result in (Kind.TENSOR, Kind.TENSORS) or any(p.element == "Tensor" for p in s.params)


def _accepts_one(element: str, value: Any, kinds: Sequence[Kind]) -> bool:
    if isinstance(value, Ref):
        kind = kinds[value.index]
        if kind is Kind.ANY or kind in _ELEMENT_KINDS.get(element, ()):
            return True
        return kind is Kind.INPUT and element in ("Tensor", "number", "int", "float", "bool")
    if isinstance(value, Opaque):
        return False
    if isinstance(value, bool) and element in ("int", "float"):
        return False
    return isinstance(value, _ELEMENT_TYPES.get(element, ()))


def accepts(p: Param, value: Any, kinds: Sequence[Kind]) -> bool:
    """Whether `p` accepts this constant, or a node of this kind."""
    if value is None:
        return p.optional
    if not p.is_list:
        return _accepts_one(p.element, value, kinds)
    if isinstance(value, Ref):
        wanted = Kind.TENSORS if p.element == "Tensor" else Kind.SIZES
        if kinds[value.index] in (wanted, Kind.ANY):
            return True
    if isinstance(value, (tuple, list)):
        return all(
            (v is None and p.element_optional) or _accepts_one(p.element, v, kinds) for v in value
        )  # fmt: skip
    return bool(p.length) and _accepts_one(p.element, value, kinds)


def same_constant(a: Any, b: Any) -> bool:
    """Equality that distinguishes 1, 1.0 and True."""
    if type(a) is not type(b):
        return False
    if isinstance(a, tuple):
        return len(a) == len(b) and all(same_constant(x, y) for x, y in zip(a, b))
    return bool(a == b)


def _slots(s: Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """Arguments by the schema's names; None if their number or names do not fit."""
    if len(args) > s.n_positional:
        if not s.varargs:
            return None
        args = (*args[: s.n_positional - 1], tuple(args[s.n_positional - 1 :]))
    given = {p.name: a for p, a in zip(s.params, args)}
    if kwargs:
        names = {p.name for p in s.params}
        for name, value in kwargs.items():
            if name not in names:
                if value is None and name == "out":
                    continue
                name = _ALIASES.get(name, name)
            if name not in names or name in given:
                return None
            given[name] = value
    if any(p.required and p.name not in given for p in s.params):
        return None
    return given


def _normal(p: Param, value: Any, kinds: Sequence[Kind]) -> Any:
    """`value` in the form that `p` has: lists as tuples, one number for `int[n]` n times, devices as devices."""
    if isinstance(value, list):
        value = tuple(value)
    if p.is_list and value is not None and not isinstance(value, tuple):
        is_number = not isinstance(value, Ref) or kinds[value.index] in (Kind.NUMBER, Kind.INPUT)
        if p.element == "int" and is_number and (p.length or isinstance(value, int)):
            return (value,) * (p.length or 1)
    if p.element == "Device" and isinstance(value, str):
        return torch.device(value)
    return value


def _is_default(p: Param, value: Any, kinds: Sequence[Kind]) -> bool:
    if p.required:
        return False
    if same_constant(value, _normal(p, p.default, kinds)):
        return True
    return p.name in _NEUTRAL and p.default in (None, False) and same_constant(value, _NEUTRAL[p.name])


def _fits(s: Signature, given: Mapping[str, Any], kinds: Sequence[Kind]) -> bool:
    return all(p.name not in given or accepts(p, given[p.name], kinds) for p in s.params)


def _bound(s: Signature, given: Mapping[str, Any], kinds: Sequence[Kind], op: str) -> Call:
    positional: list[Any] = []
    keep = 0
    for i, p in enumerate(s.params[: s.n_positional]):
        value = _normal(p, given[p.name], kinds) if p.name in given else _normal(p, p.default, kinds)
        positional.append(value)
        if p.name in given and not _is_default(p, value, kinds):
            keep = i + 1
    named = []
    for p in s.params[s.n_positional :]:
        if p.name in given:
            value = _normal(p, given[p.name], kinds)
            if not _is_default(p, value, kinds):
                named.append((p.name, value))
    return Call(op, tuple(positional[:keep]), tuple(sorted(named, key=lambda t: t[0])), s)


def bind_packet(
    packet: OpOverloadPacket, args: Sequence[Any], kwargs: Mapping[str, Any], kinds: Sequence[Kind]
) -> Call | None:
    """The call of the first overload that accepts these arguments; None if there is none."""
    candidates = signatures(packet)
    slots = [_slots(s, args, kwargs) for s in candidates]
    for s, given in zip(candidates, slots):
        if given is not None and _fits(s, given, kinds):
            return _bound(s, given, kinds, s.packet)
    for s in candidates:  # x.view(-1), x.permute(0): one number for a list of any length
        if s.varargs and len(args) == s.n_positional:
            given = _slots(s, (*args[:-1], (args[-1],)), kwargs)
            if given is not None and _fits(s, given, kinds):
                return _bound(s, given, kinds, s.packet)
    if candidates[0].packet in NUMBERS_AS_TENSORS:
        for s, given in zip(candidates, slots):
            if given is not None and not s.mutable:
                return _bound(s, given, kinds, s.packet)
    return None


def bind_overload(
    overload: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], kinds: Sequence[Kind]
) -> Call | None:
    """The call of this overload; None if the number or the names of the arguments do not fit its schema.

    Its `op` is the packet's name if the packet alone would give each argument the same meaning.
    """
    s = signature(overload)
    given = _slots(s, args, kwargs)
    if given is None:
        return None
    call = _bound(s, given, kinds, s.packet)
    chosen = _first_fit(overload.overloadpacket, call, kinds)
    if chosen is not None and _layout(chosen, call) == _layout(s, call):
        return call
    return Call(f"{s.packet}.{s.overload or 'default'}", call.args, call.kwargs, s)


def _first_fit(packet: OpOverloadPacket, call: Call, kinds: Sequence[Kind]) -> Signature | None:
    kwargs = dict(call.kwargs)
    for s in signatures(packet):
        given = _slots(s, call.args, kwargs)
        if given is not None and _fits(s, given, kinds):
            return s
    return None


def _layout(s: Signature, call: Call) -> tuple[str, ...]:
    """The names that positional arguments get; overloads of one packet use the same name for the same argument."""
    return tuple(p.name for p in s.params[: len(call.args)])
