"""Matches the loops of a node with the loops of a kernel.

A kernel has *axes*; a node has variables. A node can run inside a kernel if each of its variables is a run of whole
axes. Both are lists of digits of mixed-radix numbers. Matching compares the digits' sizes from the right, and splits
the larger of two that differ if the smaller divides it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field

from fuser.ir.sizes import LOOP, ONE, ZERO, Expr, Sym, atoms, coefficient, divide_exactly, expr, substitute, symbol
from fuser.lazy_dataclasses import dataclass

Digits = list[tuple[Sym, Expr]]  # (variable, size), most significant first


def digits_of(e: Expr, sizes: Mapping[Sym, Expr]) -> Digits | None:
    """`e` as a mixed-radix number over distinct loop variables, or None if it is not one."""
    alone = e.as_symbol()
    if alone is not None and alone.kind == LOOP:
        return [(alone, sizes[alone])] if alone in sizes else None
    if e == ZERO:
        return []
    terms: list[tuple[Sym, Expr]] = []
    for a in atoms(e):
        if isinstance(a, Sym) and a.kind == LOOP:
            c = coefficient(e, a)
            if c is None or a not in sizes:
                return None
            terms.append((a, c))
    ordered: Digits = []
    radix = ONE
    while terms:
        found = next((t for t in terms if t[1] == radix), None)
        if found is None:
            return None
        terms.remove(found)
        ordered.insert(0, (found[0], sizes[found[0]]))
        radix = radix * sizes[found[0]]
    rebuilt = ZERO
    for v, size in ordered:
        rebuilt = rebuilt * size + expr(v)
    return ordered if rebuilt == e else None


@dataclass
class Axes:
    """The axes of a kernel in natural order. `made` counts all axes ever added, for fresh names."""

    order: list[Sym] = field(default_factory=list)
    size: dict[Sym, Expr] = field(default_factory=dict)
    made: int = 0

    def copy(self) -> Axes:
        """An independent copy, on which a fusion can be tried."""
        return Axes(list(self.order), dict(self.size), self.made)

    def add(self, size: Expr, at: int | None = None) -> Sym:
        """A new axis of `size`."""
        axis = Sym(f"a{self.made}", LOOP)
        self.made += 1
        self.order.insert(len(self.order) if at is None else at, axis)
        self.size[axis] = size
        return axis


class Matching:
    """Finds the axes that a node's variables run over; splits axes and variables as needed."""

    def __init__(self, axes: Axes, sizes: Mapping[Sym, Expr]) -> None:
        self.axes = axes
        self.sizes = dict(sizes)
        self.variables: dict[Sym, list[Sym]] = {}  # variable (or part of one) -> one axis
        self.parts: dict[Sym, list[Sym]] = {}  # variable -> its parts, most significant first
        self.axis_splits: dict[Sym, Expr] = {}  # old axis -> expression over new axes

    def variable_digits(self, v: Sym) -> list[Sym]:
        """The current parts of a variable, most significant first."""
        if v not in self.parts:
            return [v]
        return [q for p in self.parts[v] for q in self.variable_digits(p)]

    def axis_digits(self, e: Expr) -> list[Sym] | None:
        """The current axes of an expression over (possibly since split) axes, most significant first."""
        digits = digits_of(substitute(e, self.axis_splits), self.axes.size)
        return None if digits is None else [d for d, _ in digits]

    def match(self, variables: Sequence[Sym], axes: Sequence[Sym]) -> bool:
        """Equate the number with digits `variables` and the one with digits `axes`. False if they cannot match."""
        left = [p for v in variables for p in self.variable_digits(v)]
        right = list(axes)
        while left and right:
            v, a = left[-1], right[-1]
            vs, as_ = self.sizes[v], self.axes.size[a]
            if vs == as_:
                if not self._assign(v, a):
                    return False
                left.pop()
                right.pop()
                continue
            quotient = divide_exactly(vs, as_)
            if quotient is not None:
                left[-1:] = self._split_variable(v, quotient, as_)
                continue
            quotient = divide_exactly(as_, vs)
            if quotient is None:
                return False
            right[-1:] = self._split_axis(a, quotient, vs)
        return not left and not right

    def _assign(self, v: Sym, a: Sym) -> bool:
        known = self.variables.get(v)
        if known is not None:
            return known == [a]
        if any(a in other for other in self.variables.values()):
            return False
        self.variables[v] = [a]
        return True

    def _split_variable(self, v: Sym, outer: Expr, inner: Expr) -> list[Sym]:
        hi, lo = Sym(f"{v.name}h", LOOP), Sym(f"{v.name}l", LOOP)
        self.sizes[hi], self.sizes[lo] = outer, inner
        self.parts[v] = [hi, lo]
        return [hi, lo]

    def _split_axis(self, a: Sym, outer: Expr, inner: Expr) -> list[Sym]:
        at = self.axes.order.index(a)
        hi = self.axes.add(outer, at)
        lo = self.axes.add(inner, at + 1)
        self.axes.order.remove(a)
        del self.axes.size[a]
        replacement = symbol(hi.name, LOOP) * inner + symbol(lo.name, LOOP)
        self.axis_splits = {k: substitute(e, {a: replacement}) for k, e in self.axis_splits.items()}
        self.axis_splits[a] = replacement
        for v, assigned in list(self.variables.items()):
            if assigned == [a]:  # an already matched variable is split alongside
                parts = self._split_variable(v, outer, inner)
                del self.variables[v]
                self.variables[parts[0]], self.variables[parts[1]] = [hi], [lo]
        return [hi, lo]

    def is_assigned(self, v: Sym) -> bool:
        """Whether every part of the variable has an axis."""
        return all(p in self.variables for p in self.variable_digits(v))

    def used_axes(self) -> set[Sym]:
        """Axes that some variable runs over."""
        return {a for assigned in self.variables.values() for a in assigned}

    def expression(self, v: Sym) -> Expr:
        """The variable as an expression over axes."""
        out = ZERO
        for p in self.variable_digits(v):
            out = out * self.sizes[p] + expr(self.variables[p][0])
        return out
