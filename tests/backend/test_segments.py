"""Conditions on the index: loops cut where one changes, vectors read in part; what is read backwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from fuser import debug_get_fused_kernel_code, register_fusion
from fuser.kernel_cache import REGISTRY

CASES: dict[str, Any] = {
    "joined": lambda x, y: torch.cat((x, y, x), -1).clamp(-50, 50),
    "halves turned": lambda x, y: torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1) * x,
    "padded": lambda x, y: F.pad(x, (3, 5), value=2.0) + 1,
    "cut by a pad": lambda x, y: F.pad(x, (-2, 7)) * 2,
    "rolled": lambda x, y: torch.roll(x, 3, -1) + y,
    "moved only": lambda x, y: F.pad(x, (1, 1)),
    "rows and columns": lambda x, y: F.pad(x, (1, 2, 1, 0)) - 1,
    "backwards": lambda x, y: (x.flip(-1) + y, x.flip(-1) > 30),
    "joined rows, reduced": lambda x, y: (torch.cat((x, y), 0).amax(-1), torch.cat((x, y), 0).amax(0)),
    "a mask returned": lambda x, y: (F.pad(x, (4, 0)) + 1, F.pad(x, (4, 0)) > 0),
}


def beside(x: torch.Tensor, mode: str) -> torch.Tensor:
    """Each element with its neighbours in a row that goes on behind its ends."""
    row = F.pad(x.float(), (2, 2), mode=mode)
    return (row[..., :-4] - 2 * row[..., 1:-3] + 3 * row[..., 3:-1] + row[..., 4:]).to(x.dtype)


CASES |= {
    f"beside, {mode}": lambda x, y, mode=mode: beside(x, mode) + y for mode in ("reflect", "replicate", "circular")
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8)


LONG = ((3, 700), (2, 6000), (4, 513), (5, 8), (1, 1024), (2, 1100))
SHORT = ((6, 64), (7, 100), (3, 128), (2, 33), (2, 600))


@pytest.mark.sampled(19, also=("long-joined rows, reduced-torch.int64", "short-backwards-torch.int64"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("sizes", (LONG, SHORT), ids=("long", "short"))
def test_conditions_on_the_index(sizes: tuple[tuple[int, int], ...], name: str, dtype: torch.dtype):
    fn = CASES[name]
    other = lambda x, y: (*flat(fn(x, y)), x * (2 if sizes is LONG else 3))  # noqa: E731  # not the same kernels
    generator = torch.Generator().manual_seed(11)
    registered = REGISTRY.find(register_fusion(torch.fx.symbolic_trace(other), functional=True))
    for rows, columns in sizes:
        x, y = (torch.randint(0, 100, (rows, columns), generator=generator).to(dtype) for _ in range(2))
        for a, b in zip(flat(registered.handle(x, y)), flat(other(x, y)), strict=True):
            assert a.dtype is b.dtype and torch.equal(a, b), (rows, columns)
    assert registered.spec.store.kernels and not registered.spec.store.fallbacks


def flat(value: Any) -> list[torch.Tensor]:
    """The tensors of nested tuples."""
    return [t for v in value for t in flat(v)] if isinstance(value, (tuple, list)) else [value]


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=str)
def test_conditions_on_rows_beside_conditions_on_steps(dtype: torch.dtype):
    """A load under a row's condition is part of the segments of loads with steps, not of the pieces around these."""

    def padded(x, y):
        return F.pad(x, (1, 1))[:, ::2] + F.pad(y, (0, 0, 1, 1))

    registered = REGISTRY.find(register_fusion(torch.fx.symbolic_trace(padded), functional=True))
    generator = torch.Generator().manual_seed(11)
    for rows, columns in ((6, 4000), (3, 2700)):
        x = torch.randint(0, 100, (rows, columns), generator=generator).to(dtype)
        y = torch.randint(0, 100, (rows - 2, columns // 2 + 1), generator=generator).to(dtype)
        (got,) = flat([registered.handle(x, y)])
        assert torch.equal(got, padded(x, y)), (rows, columns)
    assert registered.spec.store.kernels and not registered.spec.store.fallbacks


def test_many_conditions_are_written_once_more_without():
    """As they are in the middle of a row."""
    found = []
    for name in ("beside, reflect", "joined"):
        x, y = torch.randn(2, 3, 600)
        graph = make_fx(lambda *tensors, f=CASES[name]: f(*tensors))(x, y)
        found.append("= false;" in debug_get_fused_kernel_code(graph, [x, y]))
    assert found == [True, False]
