"""Graphs as data for another process: calls by the names of their targets, values as JSON. Decoding runs no code.

A target is an operator ("aten::add.Tensor", or "aten::add" for a packet), or a function of a closed list of modules
("torch:relu", "operator:add"). Other targets have no name: GraphError.
"""

from __future__ import annotations

import builtins
import functools
import math
import operator
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from fuser.canonical.build import REQUIRED, Registered, Row
from fuser.canonical.graph import ROUNDED, Ref, map_refs
from fuser.canonical.schemas import Kind
from fuser.errors import GraphError
from fuser.startup import import_at_rest

_BUILTINS = frozenset("abs bool float getattr int len max min round slice sum tuple list".split())
_MODULES: dict[str, ModuleType] = {
    "operator": operator, "math": math, "builtins": builtins, "torch": torch,
    "torch.nn.functional": torch.nn.functional, "torch._C._nn": torch._C._nn,
    "torch.fft": torch.fft, "torch.linalg": torch.linalg, "torch.special": torch.special,
}  # fmt: skip
_SPELLED: dict[str, tuple[type, Any]] = {
    "dtype": (torch.dtype, torch),
    "layout": (torch.layout, torch),
    "memory_format": (torch.memory_format, torch),
}


# -- targets -----------------------------------------------------------------------------------------------------------
def name_of(target: Any) -> str:
    """The name under which another process finds `target`. GraphError if it has none."""
    if isinstance(target, torch._ops.OpOverload):
        return f"{target._schema.name}.{target._overloadname}"
    if isinstance(target, torch._ops.OpOverloadPacket):
        return str(target._qualified_op_name)
    found = _names().get(target) if callable(target) else None
    if found is None:
        raise GraphError(
            f"{getattr(target, '__name__', target)!r} is a Python object that another process cannot find by name: "
            "expected an operator, or a function of torch, operator or math"
        )
    return found


@functools.lru_cache(maxsize=1024)
def target_of(name: str) -> Any:
    """The operator or function with this name. GraphError if there is none in this process."""
    if "::" in name:
        space, _, rest = name.partition("::")
        if space == "fuser":
            import_at_rest("fuser.ops")  # registers the package's operators
        packet, _, overload = rest.partition(".")
        plain = space.isidentifier() and not space.startswith("__") and packet.isidentifier()
        found = getattr(getattr(torch.ops, space, None), packet, None) if plain else None
        if isinstance(found, torch._ops.OpOverloadPacket):
            found = getattr(found, overload, None) if overload and overload in found.overloads() else found  # type: ignore[no-untyped-call]
            if isinstance(found, torch._ops.OpOverload) or not overload:
                return found
    elif name in _functions():
        return _functions()[name]
    raise GraphError(f"there is no {name!r} here: expected an operator or function of the torch that wrote the graph")


@functools.cache
def _functions() -> dict[str, Callable[..., Any]]:
    """All functions that have names: those that compute with tensors and numbers."""
    tensors = {n for n in dir(torch._C._VariableFunctions) if not n.startswith("__")}
    tensors.update(torch.functional.__all__, (n for n in dir(torch) if n.startswith(("sym_", "_sym_"))))
    found: dict[str, Callable[..., Any]] = {}
    for path, module in _MODULES.items():
        names = {"torch": tensors, "builtins": _BUILTINS}.get(path) or {n for n in dir(module) if n[:2] != "__"}
        for name in sorted(names):
            value = getattr(module, name, None)
            home = getattr(value, "__module__", None) or ""
            own = path in ("torch", "builtins") or home.partition(".")[0] in ("torch", "math", "_operator", "")
            if callable(value) and own and not (path.startswith("torch.") and isinstance(value, type)):
                found[f"{path}:{name}"] = value
    return found


@functools.cache
def _names() -> dict[Any, str]:
    return {value: name for name, value in reversed(_functions().items())}


# -- values ------------------------------------------------------------------------------------------------------------
def encode_value(value: Any) -> Any:
    """An argument of a call as JSON; `Ref`s are {"ref": number}. GraphError for an unknown Python object."""
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):  # including marked literals
        plain = int(value) if isinstance(value, int) else float(value)
        return plain if math.isfinite(plain) else {"float": repr(plain)}
    if isinstance(value, Ref):
        return {"ref": value.index}
    if type(value) is list:
        return [encode_value(v) for v in value]
    if isinstance(value, tuple):
        return {"tuple": [encode_value(v) for v in value]}
    if isinstance(value, dict):
        return {"dict": [[encode_value(k), encode_value(v)] for k, v in value.items()]}
    if isinstance(value, slice):
        return {"slice": [encode_value(v) for v in (value.start, value.stop, value.step)]}
    if isinstance(value, complex):
        return {"complex": [encode_value(value.real), encode_value(value.imag)]}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if value is Ellipsis:
        return {"ellipsis": True}
    for key, (kind, _) in _SPELLED.items():
        if isinstance(value, kind):
            return {key: str(value).removeprefix("torch.")}
    return {"function": name_of(value)}


def decode_value(data: Any, ref: Callable[[int], Any] = Ref) -> Any:
    """The value of JSON from `encode_value`, with references replaced by `ref(number)`. GraphError for other JSON."""
    if data is None or isinstance(data, (bool, int, float, str)):
        return data
    if isinstance(data, list):
        return [decode_value(v, ref) for v in data]
    if isinstance(data, dict) and len(data) == 1:
        ((key, given),) = data.items()
        made = _DECODERS.get(key)
        if made is not None:
            return made(given, ref)
    raise GraphError(f"{str(data)[:80]} is no value of a graph: expected what fuser.canonical.portable writes")


def _spelled(key: str, name: Any) -> Any:
    kind, module = _SPELLED[key]
    found = getattr(module, name, None) if isinstance(name, str) else None
    if not isinstance(found, kind):
        raise GraphError(f"{name!r} is no {key} of this torch")
    return found


def _float(text: Any) -> float:
    if text not in ("inf", "-inf", "nan"):
        raise GraphError(f"{text!r} is no number: expected inf, -inf or nan")
    return float(text)


def _reference(index: Any, ref: Callable[[int], Any]) -> Any:
    if type(index) is not int:
        raise GraphError(f"{index!r} is no number of a value")
    return ref(index)


_DECODERS: dict[str, Callable[[Any, Callable[[int], Any]], Any]] = {
    "ref": _reference,
    "float": lambda given, ref: _float(given),
    "tuple": lambda given, ref: tuple(decode_value(v, ref) for v in given),
    "dict": lambda given, ref: {decode_value(k, ref): decode_value(v, ref) for k, v in given},
    "slice": lambda given, ref: slice(*(decode_value(v, ref) for v in given)),
    "complex": lambda given, ref: complex(*(decode_value(v, ref) for v in given)),
    "device": lambda given, ref: torch.device(str(given)),
    "ellipsis": lambda given, ref: Ellipsis,
    "function": lambda given, ref: target_of(str(given)),
    **{key: functools.partial(lambda given, ref, key: _spelled(key, given), key=key) for key in _SPELLED},
}


# -- graphs ------------------------------------------------------------------------------------------------------------
def encode_graph(registered: Registered) -> dict[str, Any]:
    """A registered graph as JSON. Its bound values are not included; they become its first inputs.

    GraphError if it holds Python objects without names.
    """
    kinds = [int(kind is Kind.NUMBER) for kind in registered.kinds]
    place = {row.index: at for at, row in enumerate(registered.rows)}
    names, defaults = iter(registered.inputs), iter(registered.defaults)
    rows = []
    for row in registered.rows:
        number = kinds[row.index] if row.index < len(kinds) else 0
        if row.op == "placeholder":
            default = next(defaults)
            given = [] if default is REQUIRED else [encode_value(default)]
            rows.append(["input", next(names), number, given])
        elif row.op == "get_attr" and isinstance(row.target, Ref):
            is_number = not isinstance(registered.bound[row.target.index], torch.Tensor)
            rows.append(["bound", row.target.index, int(is_number)])
        else:
            rows.append(_encode_row(row, place))
    pairs = zip(registered.graph.nodes, registered.origins, strict=True)
    rounded = sorted({place[row] for node, row in pairs if node.rounded and row in place})
    made = {"rows": rows, "output": encode_value(_placed(registered.output, place))}
    return made | ({"rounded": rounded} if rounded else {})


def _placed(value: Any, place: dict[int, int]) -> Any:
    return map_refs(value, lambda ref: Ref(place[ref.index]))


def _encode_row(row: Row, place: dict[int, int]) -> list[Any]:
    args, kwargs = encode_value(_placed(row.args, place)), encode_value(_placed(row.kwargs, place))
    if row.op == "get_attr":
        return ["constant", encode_value(row.target)]
    if row.op == "call_method":
        return ["method", str(row.target), args, kwargs]
    if row.op != "call_function":
        raise GraphError(f"the graph calls {row.target!r}, a module of Python that another process cannot find by name")
    return ["call", name_of(row.target), args, kwargs]


def decode_graph(data: Any, n_bound: int) -> torch.fx.Graph:
    """The graph of JSON from `encode_graph`; its first `n_bound` inputs are the bound ones.

    GraphError for other JSON.
    """
    try:
        return _decode_graph(data, n_bound)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, RuntimeError) as e:
        raise GraphError(f"this is no graph that fuser.canonical.portable wrote: {e}") from None


def _decode_graph(data: Any, n_bound: int) -> torch.fx.Graph:
    graph = torch.fx.Graph()
    # Bound inputs are ordered by their numbers, not by their rows.
    numbers = {row[1] for row in data["rows"] if row[0] == "bound" and row[2]}
    bound = [graph.placeholder(f"bound_{i}", int if i in numbers else None) for i in range(n_bound)]
    values: list[Any] = []

    def ref(index: int) -> Any:
        if not 0 <= index < len(values):
            raise GraphError(f"the graph reads its value {index} before it is made")
        return values[index]

    for kind, what, *rest in data["rows"]:
        if kind == "input":
            number, given = rest
            made = graph.placeholder(str(what), int if number else None, *map(decode_value, given))
        elif kind == "bound":
            made = bound[what]
        elif kind == "constant":
            made = decode_value(what)
        elif kind == "method" and str(what) in _methods():
            made = graph.call_method(str(what), decode_value(rest[0], ref), decode_value(rest[1], ref))
        elif kind == "call":
            made = graph.call_function(target_of(str(what)), decode_value(rest[0], ref), decode_value(rest[1], ref))
        else:
            raise GraphError(f"{kind} {what!r} is no call of a graph: expected a call by name, or a tensor's method")
        values.append(made)
    for index in data.get("rounded", ()):
        values[index].meta[ROUNDED] = True
    graph.output(decode_value(data["output"], ref))
    return graph


@functools.cache
def _methods() -> frozenset[str]:
    found = (*dir(torch.Tensor), *dir(tuple), *dir(int), *dir(float))
    arithmetic = {f"__{n}__" for n in (*dir(operator), "radd", "rsub", "rmul", "rtruediv", "rpow", "getitem")}
    return frozenset(n for n in found if not n.startswith("_") or n in arithmetic)


__all__ = ["decode_graph", "decode_value", "encode_graph", "encode_value", "name_of", "target_of"]
