"""What a graph computes in Python beside its tensors: sizes, numbers made from them, dtypes and devices.

Integers stay expressions over sizes. Comparisons are decided by the example, and guarded. Floats made from sizes
(`x.shape[-1] ** -0.5`) become `Number`s, whose rows are computed in each kernel that uses them. Other computations are
evaluated for the sizes of the example, which become constants of the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fuser.canonical import HOST_OPS
from fuser.errors import Unsupported
from fuser.ir.loop_body import Value, ops
from fuser.ir.nodes import TensorBox, strides_of
from fuser.ir.sizes import Expr, call, expr, floordiv, mod, product
from fuser.lowering.context import LoweringContext, Number, Scalar
from fuser.reasons import because

# -- facts of tensors: (of the box, of the meta tensor) ----------------------------------------------------------------
Fact = Callable[..., Any]


def _size(ctx: LoweringContext, x: TensorBox, dim: int | None = None) -> Any:
    size = ctx.size_of(x)
    return size if dim is None else size[dim]


def _meta_size(x: torch.Tensor, dim: int | None = None) -> Any:
    return tuple(x.shape) if dim is None else x.shape[dim]


def _stride(ctx: LoweringContext, x: TensorBox, dim: int | None = None) -> Any:
    meta: torch.Tensor = ctx.arg_metas[0]
    if x.storage.buffer.input_number >= 0 and x.view is None:
        stride = x.storage.buffer.stride
    elif meta.is_contiguous():
        stride = strides_of(ctx.size_of(x))
    else:
        raise Unsupported("strides of a tensor that is neither an input nor contiguous")
    return stride if dim is None else stride[dim]


def _meta_stride(x: torch.Tensor, dim: int | None = None) -> Any:
    return tuple(x.stride()) if dim is None else x.stride(dim)


_FACTS: dict[str, tuple[Fact, Fact]] = {
    "aten.sym_size": (_size, _meta_size),
    "aten.size": (_size, _meta_size),
    "aten.sym_stride": (_stride, _meta_stride),
    "aten.stride": (_stride, _meta_stride),
    "aten.sym_numel": (lambda ctx, x: ctx.numel(x), torch.Tensor.numel),
    "aten.numel": (lambda ctx, x: ctx.numel(x), torch.Tensor.numel),
    "aten.dim": (lambda ctx, x: len(x.size), torch.Tensor.dim),
    "aten.is_floating_point": (lambda ctx, x: x.dtype.is_floating_point, torch.is_floating_point),
    "aten.is_complex": (lambda ctx, x: False, torch.is_complex),
    "prim.dtype": (lambda ctx, x: x.dtype, lambda x: x.dtype),
    "prim.device": (lambda ctx, x: torch.device(ctx.target.device_type), lambda x: torch.device("meta")),
}

# -- integers ----------------------------------------------------------------------------------------------------------
_ALIKE: dict[str, Callable[..., Expr]] = {
    "host.add": lambda a, b: a + b, "host.sub": lambda a, b: a - b, "host.mul": lambda a, b: a * b,
    "host.neg": lambda a: -a, "host.pos": lambda a: a, "host.int": lambda a: a,
    "host.min": lambda a, b: call("min", a, b), "host.max": lambda a, b: call("max", a, b),
    "host.floor": lambda a: a, "host.ceil": lambda a: a, "host.trunc": lambda a: a, "host.round": lambda a: a,
}  # fmt: skip
_MOST_POWER = 8  # of a size, written as a product


def _divided(ctx: LoweringContext, op: str, a: Expr, b: Expr) -> Expr:
    ctx.assume("ne", b, 0)  # Python raises
    return floordiv(a, b) if op == "host.floordiv" else mod(a, b)


def _compared(ctx: LoweringContext, op: str, a: Expr, b: Expr) -> bool:
    """The result of the comparison in the example; a fact or a guard ensures it in every call."""
    if op in ("host.gt", "host.ge"):
        a, b, op = b, a, "host.lt" if op == "host.gt" else "host.le"
    if op in ("host.eq", "host.ne"):
        equal = ctx.is_equal(a, b)
        if not equal:
            ctx.assume("ne", a, b)
        return equal == (op == "host.eq")
    relation, opposite = ("lt", "le") if op == "host.lt" else ("le", "lt")
    holds = ctx.hint(a) < ctx.hint(b) if relation == "lt" else ctx.hint(a) <= ctx.hint(b)
    ctx.assume(relation, a, b) if holds else ctx.assume(opposite, b, a)
    return holds


_COMPARISONS = frozenset(f"host.{n}" for n in ("eq", "ne", "lt", "le", "gt", "ge"))


def _integer(ctx: LoweringContext, op: str, args: Sequence[Expr]) -> Any:
    """The result of an operation on integers; None if it has no symbolic form."""
    if op in _ALIKE:
        return _ALIKE[op](*args)
    if op in ("host.floordiv", "host.mod"):
        return _divided(ctx, op, *args)
    if op in _COMPARISONS:
        return _compared(ctx, op, *args)
    if op == "host.bool":
        return _compared(ctx, "host.ne", args[0], expr(0))
    if op == "host.abs":
        return args[0] if not _compared(ctx, "host.lt", args[0], expr(0)) else -args[0]
    if op == "host.pow":
        power = args[1].as_int()
        return product([args[0]] * power) if power is not None and 0 <= power <= _MOST_POWER else None
    return None


# -- floats ------------------------------------------------------------------------------------------------------------
# host function: op of the table.
_FLOAT_OPS = {
    "add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "pow": "pow", "neg": "neg", "abs": "abs",
    "sqrt": "sqrt", "log": "log", "log2": "log2", "log10": "log10", "sin": "sin", "cos": "cos",
    "tan": "tan", "tanh": "tanh",
}  # fmt: skip
# The arguments that must be positive, since Python may raise otherwise.
_RISKY = {"truediv": slice(1, 2), **dict.fromkeys("pow sqrt log log2 log10".split(), slice(0, 1))}
_KEEP_POSITIVE = frozenset("add mul truediv pow abs sqrt".split())


def _as_value(ctx: LoweringContext, x: Any) -> Value:
    if isinstance(x, Number):
        return x.build()
    if isinstance(x, Scalar):
        return ops.scalar(x.name, torch.float64)
    if isinstance(x, Expr):
        return ops.index_expr(ctx.canon(x), torch.float64)
    return ops.constant(float(x), torch.float64)


def _is_positive(ctx: LoweringContext, x: Any) -> bool:
    """Whether `x > 0` in every call. For a size that is positive in the example, this becomes a guard."""
    if isinstance(x, Expr):
        if ctx.hint(x) > 0:
            ctx.assume("lt", 0, x)
        return ctx.hint(x) > 0
    if isinstance(x, Number):
        return x.positive
    return not isinstance(x, Scalar) and float(x) > 0


def _float(ctx: LoweringContext, op: str, args: Sequence[Any]) -> Number | None:
    """The float result of an operation; None if it may raise or has no symbolic form."""
    name = op.removeprefix("host.")
    if name == "float":
        (x,) = args
        return Number(lambda: _as_value(ctx, x), _sizes_of(args), _has_inputs(args), _is_positive(ctx, x))
    table = _FLOAT_OPS.get(name)
    risky = _RISKY.get(name, slice(0))
    safe = all([_is_positive(ctx, a) for a in args[risky]]) and (name != "pow" or _is_small(args[1]))  # noqa: C419
    if table is None or not safe:
        return None
    positive = name in _KEEP_POSITIVE and all(_is_positive(ctx, a) for a in (args[:1] if name == "pow" else args))

    def build() -> Value:
        return ops.call(table, *(_as_value(ctx, a) for a in args))

    return Number(build, _sizes_of(args), _has_inputs(args), positive)


def _is_small(power: Any) -> bool:
    return isinstance(power, (int, float)) and abs(power) <= 4


def _sizes_of(args: Sequence[Any]) -> tuple[Expr, ...]:
    out: list[Expr] = []
    for a in args:
        out += [a] if isinstance(a, Expr) else a.sizes if isinstance(a, Number) else []
    return tuple(dict.fromkeys(out))


def _has_inputs(args: Sequence[Any]) -> bool:
    return any(isinstance(a, Scalar) or (isinstance(a, Number) and a.has_inputs) for a in args)


# -- any host node -----------------------------------------------------------------------------------------------------
def is_host(op: str) -> bool:
    """Whether a node is computed here rather than by a lowering."""
    return op in HOST_OPS or op in _FACTS


def evaluate(ctx: LoweringContext, op: str, args: Sequence[Any], metas: Sequence[Any]) -> tuple[Any, Any]:
    """The value of a host node, symbolic if possible, and its value in the example."""
    ctx.arg_metas = tuple(metas)
    if op in _FACTS:
        of_box, of_meta = _FACTS[op]
        if not isinstance(args[0], TensorBox):
            raise Unsupported(because("no_tensor", f"{op} of something that is no tensor"))
        return of_box(ctx, *args), of_meta(*metas)
    try:
        meta = HOST_OPS[op](*metas)
    except (ArithmeticError, ValueError, TypeError, IndexError) as e:
        raise Unsupported(because("eager_raises", f"eager raises {type(e).__name__}: {e}"), op) from None
    if op.startswith("sizes."):
        return HOST_OPS[op](args[0], *(_constant(ctx, a) for a in args[1:]) if op != "sizes.cat" else args[1:]), meta
    if op == "host.ite":
        return (args[1] if _constant(ctx, args[0]) else args[2]), meta
    return _arithmetic(ctx, op, args, meta), meta


def _arithmetic(ctx: LoweringContext, op: str, args: Sequence[Any], meta: Any) -> Any:
    args = [a.as_int() if isinstance(a, Expr) and a.as_int() is not None else a for a in args]
    if not any(isinstance(a, (Expr, Number, Scalar)) for a in args):
        return meta
    value = None
    if all(isinstance(a, (Expr, int)) for a in args):
        value = _integer(ctx, op, [expr(a) for a in args])
    if value is None and isinstance(meta, float):
        value = _float(ctx, op, args)
    if value is not None:
        return value
    for a in args:
        _constant(ctx, a)
    return meta


def _constant(ctx: LoweringContext, value: Any) -> Any:
    """`value` with its sizes specialised. Unsupported if it depends on a float input."""
    if isinstance(value, slice):
        return slice(*(_constant(ctx, v) for v in (value.start, value.stop, value.step)))
    if isinstance(value, Expr):
        return ctx.specialise(value)
    if _has_inputs([value]):
        raise Unsupported("a size or a choice that depends on a float input")
    if isinstance(value, Number):
        for size in value.sizes:
            ctx.specialise(size)
    return value


__all__ = ["evaluate", "is_host"]
