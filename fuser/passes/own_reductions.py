"""Reductions that users register: a row of the table, and the lowering of an operator to it."""

from __future__ import annotations

import functools
import keyword
from typing import Any

from fuser import extensions
from fuser.errors import ConfigError, Unsupported
from fuser.ir.nodes import TensorBox
from fuser.lowering import registry
from fuser.lowering.context import LoweringContext
from fuser.lowering.reductions import Dims, reduce_to_result
from fuser.ops import ALL, CPP_TYPES, REDUCTIONS, ReductionRow, cpp_combine
from fuser.passes.extending import lock, register_lowering, unregister_lowering


def register_reduction(row: ReductionRow, operator: Any = None) -> None:
    """Add a row to the table of reductions, which lowerings then name as the kind of `reduce_to_result`.

    `row` is a `fuser.ops.ReductionRow`: what torch computes, the identity, and how two accumulators become one, in C++
    and Triton. With `operator`, an operator of torch with the arguments `(x, dim, keepdim=False)`, or the first of
    them, is lowered to the reduction; `dim` is an int, a list of ints, or None for all. ConfigError if the name is
    taken, if a cell cannot be filled in, or for a row of positions (`index`).
    """
    if not isinstance(row, ReductionRow):
        raise ConfigError(f"register_reduction was given a {type(row).__name__}: expected a fuser.ops.ReductionRow")
    if not row.name.isidentifier() or keyword.iskeyword(row.name):
        raise ConfigError(f"reduction {row.name!r}: expected a name that is an identifier")
    if row.index or row.contracts:
        raise ConfigError(f"reduction {row.name!r}: positions and contractions cannot be registered from outside")
    with lock:
        if row.name in REDUCTIONS:
            raise ConfigError(f"reduction {row.name!r} is in the table: choose another name, or unregister it first")
        REDUCTIONS[row.name] = row
        try:
            _fill_in(row)
        except (ConfigError, Unsupported):
            del REDUCTIONS[row.name]
            raise
        extensions.note(f"reduction {row.name}", *(getattr(row, name) for name in row.__dataclass_fields__))
    if operator is not None:
        register_lowering(operator, lower_to_reduction(row.name))


def _fill_in(row: ReductionRow) -> None:
    """ConfigError if the C++ cell has places for other arguments, or a dtype is none of the table's."""
    for dtype in row.dtypes:
        if dtype not in CPP_TYPES or dtype not in ALL:
            wanted = ", ".join(map(str, ALL))
            raise ConfigError(f"reduction {row.name!r} is said to take {dtype}: expected some of {wanted}")
        try:
            cpp_combine(row.name, row.accumulate(dtype), "a0", "a1")
        except (KeyError, IndexError, ValueError) as e:
            raise ConfigError(
                f"reduction {row.name!r}: its C++ cell cannot be filled in ({type(e).__name__}: {e}); "
                "places are {0}, {1}, {T}, {U}, {I}, {D} and {f}"
            ) from None


def lower_to_reduction(name: str) -> Any:
    """The lowering of an operator `(x, dim, keepdim)` to the reduction `name`."""
    return functools.partial(_lower, name)


def _lower(name: str, ctx: LoweringContext, x: TensorBox, dim: Dims = None, keepdim: bool = False) -> TensorBox:
    return reduce_to_result(ctx, name, x, dim, keepdim)


def unregister_reduction(name: str) -> None:
    """Take away a reduction that was registered, and the lowering that came with it. ConfigError for any other."""
    with lock:
        if extensions.without([f"reduction {name}"]):
            raise ConfigError(f"reduction {name!r} is none from outside the package")
        del REDUCTIONS[name]
        extensions.forget(f"reduction {name}")
    for operator, fn in list(registry.LOWERINGS.items()):
        if isinstance(fn, functools.partial) and fn.func is _lower and fn.args == (name,):
            unregister_lowering(operator)


__all__ = ["lower_to_reduction", "register_reduction", "unregister_reduction"]
