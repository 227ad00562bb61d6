"""What is only moved: transposed reads of every dtype through tiles, and halves as the bits that they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fuser import config, machines, register_fusion
from fuser.kernel_cache import REGISTRY

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
DTYPES = (*FLOATS, torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool)
SIZES = ((1, 1), (16, 16), (17, 15), (8, 24), (130, 33), (128, 128), (300, 40), (3, 257))


def fused(fn: Any, *inputs: Any) -> Any:
    registered = REGISTRY.find(register_fusion(torch.fx.symbolic_trace(fn), functional=True))
    out = registered.handle(*inputs)
    assert not registered.spec.store.fallbacks
    return out


def every_bit(a: torch.Tensor) -> torch.Tensor:
    """Two bytes as they are."""
    return a.contiguous().view(torch.int16)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_transposed_reads(dtype: torch.dtype):
    generator = torch.Generator().manual_seed(3)
    for rows, columns in SIZES:
        x = torch.randint(-100, 100, (2, rows, columns), generator=generator).to(dtype)
        y = torch.randint(-100, 100, (2, columns, rows), generator=generator).to(dtype)
        for fn in (lambda x, y: x.transpose(1, 2).contiguous(), lambda x, y: torch.maximum(x.transpose(1, 2), y)):
            assert torch.equal(fused(fn, x, y), fn(x, y)), (rows, columns)


MOVES = {
    "copied": lambda x, c: x.transpose(0, 1).contiguous(),
    "selected": lambda x, c: torch.where(c, x, x.flip(0)),
    "a number": lambda x, c: torch.where(c, x, 0.1),
    "padded": lambda x, c: F.pad(x, (2, 1), value=-3.0),
    "joined": lambda x, c: torch.cat((x, x[:, 1:]), 1),
    "beside arithmetic": lambda x, c: (torch.where(c, x, 1.0), x * 2),
    "partly arithmetic": lambda x, c: torch.where(c, x, x + 1),
    "compared": lambda x, c: torch.where(x > 2, 0.0, x),
    "compared with itself": lambda x, c: torch.where(x == x, 1.0, x),
    "filled where it is large": lambda x, c: (x.masked_fill(x > 2, 0), x.flip(0)),
    "of a sum": lambda x, c: torch.where(c, x + 1, x) + torch.where(c, 0.0, x),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
@pytest.mark.parametrize("name", MOVES)
def test_halves_that_nobody_computes_with(name: str, dtype: torch.dtype):
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype).reshape(256, 256)
    x = torch.where(every.isnan(), float("nan") if name == "compared with itself" else 0.5, every)
    c = torch.arange(256)[:, None] % 3 > torch.arange(256) % 2
    got, want = fused(MOVES[name], x, c), MOVES[name](x, c)
    for a, b in zip(got if isinstance(got, tuple) else (got,), want if isinstance(want, tuple) else (want,)):
        assert torch.equal(every_bit(a), every_bit(b))


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
def test_a_nan_keeps_its_bits(dtype: torch.dtype):
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype).reshape(256, 256)
    for fn in (lambda x: x.t().contiguous(), lambda x: F.pad(x, (0, 3)), lambda x: torch.cat((x, x), 1)):
        assert torch.equal(every_bit(fused(fn, every)), every_bit(fn(every)))


def rearranged(x, y):
    joined = torch.cat((x, y[:, :5], x), -1), torch.stack((x, y), 1)
    padded = F.pad(x, (3, 5), value=1), F.pad(x, (-1, 2)), F.pad(y, (0, 1, 2, 0))
    turned = x.flip(-1), y.flip(0), torch.roll(x, 3, -1), torch.cat((y[:, 2:], x[:, :2]), -1).flip(-1)
    return *joined, *padded, *turned, torch.tril(x), torch.triu(y, 1), x[:, 1:-1].clone()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bool, torch.uint8], ids=str)
@pytest.mark.parametrize("columns", [9, 40])
def test_short_rows_are_moved_in_registers_with_all_their_bits(dtype, columns):
    """Rests of registers and rows of several; sizes other than the ones that the kernel was made for."""
    graph = torch.fx.symbolic_trace(lambda x, y: (*rearranged(x, y), x[: columns % 3 + 1].clone()))
    registration = REGISTRY.find(register_fusion(graph, functional=True))
    generator = torch.Generator().manual_seed(3)
    for rows, width in ((12, columns), (3, 7), (5, 64), (2, 65), (4, 300)):
        bits = torch.randint(-32768, 32768, (2, rows, width), generator=generator).to(torch.int16)
        x, y = bits.view(dtype) if dtype.itemsize == 2 else (bits % 3 if dtype is torch.bool else bits).to(dtype)
        for got, want in zip(registration.handle(x, y), rearranged(x, y)):
            assert torch.equal(*((every_bit(got), every_bit(want)) if dtype.itemsize == 2 else (got, want)))
    sources = "".join(k.source for k in registration.spec.store.kernels)
    assert ("#if FUSER_MASKS" in sources) == machines.find(config.isa).masks
