"""Dtypes of a library's products for attention, and exact scores from 16-bit floats.

Scores that must not be rounded to 16 bits are two products: the rounded one, and the product minus the rounded one,
which the library subtracts before it rounds. Both together cost half of a float32 product.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx

from fuser.lazy_dataclasses import dataclass

aten = torch.ops.aten
LEAST_PAIRED = 1 << 17  # multiplications, below which a library may compute other products


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which this machine multiplies matrices of `dtype`: float32 if it has no fast products of them."""
    return dtype if dtype.itemsize >= 4 or has_products(dtype) else torch.float32


def has_products(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies matrices of a 16-bit dtype on this machine, and is enabled."""
    return bool(torch._C._get_mkldnn_enabled()) and _can_multiply(dtype)


@functools.cache
def _can_multiply(dtype: torch.dtype) -> bool:
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype)
    asked = getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", None)
    return bool(torch._C._has_mkldnn and asked is not None and asked())


@dataclass(frozen=True)
class Ways:
    """The dtypes of products: `first` for scores, `second` for products with weights.

    `paired`: scores, in 16 bits, come with a second tensor, the remainder of their rounding.
    """

    first: torch.dtype
    second: torch.dtype
    paired: bool

    @staticmethod
    def of(q: torch.Tensor, keys: int, rounded: bool) -> Ways:
        """The products of queries `q` with `keys` keys each; `rounded`: scores are rounded to the dtype of q."""
        second = product_dtype(q.dtype)
        exact = not rounded and second.itemsize < 4
        wide = second is torch.bfloat16  # float16 has too few exponents for scores before scaling
        paired = exact and wide and q.numel() * keys >= LEAST_PAIRED and _adds_unrounded(second)
        return Ways(torch.float32 if exact and not paired else second, second, paired)

    @property
    def score_bytes(self) -> int:
        """Bytes of a score and of its weight."""
        return self.first.itemsize * (1 + self.paired) + self.second.itemsize

    def scores(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The products of rows of `a` and rows of `b`, as one tensor or as two to add."""
        turned = b.transpose(1, 2)
        high = torch.bmm(a, turned)
        return (high, torch.baddbmm(high, a, turned, beta=-1)) if self.paired else (high,)


def add_pair(graph: fx.Graph, high: fx.Node, rest: fx.Node) -> fx.Node:
    """The float32 sum of the tensors of `Ways.scores`. Where the first is infinite, the other, NaN, is left out."""

    def call(target: Any, *args: Any) -> fx.Node:
        return graph.call_function(target, args)

    first, second = (graph.call_function(aten._to_copy.default, (n,), {"dtype": torch.float32}) for n in (high, rest))
    kept = call(aten.where.ScalarSelf, call(aten.ne.Tensor, second, second), 0.0, second)
    return call(aten.add.Tensor, first, kept)


@functools.cache
def _adds_unrounded(dtype: torch.dtype) -> bool:
    """Whether `baddbmm` adds to a product of 16-bit floats before it rounds, as oneDNN does; checked once."""
    a = torch.linspace(-3, 3, 4 * 64 * 64, device="cpu").cos().view(4, 64, 64)
    a, b = a.to(dtype), a.sin().transpose(1, 2).to(dtype)
    high = torch.bmm(a, b)
    both = high.double() + torch.baddbmm(high, a, b, beta=-1).double()
    exact = torch.bmm(a.double(), b.double())
    return bool((both - exact).abs().max() <= 2**-12 * exact.abs().max())
