"""Passes over vector IR, on small functions: the text that comes out, and the same results before and after."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from fuser import machines
from fuser.cpu.vir import nodes as ir
from fuser.cpu.vir.builder import Builder
from fuser.cpu.vir.legalise import legalise
from fuser.cpu.vir.passes import stage_stores
from fuser.cpu.vir.printer import printed
from fuser.cpu.vir.verifier import verify_kernel
from fuser.debug.vector_interpreter import interpret
from fuser.ir.sizes import LOOP, Sym, symbol

MACHINE = machines.find("avx512")
V = ir.Name("v")


def doubled() -> ir.Kernel:
    """y = x + x, of which results may be staged, 4 at a time."""
    out = Builder()
    out.add(ir.Pointer("float", "x", ir.Slot("ptrs", 0), True))
    out.add(ir.Pointer("float", "y", ir.Slot("ptrs", 1), False))
    out.let("bool", "stream", ir.Slot("s", 0) > 0)
    with out.block(ir.For("w0", ir.Number(0), ir.Slot("s", 1), ir.Number(4))):
        out.let("i64", "w1", ir.least(ir.Name("w0") + 4, ir.Slot("s", 1)))
        memory = ir.Address(ir.Name("y"), ir.Name("w0"))
        results = (ir.Result("0_0", "float", 4, memory),)
        count = ir.Name("w1") - "w0"
        with out.block(ir.Staged(results, V - "w0", 4, count)), out.block(
            ir.For("v", ir.Name("w0"), ir.Name("w1"), simd=True)
        ):
            out.set(ir.At(ir.Name("y"), V, "0_0"), ir.Name("x")[V] + ir.Name("x")[V])
    with out.block(ir.If(ir.Name("stream"))):
        out.add(ir.StreamEnd())
    return ir.Kernel("k", tuple(out.statements))


STAGED = """\
extern "C" void k(char* const* ptrs, const i64* s, const double* f, i64 begin, i64 end, char* scratch, i32* status) {
  const float* __restrict x = (const float*)ptrs[0];
  float* __restrict y = (float*)ptrs[1];
  const bool stream = s[0] > 0;
  for (i64 w0 = 0; w0 < s[1]; w0 += 4) {
    const i64 w1 = w0 + 4 < s[1] ? w0 + 4 : s[1];
    float staged0_0[4] __attribute__((aligned(64)));
    float* const past0_0 = y + (w0);
    float* __restrict to0_0 = stream ? staged0_0 : past0_0;
    #pragma omp simd
    for (i64 v = w0; v < w1; ++v) {
      to0_0[v - w0] = x[v] + x[v];
    }
    if (stream) fuser_stream(past0_0, staged0_0, (w1 - w0) * 4);
  }
  if (stream) fuser_stream_end();
}
"""


def test_the_text_of_staged_stores():
    made = stage_stores(doubled(), MACHINE)
    verify_kernel(made)
    found = printed(made)
    assert found.text == STAGED and {"fuser_stream", "fuser_stream_end"} <= found.uses


def run(kernel: ir.Kernel, arrays, *slots: int) -> np.ndarray:
    made = np.full_like(arrays[0], 0 if arrays[0].dtype.kind == "u" else np.nan)
    assert interpret(kernel, [*arrays, made], slots, (), 0, 1) == 0
    return made


@pytest.mark.parametrize("stream", [0, 1])
@pytest.mark.parametrize("n", [0, 3, 4, 11])
def test_staged_stores_store_the_same(stream, n):
    x = np.arange(12, dtype=np.float32)
    before, after = (run(k, [x], stream, n) for k in (doubled(), stage_stores(doubled(), MACHINE)))
    assert before[:n].tolist() == (2 * x)[:n].tolist()
    np.testing.assert_array_equal(before, after)  # and nothing beyond


def test_a_kernel_without_such_loops_is_left_alone():
    kernel = stage_stores(doubled(), MACHINE)
    assert stage_stores(kernel, MACHINE) == kernel


def halved() -> ir.Kernel:
    out, half = Builder(), torch.float16
    out.add(ir.Pointer("u16", "x", ir.Slot("ptrs", 0), True))
    out.add(ir.Pointer("u16", "y", ir.Slot("ptrs", 1), False))
    with out.block(ir.For("v", ir.Number(0), ir.Number(4))):
        out.let("float", "t", ir.Decode(half, ir.Name("x")[V]))
        out.set(ir.Name("y")[V], ir.Encode(half, ir.Name("t") + ir.Number(0.5, torch.float32)))
    return ir.Kernel("k", tuple(out.statements))


def test_lone_conversions():
    x = np.array([1.0, -2.5, 0.1, np.inf], np.float16)
    before, sequential = halved(), dataclasses.replace(halved(), sequential=True)
    assert legalise(before, MACHINE) == before
    after = legalise(sequential, MACHINE)
    texts = [printed(k).text for k in (before, after)]
    assert [t.count("fuser_load_half") for t in texts] == [1, 0]
    assert texts[1] == texts[0].replace("fuser_load", "fuser_lone_load").replace("fuser_store", "fuser_lone_store")
    results = [run(k, [x.view(np.uint16)]) for k in (before, after)]
    assert all(r.view(np.float16).tolist() == (x + np.float16(0.5)).tolist() for r in results)


def looked_up(count: int, checked: bool = False) -> ir.Kernel:
    """Elements of `count` buffers of bytes that lanes look up."""
    out = Builder()
    for n in range(count):
        out.let("u8", f"t{n}", ir.Gather("u8", ir.Name(f"x{n}"), V))
    return ir.Kernel("k", tuple(out.statements), checked)


@pytest.mark.parametrize("count, checked, gathered", [(4, False, 4), (5, False, 0), (1, True, 0)])
def test_few_elements_are_gathered_by_vectors(count, checked, gathered):
    text = printed(legalise(looked_up(count, checked), MACHINE)).text
    assert text.count("fuser_gather_u8(") == gathered and text.count("[v]") == count - gathered


STEPS = {16: "x[16 * v]", 17: "x[far17 * v]", -17: "x[(-1) * far17 * v]", 6: "x[far6 * v]"}


@pytest.mark.parametrize("step", STEPS)
def test_large_and_scattered_steps_are_hidden(step):
    """Of offsets into memory, along the axis of lanes alone."""
    v, other = symbol("v", LOOP), symbol("w", LOOP)
    scope = ir.Scope(ir.Name, {}, None, Sym("v", LOOP), frozenset({6}))
    values = [ir.Name("x")[ir.Offset(e * step, of, scope)] for e, of in ((v, "place"), (other, "place"), (v, "floor"))]
    kernel = ir.Kernel("k", tuple(ir.Let("float", f"t{n}", value) for n, value in enumerate(values)))
    lines = [line.strip() for line in printed(legalise(kernel, MACHINE)).text.splitlines()]
    wanted, plain = STEPS[step], f"({step})" if step < 0 else step
    loads = (wanted, f"x[{plain} * w]", f"x[{plain} * v]")
    assert lines[-4:-1] == [f"const float t{n} = {load};" for n, load in enumerate(loads)]
    hidden = f"const i64 far{abs(step)} = hidden({abs(step)});"
    assert lines[1:-4] == ([hidden] if "far" in wanted else [])


@pytest.mark.parametrize(
    "divisor, machine, fused", [(3.0, "avx512", True), (2.0, "avx512", False), (3.0, "sse4.2", False)]
)
def test_divisions_by_constants_are_products(divisor, machine, fused):
    quotient = ir.Binary("/", ir.Name("x"), ir.Number(divisor, torch.float32))
    kernel = ir.Kernel("k", (ir.Let("float", "t", quotient),))
    assert ("FUSER_FMAF" in printed(legalise(kernel, machines.find(machine))).text) is fused
