"""Images made larger or smaller stay whole while a graph is traced, on the CPU: ATen does one in a single pass.

A table of decompositions does not suffice: torch takes these operators apart in the dispatcher, by functions in Python
that stand for autograd's key. They become look-ups of each element, which take up to five times as long.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fuser import forks

aten = torch.ops.aten
KEYS = (torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd)
NAMES = (
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d",
    "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa",
    "_upsample_lanczos2d_aa",
)  # fmt: skip
_lock = forks.lock()
_inside = 0
_before: dict[Any, dict[Any, Callable[..., Any]]] = {}  # an overload's own functions, while it is kept whole


@contextlib.contextmanager
def kept_whole() -> Iterator[None]:
    """Trace a graph in this block: calls of these operators with tensors on the CPU stay calls of them."""
    global _inside
    with _lock:
        if not _inside:
            _replace()
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                _put_back()


def _replace() -> None:
    for name in filter(functools.partial(hasattr, aten), NAMES):  # some came with later versions of torch
        vec, plain = getattr(aten, name).vec, getattr(aten, name).default
        for overload in (vec, plain):
            _before[overload] = {k: overload.py_kernels.pop(k) for k in KEYS if k in overload.py_kernels}
            overload._dispatch_cache.clear()
        vec.py_kernels.update({key: _Call(vec, plain, own) for key, own in _before[vec].items()})


def _put_back() -> None:
    for overload, kernels in _before.items():
        overload.py_kernels.update(kernels)
        overload._dispatch_cache.clear()
    _before.clear()


class _Call:
    """`vec`, which takes sizes or factors, as a call of the overload that takes both; torch's own for other devices."""

    def __init__(self, vec: Any, plain: Any, own: Callable[..., Any]) -> None:
        self.plain, self.own = plain, own
        self.names = [a.name for a in vec._schema.arguments]  # input, output_size, align_corners if any, scale_factors

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        x, sizes, *rest, factors = (given[name] for name in self.names)
        if x.device.type != "cpu":
            return self.own(x, sizes, *rest, factors)
        if factors is None:
            return self.plain(x, sizes, *rest)
        whole: Any = torch.sym_int
        sizes = [whole(size * factor) for size, factor in zip(x.shape[2:], factors, strict=True)]
        return self.plain(x, sizes, *rest, *factors)


__all__ = ["kept_whole"]
