"""Short rows are computed in explicit vectors, the last under a mask: each op with its values of long rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fuser
from fuser import compiler, config, interface, kernel_cache, machines, pipeline
from fuser.canonical import canonicalize
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


ON_TAILS = {
    "scaled": lambda x, c: x[:, 1:] * c, "second": lambda x, c: x[:, 1::2] * c + 1,
    "flip": lambda x, c: x[:, 1:].flip(1) * c,
    "sigmoid": lambda x, c: (x[:, 1:] * c).sigmoid(),
}  # fmt: skip
REST, AGAIN = "fuser_lanes_first(length - k)", "k < length - FUSER_LANES ? k"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ON_TAILS)
def test_tails_without_masks(name: str, dtype: torch.dtype) -> None:
    """Machines without masks take elements again in a last vector; what g++ vectorises, and short rows, g++ writes."""
    text = {}
    for isa in ("avx2", "avx512"):
        for columns in (8, 43):
            with config.override(isa=isa):
                graph = canonicalize(graph_of([ON_TAILS[name]], 2)).graph
                given = torch.empty(90, columns, dtype=dtype), torch.empty(90, 1, dtype=dtype)
                text[isa, columns] = pipeline.generate(graph, given, compiler.find_backend("cpu")).text
    assert AGAIN not in text["avx512", 43] and (REST in text["avx512", 43] or name == "flip")
    plain = dtype is torch.float32 and name != "sigmoid"
    assert (AGAIN in text["avx2", 43]) is (REST in text["avx2", 43]) is not plain
    assert REST not in text["avx2", 8]


@pytest.mark.parametrize("isa", ["avx2", ""])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("in_place", [False, True])
def test_elements_in_two_vectors_have_one_value(isa: str, dtype: torch.dtype, in_place: bool) -> None:
    """Where an input is written, its elements must not be read again."""
    if machines.why_not(machines.find(isa)):
        pytest.skip("this machine has no AVX2")
    with config.override(isa=isa):
        graph = torch.fx.symbolic_trace(lambda x, c: x.copy_((x * c).sigmoid()) if in_place else (x * c).sigmoid())
        handle = fuser.fusion_handle(fuser.register_fusion(graph, in_place=in_place, functional=not in_place))
    for columns in (20, 1, 7, 8, 9, 15, 16, 31, 33, 63, 255):
        x = torch.linspace(-3, 3, 90 * columns).view(90, columns).to(dtype)
        c = torch.linspace(0.5, 2, 90).view(90, 1).to(dtype)
        want = (x * c).sigmoid() if dtype is torch.float32 else (x.float() * c.float()).sigmoid().to(dtype)
        compare(handle(x, c), want, tol={"rtol": 1e-5 if dtype is torch.float32 else 4e-3, "atol": 1e-5})
