"""Whether results are as right as eager's: no further from float64 than twice eager's distance plus 2 ulp."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

ULPS = 2
_NARROW = {torch.float32, torch.float16, torch.bfloat16}
_CASTS = {torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16}


class InFloat64(TorchFunctionMode):
    """Computes in float64 whatever a program names: every narrower floating dtype that it asks for is widened."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _CASTS:
            return args[0].double()
        wide = lambda v: torch.float64 if isinstance(v, torch.dtype) and v in _NARROW else v  # noqa: E731
        args, kwargs = pytree.tree_map(wide, (tuple(args), kwargs or {}))
        result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor) and result.dtype in _NARROW:  # made of Python numbers
            return result.double()
        return result


def widened(function: Callable[..., Any], inputs: Sequence[Any]) -> Any:
    """What `function` gives in float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with InFloat64():
            return function(*(x.double() if _is_float(x) else x for x in inputs))
    finally:
        torch.set_default_dtype(before)


def _is_float(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def problem(name: str, got: Any, want: Any, exact: Any, strides: bool = True, ulps: int = ULPS) -> str | None:
    """None, or how the result `got` is worse than eager's `want`; `exact` is the same in float64."""
    if not isinstance(want, torch.Tensor):
        same = type(got) is type(want) and (got == want or got != got and want != want)
        return None if same else f"{name}: {got!r} instead of {want!r}"
    if not isinstance(got, torch.Tensor) or got.dtype is not want.dtype or got.shape != want.shape:
        form = f"{got.dtype}{tuple(got.shape)}" if isinstance(got, torch.Tensor) else repr(got)
        return f"{name}: {form} instead of {want.dtype}{tuple(want.shape)}"
    if strides and want.numel() and any(a != b and n > 1 for a, b, n in zip(got.stride(), want.stride(), want.shape)):
        return f"{name}: strides {got.stride()} instead of {want.stride()}"
    if exact is not None and exact.shape != want.shape:
        exact = None  # its size depends on values
    wrong = _wrong(got.detach(), want.detach(), None if exact is None else exact.detach(), ulps)
    if not wrong.any():
        return None
    at = int(wrong.flatten().nonzero()[0])
    x, y = got.flatten()[at].item(), want.flatten()[at].item()
    true = "" if exact is None else f", in float64 {exact.flatten()[at].item()!r}"
    return f"{name}: {int(wrong.sum())} of {wrong.numel()} elements, at {at} {x!r} instead of {y!r}{true}"


def _wrong(got: torch.Tensor, want: torch.Tensor, exact: torch.Tensor | None, ulps: int) -> torch.Tensor:
    """The elements that are neither eager's nor as near to the exact ones as eager's are."""
    if not want.is_floating_point():
        different = got != want
        return different if exact is None else different & (got != exact.to(want.dtype))
    x, y = got.double(), want.double()
    same = (x == y) | x.isnan() & y.isnan()
    if exact is None:
        return ~(same | ((x - y).abs() <= ulps * _ulp(y, want.dtype)))
    e = exact.double()
    finite = y.isfinite() & e.isfinite()
    distance = (y - e).abs()[finite]
    scale = e.abs()[finite].max() if finite.any() else e.new_zeros(())
    limit = ulps * _ulp(scale, want.dtype) + 2 * (distance.max() if finite.any() else 0)
    near = finite & ((x - e).abs() <= limit)
    near |= ~finite & (x == e.to(want.dtype).double())  # eager overflows where the exact result does not, or both do
    return ~(same | near | ((x - y).abs() <= ulps * _ulp(y, want.dtype)))


def _ulp(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    info = torch.finfo(dtype)
    return (value.abs() * info.eps).clamp(min=info.smallest_normal * info.eps)
