"""Meta results of common operators for plain arguments; for anything else torch's shape functions run.

torch's own shape functions of these are in Python and import sympy at their first call, which takes 0.35 s: more than
the rest of a first kernel. A rule here answers only certain cases, and returns None for errors and rare cases.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fuser.lowering.shapes import broadcast, elementwise_meta, is_row_major, operands, promoted, result_strides

Rule = Callable[..., "torch.Tensor | None"]
_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_DTYPES = _FLOATS | {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}


def known_meta(op: str, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The operator's result as a meta tensor; None if torch has to be asked."""
    rule = _RULES.get(op)
    if rule is None:
        return elementwise_meta(op, args, kwargs)
    try:
        return rule(*args, **kwargs)
    except TypeError:  # an overload with other parameters
        return None


def _new(size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(size), dtype=dtype, device="meta")


def _is_dense(*tensors: Any) -> bool:
    """Whether all are contiguous tensors with elements, whose strides match no other memory format."""
    return all(
        isinstance(t, torch.Tensor) and t.numel() and (is_row_major(t) or t.dim() < 4 and t.is_contiguous())
        for t in tensors
    )


def _dims(dims: Any, rank: int) -> set[int] | None:
    """The dims counted from the front, all of them if none are given; None if one is out of range or occurs twice."""
    if dims is None or dims == () or dims == []:
        return set(range(rank))
    given = [dims] if isinstance(dims, int) else list(dims)
    if not all(type(d) is int and -rank <= d < rank for d in given):
        return None
    found = {d % rank for d in given}
    return found if len(found) == len(given) else None


def _reduced(x: Any, dims: Any, keepdim: Any, dtype: torch.dtype) -> torch.Tensor | None:
    """A contiguous result, as reductions give for any strides of their input."""
    if x.dtype not in _DTYPES or not x.numel() or type(keepdim) is not bool:
        return None
    found = _dims(dims, x.dim())
    if found is None:
        return None
    size = [1 if d in found else n for d, n in enumerate(x.shape) if keepdim or d not in found]
    return _new(size, dtype)


def _sum(x: torch.Tensor, dim: Any = None, keepdim: bool = False) -> torch.Tensor | None:
    return _reduced(x, dim, keepdim, x.dtype if x.dtype.is_floating_point else torch.int64)


def _mean(x: torch.Tensor, dim: Any = None, keepdim: bool = False) -> torch.Tensor | None:
    return _reduced(x, dim, keepdim, x.dtype) if x.dtype in _FLOATS else None


def _extreme(x: torch.Tensor, dim: Any = (), keepdim: bool = False) -> torch.Tensor | None:
    return _reduced(x, dim, keepdim, x.dtype)


def _spread(
    x: torch.Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> torch.Tensor | None:  # fmt: skip
    return None if x.dtype not in _FLOATS or isinstance(dim, bool) else _reduced(x, dim, keepdim, x.dtype)


def _truth(x: torch.Tensor, dim: Any = None, keepdim: bool = False) -> torch.Tensor | None:
    none = x.dtype is torch.uint8 or dim in ((), [])  # for an empty list of dims these reduce nothing
    return None if none else _reduced(x, dim, keepdim, torch.bool)


def _where(condition: Any, a: Any, b: Any) -> torch.Tensor | None:
    if not isinstance(condition, torch.Tensor) or condition.dtype is not torch.bool:
        return None
    if not all(isinstance(v, (torch.Tensor, int, float)) for v in (a, b)):
        return None
    tensors = operands("aten.where", (condition, a, b))
    size = broadcast([tuple(t.shape) for t in tensors], "aten.where")
    return torch.empty_strided(size, result_strides(size, tensors), dtype=promoted((a, b)), device="meta")


def _cat(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor | None:
    first = tensors[0]
    if not _is_dense(*tensors) or len({t.dtype for t in tensors}) > 1 or not -first.dim() <= dim < first.dim():
        return None
    sizes = [list(t.shape) for t in tensors]
    total = sum(s.pop(dim) for s in sizes if len(s) == first.dim())
    if any(s != sizes[0] for s in sizes):
        return None
    size = list(first.shape)
    size[dim] = total
    return _new(size, first.dtype)


def _softmax(x: torch.Tensor, dim: int, half_to_float: Any = None) -> torch.Tensor | None:
    if not _is_dense(x) or x.dtype not in _FLOATS or _dims(dim, x.dim()) is None or half_to_float:
        return None
    return _new(x.shape, x.dtype)


def _layer_norm(
    x: torch.Tensor, shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5, _: Any = True
) -> torch.Tensor | None:
    params = [p for p in (weight, bias) if p is not None]
    if not _is_dense(x, *params) or x.dtype not in _FLOATS or not len(shape):
        return None
    if any(p.dtype != x.dtype or tuple(p.shape) != tuple(shape) for p in params):
        return None
    return _new(x.shape, x.dtype) if tuple(x.shape[-len(shape) :]) == tuple(shape) else None


def _embedding(weight: torch.Tensor, indices: torch.Tensor, *_: Any) -> torch.Tensor | None:
    if weight.dim() != 2 or indices.dtype not in (torch.int32, torch.int64):
        return None
    return _new((*indices.shape, weight.shape[1]), weight.dtype)


_RULES: dict[str, Rule] = {
    "aten.sum": _sum,
    "aten.mean": _mean,
    "aten.amax": _extreme,
    "aten.amin": _extreme,
    "aten.std": _spread,
    "aten.var": _spread,
    "aten.any": _truth,
    "aten.all": _truth,
    "aten.where": _where,
    "aten.cat": _cat,
    "aten.softmax": _softmax,
    "aten.log_softmax": _softmax,
    "aten.layer_norm": _layer_norm,
    "aten.embedding": _embedding,
}


def _to_full(device: str, x: torch.Tensor, cuda: bool, cpu: bool) -> torch.Tensor:
    return x.to(torch.float32) if (cuda if device == "cuda" else cpu) and x.dtype in _REDUCED else x


def _to_reduced(
    device: str, x: torch.Tensor, cuda: bool, cpu: bool, cuda_dtype: torch.dtype, cpu_dtype: torch.dtype
) -> torch.Tensor:
    casts = (cuda if device == "cuda" else cpu) and x.dtype is torch.float32
    return x.to(cuda_dtype if device == "cuda" else cpu_dtype) if casts else x


_REDUCED = (torch.float16, torch.bfloat16)
# Autocast's casts in TorchScript: the result depends on a device, which a meta tensor does not have.
AUTOCASTS: dict[str, Callable[..., torch.Tensor]] = {
    "aten._autocast_to_full_precision": _to_full, "aten._autocast_to_reduced_precision": _to_reduced,
}  # fmt: skip
