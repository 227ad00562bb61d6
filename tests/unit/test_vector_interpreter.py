"""Vector IR, run by its interpreter: kernels give eager's results, with vectors and without."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from fuser import config, machines
from fuser.cpu import fused_kernel, streams
from fuser.cpu.vir import nodes as ir
from fuser.cpu.vir import passes, rewrite
from fuser.cpu.vir.builder import Builder
from fuser.debug import vector_interpreter
from fuser.debug.vector_interpreter import interpret, run_functions
from fuser.errors import VerifyError
from fuser.scheduler.schedule import schedule
from tests.backend.test_reference import CASES, as_list, assert_same, lowered_of

SLOW = 40_000  # elements of all arguments, above which a case takes seconds


def run(name: str, macros=()):
    """The results of a case's kernels, of the machine with most vectors."""
    lowered, args = lowered_of(name)
    plan = schedule(lowered, config.max_body_rows)
    functions, program = fused_kernel.functions_for(lowered, plan, False, machines.find("avx512"))
    copied = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    return run_functions(functions, program, copied, macros)


def small(args) -> bool:
    return sum(a.numel() for a in args if isinstance(a, torch.Tensor)) < SLOW


@pytest.mark.sampled(
    16,
    also=(
        "argmax-vectors", "bfloat16_cast-vectors", "bools-plain", "drawn-vectors", "rms_swiglu-plain", "roll-plain",
        "scalar_inputs-vectors", "softmax_half-plain",
    ),
)  # fmt: skip
@pytest.mark.parametrize("macros", [(), ("FUSER_LANES", "FUSER_MASKS")], ids=["plain", "vectors"])
@pytest.mark.parametrize("name", [name for name, (_, *args) in CASES.items() if small(args)])
def test_kernels_give_eagers_results(name, macros):
    fn, *args = CASES[name]
    want = as_list(fn(*args))
    assert_same(run(name, macros), want, args)


HALVES = {
    "running": (lambda x: x.cumsum(-1), torch.randn(3, 40).half()),
    "extremes": (lambda x: (x.cummax(0)[0], x.cummax(1)[1]), torch.randn(9, 3).half()),
}


@pytest.mark.parametrize("name", HALVES)
def test_lone_conversions_change_no_result(name, monkeypatch):
    """The pass over chains, and the same functions without it."""
    monkeypatch.setitem(CASES, name, HALVES[name])
    with_pass = run(name)
    monkeypatch.setattr(passes, "PASSES", tuple(p for p in passes.PASSES if p is not passes.legalise))
    assert all(torch.equal(a, b) for a, b in zip(run(name), with_pass, strict=True))


def kernel(fill) -> ir.Kernel:
    out = Builder()
    out.add(ir.Pointer("float", "x", ir.Slot("ptrs", 0), True))
    out.add(ir.Pointer("float", "y", ir.Slot("ptrs", 1), False))
    fill(out)
    return ir.Kernel("k", tuple(out.statements))


def results(fill, x, n: int, slots=()) -> np.ndarray:
    y = np.full(n, np.nan, np.float32)
    assert interpret(kernel(fill), [np.asarray(x, np.float32), y], slots, (), 0, 1) == 0
    return y


X, Y, K = ir.Name("x"), ir.Name("y"), ir.Name("k")
FLOATS = torch.float32


def test_folds_halve():
    x = np.float32([1e8, 1, -1e8, 2, 3, 4, 5, 6])

    def fill(out):
        out.scratch("float", "acc", 8)
        out.each(8, ir.Set(ir.Name("acc")["l"], X["l"]))
        out.add(ir.Fold("acc", FLOATS, 8, 16, "sign", "+"))
        out.set(Y[0], ir.Name("acc")[0])

    a = x[:4] + x[4:]
    assert results(fill, x, 1)[0] == (a[0] + a[2]) + (a[1] + a[3])


def test_masks_and_backward_loads():
    x = np.arange(40, dtype=np.float32)

    def fill(out):
        first, some = ir.First(FLOATS, ir.Number(5)), ir.First(FLOATS, ir.Number(3))
        out.add(ir.Store(FLOATS, Y + 0, (ir.Load(FLOATS, X + 2, first),)))
        out.add(ir.Store(FLOATS, Y + 16, (ir.Load(FLOATS, X + 38, back=ir.Number(16)),), some))

    got = results(fill, x, 32)
    assert got[:16].tolist() == [2, 3, 4, 5, 6] + [0] * 11 and got[16:19].tolist() == [38, 37, 36]
    assert np.isnan(got[19:]).all()  # nothing is written where a mask does not hold


def test_loops_of_whole_steps_and_segments():
    def fill(out):
        out.var("i64", "k", 0)
        with out.block(ir.For("k", None, ir.Number(10), ir.Number(4), whole=True)):
            out.set(Y[K], X[K + 3])
        with out.block(ir.For("k", None, ir.Number(10))):
            out.set(Y[K], -1)
        with out.block(ir.Segments(ir.Number(10), ir.Number(20), 8, (ir.Number(13),))):
            with out.block(ir.For("l", ir.Name("from"), ir.Name("to"))):
                out.set(Y["l"], ir.Name("to"))

    got = results(fill, np.arange(16), 20)
    assert got[[0, 4]].tolist() == [3, 7] and got[[8, 9]].tolist() == [-1, -1] and np.isnan(got[1:4]).all()
    assert got[10:].tolist() == [13] * 3 + [20] * 7


def test_an_access_outside_is_an_error():
    with pytest.raises(VerifyError, match="elements 0 to 1 of float at 28 of 16"):
        results(lambda out: out.set(Y[7], 1), [0.0], 4)
    with pytest.raises(VerifyError, match="'z' is not declared"):
        results(lambda out: out.set(ir.Name("z")[0], 1), [0.0], 4)


def test_a_wrong_kernel_is_seen():
    """Another op in place of a softmax's exponentials."""
    lowered, args = lowered_of("softmax_half")
    functions, program = fused_kernel.functions_for(
        lowered, schedule(lowered, config.max_body_rows), False, machines.find("avx512")
    )
    want = run_functions(functions, program, args)

    def twice(v):
        return dataclasses.replace(v, name="exp2") if v.name.startswith("exp") else v

    wrong = [dataclasses.replace(f, code=rewrite.values(f.code, {ir.Op: twice})) for f in functions]
    assert not torch.allclose(run_functions(wrong, program, args)[0].float(), want[0].float(), atol=1e-2)


def test_pixels_become_planes(monkeypatch):
    """Runs of three elements are taken apart, and others are transposed block by block."""
    pixels = torch.randint(0, 255, (1, 20, 17, 3), dtype=torch.uint8)
    monkeypatch.setitem(CASES, "planes", (lambda x: x.permute(0, 3, 1, 2).contiguous(), pixels))
    monkeypatch.setitem(CASES, "turned", (lambda x, y: x.t() + y, torch.randn(33, 40), torch.randn(40, 33)))
    for name in ("planes", "turned"):
        fn, *args = CASES[name]
        assert_same(run(name), as_list(fn(*args)))


LARGE = {
    "pointwise": (lambda x: x.exp() + 1, torch.randn(3, 90)),
    "halves": (lambda x: x * 2 - 1, torch.randn(3, 90).half()),
    "rows": (lambda x: x.softmax(-1), torch.randn(3, 96)),
    "columns": (lambda x: x.softmax(0), torch.randn(5, 96)),
    "channels": (lambda x, y: (x - y[:, None]) * 2, torch.randn(3, 96), torch.randn(3)),
    "rows apart": (lambda x: x.softmax(-1), torch.randn(3, 92)),
    "channels apart": (lambda x, y: (x - y[:, None]) * 2, torch.randn(3, 92).bfloat16(), torch.randn(3).bfloat16()),
}


@pytest.mark.sampled(7, also=("columns-plain", "rows apart-vectors"))
@pytest.mark.parametrize("macros", [(), ("FUSER_LANES", "FUSER_MASKS")], ids=["plain", "vectors"])
@pytest.mark.parametrize("name", LARGE)
def test_results_past_the_cache(name, macros, monkeypatch):
    """With every result taken for a large one, tiles and copies are run, where rows begin at halves of lines."""
    monkeypatch.setattr(streams, "STREAM_BYTES", 8)
    monkeypatch.setitem(CASES, name, LARGE[name])
    copied = []
    stream = vector_interpreter._STATEMENTS[ir.Stream]
    monkeypatch.setitem(vector_interpreter._STATEMENTS, ir.Stream, lambda *a: copied.append(1) or stream(*a))
    fn, *args = CASES[name]
    assert_same(run(name, macros), as_list(fn(*args)), args)
    assert bool(copied) == (not name.endswith(" apart"))
