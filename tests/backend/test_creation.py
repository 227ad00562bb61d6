"""Tensors made of numbers; triangles and diagonals."""

from __future__ import annotations

import pytest
import torch

from tests.backend.fused import check, check_each, compare, fuse, in_layouts, no_fallback, values

X = values(4, 5)

KEPT = {
    "tril": lambda x: (x.tril(), x.tril(-2) * 3, torch.tril(x, 10)),
    "triu": lambda x: (x.triu(1), torch.triu(x, -3) + 1),
    "of_a_batch": lambda x: (x[None].expand(3, 4, 5).tril(1), x.t()[:, None].triu()),
    "diag_embed": lambda x: (torch.diag_embed(x), torch.diag_embed(x, 1), torch.diag_embed(x, -2, 0, 2)),
    "diag": lambda x: (torch.diag(x[0]), torch.diag(x[:, 1], -1), torch.diag(x, 1) * 2),
    "not_a_number": lambda x: (x / 0).tril(),
    "like": lambda x: (torch.zeros_like(x), torch.ones_like(x, dtype=torch.bool), torch.full_like(x, 2.5)),
    "new": lambda x: (x.new_zeros(3), x.new_ones((2, 3), dtype=torch.int32), x.new_full((2,), 7)),
    # What `empty_like` holds is anything, NaN too, so nothing of it may reach the result.
    "filled": lambda x: (
        torch.fill(x, 3), torch.where(x == x, x, torch.empty_like(x)), x.new_empty(2, 3).shape[0] + x
    ),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", KEPT)
def test_from_a_tensor(name):
    check_each(KEPT[name], in_layouts(X))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64, torch.uint8, torch.bool])
def test_dtypes(dtype):
    x = values(3, 4, dtype=dtype)
    check(lambda x: (x.tril(), torch.diag_embed(x[0]), torch.ones_like(x), x.new_full((2,), 1)), x)


def numbers(x):
    return (
        torch.arange(6), torch.arange(2, 9, 3), torch.arange(5, -7, -2), torch.arange(3, 3), torch.arange(7.0),
        torch.arange(0, 2, 0.25), torch.arange(4, dtype=torch.bfloat16), torch.zeros(2, 3), torch.ones(2, 0),
        torch.full((2, 2), 3.5), torch.full((3,), 2), torch.full((), True), torch.scalar_tensor(3.0), torch.eye(4),
        torch.eye(3, 5, dtype=torch.int64), torch.eye(0), torch.linspace(3, 20, 7, dtype=torch.int64),
        torch.linspace(2, 5, 1), x * 2,
    )  # fmt: skip


def test_from_numbers():
    check(numbers, X, aten=True)


def test_numbers_between_floats_are_as_near_as_eager_s():
    def fn(x):
        return torch.linspace(-1, 1, 1001), torch.arange(0.1, 77.7, 0.1), x * 2

    handle, spec = fuse(fn, examples=(X,))
    want = torch.linspace(-1, 1, 1001, dtype=torch.float64), torch.arange(0.1, 77.7, 0.1, dtype=torch.float64)
    for got, eager, exact in zip(handle(X), fn(X), want):
        assert got.shape == eager.shape and got.dtype == eager.dtype
        assert (got.double() - exact).abs().max() <= (eager.double() - exact).abs().max()
    no_fallback(spec)


def test_sizes_of_tensors():
    def fn(x):
        n, m = x.shape[0], x.shape[1]
        made = torch.arange(n) + 1, torch.eye(n, m) * x, x.new_zeros(m, n + 1), torch.full((n,), 0.5)
        return (*made, x.tril(n - 2))

    handle, spec = fuse(fn)
    for size in ((4, 5), (7, 3), (2, 9)):
        compare(handle(values(*size)), fn(values(*size)))
    no_fallback(spec)


def test_small_sizes():
    empty, deep = torch.empty(3, 0), values(1, 2, 1, 2, 1, 1, 3, 2)
    check(lambda x, y: (x.tril(), torch.diag_embed(x), torch.zeros_like(x), y.triu(1)), empty, deep)
    check(lambda x: (torch.zeros_like(x), torch.full_like(x, 2), x.new_ones(())), torch.tensor(3.0))


def test_grids():
    def fn(x, y):
        a, b = torch.meshgrid(x, y, indexing="ij")[0], torch.meshgrid(x, y, indexing="xy")[1]
        return a + 1, b * 2, torch.atleast_2d(x) + 1, torch.atleast_3d(y) * 2, torch.block_diag(x, y[:, None])

    check(fn, values(4), values(5))
