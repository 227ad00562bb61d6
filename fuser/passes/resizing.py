"""Resized images on CUDA, and their gradients, by gathers.

ATen's kernels have a thread per point of the result, which loops over all images and channels: with few points and many
channels, as of a vision transformer's position embeddings, most of the device waits. Here each element is a thread of
its own. A gradient reads the points that an element was read by, along one dim after the other: nothing is added
atomically, so equal calls give equal bits, and 16-bit floats are rounded once.

Forward and backward on an H200, ms, by ATen and here: cubic, a channels-last 768x50x32 to 32x32 in bfloat16, 13.7 and
0.05; linear, 8x256x512 to 1024, 0.68 and 0.05; bilinear, 8x512x32x32 to 64x64, 1.76 and 0.22; trilinear, 2x32 of 32
each to 64 each in bfloat16, 0.69 and 0.41.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fuser import targets
from fuser.lowering.corrections import suggests_channels_last

aten = torch.ops.aten
# Number of points of a result's image, per multiprocessor, from which ATen's CUDA kernel is faster.
_PLACES = {"upsample_bilinear2d": 768, "upsample_bicubic2d": 160}
_ORDERED = ("upsample_bilinear2d", "upsample_trilinear3d")  # their gradients have the layout of the result's
_MOST_READERS = 40  # of an element along one dim, for which a gradient is gathered
_CUBIC = -0.75  # of the kernel, as in eager (`A` in ATen/native/UpSample.h)


def is_large(name: str, x: torch.Tensor, made: Sequence[Any]) -> bool:
    """Whether an image made by an operator is large enough that ATen's kernel, a thread per point, fills the device.

    Per plane it takes 0.25 µs on an H200, and 3.2 ps per point; four gathers per element take 5.7 ps. With cubic
    weights it takes 0.5 µs and 10 ps; sixteen gathers take 35 ps.
    """
    if name not in _PLACES or targets.like_host(x.device) or not all(type(n) in (int, float) for n in made):
        return False
    has_gpu = torch.cuda.is_available()
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count if has_gpu else 1
    return bool(math.prod(made) >= _PLACES[name] * processors)


def _resized(name: str, x: torch.Tensor, sizes: Sequence[Any], *args: Any) -> Any:
    """The decomposition of a resampling: torch's, in eager's layout, for small images on CUDA."""
    if targets.like_host(x.device) or is_large(name, x, sizes) or not _are_resized(x.shape, sizes):
        return NotImplemented
    import torch._decomp as decomp

    made = decomp.decomposition_table[getattr(aten, name).default](x, sizes, *args)
    return made.contiguous(memory_format=layout_of(x))


def _gradient(name: str, grad: torch.Tensor, sizes: Sequence[Any], whole: Sequence[Any], *args: Any) -> Any:
    """The gradient of a resampling of images of sizes `whole`, [N, C, *in], to `sizes`; `grad` is [N, C, *sizes]."""
    if targets.like_host(grad.device) or not _are_resized(whole, sizes):
        return NotImplemented
    larger = [max(pair) for pair in zip(whole[2:], sizes, strict=True)]
    if name == "upsample_bilinear2d" and is_large(name, grad, larger):  # of cubic weights ATen's takes longer
        return NotImplemented
    corners, *factors = args
    cubic = name == "upsample_bicubic2d"
    scales = [*factors, *[None] * len(sizes)]
    dims = [_Axis(n, m, corners, s, cubic) for n, m, s in zip(whole[2:], sizes, scales, strict=False)]
    if any(axis.readers > _MOST_READERS for axis in dims):
        return NotImplemented
    found = grad.to(torch.float64 if grad.dtype is torch.float64 else torch.float32)
    last = layout_of(grad) is not torch.contiguous_format
    if last:  # sums are row-major: those of images whose channels are a tensor's last dim have its memory order
        found = found.movedim(1, -1)
    for d in sorted(range(len(dims)), key=lambda d: dims[d].source / dims[d].made):  # the dim that shrinks most first
        found = dims[d].gradient(found, d - len(dims) - last)
    if last:
        found = found.movedim(-1, 1)
    layout = layout_of(grad) if name in _ORDERED else torch.contiguous_format
    return found.to(grad.dtype).contiguous(memory_format=layout)


def layout_of(x: torch.Tensor) -> torch.memory_format:
    """The memory format that eager's kernels see in a tensor."""
    if not suggests_channels_last(x):
        return torch.contiguous_format
    return torch.channels_last if x.dim() == 4 else torch.channels_last_3d


def _are_resized(whole: Sequence[Any], sizes: Sequence[Any]) -> bool:
    """Whether images of known sizes are not empty and change their size; else eager copies them, by any factor."""
    return all(type(n) is int and n > 0 for n in (*whole, *sizes)) and list(whole[2:]) != list(sizes)


class _Axis:
    """One dim that is resampled from `source` to `made` elements, linearly or by cubic weights.

    Element `i` of the result reads the elements `floor(p)`, ... around its place `p` (source: ATen/native/UpSample.h).
    `readers`: how many elements of the result at most read one element.
    """

    def __init__(self, source: int, made: int, corners: bool, factor: float | None, cubic: bool) -> None:
        self.source, self.made, self.corners, self.cubic = source, made, corners, cubic
        self.taps = range(-1, 3) if cubic else range(2)
        if corners:
            self.step = (source - 1) / (made - 1) if made > 1 else 0.0
        else:
            self.step = 1 / factor if factor else source / made
        self.shift = 0.0 if corners else 0.5
        self.readers = min(1 + max(last - self._first(j) for j, last in enumerate(self._last_readers())), made)

    def _first(self, j: int) -> int:
        """A number that is not above the first element that reads element `j`, as `gradient` computes it."""
        return max(math.floor((j - self.taps[-1] + self.shift - 0.01) * self._per - self.shift - 0.01), 0)

    @property
    def _per(self) -> float:
        return 1 / self.step if self.step else 0.0

    def _last_readers(self) -> list[int]:
        """For each element the last one that reads it; places may be off by rounding."""
        last = [0] * self.source
        for i in range(self.made):
            place = (i + self.shift) * self.step - self.shift
            for near in (place - 1e-3, place + 1e-3):
                for tap in self.taps:
                    last[min(max(math.floor(near) + tap, 0), self.source - 1)] = i
        return last

    def gradient(self, grad: torch.Tensor, dim: int) -> torch.Tensor:
        """The gradient, with `source` elements in a (negative) dim, of a tensor that has `made` there."""
        j = torch.arange(self.source, device=grad.device, dtype=grad.dtype).unsqueeze(1)
        begin = (j - (self.taps[-1] - self.shift + 0.01)) * self._per - (self.shift + 0.01)
        first = torch.clamp(torch.floor(begin), 0, self.made - self.readers)
        reader, reads, weight = self._read(first + torch.arange(self.readers, device=grad.device, dtype=grad.dtype), j)
        rows = aten._unsafe_index.Tensor(grad, [*[None] * (grad.dim() + dim), reader])
        reads, weight = (t.view(*t.shape, *[1] * (-1 - dim)) for t in (reads, weight))
        return torch.where(reads, rows * weight, 0.0).sum(dim)

    def _read(self, i: torch.Tensor, j: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The numbers `i` of elements of the result, whether they read the elements `j`, and by which weights."""
        place = (i + self.shift) * self.step - self.shift
        return i.to(torch.int64), *(self._cubic(place, j) if self.cubic else self._linear(place, j))

    def _linear(self, place: torch.Tensor, j: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Whether elements at these places read element `j`, one of two neighbours, and by which weights."""
        apart = j - torch.clamp(place, 0, self.source - 1)
        return (apart > -1) & (apart <= 1), 1 - torch.abs(apart)

    def _cubic(self, place: torch.Tensor, j: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        near = torch.floor(place)
        reads, weight = torch.zeros_like(near, dtype=torch.bool), torch.zeros_like(near)
        for tap, value in zip(self.taps, _cubic(place - near), strict=True):
            here = torch.clamp(near + tap, 0, self.source - 1) == j
            reads, weight = reads | here, weight + torch.where(here, value, 0.0)
        return reads, weight


def _cubic(t: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The weights of the four elements around a place that is `t` behind the second one."""

    def inner(x: torch.Tensor) -> torch.Tensor:
        return ((_CUBIC + 2) * x - (_CUBIC + 3)) * x * x + 1

    def outer(x: torch.Tensor) -> torch.Tensor:
        return ((_CUBIC * x - 5 * _CUBIC) * x + 8 * _CUBIC) * x - 4 * _CUBIC

    return outer(t + 1), inner(t), inner(1 - t), outer(2 - t)


def decompositions() -> dict[Any, Callable[..., Any]]:
    """By overload; each gives `NotImplemented` where ATen's kernel is left to compute the operator."""
    table: dict[Any, Callable[..., Any]] = {}
    for name in ("upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d"):
        table[getattr(aten, name).default] = functools.partial(_resized, name)
        table[getattr(aten, f"{name}_backward").default] = functools.partial(_gradient, name)
    return table
