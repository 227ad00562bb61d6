"""Translates calls in a graph to ATen calls: operators, torch functions, methods, attributes, Python on numbers."""

from __future__ import annotations

import builtins
import difflib
import functools
import inspect
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from fuser.canonical.aliases import overloads_named
from fuser.canonical.builder import Builder, Untranslatable
from fuser.canonical.functionals import FUNCTIONALS
from fuser.canonical.graph import Ref
from fuser.canonical.indexing import translate_getitem
from fuser.canonical.keywords import unknown_keyword
from fuser.canonical.mutation import WRITING, effect, is_binding
from fuser.canonical.numbers import divide, power, square_root
from fuser.canonical.schemas import Kind, signature
from fuser.errors import GraphError

Row = Callable[..., Any]

# Python's operators: the packet of each.
BINARY = {
    "add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "floordiv": "floor_divide", "mod": "remainder",
    "pow": "pow", "matmul": "matmul", "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor",
    "lshift": "bitwise_left_shift", "rshift": "bitwise_right_shift",
    "eq": "eq", "ne": "ne", "lt": "lt", "le": "le", "gt": "gt", "ge": "ge",
}  # fmt: skip
UNARY = {"neg": "neg", "pos": "positive", "invert": "bitwise_not", "abs": "abs"}
_SWAPPED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le", "eq": "eq", "ne": "ne"}
# The functions behind "host.<name>" and "sizes.<name>": Python on numbers and sizes, which has no operator.
_PYTHON_NAMES = {"and": "and_", "or": "or_"}
_MATH = "sqrt exp log log2 log10 sin cos tan tanh floor ceil trunc".split()
HOST_OPS: dict[str, Callable[..., Any]] = {
    **{f"host.{n}": getattr(operator, _PYTHON_NAMES.get(n, n)) for n in (*BINARY, *UNARY) if n != "matmul"},
    **{f"host.{n}": getattr(math, n) for n in _MATH},
    "host.max": max, "host.min": min, "host.int": int, "host.float": float, "host.bool": bool, "host.round": round,
    "host.not": operator.not_, "host.ite": lambda c, a, b: a if c else b,
    "sizes.slice": operator.getitem, "sizes.item": operator.getitem, "sizes.cat": operator.add, "sizes.len": len,
}  # fmt: skip
_HOST_CALLS: dict[Any, str] = {
    **{getattr(math, n): f"host.{n}" for n in _MATH}, math.pow: "host.pow", operator.not_: "host.not",
    **{getattr(builtins, n): f"host.{n}" for n in ("max", "min", "int", "float", "round", "bool")},
    **{getattr(torch, f"sym_{n}"): f"host.{n}" for n in ("max", "min", "int", "float", "not", "ite")},
    **{getattr(torch, f"_sym_{n}"): f"host.{n}" for n in _MATH if hasattr(torch, f"_sym_{n}")},
}  # fmt: skip
# The packets that become Python's operators if an unknown input is a number.
HOST_OF_PACKET = {f"aten.{packet}": f"host.{n}" for n, packet in (*BINARY.items(), *UNARY.items()) if n != "matmul"}
_CASTS = {
    "float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16,
    "int": torch.int32, "long": torch.int64, "short": torch.int16, "char": torch.int8, "byte": torch.uint8,
    "bool": torch.bool,
}  # fmt: skip
# Attributes that are operators, and attributes that are facts of a tensor.
_VIEWS = {"T": "numpy_T", "mT": "mT", "H": "matrix_H", "mH": "mH", "real": "real", "imag": "imag"}
_FACTS = {"dtype": ("prim.dtype", Kind.DTYPE), "device": ("prim.device", Kind.DEVICE)}
_ITEMS = {"values": 0, "indices": 1}


def translate(b: Builder, op: str, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The canonical value of an FX call. GraphError if it can never run."""
    before = len(b.nodes), len(b.mutations), len(b.writes)
    try:
        if op == "call_method":
            return _method(b, str(target), args, kwargs)
        return _function(b, target, args, kwargs)
    except (Untranslatable, TypeError):  # TypeError: arguments that the translation does not have
        del b.nodes[before[0] :], b.kinds[before[0] :], b.mutations[before[1] :], b.writes[before[2] :]
        b.lifted = [item for item in b.lifted if item[0] < before[0]]
        b.impure = {i for i in b.impure if i < before[0]}
        b.pointwise = {i for i in b.pointwise if i < before[0]}
    return _as_python(b, op, target, args, kwargs)


def _function(b: Builder, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if isinstance(target, OpOverload):
        return _overload(b, target, args, kwargs)
    if isinstance(target, OpOverloadPacket):
        return b.packet(target, args, kwargs)
    if isinstance(target, (torch.nn.Module, torch._ops.HigherOrderOperator)) or not callable(target):
        raise Untranslatable("a module or a higher-order operator")
    row = _ROWS.get(target) if _hashable(target) else None
    if row is not None:
        return row(b, *args, **kwargs)
    name = getattr(target, "__name__", "")
    if getattr(torch.Tensor, name, None) is target:
        return _method(b, name, args, kwargs)
    if is_binding(target):
        return b.aten(name, *args, **kwargs)
    raise Untranslatable("a Python function")


def _hashable(target: Any) -> bool:
    return getattr(type(target), "__hash__", None) is not None


def _overload(b: Builder, target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    ref = b.overload(target, args, kwargs)
    if ref is None:
        raise GraphError(
            f"{target} cannot be called with {len(args)} positional arguments and the keywords "
            f"{sorted(kwargs)}: expected {target._schema}"
        )
    return ref


def named_operator(name: str) -> OpOverload | OpOverloadPacket:
    """The operator named "aten.add", "aten::add" or "aten.add.Tensor"."""
    parts = name.replace("::", ".").split(".")
    found: Any = torch.ops
    for part in parts:
        found = getattr(found, part, None)
        if found is None:
            break
    if isinstance(found, (OpOverload, OpOverloadPacket)):
        return found
    near = difflib.get_close_matches(parts[1] if len(parts) > 1 else name, dir(torch.ops.aten) or dir(torch), 1)
    hint = f"; the nearest name is aten.{near[0]}" if near else ""
    raise GraphError(f"operator {name!r} does not exist: expected one such as 'aten.add'{hint}")


# -- methods and attributes --------------------------------------------------------------------------------------------
def _method(b: Builder, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if not args:
        raise GraphError(f"method {name!r} is called on nothing: expected a tensor as its first argument")
    if b.kind(args[0]) is Kind.SIZES and name in ("numel", "__len__", "count", "index"):
        raise Untranslatable("a method of sizes")
    row = _METHODS.get(name)
    if row is not None:
        return row(b, *args, **kwargs)
    if name.startswith("__") and name.endswith("__"):
        return _dunder(b, name[2:-2], args, kwargs)
    method = getattr(torch.Tensor, name, None)
    if inspect.isfunction(method) and name not in _LIKE_THEIR_OPERATORS:
        raise Untranslatable("a method that is written in Python, and may do something else than its operator")
    if b.kind(args[0]) in (Kind.TENSOR, Kind.INPUT) and method is not None:
        return b.aten(name, *_self_in_place(name, args), **kwargs)
    raise Untranslatable("a method without an operator")


def _self_in_place(name: str, args: Sequence[Any]) -> Sequence[Any]:
    """A method's positional arguments in its operator's order: `x.where(c, other)` is where(c, x, other)."""
    n = _place_of_self(name)
    if len(args) <= n:
        raise Untranslatable("arguments before self that come as keywords")
    return (*args[1 : n + 1], args[0], *args[n + 1 :])


@functools.cache
def _place_of_self(name: str) -> int:
    schemas = [[a.name for a in o._schema.arguments] for o in overloads_named(name)]
    return min((names.index("self") for names in schemas if "self" in names), default=0)


def _dunder(b: Builder, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if kwargs:
        raise Untranslatable("an operator's method with keywords")
    if name in BINARY and len(args) == 2:
        return _binary(b, name, *args)
    if name[:1] == "r" and name[1:] in BINARY and len(args) == 2:
        return _reflected(b, name[1:], *args)
    if name[:1] == "i" and name[1:] in BINARY and len(args) == 2:
        return b.aten(f"{BINARY[name[1:]]}_", *args)
    if name in UNARY and len(args) == 1:
        return b.aten(UNARY[name], *args)
    if name == "getitem":
        return translate_getitem(b, *args)
    raise Untranslatable("a method without an operator")


def _reflected(b: Builder, name: str, x: Any, other: Any) -> Any:
    """`x.__radd__(other)` and the like: torch swaps the operands only if their order matters."""
    if name in ("add", "mul", "and", "or", "xor"):
        return _binary(b, name, x, other)
    if name == "truediv":
        return b.aten("mul", b.aten("reciprocal", x), other)
    return _binary(b, name, other, x)


def _getattr(b: Builder, value: Any, name: str) -> Any:
    kind = b.kind(value)
    if kind is Kind.TENSORS and name in _ITEMS:
        return b.add("getitem", (value, _ITEMS[name]), (), Kind.TENSOR)
    if kind not in (Kind.TENSOR, Kind.INPUT):
        raise Untranslatable("an attribute of a value that is no tensor")
    if name in _VIEWS:
        return b.aten(_VIEWS[name], value)
    if name in _FACTS:
        return b.add(_FACTS[name][0], (value,), (), _FACTS[name][1])
    if name == "shape":
        return b.aten("sym_size", value)
    if name == "ndim":
        return b.aten("dim", value)
    raise Untranslatable("an attribute without an operator")


def _size(b: Builder, x: Any, dim: Any = None) -> Any:
    return b.aten("sym_size", x) if dim is None else b.aten("sym_size", x, dim)


def _stride(b: Builder, x: Any, dim: Any = None) -> Any:
    return b.aten("sym_stride", x) if dim is None else b.aten("sym_stride", x, dim)


def _to(b: Builder, x: Any, *args: Any, **kwargs: Any) -> Any:
    """x.to(dtype | device | other, …) as `aten.to(x, dtype)` or with keywords."""
    options = dict(kwargs)
    names = ["dtype", "non_blocking", "copy"] if args and b.kind(args[0]) is Kind.DTYPE else None
    if args and isinstance(args[0], Ref) and b.kind(args[0]) in (Kind.TENSOR, Kind.INPUT):
        return b.aten("to", x, *args, **kwargs)
    for name, value in zip(names or ["device", "dtype", "non_blocking", "copy"], args):
        options[name] = value
    options = {k: v for k, v in options.items() if v is not None and v is not False}
    if set(options) == {"dtype"}:
        return b.aten("to", x, options["dtype"])
    return b.aten("to", x, **options)


def _cast(dtype: torch.dtype) -> Row:
    def row(b: Builder, x: Any, **kwargs: Any) -> Any:
        return b.aten("to", x, dtype, **{k: v for k, v in kwargs.items() if v is not None})

    return row


def _type(b: Builder, x: Any, dtype: Any = None, non_blocking: bool = False) -> Any:
    if b.kind(dtype) is not Kind.DTYPE:
        raise Untranslatable("a type given by its name, or asked for")
    return b.aten("to", x, dtype)


def _view(b: Builder, x: Any, *sizes: Any, **kwargs: Any) -> Any:
    return b.aten("view", x, *sizes, **kwargs)


# -- operators ---------------------------------------------------------------------------------------------------------
def _binary(b: Builder, name: str, left: Any, right: Any) -> Any:
    packet = BINARY[name]
    if name == "add" and b.kind(left) is Kind.SIZES and b.kind(right) is Kind.SIZES:
        if isinstance(left, tuple) and isinstance(right, tuple):
            return left + right
        return b.add("sizes.cat", (left, right), (), Kind.SIZES)
    for side in (left, right):
        if b.kind(side) not in (Kind.TENSOR, Kind.INPUT, Kind.NUMBER):
            raise Untranslatable("an operator on something that is neither tensor nor number")
    numbers = b.is_number(left), b.is_number(right)
    if numbers == (True, True):
        if not isinstance(left, Ref) and not isinstance(right, Ref):
            return HOST_OPS[f"host.{name}"](left, right)
        return b.add(f"host.{name}", (left, right), (), Kind.NUMBER)
    if numbers == (True, False):  # as Tensor's reflected methods do
        if name in _SWAPPED:
            return b.aten(_SWAPPED[name], right, left)
        if name == "sub":
            return b.aten("rsub", right, left)
        if name == "truediv":
            return b.aten("mul", b.aten("reciprocal", right), left)
        if name in ("add", "mul"):
            return b.aten(packet, right, left)
    return b.aten(packet, left, right)


def _in_place(b: Builder, name: str, x: Any, y: Any) -> Any:
    """`x += y`: writes into a tensor, or rebinds a number."""
    return _binary(b, name, x, y) if b.is_number(x) else b.aten(f"{BINARY[name]}_", x, y)


def _unary(b: Builder, name: str, x: Any) -> Any:
    if b.is_number(x):
        return b.add(f"host.{name}", (x,), (), Kind.NUMBER)
    return b.aten(UNARY[name], x)


def _host(b: Builder, name: str, *args: Any, **kwargs: Any) -> Any:
    if kwargs or any(b.kind(a) is not Kind.NUMBER and b.kind(a) is not Kind.INPUT for a in args):
        raise Untranslatable("a function of Python on something that is no number")
    return b.add(name, args, (), Kind.NUMBER)


def _power(b: Builder, x: Any, y: Any) -> Any:
    """A power of numbers that is a float for integers, too."""
    return _binary(b, "pow", _host(b, "host.float", x), y)


def _length(b: Builder, x: Any) -> Any:
    if isinstance(x, tuple):
        return len(x)
    if b.kind(x) is Kind.SIZES:
        return b.add("sizes.len", (x,), (), Kind.NUMBER)
    return b.aten("sym_size", x, 0)


def _torch_size(b: Builder, sizes: Any = ()) -> Any:
    if not isinstance(sizes, (tuple, list)) and b.kind(sizes) is not Kind.SIZES:
        raise Untranslatable("sizes of something")
    return tuple(sizes) if isinstance(sizes, list) else sizes


def _named(fn: Row, *head: Any) -> Row:
    return lambda b, *args, **kwargs: fn(b, *head, *args, **kwargs)


_ROWS: dict[Any, Row] = {
    **FUNCTIONALS,
    **{getattr(operator, _PYTHON_NAMES.get(n, n)): _named(_binary, n) for n in BINARY},
    **{getattr(operator, n): _named(_unary, n) for n in UNARY},
    **{target: _named(_host, name) for target, name in _HOST_CALLS.items()},
    **{getattr(operator, f"i{n}"): _named(_in_place, n) for n in BINARY if hasattr(torch.Tensor, f"__i{n}__")},
    operator.imatmul: _named(_binary, "matmul"),  # Tensor has no such method: the product is a new tensor
    operator.getitem: translate_getitem, builtins.getattr: _getattr, builtins.abs: _named(_unary, "abs"),
    builtins.len: _length, divide: _named(_binary, "truediv"), power: _power, square_root: _named(_host, "host.sqrt"),
    builtins.pow: _named(_binary, "pow"), torch.Size: _torch_size,
}  # fmt: skip
# Methods written in Python that do the same as the operators of their names.
_LIKE_THEIR_OPERATORS = frozenset({"istft", "stft", "unflatten"})
_METHODS: dict[str, Row] = {
    "size": _size, "stride": _stride, "to": _to, "type": _type, "numel": lambda b, x: b.aten("sym_numel", x),
    "nelement": lambda b, x: b.aten("sym_numel", x), "ndimension": lambda b, x: b.aten("dim", x),
    "storage_offset": lambda b, x: b.aten("sym_storage_offset", x), "view": _view,
    "norm": FUNCTIONALS[torch.Tensor.norm], "split": FUNCTIONALS[torch.Tensor.split],
    **{name: _cast(dtype) for name, dtype in _CASTS.items()},
}  # fmt: skip


# -- calls that only Python can run ------------------------------------------------------------------------------------


def _as_python(b: Builder, op: str, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Ref:
    mistake = unknown_keyword(target, kwargs) if kwargs else None
    if mistake is not None:
        raise GraphError(mistake)
    if op == "call_method":
        name = str(target)
        may_exist = b.kind(args[0]) not in (Kind.TENSOR, Kind.INPUT) if args else False
        if not may_exist and not hasattr(torch.Tensor, name):
            raise GraphError(f"method {name!r} does not exist: expected a method of torch.Tensor")
        if effect(op, name, args, kwargs) in WRITING:
            b.mutations.append(f"method.{name}")
        return b.opaque_call(f"method.{name}", None, args, kwargs)
    if target is builtins.getattr:
        return b.opaque_call(f"attribute.{args[1]}", None, args[:1], kwargs)
    if isinstance(target, OpOverload):
        s = signature(target)
        return b.opaque_call(f"call.{s.packet}.{s.overload or 'default'}", None, args, kwargs)
    if isinstance(target, OpOverloadPacket):
        return b.opaque_call(f"call.{target}", None, args, kwargs)
    if not callable(target):
        raise GraphError(f"{target!r} cannot be called: expected a function, an operator or the name of one")
    if effect(op, target, args, kwargs) in WRITING:
        b.mutations.append(f"call.{target.__name__}")
    module, name = getattr(target, "__module__", "") or "", getattr(target, "__qualname__", type(target).__name__)
    return b.opaque_call(f"call.{module}.{name}".replace("..", "."), target, args, kwargs)
