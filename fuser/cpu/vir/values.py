"""Values of the vector IR: scalars, vectors, masks and pointers. They have no effect.

A vector holds as many elements as a register. `Of` says what its elements are: a dtype, whose elements are held as
float32 (bools as flags, 0 or -1), or a size of 1 or 2 bytes, whose elements are held as bits. A mask has a bit for
each lane.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Union

import torch

from fuser.ir.sizes import Expr, Sym
from fuser.lazy_dataclasses import dataclass


def _binary(sign: str) -> Callable[[Value, Like], Value]:
    return lambda a, b: Binary(sign, a, value(b))


class Value:
    """Base of all values. Python's operators make `Binary` nodes; `same` and `differs` compare for equality."""

    __slots__ = ()
    __add__, __sub__, __mul__ = _binary("+"), _binary("-"), _binary("*")
    __floordiv__, __mod__ = _binary("/"), _binary("%")
    __and__, __or__ = _binary("&"), _binary("|")
    __lt__, __le__, __gt__, __ge__ = _binary("<"), _binary("<="), _binary(">"), _binary(">=")
    same, differs = _binary("=="), _binary("!=")

    def __invert__(self) -> Value:
        return Unary("~", self)

    def __getitem__(self, place: Like) -> At:
        return At(self, value(place))


@dataclass(frozen=True, slots=True)
class Name(Value):
    """A variable, array, pointer or macro."""

    name: str


@dataclass(frozen=True, slots=True)
class Number(Value):
    """A constant of a compute dtype; without a dtype, an integer of the loop nest itself."""

    number: bool | int | float
    dtype: torch.dtype | None = None


@dataclass(frozen=True, slots=True)
class Slot(Value):
    """An argument of the kernel: `kind` is "ptrs", "s" (int64) or "f" (float64)."""

    kind: str
    at: int


@dataclass(frozen=True)
class Scope:
    """The context of a function's index expressions: `ref` gives computed indices, `extents` the loops' lengths.

    `slots`: positions of sizes among the arguments, for code before their names are declared. `lanes`: the axis that
    runs over lanes; `apart`: lane strides at which elements are accessed one by one.
    """

    ref: Callable[[int], Value] = field(compare=False)
    extents: Mapping[Sym, Expr] = field(compare=False)
    slots: Mapping[Sym, int] | None = field(default=None, compare=False)
    lanes: Sym | None = field(default=None, compare=False)
    apart: frozenset[int] = field(default=frozenset(), compare=False)


@dataclass(frozen=True, slots=True)
class Offset(Value):
    """An integer expression over sizes and loop variables; `of` is "place" for an offset (see `text.cpp_expr`)."""

    e: Expr
    of: str
    scope: Scope


@dataclass(frozen=True, slots=True)
class At(Value):
    """An element of an array or of memory, loaded or stored to; `tile`: the tile that may stage it (see `Staged`)."""

    array: Value
    place: Value
    tile: str = ""


@dataclass(frozen=True, slots=True)
class Address(Value):
    """A pointer to an element of memory; `tile`: the tile that may stage the elements from there on (see `Staged`)."""

    buffer: Value
    place: Value
    tile: str = ""


@dataclass(frozen=True, slots=True)
class Unary(Value):
    """A unary operation; `sign` is one of "-" "~" "!" "&" "*"."""

    sign: str
    a: Value


@dataclass(frozen=True, slots=True)
class Binary(Value):
    """Arithmetic, comparison or logic on the loop nest's own C integers."""

    sign: str
    a: Value
    b: Value


@dataclass(frozen=True, slots=True)
class Select(Value):
    """`a` if `test` holds, else `b`; the other one is not evaluated."""

    test: Value
    a: Value
    b: Value


@dataclass(frozen=True, slots=True)
class Cast(Value):
    """C's conversion to the type `kind`."""

    kind: str
    a: Value


@dataclass(frozen=True, slots=True)
class Op(Value):
    """A cell of a table of `fuser.ops`: "op", "lanes" (an op on explicit vectors), "combine", "overtakes" or "step".

    "near" and "lanes_near" are versions for arguments known to be in the interval of `OpRow.near`.
    """

    table: str
    name: str
    dtype: torch.dtype
    args: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Convert(Value):
    """A value of one compute dtype converted to another dtype."""

    source: torch.dtype
    target: torch.dtype
    a: Value


@dataclass(frozen=True, slots=True)
class Round(Value):
    """A float32, or a vector of them, rounded to a 16-bit float; `tame`: its NaNs have zeros in their low 16 bits."""

    dtype: torch.dtype
    a: Value
    tame: bool
    vector: bool = False


@dataclass(frozen=True, slots=True)
class Decode(Value):
    """The compute value of an element in memory; `lone`: by a scalar instruction, in a sequential loop."""

    dtype: torch.dtype
    a: Value
    lone: bool = False


@dataclass(frozen=True, slots=True)
class Encode(Value):
    """The stored form of a compute value; `exact`: the dtype represents it exactly."""

    dtype: torch.dtype
    a: Value
    exact: bool = False
    lone: bool = False


Of = Union[torch.dtype, int]  # a vector's elements: of a dtype, or of so many bytes


@dataclass(frozen=True, slots=True)
class Load(Value):
    """The elements of memory from `address` on, as a vector. Lanes whose `mask` is off are zero and not read.

    `back`: elements at descending addresses, so many or a full vector. `paired`: a lane holds two bfloat16. `step`:
    the stride of the elements, 1 or 2.
    """

    of: Of
    address: Value
    mask: Value | None = None
    back: Value | None = None
    paired: bool = False
    step: int = 1


@dataclass(frozen=True, slots=True)
class First(Value):
    """The mask of the first `count` lanes, of one at least unless elements are moved as bits; `flags`: as flags."""

    of: Of
    count: Value
    flags: bool = False


@dataclass(frozen=True, slots=True)
class Mask(Value):
    """The mask of the lanes whose flags are set; with `any`, whether one is set."""

    flags: Value
    any: bool = False


@dataclass(frozen=True, slots=True)
class Half(Value):
    """The even, or the odd, elements of a vector of bfloat16 pairs, as float32."""

    pairs: Value
    odd: bool


@dataclass(frozen=True, slots=True)
class Blend(Value):
    """The lanes of `a` where `mask` holds, else those of `b`; both vectors hold elements of `of` bytes."""

    of: Of
    mask: Value
    a: Value
    b: Value


@dataclass(frozen=True, slots=True)
class Splat(Value):
    """A vector with the same element in each lane."""

    of: Of
    a: Value


@dataclass(frozen=True, slots=True)
class Gather(Value):
    """An element narrower than a word, of the C++ type `kind`, that each lane loads at an index of its own."""

    kind: str
    buffer: Value
    place: Value


@dataclass(frozen=True, slots=True)
class Fma(Value):
    """`a * b + c` of float32, rounded once."""

    a: Value
    b: Value
    c: Value


@dataclass(frozen=True, slots=True)
class Bound(Value):
    """`a` where `a sign b` holds or `a` is NaN, else `b`: an extreme whose argument `a` is loop-invariant."""

    sign: str
    a: Value
    b: Value


@dataclass(frozen=True, slots=True)
class Call(Value):
    """A call of a helper or routine."""

    function: str
    args: tuple[Value, ...]


Like = Union[Value, str, int]


def value(x: Like) -> Value:
    """`x` as a node: a string is a name, an integer is a constant of the loop nest."""
    return x if isinstance(x, Value) else Name(x) if isinstance(x, str) else Number(x)


def least(a: Like, b: Like) -> Value:
    """The smaller of two integers."""
    return Select(value(a) < b, value(a), value(b))


def call(function: str, *args: Like) -> Call:
    """A call of a helper."""
    return Call(function, tuple(map(value, args)))


__all__ = [
    "Value", "Name", "Number", "Slot", "Scope", "Offset", "At", "Address", "Unary", "Binary", "Select", "Cast", "Op",
    "Convert", "Round", "Decode", "Encode", "Load", "First", "Mask", "Half", "Blend", "Splat", "Gather", "Fma", "Bound",
    "Call", "Like", "Of", "call", "least", "value",
]  # fmt: skip
