"""Reductions that users register: a row of the table, and an operator's lowering to it."""

from __future__ import annotations

import functools
from typing import Any

from fuser.errors import ConfigError
from fuser.ir.nodes import TensorBox
from fuser.lowering.context import LoweringContext
from fuser.lowering.reductions import Dims, reduce_to_result
from fuser.ops import REDUCTIONS, ReductionRow, cpp_combine
from fuser.passes.extending import add_row, is_identifier, lower_to_row, remove_row


def register_reduction(row: ReductionRow, operator: Any = None) -> None:
    """Add a row to the table of reductions, which lowerings then name as the kind of `reduce_to_result`.

    Args:
        row: a `fuser.ops.ReductionRow`: what torch computes, the identity, and how two accumulators become one, in C++
            and Triton. Rows of positions (`index`) and contractions cannot be added.
        operator: an operator of torch, or its name, that is lowered to the reduction; None lowers none. Its arguments
            are `(x, dim, keepdim=False)`, or the first of them; `dim` is an int, a list of ints, or None for all.

    Raises:
        ConfigError: the name is taken or no identifier, a cell cannot be filled in, the row is of positions, or
            `operator` is none or has a lowering. The table is then as before.
        Unsupported: the row has no C++ cell for one of its dtypes.
    """
    if not isinstance(row, ReductionRow):
        raise ConfigError(f"register_reduction was given a {type(row).__name__}: expected a fuser.ops.ReductionRow")
    if not is_identifier(row.name):
        raise ConfigError(f"reduction {row.name!r}: expected a name that is an identifier")
    if row.index or row.contracts:
        raise ConfigError(f"reduction {row.name!r}: positions and contractions cannot be registered from outside")
    add_row(
        "reduction", REDUCTIONS, row, lambda dtype: cpp_combine(row.name, row.accumulate(dtype), "a0", "a1"), "{0}, {1}"
    )
    lower_to_row("reduction", REDUCTIONS, row.name, operator, lower_to_reduction(row.name))


def lower_to_reduction(name: str) -> Any:
    """The lowering of an operator `(x, dim, keepdim)` to the reduction `name`."""
    return functools.partial(_lower, name)


def _lower(name: str, ctx: LoweringContext, x: TensorBox, dim: Dims = None, keepdim: bool = False) -> TensorBox:
    return reduce_to_result(ctx, name, x, dim, keepdim=keepdim)


def unregister_reduction(name: str) -> None:
    """Remove a reduction that was registered, and its lowering. ConfigError for any other."""
    remove_row("reduction", REDUCTIONS, name, lower_to_reduction(name))


__all__ = ["lower_to_reduction", "register_reduction", "unregister_reduction"]
