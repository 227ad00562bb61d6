"""ATen → IR, a file per family of operators."""

from fuser.lowering import pointwise, reductions, views
from fuser.lowering.registry import LOWERINGS, REFUSED, VIEWS, find, lower, refuse, supports

__all__ = [
    "LOWERINGS", "REFUSED", "VIEWS", "find", "lower", "pointwise", "reductions", "refuse", "supports", "views",
]  # fmt: skip
