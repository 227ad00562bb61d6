"""Kernels on trial: with `config.verify = n` the first n calls of each kernel run beside the fallback.

A kernel on trial has a handle of its own. Once n of its results were as good as the fallback's it moves to the
fusion's handle, and costs no more than any other. If one is not, the fallback's result is kept, the kernel is never
used again, and a reproducer is written.

With `config.slowest = r` a kernel is timed in its first call, if that is over `LEAST` to `MOST` elements: below, calls
cost more than what they compute; above, memory decides, and no kernel reads it twice. Where it takes more than r times
the fallback's time, calls of this form (dtypes, sizes, strides) go to the fallback, with a reason, and others do not.
Under `torch.use_deterministic_algorithms` nothing is timed: a result's last bits would hang on a clock.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fuser import config
from fuser.kernel_cache import FusedKernel, KernelSpec
from fuser.reproduce import write_reproducer
from fuser.runtime import launcher

MISS = object()
# How far a kernel may be from eager, relative and absolute, where nothing better is known: a few roundings.
TOLERANCE = {
    torch.float64: (1e-10, 1e-12),
    torch.float32: (1e-4, 1e-5),
    torch.float16: (4e-3, 1e-3),
    torch.bfloat16: (3e-2, 1e-2),
}


LEAST, MOST = 4096, 1 << 19
_ROUNDS, _ROUND_SECONDS = 9, 2e-4
_CLEARLY = 0.9  # a kernel that takes less than this of the fallback's time, twice, is timed no longer
_SECONDS = 0.02  # nor is any after this long


@dataclass(eq=False)
class _Trial:
    kernel: FusedKernel
    handle: Any
    left: int
    slowest: float


class Trials:
    """The kernels of one specification on trial.

    `promote` takes one that passed; `leave` leaves calls of the form of some arguments to the fallback, for a reason.
    """

    def __init__(
        self, spec: KernelSpec, promote: Callable[[FusedKernel], None], leave: Callable[[tuple[Any, ...], str], None]
    ) -> None:
        self._spec, self._promote, self._leave = spec, promote, leave
        self._trials: list[_Trial] = []
        self._lock = threading.Lock()  # of the list, and of what changes in its trials

    def add(self, kernel: FusedKernel, calls: int, slowest: float = 0.0) -> None:
        """Have the next `calls` calls of `kernel` verified; and the first one timed if `slowest` is not 0."""
        handle = launcher.make_handle(self._slow)
        handle.add_kernel(kernel.program, kernel.library)
        with self._lock:
            self._trials = [*self._trials, _Trial(kernel, handle, calls, slowest)]

    def _take(self, trial: _Trial) -> bool:
        """End a trial; whether it was not over, as it may be in another thread."""
        with self._lock:
            known = trial in self._trials
            self._trials = [t for t in self._trials if t is not trial]
        return known

    def _slow(self, args: tuple[Any, ...], status: int) -> Any:
        return self._spec.fallback(*args) if status else MISS

    def run(self, args: tuple[Any, ...]) -> Any:
        """The verified result of the kernel on trial that takes `args`; `MISS` if there is none."""
        for trial in self._trials:
            got = trial.handle(*args)
            if got is not MISS:
                self._time(trial, args)
                return self._judge(trial, args, got) if trial.left else self._settle(trial, got)
        return MISS

    def _settle(self, trial: _Trial, got: Any) -> Any:
        """End a trial with nothing left to verify."""
        if self._take(trial):
            self._promote(trial.kernel)
        return got

    def _time(self, trial: _Trial, args: tuple[Any, ...]) -> None:
        """Compare times once; if the kernel takes too much, such calls are left to the fallback."""
        with self._lock:
            limit, trial.slowest = trial.slowest, 0.0
        elements = max((a.numel() for a in args if isinstance(a, torch.Tensor)), default=0)
        if not limit or not LEAST <= elements <= MOST or torch.are_deterministic_algorithms_enabled():
            return
        if not launcher.wait(0):  # the launcher in Python, which it may begin with, takes longer than many kernels
            return
        try:
            found = time_ratio(trial.handle, self._spec.fallback, args)
        except Exception:  # an operator that eager has not for a dtype: there is a result, and nothing to compare with
            return
        if found > limit:
            sizes = ", ".join(str(tuple(a.shape)) for a in args if isinstance(a, torch.Tensor))
            self._leave(args, f"kernel {trial.kernel.name} took {found:.2f} times as long as ATen for sizes {sizes}")

    def _judge(self, trial: _Trial, args: tuple[Any, ...], got: Any) -> Any:
        want = self._spec.fallback(*args)
        problem = difference(got, want, args, lambda: self._spec.fallback(*map(_wide, args)))
        with self._lock:
            trial.left -= 1
            ends = problem is not None or trial.left == 0
        if ends and self._take(trial):
            if problem is None:
                self._promote(trial.kernel)
            else:
                self._condemn(trial.kernel, args, problem)
        return want if problem is not None else got

    def _condemn(self, kernel: FusedKernel, args: tuple[Any, ...], problem: str) -> None:
        reason = f"kernel {kernel.name} failed verification: {problem}"
        self._spec.store.disable(kernel, reason)
        folder = os.path.join(config.cache_dir or tempfile.gettempdir(), "reproducers")
        try:
            path = write_reproducer(self._spec, args, reason, folder)
            hint = f"{path} reproduces it"
        except (OSError, RuntimeError, TypeError) as e:
            hint = f"no reproducer could be written ({type(e).__name__}: {e})"
        warnings.warn(f"fuser: {reason}; the fusion goes on by ATen; {hint}", RuntimeWarning, stacklevel=2)


def time_ratio(kernel: Callable[..., Any], eager: Callable[..., Any], args: Sequence[Any]) -> float:
    """The kernel's time by eager's: the median of rounds in which either is called for 0.2 ms or more, at most 9."""
    ratios: list[float] = []
    end = time.perf_counter() + _SECONDS
    while len(ratios) < _ROUNDS:
        took = seconds_a_call(kernel, args, _ROUND_SECONDS)
        ratios.append(took / seconds_a_call(eager, args, _ROUND_SECONDS))
        if time.perf_counter() > end or len(ratios) >= 2 and max(ratios) < _CLEARLY:
            break
    return statistics.median(ratios)


def seconds_a_call(function: Callable[..., Any], args: Sequence[Any], least: float) -> float:
    """Seconds that a call takes, over as many as take `least` seconds; on a GPU the device is waited for."""
    on_gpu = any(isinstance(a, torch.Tensor) and a.is_cuda for a in args)
    done: Callable[[], Any] = torch.cuda.synchronize if on_gpu else lambda: None
    calls = 0
    done()
    start = time.perf_counter()
    while True:
        for _ in range(max(1, calls)):
            function(*args)
        done()
        calls += max(1, calls)
        spent = time.perf_counter() - start
        if spent >= least:
            return spent / calls


def _wide(a: Any) -> Any:
    return a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a


def difference(got: Any, want: Any, args: Sequence[Any], exact: Callable[[], Any]) -> str | None:
    """None if `got` is as good a result as `want`, else what is wrong with it. `exact()` computes it in float64.

    dtypes, sizes, strides and everything that is no float must be equal. Floats must be near `want`, or as near as it
    to the exact result.
    """
    mine, theirs = _as_tuple(got), _as_tuple(want)
    if len(mine) != len(theirs):
        return f"{len(mine)} results instead of {len(theirs)}"
    low = _least_precise((*args, *theirs))
    wide: tuple[Any, ...] | None = None
    for n, (a, b) in enumerate(zip(mine, theirs)):
        problem = _form(a, b)
        if problem is None and not _is_near(a, b, low):
            wide = _try(exact) if wide is None else wide
            if len(wide) != len(mine) or not _is_no_worse(a, b, wide[n]):
                problem = _values(a, b)
        if problem is not None:
            return f"result {n} has {problem}"
    return None


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else tuple(value) if isinstance(value, list) else (value,)


def _try(exact: Callable[[], Any]) -> tuple[Any, ...]:
    try:
        return _as_tuple(exact())
    except Exception:  # an operator that does not take float64: `want` is all there is to compare with
        return ()


def _least_precise(values: Sequence[Any]) -> torch.dtype | None:
    present = {v.dtype for v in values if isinstance(v, torch.Tensor)}
    return next((d for d in (torch.bfloat16, torch.float16, torch.float32, torch.float64) if d in present), None)


def _form(a: torch.Tensor, b: torch.Tensor) -> str | None:
    if a.dtype is not b.dtype or a.shape != b.shape:
        return f"{a.dtype}{tuple(a.shape)} instead of {b.dtype}{tuple(b.shape)}"
    if b.numel() and any(x != y and n != 1 for x, y, n in zip(a.stride(), b.stride(), b.shape)):
        return f"strides {a.stride()} instead of {b.stride()}"
    return None


def _is_near(a: torch.Tensor, b: torch.Tensor, low: torch.dtype | None) -> bool:
    if not b.is_floating_point():
        return torch.equal(a, b)
    relative, absolute = TOLERANCE[low or b.dtype]
    return torch.allclose(a.double(), b.double(), relative, absolute, equal_nan=True)


def _is_no_worse(a: torch.Tensor, b: torch.Tensor, exact: Any) -> bool:
    """Whether `a` is not much further from the exact result than `b` is."""
    if not b.is_floating_point() or not isinstance(exact, torch.Tensor) or exact.shape != b.shape:
        return False
    x, y, e = a.double(), b.double(), exact.double()
    if not torch.equal(x.isfinite(), y.isfinite()):
        return False
    finite = x.isfinite() & y.isfinite() & e.isfinite()
    mine, theirs = (x - e).abs()[finite], (y - e).abs()[finite]
    return not mine.numel() or float(mine.max()) <= 2 * float(theirs.max())


def _values(a: torch.Tensor, b: torch.Tensor) -> str:
    x, y = a.double().flatten(), b.double().flatten()
    wrong = ~((x == y) | (x.isnan() & y.isnan()))
    gap = torch.where(wrong, (x - y).abs().nan_to_num(torch.inf, torch.inf), 0.0)
    at = int(gap.argmax())
    return f"{int(wrong.sum())} of {x.numel()} elements off, at {at} {x[at].item()!r} instead of {y[at].item()!r}"


__all__ = ["MISS", "Trials", "difference"]
