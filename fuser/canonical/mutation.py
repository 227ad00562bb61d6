"""Which calls write into existing tensors: by schema, and for Python callables by closed tables.

A call that neither a schema nor a table knows counts as one that may write.
"""

from __future__ import annotations

import builtins
import enum
import functools
import inspect
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch._ops import OpOverload, OpOverloadPacket

from fuser.canonical.aliases import packet_named
from fuser.lazy_dataclasses import dataclass


class Effect(enum.Enum):
    """The effect of a call on tensors that existed before it."""

    NONE = "writes none"
    WRITES = "may write some"
    UNKNOWN = "neither a schema nor a table knows the call"
    RETURNS_WRITTEN = "writes its first argument and returns it, if that is a tensor"


WRITING = (Effect.WRITES, Effect.RETURNS_WRITTEN)
_HOMES = (torch, *(getattr(torch._C, n) for n in ("_nn", "_special", "_linalg", "_fft")))
_BUILTIN = (type(torch.add), type(len))
_FUNCTIONS = (*_BUILTIN, type(torch.einsum), type(torch.Tensor.add), type(torch.Tensor.__len__), type)
_IN_PLACE = "add sub mul truediv floordiv mod pow and or xor lshift rshift matmul concat".split()
# Tensor has no method for some of Python's in-place operators: `x @= y` makes a new tensor.
_IN_PLACE_METHODS = frozenset(f"__i{n}__" for n in (*_IN_PLACE, "div") if hasattr(torch.Tensor, f"__i{n}__"))
_IN_PLACE_OPERATORS = {getattr(operator, f"i{n}"): f"__i{n}__" in _IN_PLACE_METHODS for n in _IN_PLACE}
_SETTERS = frozenset({operator.setitem, operator.delitem})
# Methods of tensors without a complete schema that write data, gradients or flags.
_WRITING_METHODS = frozenset(
    "__setitem__ __delitem__ __setstate__ apply_ map_ map2_ share_memory_ module_load backward retain_grad".split()
)
_PURE_BUILTINS = "abs bool divmod float getattr int isinstance len max min pow round sum".split()
# Norms write their running statistics in training, which their schemas do not declare: the argument that decides.
_TRAINED = {
    "aten::batch_norm": "training", "aten::native_batch_norm": "training", "aten::cudnn_batch_norm": "training",
    "aten::miopen_batch_norm": "training", "aten::_batch_norm_impl_index": "training",
    "aten::instance_norm": "use_input_stats", "aten::batch_norm_update_stats": "",
    "aten::batch_norm_gather_stats": "", "aten::batch_norm_gather_stats_with_counts": "",
}  # fmt: skip


@functools.cache
def _pure() -> frozenset[Any]:
    """Callables of Python and torch without schemas that write no tensor."""
    operators = (getattr(operator, n) for n in operator.__all__ if n != "call")
    numbers = (*vars(math).values(), *(v for n, v in vars(torch).items() if n.startswith("sym_")))
    python = (getattr(builtins, n) for n in _PURE_BUILTINS)
    autocast, grad = torch.amp.autocast_mode, torch.autograd.grad_mode
    modes = (
        *(torch._C._set_grad_enabled, torch._C._log_api_usage_once, autocast._enter_autocast),
        *(autocast._exit_autocast, grad._enter_inference_mode, grad._exit_inference_mode),
    )
    found = frozenset({*operators, *filter(callable, numbers), *python, *modes, torch.Size})
    return found - _SETTERS - _IN_PLACE_OPERATORS.keys()


@functools.cache
def _functions() -> frozenset[Any]:
    """torch's functions written in Python that write only if their arguments request it."""
    found = {v for m in (F, torch.functional) for v in vars(m).values() if inspect.isfunction(v)}
    return frozenset(found - {vars(F)["_no_grad_embedding_renorm_"]})


@functools.cache
def _parameters(function: Any) -> tuple[str, ...]:
    """The names of a function's parameters. Computing them for all `_functions` would add 3 ms to the first graph."""
    return tuple(inspect.signature(function).parameters)


def effect(op: str, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Effect:
    """The effect of an FX call on tensors that existed before it; a method is taken as one of tensors."""
    if op == "call_method":
        return _of_method(str(target), args, kwargs)
    if op != "call_function":
        return Effect.UNKNOWN if op == "call_module" else Effect.NONE
    if isinstance(target, (OpOverload, OpOverloadPacket)):
        return _of_schemas(_overloads(target), args, kwargs)
    if not isinstance(target, _FUNCTIONS):
        return Effect.UNKNOWN
    if target in _IN_PLACE_OPERATORS:
        return Effect.RETURNS_WRITTEN if _IN_PLACE_OPERATORS[target] else Effect.NONE
    if target in _pure():
        return Effect.NONE
    if target in _functions():
        return _of_python(target, args, kwargs)
    name = getattr(target, "__name__", "")
    if getattr(torch.Tensor, name, None) is target:
        return _of_method(name, args, kwargs)
    if is_binding(target):
        overloads = _named(name)
        return _of_schemas(overloads, args, kwargs) if overloads else Effect.UNKNOWN
    return Effect.UNKNOWN


def is_binding(target: Any) -> bool:
    """Whether `target` is torch's own binding of an operator: a builtin, never Python code under the same name."""
    return isinstance(target, _BUILTIN) and any(getattr(h, target.__name__, None) is target for h in _HOMES)


def _of_method(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Effect:
    if not hasattr(torch.Tensor, name):
        return Effect.UNKNOWN
    if name in _WRITING_METHODS:
        return Effect.WRITES
    if name in _IN_PLACE_METHODS:
        return Effect.RETURNS_WRITTEN
    overloads = _named(name)
    return _of_schemas(overloads, args, kwargs) if overloads else Effect.NONE


def _of_python(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Effect:
    given = {**dict(zip(_parameters(target), args)), **kwargs}
    asked = given.get("inplace", False) is not False or given.get("max_norm") is not None
    flag = {F.batch_norm: "training", F.instance_norm: "use_input_stats"}.get(target)
    trained = flag is not None and _is_trained(given, flag, target is F.instance_norm)
    return Effect.WRITES if asked or trained or given.get("out") is not None else Effect.NONE


def _is_trained(given: Mapping[str, Any], flag: str, default: bool) -> bool:
    return given.get("running_mean") is not None and given.get(flag, default) is not False


@dataclass(frozen=True)
class _Overload:
    """The writes in an overload's schema. `returned`: it returns the one argument that it writes, its first."""

    positional: tuple[str, ...]
    needed: tuple[str, ...]  # keyword-only
    written: tuple[str, ...]
    lists: frozenset[str]  # those of `written` that are lists
    returned: bool
    trained: str | None


@functools.cache
def _overloads(target: OpOverload | OpOverloadPacket) -> tuple[_Overload, ...]:
    if isinstance(target, OpOverload):
        return (_overload(target._schema),)
    return tuple(_overload(getattr(target, n)._schema) for n in target.overloads())  # type: ignore[no-untyped-call]


def _named(name: str) -> tuple[_Overload, ...]:
    packet = packet_named(name)
    return _overloads(packet) if packet is not None else ()


def _overload(schema: Any) -> _Overload:
    written = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    result = schema.returns[0].alias_info if len(schema.returns) == len(written) == 1 else None
    return _Overload(
        tuple(a.name for a in schema.arguments if not a.kwarg_only),
        tuple(a.name for a in schema.arguments if a.kwarg_only and not a.has_default_value()),
        tuple(a.name for a in written),
        frozenset(a.name for a in written if "List" in str(a.type)),
        result is not None
        and result.before_set == written[0].alias_info.before_set
        and written[0].name == schema.arguments[0].name,
        _TRAINED.get(schema.name),
    )


def _of_schemas(overloads: Sequence[_Overload], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Effect:
    """The common effect of all overloads that accept the arguments; WRITES if they disagree."""
    found = {e for o in overloads if (e := _of_schema(o, args, kwargs)) is not None}
    return found.pop() if len(found) == 1 else Effect.WRITES


def _of_schema(overload: _Overload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Effect | None:
    """The effect of a call of an overload; None if it does not accept the arguments."""
    given: dict[str, Any] = {**dict(zip(overload.positional, args)), **kwargs}
    if any(name not in given for name in overload.needed):
        return None
    written = [name for name in overload.written if given.get(name) is not None]
    if any(not isinstance(given[name], (list, tuple)) for name in written if name in overload.lists):
        return None
    if overload.trained is not None and _is_trained(given, overload.trained, default=True):
        return Effect.WRITES
    return Effect.NONE if not written else Effect.RETURNS_WRITTEN if overload.returned else Effect.WRITES


def writes_statistics(op: str, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an FX call of a norm's operator writes its running statistics, which the operator's schema hides."""
    hides = isinstance(target, OpOverload) and target._schema.name in _TRAINED
    return hides and writes(op, target, args, kwargs)


def in_place_twin(target: Any) -> OpOverload | None:
    """The overload that writes its first argument, such as `relu_` for `relu`; None if there is none."""
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return None
    packet = getattr(torch.ops.aten, f"{target._opname}_", None)
    return getattr(packet, target._overloadname, None)


def writes(op: str, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an FX call may write into a tensor that existed before."""
    return effect(op, target, args, kwargs) is not Effect.NONE
