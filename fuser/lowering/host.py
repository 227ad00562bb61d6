"""Arithmetic on sizes: what a graph computes from `x.shape` before it asks for a tensor of that size."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from fuser.errors import Unsupported
from fuser.ir.nodes import TensorBox
from fuser.ir.sizes import Expr, call, expr
from fuser.lowering.context import LoweringContext


def _exact(fn: Callable[..., Any]) -> Callable[..., Any]:
    def run(ctx: LoweringContext, *args: Any) -> Any:
        values = [expr(a) if isinstance(a, int) else a for a in args]
        if not all(isinstance(v, Expr) for v in values):
            raise Unsupported("arithmetic on numbers other than sizes")
        return fn(*values)

    return run


def _size(ctx: LoweringContext, x: TensorBox, dim: int | None = None) -> Any:
    size = ctx.size_of(x)
    return size if dim is None else size[dim]


def _numel(ctx: LoweringContext, x: TensorBox) -> Expr:
    return ctx.numel(x)


HOST: dict[str, Callable[..., Any]] = {
    "aten.sym_size": _size,
    "aten.sym_numel": _numel,
    "sizes.item": lambda ctx, sizes, at: sizes[at],
    "sizes.slice": lambda ctx, sizes, at: sizes[at],
    "host.add": _exact(operator.add),
    "host.sub": _exact(operator.sub),
    "host.mul": _exact(operator.mul),
    "host.floordiv": _exact(operator.floordiv),
    "host.mod": _exact(operator.mod),
    "host.neg": _exact(operator.neg),
    "host.min": _exact(lambda a, b: call("min", a, b)),
    "host.max": _exact(lambda a, b: call("max", a, b)),
}
META: dict[str, Callable[..., Any]] = {
    "aten.sym_size": lambda x, d=None: tuple(x.shape) if d is None else x.shape[d],
    "aten.sym_numel": lambda x: x.numel(),
    "sizes.item": operator.getitem,
    "sizes.slice": operator.getitem,
    "host.add": operator.add,
    "host.sub": operator.sub,
    "host.mul": operator.mul,
    "host.floordiv": operator.floordiv,
    "host.mod": operator.mod,
    "host.neg": operator.neg,
    "host.min": min,
    "host.max": max,
}
