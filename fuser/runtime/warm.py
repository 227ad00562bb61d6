"""Large outputs in warm memory: torch storages that are reused once nothing else references them.

From 32 MiB on malloc maps every block anew; smaller blocks are new, too, if the heap has returned free memory at its
end: results of 16 MiB took 20 ms instead of 1.2 ms in every other call. Writing a page for the first time costs more
than the arithmetic on it. A result must stay an ordinary tensor, whose storage can be resized, saved and shared. So
this module keeps a second reference to the storages of large results: if a later result needs the same number of bytes
and the reference is the only one left, the storage is used again, with warm pages. At most `config.output_limit_bytes`
are held in all, and nothing after `config.pool_idle_seconds` without a call, or twice the longest recent pause. A
training step holds none (`frontends.training`) except those of large products, up to `config.product_limit_bytes`.
"""

from __future__ import annotations

import ctypes
import struct
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from fuser import config, forks
from fuser.runtime import workers

WARM_MIN = 4 << 20  # bytes; smaller blocks stay warm in malloc's own heap
MAPPED = 32 << 20  # bytes; malloc maps blocks from here on anew each time
_STEADY = 4  # a pause shorter than this many `pool_idle_seconds` may be a loop's step
settings: Any = config


class _Held:
    """A held storage, a tensor on it, and its state when only this record referenced it."""

    __slots__ = ("address", "base", "names", "nbytes", "storage", "tensors", "words")

    def __init__(self, storage: torch.UntypedStorage, dtype: torch.dtype) -> None:
        self.storage = storage
        self.nbytes, self.address = storage.nbytes(), storage.data_ptr()
        self.names = 0
        self.rebase(dtype)

    def rebase(self, dtype: torch.dtype) -> None:
        """Hold the storage by a tensor of this dtype and inference mode: the launcher makes results like it."""
        self.base = torch.empty(0, dtype=dtype, device="cpu")
        self.base.set_(self.storage, 0, (self.nbytes // dtype.itemsize,), (1,))
        self.tensors = _tensors(self.storage)

    def note(self, names: int) -> None:
        """Store the number of references to `storage` that belong to this record and its caller."""
        self.names = names
        words = self.nbytes, self.base.is_inference(), self.address, self.storage._cdata, self.tensors, names
        self.words = struct.pack("2q2Q2q", *words)  # HeldWords of native/warm.h

    def is_like(self, dtype: torch.dtype) -> bool:
        """Whether `base` has this dtype, and is an inference tensor if results are now."""
        return self.base.dtype is dtype and self.base.is_inference() == torch.is_inference_mode_enabled()

    def is_free(self) -> bool:
        """Whether only this record can reach the memory."""
        return self.tensors == _tensors(self.storage) and self.names == sys.getrefcount(self.storage)

    def is_intact(self) -> bool:
        """Whether the memory is unchanged and private: not resized, not shared with a process, not lazily cloned."""
        s = self.storage
        same = s.nbytes() == self.nbytes and s.data_ptr() == self.address
        lazy = torch._C._is_cow_tensor(self.base)  # type: ignore[attr-defined]
        return same and not lazy and not s.is_shared()


def _tensors(storage: torch.UntypedStorage) -> int:
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count


def _tensor_in(held: _Held, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(0, dtype=dtype, device="cpu")
    out.set_(held.storage, 0, tuple(size), tuple(stride))
    return out


class _Clock(ctypes.Structure):
    """Times and counts of calls, shared with the launcher: `warm.clock` of native/warm.h."""

    _fields_ = tuple((name, ctypes.c_double) for name in ("last", "between", "hits", "watched"))


class WarmOutputs:
    """The held storages. Thread-safe.

    The native launcher takes results from `outputs` by itself (native/warm.h), under the same lock, while a timer runs
    and a storage of the same size and dtype is free. All other cases are handled here.
    """

    def __init__(self) -> None:
        self._lock = forks.lock()
        self._held: list[_Held] = []  # least recently used first; shared with the launcher
        self.clock = _Clock()
        self.after_fork()
        forks.follow(self)

    def for_launcher(self) -> dict[str, Any]:
        """The objects that native/warm.h uses."""
        clock = ctypes.addressof(self.clock)
        return {
            "warm_held": self._held, "warm_acquire": self._lock.acquire, "warm_release": self._lock.release,
            "warm_clock": clock,
        }  # fmt: skip

    def after_fork(self) -> None:
        """Drop all storages in a child: those that another thread used would never be released."""
        self._held.clear()
        self._timer: threading.Timer | None = None
        self.clock.last = self.clock.between = self.clock.hits = self.clock.watched = 0.0
        self.misses = 0

    def empty_strided(
        self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, limit: int | None = None
    ) -> torch.Tensor:
        """An uninitialised CPU tensor of `size` and `stride` elements, in warm memory if there is some.

        `limit`: the most bytes held, in place of `config.output_limit_bytes`. If no results are held, memory left by a
        large product is used: a gradient of logits needs as much as the logits, and would exist beside it.
        """
        nbytes = dtype.itemsize * (1 + sum([(n - 1) * s for n, s in zip(size, stride, strict=True)]))
        if nbytes < WARM_MIN:
            return torch.empty_strided(size, stride, dtype=dtype, device="cpu")
        limit = int(settings.output_limit_bytes) if limit is None else limit
        if limit == 0 and nbytes >= MAPPED:
            found = self.held_already(size, stride, dtype, nbytes)
            if found is not None:
                return found
        if min(size, default=1) < 1 or nbytes > limit:
            return torch.empty_strided(size, stride, dtype=dtype, device="cpu")
        with self._lock:
            held = self._take(nbytes) or self._make(nbytes, dtype, limit)
            if not held.is_like(dtype):
                held.rebase(dtype)
                held.note(sys.getrefcount(held.storage))
            clock, now = self.clock, time.monotonic()
            pause, clock.last = now - clock.last, now
            steady = pause < _STEADY * settings.pool_idle_seconds
            clock.between = max(pause if steady else 0.0, 0.9 * clock.between)
            self._watch()
            return _tensor_in(held, size, stride, dtype)

    def held_already(
        self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, nbytes: int
    ) -> torch.Tensor | None:
        """An uninitialised tensor in held, free memory of exactly `nbytes`; None if there is none."""
        if not self._held:
            return None
        with self._lock:
            held = self._take(nbytes)
            return None if held is None else _tensor_in(held, size, stride, dtype)

    def _take(self, nbytes: int) -> _Held | None:
        for held in reversed(self._held):
            if held.nbytes == nbytes and held.is_free():
                self._held.remove(held)
                if held.is_intact():
                    self.clock.hits += 1
                    self._held.append(held)
                    return held
        return None

    def _make(self, nbytes: int, dtype: torch.dtype, limit: int) -> _Held:
        """A new storage; the least recently used ones are dropped to stay within the limit."""
        self.misses += 1
        total = nbytes + sum(h.nbytes for h in self._held)
        while total > limit:
            total -= self._held.pop(0).nbytes
        held = _Held(torch.empty(nbytes, dtype=torch.uint8, device="cpu").untyped_storage(), dtype)
        held.note(sys.getrefcount(held.storage))
        self._held.append(held)
        return held

    def _watch(self) -> None:
        self.clock.watched = 1.0
        if self._timer is None:
            self._timer = workers.later(max(float(settings.pool_idle_seconds), 0.05), self._on_timer)

    def _on_timer(self) -> None:
        with self._lock:
            self._timer, self.clock.watched = None, 0.0
            idle = time.monotonic() - self.clock.last
            if idle >= max(float(settings.pool_idle_seconds), 2 * self.clock.between):
                self._held.clear()
            elif self._held:
                self._watch()

    def trim(self) -> int:
        """Drop every storage now. Returns the number of bytes that were held."""
        with self._lock:
            total = sum(h.nbytes for h in self._held)
            self._held.clear()
        return total

    def stats(self) -> dict[str, int]:
        """Bytes and number of held storages, and how often one was reused or allocated."""
        with self._lock:
            held = list(self._held)
        total = sum(h.nbytes for h in held)
        return {"held_bytes": total, "held": len(held), "hits": int(self.clock.hits), "misses": self.misses}


def scratch(nbytes: int) -> torch.Tensor | None:
    """Memory of torch's for the temporaries of one kernel; None if the buffer pool is to provide it.

    If no results are kept warm, memory is scarce: a block of the pool would stay idle beside all that a training step
    holds. Blocks below 32 MiB come from malloc's heap, which stays warm, too.
    """
    if settings.output_limit_bytes or nbytes >= MAPPED:
        return None
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


outputs = WarmOutputs()
empty_strided = outputs.empty_strided
