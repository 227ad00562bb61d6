"""glibc's heap, kept from giving memory back between one operator and the next.

What ATen's operators allocate below 32 MiB comes from malloc's heap. By default that returns free memory at its end to
the system whenever it is more than twice the largest block that was ever mapped and freed, and 128 KiB at first: in a
model each large result is written into pages that are new, at a microsecond or so for each. Measured on one core, Llama
of 6 layers: 419 ms a call, 375 ms with warm pages. The limit moves by itself when a larger block is freed, to 64 MiB at
most; mapping and freeing one block that is never touched moves it there at once.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

_ENOUGH = 16 << 20  # bytes freed, after which free pages are looked for
_freed = 0
_BLOCK = (32 << 20) - (64 << 10)  # bytes: just below what glibc ignores (DEFAULT_MMAP_THRESHOLD_MAX)


@functools.cache
def keep_warm() -> None:
    """Let malloc keep up to 64 MiB of free memory. Once in a process; without effect on other allocators."""
    torch.UntypedStorage(_BLOCK)  # type: ignore[no-untyped-call]  # unlike a tensor seen by no mode, never filled


@functools.cache
def _trim() -> Any:
    """glibc's `malloc_trim`; another allocator has none."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


def give_back(n: int) -> None:
    """Count `n` bytes that were freed for good, and return free pages to the system for every 16 MiB of them.

    Blocks that live on at the heap's end otherwise keep all below them.
    """
    global _freed
    _freed += n
    if _freed >= _ENOUGH and _trim() is not None:
        _freed = 0
        _trim()(0)
