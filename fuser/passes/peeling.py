"""Removes scales, casts and transposes around the operands of attention."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import fx

from fuser.lazy_dataclasses import dataclass
from fuser.passes.calls import Call, call_of, number_of, shape_of, value_of
from fuser.passes.products import Factor, Mismatch

CASTS = frozenset({"float", "to", "type", "type_as", "half", "bfloat16", "contiguous"})
SIXTEEN = frozenset({torch.bfloat16, torch.float16})


def without_scale(call: Call) -> tuple[fx.Node, float]:
    """The operand and the factor of a product with a number, or of a quotient by one."""
    if len(call.args) != 2 or call.kwargs:
        raise Mismatch
    left, right = call.args
    number = number_of(right)
    if number is None and call.name == "mul":
        left, number = right, number_of(left)
    if number is None or number == 0 or not math.isfinite(number) or not isinstance(left, fx.Node):
        raise Mismatch
    return left, number if call.name == "mul" else 1 / number


@dataclass(frozen=True)
class Peeled:
    """A factor without what was peeled off: the number that it is scaled by, and whether it was cast to float32."""

    factor: Factor
    scale: float = 1.0
    wide: bool = False


def peeled(factor: Factor, casts: bool, calm: Callable[[fx.Node], bool]) -> Peeled:
    """A factor without scales, swaps of its last two dims and, if `casts`, casts from 16 bits to float32."""
    best, scale, wide = Peeled(factor), 1.0, False
    while True:
        node, call = factor.node, call_of(factor.node)
        source = _swap_source(node)
        if source is not None:
            factor = factor.of(source, swap=True)
        elif call is not None and call.name in ("mul", "div") and shape_of(node):
            try:
                source, number = without_scale(call)
            except Mismatch:
                return best
            before, after = value_of(source), value_of(node)
            if before is None or after is None or before.dtype != after.dtype or shape_of(source) != shape_of(node):
                return best
            scale *= number
            factor = factor.of(source, swap=False)
        elif casts and call is not None and call.name in CASTS and _widens(call):
            factor, wide = factor.of(call.args[0], swap=False), True
        else:
            return best
        if not calm(factor.node):
            return best
        if scale != best.scale or wide != best.wide or factor.is_plain:
            best = Peeled(factor, scale, wide)


def _swap_source(node: fx.Node) -> fx.Node | None:
    """The source of a view that swaps the last two dims; None for other nodes."""
    rank = len(shape_of(node) or ())
    if node.op == "call_function" and node.target is getattr:
        return node.args[0] if node.args[1] == "mT" else None  # type: ignore[return-value]
    call = call_of(node)
    if call is None or call.name not in ("transpose", "permute") or call.kwargs:
        return None
    dims = call.args[1] if len(call.args) == 2 and isinstance(call.args[1], (tuple, list)) else call.args[1:]
    if not all(isinstance(d, int) for d in dims):
        return None
    dims = [d % rank for d in dims]
    swapped = [*range(rank - 2), rank - 1, rank - 2]
    same = set(dims) == {rank - 1, rank - 2} if call.name == "transpose" else dims == swapped
    return call.args[0] if same else None


def _widens(call: Call) -> bool:
    """Whether a cast converts a 16-bit float to float32 on the same device."""
    before, after = value_of(call.args[0]), value_of(call.node)
    if before is None or after is None or before.device != after.device or before.shape != after.shape:
        return False
    return before.dtype in SIXTEEN and after.dtype is torch.float32


_MOVES = ("transpose", "permute", "reshape", "view", "flatten", "contiguous", "squeeze")


def narrowed(node: fx.Node) -> fx.Node:
    """The only reader, through moves, of a float32 result, if it casts to 16 bits; else the node itself."""
    reader, own = node, value_of(node)
    if own is None or own.dtype is not torch.float32:
        return node
    for _ in range(6):
        if len(reader.users) != 1:
            return node
        reader = next(iter(reader.users))
        call = call_of(reader)
        value = value_of(reader)
        if call is None or value is None or call.args[:1] == ():
            return node
        if call.name in CASTS and value.dtype in SIXTEEN:
            return reader
        if call.name not in _MOVES:
            return node
    return node


def requires_grad(node: fx.Node) -> bool:
    """Whether a node is known to be a tensor that requires a gradient."""
    value = value_of(node)
    return value is not None and value.requires_grad
