"""Nodes of the vector IR: statements and blocks here, values in `values.py`.

Values have no effect, so one may replace another. Statements are in order. A block is a head (a loop, a test, a
routine, a part for some machines) with statements. A kernel is one function. All nodes are frozen: a pass makes new
ones (`rewrite.py`).
"""

from __future__ import annotations

from typing import Union

import torch

from fuser.cpu.vir.values import *  # noqa: F403
from fuser.cpu.vir.values import Call, Name, Number, Of, Value
from fuser.lazy_dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Let:
    """A new variable. If it is not `const`, it may be assigned to later and may start without a value."""

    kind: str
    name: str
    value: Value | None
    const: bool = True


@dataclass(frozen=True, slots=True)
class Scratch:
    """A local array; `zero`: zero-initialised; `aligned`: its alignment in bytes, 0 for the default."""

    kind: str
    name: str
    sizes: tuple[int, ...]
    aligned: int = 0
    zero: bool = False


@dataclass(frozen=True, slots=True)
class Pointer:
    """A pointer to a buffer argument. `checked`: its number of elements, and the function that checks each offset."""

    kind: str
    name: str
    source: Value
    const: bool
    checked: tuple[Value, str] | None = None


@dataclass(frozen=True, slots=True)
class Set:
    """Assign to a variable or an element, or combine the value with it by the operator `sign`."""

    target: Value
    value: Value
    sign: str = ""


@dataclass(frozen=True, slots=True)
class Store:
    """Write a vector's lanes to memory at `address`, those where `mask` holds; lanes of two vectors alternate.

    `exact`: the float32 values are exactly representable in the bfloat16 `of`; `tame`: see `Round`.
    """

    of: Of
    address: Value
    values: tuple[Value, ...]
    mask: Value | None = None
    exact: bool = False
    tame: bool = False


@dataclass(frozen=True, slots=True)
class Transpose:
    """Transpose `columns` runs of `rows` elements of `size` bytes, `step` apart, into the tile `to`, in whole blocks.

    Without `rows`, each run is `step` elements long and is copied element by element.
    """

    size: int
    source: Value
    step: Value
    to: Value
    rows: Value | None
    columns: Value


@dataclass(frozen=True, slots=True)
class Widen:
    """Convert `count` float16 to float32; elements before `low` or from `high` on become zeros, if these are given."""

    to: Value
    source: Value
    count: Value
    low: Value | None = None
    high: Value | None = None


@dataclass(frozen=True, slots=True)
class Narrow:
    """Convert `count` float32 to float16."""

    to: Value
    source: Value
    count: Value


@dataclass(frozen=True, slots=True)
class Draw:
    """Write `count` random numbers from index `place` on. `word`: which word of each pair is used (2: both in turn)."""

    to: Value
    seed: Value
    stream: Value
    place: Value
    count: Value
    word: int


@dataclass(frozen=True, slots=True)
class ScanBlock:
    """Scan `count` elements by the table row `how`, into `to` if that is given; `acc` is the carry.

    For extremes `place` is the index of the best element so far, `places` receives all indices, and `base` is the
    index of the first element. `total`: only the carry is updated.
    """

    how: str
    element: torch.dtype
    source: Value
    count: Value
    acc: Name
    to: Value | None
    total: bool
    place: Name | None = None
    base: Value | None = None
    places: Value | None = None


@dataclass(frozen=True, slots=True)
class Stream:
    """Write `count` bytes with non-temporal stores."""

    to: Value
    source: Value
    count: Value


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """A fence: earlier non-temporal stores are visible to all threads from here on."""


@dataclass(frozen=True, slots=True)
class Do:
    """Call a function for its effect."""

    call: Call


@dataclass(frozen=True, slots=True)
class Return:
    """Leave the function."""


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Prefetch a cache line; `how`: the builtin's further arguments."""

    address: Value
    how: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Fold:
    """Fold the lanes of `array` into lane 0 as a binary tree of vector operations, so the order is fixed.

    `table` and `name` give the operation that combines two vectors: "sign" is a C++ operator, "wins" selects an
    extreme. With `total`, float32 lanes are folded as float64 and the sum is added to `total`.
    """

    array: str
    dtype: torch.dtype
    lanes: int
    vector_bytes: int
    table: str
    name: str
    total: Value | None = None

    @property
    def folded(self) -> torch.dtype:
        """The dtype in which lanes are folded."""
        return self.dtype if self.total is None else torch.float64


# -- heads of blocks --------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Plain:
    """A scope with names of its own."""


@dataclass(frozen=True, slots=True)
class For:
    """A loop from `low` to below `high`; if `low` is None, the existing variable `name` continues from its value.

    `whole`: only whole steps run. `simd`: iterations are independent except for the variables combined as `joins`
    says. `unroll`: most iterations to unroll, in place of `simd`.
    """

    name: str
    low: Value | None
    high: Value
    step: Value = Number(1)
    whole: bool = False
    simd: bool = False
    joins: str = ""
    unroll: int = 0


@dataclass(frozen=True, slots=True)
class Units:
    """The loop over a kernel's units. The digits of the unit number are variables; the last varies fastest."""

    digits: tuple[tuple[str, Value], ...]


@dataclass(frozen=True, slots=True)
class Segments:
    """A loop over segments of [`low`, `high`), cut at `cuts`, at most `longest` long; `from` and `to` bound each."""

    low: Value
    high: Value
    longest: int
    cuts: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Result:
    """A result that a loop stores: its tile, C++ type `kind`, bytes of an element, and address `memory`."""

    tile: str
    kind: str
    bytes: int
    memory: Value


@dataclass(frozen=True, slots=True)
class Staged:
    """Encloses a loop of `count` elements, at most `length`, at position `place`; it may stage `results`.

    An `At` or `Address` that names a tile belongs to the result of that tile.
    """

    results: tuple[Result, ...]
    place: Value
    length: int
    count: Value


@dataclass(frozen=True, slots=True)
class While:
    """Loop while `test` holds."""

    test: Value


@dataclass(frozen=True, slots=True)
class If:
    """Run the body if `test` holds; `rare`: unlikely."""

    test: Value
    rare: bool = False


@dataclass(frozen=True, slots=True)
class Else:
    """Run the body if the test of the preceding `If` does not hold."""


@dataclass(frozen=True, slots=True)
class Only:
    """Text for machines on which `macro` is not 0; an `Otherwise` after it holds the text for all others."""

    macro: str


@dataclass(frozen=True, slots=True)
class Otherwise:
    """Text for machines that the preceding `Only` excludes."""


@dataclass(frozen=True, slots=True)
class Routine:
    """A lambda inside the function, which sees its variables; `inline`: forced inline."""

    name: str
    params: tuple[tuple[str, str], ...]
    inline: bool = True


Head = Union[Plain, For, Units, Segments, Staged, While, If, Else, Only, Otherwise, Routine]


@dataclass(frozen=True, slots=True)
class Block:
    """A head and its statements."""

    head: Head
    body: tuple[Statement, ...]


Statement = Union[
    Let, Scratch, Pointer, Set, Store, Transpose, Widen, Narrow, Draw, ScanBlock, Stream, StreamEnd, Do, Return,
    Prefetch, Fold, Block,
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Kernel:
    """One function. `checked`: it reports the first out-of-bounds offset in a record of its own.

    `sequential`: its loops carry a dependence from one iteration to the next, so g++ does not vectorise them.
    """

    name: str
    body: tuple[Statement, ...]
    checked: bool = False
    sequential: bool = False
