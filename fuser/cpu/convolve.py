"""Convolutions of channels-last images by a packed weight, with an epilogue.

The weight is packed like that of a product (`packed.py`). Its columns are the channels of the result; its inner dim is
all channels of the images, for each kernel position in turn. A table holds the address of the input channels for each
output point of a unit and each kernel position; for padding it is a row of zeros. So the images are not copied. If the
images have few channels, a whole line of the kernel counts as one position, since its elements are adjacent in memory;
only lines that cross an edge are copied. The epilogue (`epilogues.py`) is computed from the sums, and the result is
rounded and written once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from fuser import config
from fuser.cpu import packed
from fuser.cpu.epilogues import PER_CHANNEL, Epilogue, applied
from fuser.cpu.routines import Routines

_RUN_CHANNELS = 8  # input channels below which a line of the kernel is one position: short inner loops are slow
LAST = torch.channels_last


def why_not(dtype: torch.dtype, channels: int) -> str | None:
    """None if this machine has a kernel for images with so many channels, else the reason."""
    return packed.why_not(dtype, channels)


def pack(w: torch.Tensor) -> torch.Tensor:
    """Pack a weight (columns, channels, height, width) into panels."""
    return packed.pack(w.permute(0, 2, 3, 1).reshape(w.shape[0], -1))


def unpacked(panels: torch.Tensor, columns: int, channels: int, kernel: Sequence[int]) -> torch.Tensor:
    """The weight (columns, channels, height, width) that `pack` packed into these panels."""
    matrix = packed.unpacked(panels, columns, channels * kernel[0] * kernel[1])
    return matrix.view(columns, kernel[0], kernel[1], channels).permute(0, 3, 1, 2)


def convolution(
    x: torch.Tensor, panels: torch.Tensor, columns: int, kernel: Sequence[int], stride: Sequence[int],
    padding: Sequence[int], epilogue: Epilogue, factors: torch.Tensor | None, *others: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """The convolution of x (n, channels, height, width) with a packed weight, and an epilogue.

    factors: float32, a row of per-channel numbers for each "times" and "plus". others: a tensor for each "sum".
    """
    x = x if x.stride(1) == 1 else x.contiguous(memory_format=LAST)
    sizes = [(n + 2 * p - k) // s + 1 for n, p, k, s in zip(x.shape[2:], padding, kernel, stride)]
    run = kernel[1] * x.shape[1] if x.shape[1] < _RUN_CHANNELS else 0
    numbers = (columns, *kernel, *stride, *padding, *sizes, run)
    given = () if factors is None else (factors,)
    moved = (t if t.is_contiguous(memory_format=LAST) else t.contiguous(memory_format=LAST) for t in others)
    handle = CONVOLUTIONS.handle(config.isa, x.dtype, columns, epilogue)
    made: torch.Tensor = handle(*numbers, x, panels, *given, *moved)
    return made


def _on_aten(epilogue: Epilogue, columns: int, *rest: Any) -> torch.Tensor:
    kernel, stride, padding, (x, panels, *operands) = rest[:2], rest[2:4], rest[4:6], rest[9:]
    factors = operands.pop(0) if any(step in PER_CHANNEL for step in epilogue) else None
    weight = unpacked(panels, columns, x.shape[1], kernel)
    out = F.conv2d(x.float(), weight.float(), None, stride, padding)
    return applied(epilogue, out, factors, *operands).to(x.dtype).contiguous(memory_format=LAST)


CONVOLUTIONS = Routines("convolve_cpp", _on_aten)

__all__ = ["CONVOLUTIONS", "convolution", "pack", "unpacked", "why_not"]
