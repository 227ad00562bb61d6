"""Functions of this package that an outer program calls, by their names in files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fuser.canonical.portable import name_of
from fuser.runtime import products

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "fuser:product": products.product,
    "fuser:sized_product": products.sized_product,
}


def name_in_file(target: Any) -> str:
    """The name of a call's target in a file. GraphError if it has none."""
    return next((name for name, function in FUNCTIONS.items() if function is target), None) or name_of(target)


__all__ = ["FUNCTIONS", "name_in_file"]
