"""Splits operators over lists of tensors, so that each tensor's call can join the kernel of its other operations."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fuser.passes.calls import put_for

aten = torch.ops.aten
_UNARY = "abs neg sqrt rsqrt reciprocal exp log sign ceil floor round trunc sigmoid tanh erf expm1 log1p"
# For each operator, named without "_foreach_": the operator on one tensor.
_SINGLE: dict[str, Any] = {
    **{name: getattr(aten, name).default for name in _UNARY.split()},
    **{name: getattr(aten, name).Tensor for name in ("add", "sub", "mul", "div")},
    "maximum": aten.maximum.default, "minimum": aten.minimum.default, "copy": aten.copy.default,
    "addcmul": aten.addcmul.default, "addcdiv": aten.addcdiv.default,
}  # fmt: skip
# By overload where the operator on one tensor depends on whether the list holds tensors or numbers.
_BY_OVERLOAD: dict[tuple[str, str], Any] = {
    ("lerp", "List"): aten.lerp.Tensor, ("lerp", "Scalar"): aten.lerp.Scalar, ("lerp", "ScalarList"): aten.lerp.Scalar,
    ("pow", "List"): aten.pow.Tensor_Tensor, ("pow", "Scalar"): aten.pow.Tensor_Scalar,
    ("pow", "ScalarList"): aten.pow.Tensor_Scalar, ("pow", "ScalarAndTensor"): aten.pow.Scalar,
    ("maximum", "Scalar"): aten.clamp_min.default, ("maximum", "ScalarList"): aten.clamp_min.default,
    ("minimum", "Scalar"): aten.clamp_max.default, ("minimum", "ScalarList"): aten.clamp_max.default,
}  # fmt: skip
_WITH_VALUE = ("addcmul", "addcdiv")  # the number, or the list of numbers, is the keyword `value`


def split_foreach(module: fx.GraphModule) -> int:
    """`_foreach_` operators become one call for each tensor of the list."""
    changed = 0
    for node in list(module.graph.nodes):
        if not isinstance(node.target, torch._ops.OpOverload) or "_foreach_" not in str(node.target):
            continue
        name = node.target._schema.name.removeprefix("aten::_foreach_")
        overload = node.target._overloadname
        single = _BY_OVERLOAD.get((name, overload), _SINGLE.get(name))
        if single is not None and all(u.target is operator.getitem for u in node.users):
            changed += _split(node, single, name, overload)
    return changed


def _split(node: fx.Node, single: Any, name: str, overload: str) -> int:
    values = node.meta.get("val")
    lists = [a for a in (*node.args, *node.kwargs.values()) if isinstance(a, (list, tuple))]
    if not isinstance(values, (list, tuple)) or any(len(a) != len(values) for a in lists):
        return 0
    args = list(node.args)
    kwargs = dict(node.kwargs)
    if name in _WITH_VALUE and len(args) > 3:
        kwargs["value"] = args.pop()
    if name in _WITH_VALUE and isinstance(kwargs.get("value", kwargs.get("scalars")), fx.Node):
        return 0  # numbers are in a tensor
    if "scalars" in kwargs:
        kwargs["value" if name in _WITH_VALUE else "other"] = kwargs.pop("scalars")
    for user in list(node.users):
        i = user.args[1]
        put_for(user, single, tuple(_at(a, i) for a in args), {k: _at(v, i) for k, v in kwargs.items()})
    node.graph.erase_node(node)
    return 1


def _at(argument: Any, i: Any) -> Any:
    return argument[i] if isinstance(argument, (list, tuple)) else argument
