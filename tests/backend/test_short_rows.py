"""Short rows are computed in explicit vectors, the last under a mask: each op with its values of long rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fuser import config, interface, kernel_cache, machines
from fuser.ops import OPS, OpRow, has_lanes
from tests.backend.fused import compare, fuse, handle_of, no_fallback
from tests.backend.support import graph_of, special_floats

APART = ("half_erfc",)  # its definition calls erfc, which has no form for vectors
ROWS = [row for row in OPS.values() if has_lanes(row.name, torch.float32) and row.name not in APART]
GROUPS = [ROWS[n : n + 12] for n in range(0, len(ROWS), 12)]
BEFORE = {
    "relu6": F.relu6, "clamp": lambda x: x.clamp(-1, 1), "softshrink": F.softshrink, "hardsigmoid": F.hardsigmoid,
    "sign": torch.sign, "where": lambda x: torch.where(x > 0, x, -1.0), "copy": lambda x: x * 1,
}  # fmt: skip
AFTER = {
    "differences": lambda x: x[:, 1:] - x[:, :-1], "flip": lambda x: x.flip(1) * 2, "roll": lambda x: x.roll(3, 1) + x,
    "reflect": lambda x: F.pad(x[None], (2, 3), mode="reflect") + 1, "pad": lambda x: F.pad(x, (2, 1)) * 2,
    "mask": lambda x: (x[:, 1:] > x[:, :-1]) & (x[:, :-1] < 0.5),
    "cat": lambda x: torch.cat((x[:, 2:] * 2, x[:, :2]), 1),
}  # fmt: skip


def called(row: OpRow):
    """The op on all columns but the last, so that rows do not become one long row."""

    def call(*given):
        args = [g[:, :-1] > 0 if s == "b" else g[:, :-1] for s, g in zip(row.signature or "t" * row.arity, given)]
        return row.eval(*args)

    return call


def folded(values: torch.Tensor, columns: int) -> torch.Tensor:
    """All values in rows of so many columns, the last filled up with ones, and one column behind them."""
    more = -len(values) % columns
    return F.pad(torch.cat([values, values.new_ones(more)]).reshape(-1, columns), (0, 1))


@pytest.mark.sampled(6, also=("signbit",))
@pytest.mark.parametrize("rows", GROUPS, ids=lambda rows: rows[0].name)
def test_each_op_has_the_bits_of_long_rows(rows: list[OpRow], monkeypatch: pytest.MonkeyPatch) -> None:
    floats = torch.cat([special_floats(torch.float32), torch.linspace(-4, 4, 13)])
    n = len(floats)
    given = [floats.repeat_interleave(n), floats.repeat(n), floats.flip(0).repeat(n)]
    found = {}
    for columns in (n * n, 37, 55, 250):
        monkeypatch.setattr(interface, "REGISTRY", kernel_cache.Registry())  # kernels are made for their first sizes
        handle, spec = fuse(graph_of([called(row) for row in rows], 3), functional=True)
        found[columns] = [r.flatten()[: n * n] for r in handle(*(folded(g, columns) for g in given))]
        no_fallback(spec)
        if columns < n and machines.find(config.isa).masks:
            assert "fuser_lanes_first(length - k)" in spec.store.kernels[-1].source
    for columns, results in found.items():
        for row, got, want in zip(rows, results, found[n * n], strict=True):
            bits = got == want if got.dtype is torch.bool else got.view(torch.int32) == want.view(torch.int32)
            assert bool((bits | (got != got) & (want != want)).all()), (row.name, columns)


@pytest.mark.sampled(13, also=("hardsigmoid-mask",))
@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("before", BEFORE)
def test_neighbours_in_rows_of_any_length(before: str, after: str) -> None:
    handle = handle_of(lambda x: AFTER[after](BEFORE[before](x)), functional=True)
    for columns in (4, 5, 16, 17, 31, 55, 56, 64, 255):
        x = torch.randn(7, columns, generator=torch.Generator().manual_seed(columns))
        x[0, :3], x[-1, -1] = torch.tensor([torch.nan, -0.0, torch.inf]), torch.nan
        compare(handle(x), AFTER[after](BEFORE[before](x)))
