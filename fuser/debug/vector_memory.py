"""Scalars and memory of the vector IR interpreter: C's scalars as Python's and NumPy's, pointers with bounds.

Integers are Python's, wrapped when they are stored; floats are NumPy's, so that each operation rounds. A vector is a
tensor, a mask a tensor of bools.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import torch

from fuser.errors import VerifyError

Scalar = Any  # a number, a tensor of lanes, or a Pointer
_C = {
    "bool": np.uint8, "char": np.uint8, "u8": np.uint8, "i8": np.int8, "u16": np.uint16, "i16": np.int16,
    "lanes_m": np.uint64, "u32": np.uint32, "i32": np.int32, "int": np.int32, "u64": np.uint64, "i64": np.int64,
    "float": np.float32, "double": np.float64, "void": np.uint8,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Pointer:
    """A pointer: `at` is its byte offset in `memory`. `dims`: for an array of arrays, the sizes of an element."""

    memory: np.ndarray[Any, Any]
    at: int
    kind: str
    dims: tuple[int, ...] = ()

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the elements."""
        return np.dtype(_C[self.kind])

    def moved(self, elements: int) -> Pointer:
        """The pointer `elements` elements further."""
        return dataclasses.replace(self, at=self.at + elements * self.dtype.itemsize * math.prod(self.dims))

    def as_kind(self, kind: str) -> Pointer:
        """The same address, with elements of another type."""
        return dataclasses.replace(self, kind=kind, dims=())

    def element(self, n: int) -> Pointer:
        """The pointer to element `n`; in an array of arrays, to the first element of array `n`."""
        return dataclasses.replace(self.moved(n), dims=self.dims[1:]) if self.dims else self.moved(n)

    def span(self, first: int, count: int) -> np.ndarray[Any, Any]:
        """Elements as an array that shares their memory. VerifyError if some are out of bounds."""
        size = self.dtype.itemsize
        low, high = self.at + first * size, self.at + (first + count) * size
        if count and not 0 <= low <= high <= len(self.memory):
            raise VerifyError(f"elements {first} to {first + count} of {self.kind} at {self.at} of {len(self.memory)}")
        return self.memory[low:high].view(self.dtype) if count > 0 else np.empty(0, self.dtype)

    def read(self) -> Scalar:
        """The element."""
        found = self.span(0, 1)[0]
        return found if self.kind in ("float", "double") else int(found)

    def write(self, value: Scalar) -> None:
        """Store a value into the element."""
        self.span(0, 1)[0] = converted(self.kind, value)


def scratch(kind: str, sizes: tuple[int, ...], zero: bool) -> Pointer:
    """A local array; without `zero` it is filled with NaN, or -1."""
    memory = np.full(math.prod(sizes) * np.dtype(_C[kind]).itemsize, 0 if zero else 255, np.uint8)
    return Pointer(memory, 0, kind, sizes[1:])


def whole(array: np.ndarray[Any, Any]) -> Pointer:
    """A pointer to the first element of a contiguous array."""
    return Pointer(array.reshape(-1).view(np.uint8), 0, "char")


def converted(kind: str, value: Scalar) -> Scalar:
    """`value` as C converts it to a variable of the type `kind`."""
    kind = kind.replace("const", "").strip()
    if isinstance(value, Pointer):
        return value if "*" not in kind else value.as_kind(kind.split("*")[0].strip())
    if isinstance(value, torch.Tensor) or kind.startswith(("lanes_", "fuser_bits")):
        return value
    if kind == "bool":
        return bool(value)
    if kind in ("float", "double"):
        return np.dtype(_C[kind]).type(value)
    return wrapped(int(value), np.dtype(_C[kind]))


def wrapped(value: int, dtype: np.dtype[Any]) -> int:
    """An integer wrapped to the range of `dtype`."""
    info = np.iinfo(dtype)
    return (value - int(info.min)) % (1 << info.bits) + int(info.min)


def tensor(value: Scalar, dtype: torch.dtype) -> torch.Tensor:
    """A scalar as a tensor of a compute dtype; lanes are tensors already."""
    if isinstance(value, torch.Tensor):
        return value
    if not dtype.is_floating_point and dtype is not torch.bool:
        value = wrapped(int(value), np.dtype(str(dtype).removeprefix("torch.")))
    return torch.tensor(value.item() if isinstance(value, np.generic) else value, dtype=dtype)


def scalar(value: torch.Tensor) -> Scalar:
    """The number in a 0-dim tensor; lanes stay a tensor."""
    if value.dim():
        return value
    if value.dtype.is_floating_point:
        return np.dtype(np.float64 if value.dtype is torch.float64 else np.float32).type(value.item())
    return value.item()


def bits_to_float(bits: int, dtype: torch.dtype) -> Scalar:
    """The float with these bits of a 16-bit float."""
    found = torch.tensor(wrapped(bits, np.dtype(np.int16)), dtype=torch.int16)
    return np.float32(float(found.view(dtype)))


def float_to_bits(value: Scalar, dtype: torch.dtype) -> int:
    """The bits of a float rounded to a 16-bit float."""
    return int(torch.tensor(float(value), dtype=torch.float32).to(dtype).view(torch.int16).item()) & 0xFFFF


__all__ = ["Pointer", "Scalar", "bits_to_float", "converted", "float_to_bits", "scalar", "scratch", "tensor", "whole",
           "wrapped"]  # fmt: skip
