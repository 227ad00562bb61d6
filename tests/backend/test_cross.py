"""Cross products along any dim, of broadcast operands, beside eager."""

from __future__ import annotations

import warnings

import pytest
import torch

from fuser.frontends.dynamo import fuser_backend
from tests.backend.fused import fuse


def rows(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Whole numbers, so that differences of products are exact in every dtype."""
    return torch.randint(-6, 7, size).to(dtype)


CASES = {
    "rows": lambda d: (rows(50, 3, dtype=d), rows(50, 3, dtype=d), -1),
    "columns": lambda d: (rows(3, 40, dtype=d), rows(3, 1, dtype=d), 0),
    "broadcast": lambda d: (rows(4, 1, 3, dtype=d), rows(1, 5, 3, dtype=d), -1),
    "transposed": lambda d: (rows(5, 3, 4, dtype=d).transpose(1, 2), rows(5, 4, 3, dtype=d), 2),
    "no vectors": lambda d: (rows(0, 3, dtype=d), rows(0, 3, dtype=d), 1),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64], ids=str)
def test_is_eagers(name, dtype):
    a, b, dim = CASES[name](dtype)
    handle, spec = fuse(lambda a, b: torch.linalg.cross(a, b, dim=dim))
    got, want = handle(a, b), torch.linalg.cross(a, b, dim=dim)
    assert torch.equal(got, want) and got.dtype is want.dtype and got.stride() == want.stride()
    assert not spec.store.fallbacks


def test_in_the_middle_of_a_kernel():
    """A rotation by a quaternion, which takes one cross product of another."""

    def rotated(q, v):
        t = 2 * torch.linalg.cross(q[..., :3], v)
        return v + q[..., 3:] * t + torch.linalg.cross(q[..., :3], t)

    q, v = rows(20, 4), rows(20, 3)
    handle, spec = fuse(rotated)
    assert torch.equal(handle(q, v), rotated(q, v)) and not spec.store.fallbacks


def test_without_a_dim_it_is_the_first_of_three():
    """A kernel made for one such dim does not serve inputs whose first is another."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch advises against it
        handle, _ = fuse(lambda a, b: torch.cross(a, b))
        for size in ((2, 3, 3), (3, 3, 3), (5, 4, 3), (3, 7, 3)):
            a, b = rows(*size), rows(*size)
            assert torch.equal(handle(a, b), torch.cross(a, b))


def test_gradients():
    a, b = (rows(30, 3).requires_grad_() for _ in range(2))
    weight = rows(30, 3)
    compiled = torch.compile(torch.linalg.cross, backend=fuser_backend)
    got = torch.autograd.grad(compiled(a, b), (a, b), weight)
    want = torch.autograd.grad(torch.linalg.cross(a, b), (a, b), weight)
    assert all(torch.equal(x, y) for x, y in zip(got, want))


def test_of_two_dtypes_raises_as_eager():
    handle, _ = fuse(lambda a, b: torch.linalg.cross(a, b))
    with pytest.raises(RuntimeError, match="scalar type"):
        handle(rows(4, 3), rows(4, 3).half())
