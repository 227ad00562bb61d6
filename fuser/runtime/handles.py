"""Common parts of native and Python handles: magnitudes of calls, the type of the slow path, pickling."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

Slow = Callable[..., Any]  # takes arguments, a status, and perhaps keywords
ALL_MAGNITUDES = (1 << 64) - 1  # a set of magnitudes has one bit for each


def magnitude_of(args: Sequence[Any]) -> int:
    """The number of binary digits in the element count of the largest tensor; 0 without tensors."""
    return max((a.numel().bit_length() for a in args if isinstance(a, torch.Tensor)), default=0)


def reduced(handle: Any) -> tuple[Any, ...]:
    """A handle's pickled form, which its executor gives. PicklingError if it belongs to no registered graph."""
    reduce = getattr(getattr(handle.slow, "__self__", None), "reduce", None)
    if reduce is None:
        raise pickle.PicklingError(f"{handle!r} is not the handle of a registered graph: register one, and pickle that")
    return cast(tuple[Any, ...], reduce())


__all__ = ["ALL_MAGNITUDES", "Slow", "magnitude_of", "reduced"]
