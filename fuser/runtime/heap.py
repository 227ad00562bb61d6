"""Keeping glibc's heap from returning memory to the system between operators.

Allocations of ATen's operators below 32 MiB come from malloc's heap. By default it returns free memory at its end to
the system if that exceeds twice the largest mapped block freed so far, at first 128 KiB: in a model, each large result
is written to new pages, at about a microsecond each. Measured on one core, Llama of 6 layers: 419 ms a call, 375 ms
with warm pages. The limit rises by itself, to 64 MiB at most, when a larger block is freed; mapping and freeing one
untouched block raises it at once.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

_ENOUGH = 16 << 20  # bytes freed, after which free pages are returned
_freed = 0
_BLOCK = (32 << 20) - (64 << 10)  # bytes: just below the size that glibc ignores (DEFAULT_MMAP_THRESHOLD_MAX)


@functools.cache
def keep_warm() -> None:
    """Let malloc keep up to 64 MiB of free memory. Runs once in a process; no effect on other allocators."""
    torch.UntypedStorage(_BLOCK)  # type: ignore[no-untyped-call]  # unlike a tensor: no mode sees it, nothing fills it


@functools.cache
def _trim() -> Any:
    """glibc's `malloc_trim`; None with another allocator."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


def give_back(n: int) -> None:
    """Count `n` bytes that were freed for good, and return free pages to the system for every 16 MiB of them.

    Without that, live blocks at the heap's end keep all free pages below them.
    """
    global _freed
    _freed += n
    if _freed >= _ENOUGH and _trim() is not None:
        _freed = 0
        _trim()(0)
