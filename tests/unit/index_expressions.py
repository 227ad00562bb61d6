"""Random index expressions, the points at which they have a value, and that value by Python's integers."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator, Sequence

from fuser.ir.sizes import INDIRECT, LOOP, SIZE, STRIDE, Call, Expr, Sym, evaluate, expr, floordiv, mod

N, M, K = (Sym(name, SIZE) for name in "nmk")  # K is no factor of an extent, so it may be 0
S, Q = Sym("s", STRIDE), Sym("%0", INDIRECT, 0)
I, J, L, H = (Sym(name, LOOP) for name in "ijlh")
EXTENTS: dict[Sym, Expr] = {
    I: expr(N), J: expr(M), L: expr(N) * expr(M), H: expr(N) + expr(K) - 1,
}  # fmt: skip
CONSTANT: dict[Sym, Expr] = {I: expr(4), J: expr(3), L: expr(12), H: expr(5)}
ORDER = (I, J, L, H, N, M, K, S, Q)
Point = tuple[int, ...]  # the values of ORDER


@functools.cache
def points(constant: bool) -> list[Point]:
    """All sizes and one choice of turns for each, first and last turns among them."""
    rng, extents = random.Random(constant), CONSTANT if constant else EXTENTS
    out: list[Point] = []
    for n, m, k, s, q in itertools.product((1, 2, 3, 4), (1, 2, 3), (0, 1, 2), (-3, -1, 0, 1, 2), (0, 1, 4, 9)):
        point = {N: n, M: m, K: k, S: s, Q: q}
        sizes = {v: evaluate(e, point) for v, e in extents.items()}
        if all(size >= 1 for size in sizes.values()):
            turn = rng.choice((lambda size: 0, lambda size: size - 1, rng.randrange, rng.randrange))
            point |= {v: turn(size) for v, size in sizes.items()}
            out.append(tuple(point[s] for s in ORDER))
    return out


def python_of(e: Expr) -> Callable[..., int]:
    """`e` as a function of ORDER in Python, which raises ZeroDivisionError where it has no value."""
    out: Callable[..., int] = eval(f"lambda {', '.join(map(_name, ORDER))}: {_python(e)}")
    return out


def _python(e: Expr) -> str:
    factors = (["*".join([str(c), *(_name(a) if isinstance(a, Sym) else _call(a) for a in m)]) for m, c in e.terms])
    return " + ".join(factors) or "0"


def _call(a: Call) -> str:
    x, y = map(_python, a.args)
    if a.fn in ("min", "max"):
        return f"{a.fn}({x}, {y})"
    return f"(({x}) {'//' if a.fn == 'floordiv' else '%'} ({y}))"


def _name(s: Sym) -> str:
    return s.name.replace("%", "q")


def values_at(e: Expr, at: Sequence[Point]) -> dict[Point, int]:
    """The value of `e` at each point where no divisor is 0."""
    function, out = python_of(e), {}
    for p in at:
        try:
            out[p] = function(*p)
        except ZeroDivisionError:
            continue
    return out


def _leaf(rng: random.Random) -> Expr:
    return expr(rng.choice((I, J, L, H, I, J, L, H, N, M, K, S, Q)))


def _divisor(rng: random.Random) -> Expr:
    choices = (expr(2), expr(3), expr(4), expr(6), expr(N), expr(M), expr(N) * expr(M), expr(N) + 1, expr(S), expr(-2))
    return rng.choices(choices, (4, 4, 2, 2, 4, 4, 3, 1, 1, 1))[0]


def _sum(rng: random.Random, depth: int) -> Expr:
    out = expr(rng.choice((0, 0, 0, -1, 1, -2, 3)))
    for _ in range(rng.randint(1, 3)):
        factor = rng.choice((expr(1), expr(1), expr(-1), expr(2), expr(3), expr(N), expr(M), -expr(M)))
        out = out + factor * _term(rng, depth)
    return out


def _term(rng: random.Random, depth: int) -> Expr:
    if not depth or rng.random() < 0.4:
        return _leaf(rng)
    kind = rng.random()
    if kind < 0.1:
        fn = rng.choice(("min", "max"))
        return Expr({(Call(fn, (_sum(rng, depth - 1), _sum(rng, depth - 1))),): 1})
    # Not by `floordiv` and `mod`, which are under test themselves.
    return Expr({(Call(rng.choice(("floordiv", "mod")), (_sum(rng, depth - 1), _divisor(rng))),): 1})


def _flat(rng: random.Random) -> Expr:
    """The forms that views make: a flat index, shifted or reversed, taken apart again."""
    i, j, n, m = expr(I), expr(J), expr(N), expr(M)
    flat = rng.choice((i * m + j, expr(L), n * m - 1 - i * m - j, n * m - 1 - expr(L), n - 1 - i, i + j, 2 * i + j))
    flat = flat + rng.choice((0, 0, 0, -1, -2, 1, 3))
    d = rng.choice((m, expr(2), expr(3), n * m, 2 * m))
    outer = rng.choice((floordiv, mod))
    inner = rng.choice((lambda a: a, lambda a: floordiv(a, expr(2)), lambda a: mod(a, m) + m * floordiv(a, m)))
    return outer(inner(flat), d) + rng.choice((expr(0), -j, i))


def expressions(count: int, seed: int) -> Iterator[Expr]:
    """`count` random expressions."""
    rng = random.Random(seed)
    for _ in range(count):
        yield _flat(rng) if rng.random() < 0.3 else _sum(rng, rng.randint(1, 3))
