"""ATen → IR, a file per family of operators."""

from fuser.lowering import (
    activations,
    creation,
    gradients,
    indexing,
    joining,
    losses,
    norms,
    pointwise,
    pooling,
    pooling_gradients,
    products,
    random,
    reductions,
    resampling,
    scans,
    scatter,
    searching,
    selection,
    vectors,
    views,
    writes,
)
from fuser.lowering.registry import LOWERINGS, REFUSED, VIEWS, find, lower, refuse, supports

__all__ = [
    "LOWERINGS", "REFUSED", "VIEWS", "activations", "creation", "find", "gradients", "indexing", "joining", "losses",
    "lower", "norms", "pointwise", "pooling", "pooling_gradients", "products", "random", "reductions", "refuse",
    "resampling", "scans", "scatter", "searching", "selection", "supports", "vectors", "views",
    "writes",
]  # fmt: skip
