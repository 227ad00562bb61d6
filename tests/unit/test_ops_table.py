"""Every row of the op table x dtype: its C++ cell against eager PyTorch, bit for bit or within its ulps."""

from __future__ import annotations

import collections
import importlib
import itertools
import math
import os
import re
from collections.abc import Iterator

import pytest
import torch

from fuser import machines, ops
from fuser.errors import Unsupported
from tests import forked
from tests.unit import ops_reference
from tests.unit.ops_kernels import COMPILER, Kernel, Library

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler"),
    pytest.mark.xdist_group("ops_table"),  # one worker compiles the cells, not each of them
]

FLOAT_SPECIAL = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    -0.5,
    1.5,
    2.5,
    -2.5,
    3.0,
    math.inf,
    -math.inf,
    math.nan,
    1e-3,
    100.0,
    -100.0,
]
DIVISIONS = ("floor_div", "trunc_div", "remainder", "fmod", "gcd", "lcm")  # in which eager raises, or wraps
ALL = bool(os.environ.get("FUSER_TEST_ALL"))
HALVES = (torch.float16, torch.bfloat16)


def key(name: str, dtype: torch.dtype) -> str:
    return f"{name}_{str(dtype).removeprefix('torch.')}"


def has_cell(row: ops.OpRow, dtype: torch.dtype) -> bool:
    try:
        ops.cpp_cell(row.name, dtype, *"abc"[: row.arity])
    except Unsupported:
        return False
    return True


CELLS = {row.name: [d for d in row.dtypes if has_cell(row, d)] for row in ops.OPS.values()}


def is_taken(place: int, number: int, of: int) -> bool:
    """Whether a run tests a dtype of a row: every second one, alternately, and the only one of a row."""
    return ALL or of == 1 or (place + number) % 2 == 0


CASES = [
    (ops.OPS[name], d)
    for place, (name, dtypes) in enumerate(CELLS.items())
    for number, d in enumerate(dtypes)
    if is_taken(place, number, len(dtypes))
]
IDS = [key(row.name, d) for row, d in CASES]


def arg_dtypes(row: ops.OpRow, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    return tuple(torch.bool if s == "b" else dtype for s in row.signature or "t" * row.arity)


def op_kernels() -> list[Kernel]:
    """The cells of the cases, and of the tests of special functions."""
    special = [(ops.OPS[name], d) for name in (*BORDERS, "exp_down") for d in CELLS[name] if d.is_floating_point]
    return [
        Kernel(
            key(row.name, d),
            arg_dtypes(row, d),
            row.result_dtype(d),
            ops.cpp_cell(row.name, d, *("x0", "x1", "x2")[: row.arity]),
        )
        for row, d in {key(row.name, d): (row, d) for row, d in [*CASES, *special]}.values()
    ]


POLYNOMIALS = {name for name in ops.OPS if "polynomial" in name}
STORED = (*ops.ALL, *HALVES)
CONVERSIONS = [(a, b) for a in STORED for b in STORED]


def conversion_kernels() -> list[Kernel]:
    return [Kernel(f"to_{key(key('', a), b)}", (a,), b, ops.cpp_convert(a, b, "x0")) for a, b in CONVERSIONS]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return Library([*op_kernels(), *conversion_kernels()], tmp_path_factory.mktemp("ops"))


def special_values(dtype: torch.dtype) -> list[float]:
    if dtype is torch.bool:
        return [False, True]
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        return sorted(
            {
                info.min,
                info.min + 1,
                info.max,
                info.max - 1,
                0,
                1,
                2,
                3,
                7,
                8,
                31,
                63,
                *([-1, -2, -3, -8] if info.min else [255]),
            }
        )
    info = torch.finfo(dtype)
    return [*FLOAT_SPECIAL, info.max, -info.max, info.tiny, -info.tiny, info.tiny / 4, -info.tiny / 8, info.eps]


def random_values(dtype: torch.dtype, domain: tuple[float, float], n: int, generator: torch.Generator) -> torch.Tensor:
    if dtype is torch.bool:
        return torch.rand(n, generator=generator) < 0.5
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        whole = torch.randint(info.min, info.max, (n,), generator=generator, dtype=dtype)
        small = torch.randint(max(info.min, -9), 9, (n,), generator=generator, dtype=dtype)
        return torch.where(torch.rand(n, generator=generator) < 0.5, whole, small)
    low, high = domain
    return (torch.rand(n, generator=generator, dtype=torch.float64) * (high - low) + low).to(dtype)


def arguments(row: ops.OpRow, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    dtypes = arg_dtypes(row, dtype)
    generator = torch.Generator().manual_seed(len(row.name) + 1)
    specials = list(zip(*itertools.product(*(special_values(d) for d in dtypes)), strict=True))
    # What is compared with mpmath is compared slowly.
    n = 301 if dtype is torch.float64 else 3001
    n = (301 if ALL else 101) if row.name in ops_reference.PRECISE else n
    n = 21 if row.name in ops_reference.SLOW and dtype is torch.float64 else n
    return tuple(
        torch.cat([torch.tensor(s, dtype=d), random_values(d, row.domain, n, generator)])
        for s, d in zip(specials, dtypes, strict=True)
    )


def usable(row: ops.OpRow, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """The arguments that eager takes: it raises for zero divisors, and its process ends for INT_MIN / -1.

    And those a row is made for: `exp_down` is called with nothing above 0, and may give 0 for a denormal.
    """
    if row.name in POLYNOMIALS:  # of NaN eager gives what was in memory
        args = tuple(a[~args[0].isnan()] for a in args)
    if row.name in ops_reference.PRECISE:  # where no digit of eager's phase is left
        args = tuple(a[~(args[0].abs() > 1e15)] for a in args)
    if row.name == "exp_down":
        denormal = (args[0] > -104) & (args[0] < -87)
        args = (args[0].masked_fill((args[0] > 0) | denormal, 0.0),)
    if args[0].is_floating_point() or row.name not in DIVISIONS:
        return args
    low = torch.iinfo(args[0].dtype).min
    if row.name in ("gcd", "lcm"):
        keep = (args[0] != low) & (args[1] != low) if low else torch.ones_like(args[0], dtype=torch.bool)
    else:
        keep = (args[1] != 0) & ~(
            (args[0] == low) & (args[1] == -1) if low else torch.zeros_like(args[0], dtype=torch.bool)
        )
    return tuple(a[keep] for a in args)


def ulp_error(name: str, args: tuple[torch.Tensor, ...], value: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """|value - reference| in units of the last place of value's dtype; NaN where the reference is not finite in it."""
    info = torch.finfo(value.dtype)
    scale = reference.abs()
    if name in ops_reference.CANCELLING:
        scale = torch.stack([scale, *(a.double().abs() for a in args)]).amax(0)
    if name in ops_reference.ABSOLUTE:
        scale = torch.ones_like(scale)
    exponent = torch.frexp(scale.clamp(info.tiny, info.max))[1].double() - 1
    error = (value.double() - reference).abs().nan_to_num(math.inf) / torch.exp2(exponent + math.log2(info.eps))
    return torch.where(torch.isfinite(reference.to(value.dtype)), error, math.nan)


def float_errors(row: ops.OpRow, args: tuple[torch.Tensor, ...], *values: torch.Tensor) -> list[torch.Tensor]:
    """Ulps that each of `values` is off: from torch in float64 for float32 results, from mpmath for float64."""
    if row.name not in POLYNOMIALS and (values[0].dtype is torch.float64 or row.name in ops_reference.PRECISE):
        return ops_reference.errors(row.name, args, *values)
    wide = row.eval(*(a.double() for a in args))
    found = [ulp_error(row.name, args, v, wide) for v in values]
    if row.name in POLYNOMIALS:  # recurrences lose digits, and eager's alike, or have those of the form by angles
        eager = row.eval(*args).double()
        found = [torch.minimum(ulp_error(row.name, args, v, eager), error) for v, error in zip(values, found)]
    return found


def show(args: tuple[torch.Tensor, ...], got: torch.Tensor, want: torch.Tensor, bad: torch.Tensor) -> str:
    at = bad.nonzero().flatten()[:8].tolist()
    return f"{len(bad.nonzero())} wrong: " + "; ".join(
        f"{[a[i].item() for a in args]} gave {got[i].item()}, not {want[i].item()}" for i in at
    )


def same_bits(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    if not got.is_floating_point():
        return got == want
    return ((got == want) & (got.signbit() == want.signbit())) | (got.isnan() & want.isnan())


@pytest.mark.parametrize(("row", "dtype"), CASES, ids=IDS)
def test_cell_against_eager(library: Library, row: ops.OpRow, dtype: torch.dtype) -> None:
    args = usable(row, arguments(row, dtype))
    got = library.run(key(row.name, dtype), *args)
    want = row.eval(*args)
    assert got.dtype == want.dtype
    if row.ulps == 0 or not dtype.is_floating_point:
        same = same_bits(got, want)
        assert same.all(), show(args, got, want, ~same)
        return
    error, eager = float_errors(row, args, got, want)
    # Without a finite truth, as for infinite arguments, eager is the truth.
    error = torch.where(error.isnan(), ulp_error(row.name, args, got, want.double()).nan_to_num(0.0), error)
    bad = error > torch.maximum(torch.tensor(row.ulps), eager.nan_to_num(0.0))
    bad |= ~torch.isfinite(got) & ~same_bits(got, want)
    bad |= (got == 0) & (want == 0) & (got.signbit() != want.signbit())
    assert not bad.any(), show(args, got, want, bad)


# Where the forms of special functions change from one polynomial to the next, and where they cancel.
BORDERS = {
    "lgamma": ((1.0, 8.2), (-9.0, 0.0)), "digamma": ((0.9, 8.2), (-9.0, 0.0)),
    "erfinv": ((0.998, 0.9985), (-1e-6, 1e-6)),
    "i0": ((7.9, 8.1),), "i1": ((-8.1, -7.9),), "i0e": ((7.9, 8.1),), "i1e": ((-8.1, -7.9),),
    "k0": ((0.9, 1.1),), "k1": ((0.9, 1.1),), "erfcx": ((-26.0, 0.0), (0.0, 1.0)), "log_ndtr": ((-1.0, 1.0),),
}  # fmt: skip


@pytest.mark.parametrize(("name", "low", "high"), [(n, *r) for n, ranges in BORDERS.items() for r in ranges])
def test_special_functions_where_their_forms_meet(library: Library, name: str, low: float, high: float) -> None:
    row = ops.OPS[name]
    for dtype, n in ((torch.float64, 61 if name in ops_reference.SLOW else 301), (torch.float32, 3001)):
        x = random_values(dtype, (low, high), n, torch.Generator().manual_seed(7))
        got, want = library.run(key(name, dtype), x), row.eval(x)
        error, eager = (e.nan_to_num(0.0) for e in float_errors(row, (x,), got, want))
        bad = error > torch.maximum(torch.tensor(row.ulps), eager)
        assert not bad.any(), show((x,), got, want, bad)


def test_exp_down_gives_a_denormal_or_zero(library: Library) -> None:
    x = torch.linspace(-104, -87, 4096)
    got = library.run(key("exp_down", torch.float32), x)
    assert ((got.double() - x.double().exp()).abs() <= torch.finfo(torch.float32).tiny).all() and (got >= 0).all()


@pytest.mark.parametrize(("a", "b"), CONVERSIONS, ids=[f"{a}-{b}".replace("torch.", "") for a, b in CONVERSIONS])
def test_conversion_against_eager(library: Library, a: torch.dtype, b: torch.dtype) -> None:
    if a in HALVES:
        x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(a)
    else:
        generator = torch.Generator().manual_seed(5)
        wide = [
            1e3,
            1e-7,
            1e10,
            -3e9,
            1e20,
            65519.99,
            65520.0,
            65504.0,
            2.0**-24,
            2.0**-25,
            2.0**31,
            2.0**63,
            -(2.0**63),
            255.9,
        ]
        x = torch.cat(
            [
                torch.tensor([*special_values(a), *(wide if a.is_floating_point else [])]).to(a)
                if a.is_floating_point
                else torch.tensor(special_values(a), dtype=a),
                random_values(a, (-7e4, 7e4), 2000, generator),
                random_values(a, (-1e-5, 1e-5), 2000, generator),
                random_values(a, (-300, 300), 2001, generator),
            ]
        )
    got, want = library.run(f"to_{key(key('', a), b)}", x), x.to(b)
    same = same_bits(got, want)
    assert same.all(), show((x,), got, want, ~same)


def test_helpers_of_rare_functions_are_loaded_when_they_are_needed() -> None:
    rare = ("special_cpp", "bessel_cpp", "fits", "polynomials_cpp")
    code = (
        "import sys, torch\nfrom fuser import machines, ops, pipeline\nfrom fuser.cpu import fused_kernel\n"
        f"rare = {rare}\nloaded = lambda: [n for n in rare if 'fuser.ops.' + n in sys.modules]\n"
        "assert not loaded(), loaded()\nops.cpp_cell('tanh', torch.float32, 'a')\nassert not loaded(), loaded()\n"
        "text = ops.cpp_cell('j0', torch.float32, 'a')\nassert len(loaded()) == 3, loaded()\n"
        "assert 'fuser_j0_f32(float x) {' in ops.prelude_for(ops.helpers_in(text), machines.here())\n"
    )
    done = forked.run(["-c", code])
    assert done.returncode == 0, done.stderr


def test_each_helper_is_written_once_and_called() -> None:
    modules = [m for name, m in vars(ops.prelude).items() if name.endswith("_cpp")] + [ops.random]
    rare = [importlib.import_module(f"fuser.ops.{row.text}") for row in ops.OPS.values() if row.text]
    written = collections.Counter(name for m in modules for name in m.HELPERS)
    rarely = {name for m in rare for name in m.HELPERS}
    assert [name for name, n in written.items() if n > 1 or name in rarely] == []
    for m in rare:
        ops.prelude.load(m.__name__.rpartition(".")[2])
    machines_of = [machines.find("avx512"), machines.find("avx2")]
    called, pending = set(), list(ops.helpers_in("\n".join(cells())))
    while pending:
        name = pending.pop()
        if name not in called:
            called.add(name)
            pending += (need for machine in machines_of for need in ops.prelude._needs(name, machine))
    # Names that the printer makes of dtypes, and the helpers of `scans_cpp`, which all scans of blocks share.
    made = (
        "FUSER_", "fuser_lanes_", "fuser_load_", "fuser_store_", "fuser_round_", "fuser_gather_", "fuser_piece_",
        "fuser_lone_", "fuser_scan_", "fuser_total_", "fuser_vector_", "fuser_word", "fuser_philox_fill",
    )  # fmt: skip
    converts = re.compile(r"fuser_i(32|64)_from_f(32|64)")
    assert [n for n in ops.PRELUDE if n not in called and not n.startswith(made) and not converts.match(n)] == []


def cells() -> Iterator[str]:
    """The text of each cell of the tables."""
    for row, dtype in [(ops.OPS[name], d) for name, dtypes in CELLS.items() for d in dtypes]:
        spelled = (ops.cpp_cell, ops.cpp_lanes, ops.cpp_near, ops.cpp_lanes_near)
        yield from (text for spell in spelled if (text := spell(row.name, dtype, *"abc"[: row.arity])) is not None)
    for table, spell, args in ((ops.REDUCTIONS, ops.cpp_combine, "abcd"), (ops.SCANS, ops.cpp_step, "ab")):
        for row in table.values():
            yield from (spell(row.name, row.accumulate(dtype), *args) for dtype in row.dtypes)


def test_scans_of_indices_are_of_extremes() -> None:
    """Kernels cut no scan of extremes into chunks, so they join no indices of chunks."""
    assert [row.name for row in ops.SCANS.values() if row.index and not row.extreme] == []
