"""What handles have in common, native or in Python: sizes of calls, what answers misses, how they are pickled."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

Slow = Callable[..., Any]  # of arguments, a status, and of keywords if there are any
ALL_MAGNITUDES = (1 << 64) - 1  # a set of magnitudes, one bit for each


def magnitude_of(args: Sequence[Any]) -> int:
    """The binary digits of the number of elements of the largest tensor; 0 where there is none."""
    return max((a.numel().bit_length() for a in args if isinstance(a, torch.Tensor)), default=0)


def reduced(handle: Any) -> tuple[Any, ...]:
    """A handle as pickle writes it: what its executor says of its graph. PicklingError if it says nothing."""
    reduce = getattr(getattr(handle.slow, "__self__", None), "reduce", None)
    if reduce is None:
        raise pickle.PicklingError(f"{handle!r} is not the handle of a registered graph: register one, and pickle that")
    return cast(tuple[Any, ...], reduce())


__all__ = ["ALL_MAGNITUDES", "Slow", "magnitude_of", "reduced"]
