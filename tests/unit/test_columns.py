"""Every column of the tables and of a device's record is read: at its default in all rows, some kernel is another one.

A program and a device stand beside each column. Columns that kernels do not show have the reason beside them.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from fuser import compiler, config, pipeline, targets
from fuser.canonical import canonicalize
from fuser.errors import LoweringError, Unsupported
from fuser.ops import OPS, REDUCTIONS, SCANS, OpRow, ReductionRow, ScanRow
from fuser.targets import Target

F32, BF16, U8, I64 = torch.float32, torch.bfloat16, torch.uint8, torch.int64
aten = torch.ops.aten


def joined_norm(x, y):
    return F.group_norm(torch.cat([x, y], 1), 4)


def norm_gradients(g, x, mean, rstd, w, b):
    return aten.native_layer_norm_backward(g, x, [200], mean, rstd, w, b, [True, True, True])


PROGRAMS: dict[str, tuple[Any, list[tuple[tuple[int, ...], torch.dtype]]]] = {
    "softmax": (lambda x: torch.softmax(x.float() * 2, -1), [((4, 40000), BF16)]),
    "clamped": (lambda x: torch.clamp(torch.relu(x * 2 - 1) / 3, -1, 1), [((5, 333), BF16)]),
    "gelu": (lambda x: (F.gelu(x), x.exp().neg().exp()), [((50, 300), F32)]),
    "kinks": (lambda x: F.leaky_relu(torch.exp(x) - 1), [((50, 300), BF16)]),
    "whole": (lambda x: (torch.floor(x), torch.round(x)), [((30, 40), I64)]),
    "bessel": (lambda x: torch.special.bessel_j0(x), [((50, 300), torch.float64)]),
    "random": (lambda x, s: torch.ops.fuser.uniform_like(s, 0, x) * x, [((300, 256), F32), ((), I64)]),
    "matrix": (lambda m, x: (m * x[:, None, :]).sum(-1), [((300, 6, 6), F32), ((300, 6), F32)]),
    "points": (lambda x: torch.cat([x * 2, torch.ones_like(x[:, :1])], 1), [((300, 3), F32)]),
    "hardtanh": (lambda g, x: aten.hardtanh_backward(g, x, -1.0, 1.0), [((50, 300), F32)] * 2),
    "index_add": (lambda x, i, y: x.index_add(0, i, y), [((50, 40), F32), ((300,), I64), ((300, 40), F32)]),
    "integers": (lambda x: (x.sum(1), x.amax(1), x.argmax(1)), [((40, 3000), I64)]),
    "products": (lambda x: x.prod(1), [((40, 3000), F32)]),
    "short rows": (lambda x: torch.softmax(x, -1), [((4000, 40), F32)]),
    "extremes": (lambda x: x.amax(1) - x.sum(1), [((4000, 20), F32)]),
    "sums": (lambda x: (x.sum(1), x.sum(0)), [((40, 3000), F32)]),
    "columns": (lambda x: (x - x.mean(0)) * 2, [((12544, 1024), BF16)]),
    "long norm": (lambda x: F.layer_norm(x, x.shape[1:]), [((4, 1 << 20), F32)]),
    "norm gradients": (
        norm_gradients, [*[((3000, 200), F32)] * 2, *[((3000, 1), F32)] * 2, *[((200,), F32)] * 2]
    ),
    "joined norm": (joined_norm, [((4, 32, 64, 64), F32)] * 2),
    "statistics": (
        lambda x, w, b, mean, var: aten.native_batch_norm.default(x, w, b, mean, var, False, 0.1, 1e-5),
        [((4, 8, 10, 10), F32), *[((8,), F32)] * 4],
    ),
    "windows": (lambda x: F.avg_pool2d(x, 3, 1, 1), [((4, 8, 184, 184), F32)]),
    "large windows": (lambda x: F.avg_pool2d(x, 11, 1), [((4, 8, 60, 60), F32)]),
    "volumes": (lambda x: F.avg_pool3d(x, 3, 1), [((2, 4, 20, 20, 20), F32)]),
    "scans": (lambda x: (x.cumsum(1), x.logcumsumexp(1)), [((40, 300), F32)]),
    "places": (lambda x: torch.cummax(x, 0)[1], [((300, 40), F32)]),
    "highest": (lambda x: torch.cummax(x, 1), [((40, 300), F32)]),
    "highest last": (lambda x: (torch.cummax(x, 1)[1], torch.cummax(x, 1)[0]), [((40, 300), F32)]),
    "long scan": (lambda x: x.cumsum(1), [((2, 1 << 19), F32)]),
    "bytes": (lambda x: x.to(torch.float8_e5m2), [((300, 400), F32)]),
}  # fmt: skip

OF_OPS = {
    "triton": ("softmax", "cuda"), "result": ("points", "cpu"), "signature": ("points", "cpu"),
    "cost": ("softmax", "cpu"), "sign": ("softmax", "cuda"), "selects": ("clamped", "cpu"), "negates": ("gelu", "cpu"),
    "wins": ("clamped", "cpu"), "plain_nan": ("clamped", "cpu"), "keeps_zero": ("matrix", "cuda"),
    "steep": ("kinks", "cuda"), "exponential": ("softmax", "cuda"), "draw": ("random", "cpu"),
    "keeps_integers": ("whole", "cpu"), "inexact": ("bessel", "cpu"), "lanes": ("softmax", "cpu"),
    "within": ("gelu", "cpu"), "near": ("gelu", "cpu"), "inline": ("softmax", "cpu"), "fast": ("clamped", "cuda"),
}  # fmt: skip
OF_REDUCTIONS = {
    "triton": ("softmax", "cuda"), "index": ("integers", "cpu"), "overtakes": ("integers", "cpu"),
    "idempotent": ("short rows", "cpu"), "adds": ("softmax", "cpu"), "extreme": ("softmax", "cpu"),
    "value": ("integers", "cpu"), "pointwise": ("norm gradients", "cpu"), "wraps": ("integers", "cpu"),
    "folder": ("extremes", "cuda"), "atomic": ("index_add", "cuda"),
}  # fmt: skip
OF_SCANS = {
    "index": ("places", "cpu"), "adds": ("long scan", "cpu"), "extreme": ("highest", "cpu"),
    "value": ("highest last", "cpu"), "place": ("highest", "cpu"), "helper": ("scans", "cpu"),
    "folder": ("scans", "cuda"),
}  # fmt: skip
OF_TARGETS = {
    "wide_sums": ("products", "cpu"), "empty_statistics": ("statistics", "cuda"), "masks_kinks": ("hardtanh", "cpu"),
    "dtypes": ("bytes", "cuda"), "vector_bytes": ("extremes", "cpu"), "dearly_folded": ("extremes", "cpu"),
    "column_bytes": ("columns", "cuda"), "split_units": ("long norm", "cpu"), "split_work": ("matrix", "cpu"),
    "lane_block": ("sums", "cpu"), "few_rows": ("long norm", "cpu"), "scans_alone": ("highest", "cpu"),
    "components": ("points", "cpu"), "written_out": ("points", "cpu"), "joins": ("norm gradients", "cpu"),
    "joins_stored": ("joined norm", "cuda"), "moments": ("long norm", "cuda"), "neighbours": ("windows", "cuda"),
    "write_worth": ("long norm", "cuda"), "apart": ("long norm", "cuda"), "sums_by_dims": ("large windows", "cuda"),
    "window_dims": ("volumes", "cuda"),
}  # fmt: skip
# Columns without a program here.
IMPORTS, SAMPLES = "read when lowerings are imported", "which samples tests draw, and how they judge"
PASSES, CONTESTS = "read by passes over graphs", "read at the first calls of a kernel"
HELPERS, SIZES = "the module of its helpers, which stays loaded", "a boundary between sizes"
OWN = "tests of its own show it"
OTHERS = {
    OpRow: {"text": HELPERS, "jumps": IMPORTS, "dtypes": SAMPLES, "domain": SAMPLES, "ulps": SAMPLES},
    ReductionRow: {"dtypes": SAMPLES, "result": "read by the verifier of loops", "contracts": OWN},
    ScanRow: {"dtypes": SAMPLES},
    Target: {
        **dict.fromkeys(("eager", "libraries", "templates", "scores", "score_gradients", "product_rows"), PASSES),
        **dict.fromkeys(("unrolls", "ordered", "sums_by_channel"), OWN), "contracts": PASSES, "races": CONTESTS,
        **dict.fromkeys(("long_row", "long_column", "rows_at_once", "cached", "column_block", "square_tiles"), SIZES),
        **dict.fromkeys(("most_buffers", "recompute_cost", "table_work"), SIZES),
    },
}  # fmt: skip


def text_of(program: str, device: str) -> str:
    fn, args = PROGRAMS[program]
    with FakeTensorMode():
        fake = [torch.empty(size, dtype=dtype, device=device) for size, dtype in args]
    made = canonicalize(torch.fx.symbolic_trace(fn))
    with config.override(isa="avx512"):
        try:
            return pipeline.generate(made.graph, (*made.bound, *fake), compiler.find_backend(device)).text
        except Unsupported as e:
            return e.reason


known_text = functools.cache(text_of)


def optional(record: type) -> set[str]:
    """The columns of a record that have a default."""
    missing = dataclasses.MISSING
    return {f.name for f in dataclasses.fields(record) if f.default is not missing or f.default_factory is not missing}


@pytest.mark.parametrize(
    ("record", "shown"),
    [(OpRow, OF_OPS), (ReductionRow, OF_REDUCTIONS), (ScanRow, OF_SCANS), (Target, OF_TARGETS)],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_every_column_has_a_program_or_a_reason(record, shown):
    assert {*shown, *OTHERS[record]} == optional(record)


def plain(record: type, column: str) -> Any:
    (field,) = (f for f in dataclasses.fields(record) if f.name == column)
    return field.default if field.default is not dataclasses.MISSING else field.default_factory()


TABLES = {OpRow: (OPS, OF_OPS), ReductionRow: (REDUCTIONS, OF_REDUCTIONS), ScanRow: (SCANS, OF_SCANS)}
OF_TABLES = [(record, column) for record, (_, shown) in TABLES.items() for column in shown]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("record", "column"), OF_TABLES, ids=[f"{r.__name__}.{c}" for r, c in OF_TABLES])
def test_a_column_of_a_table_decides(record, column, monkeypatch):
    table, shown = TABLES[record]
    want = known_text(*shown[column])
    for name, row in list(table.items()):
        monkeypatch.setitem(table, name, dataclasses.replace(row, **{column: plain(record, column)}))
    assert changed(want, *shown[column])


def changed(want: str, program: str, device: str) -> bool:
    try:
        return text_of(program, device) != want
    except (AssertionError, KeyError, LoweringError):  # a generator needs what the rows say no longer
        return True


@pytest.mark.sampled(3)
@pytest.mark.parametrize("column", OF_TARGETS)
def test_a_column_of_a_device_decides(column):
    program, device = OF_TARGETS[column]
    want, own = known_text(program, device), targets.of(device)
    assert getattr(own, column) != plain(Target, column)
    targets.keep(dataclasses.replace(own, **{column: plain(Target, column)}))
    try:
        assert changed(want, program, device)
    finally:
        targets.forget(device)
