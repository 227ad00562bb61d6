"""The nodes of the IR: `TensorBox → StorageBox → Buffer`, and the loops that fill buffers.

A graph node's result is a `TensorBox`. It points to a `StorageBox`, which several boxes may share (aliases), and has at
most one `View`, a reindexing of the storage's current `Buffer`. A mutation gives the storage a new buffer; every box
over it sees the new data. A buffer is an input, or is computed by one or more loops: `Pointwise`, `Reduction`,
`Scatter` and `Scan`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import Union

import torch

from fuser.ir.loop_body import LoopBody, Value, ops
from fuser.ir.sizes import Expr, product
from fuser.lazy_dataclasses import dataclass

Index = tuple[Expr, ...]


@dataclass(frozen=True)
class Pointwise:
    """For every point of `domain`, store the body's value at `store_index` of the buffer."""

    domain: tuple[Expr, ...]
    body: LoopBody
    store_index: Index


@dataclass(frozen=True)
class Reduction:
    """For every point of the first dims of `domain`, reduce the body's values over the last `n_reduced` dims.

    `kind` names a row of `ops.REDUCTIONS`.
    """

    domain: tuple[Expr, ...]
    body: LoopBody
    store_index: Index
    n_reduced: int
    kind: str


@dataclass(frozen=True)
class Scatter:
    """For every point of `domain`, in row-major order, store the body's value at `store_index`, which rows may compute.

    `combine` names the row of `ops.REDUCTIONS` that combines it with the old element; "" replaces the element.
    """

    domain: tuple[Expr, ...]
    body: LoopBody
    store_index: Index
    combine: str = ""


@dataclass(frozen=True)
class Scan:
    """For every point of `domain`, store `kind` of the body's values up to this index along the last dim.

    `kind` names a row of `ops.SCANS`.
    """

    domain: tuple[Expr, ...]
    body: LoopBody
    store_index: Index
    kind: str


Loops = Union[Pointwise, Reduction, Scatter, Scan]


@dataclass(eq=False)
class Buffer:
    """Memory of `size` elements of `dtype` with `stride`; `loops` fill it, unless it is an input.

    `order` lists the dims from outermost to innermost in memory; it determines the strides of a computed buffer. The
    elements of a `table` are always loaded, never recomputed by readers.
    """

    name: str
    dtype: torch.dtype
    size: tuple[Expr, ...]
    stride: tuple[Expr, ...]
    loops: list[Loops] = field(default_factory=list)
    input_number: int = -1
    origin: str = ""
    order: tuple[int, ...] | None = None  # None: row-major
    table: bool = False


def strides_of(size: tuple[Expr, ...], order: tuple[int, ...] | None = None) -> tuple[Expr, ...]:
    """Dense strides, in elements, of `size` with the dims in `order`, outermost first."""
    order = order if order is not None else tuple(range(len(size)))
    out: dict[int, Expr] = {}
    for position, dim in enumerate(order):
        out[dim] = product(size[d] for d in order[position + 1 :])
    return tuple(out[d] for d in range(len(size)))


@dataclass(eq=False)
class StorageBox:
    """Storage shared by aliases, all of which see its current buffer."""

    buffer: Buffer


@dataclass(frozen=True)
class View:
    """A reindexing: the logical `size`, and `reindex` from an index of the view to one of the storage."""

    size: tuple[Expr, ...]
    reindex: Callable[[Index], Index]


@dataclass(eq=False)
class TensorBox:
    """A tensor of the graph: a storage, and a view of it if there is one."""

    storage: StorageBox
    view: View | None = None

    @property
    def size(self) -> tuple[Expr, ...]:
        """The logical size."""
        return self.view.size if self.view is not None else self.storage.buffer.size

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the storage."""
        return self.storage.buffer.dtype

    def load(self, index: Index) -> Value:
        """The element at `index`, in compute dtype (to be called inside an `inner_fn`)."""
        buffer = self.storage.buffer
        return ops.load(buffer.name, self.view.reindex(index) if self.view else index, buffer.dtype)

    def viewed(self, size: tuple[Expr, ...], reindex: Callable[[Index], Index]) -> TensorBox:
        """A view of this box; views compose into one."""
        outer = self.view
        if outer is None:
            return TensorBox(self.storage, View(size, reindex))
        return TensorBox(self.storage, View(size, lambda index: outer.reindex(reindex(index))))
