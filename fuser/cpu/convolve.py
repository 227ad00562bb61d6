"""Convolutions of channels-last images by a weight that was packed once, with what follows each element.

The weight is packed as that of a product (`packed.py`): its columns are the channels of the result, and its inner dim
has all channels of the images for one place of the kernel after the other. A table holds where the channels of each
point of a unit begin, for each place, or a row of zeros where that is padding. No copy of the images is made. Of few
channels a whole line of the kernel is one place, whose elements follow each other; at the edges it is copied.
What follows on each element (`epilogues.py`) is computed from the sums, and the result is rounded and written once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from fuser import config, machines
from fuser.cpu import packed
from fuser.cpu.dots import Shape, shape_of
from fuser.cpu.epilogues import PER_CHANNEL, Epilogue, applied

_RUN_CHANNELS = 8  # of the images, below which a line of the kernel is taken as one run: each place ends the inner loop
LAST = torch.channels_last


def why_not(dtype: torch.dtype, channels: int) -> str | None:
    """None if a kernel makes convolutions of images with so many channels here, else the reason."""
    return packed.why_not(dtype, channels)


def pack(w: torch.Tensor) -> torch.Tensor:
    """The panels of a weight (columns, channels, height, width)."""
    return packed.pack(w.permute(0, 2, 3, 1).reshape(w.shape[0], -1))


def unpacked(panels: torch.Tensor, columns: int, channels: int, kernel: Sequence[int]) -> torch.Tensor:
    """The weight (columns, channels, height, width) of which `pack` made panels."""
    matrix = packed.unpacked(panels, columns, channels * kernel[0] * kernel[1])
    return matrix.view(columns, kernel[0], kernel[1], channels).permute(0, 3, 1, 2)


def convolution(
    x: torch.Tensor, panels: torch.Tensor, columns: int, kernel: Sequence[int], stride: Sequence[int],
    padding: Sequence[int], epilogue: Epilogue, factors: torch.Tensor | None, *others: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """The convolution of x (n, channels, height, width) and the weight of these panels, then the steps of an epilogue.

    factors: float32, a row for each step that takes a number a channel. others: a tensor for each "sum".
    """
    x = x if x.stride(1) == 1 else x.contiguous(memory_format=LAST)
    sizes = [(n + 2 * p - k) // s + 1 for n, p, k, s in zip(x.shape[2:], padding, kernel, stride)]
    run = kernel[1] * x.shape[1] if x.shape[1] < _RUN_CHANNELS else 0
    numbers = (columns, *kernel, *stride, *padding, *sizes, run)
    given = () if factors is None else (factors,)
    moved = (t if t.is_contiguous(memory_format=LAST) else t.contiguous(memory_format=LAST) for t in others)
    made: torch.Tensor = _handle(x.dtype, columns, epilogue, config.isa)(*numbers, x, panels, *given, *moved)
    return made


@functools.lru_cache(maxsize=256)
def _handle(dtype: torch.dtype, columns: int, epilogue: Epilogue, isa: str) -> Callable[..., Any]:
    """Looked up at each call. Numbers of columns with one shape of blocks have one handle."""
    return _handle_of(dtype, shape_of(columns, machines.find(isa)), epilogue, isa)


@functools.lru_cache(maxsize=64)
def _handle_of(dtype: torch.dtype, shape: Shape, epilogue: Epilogue, isa: str) -> Callable[..., Any]:
    from fuser.cpu import convolve_cpp, routines  # what writes a kernel is loaded where one is asked for

    routine = convolve_cpp.routine(dtype, shape, epilogue, machines.find(isa))
    return routines.handle_of(routine, functools.partial(_otherwise, epilogue))


def _otherwise(epilogue: Epilogue, columns: int, *rest: Any) -> torch.Tensor:
    kernel, stride, padding, (x, panels, *operands) = rest[:2], rest[2:4], rest[4:6], rest[9:]
    factors = operands.pop(0) if any(step in PER_CHANNEL for step in epilogue) else None
    weight = unpacked(panels, columns, x.shape[1], kernel)
    out = F.conv2d(x.float(), weight.float(), None, stride, padding)
    return applied(epilogue, out, factors, *operands).to(x.dtype).contiguous(memory_format=LAST)


__all__ = ["convolution", "pack", "unpacked", "why_not"]
