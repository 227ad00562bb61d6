"""Weights in the layout of oneDNN's products: packed at the first call, kept, and packed again after a change.

A call detects that a weight is another tensor, or that its version counter or its memory differs. It cannot detect
writes that change neither: `p.data.copy_(...)`, `p.data.add_(...)`, writes through NumPy or DLPack. So packing is done
only if the user promises that weights do not change (`options={"freeze": True}`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from fuser.reasons import served_by

Function = Callable[..., Any]


class Kept:
    """The result of `make` for a weight, kept while the weight is unchanged."""

    def __init__(self, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._make = make
        # (weight, version, address, result): replaced as a whole, so threads need no lock
        self._state: tuple[Callable[[], Any], int, int, torch.Tensor] | None = None

    def of(self, weight: torch.Tensor) -> torch.Tensor:
        """The packed weight. Tensors made in inference mode have no version counter, and are packed at each call."""
        if weight.is_inference():
            return self._make(weight)
        state = self._state
        version, address = weight._version, weight.data_ptr()
        if state is not None and state[0]() is weight and state[1] == version and state[2] == address:
            return state[3]
        with torch.no_grad():
            made = self._make(weight)
        self._state = weakref.ref(weight), version, address, made
        return made


def packed_call(op: Function, make: Callable[[torch.Tensor], torch.Tensor], name: str) -> Function:
    """`op` of (x, weight, ...) for one weight, which `make` packs once."""
    kept = Kept(make)

    def call(x: torch.Tensor, weight: torch.Tensor, *args: Any) -> Any:
        return op(x, kept.of(weight), *args)

    call.__name__ = call.__qualname__ = name
    return served_by(call, "library", "a library's kernel does this better, with a packed weight")


class Folded:
    """The result of `make` for several tensors, kept while all are unchanged."""

    def __init__(self, make: Callable[..., torch.Tensor]) -> None:
        self._make = make
        self._state: tuple[tuple[Any, ...], torch.Tensor] | None = None  # replaced as a whole, so threads need no lock

    def of(self, *tensors: torch.Tensor) -> torch.Tensor:
        """The result. For tensors made in inference mode, without version counter, it is computed at each call."""
        if any(t.is_inference() for t in tensors):
            return self._make(*tensors)
        state = self._state
        seen = tuple((t._version, t.data_ptr()) for t in tensors)
        if state is not None and state[0][1] == seen and all(r() is t for r, t in zip(state[0][0], tensors)):
            return state[1]
        with torch.no_grad():
            made = self._make(*tensors)
        self._state = (tuple(map(weakref.ref, tensors)), seen), made
        return made


def folded_call(make: Callable[..., torch.Tensor], name: str) -> Function:
    """A function of tensors that keeps the result of `make`."""
    kept = Folded(make)

    def call(*tensors: torch.Tensor) -> torch.Tensor:
        return kept.of(*tensors)

    call.__name__ = call.__qualname__ = name
    return served_by(call, "library", "it depends on frozen weights alone, and is computed once")


def followed_call(
    op: Function, pack: Callable[[torch.Tensor], torch.Tensor], settings: tuple[Any, ...],
    make: Callable[..., torch.Tensor], others: int, name: str,
) -> Function:  # fmt: skip
    """`op` of (x, packed weight, *settings, made, *others) for calls with (x, weight, *others, *tensors).

    The weight is packed by `pack`, and `made` is what `make` makes of the tensors, None of none; both are kept.
    """
    kept, folded = Kept(pack), Folded(make)

    def call(x: torch.Tensor, weight: torch.Tensor, *rest: torch.Tensor) -> Any:
        made = folded.of(*rest[others:]) if len(rest) > others else None
        return op(x, kept.of(weight), *settings, made, *rest[:others])

    call.__name__ = call.__qualname__ = name
    return served_by(call, "library", "the package's convolution by a packed weight does this, with what follows")


__all__ = ["Folded", "Kept", "folded_call", "followed_call", "packed_call"]
