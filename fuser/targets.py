"""Targets: all that lowering and scheduler know of a device, one frozen record for each device type.

The package's own records are `cpu/target.py` and `cuda/target.py`; a device from outside passes its own to
`fuser.register_fusion_backend`. No other folder compares names of devices, with one exception: torch's own facts about
eager (`lowering/corrections.py`, `lowering/known_shapes.py`), which a record selects by `eager`.
`tests/null/test_names.py` looks for such comparisons.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fuser.errors import Unsupported
from fuser.lazy_dataclasses import dataclass
from fuser.reasons import because

DTYPES = frozenset(
    {
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.bool,
    }
)  # fmt: skip
HOST = "cpu"  # torch's name for the device of graphs without tensors and of calls without a device
LEAST_WEIGHT = 1 << 16  # elements of a weight, below which libraries compute products of few rows


@dataclass(frozen=True)
class Target:
    """A device as decisions see it. Sizes are in elements unless stated otherwise; 0 disables a rule.

    Eager:
    device_type: torch's name of the device.
    eager: torch's name of a device whose eager kernels give results with the same strides and dtypes; "": its own.
    wide_sums: whether eager's kernels compute norms, variances and products of float32 elements in float64.
    empty_statistics: whether eager's batch norm returns empty statistics outside training; None: unknown.
    masks_kinks: whether eager's gradients of functions with a kink keep what a comparison selects (nothing for NaN),
      as its vector kernels do; else they drop what the opposite comparison selects.
    libraries: the libraries by which eager multiplies, convolves and attends: "onednn", "cublas", "cudnn", "flash".

    Kernels:
    dtypes: dtypes that kernels load and store.
    ordered: whether points of a scatter or scan can run in order. Otherwise scatters need the atomic operations of
      `ReductionRow.atomic`; others run on ATen.
    races: whether a kernel is timed beside ATen before it stays.
    contracts: whether a product and a sum in a kernel may be rounded once, other than in eager.
    templates: dtypes of products that kernels compute together with the operators after them.
    scores, score_gradients: dtypes of attention with a score modification in kernels, and whether these have gradients.

    Loops:
    vector_bytes: of a register. Rows too short to fill one are vectorised across rows.
    dearly_folded: row length up to which extremes are vectorised across rows.
    column_block, column_bytes: columns that a thread or program takes at once, if the reduced elements are not
      contiguous: their number, or their bytes.
    sums_by_channel: whether a group norm in channels-last memory sums each channel first, then the groups.
    split_units, split_work, lane_block: a reduction with fewer units than this, and at least this work, is cut into
      chunks; along the vector axis `lane_block` results are one unit. It is 0 if the code generator cuts by itself.
    few_rows, long_row: a reduction of fewer and longer rows than this is not fused with consumers of its result. Of
      columns by `column_bytes` up to twice as many count as few, and four times if they exceed `cached`. Where several
      tensors are read, columns from `long_column` on are long (0: not asked), and many more count as few.
    rows_at_once, cached: the number of rows that a kernel has in flight. Long rows whose elements in flight exceed
      `cached` are not fused with consumers either: they would be read from memory twice (0: not checked).
    moments: whether one pass over a row gives its sum and its squared distances from a value that depends on the sum.
    most_buffers: the most buffers that a kernel may access.
    scans_alone: whether a scan reads materialised values if other loops need them too, and is fused with the scan of
      its indices.
    sums_by_dims: whether windows of many elements are summed one dim at a time.
    window_dims: the most dims of a pooling's windows, if they overlap.
    unrolls: points of a strided reduction up to which it is unrolled into arithmetic.
    components: the size of the last dim up to which one iteration of a loop may compute all its elements.
    written_out: the same if loads along such a dim are not contiguous with the next outer index.
    apart: whether a value of each row or column that another kernel reads, such as a deviation, is computed by the
      reduction's kernel, not recomputed by the reader for every element.
    joins: whether plans along rows and along columns may be generated as one.
    joins_stored: elements from which a concatenation read by an image norm is materialised first, because the norm
      reads it twice (0: never).
    square_tiles: whether a loop's tile has two dims, so that operands along rows and along columns both have
      contiguous reads. Then a kernel with a long reduction stores nothing along another axis than it reads.
    neighbours: reads of one tensor by each element, from which a loop is bound by arithmetic, and shares no kernel with
      a reduction if tiles have two dims (0: never).
    recompute_cost, write_worth: the most operations of an element for its recomputation by each reader, and the reads
      that cost as much as one write to memory.
    table_work: saved operations from which values computed from indices alone (positions, angles) are materialised for
      readers that would recompute each element many times.
    product_rows: rows of a product up to which a kernel of the package computes it.
    """

    device_type: str
    eager: str = ""
    wide_sums: bool = False
    empty_statistics: bool | None = None
    masks_kinks: bool = False
    libraries: frozenset[str] = frozenset()
    dtypes: frozenset[torch.dtype] = DTYPES
    ordered: bool = True
    races: bool = False
    contracts: bool = False
    templates: tuple[torch.dtype, ...] = ()
    scores: tuple[torch.dtype, ...] = ()
    score_gradients: bool = False
    vector_bytes: int = 0
    dearly_folded: int = 0
    column_block: int = 0
    column_bytes: int = 0
    sums_by_channel: bool = False
    split_units: int = 0
    split_work: int = 0
    lane_block: int = 1
    few_rows: int = 4
    long_row: int = 1 << 18
    long_column: int = 0
    rows_at_once: int = 0
    cached: int = 0
    moments: bool = False
    most_buffers: int = 48
    scans_alone: bool = False
    square_tiles: bool = False
    neighbours: int = 0
    sums_by_dims: bool = True
    window_dims: int = 3
    unrolls: int = 0
    components: int = 0
    written_out: int = 0
    joins: bool = False
    joins_stored: int = 0
    recompute_cost: int = 8
    write_worth: int = 2
    table_work: int = 0
    apart: bool = False
    product_rows: int = 0

    def columns(self, itemsize: int) -> int:
        """The number of columns of elements of `itemsize` bytes that count as one row; 0: not used."""
        return self.column_block or self.column_bytes // itemsize

    @property
    def like(self) -> str:
        """The device whose eager kernels it follows."""
        return self.eager or self.device_type


OWN: dict[str, Callable[[], Target]] = {}  # the package's own; each is imported on demand
_targets: dict[str, Target] = {}


def keep(target: Target) -> None:
    """Register the record of a device from outside by its device type."""
    _targets[target.device_type] = target


def forget(device_type: str) -> None:
    """Remove the record of a device from outside."""
    _targets.pop(device_type, None)


def known(device_type: str) -> Target | None:
    """The record of a device type; None if there is none."""
    own = OWN.get(device_type)
    return _targets.get(device_type) or (own() if own is not None else None)


def is_host(device: torch.device) -> bool:
    """Whether a device's memory is the host's."""
    return device.type == HOST


def like_host(device: torch.device) -> bool:
    """Whether eager's kernels on a device give what those on the host give."""
    target = known(device.type)
    return is_host(device) if target is None else target.like == HOST


def has(device: torch.device, library: str) -> bool:
    """Whether eager computes by a library on a device (`Target.libraries`)."""
    target = known(device.type)
    return target is not None and library in target.libraries


def of(device_type: str) -> Target:
    """The record of a device type. Unsupported if there is none."""
    target = known(device_type)
    if target is None:
        raise Unsupported(because("backend", f"no fusion backend for {device_type}"))
    return target
