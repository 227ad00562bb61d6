"""Kernels for machines that this one is not: compiled by a cross compiler, run by qemu on the memory of a call.

Kernels are made as for any call. The launch program is evaluated here; a small driver there loads the library, reads
buffers, slots and numbers of a call from a file, runs all steps over all their units and writes the buffers back.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import struct
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from fuser import compiler, config, machines, register_fusion
from fuser.kernel_cache import REGISTRY
from fuser.kernel_spec import LaunchProgram
from fuser.runtime import compilers
from fuser.runtime.python_launcher import match, run_program


@dataclass(frozen=True)
class Emulator:
    """A row of the machines, and the commands that compile for it and run it."""

    isa: str
    compiler: tuple[str, ...]
    run: tuple[str, ...]

    def why_not(self) -> str | None:
        """None if both commands are here."""
        missing = [command[0] for command in (self.compiler, self.run) if shutil.which(command[0]) is None]
        return f"needs {' and '.join(missing)}" if missing else None


_CROSS, _SYSTEM = ("aarch64-linux-gnu-g++",), ("-L", "/usr/aarch64-linux-gnu")
EMULATORS = (
    Emulator("neon", _CROSS, ("qemu-aarch64", *_SYSTEM)),
    Emulator("sve256", _CROSS, ("qemu-aarch64", "-cpu", "max,sve256=on,sve-default-vector-length=32", *_SYSTEM)),
)

_DRIVER = r"""
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
typedef long long i64;
typedef void Step(char* const*, const i64*, const double*, i64, i64, char*, int*);
static i64 number(FILE* f) { i64 n; if (fread(&n, 8, 1, f) != 1) exit(3); return n; }
static char* room(i64 n) { return (char*)aligned_alloc(64, (n + 4096) / 64 * 64); }
int main(int, char** argv) {
  void* library = dlopen(argv[1], RTLD_NOW);
  if (!library) { fprintf(stderr, "%s\n", dlerror()); return 2; }
  FILE* f = fopen(argv[2], "rb");
  i64 slots[256], sizes[256];
  double floats[256];
  char *base[256], *pointers[256], name[256];
  const i64 n_slots = number(f); for (i64 k = 0; k < n_slots; ++k) slots[k] = number(f);
  const i64 n_floats = number(f); if (fread(floats, 8, n_floats, f) != (size_t)n_floats) return 3;
  const i64 n_buffers = number(f);
  for (i64 k = 0; k < n_buffers; ++k) {
    sizes[k] = number(f);
    const i64 offset = number(f);
    base[k] = room(sizes[k]);
    pointers[k] = base[k] + offset;
    if (fread(base[k], 1, sizes[k], f) != (size_t)sizes[k]) return 3;
  }
  int status = 0;
  for (i64 steps = number(f); steps; --steps) {
    const i64 units = number(f), scratch = number(f), length = number(f);
    if (fread(name, 1, length, f) != (size_t)length) return 3;
    name[length] = 0;
    Step* step = (Step*)dlsym(library, name);
    if (!step) return 4;
    char* own = room(scratch + 64);
    const i64 half = units / 2;  // as two threads would
    if (half) step(pointers, slots, floats, 0, half, own, &status);
    if (units > half) step(pointers, slots, floats, half, units, own, &status);
    free(own);
  }
  FILE* out = fopen(argv[3], "wb");
  for (i64 k = 0; k < n_buffers; ++k) fwrite(base[k], 1, sizes[k], out);
  fclose(out);
  return status ? 5 : 0;
}
"""


def driver(emulator: Emulator, folder: pathlib.Path) -> pathlib.Path:
    """The program that runs kernels on the other machine."""
    made = folder / f"driver-{emulator.isa}"
    if not made.exists():
        source = folder / "driver.cpp"
        source.write_text(_DRIVER)
        subprocess.run([*emulator.compiler, "-O1", str(source), "-o", str(made), "-ldl"], check=True)
    return made


def _numbers(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)


def _memory(t: torch.Tensor) -> bytes:
    return bytes(t.untyped_storage())


def _buffers(program: LaunchProgram, slots: list[int]) -> list[torch.Tensor]:
    """A tensor for each result and temporary of a call."""
    out = []
    for b in program.buffers:
        sizes = [run_program(code, slots) for code in b.sizes]
        if b.output:
            out.append(torch.empty_strided(sizes, [run_program(code, slots) for code in b.strides], dtype=b.dtype))
        else:
            out.append(torch.empty(max(1, torch.Size(sizes).numel()), dtype=b.dtype))
    return [t.fill_(1) if t.dtype is torch.bool else t.fill_(77) for t in out]


def run(emulator: Emulator, fn: Any, args: Sequence[torch.Tensor], folder: pathlib.Path) -> list[torch.Tensor]:
    """The results of `fn` by its kernels for the emulated machine."""
    with config.override(isa=emulator.isa):
        registration = REGISTRY.find(register_fusion(torch.fx.symbolic_trace(fn), functional=True))
        args = [*registration.bound, *args]
        backend = compiler.find_backend("cpu")
        assert backend is not None
        source: Any = compiler.generate(registration.spec, args, backend)
    bound = match(source.program, args)
    assert bound is not None
    slots, floats = bound
    made = _buffers(source.program, slots)
    tensors = [a for a in args if isinstance(a, torch.Tensor)] + made
    steps = b""
    for s in source.program.steps:
        units, scratch = (run_program(code, slots) for code in (s.units, s.scratch))
        steps += _numbers(units, scratch, len(s.entry)) + s.entry.encode()
    call = _numbers(len(slots), *slots, len(floats)) + struct.pack(f"<{len(floats)}d", *floats) + _numbers(len(tensors))
    for t in tensors:
        call += _numbers(t.untyped_storage().nbytes(), t.storage_offset() * t.itemsize) + _memory(t)
    (folder / "call").write_bytes(call + _numbers(len(source.program.steps)) + steps)
    library = _compile(emulator, source, folder)
    command = [*emulator.run, driver(emulator, folder), library, folder / "call", folder / "out"]
    subprocess.run(list(map(os.fspath, command)), check=True, timeout=600)
    data, at = (folder / "out").read_bytes(), 0
    for t in tensors:
        size = t.untyped_storage().nbytes()
        if any(t is m for m in made) and size:
            own = torch.frombuffer(bytearray(data[at : at + size]), dtype=torch.uint8)
            t.set_(own.untyped_storage(), 0, t.shape, t.stride())
        at += size
    return [args[i] if kind == "input" else made[i] for kind, i in source.program.outputs]


def _compile(emulator: Emulator, source: Any, folder: pathlib.Path) -> pathlib.Path:
    """The library of a source; its parts are compiled one after the other."""
    kind = next(k for k in compilers.KINDS if k.name == "g++")
    flags = kind.flags_for(machines.find(emulator.isa))
    inputs = []
    for n, part in enumerate(source.parts):
        (folder / f"{n}.cpp").write_text(part)
        inputs.append(str(folder / f"{n}.cpp"))
    made = folder / "kernels.so"
    subprocess.run([*emulator.compiler, *flags, *inputs, "-o", str(made), *kind.libraries], check=True)
    return made
