"""Sizes as plain numbers, for decisions that may be wrong but must not add a guard."""

from __future__ import annotations

from typing import Any

from fuser.passes.classify import tensors_of

_UNKNOWN = 8192


def size_hint(size: Any) -> int:
    """The number behind a size seen while tracing; 8,192 for a symbol of unknown value."""
    if isinstance(size, int):
        return size
    hint = getattr(getattr(size, "node", None), "hint", None)
    return int(hint) if isinstance(hint, int) else _UNKNOWN


def numel_hint(value: Any) -> int:
    """Elements of the largest tensor in a node's recorded value."""
    best = 0
    for t in tensors_of(value):
        n = 1
        for s in t.shape:
            n *= size_hint(s)
        best = max(best, n)
    return best
