"""Tensors of the same values in memory of every kind, and the calls that a comparison of layouts is made of."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import torch

Layout = Callable[[torch.Tensor], "torch.Tensor | None"]


def dense(size: Sequence[int], order: Sequence[int]) -> list[int]:
    """Dense strides with the dims of `order` from outermost to innermost."""
    out, running = [0] * len(size), 1
    for d in reversed(order):
        out[d], running = running, running * max(size[d], 1)
    return out


def with_strides(x: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """A copy of `x` in memory of these strides."""
    span = 1 + sum((n - 1) * s for n, s in zip(x.shape, strides)) if x.numel() else 1
    out = torch.zeros(span, dtype=x.dtype, device=x.device).as_strided(x.shape, strides)
    return out.copy_(x) if x.numel() else out


def _ordered(order: Callable[[int], Sequence[int]], least: int, most: int = 9, gap: int = 0) -> Layout:
    """Dims in an order, for tensors of `least` to `most` dims; `gap` more elements in the innermost dim's memory."""

    def make(x: torch.Tensor) -> torch.Tensor | None:
        if not least <= x.dim() <= most:
            return None
        dims = order(x.dim())
        wide = [n + gap * (d == dims[-1]) for d, n in enumerate(x.shape)]
        return with_strides(x, dense(wide, dims))

    return make


def _expanded(dim: int) -> Layout:
    def make(x: torch.Tensor) -> torch.Tensor | None:
        if x.dim() < 1 or x.shape[dim] < 2:
            return None
        return x.narrow(dim % x.dim(), 0, 1).contiguous().expand(x.shape)

    return make


def _narrow(dim: int, count: int, source: Layout) -> Layout:
    """`count` elements of a dim of the tensor that `source` lays out."""

    def make(x: torch.Tensor) -> torch.Tensor | None:
        whole = source(x) if x.dim() > dim and x.shape[dim] > count else None
        return None if whole is None else whole.narrow(dim, 0, count)

    return make


def _odd(x: torch.Tensor) -> torch.Tensor | None:
    """Strides that mean nothing, in dims of one element."""
    strides = dense(x.shape, range(x.dim()))
    return with_strides(x, [7 if n == 1 else s for n, s in zip(x.shape, strides)]) if 1 in x.shape else None


def _then(source: Layout, cut: Layout) -> Layout:
    def make(x: torch.Tensor) -> torch.Tensor | None:
        part = cut(x)
        return None if part is None else source(part)

    return make


_row_major = _ordered(range, 0)
_channels_last = _ordered(lambda n: [0, *range(2, n), 1], 4, 5)
LAYOUTS: dict[str, Layout] = {
    "row_major": _row_major,
    "channels_last": _channels_last,
    "reversed": _ordered(lambda n: range(n)[::-1], 2),
    "transposed": _ordered(lambda n: [*range(n - 2), n - 1, n - 2], 2),
    "rotated": _ordered(lambda n: [*range(1, n), 0], 3),
    "stepped": lambda x: with_strides(x, [2 * s for s in dense(x.shape, range(x.dim()))]) if x.dim() else None,
    "gaps": _ordered(range, 2, gap=3),
    "channels_last_gaps": _ordered(lambda n: [0, *range(2, n), 1], 4, 5, gap=3),
    "expanded_outer": _expanded(0),
    "expanded_inner": _expanded(-1),
    "odd_ones": _odd,
    "one_row": _narrow(0, 1, _row_major),
    "one_image": _narrow(0, 1, _channels_last),
    "one_channel": _narrow(1, 1, _row_major),
    "one_channel_last": _then(_channels_last, _narrow(1, 1, _row_major)),
    "channel_of_many": _narrow(1, 1, _channels_last),
    "no_rows": _narrow(0, 0, _row_major),
    "no_images": _narrow(0, 0, _channels_last),
    "no_channels": _narrow(1, 0, _row_major),
}


def in_layouts(
    tensors: Sequence[torch.Tensor], names: Sequence[str], cut: bool = True
) -> Iterator[tuple[str, tuple[torch.Tensor, ...]]]:  # fmt: skip
    """The tensors with all, the first, or all but the first in each layout; each set of sizes and strides once.

    `cut`: also layouts of other sizes.
    """
    seen = set()
    for name in names:
        for which in (range(len(tensors)), range(1), range(1, len(tensors))):
            made = [LAYOUTS[name](t) if i in which else t for i, t in enumerate(tensors)]
            found = tuple(t if m is None else m for t, m in zip(tensors, made))
            form = tuple((tuple(t.shape), t.stride()) for t in found)
            resized = any(a.shape != b.shape for a, b in zip(found, tensors))
            if form not in seen and (cut or not resized):
                seen.add(form)
                yield f"{name} {form}", found


def some_layouts(seed: object, most: int) -> list[str]:
    """The first layouts, and others drawn by `seed`, `most` in all."""
    first = ["channels_last", "reversed"]
    rest = [name for name in LAYOUTS if name not in first]
    return [*first, *random.Random(str(seed)).sample(rest, max(0, min(most, len(LAYOUTS)) - len(first)))]
