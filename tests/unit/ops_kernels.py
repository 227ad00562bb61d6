"""Compile one loop per cell of the op table, many to a source, and run them on tensors."""

from __future__ import annotations

import ctypes
import os
import pathlib
import shutil
import subprocess
from dataclasses import dataclass

import torch

from fuser import config, machines, ops

FLAGS = (
    "-std=c++17 -O3 -fno-math-errno -fno-trapping-math -ffp-contract=off"
    " -fopenmp-simd -fPIC -shared -Wall -Wno-unknown-pragmas -Wno-psabi"
).split() + list(machines.find(config.isa).flags)
COMPILER = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")


@dataclass(frozen=True)
class Kernel:
    """`name(args…) -> out`, each argument and the result with the dtype it has in memory."""

    name: str
    args: tuple[torch.dtype, ...]
    out: torch.dtype
    expression: str  # of x0, x1, …


def stored(dtype: torch.dtype) -> str:
    return "u8" if dtype is torch.bool else ops.CPP_TYPES[dtype]


def source_of(kernels: list[Kernel]) -> str:
    loops = []
    for k in kernels:
        args = "".join(f"const {stored(d)}* __restrict a{i}, " for i, d in enumerate(k.args))
        loads = "".join(
            f"    const {ops.CPP_TYPES[ops.compute_dtype(d)]} x{i} = {ops.cpp_load(d, f'a{i}[i]')};\n"
            for i, d in enumerate(k.args)
        )
        loops.append(
            f'extern "C" void {k.name}({args}{stored(k.out)}* __restrict out, i64 n) {{\n'
            f"#pragma omp simd\n  for (i64 i = 0; i < n; ++i) {{\n{loads}"
            f"    const {ops.CPP_TYPES[ops.compute_dtype(k.out)]} y = {k.expression};\n"
            f"    out[i] = {ops.cpp_store(k.out, 'y')};\n  }}\n}}\n"
        )
    body = "".join(loops)
    return ops.CPP_TYPEDEFS + ops.prelude_for(ops.helpers_in(body), machines.find(config.isa)) + body


class Library:
    """The kernels, compiled in `folder` as `parts` sources at a time."""

    def __init__(
        self, kernels: list[Kernel], folder: pathlib.Path, parts: int = 4, flags: tuple[str, ...] = ()
    ) -> None:
        self._kernels: dict[str, tuple[Kernel, object]] = {}
        jobs = []
        for p in range(parts):
            mine = kernels[p::parts]
            if not mine:
                continue
            path = folder / f"part{p}.cpp"
            path.write_text(source_of(mine))
            base = [str(COMPILER), *FLAGS, *flags, str(path), "-o", str(path.with_suffix(".so"))]
            simd = ["-DFUSER_SIMD_MATH", "-lmvec"] if _has_libmvec(folder) else []
            process = subprocess.Popen([*base, *simd, "-lm"], stderr=subprocess.PIPE, text=True)
            jobs.append((process, path.with_suffix(".so"), mine))
        for process, path, mine in jobs:
            log = process.communicate()[1]
            if process.returncode:
                raise AssertionError(f"{path.stem} did not compile:\n{log[:4000]}")
            library = ctypes.CDLL(str(path))
            for k in mine:
                self._kernels[k.name] = k, getattr(library, k.name)
            self.log = log

    def __contains__(self, name: str) -> bool:
        return name in self._kernels

    def run(self, name: str, *args: torch.Tensor) -> torch.Tensor:
        kernel, entry = self._kernels[name]
        assert tuple(a.dtype for a in args) == kernel.args, (name, [a.dtype for a in args])
        args = tuple(a.contiguous() for a in args)
        out = torch.empty(args[0].numel(), dtype=kernel.out)
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in (*args, out)]
        entry(*pointers, ctypes.c_int64(out.numel()))  # type: ignore[operator]
        return out


def _has_libmvec(folder: pathlib.Path) -> bool:
    probe = folder / "probe.cpp"
    if not probe.exists():
        probe.write_text(
            'extern "C" __attribute__((simd("notinbranch"), const)) float expf(float);\n'
            "void f(float* a) {\n#pragma omp simd\n  for (int i = 0; i < 64; ++i) a[i] = expf(a[i]);\n}\n"
        )
    done = subprocess.run(
        [str(COMPILER), *FLAGS, str(probe), "-o", str(folder / "probe.so"), "-Wl,--no-undefined", "-lmvec", "-lm"],
        capture_output=True,
    )
    return done.returncode == 0
