"""Kernels written by hand, with the launch programs that a compiler would make for them."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess

import torch

from fuser.ir.sizes import LE, MUL, PUSH, SLOT
from fuser.kernel_spec import Bind, BufferPattern, Check, InputPattern, LaunchProgram, Step

SOURCE = r"""
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>
typedef char* const* P; typedef const int64_t* I; typedef const double* D; typedef int64_t N;
#define ENTRY(name) extern "C" void name(P p, I s, D f, N begin, N end, char* scratch, int32_t* status)

ENTRY(mul_add) {  // x * y + z, contiguous
  const float *x = (float*)p[0], *y = (float*)p[1], *z = (float*)p[2];
  float* o = (float*)p[3];
  for (N i = begin; i < end; i++) o[i] = x[i] * y[i] + z[i];
}
ENTRY(add_one) {  // slots: rows, cols, row stride, col stride of the input
  const float* x = (float*)p[0];
  float* o = (float*)p[1];
  for (N i = begin; i < end; i++)
    for (N j = 0; j < s[1]; j++) o[i * s[1] + j] = x[i * s[2] + j * s[3]] + 1;
}
ENTRY(scalars) {  // x * a + n + flag; slots: size, n, flag; floats: a
  const double* x = (double*)p[0];
  double* o = (double*)p[1];
  for (N i = begin; i < end; i++) o[i] = x[i] * f[0] + s[1] + (s[2] ? 1000 : 0);
}
ENTRY(square) {  // into a temporary
  const float* x = (float*)p[0];
  float* t = (float*)p[1];
  for (N i = begin; i < end; i++) t[i] = x[i] * x[i];
}
ENTRY(twice) {  // from the temporary
  const float* t = (float*)p[1];
  float* o = (float*)p[2];
  for (N i = begin; i < end; i++) o[i] = 2 * t[i];
}
ENTRY(reversed) {  // from the temporary's other end: what another thread has written
  const float* t = (float*)p[1];
  float* o = (float*)p[2];
  for (N i = begin; i < end; i++) o[i] = t[s[0] - 1 - i];
}
ENTRY(gather) {  // x[index], with the index checked
  const float* x = (float*)p[0];
  const N* index = (N*)p[1];
  float* o = (float*)p[2];
  for (N i = begin; i < end; i++) {
    N k = index[i];
    if (k < 0 || k >= s[0]) { *status = 1; continue; }
    o[i] = x[k];
  }
}
ENTRY(who) {  // the thread, the scratch address and the first unit of each unit's part
  N* o = (N*)p[1];
  for (N i = begin; i < end; i++) {
    if (scratch) scratch[i % 64] = (char)i;
    o[3 * i] = syscall(SYS_gettid), o[3 * i + 1] = (N)scratch, o[3 * i + 2] = begin;
  }
}
ENTRY(nothing) {}
"""


def compile_library(folder, text: str = SOURCE) -> str:
    """The path of a library with the entries of `text`, those above."""
    source, library = folder / "kernels.cpp", folder / "kernels.so"
    source.write_text(text)
    compiler = shlex.split(os.environ.get("CXX", "")) or [shutil.which("g++") or "clang++"]
    subprocess.run([*compiler, "-O2", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    return str(library)


ONE, ZERO = (PUSH, 1), (PUSH, 0)


def vector(size: Bind | Check, dtype: torch.dtype = torch.float32) -> InputPattern:
    """A contiguous tensor of one dimension."""
    return InputPattern("tensor", dtype, "cpu", (size,), (Check(ONE),))


def output(*sizes, dtype: torch.dtype = torch.float32, strides=None, is_output: bool = True) -> BufferPattern:
    """A buffer of these size programs; contiguous with at most two dimensions."""
    if strides is None:
        strides = ((), (ONE,), (sizes[-1], ONE))[len(sizes)] if sizes else ()
    return BufferPattern(dtype, tuple(sizes), tuple(strides), is_output)


def program(inputs, slots, buffers, steps, results=(("buffer", 0),), floats=0, guards=(), single=True) -> LaunchProgram:
    """A launch program from plain sequences."""
    return LaunchProgram(
        tuple(inputs), slots, floats, tuple(guards), tuple(buffers), tuple(steps), tuple(results), single
    )


def mul_add(work=(SLOT, 0), guards=()) -> LaunchProgram:
    """x * y + z for three equal contiguous vectors. Slot 0: the size."""
    other = vector(Check((SLOT, 0)))
    step = Step("mul_add", (SLOT, 0), work, ZERO)
    return program([vector(Bind(0)), other, other], 1, [output((SLOT, 0))], [step], guards=guards)


def add_one(**change) -> LaunchProgram:
    """x + 1 for any strided matrix, units are rows. Slots: rows, columns, their strides."""
    x = InputPattern("tensor", torch.float32, "cpu", (Bind(0), Bind(1)), (Bind(2), Bind(3)))
    step = Step("add_one", (SLOT, 0), (SLOT, 0, SLOT, 1, MUL), ZERO)
    return program([x], 4, [output((SLOT, 0), (SLOT, 1))], [step], **change)


def temporaries() -> LaunchProgram:
    """2 * x * x through a temporary."""
    n = (SLOT, 0)
    steps = [Step("square", n, n, ZERO), Step("twice", n, n, ZERO)]
    return program([vector(Bind(0))], 1, [output(n, is_output=False), output(n)], steps, (("buffer", 1),))


def flipped_squares() -> LaunchProgram:
    """(x * x) from back to front, through a temporary; a third step runs on one thread."""
    n = (SLOT, 0)
    steps = [Step("square", n, n, ZERO), Step("reversed", n, n, ZERO), Step("nothing", ONE, ONE, ZERO)]
    return program([vector(Bind(0))], 1, [output(n, is_output=False), output(n)], steps, (("buffer", 1),))


def gather(steps: int = 1) -> LaunchProgram:
    """x[index], status 1 for an index out of range; the step is run `steps` times."""
    index = vector(Bind(1), torch.int64)
    step = Step("gather", (SLOT, 1), (SLOT, 1), ZERO)
    return program([vector(Bind(0)), index], 2, [output((SLOT, 1))], [step] * steps)


def scalars() -> LaunchProgram:
    """x * a + n (+ 1000 if flag): x float64, a float, n int, flag bool."""
    inputs = [vector(Bind(0), torch.float64), InputPattern("float", slot=0), InputPattern("int", slot=1)]
    inputs.append(InputPattern("bool", slot=2))
    step = Step("scalars", (SLOT, 0), (SLOT, 0), ZERO)
    return program(inputs, 3, [output((SLOT, 0), dtype=torch.float64)], [step], floats=1)


def who(work: int, scratch: int = 0) -> LaunchProgram:
    """For each element: thread, scratch address, begin of its part. `work` per call and `scratch` bytes as given."""
    step = Step("who", (SLOT, 0), (PUSH, work), (PUSH, scratch))
    out = output((SLOT, 0), (PUSH, 3), dtype=torch.int64)
    return program([vector(Bind(0))], 1, [out], [step])


def at_most(slot: int, limit: int) -> tuple[int, ...]:
    """A guard: slot <= limit."""
    return (SLOT, slot, PUSH, limit, LE)
