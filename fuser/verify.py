"""Comparison of a kernel's result with eager's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

# The tolerance of a kernel's result, relative and absolute, if nothing better is known: a few roundings.
TOLERANCE = {
    torch.float64: (1e-10, 1e-12),
    torch.float32: (1e-4, 1e-5),
    torch.float16: (4e-3, 1e-3),
    torch.bfloat16: (3e-2, 1e-2),
}


def difference(got: Any, want: Any, args: Sequence[Any], exact: Callable[[], Any]) -> str | None:
    """None if `got` is as good a result as `want`, else what is wrong with it. `exact()` computes it in float64.

    dtypes, sizes, strides and all values other than floats must be equal. Floats must be close to `want`, or as close
    as it to the exact result.
    """
    mine, theirs = _as_tuple(got), _as_tuple(want)
    if len(mine) != len(theirs):
        return f"{len(mine)} results instead of {len(theirs)}"
    low = _least_precise((*args, *theirs))
    wide: tuple[Any, ...] | None = None
    for n, (a, b) in enumerate(zip(mine, theirs)):
        problem = _form(a, b)
        if problem is None and not _is_near(a, b, low):
            wide = _try(exact) if wide is None else wide
            if len(wide) != len(mine) or not _is_no_worse(a, b, wide[n]):
                problem = _values(a, b)
        if problem is not None:
            return f"result {n} has {problem}"
    return None


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else tuple(value) if isinstance(value, list) else (value,)


def _try(exact: Callable[[], Any]) -> tuple[Any, ...]:
    try:
        return _as_tuple(exact())
    except Exception:  # an operator without float64: only `want` is left for comparison
        return ()


def _least_precise(values: Sequence[Any]) -> torch.dtype | None:
    present = {v.dtype for v in values if isinstance(v, torch.Tensor)}
    return next((d for d in (torch.bfloat16, torch.float16, torch.float32, torch.float64) if d in present), None)


def _form(a: torch.Tensor, b: torch.Tensor) -> str | None:
    if a.dtype is not b.dtype or a.shape != b.shape:
        return f"{a.dtype}{tuple(a.shape)} instead of {b.dtype}{tuple(b.shape)}"
    if b.numel() and any(x != y and n != 1 for x, y, n in zip(a.stride(), b.stride(), b.shape)):
        return f"strides {a.stride()} instead of {b.stride()}"
    return None


def _is_near(a: torch.Tensor, b: torch.Tensor, low: torch.dtype | None) -> bool:
    if not b.is_floating_point():
        return torch.equal(a, b)
    relative, absolute = TOLERANCE[low or b.dtype]
    return torch.allclose(a.double(), b.double(), relative, absolute, equal_nan=True)


def _is_no_worse(a: torch.Tensor, b: torch.Tensor, exact: Any) -> bool:
    """Whether `a` is not much further from the exact result than `b`."""
    if not b.is_floating_point() or not isinstance(exact, torch.Tensor) or exact.shape != b.shape:
        return False
    x, y, e = a.double(), b.double(), exact.double()
    if not torch.equal(x.isfinite(), y.isfinite()):
        return False
    finite = x.isfinite() & y.isfinite() & e.isfinite()
    mine, theirs = (x - e).abs()[finite], (y - e).abs()[finite]
    return not mine.numel() or float(mine.max()) <= 2 * float(theirs.max())


def _values(a: torch.Tensor, b: torch.Tensor) -> str:
    x, y = a.double().flatten(), b.double().flatten()
    wrong = ~((x == y) | (x.isnan() & y.isnan()))
    gap = torch.where(wrong, (x - y).abs().nan_to_num(torch.inf, torch.inf), 0.0)
    at = int(gap.argmax())
    return f"{int(wrong.sum())} of {x.numel()} elements off, at {at} {x[at].item()!r} instead of {y[at].item()!r}"


__all__ = ["difference"]
