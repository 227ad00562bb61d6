"""Small pieces of Triton text: parameters of a kernel, expressions over sizes, indented lines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field

import torch

from fuser.cuda.tiles import DIVISORS, VECTOR, divisor_of
from fuser.ir.ranges import NO_LOOPS, Extents, is_nonnegative
from fuser.ir.sizes import INDIRECT, LOOP, ONE, Call, Expr, Sym, expr, mod, symbols
from fuser.lazy_dataclasses import dataclass
from fuser.ops import TRITON_POINTERS


@dataclass(frozen=True)
class Param:
    """An argument of a kernel. `kind` is "pointer", "int32", "int64" or "float64".

    `value` is a buffer's name, an expression over sizes, or a scalar input's name. `divisor` is known to divide a
    pointer or number.
    """

    name: str
    kind: str
    value: str | Expr
    type: str
    divisor: int


Guard = tuple[str, Expr, Expr]


@dataclass
class Params:
    """The parameters of one kernel in the order of first use, and the guards of their divisors.

    `hint` gives an expression's value in the example, `aligned` says which buffers start at a multiple of 16 bytes,
    `extents` gives the ranges of loop variables.
    """

    hint: Callable[[Expr], int]
    aligned: Callable[[str], bool]
    dtypes: Mapping[str, torch.dtype]
    extents: Extents = field(default_factory=lambda: NO_LOOPS)
    known: dict[str, Param] = field(default_factory=dict)
    guards: dict[Guard, None] = field(default_factory=dict)
    _numbers: dict[tuple[Expr, str], str] = field(default_factory=dict)

    def pointer(self, buffer: str) -> str:
        """The parameter that points to a buffer."""
        if buffer not in self.known:
            kind = TRITON_POINTERS[self.dtypes[buffer]]
            self.known[buffer] = Param(buffer, "pointer", buffer, kind, VECTOR if self.aligned(buffer) else 1)
        return buffer

    def scalar(self, name: str) -> str:
        """The parameter of a float input."""
        key = f"f_{name}"
        self.known.setdefault(key, Param(key, "float64", name, "fp64", 1))
        return key

    def number(self, e: Expr, bits: int, name: str = "", matters: bool = False) -> str:
        """The text of a number that is constant in a launch: a literal, or a parameter computed by the launcher.

        `matters`: its divisibility decides how wide accesses are, so the kernel is for one class of it (`divisor_of`).
        """
        value = e.as_int()
        if value is not None:
            return str(value) if value >= 0 else f"({value})"
        kind = f"int{bits}"
        known = self._numbers.get((e, kind))
        if known is None:
            known = name if name and name not in self.known else f"s{len(self._numbers)}"
            self._numbers[e, kind] = known
            self.known[known] = Param(known, kind, e, f"i{bits}", 1)
        if matters and self.known[known].divisor == 1:
            divisor = divisor_of(self.hint(e))
            self.guards.update(dict.fromkeys(divisor_class(e, divisor)))
            old = self.known[known]
            self.known[known] = Param(old.name, old.kind, old.value, old.type, divisor)
        return known


def divisor_class(e: Expr, divisor: int) -> list[Guard]:
    """Guards for numbers that `divisor` divides, but not the next larger one in `DIVISORS`."""
    more = [("ne", d) for d in DIVISORS[:DIVISORS.index(divisor)][-1:]]
    rests = [(relation, mod(e, expr(d))) for relation, d in [("eq", divisor), *more]]
    return [(relation, rest, expr(0)) for relation, rest in rests if rest.as_int() is None]


def triton_expr(e: Expr, params: Params, bits: int, name: Callable[[Sym], str], matters: bool = False) -> str:
    """An integer expression over loop variables, in `bits` bits; its launch-constant factors become parameters."""
    parts = []
    for moving, factor in fixed_factors(e).items():
        factors = [name(a) if isinstance(a, Sym) else _call(a, params, bits, name) for a in moving]
        if factor != ONE or not factors:
            factors.append(params.number(factor, bits, matters=matters))
        parts.append(" * ".join(factors))
    return " + ".join(parts) or "0"


def fixed_factors(e: Expr) -> dict[tuple[Sym | Call, ...], Expr]:
    """The terms of `e`, as product of the symbols that vary in a launch → its launch-constant factor."""
    out: dict[tuple[Sym | Call, ...], Expr] = {}
    for monomial, c in e.terms:
        moving = tuple(a for a in monomial if _moves(a))
        out[moving] = out.get(moving, expr(0)) + Expr({tuple(a for a in monomial if not _moves(a)): c})
    return out


def _moves(a: Sym | Call) -> bool:
    if isinstance(a, Sym):
        return a.kind in (LOOP, INDIRECT)
    return any(s.kind in (LOOP, INDIRECT) for e in a.args for s in symbols(e))


def _call(c: Call, params: Params, bits: int, name: Callable[[Sym], str]) -> str:
    a, b = (triton_expr(e, params, bits, name) for e in c.args)
    if c.fn in ("min", "max"):
        return f"tl.{c.fn}imum({a}, {b})"
    helper = "fuser_floor_div_int" if c.fn == "floordiv" else "fuser_remainder_int"
    if all(is_nonnegative(x, params.extents) for x in c.args):  # Triton's `//` and `%` truncate
        return f"(({a}) {'//' if c.fn == 'floordiv' else '%'} ({b}))"
    return f"{helper}({a}, ({b}) + tl.zeros_like({a}))"


class Lines:
    """Indented lines of a source."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.depth = 1

    def add(self, text: str) -> None:
        """Append one line at the current depth."""
        self.lines.append("    " * self.depth + text)

    def open(self, text: str) -> None:
        """Append a line that opens a block."""
        self.add(text + ":")
        self.depth += 1

    def close(self) -> None:
        """End the block."""
        self.depth -= 1
