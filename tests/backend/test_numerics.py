"""numerics="eager": chains of simple operations give eager's bits. In every mode a user's cast rounds."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.fx

from fuser import config, register_fusion
from fuser.kernel_cache import REGISTRY

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SPECIAL = (0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1.0, 65504.0, 1e-8, -3.3e38)


def values(size: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Normal numbers of all magnitudes, every fifth a special one."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(size, generator=g) * 10 ** (torch.rand(size, generator=g) * 6 - 3)
    odd = torch.tensor(SPECIAL)[torch.randint(0, len(SPECIAL), size, generator=g)]
    return torch.where(torch.rand(size, generator=g) < 0.2, odd, x).to(dtype)


def chain(seed: int, first: torch.dtype, other: torch.dtype) -> Any:
    """A function of three tensors: twelve operations of those that are promised, three results."""

    def fn(x: Any, y: Any, m: Any) -> Any:
        rng = random.Random(seed)
        live = [x, y]
        for _ in range(12):
            a, b = rng.choice(live[-3:]), rng.choice(live)
            live.append(_operation(rng, a, b, m, (first, other)))
        return live[-1], live[-2], live[-3]

    return fn


def _operation(rng: random.Random, a: Any, b: Any, m: Any, dtypes: tuple[torch.dtype, torch.dtype]) -> Any:
    kind = rng.randrange(11)
    number = rng.choice((0.1, 3, -2.5, 1 / 3, 1e-3))
    if kind == 0:
        return a.to(rng.choice((*dtypes, torch.float32)))
    if kind == 1:
        return torch.where(m, a, b)
    if kind == 2:
        return rng.choice((torch.maximum, torch.minimum))(a, b)
    if kind == 3:
        return a.clamp(-7.7, 9.1)
    if kind in (4, 5):
        return rng.choice((torch.add, torch.sub, torch.mul, torch.div))(a, number)
    if kind == 6:
        return torch.rsub(a, number)
    return rng.choice((torch.add, torch.sub, torch.mul, torch.div))(a, b)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits; a NaN equals a NaN."""
    if a.dtype is not b.dtype or a.shape != b.shape:
        return False
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.dtype.itemsize]
    x, y = a.contiguous().view(whole), b.contiguous().view(whole)
    return bool(((x == y) | (a.isnan() & b.isnan())).all())


@pytest.mark.sampled(7, also=("first3-other1",))
@pytest.mark.parametrize("other", DTYPES)
@pytest.mark.parametrize("first", DTYPES)
def test_chains_have_eagers_bits(first, other):
    for seed in range(2):
        fn = chain(seed * 17 + DTYPES.index(first) * 4 + DTYPES.index(other), first, other)
        with config.override(numerics="eager"):
            key = register_fusion(torch.fx.symbolic_trace(fn))
        handle, store = REGISTRY.find(key).handle, REGISTRY.find(key).spec.store
        # Not over strided memory: there eager's maximum of 0.0 and -0.0 is another than over dense memory.
        for size, layout in (((37, 41), "dense"), ((8, 5), "transposed")):
            x, y = values(size, first, seed), values(size, other, seed + 100)
            m = values(size, torch.float32, seed + 200) > 0
            if layout == "transposed":
                x, y, m = (t.t() for t in (x, y, m))
            for got, want in zip(handle(x, y, m), fn(x, y, m)):
                assert same_bits(got, want), (seed, size, (got.double() - want.double()).abs().max())
        assert not store.fallbacks, store.fallbacks


@pytest.mark.parametrize("mode", ["fast", "eager"])
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_a_users_cast_rounds_in_every_mode(mode, low):
    x = values((1000,), torch.float32, 3)

    def fn(x):
        return x.to(low).float() * 3 + 1, (x.to(low) * 1.0).to(torch.float32)

    with config.override(numerics=mode):
        handle = REGISTRY.find(register_fusion(torch.fx.symbolic_trace(fn))).handle
    for got, want in zip(handle(x), fn(x)):
        assert same_bits(got, want)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_rounding_in_float_is_a_store_and_a_load(low):
    """Floats of every exponent, ties, denormals of both, overflow, NaN with and without low bits."""
    bits = torch.arange(-(2**31), 2**31, 4093)
    ties = (torch.arange(0, 2**16)[:, None] * 2**16 + torch.tensor([0x7FFF, 0x8000, 0x8001, 0x1000, 0x3000])).flatten()
    x = torch.cat([bits, ties - 2**31]).to(torch.int32).view(torch.float32)

    def fn(x):
        return x.to(low).to(torch.float32)

    with config.override(numerics="fast"):
        handle = REGISTRY.find(register_fusion(torch.fx.symbolic_trace(fn))).handle
    assert same_bits(handle(x), fn(x))


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_what_a_half_holds_is_not_rounded_again(low):
    def fn(x, y):
        a = torch.where(x > y, torch.maximum(x, -y), torch.relu(y))
        return torch.minimum(a, x.abs()), a * y

    with config.override(numerics="eager"):
        registration = REGISTRY.find(register_fusion(torch.fx.symbolic_trace(fn)))
    x, y = values((300,), low, 1), values((300,), low, 2)
    for got, want in zip(registration.handle(x, y), fn(x, y)):
        assert same_bits(got, want)
    kernel = registration.spec.store.kernels[-1]
    function = kernel.source[kernel.source.index('extern "C" void k') :]
    body = function[function.index("#pragma omp simd") :]
    assert body.count("fuser_round_") == 1  # of the product, for which the store rounds in fact


def test_integers_behave_as_eagers():
    """Overflow wraps, shifts beyond the width, division by what is never zero, casts of what does not fit."""
    i = torch.tensor([2**31 - 1, -(2**31), 7, -7, 0, 1], dtype=torch.int32)
    b = torch.tensor([127, -128, 5, -5, 0, 1], dtype=torch.int8)
    f = torch.tensor([1e30, -1e30, 3.9, -3.9, 255.5, -0.5])

    def fn(i, b, f):
        sums = i + i, i * 3, b - 100, b * b, -i, i.abs()
        return *sums, i << 3, i >> 1, i // 3, i % -3, f.to(torch.int32), f.to(torch.int64)

    handle = REGISTRY.find(register_fusion(torch.fx.symbolic_trace(fn))).handle
    for n, (got, want) in enumerate(zip(handle(i, b, f), fn(i, b, f))):
        assert got.dtype is want.dtype and torch.equal(got, want), n


def test_extremes_with_places_take_the_first_zero():
    """Of both signs. Without places, eager's choice depends on the width of its vectors, and is not followed."""

    def fn(x):
        high, low = torch.max(x, -1), torch.min(x, -1)
        return high[0], high[1], low[0], low[1]

    handle = REGISTRY.find(register_fusion(torch.fx.symbolic_trace(fn))).handle
    for n in (3, 17, 100):
        x = torch.where(torch.rand(20, n, generator=torch.Generator().manual_seed(n)) < 0.5, 0.0, -0.0)
        for got, want in zip(handle(x), fn(x)):
            assert torch.equal(got, want) and torch.equal(got.signbit(), want.signbit())
