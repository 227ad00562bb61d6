"""Signs and bounds of integer expressions, and the simplifications of `//` and `%` that depend on them.

`Extents` maps the loop variables in scope to their extents: a variable runs from 0 to its extent - 1. Two facts hold
wherever an index is used: every loop in scope has an iteration, so its extent is at least 1, and no divisor is 0.
Without extents only the kinds of the symbols matter: sizes, loop variables and indices computed by rows are
nonnegative; strides may have any value.

All rules are those of floor division. `tests/unit/test_index_rules.py` checks each of them by enumeration.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fuser.ir.sizes import (
    SIZE,
    STRIDE,
    ZERO,
    Atom,
    Call,
    Expr,
    Sym,
    atoms,
    call,
    divide_exactly,
    expr,
    floordiv,
    mod,
    substitute,
    symbols,
)

Extents = Mapping[Sym, Expr]
NO_LOOPS: Extents = {}


# -- signs and bounds --------------------------------------------------------------------------------------------------
def is_nonnegative(e: Expr, extents: Extents = NO_LOOPS) -> bool:
    """Whether `e >= 0` is proved for all sizes and all iterations of the loops `extents`."""
    if _has_no_minus(e, extents):
        return True
    low = _bound(e, extents, up=False, calls=False)
    if low is None or _has_no_minus(low, extents):
        return low is not None
    low = _from_one(low, extents)  # a size now means its excess over 1, so the extents no longer apply
    if _has_no_minus(low, NO_LOOPS):
        return True
    low = _bound(low, NO_LOOPS, up=False, calls=True)
    return low is not None and _has_no_minus(low, NO_LOOPS)


def _has_no_minus(e: Expr, extents: Extents) -> bool:
    """Whether all coefficients and atoms of `e` are nonnegative."""
    return all(c >= 0 and all(_is_atom_nonnegative(a, extents) for a in m) for m, c in e.terms)


def _is_atom_nonnegative(a: Atom, extents: Extents) -> bool:
    if isinstance(a, Sym):
        return a.kind != STRIDE
    x, y = a.args
    if a.fn == "mod":
        return is_nonnegative(y, extents)  # a remainder has the sign of its divisor
    if a.fn == "max":
        return is_nonnegative(x, extents) or is_nonnegative(y, extents)
    return is_nonnegative(x, extents) and is_nonnegative(y, extents)


def _bound(e: Expr, extents: Extents, up: bool, calls: bool) -> Expr | None:
    """An upper bound of `e` without loop variables of `extents`, or with `up=False` a lower bound.

    None if none is found. `calls`: operations on sizes alone are also replaced by their bounds.
    """
    done: set[Atom] = set()
    while True:
        a = next((a for a in _ordered_atoms(e) if a not in done and (calls or _moves(a, extents))), None)
        if a is None:
            return e
        done.add(a)
        if isinstance(a, Sym) and a not in extents:
            continue
        parts = _factor(e, a)
        if parts is None:
            return None
        factor, rest = parts
        if is_nonnegative(factor, extents):
            limit = _atom_bound(a, extents, up)
        else:
            limit = _atom_bound(a, extents, not up) if is_nonnegative(-factor, extents) else None
        if limit is not None:
            e = rest + factor * limit
        elif _moves(a, extents):
            return None


def _ordered_atoms(e: Expr) -> Iterator[Atom]:
    """The atoms of `e` in the order of its terms, which is the same in every process."""
    return (a for m, _ in e.terms for a in m)


def _moves(a: Atom, extents: Extents) -> bool:
    if isinstance(a, Sym):
        return a in extents
    return any(s in extents for x in a.args for s in symbols(x))


def _factor(e: Expr, a: Atom) -> tuple[Expr, Expr] | None:
    """`(f, r)` with `e == f * a + r` and no factor `a` in `r`; None if `e` is not linear in `a`."""
    factor: dict[tuple[Atom, ...], int] = {}
    rest: dict[tuple[Atom, ...], int] = {}
    for m, c in e.terms:
        if a not in m:
            rest[m] = c
            continue
        if m.count(a) > 1:
            return None
        at = m.index(a)
        factor[m[:at] + m[at + 1 :]] = c
    return Expr(factor), Expr(rest)


def _atom_bound(a: Atom, extents: Extents, up: bool) -> Expr | None:
    if isinstance(a, Sym):
        return extents[a] - 1 if up else ZERO
    x, y = a.args
    if a.fn in ("min", "max"):
        found = [b for b in (_bound(x, extents, up, calls=False), _bound(y, extents, up, calls=False)) if b is not None]
        if len(found) == 2:
            return call(a.fn, *found)
        return found[0] if found and up == (a.fn == "min") else None
    if not is_nonnegative(y, extents):
        return None
    if a.fn == "mod":
        return _bound(y - 1, extents, up=True, calls=False) if up else ZERO
    if _moves_within(y, extents):
        return ZERO if not up and is_nonnegative(x, extents) else None
    limit = _bound(x, extents, up, calls=False)
    return None if limit is None else _quotient_bound(limit, y, extents, up)


def _quotient_bound(x: Expr, d: Expr, extents: Extents, up: bool) -> Expr:
    """A bound of `x // d`, where `d` is at least 1; for example `q - 1` for `(q*d - 1) // d`."""
    quotient, rest = _split(x, d)
    if d.as_int() is None:
        if up and is_nonnegative(-1 - rest, extents):
            return quotient - 1
        if not up and is_nonnegative(rest, extents):
            return quotient
    return quotient + floordiv(rest, d)


def _moves_within(e: Expr, extents: Extents) -> bool:
    return any(s in extents for s in symbols(e))


def _from_one(e: Expr, extents: Extents) -> Expr:
    """`e` with `s + 1` for each size `s` that is a factor of an extent, and so at least 1."""
    factors = (a for size in extents.values() if len(size.terms) == 1 for a in atoms(size))
    return substitute(e, {a: expr(a) + 1 for a in factors if isinstance(a, Sym) and a.kind == SIZE})


# -- simplification ----------------------------------------------------------------------------------------------------
def simplify_divmod(e: Expr, extents: Extents) -> Expr:
    """`e` with divisions and remainders simplified where the loops' extents allow it."""
    if not any(isinstance(a, Call) for a in atoms(e)):
        return e
    out = ZERO
    for m, c in e.terms:
        term = expr(c)
        for a in m:
            term = term * (expr(a) if isinstance(a, Sym) else _simplify_call(a, extents))
        out = out + term
    return out


def _simplify_call(a: Call, extents: Extents) -> Expr:
    """`(q*d + r) // d` becomes `q + r // d`, and `(q*d + r) % d` becomes `r % d`; for `0 <= r < d`, `q` and `r`."""
    x, d = simplify_divmod(a.args[0], extents), simplify_divmod(a.args[1], extents)
    if a.fn not in ("floordiv", "mod"):
        return call(a.fn, x, d)
    quotient, rest = _split(x, d)
    if is_nonnegative(rest, extents) and is_nonnegative(d - 1 - rest, extents):
        return quotient if a.fn == "floordiv" else rest
    if a.fn == "mod":
        return mod(rest, d)
    # (x // b) // d is x // (b*d) if d is positive.
    inner = rest.terms[0][0][0] if len(rest.terms) == 1 and len(rest.terms[0][0]) == 1 else None
    nested = isinstance(inner, Call) and inner.fn == "floordiv" and rest.terms[0][1] == 1
    if nested and isinstance(inner, Call) and is_nonnegative(d, extents):
        return quotient + _simplify_call(Call("floordiv", (inner.args[0], inner.args[1] * d)), extents)
    return quotient + floordiv(rest, d)


def _split(x: Expr, d: Expr) -> tuple[Expr, Expr]:
    """`(q, r)` with `x == q*d + r`, where `d` divides no term of `r`."""
    quotient, rest = ZERO, ZERO
    for m, c in x.terms:
        term = Expr({m: c})
        exact = divide_exactly(term, d)
        if exact is None:
            rest = rest + term
        else:
            quotient = quotient + exact
    return quotient, rest


def recombined(e: Expr) -> Expr:
    """`e` with `d * (x // d) + x % d` replaced by `x` wherever such a pair has a common factor."""
    while True:
        found = next((new for m, c in e.terms for new in _joined(e, m, c)), None)
        if found is None:
            return e
        e = found


def _joined(e: Expr, m: tuple[Atom, ...], c: int) -> Iterator[Expr]:
    """`e` without the term `c * m`, if its remainder recombines with a quotient among the other terms."""
    for n, a in enumerate(m):
        if not isinstance(a, Call) or a.fn != "mod":
            continue
        factor = Expr({(*m[:n], *m[n + 1 :]): c})
        x, d = a.args
        quotient = factor * d * _simplify_call(Call("floordiv", (x, d)), NO_LOOPS)
        terms = dict(e.terms)
        if all(terms.get(k) == v for k, v in quotient.terms):
            yield e - Expr({m: c}) - quotient + factor * x


__all__ = ["NO_LOOPS", "Extents", "is_nonnegative", "recombined", "simplify_divmod"]
