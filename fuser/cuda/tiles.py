"""The tiles of kernels: tables, and the rules that read them.

A tile changes a pointwise result only in which multiplications the compiler contracts with additions. A reduction's
bits depend on how its row is cut, so everything that cuts a row depends only on properties that the kernel's guards
check (a class of row lengths), never on the example alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from fuser.lazy_dataclasses import dataclass

MULTIPROCESSORS = 132  # of the device on which the tables were measured


@dataclass(frozen=True)
class Tile:
    """`outer` × `inner` elements by `warps` warps. `inner` runs along the reduced axes, or along the vector axis."""

    outer: int
    inner: int
    warps: int


@dataclass(frozen=True)
class Variant:
    """How a kernel's tiles differ from the tables': the size of the dim that is not reduced, and the warps, by powers
    of two; the stages of its loops (0: the tables'). Only parameters that change no result vary: see
    `reduction_layout`."""

    outer: int = 0
    warps: int = 0
    stages: int = 0

    def __str__(self) -> str:
        parts = [f"tile x{2.0**self.outer:g}"] if self.outer else []
        parts += [f"warps x{2.0**self.warps:g}"] if self.warps else []
        parts += [f"{self.stages} stages"] if self.stages else []
        return ", ".join(parts) or "table"


def scaled(n: int, by: int) -> int:
    """`n` times two to the power of `by`, rounded down."""
    return n << by if by >= 0 else n >> -by


MOST_ELEMENTS, MOST_WARPS = 16384, 16  # limits of a program whose tile is not the tables'


def varied(tile: Tile, v: Variant, warps: bool) -> Tile:
    """The tile changed by `v` within limits; `warps`: their number may change, too."""
    outer = min(max(scaled(tile.outer, v.outer), 1), max(MOST_ELEMENTS // tile.inner, tile.outer))
    number = min(max(scaled(tile.warps, v.warps), 1), max(MOST_WARPS, tile.warps)) if warps else tile.warps
    return Tile(outer, tile.inner, number)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least `n` (and 1)."""
    return 1 << max(n - 1, 0).bit_length()


# Elements of one pointwise program, by the bytes of its narrowest element.
POINTWISE_WARPS = 4
POINTWISE_ELEMENTS = {1: 2048, 2: 2048, 4: 1024, 8: 512}
# The same for random numbers beside byte elements: a thread with more than 16 bytes of a 16-bit float would pass
# values to other threads, and all would wait. Dropout's forward in training takes 0.235 ms; with 2048 elements 0.324.
DRAWN_ELEMENTS = 1024
# Elements of a program that reads windows with a stride, or along a vector axis shorter than this. `max_pool2d` 3x3 by
# 2: 0.066 ms, with tiles of rows 0.131 (bfloat16 0.066, 0.163). `avg_pool2d` 5x5 of 56x56: 0.062 (0.093). Along long
# rows without a stride, tiles of rows are better: `max_pool1d` 3 of 65536 takes 1.05, with this 1.28.
WINDOW_ELEMENTS, WINDOW_ROW = 256, 128
# Tiles of transposed reads; on an H200 as fast as a copy in both directions. Stores to rows at unaligned addresses
# take longer tiles: images of 513x513 from channels-last memory are written at 3.4 TB/s, with square tiles at 2.8.
TRANSPOSED, TRANSPOSED_ODD = Tile(64, 64, 4), Tile(16, 128, 4)
TRANSPOSED_LOADS = 4  # with more loads a tile is half as large, so registers suffice for two programs

# Bytes of operands shared by rows, from which a block of them is read for all rows before the next block. On an H100,
# `x * w + b` takes, for 16 rows of 4 Mi elements, 1.18 of a copy's time (row by row 1.95), for 64 rows of 1 Mi 1.10
# (1.22), for 256 rows of 256 Ki 1.08 (1.03).
SHARED_FROM = 8 << 20

# Kernels that read many neighbours in vectors have programs of twice as many elements, which share a channel's weights.
# Depthwise convolutions with an activation in channels-last memory, ms by cuDNN and another kernel, by one kernel, by
# one with such tiles: bfloat16 64 images of 192x64x64, 3x3 0.141, 0.155, 0.113; by 2 0.061, 0.048, 0.042; of 384x28x28,
# 5x5 0.101, 0.125, 0.093; float32 0.234, 0.192, 0.154; 0.087, 0.070, 0.078; 0.174, 0.178, 0.140.
# Of at most 64 channels: 64 images of 960x16x16, 5x5, float32 take 0.099, with tiles of 1024 channels 0.141.
WINDOW_WIDTHS = 32, 64

SMALL_ELEMENTS = 256  # of a pointwise program if larger ones are too few to fill the device twice
SHORT_VECTOR = 16  # a shorter vector axis is no dim of its own

# Rows up to this length are held in registers: (longest, elements of a program, warps). The warps of one row wait for
# each other, so a short row has one warp. Rows shorter than the first are one class.
SHORTEST_ROW, SHORTEST_COLUMN = 4, 8
PERSISTENT: tuple[tuple[int, int, int], ...] = (
    (32, 1024, 2),
    (512, 512, 1),
    (1024, 1024, 2),
    (2048, 2048, 4),
    (4096, 4096, 8),
    (8192, 8192, 8),
    (16384, 16384, 16),
)
# The same where one tensor is read and little is computed; and where only reduced results are written, so that more
# loads have to be in flight.
PERSISTENT_ONE: tuple[tuple[int, int, int], ...] = ((32, 1024, 2), (64, 512, 1), (512, 1024, 1))
PERSISTENT_READ: tuple[tuple[int, int, int], ...] = (
    (4, 1024, 2), (32, 2048, 2), (64, 1024, 1), (512, 2048, 1), (1024, 2048, 2),
)  # fmt: skip
# Random numbers need many registers for each element.
PERSISTENT_DRAWN: tuple[tuple[int, int, int], ...] = ((128, 1024, 4), (512, 2048, 4), (1024, 1024, 4))
# For other rows where one access of a warp's lanes reads a whole row of more than 32 elements.
PERSISTENT_LANES = (128, 2048, 4)
# Longer rows are looped over, once or several times; in the latter case few rows are in flight, so the cache holds
# them.
LOOPED_ROW = Tile(1, 4096, 8)
LOOPED_ROW_AGAIN = Tile(1, 16384, 32)
LOOPED_ROW_DOUBLE = Tile(1, 8192, 32)  # of float64 values; more would exceed the registers
# Reductions whose results are contiguous in memory, by the bytes of the narrowest reduced element: (longest, results of
# a program, warps). Means of 64 channels-last images of 1024x14x14 take 21.7 µs in bfloat16, with 32 results by 8 warps
# 25.4; in float32 39.2 by 16 warps, by 8 43.6.
_COLUMNS: tuple[tuple[int, int, int], ...] = ((8, 128, 4), (16, 64, 4), (64, 32, 4), (256, 32, 8), (512, 32, 16))
PERSISTENT_COLUMNS = {
    1: _COLUMNS, 2: ((8, 128, 4), (16, 64, 4), (64, 32, 2), (256, 64, 8), (512, 32, 16)),
    4: ((8, 128, 4), (16, 64, 4), (64, 32, 4), (256, 32, 16), (512, 32, 16)), 8: _COLUMNS,
}  # fmt: skip
LONGEST_COLUMN = 512  # of these
# By the bytes of the narrowest reduced element.
LOOPED_COLUMNS = {1: Tile(128, 32, 8), 2: Tile(128, 32, 8), 4: Tile(64, 64, 8), 8: Tile(64, 32, 8)}
# The same for chunks, of which several tiles are in flight, and the number of their programs. Over 15 shapes of batch
# norms' gradients, 512 programs of 8 warps with 128 columns took 1.25 to 1.5 times as long in bfloat16; in float32 528
# programs 1.05 to 1.3 times.
SPLIT_COLUMNS = {1: Tile(128, 32, 8), 2: Tile(64, 32, 4), 4: Tile(64, 32, 4), 8: Tile(64, 32, 8)}
COLUMN_PROGRAMS = {1: 512, 2: 396, 4: 396, 8: 2112}
LEAST_STEPS = 4  # tiles of a chunk: fewer chunks are combined sooner
COLUMN_STAGES = 3  # tiles of a looped column in flight through shared memory; 0: one, through registers
CHUNK_STAGES = 3  # the same for a chunk of a row, if one tensor is read
COMBINE_COLUMNS = Tile(32, 32, 4)
# Elements that the last program of a column's tile takes at a time, by the bytes of the narrowest reduced element; more
# would need more registers than the loop before.
COMBINE_IN_ONE = {1: 1024, 2: 1024, 4: 2048, 8: 1024}

# For few results the reduced axes are cut into chunks of this many elements of a program, within these bounds on the
# number of programs (the upper one by the bytes of the narrowest element).
SPLIT_ELEMENTS, FEWEST_PROGRAMS = 32768, 528
SPLIT_PROGRAMS = {1: 512, 2: 512, 4: 528, 8: 2112}
# A single tensor below this many bytes is loaded to registers, a tile ahead. (NVIDIA's assembler serialises loads that
# the same step uses, to save registers.) Larger ones go through shared memory.
AHEAD_BELOW = 320 << 20
# From this many bytes on, most of the second-level cache, loads should not evict other data: dirty lines of earlier
# kernels would be written back meanwhile. Only loads to registers have such a policy.
PASSING_FROM = 32 << 20
PASSING = ", eviction_policy='evict_first'"
# Known divisors of a size or stride. With 16, all dtypes have 16-byte accesses; with 4, 32-bit dtypes have; with 2,
# 16-bit elements are loaded in pairs, else one by one.
DIVISORS = (16, 4, 2, 1)
VECTOR = 16  # bytes of the widest access of a lane


@dataclass(frozen=True)
class Ahead:
    """Program p takes tiles p, p + programs, p + 2·programs, …; `programs` is their largest number."""

    tile: Tile
    programs: int


# By the bytes of an element, for one reduction; the second table is for several, or index reductions, whose running
# results take more registers.
AHEAD_ROWS = (
    {1: Ahead(Tile(1, 8192, 16), 264), 2: Ahead(Tile(1, 16384, 16), 264),
     4: Ahead(Tile(1, 8192, 16), 264), 8: Ahead(Tile(1, 4096, 16), 264)},
    {1: Ahead(Tile(1, 4096, 8), 528), 2: Ahead(Tile(1, 4096, 8), 528),
     4: Ahead(Tile(1, 2048, 8), 528), 8: Ahead(Tile(1, 1024, 8), 528)},
)  # fmt: skip
AHEAD_COLUMNS = (
    {1: Ahead(Tile(128, 32, 4), 528), 2: Ahead(Tile(64, 64, 4), 528),
     4: Ahead(Tile(32, 64, 4), 1056), 8: Ahead(Tile(16, 64, 4), 1056)},
    {1: Ahead(Tile(128, 16, 4), 528), 2: Ahead(Tile(64, 64, 4), 264),
     4: Ahead(Tile(32, 64, 4), 528), 8: Ahead(Tile(16, 32, 4), 1056)},
)  # fmt: skip
# The same if 16 does not divide the number of columns: elements are loaded one by one.
AHEAD_ODD_COLUMNS = {
    1: Ahead(Tile(128, 32, 8), 528), 2: Ahead(Tile(128, 32, 4), 528),
    4: Ahead(Tile(32, 64, 4), 528), 8: Ahead(Tile(16, 64, 4), 528),
}  # fmt: skip
# Where one program for each block of columns suffices: (least blocks, bytes of an element: rows of a program's step,
# warps). The last entry is for tensors smaller than the second-level cache.
AHEAD_WHOLE_COLUMNS: tuple[tuple[int, dict[int, int], int], ...] = (
    (256, {1: 32, 2: 128, 4: 128, 8: 128}, 8),
    (120, {1: 64, 2: 256, 4: 256, 8: 256}, 16),
    (64, {1: 64, 2: 256, 4: 512, 8: 512}, 32),
)


def whole_columns(blocks: int, width: int, itemsize: int, several: bool, small: bool) -> tuple[int, Tile | None, int]:
    """(least, tile, below): the tile of programs that each take one of `blocks` blocks of `width` columns from top to
    bottom, or None if they are too few; and the range of `blocks` for which this holds (0: no bound). Several running
    results halve a thread's elements."""
    table, below = AHEAD_WHOLE_COLUMNS, 0
    for n, (least, _, _) in enumerate(table if small and not several else table[:2]):
        if blocks >= least:
            _, rows, warps = table[n + several]
            return least, Tile(width, rows[itemsize] >> several, warps), below
        below = least
    return 0, None, below


SPLIT_BELOW = 256  # programs of an unsplit kernel
SPLIT_ROW_FROM, SPLIT_COLUMN_FROM = 32768, 512  # reduced elements
MOST_CHUNKS = 512  # of a split reduction or scan
SPLIT_IN_ONE = True  # a tile's last program combines its chunks, not a second kernel; not for index reductions

# Rows in registers whose columns are reduced as well: (longest, elements of a program's step, warps, programs on each
# multiprocessor). A thread has 16 elements of each tensor and each running result; with several short rows, 8.
WALKED: tuple[tuple[int, int, int, int], ...] = (
    (512, 2048, 8, 2),
    (2048, 2048, 4, 4),
    (4096, 4096, 8, 2),
    (8192, 8192, 16, 1),
)
# The same if 16 does not divide the row length: elements are loaded one by one, a step ahead to registers.
WALKED_ODD: tuple[tuple[int, int, int, int], ...] = ((2048, 2048, 8, 2), (4096, 4096, 16, 1))
WALK_STAGES = 3  # steps in flight: two wait in shared memory
WALK_SHARED = 200 << 10  # most bytes of shared memory for the programs of a multiprocessor
WALK_REGISTERS = 128  # of a thread, so that all programs run at once
WALK_LEVELS = 2  # attempts; the second has twice the threads, then rows and columns get kernels of their own
WALK_MOST = 10  # most tensors and running results
WALK_CROWDED = 16  # bytes of both for an element, from which threads are doubled if a block can have as many
COMBINE_PROGRAMS = Tile(16, 256, 8)  # combines the programs' results

# Scans: rows that are one tile (longest, elements of a program, warps), and tiles of looped scans.
SCANNED_ROWS: tuple[tuple[int, int, int], ...] = ((1024, 1024, 2), (2048, 2048, 2))
SCANNED_PLACES = ((1024, 1024, 4), (2048, 2048, 8), (4096, 4096, 8))  # the same for index scans
# Looped scans by the bytes of an element. Short columns are up to this long.
LOOPED_SCAN = {1: Tile(1, 2048, 8), 2: Tile(1, 2048, 2), 4: Tile(1, 1024, 4), 8: Tile(1, 1024, 8)}
# The same if elements are loaded one by one: a thread's elements are apart, and warps synchronise for each.
LOOPED_SCAN_ODD = {1: Tile(1, 2048, 8), 2: Tile(1, 512, 2), 4: Tile(1, 512, 2), 8: Tile(1, 512, 2)}
LOOPED_PLACES = {1: Tile(1, 1024, 4), 2: Tile(1, 1024, 4), 4: Tile(1, 1024, 4), 8: Tile(1, 1024, 8)}
SCANNED_SHORT_COLUMNS = {1: Tile(32, 32, 4), 2: Tile(32, 32, 4), 4: Tile(32, 32, 4), 8: Tile(32, 16, 4)}
SHORT_COLUMN = 64  # elements of a scanned column up to which one tile holds it
# Longer columns: 64 bytes of neighbours, and enough of them to saturate memory.
SCANNED_COLUMNS = {1: Tile(32, 128, 8), 2: Tile(32, 128, 8), 4: Tile(16, 256, 8), 8: Tile(16, 128, 8)}
PLACED_COLUMNS = {1: Tile(16, 128, 4), 2: Tile(16, 128, 4), 4: Tile(16, 128, 4), 8: Tile(16, 64, 4)}  # index scans
SCAN_STAGES, COLUMN_SCAN_STAGES, PLACED_STAGES = 3, 4, 0  # tiles in flight; the last for index scans along rows
SCAN_COLUMNS_BELOW = 128  # programs for columns, below which each column is cut into chunks
SCAN_PROGRAMS = 1056  # of the chunks into which few long rows are cut


def pointwise_elements(itemsizes: Sequence[int]) -> int:
    """Elements of a program that reads and writes elements of these sizes, if there is work for many programs."""
    elements = POINTWISE_ELEMENTS[min(max(min(itemsizes, default=4), 1), 8)]
    return max(elements // 2, 512) if len(itemsizes) > 4 else elements


def pointwise(n_outer: int, n_inner: int, elements: int, widths: tuple[int, int] | None = None) -> Tile:
    """The tile of `elements` elements for `n_inner` along the vector axis and `n_outer` along all others.

    `widths`: the fewest and most elements along the vector axis, if there are so many.
    """
    least, most = widths or (64, elements)
    inner = min(power_of_two(n_inner), elements, most)
    while inner > least and -(-n_inner // inner) * inner > 1.07 * n_inner:
        inner //= 2
    return Tile(min(elements // inner, power_of_two(n_outer)), inner, POINTWISE_WARPS)


def fitted(tile: Tile, n_outer: int, n_inner: int) -> Tile:
    """A transposed tile as large, and shorter along a dim of which there is less than half a tile."""
    outer, inner = tile.outer, tile.inner
    least, most = TRANSPOSED_ODD.outer, TRANSPOSED_ODD.inner
    while 2 * n_outer <= outer > least and inner < most:
        outer, inner = outer // 2, inner * 2
    while 2 * n_inner <= inner > least and outer < most:
        outer, inner = outer * 2, inner // 2
    return Tile(outer, inner, tile.warps)


def persistent_row(n: int, n_loads: int, table: Sequence[tuple[int, int, int]], itemsize: int) -> Tile | None:
    """The tile that holds whole rows of the class of `n` in registers, None if they do not fit; `table` is tried
    before `PERSISTENT`. `itemsize`: bytes of the narrowest element."""
    length = max(power_of_two(n), SHORTEST_ROW)
    if length * n_loads > 4 * PERSISTENT[-1][0]:
        return None
    in_lanes = 32 < length <= 32 * min(VECTOR // itemsize, divisor_of(n)) and table is not PERSISTENT_DRAWN
    for longest, elements, warps in chain([PERSISTENT_LANES] if in_lanes else [], table, PERSISTENT):
        if length <= longest:
            return Tile(max(elements // length, 1), length, warps)
    return None


@dataclass(frozen=True)
class Walk:
    """Program p takes tiles p, p + programs, … of whole rows."""

    tile: Tile
    programs: int
    by_hand: bool  # the next step is loaded to registers, not through shared memory


def walk(n: int, itemsizes: int, values: int, held: int, smaller: int) -> Walk | None:
    """The tile and number of programs that go over rows of the class of `n`; None if that takes too much. An element
    takes `itemsizes` bytes of memory in all and `values` registers, of which `held` bytes are used. `smaller`: how
    many earlier attempts did not fit."""
    length = max(power_of_two(n), SHORTEST_ROW)
    odd = n % 16 != 0
    found = next((w for w in (WALKED_ODD if odd else WALKED) if length <= w[0]), None)
    if found is None or values > WALK_MOST or smaller >= WALK_LEVELS:
        return None
    _, elements, warps, each = found
    smaller += not odd and each > 1 and held >= WALK_CROWDED
    warps, each = warps << smaller, each >> smaller
    each = each if odd else min(each, WALK_SHARED // max((WALK_STAGES - 1) * elements * itemsizes, 1))
    return Walk(Tile(max(elements // length, 1), length, warps), each * MULTIPROCESSORS, odd) if each else None


def fewer(tile: Tile | None, times: int) -> Tile | None:
    """A tile of whole rows with the number of rows halved `times` times; None if less than one is left."""
    if tile is None or tile.outer >> times == 0:
        return None
    return Tile(tile.outer >> times, tile.inner, tile.warps)


# Widths of tiles for few columns; with a width of 8, NVIDIA's assembler (sm_90) uses 255 registers for a variance.
NARROW, NARROW_MOMENTS = (4, 8, 16, 32, 64), (4, 16, 32, 64)


def narrowed(tile: Tile, columns: int, loop: bool, moments: bool) -> tuple[Tile, int]:
    """The tile for `columns` columns that fill less than half of it; in a `loop` it gets more rows instead. The second
    value is the largest number of columns that would get a narrower tile. `moments`: variances are computed in one
    pass."""
    widths = NARROW_MOMENTS if moments else NARROW
    below = [0, *(w for w in widths if w < min(columns, tile.outer))][-1]
    outer = next((w for w in widths if columns <= w < tile.outer), tile.outer)
    times = tile.outer // outer
    if loop:
        return Tile(outer, tile.inner * times, tile.warps), below
    return Tile(outer, tile.inner, max(tile.warps // times, 1)), below


def shrunk(tile: Tile, times: int) -> Tile:
    """A tile halved `times` times, with the same number of threads."""
    for _ in range(times):
        if tile.outer > 16:
            tile = Tile(tile.outer // 2, tile.inner, tile.warps)
        elif tile.inner > 128:
            tile = Tile(tile.outer, tile.inner // 2, tile.warps)
    return tile


def scanned_row(n: int, rows: Sequence[tuple[int, int, int]]) -> Tile | None:
    """The tile of the table `rows` that holds whole rows of the class of `n`; None if there is none."""
    length = max(power_of_two(n), SHORTEST_ROW)
    found = next(((elements, warps) for longest, elements, warps in rows if length <= longest), None)
    return Tile(max(found[0] // length, 1), length, found[1]) if found is not None else None


def divisor_of(n: int) -> int:
    """The class of a size or stride: the first of `DIVISORS` that divides it."""
    return next(d for d in DIVISORS if n % d == 0)


def row_class(n: int) -> tuple[int, int]:
    """The properties by which kernels that reduce rows of `n` elements differ: the power of two that holds a row, and
    the first of `DIVISORS` that divides `n`. Rows beyond the last power of two are one class (0)."""
    longest = PERSISTENT[-1][0]
    return (max(power_of_two(n), SHORTEST_ROW) if n <= longest else 0), divisor_of(n)


def persistent_column(n: int, itemsize: int) -> Tile | None:
    """The tile that holds whole reduced axes of the class of `n` for a few neighbouring results, or None. `itemsize`:
    bytes of the narrowest element."""
    length = max(power_of_two(n), SHORTEST_COLUMN)
    for longest, results, warps in PERSISTENT_COLUMNS[itemsize]:
        if length <= longest:
            return Tile(results, length, warps)
    return None
