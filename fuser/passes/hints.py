"""Questions about sizes that may be symbols: none adds a guard, and none fails on a data-dependent size.

Comparing a symbol, or asking torch for `is_contiguous`, would do so. A hint is a number for decisions that cannot make
a result wrong; the other functions answer "no" if they are not certain.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from fuser.kernel_spec import memory_order
from fuser.passes.classify import tensors_of

_UNKNOWN = 8192  # the guess for a size without an example


def size_hint(size: Any) -> int:
    """The value of a size during tracing; 8,192 for a symbol of unknown value."""
    if isinstance(size, int):
        return size
    hint = getattr(getattr(size, "node", None), "hint", None)
    return int(hint) if isinstance(hint, int) else _UNKNOWN


def same(a: Any, b: Any) -> bool:
    """Whether two sizes, or two lists of sizes, are spelled the same."""
    if isinstance(a, Iterable) and isinstance(b, Iterable):
        return list(map(str, a)) == list(map(str, b))
    return str(a) == str(b)


def are_numbers(*sizes: Any) -> bool:
    """Whether none of the sizes is a symbol."""
    return all(type(n) is int for n in sizes)


def depends_on_data(t: torch.Tensor) -> bool:
    """Whether a tensor has data-dependent sizes."""
    if are_numbers(*t.shape):
        return False
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return bool(free_unbacked_symbols(t))


def is_contiguous(t: torch.Tensor) -> bool:
    """Whether a tensor is certainly row-major; False if unknown."""
    if are_numbers(*t.shape, *t.stride()):
        return t.is_contiguous()
    expected: Any = 1
    for size, stride in zip(reversed(t.shape), reversed(t.stride())):
        if type(size) is int and size == 1:
            continue
        if not same(stride, expected):
            return False
        expected = expected * size
    return True


def is_dense(t: torch.Tensor) -> bool:
    """Whether a tensor certainly has neither gaps nor overlaps; False if unknown."""
    if are_numbers(*t.shape, *t.stride()):
        return memory_order(t.shape, t.stride()) is not None
    return is_contiguous(t)


def numel_hint(value: Any) -> int:
    """Number of elements of the largest tensor in a node's recorded value."""
    best = 0
    for t in tensors_of(value):
        n = 1
        for s in t.shape:
            n *= size_hint(s)
        best = max(best, n)
    return best


def bytes_hint(value: Any) -> int:
    """Bytes of all tensors in a node's recorded value."""
    total = 0
    for t in tensors_of(value):
        n = t.dtype.itemsize
        for s in t.shape:
            n *= size_hint(s)
        total += n
    return total
