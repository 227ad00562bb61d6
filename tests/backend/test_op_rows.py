"""An op is what its row of the table says, whatever it is called: twins under other names give the same texts."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fuser import compiler, config, interface, kernel_cache, pipeline, targets
from fuser.errors import Unsupported
from fuser.ir.loop_body import Recorder, Row, Value, ops
from fuser.ir.sizes import expr
from fuser.lowering.context import LoweringContext
from fuser.lowering.graph import Lowered
from fuser.lowering.inputs import new_input
from fuser.ops import OPS, OpRow
from fuser.scheduler.schedule import schedule
from tests.backend.fused import flat, fuse, no_fallback

DEVICES = ("cpu", "cuda")
ALL = bool(os.environ.get("FUSER_TEST_ALL"))
TRIED = (torch.float32, torch.uint8, torch.int64, torch.bool)
ROWS, COLUMNS = 12, 640


@contextlib.contextmanager
def twins() -> Iterator[None]:
    """Every recorded row of an op has the name of a copy of the table's row."""
    with pytest.MonkeyPatch.context() as patch:
        for name, row in list(OPS.items()):
            patch.setitem(OPS, f"twin_{name}", dataclasses.replace(row, name=f"twin_{name}"))
        plain = Recorder.add_row

        def add_row(self: Recorder, row: Row) -> Value:
            known = row.op in OPS and not row.op.startswith("twin_")
            return plain(self, dataclasses.replace(row, op=f"twin_{row.op}") if known else row)

        patch.setattr(Recorder, "add_row", add_row)
        yield


def lowered(row: OpRow, dtype: torch.dtype, device: str) -> Lowered:
    """Loops that call an op on what is loaded: alone, on its own result, in a half, on a row, under conditions."""
    ctx = LoweringContext("fast", targets.of(device))
    low = torch.bfloat16 if dtype is torch.float32 else dtype
    with FakeTensorMode():
        given = [torch.empty(ROWS, COLUMNS, dtype=d, device=device) for d in (dtype, low, torch.bool)]
    inputs, boxes, _ = zip(*(new_input(ctx, n, t) for n, t in enumerate(given)), strict=True)
    size = boxes[0].size
    result = row.result_dtype(dtype)

    def called(box, index, mask):
        args = [mask if s == "b" else box.load(index) for s in row.signature or "t" * row.arity]
        return ops.call(row.name, *args)

    def again(value, box, index, mask):
        fits = result is dtype and not row.signature
        return ops.call(row.name, *[value] * row.arity) if fits else value

    def own(index):
        return again(called(boxes[0], index, boxes[2].load(index)), boxes[0], index, None)

    def half(index):
        return called(boxes[1], index, boxes[2].load(index))

    def guarded(index):
        near = ops.lt(ops.index_expr(index[1]), ops.index_expr(expr(40)))
        both = ops.logical_and(near, ops.ge(ops.index_expr(index[0]), ops.index_expr(expr(3))))
        return ops.masked(both, lambda: called(boxes[1], index, near), 1)

    made = [
        ctx.pointwise(size, result, own),
        ctx.pointwise(size[::-1], low if result is dtype else result, lambda i: half(i[::-1])),
        ctx.pointwise((*size, expr(1)), low if result is dtype else result, guarded),
    ]
    if result is not torch.bool:
        made.append(ctx.reduction("max", size[:1], size[1:], result, lambda i, r: called(boxes[0], (*i, *r), True)))
    return Lowered(ctx, list(inputs), [("buffer", b.storage.buffer.name) for b in made])


def text_of(row: OpRow, dtype: torch.dtype, device: str) -> str:
    try:
        graph = lowered(row, dtype, device)
        return str(compiler.find_backend(device).codegen(graph, schedule(graph, config.max_body_rows), False, "").text)
    except Unsupported as e:
        return e.reason.replace("twin_", "")


@pytest.mark.parametrize("device", DEVICES)
def test_a_twin_of_every_op_gives_the_same_text(device: str) -> None:
    """In a run for every second dtype of an op, the odd ones of every second op."""
    cases = []
    for n, row in enumerate(OPS.values()):
        own = [d for d in TRIED if d in row.dtypes]
        cases += [(row, d) for d in (own if ALL else own[n % 2 :: 2] or own)]
    want = {(row.name, d): text_of(row, d, device) for row, d in cases}
    assert sum("cell for" not in text for text in want.values()) > len(want) // 2
    with twins():
        for row, dtype in cases:
            twin = text_of(OPS[f"twin_{row.name}"], dtype, device)
            assert twin == want[row.name, dtype], (row.name, dtype)


def joined(x, y):
    return torch.cat([torch.nn.functional.pad(x, (3, 2)), y.flip(1).roll(2, 1)], 1)


def drawn(x, seed):
    keep = torch.ops.fuser.uniform_like(seed, 0, x)
    return torch.where(keep < 0.25, x, 0), torch.ops.fuser.normal_like(seed, 1, x)


FUNCTIONS = {
    "softmax": (lambda x: torch.softmax(x.float() * 2, -1), [(4, 40000)], torch.bfloat16),
    "halves": (lambda x: torch.clamp(torch.relu(x * 2 - 1) / 3, -1, 1), [(5, 333)], torch.bfloat16),
    "float16": (lambda x: torch.where(x > 0, x.exp(), x).floor(), [(5, 333)], torch.float16),
    "bytes": (joined, [(9, 40), (9, 17)], torch.uint8),
    "masks": (lambda x, y: joined(x, y) & ~joined(y, x), [(9, 40), (9, 40)], torch.bool),
    "long rows": (joined, [(3, 700), (3, 300)], torch.float32),
    "scans": (lambda x: (x.cumsum(1), x.cummax(1)[0], x.cummin(1)[1], x.cumprod(0)), [(40, 300)], torch.float32),
    "norm": (lambda x: torch.nn.functional.layer_norm(x, x.shape[1:]), [(300, 200)], torch.float32),
    "points": (lambda x: torch.cat([x * 2, torch.ones_like(x[:, :1])], 1), [(300, 3)], torch.float32),
    "windows": (lambda x: torch.nn.functional.avg_pool2d(x, 3, 1, 1), [(4, 8, 184, 184)], torch.float32),
}


def run(fn, args):
    interface.REGISTRY = kernel_cache.Registry()
    with config.override(cache_dir=""):  # else the twins' kernels are found by their graph
        handle, spec = fuse(fn)
        found = flat(handle(*args))
    no_fallback(spec)
    return found, [k.source for k in spec.store.kernels], spec


@pytest.mark.sampled(4, also=("bytes", "halves", "long rows", "norm", "points"))
@pytest.mark.parametrize("name", FUNCTIONS)
def test_twins_in_kernels_give_the_same_texts_and_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fn, sizes, dtype = FUNCTIONS[name]
    args = [(torch.randn(size) * 4).to(dtype) for size in sizes]
    monkeypatch.setattr(interface, "REGISTRY", interface.REGISTRY)
    want, texts, spec = run(fn, args)
    on_gpu = triton_of(spec, args)
    with twins():
        got, twin_texts, spec = run(fn, args)
        assert triton_of(spec, args) == on_gpu
    assert twin_texts == texts
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_twins_of_random_numbers_give_the_same_texts() -> None:
    _, spec = fuse(drawn)
    args = (torch.randn(300, 256), torch.tensor(5))
    want = triton_of(spec, args)
    with twins():
        assert triton_of(spec, args) == want


def triton_of(spec, args) -> str:
    with FakeTensorMode():
        fake = [torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device="cuda") for a in args]
    return pipeline.generate(spec.graph, fake, compiler.find_backend("cuda")).text
