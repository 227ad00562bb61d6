"""TorchScript's operators over numbers, lists and dicts as Python functions."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch

from fuser.canonical.numbers import divide, power, square_root
from fuser.frontends.script_memory import every_node

Function = Callable[..., Any]

# Over numbers, booleans, dtypes and devices, tuples and None; if all arguments are known, the result is computed at
# once.
PYTHON: dict[str, Function] = {
    **{f"aten::{n}": getattr(operator, n) for n in ("add", "sub", "mul", "floordiv", "neg", "lt", "le", "gt", "ge")},
    **{f"aten::{n}": getattr(operator, n) for n in ("eq", "ne")},
    **{f"aten::{n}": getattr(math, n) for n in ("floor", "ceil", "trunc", "exp", "sin", "cos", "tan", "tanh")},
    "aten::div": divide, "aten::remainder": operator.mod, "aten::pow": power, "aten::sqrt": square_root,
    "aten::pow.int_to_int": operator.pow, "aten::round": round,
    "prim::TupleIndex": operator.getitem, "aten::__not__": operator.not_, "aten::__is__": operator.is_,
    "aten::__isnot__": operator.is_not, "aten::__and__": operator.and_, "aten::__or__": operator.or_,
    "aten::__xor__": operator.xor, "aten::__lshift__": operator.lshift, "aten::__rshift__": operator.rshift,
    "aten::Int": int, "aten::Float": float, "aten::Bool": bool, "prim::min": min, "prim::max": max, "prim::abs": abs,
}  # fmt: skip
# Python's result may be an integer where TorchScript's is a float.
MAY_BE_INTEGERS = frozenset({"prim::min", "prim::max", "aten::round"})


def _insert(items: list[Any], at: int, value: Any) -> None:
    items.insert(at, value)


def _pop(items: Any, *place: Any) -> Any:
    return items.pop(*place)


def _extend(items: list[Any], more: list[Any]) -> list[Any]:
    items.extend(more)
    return items


def _append(items: list[Any], value: Any) -> list[Any]:
    items.append(value)
    return items


def _set_item(items: Any, at: Any, value: Any) -> Any:
    items[at] = value
    return items


def _sort(items: list[Any], reverse: bool = False) -> None:
    items.sort(reverse=reverse)


def _slice(items: list[Any], start: int | None, end: int | None, step: int | None = 1) -> list[Any]:
    return items[slice(start, end, step)]


# Over a list or dict as the first argument. These change it:
MUTATING: dict[str, Function] = {
    "aten::append": _append, "aten::_set_item": _set_item, "aten::insert": _insert, "aten::pop": _pop,
    "aten::extend": _extend, "aten::add_": _extend, "aten::reverse": lambda items: items.reverse(),
    "aten::clear": lambda items: items.clear(), "aten::sort": _sort, "aten::Delete": operator.delitem,
    "aten::mul_": operator.imul,
}  # fmt: skip
LISTS: dict[str, Function] = {
    **MUTATING, "aten::slice": _slice, "aten::add": operator.add, "aten::mul": operator.mul, "aten::len": len,
    "aten::__getitem__": operator.getitem, "aten::list": list, "aten::copy": lambda items: items.copy(),
    "aten::eq": operator.eq, "aten::ne": operator.ne, "aten::__contains__": operator.contains,
    "aten::keys": lambda d: list(d), "aten::values": lambda d: list(d.values()), "aten::sum": sum,
    "prim::max": max, "prim::min": min, "aten::__is__": operator.is_, "aten::__isnot__": operator.is_not,
}  # fmt: skip
# These do not depend on the items, so items may be known only at run time.
STRUCTURAL = frozenset(MUTATING) - {"aten::sort"} | {
    "aten::slice", "aten::add", "aten::mul", "aten::len", "aten::__getitem__", "aten::list", "aten::copy",
    "aten::keys", "aten::values", "aten::__is__", "aten::__isnot__",
}  # fmt: skip


def spell_abs(graph: Any) -> None:
    """Replace Python's `abs` of a tensor by `aten::abs`, which TorchScript itself does not do."""
    for node in list(every_node(graph)):
        if node.kind() == "prim::abs" and isinstance(node.input().type(), torch._C.TensorType):
            with graph.insert_point_guard(node):
                made = graph.insertNode(graph.create("aten::abs", [node.input()], 1))
            made.output().setType(node.output().type())
            made.copyMetadata(node)
            node.output().replaceAllUsesWith(made.output())
            node.destroy()
