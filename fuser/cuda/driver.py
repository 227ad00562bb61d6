"""NVIDIA's driver through ctypes: finding it, loading kernels, launching them."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fuser.errors import CompileError
from fuser.lazy_dataclasses import dataclass
from fuser.reasons import because

_log = logging.getLogger(__name__)
OLDEST_DRIVER = 12_000  # CUDA 12.0, the first whose libraries belong to no context
OLDEST_CAPABILITY = (7, 0)
_SHARED_BY_DEFAULT = 48 << 10
_MAX_DYNAMIC_SHARED = 8  # CUfunction_attribute
# Illegal address, time limit, assertion, stack, instruction, alignment, address space, program counter, anything else.
_WHILE_RUNNING = frozenset((700, 702, 710, 714, 715, 716, 717, 718, 719))


@functools.cache
def _library() -> Any:
    try:
        lib: Any = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return lib


def error_text(code: int) -> str:
    """The driver's text for an error code."""
    lib, text = _library(), ctypes.c_char_p()
    if lib is None or lib.cuGetErrorString(code, ctypes.byref(text)) or not text.value:
        return f"CUDA error {code}"
    return f"{text.value.decode()} (CUDA error {code})"


def _check(code: int, what: str) -> None:
    if code:
        raise CompileError(f"{what}: {error_text(code)}")


def why_not() -> str | None:
    """None if kernels can run, else what is missing."""
    if not torch.cuda.is_available():
        return "torch finds no CUDA device here (torch.cuda.is_available() is False)"
    lib = _library()
    if lib is None:
        return because("compiler", "the NVIDIA driver's library libcuda.so.1 cannot be loaded")
    version = ctypes.c_int()
    if lib.cuDriverGetVersion(ctypes.byref(version)) or version.value < OLDEST_DRIVER:
        return because(
            "compiler",
            f"the NVIDIA driver supports CUDA {version.value // 1000}.{version.value % 1000 // 10}: 12.0 is needed",
        )
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) < OLDEST_CAPABILITY:
        return f"{torch.cuda.get_device_name()} has compute capability {major}.{minor}: 7.0 is needed"
    return None


@dataclass(frozen=True)
class Entry:
    """A compiled kernel: its binary, bytes of shared memory, threads of a block, null arguments at the end."""

    name: str
    cubin: bytes
    shared: int
    threads: int
    extra: int


class Library:
    """Kernels loaded in the driver. `entries` are their handles, valid on every device and in every context.

    `batched` compiles them for many argument sets in one launch (see `fuser.cuda.batch`).
    """

    def __init__(
        self, path: str, parts: Sequence[Entry], batched: Callable[[], Sequence[Entry]] | None = None
    ) -> None:
        self.path = path
        self.parts = tuple(parts)
        self._batched = batched
        lib = _library()
        if lib is None:
            raise CompileError("the NVIDIA driver's library libcuda.so.1 cannot be loaded")
        self.entries = tuple(self._load(lib, part) for part in parts)
        self.functions = tuple(
            ctypes.cast(getattr(lib, name), ctypes.c_void_p).value or 0
            for name in (
                "cuLaunchKernelEx", "cuCtxGetDevice", "cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease_v2",
                "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", "cuStreamIsCapturing", "cuMemcpyHtoDAsync_v2",
                "cuMemsetD32Async",
            )
        )  # fmt: skip

    def batch(self) -> tuple[int, ...]:
        """For each kernel, its form for many argument sets: handle, threads, bytes of shared memory, null arguments.

        Empty if there is none: each call is then launched by itself.
        """
        try:
            parts = self._batched() if self._batched is not None else ()
            return tuple(n for p in parts for n in (self._load(_library(), p), p.threads, p.shared, p.extra))
        except CompileError as e:
            _log.warning("calls of %s are launched one by one: %s", self.path, e)
            return ()

    def _load(self, lib: Any, part: Entry) -> int:
        library, kernel = ctypes.c_void_p(), ctypes.c_void_p()
        _check(lib.cuInit(0), "the driver cannot be started")
        code = lib.cuLibraryLoadData(ctypes.byref(library), part.cubin, None, None, 0, None, None, 0)
        _check(code, f"kernel {part.name} of {self.path} cannot be loaded")
        name = part.name.encode()
        _check(lib.cuLibraryGetKernel(ctypes.byref(kernel), library, name), f"{self.path} has no kernel {part.name}")
        if part.shared > _SHARED_BY_DEFAULT:
            for device in range(torch.cuda.device_count()):
                code = lib.cuKernelSetAttribute(_MAX_DYNAMIC_SHARED, part.shared, kernel, device)
                _check(code, f"kernel {part.name} needs {part.shared} bytes of shared memory")
        return kernel.value or 0

    def __str__(self) -> str:
        return self.path

    def launch(self, step: int, units: int, values: Sequence[tuple[str, Any]], stream: int) -> int:
        """Launch kernel `step` with arguments (kind, value); returns the driver's error code, 0 for success."""
        cells: list[Any] = [_CELLS[kind](value) for kind, value in values]
        pointers = (ctypes.c_void_p * max(len(cells), 1))(*(ctypes.addressof(c) for c in cells))
        part = self.parts[step]
        code: int = _library().cuLaunchKernel(
            ctypes.c_void_p(self.entries[step]), units, 1, 1, part.threads, 1, 1, part.shared, ctypes.c_void_p(stream),
            pointers, None,
        )  # fmt: skip
        return code

    def failure(self, step: int, code: int, args: Sequence[Any]) -> str:
        """The sentence about a launch that failed, or that reported the failure of an earlier kernel."""
        described = ", ".join(_describe(a) for a in args)
        this = f"kernel {self.parts[step].name} ({self.path}) for ({described})"
        if code not in _WHILE_RUNNING:
            return f"{this} could not be launched: {error_text(code)}"
        if os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":
            return f"{this} failed: {error_text(code)}"
        return (
            f"{this} could not be launched, because it or a kernel that ran before failed: {error_text(code)}; the "
            "process has to be started again; with CUDA_LAUNCH_BLOCKING=1 the kernel that fails is named"
        )


_CELLS: dict[str, Any] = {
    "pointer": ctypes.c_void_p,
    "int32": ctypes.c_int32,
    "int64": ctypes.c_int64,
    "float64": ctypes.c_double,
    "null": ctypes.c_void_p,
}


def _describe(a: Any) -> str:
    if not isinstance(a, torch.Tensor):
        return repr(a)
    return f"{str(a.dtype).removeprefix('torch.')}{list(a.shape)} strides {list(a.stride())} on {a.device}"


def capability(device: int) -> int:
    """Major and minor compute capability of a device as one number, such as 90."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
