"""Operators that torch's dispatcher decomposes during tracing, and the calls that are traced instead.

No decomposition table reaches them: the dispatcher calls Python functions registered for autograd's key, or composite
kernels. Resized images would become gathers for each element, up to five times as slow as ATen's kernels, and their
gradients scatters. They stay whole on the CPU, and on CUDA if they are large or get a gradient (see `resizing`);
other ones are decomposed and get eager's layout. Circular pads would become chains of masked writes; on the CPU they
become joins. A dropout that drops nothing would become a copy, where eager returns its input. One-hot vectors would
have the strides of their indices, and 1-d pools without gradients the order of their input; eager's are row-major.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fuser import forks, targets
from fuser.passes.resizing import is_large, layout_of

aten = torch.ops.aten
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
KEYS = (torch._C.DispatchKey.Autograd, COMPOSITE)
RESIZING = (
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d",
    "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa",
    "_upsample_lanczos2d_aa",
)  # fmt: skip
WHOLE = ("multilabel_margin_loss_forward",)  # torch's replacement counts labels behind the end of a row
_before: dict[Any, dict[Any, Callable[..., Any]]] = {}  # an overload's own functions, while others replace them


def _replace() -> None:
    for name in filter(functools.partial(hasattr, aten), RESIZING):  # some came with later versions of torch
        vec, plain = getattr(aten, name).vec, getattr(aten, name).default
        _stand(plain, {})
        _stand(vec, {key: _Resized(vec, plain, own) for key, own in _own(vec).items()})
    for name in WHOLE:
        _stand(getattr(aten, name).default, {})
    _stand(aten._pad_circular.default, {COMPOSITE: _joined})
    _stand(aten.one_hot.default, {COMPOSITE: _one_hot})
    _stand(aten.max_pool1d.default, {COMPOSITE: _max_pool1d})
    _stand(aten.dropout.default, {key: _Dropped(own) for key, own in _own(aten.dropout.default).items()})


def _own(overload: Any) -> dict[Any, Callable[..., Any]]:
    return {key: overload.py_kernels[key] for key in KEYS if key in overload.py_kernels}


def _stand(overload: Any, kernels: dict[Any, Callable[..., Any]]) -> None:
    """Replace an overload's Python kernels by `kernels`; its own are kept in `_before`."""
    _before.setdefault(overload, _own(overload))
    for key in KEYS:
        overload.py_kernels.pop(key, None)
    overload.py_kernels.update(kernels)
    overload._dispatch_cache.clear()


def _put_back() -> None:
    for overload, kernels in list(_before.items()):
        _stand(overload, kernels)
    _before.clear()


_SHARED = forks.Shared(_replace, _put_back)


def in_fast_forms() -> contextlib.AbstractContextManager[None]:
    """A block in which tracing records these operators as faster calls. Several threads may be in such blocks."""
    return _SHARED.block()


class _Resized:
    """An overload `vec`, given sizes or scale factors, traced as the overload that takes both.

    On other devices than the CPU, torch's function decomposes it if the images are small and need no gradient. That is
    row-major for some numbers of channels, where eager keeps the image's layout.
    """

    def __init__(self, vec: Any, plain: Any, own: Callable[..., Any]) -> None:
        self.plain, self.own, self.name = plain, own, plain.overloadpacket.__name__
        self.names = [a.name for a in vec._schema.arguments]  # input, output_size, align_corners if any, scale_factors

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        x, sizes, *rest, factors = (given[name] for name in self.names)
        has_gradient = torch.is_grad_enabled() and x.requires_grad
        made = sizes if factors is None else [n * factor for n, factor in zip(x.shape[2:], factors, strict=True)]
        if not targets.like_host(x.device) and not has_gradient and not is_large(self.name, x, made):
            return self.own(x, sizes, *rest, factors).contiguous(memory_format=layout_of(x))
        if factors is None:
            return self.plain(x, sizes, *rest)
        whole: Any = torch.sym_int
        sizes = [whole(size * factor) for size, factor in zip(x.shape[2:], factors, strict=True)]
        return self.plain(x, sizes, *rest, *factors)


class _Dropped:
    """A dropout: its input if nothing is dropped, zeros without random numbers if all is, else torch's function."""

    def __init__(self, own: Callable[..., Any]) -> None:
        self.own = own

    def __call__(self, x: torch.Tensor, p: float, train: bool) -> Any:
        if train and p == 1:
            return torch.mul(x, torch.zeros((), dtype=x.dtype, device=x.device))
        return self.own(x, p, train) if train and p != 0 else x


def _max_pool1d(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A 1-d max pool. Without a gradient on the CPU eager has a row-major kernel; else it is the 2-d pool."""
    pooled: torch.Tensor = aten.max_pool1d_with_indices(x, *args, **kwargs)[0]
    differentiable = torch.is_grad_enabled() and x.requires_grad
    return pooled if differentiable or not targets.like_host(x.device) else pooled.contiguous()


def _one_hot(index: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """One-hot vectors, row-major as in eager; the comparison that torch traces would keep the strides of its input.

    An element that is no class raises, as in eager.
    """
    if index.dtype is not torch.int64 or (type(num_classes) is int and num_classes <= 0):
        refused: torch.Tensor = aten.one_hot.default._op_dk(COMPOSITE, index.contiguous(), num_classes)
        return refused
    are_classes = torch.logical_and(index >= 0, index < num_classes).all()
    aten._assert_async.msg(are_classes, "Class values must be non-negative and smaller than num_classes.")
    # Not the composite kernel: inside a transform it would treat a copy as a tensor with data, and read the data.
    classes = torch.arange(num_classes, dtype=torch.int64, device=index.device)
    return torch.eq(index.contiguous().unsqueeze(-1), classes).to(torch.int64)


def _joined(x: torch.Tensor, pad: Sequence[Any]) -> torch.Tensor:
    """A circular pad as a join of the end, the whole and the beginning along each dim; composite if not supported."""
    known = all(type(n) is int and n >= 0 for n in (*pad, *x.shape)) and len(pad) <= 2 * x.dim() - 2 and any(pad)
    if not targets.like_host(x.device) or not known or any(n > x.shape[-1 - i // 2] for i, n in enumerate(pad)):
        made: torch.Tensor = aten._pad_circular.default._op_dk(COMPOSITE, x, pad)
        return made
    for i in range(len(pad) // 2):
        dim, size, (before, after) = -1 - i, x.shape[-1 - i], pad[2 * i : 2 * i + 2]
        parts = [x.narrow(dim, size - before, before), x, x.narrow(dim, 0, after)]
        x = torch.cat([p for p, n in zip(parts, (before, size, after), strict=True) if n], dim)
    return x.contiguous()


__all__ = ["in_fast_forms"]
