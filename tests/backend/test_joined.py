"""Sums along rows and down columns of the same values, which one walk over the rows makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fuser import config
from tests.backend.fused import fuse, no_fallback
from tests.backend.support import check, flat

aten = torch.ops.aten
FIRST = 300  # rows of the call that kernels are compiled for
# Roundings more than eager; of float64, for which there is no wider reference, what sums in another order differ by.
SLACK = {torch.float64: 64.0, torch.float32: 4.0, torch.float16: 1.0, torch.bfloat16: 1.0}
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def layer_norm(dy, x, w, mean, rstd):
    return aten.native_layer_norm_backward(dy, x, [x.shape[-1]], mean, rstd, w, w, [True, True, True])


def rms_norm(dy, x, w, mean, rstd):
    m = dy * w
    dx = rstd * m - rstd.pow(3) / x.shape[-1] * (m * x).sum(-1, keepdim=True) * x
    return dx, (dy * (x * rstd)).sum(0)


def softmax_bias(dy, x, w, mean, rstd):
    """The sums of columns need what rows are reduced to."""
    g = torch.softmax(x + w, -1)
    g = g * (dy - (g * dy).sum(-1, keepdim=True))
    return g, g.sum(0)


def activated(dy, x, w, mean, rstd):
    """Results of columns are gone on with, and more than one of them."""
    dx, dw, db = layer_norm(torch.where(x > 0, dy, 0.0), F.gelu(x), w, mean, rstd)
    return dx * 0.5, dw / 3 - w, (db * db).sqrt()


def only_sums(dy, x, w, mean, rstd):
    """Nothing is stored along both dims."""
    y = dy * x - mean
    return y.sum(-1), y.sum(0)


CASES: dict[str, Callable[..., Any]] = {
    f.__name__: f for f in (layer_norm, rms_norm, softmax_bias, activated, only_sums)
}  # fmt: skip


def drawn(rows: int, columns: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(rows * 1000 + columns)
    dy, x = (torch.randn(rows, columns, generator=g, dtype=torch.float64) for _ in range(2))
    w = torch.rand(columns, generator=g, dtype=torch.float64)
    mean = x.mean(-1, keepdim=True) if columns else x.new_zeros(rows, 1)
    rstd = torch.rand(rows, 1, generator=g, dtype=torch.float64) + 0.5
    return tuple(t.to(dtype) for t in (dy, x, w, mean, rstd))


def judge(got: Any, fn: Callable[..., Any], args: tuple[torch.Tensor, ...], name: str) -> None:
    eager, exact = flat(fn(*args)), flat(fn(*(a.double() for a in args)))
    for n, (mine, own, true) in enumerate(zip(flat(got), eager, exact, strict=True)):
        floor = float(true.abs().max()) if true.numel() else 0.0
        check(mine, own, true, f"{name}: result {n}", slack=SLACK[own.dtype], zeros=False, floor=floor)


@pytest.mark.sampled(10, also=("activated-torch.bfloat16-768", "activated-torch.float16-100"))
@pytest.mark.parametrize("columns", [768, 100, 52])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_one_walk_serves_every_number_of_rows(name: str, dtype: torch.dtype, columns: int) -> None:
    if name == "layer_norm" and dtype.itemsize == 2:
        pytest.skip("eager's kernel takes float32 statistics, as the case `activated` has them")
    fn = CASES[name]
    args = drawn(FIRST, columns, dtype)
    handle, spec = fuse(fn, functional=True, examples=args)
    judge(handle(*args), fn, args, f"{FIRST} x {columns}")
    (kernel,) = spec.store.kernels
    assert [step.entry.rpartition("_")[2] for step in kernel.program.steps] == ["rows", "combine"], kernel.source
    for rows in (2, 15, 16, 17, 33, 255, 511, 1025, 0):
        args = drawn(rows, columns, dtype)
        judge(handle(*args), fn, args, f"{rows} x {columns}")
    no_fallback(spec)


def test_any_number_of_threads_gives_the_same_bits() -> None:
    args = drawn(2500, 96, torch.float32)
    handle, _ = fuse(layer_norm, functional=True, examples=args)
    threads, found = torch.get_num_threads(), []
    try:
        for n in (1, 2, 3, 7):
            torch.set_num_threads(n)
            found.append(flat(handle(*args)))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_sums_of_many_rows_are_as_exact_as_eagers() -> None:
    """Float32 sums of values that do not cancel: terms are added up in float32 only a few at a time."""
    dy, x, w, mean, rstd = drawn(50_000, 40, torch.float32)
    args = dy.abs() + 1, x.abs() + 1, w, mean, rstd
    handle, _ = fuse(only_sums, functional=True, examples=args)
    judge(handle(*args), only_sums, args, "many rows")


def test_two_dims_of_rows_and_of_columns() -> None:
    """Rows that are no single axis in memory, and normalised dims that are two."""

    def both(dy, x, w):
        m = dy * w
        return m - x * (m * x).sum((-2, -1), keepdim=True), (dy * x).sum((0, 1)), dy.sum((0, 1))

    for shape in ((20, 30, 6, 50), (40, 9, 3, 70)):
        dy, x = (torch.randn(shape[0] + 2, *shape[1:])[1:-1].transpose(0, 1) for _ in range(2))
        args = dy, x[..., ::2].repeat_interleave(2, -1), torch.rand(shape[2:])
        handle, spec = fuse(both, functional=True, examples=args)
        judge(handle(*args), both, args, str(shape))
        no_fallback(spec)


def test_every_offset_is_inside() -> None:
    with config.override(check_bounds=True):
        args = drawn(FIRST, 70, torch.float32)
        handle, spec = fuse(activated, functional=True, examples=args)
        for rows in (FIRST, 3, 1000):
            args = drawn(rows, 70, torch.float32)
            judge(handle(*args), activated, args, f"{rows} rows, checked")
        no_fallback(spec)


@pytest.mark.parametrize("rows", [8, 100])
def test_few_rows_are_not_walked_over(rows: int) -> None:
    """They are too few chunks for many threads."""
    args = drawn(rows, 768, torch.float32)
    handle, spec = fuse(layer_norm, functional=True, examples=args)
    judge(handle(*args), layer_norm, args, f"{rows} rows")
    assert not any("_rows" in step.entry for k in spec.store.kernels for step in k.program.steps)
