"""Whether two runs did the same: values, dtypes, sizes, strides, aliasing, and what became of the inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

# Relative to the largest magnitude in play: what one rounding may be off, with room for a few.
_EPS = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 1.3e-6, torch.float64: 1e-7}
_TINY = {torch.float16: 1e-5, torch.bfloat16: 1e-5, torch.float32: 1e-5, torch.float64: 1e-7}


def copy_inputs(values: Sequence[Any]) -> list[Any]:
    """Copies of tensors that overlap and alias each other as the originals do; other values as they are."""
    storages: dict[int, torch.UntypedStorage] = {}
    made: dict[int, torch.Tensor] = {}
    out: list[Any] = []
    for v in values:
        if not _is_plain(v):
            out.append(v.clone() if isinstance(v, torch.Tensor) else v)
            continue
        if id(v) not in made:
            storage = v.untyped_storage()
            own = storages.setdefault(storage._cdata, storage.clone())
            made[id(v)] = torch.empty(0, dtype=v.dtype, device=v.device).set_(
                own, v.storage_offset(), v.shape, v.stride()
            )
            if v.is_conj():
                made[id(v)] = torch._conj(made[id(v)])
            if v.is_neg():
                made[id(v)] = torch._neg_view(made[id(v)])
        out.append(made[id(v)])
    return out


def _is_plain(v: Any) -> bool:
    own = type(v) is torch.Tensor and v.layout is torch.strided and not v.is_quantized
    return own and v.device.type in ("cpu", "cuda")


def alias_pattern(inputs: Sequence[Any], outputs: Sequence[Any], identity: bool = True) -> list[Any]:
    """For each output: the first input or earlier output whose memory it shares, and where; which input it is.

    Where: elements from the start of the input's memory, or from the earlier output. Where a new result begins in its
    own memory is nobody's business: eager's copy of a tensor that starts late in its memory may do so too.
    """
    seen: dict[int, tuple[str, int]] = {}
    for i, v in enumerate(inputs):
        if _is_plain(v) and v.numel():
            seen.setdefault(v.untyped_storage()._cdata, (f"input {i}", 0))
    pattern: list[Any] = []
    for o, v in enumerate(outputs):
        if not _is_plain(v) or not v.numel():
            pattern.append(None)
            continue
        same = next((f"is input {i}" for i, x in enumerate(inputs) if identity and x is v), "")
        known = seen.get(v.untyped_storage()._cdata)
        pattern.append((known[0], v.storage_offset() - known[1], same) if known else None)
        seen.setdefault(v.untyped_storage()._cdata, (f"output {o}", v.storage_offset()))
    return pattern


def leaves(value: Any) -> list[Any]:
    """The tensors and numbers in a result, in order."""
    return pytree.tree_leaves(value)


def differences(
    got: Sequence[Any], want: Sequence[Any], exact: Callable[[], Sequence[Any]] | None = None, *,
    strides: bool = True, low: torch.dtype | None = None,
) -> list[str]:  # fmt: skip
    """What is different, as sentences; empty if nothing.

    Floats may be off by a few roundings of the least precise dtype in play (`low`, if given, else their own). Where
    they are off by more, `exact()` gives the same results computed in float64, and they must be about as near to them
    as `want` is.
    """
    if len(got) != len(want):
        return [f"{len(got)} results instead of {len(want)}"]
    found: list[str] = []
    far: list[int] = []
    for n, (a, b) in enumerate(zip(got, want)):
        problem = _form_difference(a, b, strides)
        if problem:
            found.append(f"result {n}: {problem}")
        elif isinstance(b, torch.Tensor) and not _is_close(a, b, low):
            far.append(n)
    if far:
        reference = _try_exact(exact, len(want))
        for n in far:
            problem = _value_difference(got[n], want[n], reference[n])
            if problem:
                found.append(f"result {n}: {problem}")
    return found


def _form_difference(a: Any, b: Any, strides: bool) -> str:
    if isinstance(b, torch.Tensor) != isinstance(a, torch.Tensor):
        return f"{type(a).__name__} instead of {type(b).__name__}"
    if not isinstance(b, torch.Tensor):
        same = a == b or (a != a and b != b)
        return "" if same and type(a) is type(b) else f"{a!r} instead of {b!r}"
    if a.dtype is not b.dtype:
        return f"{a.dtype} instead of {b.dtype}"
    if a.shape != b.shape:
        return f"size {tuple(a.shape)} instead of {tuple(b.shape)}"
    if a.device != b.device:
        return f"on {a.device} instead of {b.device}"
    if type(a) is not type(b) or a.layout is not b.layout:
        return f"{type(a).__name__} of {a.layout} instead of {type(b).__name__} of {b.layout}"
    if strides and b.layout is torch.strided and b.numel() and not _same_strides(a, b):
        return f"strides {a.stride()} instead of {b.stride()} for size {tuple(b.shape)}"
    return ""


def _same_strides(a: torch.Tensor, b: torch.Tensor) -> bool:
    return all(x == y or n == 1 for x, y, n in zip(a.stride(), b.stride(), b.shape))


def _is_close(a: torch.Tensor, b: torch.Tensor, low: torch.dtype | None) -> bool:
    if not _is_plain(b) or b.is_complex():
        return bool(_same_odd(a, b))
    if not b.is_floating_point():
        return torch.equal(a, b)
    eps, tiny = _EPS.get(low or b.dtype, 0.2), _TINY.get(low or b.dtype, 0.0)
    return torch.allclose(a.double(), b.double(), rtol=eps, atol=tiny, equal_nan=True)


def _same_odd(a: torch.Tensor, b: torch.Tensor) -> bool:
    try:
        torch.testing.assert_close(a, b, equal_nan=True)
    except (AssertionError, RuntimeError, ValueError, NotImplementedError):
        return False
    return True


def _try_exact(exact: Callable[[], Sequence[Any]] | None, n: int) -> list[Any]:
    if exact is None:
        return [None] * n
    try:
        made = list(exact())
    except Exception:
        return [None] * n
    return made if len(made) == n else [None] * n


def _value_difference(a: torch.Tensor, b: torch.Tensor, exact: Any) -> str:
    """Why `a` is worse than `b`, both meant to be `exact`."""
    if not b.is_floating_point() or not isinstance(exact, torch.Tensor) or exact.shape != b.shape:
        return _describe(a, b)
    x, y, e = a.double(), b.double(), exact.double()
    odd = ~(x.isfinite() & y.isfinite() & e.isfinite())
    same_odd = (x == y) | (x.isnan() & y.isnan()) | (x == e) | (x.isnan() & e.isnan())
    overflow = (x == e.to(b.dtype).double()) | (e.abs() > 0.99 * torch.finfo(b.dtype).max) & (x == e * float("inf"))
    if bool((odd & ~same_odd & ~overflow).any()):
        return _describe(a, b)
    mine, theirs = (x - e).abs()[~odd], (y - e).abs()[~odd]
    if not mine.numel():
        return ""
    scale = e.abs()[~odd]
    allowed = torch.maximum(2 * theirs, 4 * _EPS.get(b.dtype, 0.2) * scale)
    allowed = torch.maximum(allowed, theirs.max().expand_as(allowed))
    return "" if bool((mine <= allowed).all()) else _describe(a, b)


def _describe(a: torch.Tensor, b: torch.Tensor) -> str:
    if a.is_complex() or not _is_plain(b):
        return f"values {a} instead of {b}"
    if a.shape != b.shape:
        return f"size {tuple(a.shape)} instead of {tuple(b.shape)}"
    x, y = a.double().flatten(), b.double().flatten()
    wrong = ~((x == y) | (x.isnan() & y.isnan()))
    gap = torch.where(wrong, (x - y).abs().nan_to_num(float("inf"), float("inf")), torch.zeros_like(x))
    at = int(gap.argmax())
    count = int(wrong.sum())
    return f"{count} of {x.numel()} elements differ, most at {at}: {x[at].item()!r} instead of {y[at].item()!r}"


def in_float64(values: Sequence[Any]) -> list[Any]:
    """`values` with floating tensors in float64."""
    return [v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for v in values]


def lowest(values: Sequence[Any]) -> torch.dtype | None:
    """The least precise floating dtype among tensors; None if there is none."""
    order = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
    present = {v.dtype for v in values if isinstance(v, torch.Tensor)}
    return next((d for d in order if d in present), None)
