"""The nodes of the IR: `TensorBox → StorageBox → Buffer`, and the loops that fill buffers.

A graph node's result is a `TensorBox`. It points to a `StorageBox`, which several boxes may share (aliases), and holds
at most one `View`, a reindexing of the storage's current `Buffer`. A mutation gives the storage a new buffer; every
box over it sees the new data. A buffer is an input, or computed by one or more loops:
`Pointwise`, `Reduction`, `Scatter` and `Scan`.
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
    """For every point of `domain`, in row-major order, put the body's value at `store_index`, which rows may compute.

    `combine` names the row of `ops.REDUCTIONS` that joins it with what is there; "" replaces that.
    """

    domain: tuple[Expr, ...]
    body: LoopBody
    store_index: Index
    combine: str = ""


@dataclass(frozen=True)
class Scan:
    """For every point of `domain`, store `kind` of the body's values up to this place of the last dim.

    `kind` names a row of `ops.SCANS`.
    """

    domain: tuple[Expr, ...]
    body: LoopBody
    store_index: Index
    kind: str


Loops = Union[Pointwise, Reduction, Scatter, Scan]


@dataclass(eq=False)
class Buffer:
    """Memory of `size` elements of `dtype` with `stride`; `loops` fill it, none for an input.

    `order` lists the dims from outermost to innermost in memory; strides of a computed buffer follow from it. Readers
    load the elements of a `table`. They never compute them themselves.
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
    """Dense strides, in elements, of `size` with the dims of `order` from outermost to innermost."""
    order = order if order is not None else tuple(range(len(size)))
    out: dict[int, Expr] = {}
    for position, dim in enumerate(order):
        out[dim] = product(size[d] for d in order[position + 1 :])
    return tuple(out[d] for d in range(len(size)))


@dataclass(eq=False)
class StorageBox:
    """Shared memory: whoever holds it sees its current buffer."""

    buffer: Buffer


@dataclass(frozen=True)
class View:
    """A reindexing: `size` as seen, `reindex` from a view's index to the storage's."""

    size: tuple[Expr, ...]
    reindex: Callable[[Index], Index]


@dataclass(eq=False)
class TensorBox:
    """A tensor of the graph. `size` in elements; `dtype` as torch has it."""

    storage: StorageBox
    view: View | None = None

    @property
    def size(self) -> tuple[Expr, ...]:
        """The logical size."""
        return self.view.size if self.view is not None else self.storage.buffer.size

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the memory behind it."""
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
