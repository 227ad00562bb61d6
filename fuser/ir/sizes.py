"""Integer expressions for sizes, strides and indices.

An `Expr` is a polynomial with integer coefficients over *atoms*: symbols, and floor divisions, remainders, minima and
maxima of other expressions. It is kept in a normal form, so that equal polynomials compare, hash and print alike in
every process. This is the small part of `sympy` that a fusion compiler needs for each index. It is reimplemented
because importing and running `sympy` costs more than compiling a kernel. `to_sympy` and `from_sympy` convert at the
frontends, where sizes come from `torch.fx`'s shape environment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from typing import Any, Union

from fuser.lazy_dataclasses import dataclass

# Kinds of symbol. A "size" is nonnegative and fixed for a run; a "stride" is any integer, fixed for a run; a "loop"
# variable runs from 0 to its size - 1; an "indirect" symbol is the value of an `indirect` row of the same loop body,
# which is 0 where it would be out of range.
SIZE, STRIDE, LOOP, INDIRECT = "size", "stride", "loop", "indirect"


@dataclass(frozen=True, slots=True)
class Sym:
    """A named integer. `name` is unique within a kernel plan. `row` is the row of an "indirect" one."""

    name: str
    kind: str = SIZE
    row: int | None = field(default=None, compare=False)

    def __lt__(self, other: Sym) -> bool:
        return (self.name, self.kind) < (other.name, other.kind)

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Call:
    """An operation that is not a polynomial: `fn` is "floordiv", "mod", "min" or "max"."""

    fn: str
    args: tuple[Expr, Expr]

    def __str__(self) -> str:
        a, b = self.args
        if self.fn == "floordiv":
            return f"({a} // {b})"
        if self.fn == "mod":
            return f"({a} % {b})"
        return f"{self.fn}({a}, {b})"


Atom = Union[Sym, Call]
IntLike = Union[int, "Expr"]


def _atom_key(atom: Atom) -> tuple[int, str]:
    return (0, atom.name) if isinstance(atom, Sym) else (1, str(atom))


class Expr:
    """A polynomial in normal form. Immutable; compare with `==`, which is structural."""

    __slots__ = ("terms", "_hash")
    terms: tuple[tuple[tuple[Atom, ...], int], ...]

    def __init__(self, terms: Mapping[tuple[Atom, ...], int]) -> None:
        kept = [(m, c) for m, c in terms.items() if c != 0]
        if len(kept) > 1:
            kept.sort(key=lambda t: (-len(t[0]), tuple(_atom_key(a) for a in t[0])))
        self.terms = tuple(kept)
        self._hash = hash(self.terms)

    # -- identity ----------------------------------------------------------------------------------------------------
    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Expr):
            return self._hash == other._hash and self.terms == other.terms
        if isinstance(other, int):
            return self.as_int() == other
        return NotImplemented

    def __repr__(self) -> str:
        if not self.terms:
            return "0"
        parts = []
        for monomial, coefficient in self.terms:
            factors = [str(a) for a in monomial]
            if coefficient != 1 or not factors:
                factors.insert(0, str(coefficient))
            parts.append("*".join(factors))
        return " + ".join(parts).replace("+ -", "- ")

    __str__ = __repr__

    def as_int(self) -> int | None:
        """The value of a constant expression, else None."""
        if not self.terms:
            return 0
        if len(self.terms) == 1 and not self.terms[0][0]:
            return self.terms[0][1]
        return None

    def as_symbol(self) -> Sym | None:
        """The symbol if the expression is exactly one, else None."""
        if len(self.terms) == 1:
            monomial, c = self.terms[0]
            if c == 1 and len(monomial) == 1 and isinstance(monomial[0], Sym):
                return monomial[0]
        return None

    # -- arithmetic --------------------------------------------------------------------------------------------------
    def __add__(self, other: IntLike) -> Expr:
        other = expr(other)
        if not other.terms:
            return self
        if not self.terms:
            return other
        out = dict(self.terms)
        for m, c in other.terms:
            out[m] = out.get(m, 0) + c
        return Expr(out)

    __radd__ = __add__

    def __neg__(self) -> Expr:
        return Expr({m: -c for m, c in self.terms})

    def __sub__(self, other: IntLike) -> Expr:
        return self + (-expr(other))

    def __rsub__(self, other: IntLike) -> Expr:
        return expr(other) + (-self)

    def __mul__(self, other: IntLike) -> Expr:
        other = expr(other)
        value = other.as_int()
        if value == 1:
            return self
        if self.as_int() == 1:
            return other
        out: dict[tuple[Atom, ...], int] = {}
        for m1, c1 in self.terms:
            for m2, c2 in other.terms:
                m = tuple(sorted(m1 + m2, key=_atom_key)) if m1 and m2 else m1 or m2
                out[m] = out.get(m, 0) + c1 * c2
        return Expr(out)

    __rmul__ = __mul__

    def __floordiv__(self, other: IntLike) -> Expr:
        return floordiv(self, expr(other))

    def __mod__(self, other: IntLike) -> Expr:
        return mod(self, expr(other))


def expr(value: IntLike | Sym) -> Expr:
    """`value` as an `Expr`."""
    if isinstance(value, Expr):
        return value
    if isinstance(value, Sym):
        return Expr({(value,): 1})
    known = _SMALL.get(value)
    if known is None:
        known = Expr({(): int(value)} if value else {})
        if -1 <= value <= 4096:
            _SMALL[int(value)] = known
    return known


_SMALL: dict[int, Expr] = {}  # constants used so far
ZERO, ONE = expr(0), expr(1)


def symbol(name: str, kind: str = SIZE) -> Expr:
    """A fresh symbol as an expression."""
    return Expr({(Sym(name, kind),): 1})


def product(values: Iterable[IntLike]) -> Expr:
    """The product of `values`; 1 if there are none."""
    out = ONE
    for v in values:
        out = out * v
    return out


def atoms(e: Expr) -> set[Atom]:
    """The atoms of `e`'s own monomials, not those inside calls."""
    return {a for m, _ in e.terms for a in m}


def symbols(e: Expr) -> set[Sym]:
    """Every symbol in `e`, inside calls too."""
    out: set[Sym] = set()
    for m, _ in e.terms:
        for a in m:
            if isinstance(a, Sym):
                out.add(a)
            else:
                out |= symbols(a.args[0]) | symbols(a.args[1])
    return out


def indirect(row: int) -> Sym:
    """The index symbol of an `indirect` row."""
    return Sym(f"%{row}", INDIRECT, row)


def rows_in(e: Expr) -> list[int]:
    """The rows whose values an index or address uses."""
    return [s.row for s in symbols(e) if s.row is not None]


def divide_exactly(e: Expr, d: Expr) -> Expr | None:
    """`e / d` if `d` is a monomial that divides every term of `e`, else None."""
    if d == ONE:
        return e
    if not e.terms:
        return ZERO
    if len(d.terms) != 1:
        return ONE if e == d else None
    dm, dc = d.terms[0]
    out: dict[tuple[Atom, ...], int] = {}
    for m, c in e.terms:
        if c % dc:
            return None
        rest = list(m)
        for a in dm:
            if a not in rest:
                return None
            rest.remove(a)
        out[tuple(rest)] = c // dc
    return Expr(out)


def _python_call(fn: str, a: int, b: int) -> int:
    if fn == "floordiv":
        return a // b if b else 0
    if fn == "mod":
        return a % b if b else 0
    return min(a, b) if fn == "min" else max(a, b)


def call(fn: str, a: Expr, b: Expr) -> Expr:
    """`fn(a, b)`, folded if both are constants."""
    x, y = a.as_int(), b.as_int()
    if x is not None and y is not None:
        return expr(_python_call(fn, x, y))
    if fn in ("min", "max") and a == b:
        return a
    return Expr({(Call(fn, (a, b)),): 1})


def floordiv(a: Expr, b: Expr) -> Expr:
    """`a // b`, exact if `b` divides every term. Division by zero is zero (an empty tensor has no index)."""
    exact = divide_exactly(a, b)
    return exact if exact is not None else call("floordiv", a, b)


def mod(a: Expr, b: Expr) -> Expr:
    """`a % b` with the sign of `b`, as in Python."""
    return ZERO if divide_exactly(a, b) is not None else call("mod", a, b)


def minimum(a: IntLike, b: IntLike) -> Expr:
    """The smaller of two expressions."""
    return call("min", expr(a), expr(b))


def maximum(a: IntLike, b: IntLike) -> Expr:
    """The larger of two expressions."""
    return call("max", expr(a), expr(b))


def substitute(e: Expr, mapping: Mapping[Sym, Expr]) -> Expr:
    """`e` with symbols replaced; calls are rebuilt, and so folded again."""
    alone = e.as_symbol()
    if alone is not None:
        return mapping.get(alone, e)
    if not e.terms or not any(s in mapping for s in symbols(e)):
        return e
    out: dict[tuple[Atom, ...], int] = {}
    for m, c in e.terms:
        if all(isinstance(a, Sym) and a not in mapping for a in m):
            out[m] = out.get(m, 0) + c
            continue
        term = expr(c)
        for a in m:
            term = term * _substitute_atom(a, mapping)
        for product, factor in term.terms:
            out[product] = out.get(product, 0) + factor
    return Expr(out)


def _substitute_atom(a: Atom, mapping: Mapping[Sym, Expr]) -> Expr:
    if isinstance(a, Sym):
        return mapping.get(a) or Expr({(a,): 1})
    x, y = substitute(a.args[0], mapping), substitute(a.args[1], mapping)
    if a.fn == "floordiv":
        return floordiv(x, y)
    return mod(x, y) if a.fn == "mod" else call(a.fn, x, y)


def evaluate(e: IntLike, env: Mapping[Sym, int]) -> int:
    """The value of `e` under `env`. KeyError names a symbol without a value."""
    if isinstance(e, int):
        return e
    total = 0
    for m, c in e.terms:
        for a in m:
            if isinstance(a, Sym):
                c *= env[a]
            else:
                c *= _python_call(a.fn, evaluate(a.args[0], env), evaluate(a.args[1], env))
        total += c
    return total


def coefficient(e: Expr, s: Sym) -> Expr | None:
    """The factor of `s` in `e` if `e` is linear in it (zero if absent), else None."""
    out: dict[tuple[Atom, ...], int] = {}
    for m, c in e.terms:
        n = m.count(s)
        if n > 1 or any(isinstance(a, Call) and s in symbols(Expr({(a,): 1})) for a in m):
            return None
        if n:
            rest = list(m)
            rest.remove(s)
            out[tuple(rest)] = c
    return Expr(out)


# -- programs: expressions for the launcher's stack machine ------------------------------------------------------------
PUSH, SLOT, ADD, MUL, FLOORDIV, MOD, MIN, MAX, EQ, NE, LT, LE = range(12)
_CALL_CODES = {"floordiv": FLOORDIV, "mod": MOD, "min": MIN, "max": MAX}
Program = tuple[int, ...]


def program(e: IntLike, slots: Mapping[Sym, int]) -> Program:
    """`e` in postfix form for the launcher: PUSH c | SLOT k | binary operators on the two topmost values."""
    e = expr(e)
    if not e.terms:
        return (PUSH, 0)
    out: list[int] = []
    for i, (m, c) in enumerate(e.terms):
        started = False
        if c != 1 or not m:
            out += [PUSH, c]
            started = True
        for a in m:
            if isinstance(a, Sym):
                out += [SLOT, slots[a]]
            else:
                out += [*program(a.args[0], slots), *program(a.args[1], slots), _CALL_CODES[a.fn]]
            if started:
                out.append(MUL)
            started = True
        if i:
            out.append(ADD)
    return tuple(out)


_RELATIONS = {"eq": EQ, "ne": NE, "lt": LT, "le": LE}


def relation_program(relation: str, a: IntLike, b: IntLike, slots: Mapping[Sym, int]) -> Program:
    """A program that leaves 1 if `a relation b` holds ("eq", "ne", "lt", "le"), else 0."""
    return (*program(a, slots), *program(b, slots), _RELATIONS[relation])


def run_program(code: Program, slots: list[int] | tuple[int, ...]) -> int:
    """The result of the native stack machine for a program, computed in Python."""
    stack: list[int] = []
    binary: dict[int, Callable[[int, int], int]] = {
        ADD: lambda a, b: a + b, MUL: lambda a, b: a * b,
        FLOORDIV: lambda a, b: a // b if b else 0, MOD: lambda a, b: a % b if b else 0,
        MIN: min, MAX: max, EQ: lambda a, b: int(a == b), NE: lambda a, b: int(a != b),
        LT: lambda a, b: int(a < b), LE: lambda a, b: int(a <= b),
    }  # fmt: skip
    i = 0
    while i < len(code):
        op = code[i]
        if op in (PUSH, SLOT):
            stack.append(code[i + 1] if op == PUSH else slots[code[i + 1]])
            i += 2
            continue
        b, a = stack.pop(), stack.pop()
        stack.append(binary[op](a, b))
        i += 1
    return stack[-1]


# -- conversion to and from sympy --------------------------------------------------------------------------------------
def to_sympy(e: Expr) -> Any:
    """`e` as a `sympy` expression with integer symbols of the same names."""
    import sympy

    def atom(a: Atom) -> Any:
        if isinstance(a, Sym):
            return sympy.Symbol(a.name, integer=True)
        x, y = to_sympy(a.args[0]), to_sympy(a.args[1])
        fns = {"floordiv": lambda: sympy.floor(x / y), "mod": lambda: sympy.Mod(x, y)}
        return fns[a.fn]() if a.fn in fns else (sympy.Min if a.fn == "min" else sympy.Max)(x, y)

    return sympy.Add(*[sympy.Mul(c, *[atom(a) for a in m]) for m, c in e.terms])


def from_sympy(s: Any, rename: Callable[[str], Sym]) -> Expr:
    """A `sympy` expression of sizes as an `Expr`; `rename` gives the symbol for a name.

    Raises ValueError for a function without a counterpart here.
    """
    if isinstance(s, int) or s.is_Integer:
        return expr(int(s))
    if s.is_Symbol:
        return Expr({(rename(s.name),): 1})
    args = [from_sympy(a, rename) for a in s.args] if not s.is_Pow else []
    name = type(s).__name__
    if s.is_Add:
        return sum(args, ZERO)
    if s.is_Mul:
        return product(args)
    if s.is_Pow and s.exp.is_Integer and int(s.exp) > 0:
        return product([from_sympy(s.base, rename)] * int(s.exp))
    if name in ("FloorDiv", "CleanDiv", "IntTrueDiv"):
        return floordiv(*args)
    if name in ("Mod", "PythonMod"):
        return mod(*args)
    if name in ("Min", "Max"):
        out = args[0]
        for a in args[1:]:
            out = call(name.lower(), out, a)
        return out
    raise ValueError(f"size expression {s}: {name} has no counterpart in fuser.ir.sizes")
