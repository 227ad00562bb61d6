"""The buffer pool in Python, through libc: it replaces the native pool until that is built or if it cannot be.

Blocks are anonymous memory, from 2 MiB on aligned to huge pages and advised to use them. Idle blocks are kept up to a
limit and for a time; the least recently used go first.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from fuser import config, forks
from fuser.lazy_dataclasses import dataclass
from fuser.runtime import workers

HUGE = 2 << 20
POOL_MIN = 256 << 10  # malloc serves smaller sizes
MADV_HUGEPAGE = 14


def size_class(n: int) -> int:
    """`n` rounded up to one of four classes per octave, so that slightly different sizes share blocks."""
    n = max(n, 4096)
    step = max((1 << (n.bit_length() - 1)) // 4, 4096)
    return -(-n // step) * step


@functools.cache
def _libc() -> Any:
    lib = ctypes.CDLL(None, use_errno=True)
    lib.mmap.restype = ctypes.c_void_p
    lib.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    lib.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    lib.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return lib


def _map(size: int) -> int:
    extra = HUGE if size >= HUGE else 0
    read_write, private_anonymous = 3, 0x22
    raw = _libc().mmap(None, size + extra, read_write, private_anonymous, -1, 0)
    if raw is None or raw == ctypes.c_void_p(-1).value:
        raise MemoryError(f"the buffer pool could not map {size} bytes")
    if not extra:
        return int(raw)
    data = (raw + HUGE - 1) // HUGE * HUGE
    if data > raw:
        _libc().munmap(raw, data - raw)
    if raw + extra > data:
        _libc().munmap(data + size, raw + extra - data)
    _libc().madvise(data, size, MADV_HUGEPAGE)
    return int(data)


@dataclass
class _Idle:
    size: int
    data: int
    since: float


class Pool:
    """Warm blocks. Thread-safe."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings  # read whenever the pool is used
        self._limit, self._idle_seconds = 0, 0.0
        self._reset()
        forks.follow(self)

    def _reset(self) -> None:
        self._lock = forks.rlock()  # a deleter may run inside another call of the same thread
        self._idle: list[_Idle] = []  # oldest first
        self._timer: threading.Timer | None = None
        self._used: dict[int, int] = {}
        self._counts = {"hits": 0, "misses": 0, "returned": 0, "peak_bytes": 0}

    def after_fork(self) -> None:
        """Reset the timer in a child: it has the blocks but no thread that returns them."""
        self._timer = None

    def _follow_settings(self) -> None:
        limits = max(int(self._settings["pool_limit_bytes"]), 0), float(self._settings["pool_idle_seconds"])
        if limits != (self._limit, self._idle_seconds):
            self._limit, self._idle_seconds = limits
            self._collect(float("-inf"), self._limit)
            self._schedule(anew=True)

    def take(self, nbytes: int) -> int:
        """The address of a block of at least `nbytes`: the smallest idle one that is large enough, else a new one."""
        size = size_class(nbytes)
        with self._lock:
            self._follow_settings()
            found = min((b for b in reversed(self._idle) if b.size >= size), key=lambda b: b.size, default=None)
            self._counts["hits" if found else "misses"] += 1
            if found is None and self._idle:  # the largest is freed: one block of the largest size then serves all
                self._unmap(max(self._idle, key=lambda b: b.size))
            elif found is not None:
                self._idle.remove(found)
            data, size = (found.data, found.size) if found else (_map(size), size)
            self._used[data] = size
            total = sum(self._used.values()) + self._idle_bytes()
            self._counts["peak_bytes"] = max(self._counts["peak_bytes"], total)
        return data

    def give(self, data: int) -> None:
        """Return a block to the pool."""
        with self._lock:
            self._idle.append(_Idle(self._used.pop(data), data, time.monotonic()))
            self._collect(float("-inf"), self._limit)
            self._schedule()

    def _idle_bytes(self) -> int:
        return sum(b.size for b in self._idle)

    def _collect(self, before: float, limit: int) -> int:
        bytes_back = 0
        while self._idle and (self._idle_bytes() > limit or self._idle[0].since < before):
            bytes_back += self._unmap(self._idle[0])
        return bytes_back

    def _unmap(self, b: _Idle) -> int:
        self._idle.remove(b)
        _libc().munmap(b.data, b.size)
        self._counts["returned"] += 1
        return b.size

    def _schedule(self, anew: bool = False) -> None:
        if self._timer is not None and (anew or not self._idle):
            self._timer.cancel()
            self._timer = None
        if self._timer is None and self._idle:
            wait = max(self._idle[0].since + self._idle_seconds - time.monotonic(), 0.0) + 0.001
            self._timer = workers.later(wait, self._expire)

    def _expire(self) -> None:
        with self._lock:
            self._timer = None
            self._collect(time.monotonic() - self._idle_seconds, self._limit)
            self._schedule()

    def trim(self) -> int:
        """Return every idle block to the system; the result is the number of bytes."""
        with self._lock:
            bytes_back = self._collect(float("inf"), 0)
            self._schedule()
            return bytes_back

    def stats(self) -> dict[str, int]:
        """Counters, as `fuser.runtime.pool.stats` describes them."""
        with self._lock:
            self._follow_settings()
            return {
                "idle_bytes": self._idle_bytes(), "idle_blocks": len(self._idle),
                "used_bytes": sum(self._used.values()), "used_blocks": len(self._used), **self._counts,
                "trimmer": self._timer is not None,
            }  # fmt: skip


pool = Pool(vars(config)["_values"])


@contextlib.contextmanager
def block(nbytes: int) -> Iterator[int]:
    """The 64-byte aligned address of `nbytes` in the block: from the pool if large; 0 if `nbytes` is 0."""
    if nbytes >= POOL_MIN:
        data = pool.take(nbytes)
        try:
            yield data
        finally:
            pool.give(data)
        return
    small = ctypes.create_string_buffer(nbytes + 64) if nbytes else None
    yield (ctypes.addressof(small) + 63) & ~63 if small is not None else 0


# -- tensors over blocks, through DLPack -------------------------------------------------------------------------------
class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("dtype", ctypes.c_uint32), ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p), ("byte_offset", ctypes.c_uint64),
    ]  # fmt: skip


_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _DLManaged(ctypes.Structure):
    _fields_ = [("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", _DELETER)]


_alive: dict[int, tuple[Any, ...]] = {}  # objects that a tensor's block needs until its deleter runs


def _delete(managed: int) -> None:
    _alive.pop(managed)[-1]()


_deleter = _DELETER(_delete)


@functools.cache
def _new_capsule() -> Callable[..., Any]:
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return new


def tensor(sizes: tuple[int, ...], strides: tuple[int, ...], dtype_word: int, nbytes: int) -> torch.Tensor:
    """A CPU tensor over a block of `nbytes`, which returns to the pool when the tensor's storage is freed."""
    data, n = pool.take(nbytes), len(sizes)
    dims = (ctypes.c_int64 * max(2 * n, 1))(*sizes, *strides)
    at = ctypes.addressof(dims)
    managed = _DLManaged(_DLTensor(data, 1, 0, n, dtype_word, at, at + 8 * n, 0), None, _deleter)
    _alive[ctypes.addressof(managed)] = (managed, dims, functools.partial(pool.give, data))
    capsule = _new_capsule()(ctypes.addressof(managed), b"dltensor", None)
    out: torch.Tensor = torch.utils.dlpack.from_dlpack(capsule)
    return out
