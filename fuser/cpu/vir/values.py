"""Values of the vector IR: scalars, vectors, masks and pointers. They have no effect.

A vector holds as many elements as a register. It is made `of` a dtype, whose elements it has as float32 (bools as
flags, 0 or -1), or of elements of 1 or 2 bytes, which it has as they are. A mask has a bit for each lane.
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
    """Base of what has a value. Python's operators make `Binary` nodes; `same` and `differs` compare for equality."""

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

    `slots`: where sizes are among the arguments, for what comes before their names. `lanes`: the axis that runs over
    lanes; `apart`: distances between lanes at which elements are taken one by one.
    """

    ref: Callable[[int], Value] = field(compare=False)
    extents: Mapping[Sym, Expr] = field(compare=False)
    slots: Mapping[Sym, int] | None = field(default=None, compare=False)
    lanes: Sym | None = field(default=None, compare=False)
    apart: frozenset[int] = field(default=frozenset(), compare=False)


@dataclass(frozen=True, slots=True)
class Offset(Value):
    """An integer expression over sizes and loops; `of` is "place" for an offset into memory (see `text.cpp_expr`)."""

    e: Expr
    of: str
    scope: Scope


@dataclass(frozen=True, slots=True)
class At(Value):
    """An element of an array or of memory: a load, or where a store goes; `tile`: what stages it (see `Staged`)."""

    array: Value
    place: Value
    tile: str = ""


@dataclass(frozen=True, slots=True)
class Address(Value):
    """A pointer to an element of memory; `tile`: what stages the elements from there on (see `Staged`)."""

    buffer: Value
    place: Value
    tile: str = ""


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
    """A cell of a table of `fuser.ops`: "op", "lanes" (an op on explicit vectors), "combine", "overtakes" or "step".

    "near" and "lanes_near" are ops whose argument lies in the interval that `OpRow.near` is for.
    """

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
    """A float32 rounded to a 16-bit float, or a vector; `tame`: its NaNs have zeros in their low 16 bits."""

    dtype: torch.dtype
    a: Value
    tame: bool
    vector: bool = False


@dataclass(frozen=True, slots=True)
class Decode(Value):
    """The compute value of an element in memory; `lone`: by a scalar instruction, in a loop that is not vectorised."""

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


Of = Union[torch.dtype, int]  # what vectors are made of: a dtype, or elements of so many bytes


@dataclass(frozen=True, slots=True)
class Load(Value):
    """The elements of memory from `address` on, as a vector. Where `mask` does not hold, nothing is read: zeros.

    `back`: the elements from `address` backwards, so many or all that lanes hold. `paired`: two bfloat16 in a lane.
    `step`: how far apart the elements are, 1 or 2.
    """

    of: Of
    address: Value
    mask: Value | None = None
    back: Value | None = None
    paired: bool = False
    step: int = 1


@dataclass(frozen=True, slots=True)
class First(Value):
    """The mask of the first `count` lanes, 1 at least unless elements are moved, or of all; `flags`: as flags."""

    of: Of
    count: Value
    flags: bool = False


@dataclass(frozen=True, slots=True)
class Mask(Value):
    """The mask of the lanes whose flags are set; or whether one is, if `any`."""

    flags: Value
    any: bool = False


@dataclass(frozen=True, slots=True)
class Half(Value):
    """Of a paired vector of bfloat16, the even elements as float32, or the odd ones."""

    pairs: Value
    odd: bool


@dataclass(frozen=True, slots=True)
class Blend(Value):
    """The lanes of `a` where `mask` holds, else those of `b`; both vectors are of elements of `of` bytes."""

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
    """An element of less than a word that lanes look up, of the C++ type `kind`."""

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


__all__ = [
    "Value", "Name", "Number", "Slot", "Scope", "Offset", "At", "Address", "Unary", "Binary", "Select", "Cast", "Op",
    "Convert", "Round", "Decode", "Encode", "Load", "First", "Mask", "Half", "Blend", "Splat", "Gather", "Fma", "Bound",
    "Call", "Like", "Of", "call", "least", "value",
]  # fmt: skip
