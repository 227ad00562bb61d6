"""Nodes of the vector IR.

Values have no effect and may be written in place of each other; statements are in order; a block is a head (a loop, a
test, a routine, a part for some machines) with statements. A function is a kernel. All nodes are frozen: a pass makes
new ones (`rewrite.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Union

import torch

from fuser.ir.sizes import Expr, Sym


class Value:
    """Base of what has a value. Python's operators make `Binary` nodes; `same` and `differs` compare for equality."""

    __slots__ = ()

    def __add__(self, other: Like) -> Value:
        return Binary("+", self, value(other))

    def __sub__(self, other: Like) -> Value:
        return Binary("-", self, value(other))

    def __mul__(self, other: Like) -> Value:
        return Binary("*", self, value(other))

    def __floordiv__(self, other: Like) -> Value:
        return Binary("/", self, value(other))

    def __mod__(self, other: Like) -> Value:
        return Binary("%", self, value(other))

    def __and__(self, other: Like) -> Value:
        return Binary("&", self, value(other))

    def __or__(self, other: Like) -> Value:
        return Binary("|", self, value(other))

    def __lt__(self, other: Like) -> Value:
        return Binary("<", self, value(other))

    def __le__(self, other: Like) -> Value:
        return Binary("<=", self, value(other))

    def __gt__(self, other: Like) -> Value:
        return Binary(">", self, value(other))

    def __ge__(self, other: Like) -> Value:
        return Binary(">=", self, value(other))

    def __invert__(self) -> Value:
        return Unary("~", self)

    def same(self, other: Like) -> Value:
        """Whether both are equal."""
        return Binary("==", self, value(other))

    def differs(self, other: Like) -> Value:
        """Whether both are not."""
        return Binary("!=", self, value(other))

    def __getitem__(self, place: Like) -> At:
        return At(self, value(place))


@dataclass(frozen=True, slots=True)
class Name(Value):
    """A variable, array, pointer or macro."""

    name: str


@dataclass(frozen=True, slots=True)
class Number(Value):
    """A constant of a compute dtype; without one, an integer of the nest itself."""

    number: bool | int | float
    dtype: torch.dtype | None = None


@dataclass(frozen=True, slots=True)
class Slot(Value):
    """An argument of the kernel: `kind` is "ptrs", "s" or "f"."""

    kind: str
    at: int


@dataclass(frozen=True)
class Scope:
    """What index expressions of one function mean: computed indices, and the loops' extents.

    `slots`: where sizes are among the arguments, for what comes before their names.
    """

    ref: Callable[[int], Value] = field(compare=False)
    extents: Mapping[Sym, Expr] = field(compare=False)
    slots: Mapping[Sym, int] | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Offset(Value):
    """An integer expression over sizes and loops; `of` is "place" for an offset into memory (see `text.cpp_expr`)."""

    e: Expr
    of: str
    scope: Scope


@dataclass(frozen=True, slots=True)
class At(Value):
    """An element of an array or of memory: a load, or where a store goes."""

    array: Value
    place: Value


@dataclass(frozen=True, slots=True)
class Address(Value):
    """A pointer to an element of memory."""

    buffer: Value
    place: Value


@dataclass(frozen=True, slots=True)
class Unary(Value):
    """`sign` is one of "-" "~" "!" "&" "*"."""

    sign: str
    a: Value


@dataclass(frozen=True, slots=True)
class Binary(Value):
    """Arithmetic, comparison and logic of the nest itself, in C's integers."""

    sign: str
    a: Value
    b: Value


@dataclass(frozen=True, slots=True)
class Select(Value):
    """`a` where `test` holds, else `b`; the other one is not evaluated."""

    test: Value
    a: Value
    b: Value


@dataclass(frozen=True, slots=True)
class Cast(Value):
    """C's conversion to a type."""

    kind: str
    a: Value


@dataclass(frozen=True, slots=True)
class Op(Value):
    """A cell of a table of `fuser.ops`: "op", "lanes" (an op on explicit vectors), "combine", "overtakes" or "step"."""

    table: str
    name: str
    dtype: torch.dtype
    args: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Convert(Value):
    """A value of one compute dtype as another dtype."""

    source: torch.dtype
    target: torch.dtype
    a: Value


@dataclass(frozen=True, slots=True)
class Round(Value):
    """A float32 rounded to a 16-bit float; `tame`: its NaNs have zeros in their low 16 bits."""

    dtype: torch.dtype
    a: Value
    tame: bool


@dataclass(frozen=True, slots=True)
class Decode(Value):
    """The compute value of an element in memory; `lone`: in a chain of which no vectors are made."""

    dtype: torch.dtype
    a: Value
    lone: bool = False


@dataclass(frozen=True, slots=True)
class Encode(Value):
    """What to store for a compute value; `exact`: the dtype has that very value."""

    dtype: torch.dtype
    a: Value
    exact: bool = False
    lone: bool = False


@dataclass(frozen=True, slots=True)
class Splat(Value):
    """A vector with the same element in each lane."""

    kind: str
    a: Value


@dataclass(frozen=True, slots=True)
class Bound(Value):
    """`a` where `a sign b` holds or `a` is NaN, else `b`: an extreme whose first argument is fixed in the loop."""

    sign: str
    a: Value
    b: Value


@dataclass(frozen=True, slots=True)
class Call(Value):
    """A helper or routine."""

    function: str
    args: tuple[Value, ...]


Like = Union[Value, str, int]


def value(x: Like) -> Value:
    """A node: strings are names, integers are the nest's own."""
    return x if isinstance(x, Value) else Name(x) if isinstance(x, str) else Number(x)


def least(a: Like, b: Like) -> Value:
    """The smaller of two integers."""
    return Select(value(a) < b, value(a), value(b))


def call(function: str, *args: Like) -> Call:
    """A call of a helper."""
    return Call(function, tuple(map(value, args)))


# -- statements -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Let:
    """A new variable, which is assigned to later if it is not `const`; without a value it has none yet."""

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
    """

    array: str
    dtype: torch.dtype
    lanes: int
    vector_bytes: int
    table: str
    name: str


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


Head = Union[Plain, For, Units, Segments, While, If, Else, Only, Otherwise, Routine]


@dataclass(frozen=True, slots=True)
class Block:
    """A head and what it holds."""

    head: Head
    body: tuple[Statement, ...]


Statement = Union[Let, Scratch, Pointer, Set, Do, Return, Prefetch, Fold, Block]


@dataclass(frozen=True, slots=True)
class Kernel:
    """One function. `checked`: it has a record of its own of the first offset outside of a buffer."""

    name: str
    body: tuple[Statement, ...]
    checked: bool = False
