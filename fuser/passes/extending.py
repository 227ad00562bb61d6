"""Extends the package from outside: lowerings, decompositions, ops and passes that users register.

Register before the graphs that use them: decisions about earlier graphs stay in force in this process.
"""

from __future__ import annotations

import functools
import keyword
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fuser import extensions, forks
from fuser.errors import ConfigError, Unsupported
from fuser.ir.loop_body import ops
from fuser.ir.nodes import TensorBox
from fuser.lowering import registry
from fuser.lowering.context import LoweringContext
from fuser.lowering.pointwise import elementwise
from fuser.ops import ALL, CPP_TYPES, OPS, OpRow, ReductionRow, cpp_cell
from fuser.passes import decompositions
from fuser.passes.registry import register as register_pass

lock = forks.lock()
_TAKEN = frozenset("load const scalar index indirect pair round_to to_dtype reduced".split())  # kinds of rows


def _operator_name(operator: Any) -> str:
    """The name "mylib.squareplus" of an operator, an overload or a custom op, or that name itself."""
    if isinstance(operator, str):
        name = operator.replace("::", ".")
    else:
        found = getattr(operator, "_opoverload", operator)  # for a `torch.library.custom_op`
        packet = getattr(found, "overloadpacket", found)
        name = getattr(packet, "_qualified_op_name", "").replace("::", ".")
    if name.count(".") not in (1, 2):
        raise ConfigError(f"{operator!r} is no operator: expected torch.ops.mylib.name, a custom op, or 'mylib.name'")
    return name


def register_lowering(
    operator: Any, function: Callable[..., Any], *, view: bool = False, decisive: tuple[int, ...] | None = None
) -> None:
    """Have a function lower an operator. The operator needs a fake implementation in torch, for sizes and dtypes.

    Args:
        operator: an operator, overload or custom op of torch, or its name, such as "mylib.name".
        function: called as `function(ctx, *args, **kwargs)`, with arguments as in the operator's schema. It returns the
            result's `TensorBox`, or a tuple of them, and raises `errors.Unsupported` if it cannot.
        view: whether the result shares its first argument's memory.
        decisive: the positions of arguments whose last bits decide the result, () for all; None if none do.

    Raises:
        ConfigError: the operator has a lowering or is none, `function` cannot be called, or `decisive` is no
            tuple of numbers.
    """
    name = _operator_name(operator)
    if not callable(function):
        raise ConfigError(f"the lowering of {name} is a {type(function).__name__}: expected a function")
    if decisive is not None and not (isinstance(decisive, tuple) and all(type(n) is int for n in decisive)):
        raise ConfigError(f"the lowering of {name} has decisive={decisive!r}: expected arguments' numbers, as in (0,)")
    with lock:
        if registry.find(name) is not None:
            raise ConfigError(f"{name} has a lowering: unregister_lowering takes away one that was registered")
        registry.lower(name, view=view, decisive=decisive)(function)
        extensions.note(name, function, view, decisive)
        decompositions.decomposition_table.cache_clear()


def unregister_lowering(operator: Any) -> None:
    """Remove a lowering that was registered. ConfigError for any other."""
    name = _operator_name(operator)
    with lock:
        if name not in registry.LOWERINGS or not _is_noted(name):
            raise ConfigError(f"{name} has no lowering from outside the package")
        del registry.LOWERINGS[name]
        registry.VIEWS.discard(name)
        registry.DECISIVE.pop(name, None)
        extensions.forget(name)
        decompositions.decomposition_table.cache_clear()


def _is_noted(name: str) -> bool:
    return not extensions.without([name])


def register_decomposition(operator: Any, function: Callable[..., Any]) -> None:
    """Have AOTAutograd replace an overload by the calls that a function makes.

    In training it is decomposed after autograd, so the operator needs a derivative of its own.

    Args:
        operator: an overload, such as `torch.ops.mylib.name.default`, or a custom op.
        function: takes the operator's arguments, and computes the result by other operators of torch.

    Raises:
        ConfigError: `operator` is no overload, or `function` cannot be called.
    """
    found = getattr(operator, "_opoverload", operator)
    if not isinstance(found, torch._ops.OpOverload) or not callable(function):
        raise ConfigError(f"{operator!r}: expected an overload, such as torch.ops.mylib.name.default, and a function")
    with lock:
        decompositions.FROM_OUTSIDE[found] = function
        decompositions.decomposition_table.cache_clear()


def unregister_decomposition(operator: Any) -> None:
    """Remove a decomposition that was registered. ConfigError for any other."""
    with lock:
        if decompositions.FROM_OUTSIDE.pop(getattr(operator, "_opoverload", operator), None) is None:
            raise ConfigError(f"{operator!r} has no decomposition from outside the package")
        decompositions.decomposition_table.cache_clear()


def register_op(row: OpRow, operator: Any = None) -> None:
    """Add a row to the table of loop-level operations, which lowerings then call as `ops.call(name, …)`.

    Args:
        row: a `fuser.ops.OpRow`: what torch computes, the C++ and Triton expressions, traits, and the domain from which
            `check_op` draws.
        operator: an operator of torch, or its name, that is lowered to the op, element by element. None lowers none.

    Raises:
        ConfigError: the name is taken or no identifier, a cell cannot be filled in, or `operator` is none or has a
            lowering. The table is then as before.
        Unsupported: the row has no C++ cell for one of its dtypes.
    """
    if not isinstance(row, OpRow):
        raise ConfigError(f"register_op was given a {type(row).__name__}: expected a fuser.ops.OpRow")
    if not is_identifier(row.name) or row.name in _TAKEN:
        raise ConfigError(f"op {row.name!r}: expected a name that is an identifier, and no kind of row")
    if type(row.arity) is not int:
        raise ConfigError(f"op {row.name!r} has arity={row.arity!r}: expected its number of arguments")
    arguments = [f"a{n}" for n in range(row.arity)]
    places = ", ".join(f"{{{n}}}" for n in range(row.arity))
    add_row("op", OPS, row, lambda dtype: cpp_cell(row.name, dtype, *arguments), places)
    lower_to_row("op", OPS, row.name, operator, lower_to_op(row.name))


def is_identifier(name: Any) -> bool:
    """Whether `name` can be the name of a row."""
    return isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name)


def add_row(
    kind: str, table: dict[str, Any], row: OpRow | ReductionRow, fill: Callable[[torch.dtype], str], places: str
) -> None:
    """Add a row from outside to a table of `fuser.ops`; messages call it `kind`.

    ConfigError if the name is taken, if a dtype is unknown, or if the C++ cell has placeholders other than `places`.
    The table is then unchanged.
    """
    if not callable(row.eval):
        raise ConfigError(f"{kind} {row.name!r} has eval={row.eval!r}: expected a function of tensors")
    if not isinstance(row.dtypes, (tuple, list)):
        raise ConfigError(f"{kind} {row.name!r} has dtypes={row.dtypes!r}: expected a tuple of dtypes")
    with lock:
        if row.name in table:
            raise ConfigError(f"{kind} {row.name!r} is in the table: choose another name, or unregister it first")
        table[row.name] = row
        try:
            for dtype in row.dtypes:
                _fill_in(kind, row.name, dtype, fill, places)
        except BaseException:
            del table[row.name]
            raise
        extensions.note(f"{kind} {row.name}", *(getattr(row, name) for name in row.__dataclass_fields__))


def _fill_in(kind: str, name: str, dtype: torch.dtype, fill: Callable[[torch.dtype], str], places: str) -> None:
    if dtype not in CPP_TYPES or dtype not in ALL:
        raise ConfigError(f"{kind} {name!r} is said to take {dtype}: expected some of {', '.join(map(str, ALL))}")
    try:
        fill(dtype)
    except Unsupported:
        raise
    except Exception as e:  # the cell may be a user's function
        raise ConfigError(
            f"{kind} {name!r}: its C++ cell cannot be filled in ({type(e).__name__}: {e}); places are {places}, "
            "{T}, {U}, {I}, {D} and {f}"
        ) from None


def lower_to_row(
    kind: str, table: dict[str, Any], name: str, operator: Any, lowering: functools.partial[TensorBox]
) -> None:
    """Lower `operator`, unless it is None, to a row that was added. If its registration fails, the row is removed."""
    if operator is None:
        return
    try:
        register_lowering(operator, lowering)
    except ConfigError:
        remove_row(kind, table, name, lowering)
        raise
    extensions.note(_operator_name(operator), f"{kind} {name}")  # names the row, which a partial does not


def remove_row(kind: str, table: dict[str, Any], name: str, lowering: functools.partial[TensorBox]) -> None:
    """Remove a row that was added, and lowerings like `lowering`. ConfigError for a row of the package."""
    with lock:
        if not _is_noted(f"{kind} {name}"):
            raise ConfigError(f"{kind} {name!r} is none from outside the package")
        del table[name]
        extensions.forget(f"{kind} {name}")
    for operator, found in list(registry.LOWERINGS.items()):
        if isinstance(found, functools.partial) and _parts(found) == _parts(lowering):
            unregister_lowering(operator)


def _parts(lowering: functools.partial[TensorBox]) -> tuple[Any, ...]:
    return lowering.func, lowering.args


def lower_to_op(name: str) -> functools.partial[TensorBox]:
    """The lowering of an operator to the op `name`, element by element."""
    return functools.partial(_lower_to_op, name)


def _lower_to_op(name: str, ctx: LoweringContext, *args: Any) -> TensorBox:
    return elementwise(ctx, args, lambda *values: ops.call(name, *values))


def unregister_op(name: str) -> None:
    """Remove an op that was registered, and its lowering. ConfigError for any other."""
    remove_row("op", OPS, name, lower_to_op(name))


def sample_arguments(row: OpRow, dtype: torch.dtype, count: int = 1000) -> Sequence[torch.Tensor]:
    """Arguments for tests of an op: drawn from its domain, special values first."""
    generator = torch.Generator().manual_seed(0)
    low, high = row.domain
    out = []
    for n in range(row.arity):
        kind = torch.bool if row.signature[n : n + 1] == "b" else dtype
        drawn = torch.rand(count, generator=generator, dtype=torch.float64) * (high - low) + low
        if kind.is_floating_point:
            drawn[:5] = torch.tensor([0.0, -0.0, 1.0, float("inf"), float("nan")])
        out.append(drawn > 0 if kind is torch.bool else drawn.to(kind))
    return out


__all__ = [
    "add_row", "is_identifier", "lower_to_op", "lower_to_row", "register_decomposition", "register_lowering",
    "register_op", "register_pass", "remove_row", "sample_arguments", "unregister_decomposition",
    "unregister_lowering", "unregister_op",
]  # fmt: skip
