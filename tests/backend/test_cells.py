"""Cells that have a second form, for vectors, for narrow types or outside a domain: over all numbers or sizes."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch

from tests.backend.fused import fuse, no_fallback

ELEMENTARY = (
    "sin cos asin acos atan sinh cosh tanh asinh acosh atanh exp exp2 expm1 log log2 log10 log1p erf sigmoid sqrt rsqrt"
    " floor ceil round trunc frac"
).split()  # fmt: skip


def of_one(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: fn(x)


def of_two(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda a, b: fn(a, b)


def every(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a == b) & (a.signbit() == b.signbit()) | a.isnan() & b.isnan()


def test_vectors_of_halves_have_the_bits_of_float32():
    dtypes = (torch.bfloat16, torch.float16)
    for at, name in enumerate(ELEMENTARY):
        fn = getattr(torch, name)
        handle, spec = fuse(of_one(fn))
        for dtype in dtypes if os.environ.get("FUSER_TEST_ALL") else dtypes[at % 2 :][:1]:
            x = every(dtype)
            got, want = handle(x), handle(x.float()).to(dtype)
            assert same(got, want).all(), (name, x[~same(got, want)][:3], got[~same(got, want)][:3])
        no_fallback(spec)


def test_angles_of_halves_have_the_bits_of_float32():
    handle, spec = fuse(of_two(torch.atan2))
    for dtype in (torch.bfloat16, torch.float16):
        y = every(dtype)
        x = y[torch.randperm(len(y), generator=torch.Generator().manual_seed(1))]
        assert same(handle(y, x), handle(y.float(), x.float()).to(dtype)).all()
    no_fallback(spec)


def test_inverse_functions_are_right_to_two_ulps_at_every_size():
    bits = torch.arange(0, 2**31, 8209, dtype=torch.int64).to(torch.int32)
    x = torch.cat([bits, bits | -(2**31), torch.arange(0x3F000000, 0x3F800000, 409, dtype=torch.int32)])
    x = x.view(torch.float32)
    for name in ("sin", "cos", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh"):
        fn = getattr(torch, name)
        handle, _ = fuse(of_one(fn))
        got, want = handle(x), fn(x.double())
        assert torch.equal(got.isnan(), want.isnan()), name
        ulp = torch.exp2(torch.frexp(want).exponent.clamp(min=-125).double() - 24)
        off = ((got.double() - want) / ulp).abs()
        finite = want.abs() < torch.finfo(torch.float32).max
        assert off[finite].max() < 2, (name, x[finite][off[finite].argmax()], off[finite].max())
        assert torch.equal(got[want.isinf()].double(), want[want.isinf()]), name


def test_division_of_64_bits_is_eagers_for_quotients_of_every_size():
    generator = torch.Generator().manual_seed(3)
    end = torch.iinfo(torch.int64)

    def numbers(n: int) -> torch.Tensor:
        shift = torch.randint(0, 64, (n,), generator=generator)
        return torch.randint(end.min, end.max, (n,), generator=generator) >> shift

    a, b = numbers(50_000), numbers(50_000)
    near = b * (numbers(50_000) >> 20) + torch.randint(-2, 3, (50_000,), generator=generator)
    edge = torch.tensor([end.min, end.min + 1, end.max, end.max - 1, 1, -1, 2, -3, 2**62, 2**62 + 1, 2**53 + 1])
    a = torch.cat([a, near, edge.repeat(len(edge))])
    b = torch.cat([b, b, edge.repeat_interleave(len(edge))])
    kept = (b != 0) & ~((a == end.min) & (b == -1))  # eager's process ends at either
    a, b = a[kept], b[kept]
    for fn in (torch.floor_divide, torch.remainder, torch.fmod, lambda a, b: torch.div(a, b, rounding_mode="trunc")):
        handle, spec = fuse(of_two(fn))
        wrong = handle(a, b) != fn(a, b)
        assert not wrong.any(), (a[wrong][:3], b[wrong][:3])
        no_fallback(spec)


def test_narrow_integers_shift_and_power_as_eagers():
    for dtype in (torch.uint8, torch.int8, torch.int16):
        generator = torch.Generator().manual_seed(4)
        end = torch.iinfo(dtype)
        a, b = torch.randint(end.min, end.max + 1, (2, 60_000), generator=generator).to(dtype)
        b = torch.where(torch.rand(60_000, generator=generator) < 0.5, b, b.abs() % 19)
        for fn in (torch.bitwise_left_shift, torch.bitwise_right_shift, torch.pow):
            handle, spec = fuse(of_two(fn))
            assert torch.equal(handle(a, b), fn(a, b)), (dtype, fn)
            no_fallback(spec)


def test_logit_with_limits_is_their_value_outside_them():
    x = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.5, 0.2, 0.9, 2.0, 1e-7, float("nan"), float("inf"), -float("inf")])
    for eps in (1e-6, 0.0, 0.1, 0.5, 1.0):
        handle, spec = fuse(of_one(functools.partial(torch.logit, eps=eps)))
        for dtype in (torch.float32, torch.float64):
            torch.testing.assert_close(handle(x.to(dtype)), torch.logit(x.to(dtype), eps), equal_nan=True)
        no_fallback(spec)
