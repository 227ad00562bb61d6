"""numerics="eager" on float16 and bfloat16: every value, pairs of special ones, what is known of rows beforehand."""

from __future__ import annotations

import ctypes
import dataclasses
import re

import pytest
import torch
import torch.fx

from fuser import config, machines, register_fusion
from fuser.cpu import toolchain
from fuser.kernel_cache import REGISTRY
from fuser.ops import lanes_cpp
from tests.backend.test_numerics import same_bits

HALVES = (torch.bfloat16, torch.float16)
# Zeros, ones, smallest and largest denormals and normals, infinities, quiet and signalling NaNs of both halves, ties.
SPECIAL = (
    0x0000, 0x0001, 0x0002, 0x0003, 0x007F, 0x0080, 0x0081, 0x03FF, 0x0400, 0x0401, 0x0800, 0x1000, 0x2E66, 0x3800,
    0x3C00, 0x3C01, 0x3DCD, 0x3F00, 0x3F80, 0x3F81, 0x4000, 0x4248, 0x5640, 0x6400, 0x77FF, 0x7800, 0x7BFE, 0x7BFF,
    0x7C00, 0x7C01, 0x7DFF, 0x7E00, 0x7F7F, 0x7F80, 0x7F81, 0x7FBF, 0x7FC0, 0x7FFF,
)  # fmt: skip


def pattern(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values with these bits, integers from 0 to 0xffff."""
    return (bits - (bits >= 0x8000).long() * 0x10000).to(torch.int16).view(dtype)


def both_signs() -> torch.Tensor:
    return torch.cat([torch.tensor(SPECIAL), torch.tensor(SPECIAL) + 0x8000])


def run(library: str, name: str, tensors: list[torch.Tensor], n: int) -> None:
    """Call a pointwise kernel of one dim over all its units."""
    pointers = (ctypes.c_void_p * len(tensors))(*(t.data_ptr() for t in tensors))
    sizes, status = (ctypes.c_longlong * 1)(n), ctypes.c_int(0)
    units = (ctypes.c_longlong(0), ctypes.c_longlong(-(-n // 4096)))
    getattr(ctypes.CDLL(library), name)(pointers, sizes, (ctypes.c_double * 1)(), *units, None, ctypes.byref(status))


def handle_of(fn, mode="eager"):
    with config.override(numerics=mode):
        return REGISTRY.find(register_fusion(torch.fx.symbolic_trace(fn))).handle


def chain(x, y):
    """Each result after two to four roundings, and some of what needs none."""
    a, b = x * y, x + y
    c, d = a - b * 0.5, x / y
    e = torch.where(a > b, torch.maximum(c, x), torch.minimum(y, -d))
    return a, b, c * d + x, e, e.abs() * 4, (d - y) * 0.25, torch.relu(x) - torch.where(x < y, a, 1.5)


def crossing(x, y):
    """From float32 to halves and back, and from one half to the other: the largest half is none of bfloat16."""
    p, q = x.to(torch.bfloat16), y.to(torch.float16)
    a, b = q.to(torch.bfloat16), p.to(torch.float16)
    return a.to(torch.float16), b.to(torch.bfloat16), p * 2 + a, q * 2 - b, p.float() + q.float(), a.float() * y


@pytest.mark.parametrize("dtype", HALVES)
def test_every_value_has_eagers_bits(dtype):
    """All 65,536, each beside others of all kinds, in a number that leaves a rest in every loop."""
    every = torch.arange(0x10000)
    others = torch.cat([(every * 40503 + 977) % 0x10000, every.flip(0)])
    special = both_signs()
    x = pattern(torch.cat([every, every, every, special[:3]]), dtype)
    y = pattern(torch.cat([others, special[every % len(special)], special[:3]]), dtype)
    for got, want in zip(handle_of(chain)(x, y), chain(x, y)):
        assert same_bits(got, want)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("n", [1, 7, 15, 16, 17, 31, 33, 63, 65, 76 * 76])
def test_pairs_of_special_values_have_eagers_bits(dtype, n):
    special = both_signs()
    x, y = (pattern(t.reshape(-1)[-n:], dtype) for t in torch.meshgrid(special, special, indexing="ij"))
    for got, want in zip(handle_of(chain)(x, y), chain(x, y)):
        assert same_bits(got, want)


@pytest.mark.parametrize("mode", ["fast", "eager"])
def test_casts_between_halves_round_as_eagers(mode):
    """NaNs with any bits, of which rounding like a number would make a zero; numbers around what a half can hold."""
    high = torch.cat([torch.arange(0, 0x10000, 61), both_signs()])
    bits = (high[:, None] * 0x10000 + torch.tensor([0, 1, 0x1000, 0x7FFF, 0x8000, 0x8001, 0xFFFF])).reshape(-1)
    x = (bits - (bits >= 2**31).long() * 2**32).to(torch.int32).view(torch.float32)
    y = x.flip(0)
    casts = handle_of(lambda x, y: crossing(x, y)[:2] + crossing(x, y)[4:5], mode)
    want = crossing(x, y)
    for got, expected in zip(casts(x, y), (*want[:2], want[4])):
        assert same_bits(got, expected)
    if mode == "eager":
        for got, expected in zip(handle_of(crossing)(x, y), want):
            assert same_bits(got, expected)


def test_the_largest_half_is_not_exact_after_bfloat16():
    x = torch.tensor([65504.0, 65280.0, -65504.0], dtype=torch.float16)

    def fn(x):
        return x.to(torch.bfloat16).to(torch.float16).to(torch.float32)

    assert torch.equal(handle_of(fn)(x), torch.tensor([torch.inf, 65280.0, -torch.inf]))


def test_sums_of_bfloat16_are_rounded_without_a_look_at_nan():
    """But not where a NaN may have come from float32."""

    def fn(x, y):
        return (x * y + x) * y - x

    def cast(x, y):
        return x.to(torch.bfloat16) * y.to(torch.bfloat16) + 1

    for body, dtype, kind in ((fn, torch.bfloat16, "tame_"), (cast, torch.float32, "")):
        with config.override(numerics="eager"):
            registration = REGISTRY.find(register_fusion(torch.fx.symbolic_trace(body)))
        x = torch.tensor([1.5, -2.25, torch.nan], dtype=dtype)
        assert same_bits(registration.handle(x, x), body(x, x))
        source = registration.spec.store.kernels[-1].source
        assert f"= fuser_round_{kind}bfloat16(" in source
        assert kind or "= fuser_round_tame_bfloat16(t" in source  # of the product, whose arguments were rounded


def elementary(x):
    """The functions that kernels compute in explicit vectors where the machine has them."""
    logs = x.log(), x.log2(), x.log10(), x.log1p()
    return *logs, x.exp(), x.exp2(), x.expm1(), x.tanh(), x.sigmoid(), x.erf(), torch.nn.functional.gelu(x)


def arithmetic(x):
    y = torch.where(x > 2, x * 1.3 + x, torch.minimum(x.abs(), x - 0.7) / x)
    return y, y.float() * x, x.to(torch.float32), torch.isnan(y) | (y < x), torch.maximum(-y, torch.relu(x))


def conditions(x):
    """Loads under conditions on the index, which are lanes of a vector."""
    pad = torch.nn.functional.pad
    rolled, joined = torch.roll(x, 3) + x, torch.cat((x[3:], x[:3] * 2)) + 1
    return rolled, joined, pad(x, (-2, 2)) * 2, pad(x, (7, -7)) > 0, x.flip(0) * 2


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("fn", [elementary, arithmetic, conditions])
def test_explicit_vectors_and_plain_loops_give_the_same_bits(fn, dtype):
    """This machine's vectors, vectors of 8 and the plain loop give the same bits on every machine."""
    machine = machines.find(config.isa)
    if not machine.lanes:
        pytest.skip(f"{machine.name} has no explicit vectors")
    with config.override(numerics="eager"):
        registration = REGISTRY.find(register_fusion(torch.fx.symbolic_trace(fn), functional=True))
    x = pattern(torch.arange(0x10000 + 37) % 0x10000, dtype)[:: 200 if fn is conditions else 1].clone()
    results = registration.handle(x)
    kernel = registration.spec.store.kernels[-1]
    assert re.search(r"#if FUSER_LANES\s+\{", kernel.source)
    of_8 = lanes_cpp._lanes(dataclasses.replace(machine, lanes="avx2", dots=False))
    assert (own := lanes_cpp._lanes(machine)) in kernel.source
    for text in (of_8, own.replace("#if defined(__clang__)", "#if 1")):
        source = kernel.source.replace(own, text)
        names = re.findall(r'extern "C" void (k\w+)\(char', source)
        outs = [torch.full_like(r, 7) for r in results]
        for name in names:
            run(toolchain.compile_library((source,)), name, [x, *outs], len(x))
        for got, want in zip(outs, results):
            assert torch.equal(got, want) if got.dtype is torch.bool else same_bits(got, want)


def rows(x):
    return torch.softmax(x, -1), torch.nn.functional.layer_norm(x, (x.shape[-1],)), x.sum(-1), x.amax(-1)


def padded_rows(x):
    pad = torch.nn.functional.pad
    larger = torch.softmax(pad(x, (1, 2)), -1), pad(x, (2, 1, 1, 0)).amax(-1)
    return *larger, pad(x, (-1, 3), value=2.0).sum(-1), x.sum(-1)


def columns(x):
    return torch.softmax(x, 0), x.sum(0), x.amax(0)


@pytest.mark.sampled(8, also=("shape0-padded_rows-eager", "shape2-rows-eager"))
@pytest.mark.parametrize("mode", ["fast", "eager"])
@pytest.mark.parametrize("fn", [rows, columns, padded_rows])
@pytest.mark.parametrize("shape", [(3, 5), (37, 64), (9, 1000), (4, 2077), (130, 33)])
def test_reductions_of_float16_are_those_of_the_same_float32(fn, shape, mode):
    """Denormals, whole pieces and rests: what is read is exact, what is written rounds once."""
    with config.override(numerics=mode):  # with a kernel of its own, not one made for the sizes of another test
        own = lambda x: (*fn(x), x.new_full((), shape[1]))  # noqa: E731
        registration = REGISTRY.find(register_fusion(torch.fx.symbolic_trace(own)))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(5)) * 3
    x[0, 0], x[-1, -1], x[1, 1] = 6e-8, -1e-5, -0.0
    x = x.to(torch.float16)
    *results, _ = registration.handle(x)
    if shape[1] >= 64:  # shorter rows are lanes of a vector
        assert "fuser_piece_" in registration.spec.store.kernels[-1].source
    for got, want in zip(results, fn(x.double())):
        ulp = torch.maximum(want.abs(), torch.tensor(2.0**-14)) * 2.0**-10
        assert bool(((got.double() - want).abs() <= 0.51 * ulp).all())


def test_loops_that_only_the_compiler_vectorises_convert_pieces_of_float16():
    def fn(x, i):
        return torch.where(i > 3, torch.sin(x), x * i), (x * 2).to(torch.int32)

    handle = handle_of(fn, "fast")
    for n in (1, 15, 1024, 5000):
        x = torch.linspace(-60.0, 60.0, n).to(torch.float16)
        i = torch.arange(n) % 7
        (got, whole), (want, integers) = handle(x, i), fn(x.double(), i)
        assert torch.equal(whole, integers)
        assert bool(
            ((got.double() - want).abs() <= 0.51 * 2.0**-10 * torch.maximum(want.abs(), torch.tensor(1e-4))).all()
        )
