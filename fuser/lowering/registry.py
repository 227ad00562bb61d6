"""The tables of lowerings, complete: this module imports all families."""

from __future__ import annotations

from fuser.lowering import (  # noqa: F401
    activations,
    creation,
    depthwise,
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
from fuser.lowering.entries import (
    DECISIVE,
    EVERY,
    LOWERINGS,
    ORDERED,
    REFUSED,
    VIEWS,
    ask_elsewhere,
    find,
    lower,
    refuse,
    refuse_in_order,
    supports,
)

__all__ = [
    "DECISIVE", "EVERY", "LOWERINGS", "ORDERED", "REFUSED", "VIEWS", "ask_elsewhere", "find", "lower", "refuse",
    "refuse_in_order", "supports",
]  # fmt: skip
