"""Kernels in profilers' traces, for the Python launchers: an event for each step. See also native/events.h."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd import profiler as torch_profiler

from fuser import config
from fuser.runtime import torch_abi

settings: Any = config  # its attributes are made from a table


@functools.cache
def _observed() -> Any:
    """torch's function that says whether this thread's operators are observed; None if torch has none."""
    address = torch_abi.symbol("libtorch_cpu.so", "_ZN2at12hasCallbacksEv")
    return None if address is None else ctypes.CFUNCTYPE(ctypes.c_bool)(address)


def is_watched() -> bool:
    """Whether a profiler observes this thread, or ranges are enabled by the setting."""
    asked = _observed()
    return bool(settings.ranges) or (torch_profiler._is_profiler_enabled if asked is None else bool(asked()))


def event(name: str, watched: bool) -> AbstractContextManager[Any]:
    """An event around the block, and a range if the setting enables ranges; no event unless it is `watched`."""
    return _event(name) if watched else contextlib.nullcontext()


@contextlib.contextmanager
def _event(name: str) -> Any:
    pair = range_functions(settings.ranges)
    if pair is not None:
        pair[0](name)
    try:
        with torch._C._profiler._RecordFunctionFast(name):
            yield
    finally:
        if pair is not None:
            pair[1]()


def range_functions(kind: str) -> tuple[Any, Any] | None:
    """torch's functions that open and close a range of `kind`, "nvtx" or "itt"; None if it has none."""
    if kind == "nvtx" and torch.version.cuda:  # other builds raise at the first range
        from torch.cuda import nvtx

        return nvtx.range_push, nvtx.range_pop
    if kind == "itt" and torch.profiler.itt.is_available():  # type: ignore[no-untyped-call]
        return torch.profiler.itt.range_push, torch.profiler.itt.range_pop
    return None


__all__ = ["event", "is_watched", "range_functions"]
