"""Every op of the table as a function of this module, under its own name. Nodes of `fuser.ir.fx` call them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from fuser.ir.interpreter import broadcast
from fuser.ops import OPS


@functools.cache
def op(name: str) -> Callable[..., torch.Tensor]:
    """The op `name` of the table as a function of tensors that broadcast. AttributeError if there is none."""
    row = OPS.get(name)
    if row is None:
        raise AttributeError(f"there is no op {name!r} in fuser.ops.OPS")

    def call(*args: torch.Tensor) -> torch.Tensor:
        return row.eval(*broadcast(*args))

    call.__name__ = call.__qualname__ = name
    call.__module__ = __name__
    return call


def __getattr__(name: str) -> Callable[..., torch.Tensor]:
    return op(name)
