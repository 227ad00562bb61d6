"""What lowering and scheduler know of a device: one frozen record for each device type.

The package's own records are `cpu/target.py` and `cuda/target.py`; a device from outside brings its own to
`fuser.register_fusion_backend`. Nothing below the device folders compares names of devices, with one exception: torch's
own facts of eager (`lowering/corrections.py`), which a record points to by `eager`.
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
HOST = "cpu"  # torch's name for the device of a graph without tensors, and of all that names none
LEAST_WEIGHT = 1 << 16  # elements of a weight, below which a product of few rows is left to libraries


@dataclass(frozen=True)
class Target:
    """A device, as decisions see it. Sizes are in elements where nothing else is said; 0 switches a rule off.

    Eager:
    device_type: torch's name of the device.
    eager: torch's name of the device whose eager kernels give results the same strides and dtypes; "": its own.
    wide_sums: whether eager's kernels add up float32 in float64 where a norm or variance needs it, and products too.
    empty_statistics: whether eager's batch norm returns no statistics outside of training; None: it is not known.
    masks_kinks: whether eager's gradients of functions with a kink keep what a comparison selects (of a NaN: nothing),
      as its kernels of vectors do; else they drop what the opposite comparison selects.

    Kernels:
    dtypes: those that kernels load and store.
    ordered: whether points of a scatter or scan can run one after another. Else scatters need atomic operations, which
      `ReductionRow.atomic` names, and what cannot do with them is left to ATen.
    races: whether a kernel is timed beside ATen before it stays.

    Loops:
    vector_bytes: of a register. Rows too short to fill one are taken side by side.
    dearly_folded: up to so many elements of a row an extreme is looked for across rows.
    column_block, column_bytes: columns that a thread or program takes as one row where the reduced elements are not
      contiguous: a number of them, or what they take of memory.
    sums_by_channel: whether a group norm of channels-last memory adds up each channel first, then the groups.
    split_units, split_work, lane_block: a reduction to fewer units than this, of at least so much work, is cut into
      chunks; along the vector axis `lane_block` results are a unit. A target whose code generator cuts by itself has 0.
    few_rows, long_row: a kernel does not go on with the result of a reduction of fewer and longer rows than this. Of
      columns of `column_bytes` that `cached` does not hold, there are as few up to four times as many.
    rows_at_once, cached: a kernel works on so many rows at a time. It does not go on with results of long rows either,
      if these have more than `cached` elements together: they would be read from memory twice (0: not asked).
    moments: whether one reading of a row gives its sum and its squared distances from what depends on that sum.
    most_buffers: that a kernel may touch.
    scans_alone: whether a scan reads its values from memory rather than compute what other loops need too, and runs
      together with the scan for its places.
    sums_by_dims: whether windows of many elements are summed along one dim after the other.
    window_dims: dims that the windows of a pooling extend along at most, if they overlap.
    unrolls: points of a reduction up to which it is written out as arithmetic, if they lie apart in memory.
    components: elements that the last dim may have for one turn of a loop to compute all of them.
    written_out: the same where what is read along such a dim does not run on into the next one.
    apart: whether what each row or column has one value of, such as a deviation, is computed by the kernel of its
      reduction where another kernel reads it, and not by that one for every element.
    joins: whether plans along rows and along columns are looked at as one.
    joins_stored: elements from which a join that a norm of images reads is written to memory first, as the norm reads
      it again (0: none is).
    square_tiles: whether a loop's tile has two dims, so that operands along rows and along columns are both read in
      runs. Then a kernel of a long reduction stores nothing along another axis than it reads.
    recompute_cost, write_worth: operations that an element may cost to be computed again by each reader, and the reads
      that a write to memory is worth.
    table_work: operations to be spared, from which what is computed from indices alone (positions, angles) is made once
      for readers that would compute each element many times.
    product_rows: rows of a product up to which a kernel of the package makes it.
    """

    device_type: str
    eager: str = ""
    wide_sums: bool = False
    empty_statistics: bool | None = None
    masks_kinks: bool = False
    dtypes: frozenset[torch.dtype] = DTYPES
    ordered: bool = True
    races: bool = False
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
    rows_at_once: int = 0
    cached: int = 0
    moments: bool = False
    most_buffers: int = 48
    scans_alone: bool = False
    square_tiles: bool = False
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
        """How many columns of elements of so many bytes count as one row; 0: their number is not asked."""
        return self.column_block or self.column_bytes // itemsize

    @property
    def like(self) -> str:
        """The device whose eager kernels it follows."""
        return self.eager or self.device_type


OWN: dict[str, Callable[[], Target]] = {}  # the package's, each of which is imported when it is needed
_targets: dict[str, Target] = {}


def keep(target: Target) -> None:
    """Make the record of a device from outside known by its device type."""
    _targets[target.device_type] = target


def forget(device_type: str) -> None:
    """Take such a record away."""
    _targets.pop(device_type, None)


def known(device_type: str) -> Target | None:
    """The record of a device type, if there is one."""
    own = OWN.get(device_type)
    return _targets.get(device_type) or (own() if own is not None else None)


def of(device_type: str) -> Target:
    """The record of a device type. Unsupported if there is none."""
    target = known(device_type)
    if target is None:
        raise Unsupported(because("backend", f"no fusion backend for {device_type}"))
    return target
