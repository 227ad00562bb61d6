"""Run a function eagerly and as one fusion group, and compare everything that a user can see of the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx

import fuser
from fuser import interface
from fuser.kernel_cache import KernelSpec


def fuse(
    fn: Callable[..., Any], functional: bool = False, examples: Sequence[Any] | None = None
) -> tuple[Callable[..., Any], KernelSpec]:
    """A handle of `fn` and its specification; traced down to ATen operators if there are `examples`."""
    if examples is None:
        graph = torch.fx.symbolic_trace(fn)
    else:
        from torch.fx.experimental.proxy_tensor import make_fx

        graph = make_fx(fn)(*examples)
    key = fuser.register_fusion(graph, functional=functional)
    return fuser.fusion_handle(key), interface.kernel_spec(key)


def handle_of(fn: Callable[..., Any], functional: bool = False) -> Callable[..., Any]:
    """What runs `fn` fused."""
    return fuse(fn, functional)[0]


def flat(value: Any) -> list[Any]:
    return [v for item in value for v in flat(item)] if isinstance(value, (tuple, list)) else [value]


def layouts(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The values of `x` (two dims or more, sizes above 1) in memory of several layouts."""
    wide = torch.empty([n + 3 for n in x.shape], dtype=x.dtype)
    sliced = wide[tuple(slice(1, n + 1) for n in x.shape)].copy_(x)
    return {"contiguous": x, "transposed": x.transpose(0, -1).contiguous().transpose(0, -1), "sliced": sliced}


def no_fallback(spec: KernelSpec) -> None:
    assert not spec.blocked, spec.blocked
    reasons = [e.reason for e in spec.store.entries if e.reason] + list(spec.store.fallbacks)
    assert not reasons, reasons


def compare(got: Any, want: Any, inputs: Sequence[Any] = (), tol: dict[str, float] | None = None) -> None:
    """Values, dtypes, sizes, strides; and which results share memory with which inputs and with each other."""
    a, b = flat(got), flat(want)
    assert len(a) == len(b)
    for x, y in zip(a, b):
        assert x.dtype is y.dtype and x.shape == y.shape, (x.dtype, x.shape, y.dtype, y.shape)
        assert _strides(x) == _strides(y), (x.stride(), y.stride())
        torch.testing.assert_close(x, y, equal_nan=True, **(tol or {"rtol": 0, "atol": 0}))


def _strides(x: torch.Tensor) -> list[int]:
    """Those that mean something."""
    return [s for s, n in zip(x.stride(), x.shape) if n != 1] if x.numel() else []


def check(
    fn: Callable[..., Any], *args: Any, tol: dict[str, float] | None = None, kernels: int | None = None,
    functional: bool = False, aten: bool = False,
) -> KernelSpec:  # fmt: skip
    """`fn(*args)` must be what eager gives, and a kernel must have made it."""
    handle, spec = fuse(fn, functional, args if aten else None)
    want = fn(*args)
    compare(handle(*args), want, args, tol)
    no_fallback(spec)
    if kernels is not None:
        assert sum(len(k.program.steps) for k in spec.store.kernels) == kernels
    return spec


def check_falls_back(fn: Callable[..., Any], *args: Any, reason: str) -> None:
    """`fn(*args)` must be left to ATen, for `reason`."""
    handle, spec = fuse(fn)
    compare(handle(*args), fn(*args), args)
    assert reason in " ".join([*spec.blocked, *spec.store.fallbacks]), (spec.blocked, spec.store.fallbacks)


def check_each(fn: Callable[..., Any], cases: Sequence[Sequence[Any]], **settings: Any) -> KernelSpec:
    """`fn` of every case, all in one group, so that one compilation tests many."""
    width = len(cases[0])
    names = [[f"x{i}_{k}" for k in range(width)] for i in range(len(cases))]
    calls = "".join(f"fn({', '.join(row)}), " for row in names)
    parameters = ", ".join(n for row in names for n in row)
    batch = eval(f"lambda {parameters}: tuple(flat(({calls})))", {"fn": fn, "flat": flat})
    return check(batch, *(a for case in cases for a in case), **settings)


def in_layouts(*tensors: torch.Tensor, gaps: bool = True) -> list[list[torch.Tensor]]:
    """Each tensor in each layout (not in memory with gaps, if not `gaps`); a case has the same one for all."""
    every = [[x for name, x in layouts(t).items() if gaps or name != "sliced"] for t in tensors]
    return [list(same) for same in zip(*every)]


def values(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Different numbers, some negative, in any dtype."""
    n = torch.Size(size).numel()
    x = torch.arange(n, dtype=torch.float64).sub_(n // 2).mul_(7).remainder_(101).sub_(50)
    return (x > 0).reshape(size) if dtype is torch.bool else x.to(dtype).reshape(size)
