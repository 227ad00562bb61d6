"""Random numbers that are drawn before a loop are those of the operators' definition, wherever the loop begins."""

from __future__ import annotations

import pytest
import torch

import fuser.ops  # noqa: F401 (it has the operators)
from fuser import config, machines
from tests.backend.fused import fuse, no_fallback

uniform, normal = torch.ops.fuser.uniform_like, torch.ops.fuser.normal_like
HERE = [row.name for row in machines.ROWS if machines.why_not(row) is None]
CASES = {
    "one dim": (lambda seed, x: (uniform(seed, 3, x) + x, normal(seed, 4, x) * x), [(1000,), (4099,), (3,), (0,)]),
    "rows": (lambda seed, x: uniform(seed, 3, x)[:, 1:] + x[:, 1:], [(7, 131), (40, 64), (3, 2050), (9, 34)]),
    "sums": (lambda seed, x: (uniform(seed, 3, x) * x).sum(1) + normal(seed, 1, x).sum(1), [(7, 131), (5, 1026)]),
    "softmax": (lambda seed, x: torch.softmax(x, 1) * (uniform(seed, 3, x) > 0.25), [(7, 131), (5, 1026), (6, 77)]),
    "columns": (lambda seed, x: (uniform(seed, 3, x) + x).sum(0), [(7, 131), (300, 1026)]),
    "across": (lambda seed, x: uniform(seed, 3, x).t() + x.t().exp(), [(70, 131)]),
    "16 bits": (lambda seed, x: torch.where(uniform(seed, 3, x) > 0.5, x, 0).half() * 2, [(7, 131), (4, 1500)]),
}  # fmt: skip


def is_near(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("isa", HERE)
@pytest.mark.parametrize("name", CASES)
def test_numbers_are_those_of_the_definition(name: str, isa: str) -> None:
    fn, sizes = CASES[name]
    seed = torch.tensor(0x1234_5678_9ABC_DEF)
    with config.override(isa=isa):
        handle, spec = fuse(fn, functional=True)
        for size in sizes:
            x = torch.randn(size)
            got, want = handle(seed, x), fn(seed, x)
            for a, b in zip(got, want, strict=True) if isinstance(got, tuple | list) else [(got, want)]:
                is_near(a, b)
        no_fallback(spec)


def test_neighbours_share_a_block() -> None:
    handle, spec = fuse(lambda seed, x: uniform(seed, 3, x) + x, functional=True)
    seed, x = torch.tensor(7), torch.zeros(5000)
    assert torch.equal(handle(seed, x), uniform(seed, 3, x))
    (kernel,) = spec.store.kernels
    assert "fuser_philox_fill(" in kernel.source and "fuser_philox_word(" not in kernel.source
