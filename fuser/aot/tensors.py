"""Tensors in a file: raw bytes at multiples of 64 that are mapped, with sums that detect damage at memory speed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fuser import targets
from fuser.canonical.portable import decode_value, encode_value
from fuser.errors import AotError, GraphError

ALIGNMENT = 64
DEVICES = ("cpu", "cuda")
_PAGE = 4096  # bytes covered by each sum


class Writer:
    """Collects tensors.

    `rows` describe them: [dtype, sizes, strides, offset in bytes, elements], and a device unless it is the CPU.
    """

    def __init__(self) -> None:
        self.rows: list[list[Any]] = []
        self._parts: list[torch.Tensor] = []
        self._known: dict[tuple[Any, ...], int] = {}
        self._size = 0

    def add(self, tensor: torch.Tensor, name: str) -> int:
        """The number of `tensor`; tensors with the same memory share a number. AotError if a file cannot hold it."""
        t = tensor.detach()
        if t.device.type not in DEVICES or t.device.index not in (None, 0):
            raise AotError(f"{name} is on {t.device}: files hold programs of the CPU and of cuda:0")
        if type(t) is not torch.Tensor or t.layout is not torch.strided or t.is_quantized or t.is_conj() or t.is_neg():
            raise AotError(f"{name} is no plain strided tensor ({type(tensor).__name__}, {t.layout}), which files hold")
        identity = (t.data_ptr(), t.dtype, tuple(t.shape), t.stride())
        known = self._known.get(identity) if t.numel() else None
        if known is not None:
            return known
        dense = torch.ops.aten.is_non_overlapping_and_dense.default(t)
        if not dense:
            t = t.contiguous()
        flat = t.as_strided((t.numel(),), (1,)).cpu().view(torch.uint8) if t.numel() else torch.zeros(0).byte()
        device = [] if targets.is_host(t.device) else [t.device.type]
        dtype = encode_value(t.dtype)["dtype"]
        self.rows.append([dtype, list(t.shape), list(t.stride()), self._size, t.numel(), *device])
        self._known[identity] = len(self.rows) - 1
        self._parts += [flat, torch.zeros(-flat.numel() % ALIGNMENT, dtype=torch.uint8)]
        self._size += flat.numel() + -flat.numel() % ALIGNMENT
        return len(self.rows) - 1

    def data(self) -> torch.Tensor:
        """All bytes, padded with zeros to a whole page."""
        return torch.cat([torch.zeros(0, dtype=torch.uint8), *self._parts, torch.zeros(-self._size % _PAGE).byte()])


def sums(data: torch.Tensor) -> torch.Tensor:
    """The sum of each page's 64-bit words, modulo 2**64, at memory speed; digests take 2 s per GB."""
    return data.view(torch.int64).view(-1, _PAGE // 8).sum(1)


def read(data: torch.Tensor, rows: Sequence[Sequence[Any]]) -> list[torch.Tensor]:
    """Views of the mapped bytes, or copies on another device. GraphError if a row exceeds them."""
    storage = data.untyped_storage()
    base, end = data.storage_offset(), data.numel()
    found = []
    for name, size, stride, offset, elements, *device in rows:
        dtype = decode_value({"dtype": name})
        spanned = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) if min(size, default=1) > 0 else 0
        sane = all(type(n) is int and n >= 0 for n in (*size, *stride, offset, elements))
        if not sane or offset % ALIGNMENT or spanned > elements or offset + elements * dtype.itemsize > end:
            raise GraphError(f"a tensor of sizes {size} reaches outside of the {end} bytes of the file's tensors")
        made = torch.empty(0, dtype=dtype)
        made.set_(storage, (base + offset) // dtype.itemsize, tuple(size), tuple(stride))
        found.append(made.to(device[0]) if device and device[0] in DEVICES else made)
    return found


__all__ = ["Writer", "read", "sums"]
