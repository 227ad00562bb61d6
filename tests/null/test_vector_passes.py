"""Passes over vector IR, on small functions: the text that comes out, and the same results before and after."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from fuser import machines
from fuser.cpu.vir import nodes as ir
from fuser.cpu.vir.builder import Builder
from fuser.cpu.vir.passes import convert_alone, stage_stores
from fuser.cpu.vir.printer import printed
from fuser.cpu.vir.verifier import verify_kernel
from fuser.debug.vector_interpreter import interpret

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
    assert convert_alone(before, MACHINE) == before
    after = convert_alone(sequential, MACHINE)
    texts = [printed(k).text for k in (before, after)]
    assert [t.count("fuser_load_half") for t in texts] == [1, 0]
    assert texts[1] == texts[0].replace("fuser_load", "fuser_lone_load").replace("fuser_store", "fuser_lone_store")
    results = [run(k, [x.view(np.uint16)]) for k in (before, after)]
    assert all(r.view(np.float16).tolist() == (x + np.float16(0.5)).tolist() for r in results)
