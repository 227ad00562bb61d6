"""Times on one GPU: of the device by CUDA events, with the second-level cache flushed before each call, or of the wall.

Without a GPU: small sizes on the CPU, to see that everything runs.
"""

from __future__ import annotations

import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.contestants import fuser_backend  # torch.compile's name for it, or the function of a checkout

BF16 = torch.bfloat16
DRY = not torch.cuda.is_available()  # small and on the CPU: does everything run?
DEVICE = "cpu" if DRY else "cuda"
FLUSH_BYTES = 1 << 20 if DRY else 4 << 30  # a millisecond: Python comes with the next call meanwhile, a backward too
Lines = Iterator[dict[str, Any]]


def device_time(fn: Callable[..., Any], before: Callable[[], Any] | None = None, n: int = 9) -> float:
    """Median device seconds of `fn(before())`; `before` is not timed."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=DEVICE)
    out = []
    for _ in range(n + 2):
        args = (before(),) if before is not None else ()
        flush.zero_()
        out.append(_event_time(lambda args=args: fn(*args)) if not DRY else first_call(lambda args=args: fn(*args)))
        del args
    return statistics.median(out[2:])


def _event_time(fn: Callable[[], Any]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    fn()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000


def wait() -> None:
    """For the device."""
    if not DRY:
        torch.cuda.synchronize()


def wall_time(fn: Callable[[], Any], n: int = 15, inner: int = 1) -> float:
    """Median seconds of a call, the device waited for."""
    out = []
    for _ in range(n + 2):
        wait()
        began = time.perf_counter()
        for _ in range(inner):
            fn()
        wait()
        out.append((time.perf_counter() - began) / inner)
    return statistics.median(out[2:])


def copy_time(moved: int) -> float:
    """Device seconds of a copy that moves `moved` bytes in all."""
    a = torch.empty(moved // 2, dtype=torch.uint8, device=DEVICE)
    b = torch.empty_like(a)
    return device_time(lambda: b.copy_(a))


def first_call(fn: Callable[[], Any]) -> float:
    """Wall seconds of one call."""
    wait()
    began = time.perf_counter()
    fn()
    wait()
    return time.perf_counter() - began


def compiled(name: str, fn: Any, mode: str | None = None) -> Any:
    """`fn` by a contestant: "eager", "aot_eager", "inductor" or "fuser"."""
    if name == "eager":
        return fn
    torch._dynamo.reset()
    options = {"mode": mode} if mode else {}
    backend = fuser_backend() if name == "fuser" else name
    if name == "fuser" and mode and not isinstance(backend, str):
        function, backend = backend, lambda gm, inputs: function(gm, inputs, mode=mode)
        options = {}
    return torch.compile(fn, backend=backend, dynamic=False, **options)


def attempt(label: str, fn: Callable[[], Lines]) -> Lines:
    """What `fn` yields; one line instead of an exception."""
    try:
        yield from fn()
    except Exception as e:
        said = (str(e).strip().splitlines() or [""])[0]
        yield {"row": label, "failed": f"{type(e).__name__}: {said[:300]}"}
        traceback.print_exc(limit=-4, file=sys.stderr)
    if not DRY:
        torch.cuda.empty_cache()


def n(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Seeded by the section's start."""
    return torch.randn([min(d, 40) for d in shape] if DRY else shape, device=DEVICE, dtype=dtype)
