"""Products of many rows with a weight that was packed once: sums in register blocks, operands in the inner caches.

The packed weight consists of panels of as many columns as some registers have lanes. In a panel, the elements of all
columns at one index of the inner dim are contiguous; for bfloat16 at two indices, since a lane takes pairs. A unit is
a block of rows by some panels, whose parts along the inner dim stay in the second-level cache. Each iteration of the
inner loop reads a panel's registers once and a broadcast element of each row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fuser import config, machines
from fuser.cpu import epilogues, toolchain
from fuser.cpu.dots import DTYPES, PAIRS, shape_of
from fuser.cpu.routines import Routines

Activation = tuple[str, str]  # oneDNN's name and algorithm
EPILOGUES: dict[Activation, str] = {  # the activations that a product computes, with their names in `epilogues.py`
    ("gelu", "erf"): "gelu", ("gelu", "tanh"): "gelu_tanh", ("swish", ""): "silu", ("sigmoid", ""): "sigmoid",
    ("tanh", ""): "tanh",
}  # fmt: skip


def activated(epilogue: Activation, x: torch.Tensor) -> torch.Tensor:
    """An activation of `EPILOGUES` applied to a tensor on ATen."""
    return epilogues.activated(EPILOGUES[epilogue], x)


def why_not(dtype: torch.dtype, inner: int) -> str | None:
    """None if a kernel here can compute products of this dtype with packed weights, else the reason."""
    machine = machines.find(config.isa)
    if dtype not in DTYPES or not machine.fma or dtype is torch.bfloat16 and not machine.bf16_dots:
        return f"{machine.name} has no products of {dtype}"
    if inner % PAIRS[DTYPES[dtype]]:
        return "an odd number of elements makes no pairs"
    return toolchain.why_not()


def pack(w: torch.Tensor) -> torch.Tensor:
    """The panels of a weight (columns, inner), one in each row; the last one is padded with zeros."""
    (columns, inner) = w.shape
    width = shape_of(columns, machines.find(config.isa)).width
    words = w.clone(memory_format=torch.contiguous_format).view(torch.int32 if w.dtype.itemsize == 2 else w.dtype)
    panels = -(-columns // width)
    if columns % width:
        words = F.pad(words, (0, 0, 0, panels * width - columns))
    made = words.view(panels, width, -1).transpose(1, 2).clone(memory_format=torch.contiguous_format)
    return made.view(w.dtype).view(panels, inner * width)


def unpacked(packed: torch.Tensor, columns: int, inner: int) -> torch.Tensor:
    """The weight (columns, inner) of which `pack` made panels, on this machine or another."""
    width = packed.shape[1] // inner if inner else 1
    words = packed.view(torch.int32 if packed.dtype.itemsize == 2 else packed.dtype)
    made = words.view(packed.shape[0], -1, width).transpose(1, 2).reshape(packed.shape[0] * width, -1)
    return made[:columns].clone(memory_format=torch.contiguous_format).view(packed.dtype)


def product(
    x: torch.Tensor, packed: torch.Tensor, columns: int, bias: torch.Tensor | None, epilogue: Activation | None = None
) -> torch.Tensor:
    """`x @ w.T (+ bias)` for x (rows, inner) and the panels of w (columns, inner), then one of `EPILOGUES`."""
    x = x if x.stride(1) == 1 else x.contiguous()
    given = () if bias is None else (bias.contiguous(),)
    handle = PRODUCTS.handle(config.isa, x.dtype, columns, bias is not None, epilogue)
    made: torch.Tensor = handle(columns, x, packed, *given)
    return made


def _on_aten(
    has_bias: bool, epilogue: Activation | None, columns: int, x: torch.Tensor, packed: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    out = F.linear(x, unpacked(packed, columns, x.shape[1]), bias)
    return out if epilogue is None else activated(epilogue, out)


PRODUCTS = Routines("packed_cpp", _on_aten)

__all__ = ["EPILOGUES", "PRODUCTS", "Activation", "activated", "pack", "product", "unpacked", "why_not"]
