"""Every rule that rewrites, bounds, prints or evaluates an index expression, checked by enumeration.

Values of all kinds are small integers of both signs where the kind allows them; the truth is Python's floor division.
"""

from __future__ import annotations

import ctypes
import random
import subprocess
import types

import pytest
import torch

from fuser.cpu import toolchain
from fuser.cpu.text import FLOOR_HELPERS, PLACE_HELPERS, cpp_expr, cpp_name
from fuser.cuda.text import Params, triton_expr
from fuser.ir.ranges import NO_LOOPS, is_nonnegative, recombined, simplify_divmod
from fuser.ir.sizes import (
    LOOP,
    Call,
    Expr,
    Sym,
    coefficient,
    divide_exactly,
    evaluate,
    expr,
    floordiv,
    from_sympy,
    mod,
    program,
    run_program,
    substitute,
    symbols,
    to_sympy,
)
from fuser.kernel_spec import InputPattern, LaunchProgram
from fuser.ops.triton_helpers import TRITON_HELPERS
from fuser.runtime import launcher
from fuser.scheduler.align import Axes, Matching, digits_of
from fuser.scheduler.inline import _solve
from fuser.scheduler.kernel_plan import Axis
from fuser.scheduler.plan import _mergeable
from tests.unit.index_expressions import (
    CONSTANT,
    EXTENTS,
    ORDER,
    I,
    J,
    K,
    L,
    M,
    N,
    Q,
    S,
    expressions,
    points,
    python_of,
    values_at,
)

COUNT, AT = 700, 60  # expressions, and points at which each is evaluated
ALL = [(n, extents) for n, extents in enumerate((EXTENTS, CONSTANT))]


def cases(seed, extents, count=COUNT, at=AT):
    """Expressions, each with its values at some points by Python."""
    rng = random.Random(seed)
    for e in expressions(count, seed):
        yield e, values_at(e, rng.sample(points(extents is CONSTANT), at))


def differs(e: Expr, new: Expr, values) -> list[str]:
    """Where `new` has not the values that `e` has."""
    function = python_of(new) if new != e else None
    wrong = [p for p, v in values.items() if function is not None and function(*p) != v]
    return [f"{e} -> {new} at {dict(zip(map(str, ORDER), wrong[0]))}"] if wrong else []


@pytest.mark.parametrize("seed, extents", ALL)
def test_simplifications_keep_values(seed, extents):
    wrong, changed = [], 0
    for e, at in cases(seed, extents):
        new = simplify_divmod(e, extents)
        changed += new != e
        wrong += differs(e, new, at) + differs(e, recombined(e), at) + differs(e, recombined(new), at)
    assert not wrong, "\n".join(wrong[:20])
    assert changed > COUNT // 5, "the rules were hardly tried"


@pytest.mark.parametrize("seed, extents", ALL)
def test_what_is_proved_nonnegative_is(seed, extents):
    wrong, proved = [], 0
    for e, at in cases(seed + 10, extents):
        for known in (extents, NO_LOOPS):
            if is_nonnegative(e, known):
                proved += 1
                wrong += [f"{e} at {p}" for p, v in at.items() if v < 0][:1]
    assert not wrong, "\n".join(wrong[:20])
    assert proved > COUNT // 8


def test_signs_that_views_rest_on():
    i, j, l, n, m, k = map(expr, (I, J, L, N, M, K))
    proved = [
        n - 1 - i, n * m - 1 - i * m - j, n * m - 1 - l, floordiv(n - 1 - i, expr(2)), mod(i - 1, m), n * m - n,
        m - 1 - mod(l, m), n - 1 - floordiv(l, m), 2 * n - 1 - floordiv(2 * n - 1 - i, expr(2)), 3 - mod(k, expr(4)),
        floordiv(expr(Q), m),
    ]  # fmt: skip
    unproved = [i - 1, floordiv(i - 1, expr(2)), mod(i, expr(S)), n - 2 - i, k - 1, expr(S), -expr(Q), floordiv(-i, n)]
    assert [str(e) for e in proved if not is_nonnegative(e, EXTENTS)] == []
    assert [str(e) for e in unproved if is_nonnegative(e, EXTENTS)] == []


@pytest.mark.parametrize("seed, extents", ALL)
def test_constructors_and_substitution_keep_values(seed, extents):
    rng, wrong = random.Random(seed), []
    for e, at in cases(seed + 20, extents, 200):
        for d in (expr(N), expr(N) * expr(M), expr(-2), expr(3), expr(S)):
            for fn, made in (("floordiv", floordiv(e, d)), ("mod", mod(e, d))):
                raw = Expr({(Call(fn, (e, d)),): 1})
                wrong += differs(raw, made, values_at(raw, at)) if raw != made else []
            exact = divide_exactly(e, d)
            wrong += differs(e, exact * d, at) if exact is not None else []
        for s in (I, N):
            by = rng.choice((expr(J) + 2, 2 * expr(M) - expr(J), expr(S) + 1))
            new = substitute(e, {s: by})
            where = python_of(by)
            moved = {p: (*p[: ORDER.index(s)], where(*p), *p[ORDER.index(s) + 1 :]) for p in at}
            there, here = values_at(e, tuple(moved.values())), values_at(new, tuple(moved))
            bad = [p for p, q in moved.items() if q in there and p in here and there[q] != here[p]]
            wrong += [f"{e} with {s} = {by}: {new} at {p}" for p in bad[:1]]
            c = coefficient(e, s)
            if c is not None:
                wrong += differs(e, c * expr(s) + substitute(e, {s: expr(0)}), at)
                assert s not in symbols(c)
    assert not wrong, "\n".join(wrong[:20])


def test_sympy_means_the_same():
    names = {s.name: s for s in ORDER}
    for e, at in cases(30, EXTENTS, 8, 2):
        there = to_sympy(e)
        for p, value in at.items():
            assert int(there.subs({to_sympy(expr(s)): v for s, v in zip(ORDER, p)})) == value, e
    sums = [e for e in expressions(60, 31) if not any(isinstance(a, Call) for m, _ in e.terms for a in m)]
    assert [e for e in sums if from_sympy(to_sympy(e), names.__getitem__) != e] == []


# -- printed and evaluated ---------------------------------------------------------------------------------------------
def test_evaluation_means_the_same():
    for e, at in cases(35, EXTENTS, 150, 10):
        assert [evaluate(e, dict(zip(ORDER, p))) for p in at] == list(at.values()), e


def test_cpp_means_the_same(tmp_path):
    """All expressions in one library, as offsets and as values, with and without the loops in scope."""
    lines, checks = [], []
    arguments = ", ".join(f"i64 {cpp_name(s)}" for s in ORDER)
    plain = 0
    for seed, extents in ALL:
        for e, at in cases(seed + 40, extents, 150, 25):
            for of, known in (("floor", extents), ("place", extents), ("floor", NO_LOOPS)):
                text = cpp_expr(e, of=of, extents=known)
                plain += " / " in text or " % " in text
                lines.append(f'extern "C" i64 e{len(checks)}({arguments}) {{ return {text}; }}')
                checks.append((e, text, at))
    source, library = tmp_path / "indices.cpp", tmp_path / "indices.so"
    source.write_text("\n".join(["typedef long long i64;", FLOOR_HELPERS, PLACE_HELPERS, *lines]))
    compiler = toolchain.find_compiler()
    subprocess.run([*compiler, "-O0", "-w", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    loaded, wrong = ctypes.CDLL(str(library)), []
    for n, (e, text, at) in enumerate(checks):
        function = getattr(loaded, f"e{n}")
        function.restype, function.argtypes = ctypes.c_longlong, [ctypes.c_longlong] * len(ORDER)
        wrong += [f"{e} as {text} at {p}" for p, v in at.items() if function(*p) != v][:1]
    assert not wrong, "\n".join(wrong[:20])
    assert plain > len(checks) // 10, "C's own operators were hardly tried"


class CInt:
    """An integer with C's division, as Triton has it."""

    def __init__(self, value):
        self.value, self.dtype = int(value), self

    def to(self, _):
        return self

    def __floordiv__(self, other):
        a, b = self.value, number(other)
        return CInt(abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1))

    def __mod__(self, other):
        return CInt(self.value - number(self // other) * number(other))


def number(x):
    return x.value if isinstance(x, CInt) else int(x)


for _name in ("add", "sub", "mul", "and", "lt", "eq", "ne"):
    _raw = getattr(int, f"__{_name}__")
    setattr(CInt, f"__{_name}__", lambda a, b, raw=_raw: CInt(raw(a.value, number(b))))
CInt.__radd__, CInt.__rmul__ = CInt.__add__, CInt.__mul__
CInt.__rsub__ = lambda a, b: CInt(number(b) - a.value)
CInt.__neg__ = lambda a: CInt(-a.value)
CInt.__hash__ = None


def test_triton_means_the_same():
    """The text of each expression, evaluated in Python with C's division."""
    tl = types.SimpleNamespace(
        where=lambda c, a, b: CInt(number(a) if number(c) else number(b)), zeros_like=lambda a: CInt(0),
        minimum=lambda a, b: CInt(min(number(a), number(b))), maximum=lambda a, b: CInt(max(number(a), number(b))),
    )  # fmt: skip
    scope = {"tl": tl, "triton": types.SimpleNamespace(jit=lambda f: f)}
    for name in ("fuser_floor_div_int", "fuser_remainder_int"):
        exec(TRITON_HELPERS[name], scope)
    wrong, plain = [], 0
    for seed, extents in ALL:
        for e, at in cases(seed + 50, extents, 200, 12):
            params = Params(lambda e: 5, lambda b: False, {}, extents)
            text = triton_expr(e, params, 64, cpp_name)
            plain += "//" in text or "%" in text
            code = compile(text, "<triton>", "eval")
            for p, value in at.items():
                given = {cpp_name(s): CInt(v) for s, v in zip(ORDER, p)}
                given |= {x.name: CInt(python_of(x.value)(*p)) for x in params.known.values()}
                if number(eval(code, scope, given)) != value:
                    wrong.append(f"{e} as {text} at {p}")
                    break
    assert not wrong, "\n".join(wrong[:20])
    assert plain > 40, "Triton's own operators were hardly tried"


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    from tests.unit.runtime_support import compile_library

    return compile_library(tmp_path_factory.mktemp("indices"))


def test_launch_programs_mean_the_same(library):
    """The stack machine in Python; and the native one, by a guard that compares its value with an argument."""
    from fuser.ir.sizes import relation_program

    slots = {s: n for n, s in enumerate(ORDER)}
    inputs = tuple(InputPattern("int", slot=n) for n in range(len(ORDER) + 1))
    expected, wrong = Sym("expected"), []
    for e, at in cases(60, EXTENTS, 150, 12):
        guard = relation_program("eq", e, expr(expected), {**slots, expected: len(ORDER)})
        handle = launcher.make_handle(lambda args, status: "missed")
        handle.add_kernel(LaunchProgram(inputs, len(ORDER) + 1, 0, (guard,), (), (), (), False), library)
        for p, want in at.items():
            if run_program(program(e, slots), list(p)) != want:
                wrong.append(f"{e} in Python at {p}")
            if handle(*p, want) == "missed" or handle(*p, want + 1) != "missed":
                wrong.append(f"{e} natively at {p}")
    assert not wrong, "\n".join(wrong[:20])


# -- loops brought together --------------------------------------------------------------------------------------------
def flat_index(sizes, turns):
    out = 0
    for size, turn in zip(sizes, turns):
        out = out * size + turn
    return out


def factorings(rng):
    """The sizes of two loop nests over equally many points, the second from splits and merges of the first."""
    one = [rng.choice((1, 2, 3, 4, 6)) for _ in range(rng.randint(1, 3))]
    two = list(one)
    for _ in range(rng.randint(0, 3)):
        at = rng.randrange(len(two))
        if rng.random() < 0.5 and at + 1 < len(two):
            two[at : at + 2] = [two[at] * two[at + 1]]
        else:
            d = rng.choice([d for d in (1, 2, 3, 4) if two[at] % d == 0])
            two[at : at + 1] = [two[at] // d, d]
    return one, two


def turns_of(sizes, flat):
    out = []
    for size in reversed(sizes):
        out.append(flat % size)
        flat //= size
    return out[::-1]


def test_matched_loops_are_at_the_same_point():
    """Where a node's variables match a kernel's axes, both nests count the same flat index."""
    rng, matched = random.Random(70), 0
    for _ in range(300):
        one, two = factorings(rng)
        variables = [Sym(f"v{n}", LOOP) for n in range(len(one))]
        axes = Axes()
        order = [axes.add(expr(size)) for size in two]
        matching = Matching(axes, {v: expr(size) for v, size in zip(variables, one)})
        if not matching.match(variables, order):
            continue
        matched += 1
        sizes = [evaluate(axes.size[a], {}) for a in axes.order]
        total = flat_index(sizes, [s - 1 for s in sizes]) + 1
        for flat in range(total):
            point = dict(zip(axes.order, turns_of(sizes, flat)))
            mine = [evaluate(matching.expression(v), point) for v in variables]
            assert all(0 <= turn < size for turn, size in zip(mine, one)) and flat_index(one, mine) == flat
    assert matched > 100


def test_digits_and_their_solution():
    """A mixed-radix number over loops takes each value once, and solving for its digits gives them back."""
    rng, found = random.Random(71), 0
    for _ in range(200):
        sizes = [rng.choice((1, 2, 3, 5)) for _ in range(rng.randint(1, 3))]
        variables = [Sym(f"v{n}", LOOP) for n in range(len(sizes))]
        known = {v: expr(size) for v, size in zip(variables, sizes)}
        e = expr(0)
        for v in rng.sample(variables, len(variables)):
            e = e * (known[v] if rng.random() < 0.9 else rng.choice((2, 3))) + expr(v)
        digits = digits_of(e, known)
        if digits is None:
            continue
        found += 1
        total = 1
        for _, size in digits:
            total *= evaluate(size, {})
        values = set()
        for flat in range(total):
            point = dict(zip([v for v, _ in digits], turns_of([evaluate(s, {}) for _, s in digits], flat)))
            point = {**dict.fromkeys(variables, 0), **point}
            values.add(evaluate(e, point))
            place = Sym("place", LOOP)
            solved = _solve(e, expr(place), known)
            at = {place: evaluate(e, point)}
            assert {v: evaluate(x, at) for v, x in solved.items()} == {v: point[v] for v, _ in digits}
        assert values == set(range(total))
    assert found > 50


def test_merged_axes_reach_the_same_elements():
    rng, merged = random.Random(72), 0
    for _ in range(400):
        nx, ny = rng.randint(1, 4), rng.randint(1, 4)
        x, y = Axis(I, expr(nx), False, nx), Axis(J, expr(ny), False, ny)
        e = rng.choice((1, 2, -1)) * expr(J) + rng.choice((ny, 2 * ny, -ny, 1)) * expr(I)
        e = e + rng.choice((expr(0), expr(I) * expr(J), mod(expr(J), expr(2)), expr(S)))
        if not _mergeable(e, x, y):
            continue
        merged += 1
        for i in range(nx):
            for j in range(ny):
                apart = evaluate(e, {I: i, J: j, S: 7})
                assert apart == evaluate(substitute(e, {I: expr(0)}), {J: i * ny + j, S: 7})
    assert merged > 30


# -- views -------------------------------------------------------------------------------------------------------------
def test_negative_offsets_are_floored():
    """An interleaving that is read one element earlier: the first element's offset is -1 before it is masked."""
    from fuser import run_fusion
    from fuser.interface import register_fusion

    def shifted(p, u, h):
        y = torch.stack([p, u.reshape(-1)], 1).reshape(-1)
        return torch.stack([torch.cat([h, y[:-1] * 2]), y], 1)

    key = register_fusion(torch.fx.symbolic_trace(shifted), functional=True)
    for rows, columns in ((2, 3), (3, 5), (7, 40)):
        args = (torch.randn(rows * columns), torch.randn(rows, columns), torch.randn(1))
        (got,) = run_fusion(key, list(args))
        assert torch.equal(got, shifted(*args))


