"""Nodes of the vector IR: statements and blocks here, values in `values.py`.

Values have no effect and may be written in place of each other; statements are in order; a block is a head (a loop, a
test, a routine, a part for some machines) with statements. A function is a kernel. All nodes are frozen: a pass makes
new ones (`rewrite.py`).
"""

from __future__ import annotations

from typing import Union

import torch

from fuser.cpu.vir.values import *  # noqa: F403
from fuser.cpu.vir.values import Call, Name, Number, Of, Value
from fuser.lazy_dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Let:
    """A new variable. If it is not `const`, it may be assigned to later, and may have no value yet."""

    kind: str
    name: str
    value: Value | None
    const: bool = True


@dataclass(frozen=True, slots=True)
class Scratch:
    """A local array, zero if `zero`; `aligned` to so many bytes, if to any."""

    kind: str
    name: str
    sizes: tuple[int, ...]
    aligned: int = 0
    zero: bool = False


@dataclass(frozen=True, slots=True)
class Pointer:
    """A buffer among the arguments; `checked`: its elements, and the function that checks each offset into it."""

    kind: str
    name: str
    source: Value
    const: bool
    checked: tuple[Value, str] | None = None


@dataclass(frozen=True, slots=True)
class Set:
    """Assign to a variable or an element, or join to it by `sign`."""

    target: Value
    value: Value
    sign: str = ""


@dataclass(frozen=True, slots=True)
class Store:
    """Write a vector's lanes to memory from `address` on, those where `mask` holds; or of two vectors, each in turn.

    `exact`: the values of a vector of float32 are ones of the dtype `of`, a bfloat16; `tame`: see `Round`.
    """

    of: Of
    address: Value
    values: tuple[Value, ...]
    mask: Value | None = None
    exact: bool = False
    tame: bool = False


@dataclass(frozen=True, slots=True)
class Transpose:
    """Read `columns` runs of `rows` elements of `size` bytes, `step` apart, as rows of a tile `to`: whole blocks.

    Without `rows` each run is `step` long and is taken apart element by element.
    """

    size: int
    source: Value
    step: Value
    to: Value
    rows: Value | None
    columns: Value


@dataclass(frozen=True, slots=True)
class Widen:
    """Write `count` float16 as float32; zeros for those before the element `low` and from `high` on, if given."""

    to: Value
    source: Value
    count: Value
    low: Value | None = None
    high: Value | None = None


@dataclass(frozen=True, slots=True)
class Narrow:
    """Write `count` float32 as float16."""

    to: Value
    source: Value
    count: Value


@dataclass(frozen=True, slots=True)
class Draw:
    """Write `count` random numbers from `place` on; of each pair of words the one that `word` says (2: in turn)."""

    to: Value
    seed: Value
    stream: Value
    place: Value
    count: Value
    word: int


@dataclass(frozen=True, slots=True)
class ScanBlock:
    """Scan `count` elements by the row `how` of the table, into `to` if that is given; `acc` is the carry.

    For extremes `place` is the index so far, `places` gets all indices, and `base` is the index of the first element.
    `total`: nothing is written but the carry.
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
    """Write `count` bytes past the cache."""

    to: Value
    source: Value
    count: Value


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """What was written past the cache is seen by all from here on."""


@dataclass(frozen=True, slots=True)
class Do:
    """A call for its effect."""

    call: Call


@dataclass(frozen=True, slots=True)
class Return:
    """Leave the function."""


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Ask for a line of memory ahead of its use; `how`: the builtin's further arguments."""

    address: Value
    how: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Fold:
    """Fold the lanes of `array` into its first one, halving, in vectors: the fixed order of a tree.

    `table` and `name` are the cell that joins two vectors; "sign" is an operator, "wins" what picks an extreme.
    `total`: the lanes of float32 are folded as float64 and added to that.
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
        """The dtype of what is folded."""
        return self.dtype if self.total is None else torch.float64


# -- heads of blocks --------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Plain:
    """Statements with names of their own."""


@dataclass(frozen=True, slots=True)
class For:
    """A loop from `low` below `high`; with no `low`, the variable `name` goes on from where it is.

    `whole`: as long as whole steps fit. `simd`: turns do not depend on each other, but for variables that they join as
    `joins` says. `unroll`: most turns that are written out, in place of `simd`.
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
    """The loop over a kernel's units; the digits of a unit's number are variables, the last running fastest."""

    digits: tuple[tuple[str, Value], ...]


@dataclass(frozen=True, slots=True)
class Segments:
    """A loop from `low` to `high` in segments of at most `longest`, cut at `cuts`; each is from `from` to `to`."""

    low: Value
    high: Value
    longest: int
    cuts: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Result:
    """Elements of the C++ type `kind`, of so many bytes each, that go to `memory` and on."""

    tile: str
    kind: str
    bytes: int
    memory: Value


@dataclass(frozen=True, slots=True)
class Staged:
    """Around a loop of `count` elements, at most `length`, of which it takes element `place`: it may stage `results`.

    Places in memory with the name of a tile belong to the result of that name.
    """

    results: tuple[Result, ...]
    place: Value
    length: int
    count: Value


@dataclass(frozen=True, slots=True)
class While:
    """As long as `test` holds."""

    test: Value


@dataclass(frozen=True, slots=True)
class If:
    """Where `test` holds; `rare`: seldom."""

    test: Value
    rare: bool = False


@dataclass(frozen=True, slots=True)
class Else:
    """Where the test of the block before does not hold."""


@dataclass(frozen=True, slots=True)
class Only:
    """For machines of whose text `macro` is not 0, or in the block after it for all others."""

    macro: str


@dataclass(frozen=True, slots=True)
class Otherwise:
    """For machines that the block before is not for."""


@dataclass(frozen=True, slots=True)
class Routine:
    """A function inside the function, which sees its variables; `inline` wherever it is called."""

    name: str
    params: tuple[tuple[str, str], ...]
    inline: bool = True


Head = Union[Plain, For, Units, Segments, Staged, While, If, Else, Only, Otherwise, Routine]


@dataclass(frozen=True, slots=True)
class Block:
    """A head and what it holds."""

    head: Head
    body: tuple[Statement, ...]


Statement = Union[
    Let, Scratch, Pointer, Set, Store, Transpose, Widen, Narrow, Draw, ScanBlock, Stream, StreamEnd, Do, Return,
    Prefetch, Fold, Block,
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Kernel:
    """One function. `checked`: it has a record of its own of the first offset outside of a buffer.

    `sequential`: g++ does not vectorise its loops, each turn of which waits for the one before.
    """

    name: str
    body: tuple[Statement, ...]
    checked: bool = False
    sequential: bool = False
