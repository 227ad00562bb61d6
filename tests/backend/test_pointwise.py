"""Every elementwise operator x dtype through a kernel, against eager and float64; many operators to a kernel."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fuser
from tests.backend.support import (
    DTYPES,
    FLOATS,
    INTS,
    SIGNED,
    check_all,
    fused,
    graph_of,
    pairs,
    run,
    values,
)

WIDE = (torch.float64, torch.float32, torch.bfloat16)  # all functions; float16 differs by its loads and stores alone
# One rounding more than eager; for float64, of which there is no wider reference, two more than none.
SLACK = {d: 2 if d is torch.float64 else 1 for d in DTYPES}


def text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def named(names: str, module: Any = torch) -> dict[str, Callable[..., Any]]:
    return {name: getattr(module, name) for name in names.split()}


ELEMENTARY = [
    named("exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal"),
    named("sin cos tan asin acos atan sinh cosh tanh"),
    named("asinh acosh atanh erf erfc sigmoid sinc logit"),
]
EXACT = named(
    "abs neg sign sgn floor ceil trunc round frac square relu positive isnan isinf isfinite signbit logical_not "
    "isposinf isneginf isreal nan_to_num"
)
BY_NUMBER: dict[str, Callable[..., Any]] = {
    "add_alpha": lambda x: torch.add(x, 3, alpha=2),
    "rsub": lambda x: torch.rsub(x, 2, alpha=3),
    "mul": lambda x: x * 2,
    "pow2": lambda x: x**2,
    "pow3": lambda x: x**3,
    "clamp": lambda x: x.clamp(1, 3),
    "clamp_min": lambda x: x.clamp(min=2),
    "clamp_max": lambda x: x.clamp_max(2),
    "floor_divide": lambda x: x // 3,
    "remainder": lambda x: x % 3,
    "fmod": lambda x: torch.fmod(x, 3),
    "div_trunc": lambda x: torch.div(x, 3, rounding_mode="trunc"),
    "where": lambda x: torch.where(x > 1, x, 2),
    "masked_fill": lambda x: x.masked_fill(x > 1, 2),
    "fill": lambda x: torch.fill(x, 1),
    "eq": lambda x: x == 2,
    "gt": lambda x: x > 2,
    "logical_and": lambda x: torch.logical_and(x, x),
}
BY_FLOAT: dict[str, Callable[..., Any]] = {
    "add": lambda x: x + 0.1,
    "mul": lambda x: x * 1.1,
    "div": lambda x: x / 3,
    "rdiv": lambda x: 3 / x,
    "pow_half": lambda x: x**0.5,
    "pow_neg": lambda x: x**-1,
    "rpow": lambda x: 2**x,
    "leaky": lambda x: F.leaky_relu(x, 0.2),
    "lt": lambda x: x < 0.3,
    "round2": lambda x: torch.round(x, decimals=2),
    "deg2rad": torch.deg2rad,
    "rad2deg": torch.rad2deg,
}
ACTIVATIONS: dict[str, Callable[..., Any]] = {
    **named("silu mish relu6 hardtanh hardsigmoid hardswish elu selu celu softplus logsigmoid hardshrink", F),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "softshrink": F.softshrink,
    "softsign": F.softsign,
    "tanhshrink": F.tanhshrink,
    "threshold": lambda x: F.threshold(x, 0.1, 20),
    "leaky_relu": F.leaky_relu,
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", WIDE, ids=text)
@pytest.mark.parametrize("part", range(3))
def test_elementary(dtype, part):
    functions = ELEMENTARY[part]
    check_all(list(functions), list(functions.values()), values(dtype), slack=SLACK[dtype])


@pytest.mark.parametrize("dtype", FLOATS, ids=text)
def test_exact(dtype):
    check_all(list(EXACT), list(EXACT.values()), values(dtype), slack=0)


@pytest.mark.parametrize("dtype", WIDE, ids=text)
def test_activations(dtype):
    x = torch.cat([values(dtype, 200, -12, 12), torch.tensor([float("nan")], dtype=dtype)])
    # In float64 too the formulas of gelu lose their small values.
    exact = {
        **ACTIVATIONS,
        "gelu": lambda v: v * 0.5 * torch.special.erfc(-v * math.sqrt(0.5)),
        "gelu_tanh": lambda v: v * torch.sigmoid(math.sqrt(8 / math.pi) * (v + 0.044715 * v**3)),
    }
    options = {"slack": SLACK[dtype], "zeros": False, "floor": dtype is torch.float64}
    check_all(list(ACTIVATIONS), list(ACTIVATIONS.values()), x, exact=list(exact.values()), **options)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [*WIDE, torch.int64, torch.int8, torch.uint8], ids=text)
def test_by_number(dtype):
    check_all(list(BY_NUMBER), list(BY_NUMBER.values()), values(dtype), slack=0)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.uint8, torch.bool], ids=text)
def test_by_float(dtype):
    """A float beside integers makes the default dtype."""
    functions = BY_FLOAT if dtype.is_floating_point else {k: BY_FLOAT[k] for k in ("add", "mul", "div", "rpow", "lt")}
    check_all(list(functions), list(functions.values()), values(dtype), slack=SLACK[dtype])


OF_WHOLE = named("exp sqrt sin sigmoid tanh log1p erf")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [*INTS, torch.bool], ids=text)
def test_whole_numbers(dtype):
    x = values(dtype)  # which is rounded to float32 first
    check_all(list(OF_WHOLE), list(OF_WHOLE.values()), x, wide=x.float().double())
    functions = named("square bitwise_not isnan isinf isfinite signbit logical_not")
    if dtype is not torch.bool:
        functions |= named("abs neg sign floor ceil trunc round relu positive")
        functions |= {
            "shift": lambda x: x << 2, "rshift": lambda x: x >> 3, "and": lambda x: x & 5, "xor": lambda x: x ^ 3
        }  # fmt: skip
    else:
        functions |= {"and": lambda x: x & True, "or": lambda x: x | False, "xor": lambda x: x ^ True}
    check_all(list(functions), list(functions.values()), values(dtype))


BINARY: dict[str, Callable[..., Any]] = {
    **named("add mul maximum minimum eq ne lt le gt ge logical_and logical_or logical_xor"),
    "where": lambda a, b: torch.where(a > b, a, b),
}
FLOAT_BINARY = {
    **named("sub div fmax fmin copysign atan2 hypot fmod remainder heaviside logaddexp logaddexp2 xlogy"),
    "floor_divide": torch.floor_divide,
    "div_trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
}
INT_BINARY = {
    **named("sub fmax fmin gcd bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift"),
    "div": torch.div,
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=text)
def test_binary(dtype):
    check_all(list(BINARY), list(BINARY.values()), *pairs(dtype), slack=0)


@pytest.mark.parametrize("dtype", WIDE, ids=text)
def test_binary_of_floats(dtype):
    a, b = pairs(dtype)
    lost = a.isfinite() & (b != 0) & (a.double().abs() > 2.0**40 * b.double().abs())  # where eager's fmod is NaN
    a, b = a[~lost], b[~lost]
    check_all(list(FLOAT_BINARY), list(FLOAT_BINARY.values()), a, b, slack=SLACK[dtype], floor=dtype is torch.float64)


@pytest.mark.parametrize("dtype", INTS, ids=text)
def test_binary_of_integers(dtype):
    check_all(list(INT_BINARY), list(INT_BINARY.values()), *pairs(dtype), slack=1)


DIVISIONS: dict[str, Callable[..., Any]] = {
    "floor": torch.floor_divide,
    "trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "remainder": torch.remainder,
    "fmod": torch.fmod,
}


@pytest.mark.parametrize("dtype", INTS, ids=text)
def test_integer_division(dtype):
    a, b = pairs(dtype)
    low = torch.iinfo(dtype).min
    keep = (b != 0) & ~((a == low) & (b == -1) if low else torch.zeros_like(b, dtype=torch.bool))
    check_all(list(DIVISIONS), list(DIVISIONS.values()), a[keep], b[keep])


def test_division_by_zero_raises_as_eager():
    graph = graph_of([DIVISIONS["remainder"]], 2)
    assert fused(graph, [torch.arange(9), torch.arange(1, 10)])[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        fuser.run_fusion(fuser.register_fusion(graph), [torch.arange(9), torch.arange(9)])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("source", DTYPES, ids=text)
def test_casts(source):
    """Every dtype to every other, by numbers that fit; integers wrap."""
    x = values(source)
    if source.is_floating_point:
        x = torch.cat([x[x.abs() < 100], torch.arange(-100, 101, 7).to(source) / 2])
    functions = {text(d): lambda v, d=d: v.to(d) if d is not source else v + v for d in DTYPES}
    if source.is_floating_point:
        x = x.abs()
    check_all(list(functions), list(functions.values()), x, slack=0)


def test_casts_round_where_the_user_casts():
    x = torch.randn(100)
    out, eager, _ = run([lambda v: v.to(torch.bfloat16).to(torch.float32) * 3 - v], x)
    assert torch.equal(out[0], eager[0])


MIXED = [
    (torch.float32, torch.int64), (torch.bfloat16, torch.float16), (torch.float16, torch.float64),
    (torch.int8, torch.uint8), (torch.bool, torch.int16), (torch.bfloat16, torch.bool), (torch.int32, torch.float16),
]  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtypes", MIXED, ids=lambda d: "-".join(map(text, d)))
def test_promotion(dtypes):
    """Tensors of two dtypes, the second also without dims, and a number."""
    a, b = values(dtypes[0], 40), values(dtypes[1], 40)
    small = (b.double().abs() < 50) & a.double().isfinite()
    a, b = a[small], b[small]
    scalar = b[3].clone()
    functions: dict[str, Callable[..., Any]] = {
        "add": lambda x, y, z: x + y, "add0": lambda x, y, z: x + z, "mul": lambda x, y, z: x * y,
        "max": lambda x, y, z: torch.maximum(x, y), "lt": lambda x, y, z: x < y,
        "gt0": lambda x, y, z: x > z, "where": lambda x, y, z: torch.where(x > 1, x, y),
        "where0": lambda x, y, z: torch.where(x > 1, z, x), "number": lambda x, y, z: x + 2 + z,
        "eq": lambda x, y, z: x == y, "addcmul": lambda x, y, z: torch.add(x, y, alpha=2),
    }  # fmt: skip
    if torch.bool in dtypes:
        functions.pop("addcmul")
    check_all(list(functions), list(functions.values()), a, b, scalar)


def test_numbers_as_inputs():
    """Python numbers given at the call: an int, a float, a bool."""
    functions = [
        lambda x, i, f, b: x * i + f, lambda x, i, f, b: torch.where(x > f, x, i), lambda x, i, f, b: x.clamp(f, i),
        lambda x, i, f, b: torch.add(x, x, alpha=f), lambda x, i, f, b: x**i, lambda x, i, f, b: x + b,
    ]  # fmt: skip
    for x in (torch.randn(40), torch.randn(40).bfloat16(), torch.randn(40).double()):
        check_all([f"{n} {text(x.dtype)}" for n in range(len(functions))], functions, x, 3, 0.25, True, slack=1)


def test_ternary():
    functions = [
        lambda a, b, c: torch.addcmul(a, b, c, value=0.5), lambda a, b, c: torch.addcdiv(a, b, c.abs() + 1, value=2),
        torch.lerp, lambda a, b, c: torch.lerp(a, b, 0.3), torch.clamp, lambda a, b, c: torch.where(a > b, b, c),
        lambda a, b, c: torch.isclose(a, b), lambda a, b, c: a.masked_fill(b > 0, 1), torch.addcmul,
        lambda a, b, c: torch.sub(a, b, alpha=0.3), lambda a, b, c: torch.rsub(a, b, alpha=0.7),
    ]  # fmt: skip
    for dtype in WIDE:
        a, b, c = (torch.randn(64, dtype=torch.float64).to(dtype) for _ in range(3))
        check_all([f"{n} {text(dtype)}" for n in range(len(functions))], functions, a, b, c, slack=2)


def scaled_sums(alpha):
    return (
        lambda x, y: torch.add(x, y, alpha=alpha).floor(), lambda x, y: torch.sub(x, y, alpha=alpha).int(),
        lambda x, y: torch.rsub(x, y, alpha=alpha) > 0.3, lambda x, y: torch.add(x, 2.7, alpha=alpha) % (y + 1.7),
    )  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("numerics", ["fast", "eager"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scaled_sums_that_decide_have_eagers_bits(dtype, numerics):
    """Eager rounds the factor and the number to the tensors' dtype. The sizes have no tail, where it rounds more."""
    a, b = (torch.randn(1024, generator=torch.Generator().manual_seed(n)).mul(9).to(dtype) for n in (1, 2))
    for alpha in (0.3, 0.7, -5.1):  # the first is a constant of its graph, the others are arguments
        for fn in scaled_sums(alpha):
            with fuser.config.override(numerics=numerics):
                handle = fuser.fusion_handle(fuser.register_fusion(torch.fx.symbolic_trace(fn)))
            assert torch.equal(torch.nan_to_num(handle(a, b)), torch.nan_to_num(fn(a, b)))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool])
def test_what_eager_refuses_of_float_factors(dtype):
    x = torch.ones(3, dtype=dtype)
    for alpha in (0.3, 0.7):
        handle = fuser.fusion_handle(fuser.register_fusion(torch.fx.symbolic_trace(scaled_sums(alpha)[0])))
        with pytest.raises(RuntimeError, match="alpha"):
            handle(x, x)


def test_signed_shifts_beyond_the_width():
    for dtype in SIGNED:
        by = torch.tensor([0, 1, 6, 7, 8, 15, 31, 63, 64]).to(dtype)
        a, b = values(dtype, 20).repeat_interleave(9), by.repeat(20)
        names = ["left", "right"]
        check_all(names, [torch.bitwise_left_shift, torch.bitwise_right_shift], a, b)


MASK, ROW = torch.tensor([True, False, True]), torch.ones(3)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, m: (x + 1) - m,
        lambda x, m: m - (x + 1),
        lambda x, m: m - m,
        lambda x, m: torch.rsub(m, x),
        lambda x, m: -(m & (x > 0)),
    ],
)
def test_what_eager_refuses_of_masks(fn):
    handle = fuser.fusion_handle(fuser.register_fusion(torch.fx.symbolic_trace(fn)))
    with pytest.raises(RuntimeError) as want:
        fn(ROW, MASK)
    with pytest.raises(RuntimeError) as got:
        handle(ROW, MASK)
    assert str(got.value) == str(want.value)
