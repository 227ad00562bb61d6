"""`python -m fuser doctor`: the state of all that this machine needs, each with ok or the cure."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import platform
import shutil
from collections.abc import Callable

import torch

from fuser import config
from fuser.cpu import toolchain
from fuser.cuda import driver as cuda_driver
from fuser.cuda import toolchain as cuda_toolchain
from fuser.errors import CompileError
from fuser.lazy_dataclasses import dataclass
from fuser.runtime import compilers, files, launcher, process, remote, torch_abi

LEAST_FREE = 64 << 20  # bytes; a kernel with its source and plan takes about 30 thousand
_ISAS = ("avx512f", "avx2", "sse4_2", "asimd")


@dataclass(frozen=True)
class Finding:
    """The result of one check. `cure` says what to do; empty if nothing has to be done."""

    name: str
    found: str
    cure: str = ""

    def __str__(self) -> str:
        return (
            f"{'ok  ' if not self.cure else 'FAIL'}  {self.name:10}  {self.found}{f' -> {self.cure}' * bool(self.cure)}"
        )


def _torch() -> Finding:
    version = tuple(int(n) for n in torch.__version__.split("+")[0].split(".")[:2])
    cure = "" if version >= (2, 11) else "pip install 'torch>=2.11'"
    return Finding("torch", f"{torch.__version__}, Python {platform.python_version()}", cure)


def _compiler() -> Finding:
    try:
        command = compilers.find()[0]
        toolchain.flags_for(command)
        _, text = process.run([*command, "--version"], config.compile_timeout_seconds)
    except (CompileError, OSError) as e:
        return Finding("compiler", str(e), "install g++, or pip install fuser[compiler], or set CXX")
    return Finding("compiler", f"{' '.join(command)}: {(text.splitlines() or ['no version'])[0]}")


def _isa() -> Finding:
    try:
        words = set(pathlib.Path("/proc/cpuinfo").read_text().split())
    except OSError:
        words = set()
    found = next((isa for isa in _ISAS if isa in words), "unknown to this page; the compiler uses what there is")
    return Finding("processor", f"{platform.machine()}, {found}, {os.cpu_count()} cores")


def _openmp() -> Finding:
    found = torch_abi.symbol("libtorch_cpu.so", "GOMP_parallel") is not None
    cure = "" if found else "install a build of torch that brings GNU's OpenMP: kernels run on one thread"
    return Finding(
        "OpenMP", f"{'that of torch' if found else 'none in torch'}, {torch.get_num_threads()} threads", cure
    )


def _launcher() -> Finding:
    native = launcher.wait(config.compile_timeout_seconds)
    found = "native" if native else f"in Python, since {launcher.reason() or 'the native one is not built yet'}"
    return Finding("launcher", found, "" if native else "a C++ compiler and Python's headers let it be built")


def _gpu() -> tuple[Finding, ...]:
    if not torch.cuda.is_available():
        return (Finding("GPU", "none"),)
    names = ", ".join(torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count()))
    why = cuda_driver.why_not()
    return Finding(
        "GPU", names if why is None else f"{names}: {why}", "" if why is None else "update the driver"
    ), _triton()


def _triton() -> Finding:
    why = cuda_toolchain.why_no_triton()
    if why is not None:
        return Finding("Triton", why, "pip install fuser[cuda]")
    return Finding("Triton", importlib.metadata.version("triton"))


def _cache() -> Finding:
    if not config.cache_dir:
        return Finding("cache", "none is kept between processes (FUSER_CACHE_DIR is empty, or there is no home folder)")
    try:
        folder = files.folder(config.cache_dir, "cpu")
        files.write(folder / "doctor", b"")
        (folder / "doctor").unlink()
    except OSError as e:
        return Finding("cache", str(e), "set FUSER_CACHE_DIR to a folder that you own and nobody else may write")
    return _room("cache", folder, "remove files, or set FUSER_CACHE_DIR")


def _remote() -> Finding:
    return Finding("remote", *remote.examine())


def _temporary() -> Finding:
    try:
        with files.temporary_folder() as folder:
            return _room("temporary", folder.parent, "remove files, or set TMPDIR")
    except OSError as e:
        return Finding("temporary", str(e), "set TMPDIR to a folder that can be written")


def _room(name: str, folder: pathlib.Path, cure: str) -> Finding:
    free = shutil.disk_usage(folder).free
    return Finding(name, f"{folder}, {free >> 20} MiB free", "" if free >= LEAST_FREE else cure)


CHECKS: tuple[Callable[[], Finding | tuple[Finding, ...]], ...] = (
    _torch, _compiler, _isa, _openmp, _launcher, _gpu, _cache, _remote, _temporary,
)  # fmt: skip


def examine() -> tuple[Finding, ...]:
    """The findings of all checks."""
    found: list[Finding] = []
    for check in CHECKS:
        one = check()
        found += one if isinstance(one, tuple) else (one,)
    return tuple(found)


def doctor() -> int:
    """Print the findings; returns 1 if something needs a cure, else 0."""
    findings = examine()
    for finding in findings:
        print(finding)
    return int(any(finding.cure for finding in findings))
