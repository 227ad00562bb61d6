"""The rows of the `contractions` suite: a convolution or product, what follows it, its layout and its dtype."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Built = tuple[nn.Module, tuple[Tensor, ...]]
FLOAT, HALF = torch.float32, torch.bfloat16
LAST = torch.channels_last


@dataclass(frozen=True)
class Row:
    """One graph: `make(quick)` gives the module, in eval mode, and its inputs."""

    name: str
    make: Callable[[bool], Built]


class Then(nn.Module):
    """A module, then a function of its result."""

    def __init__(self, first: nn.Module, follow: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.follow = first, follow

    def forward(self, x: Tensor) -> Tensor:
        return self.follow(self.first(x))


class AddNorm(nn.Module):
    """A linear, its input added, and a layer norm."""

    def __init__(self, inner: int, columns: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(inner, columns), nn.LayerNorm(columns)
        self.rest = nn.Parameter(torch.randn(columns))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x) + self.rest)


class Matmul(nn.Module):
    """`x @ w` for a parameter; `turned`: of the transpose of x, as in the gradient of a weight."""

    def __init__(self, inner: int, columns: int, turned: bool = False, batch: int = 0) -> None:
        super().__init__()
        size = (batch, inner, columns) if batch else (inner, columns)
        self.weight, self.turned = nn.Parameter(torch.randn(size) / math.sqrt(inner)), turned

    def forward(self, x: Tensor) -> Tensor:
        return F.relu((x.mT if self.turned else x) @ self.weight) * 0.5


FOLLOWING: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "hardswish relu": lambda x: F.relu(F.hardswish(x)),
    "sigmoid mul": lambda x: x * torch.sigmoid(1.702 * x),
}
# of a convolution: in, out, kernel, stride, padding, groups, transposed, height and width
CONVOLUTIONS: dict[str, tuple[int, int, int, int, int, int, bool, int]] = {
    "3x3": (64, 64, 3, 1, 1, 1, False, 56),
    "1x1": (64, 256, 1, 1, 0, 1, False, 56),
    "stem 7x7": (3, 64, 7, 2, 3, 1, False, 224),
    "depthwise": (96, 96, 3, 1, 1, 96, False, 56),
    "grouped": (128, 128, 3, 1, 1, 32, False, 28),
    "transposed": (64, 32, 2, 2, 0, 1, True, 56),
}


def _linear(rows: int, follow: str, dtype: torch.dtype) -> Callable[[bool], Built]:
    def make(quick: bool) -> Built:
        inner, columns = (64, 96) if quick else (768, 3072)
        module = AddNorm(inner, columns) if follow == "add norm" else Then(nn.Linear(inner, columns), FOLLOWING[follow])
        return module.to(dtype).eval(), (torch.randn(min(rows, 32) if quick else rows, inner, dtype=dtype),)

    return make


def _matmul(kind: str, dtype: torch.dtype) -> Callable[[bool], Built]:
    def make(quick: bool) -> Built:
        rows, inner, columns = (32, 48, 64) if quick else (512, 768, 768)
        module = Matmul(inner, columns, kind == "turned", 8 if kind == "batched" else 0)
        sizes = {"plain": (rows, inner), "turned": (inner, rows), "batched": (8, rows // 4, inner)}[kind]
        return module.to(dtype).eval(), (torch.randn(sizes, dtype=dtype),)

    return make


def _convolution(kind: str, follow: str, last: bool, dtype: torch.dtype) -> Callable[[bool], Built]:
    def make(quick: bool) -> Built:
        c, out, kernel, stride, padding, groups, transposed, size = CONVOLUTIONS[kind]
        cls = nn.ConvTranspose2d if transposed else nn.Conv2d
        module = Then(cls(c, out, kernel, stride, padding, groups=groups), FOLLOWING[follow]).to(dtype).eval()
        x = torch.randn(2 if quick else 4, c, *2 * (size // 4 if quick else size,), dtype=dtype)
        return (module.to(memory_format=LAST), (x.to(memory_format=LAST),)) if last else (module, (x,))

    return make


def _name(dtype: torch.dtype) -> str:
    return "bf16" if dtype is HALF else "fp32"


ROWS: tuple[Row, ...] = (
    *(
        Row(f"linear {rows} rows, {follow}, {_name(dtype)}", _linear(rows, follow, dtype))
        for dtype in (FLOAT, HALF)
        for rows in (512, 8)
        for follow in ("relu", "gelu", "gelu tanh", "silu", "sigmoid mul", "add norm")
    ),
    *(
        Row(f"matmul {kind}, relu, {_name(dtype)}", _matmul(kind, dtype))
        for dtype in (FLOAT, HALF)
        for kind in ("plain", "turned", "batched")
    ),
    *(
        Row(f"conv {kind}, {follow}, {'channels-last' if last else 'contiguous'}, fp32",
            _convolution(kind, follow, last, FLOAT))
        for kind in CONVOLUTIONS
        for follow in ("silu", "hardswish relu")
        for last in (False, True)
    ),
    *(
        Row(f"conv {kind}, silu, {'channels-last' if last else 'contiguous'}, bf16",
            _convolution(kind, "silu", last, HALF))
        for kind in ("3x3", "1x1", "transposed")
        for last in (False, True)
    ),
)  # fmt: skip
