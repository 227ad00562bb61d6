"""Kernels on trial: verified against the fallback, and timed beside ATen.

With `config.verify = n` the first n calls of each kernel also run the fallback. Once n of its results were as good as
the fallback's, the kernel moves to the fusion's handle, and costs no more than any other. If one is not, the
fallback's result is returned, the kernel is never used again, and a reproducer is written.

With `config.slowest = r` a CPU kernel is timed in the first call of each magnitude (a factor of 4 in the largest
tensor's elements), from `LEAST` elements on: below, the call itself costs more than its work. Results count as well as
inputs, which may be small beside them. From `MOST` on, ATen's temporaries might not fit into memory beside the
program's. If the kernel certainly takes more than r times as long as
ATen (`contest`), calls of this form (dtypes, sizes, strides) go to ATen, with a reason, and the next form of that
magnitude is timed; otherwise all later calls of the magnitude run the kernel. A kernel of a single operator gains
nothing by fusion: it has to take less than `ALONE` of ATen's time, or else eager's own function of the operator runs
(`fallback.direct`).

The decision is made before the first result of a form is returned and never changes in a process, and that result is
the winner's: the same inputs give the same bits in every call. If the kernel was certainly faster, that is kept on
disk beside the outcomes of contests; close or lost trials are repeated by other processes. Under
`torch.use_deterministic_algorithms` nothing is timed, because the bits must not depend on a clock.

A kernel that writes inputs is timed on copies of these, and is not verified. The call itself then runs once.
"""

from __future__ import annotations

import pathlib
import threading
import weakref
from collections.abc import Callable
from dataclasses import field
from typing import Any, cast

import torch

from fuser import forks, logs, notices, plans
from fuser.contests import records
from fuser.contests import trial as contest
from fuser.kernel_cache import KernelSpec
from fuser.kernel_spec import ALIGNMENT, OUT_OF_BOUNDS
from fuser.kernel_store import FusedKernel
from fuser.lazy_dataclasses import dataclass
from fuser.reasons import because
from fuser.runtime import growth, heap, launcher
from fuser.runtime.bounds import bounds_error
from fuser.runtime.handles import ALL_MAGNITUDES, magnitude_of
from fuser.verify import difference

MISS = object()
PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
LEAST, MOST = 4096, 1 << 25  # elements of the largest tensor: timed from the first to below the second
ALONE = 0.97  # most of ATen's time for a kernel of a single operator
_SMALL = (1 << LEAST.bit_length()) - 1  # magnitudes of inputs
_UNTIMED = ALL_MAGNITUDES & ~((1 << MOST.bit_length()) - 1) | _SMALL


def form_of(args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """A key of calls without numbers' values and memory's alignment; None if a tensor is not a plain one."""
    form: list[Any] = []
    for a in args:
        if type(a) in PLAIN_TENSORS and a.layout is torch.strided and not (a.is_nested or a.dtype.is_complex):
            form.append((a.shape, a.stride(), a.dtype, a.device))
        elif isinstance(a, torch.Tensor):
            return None
        else:
            form.append(type(a))
    return tuple(form)


@dataclass(eq=False)
class _Trial:
    kernel: FusedKernel
    handle: Any
    left: int  # calls to verify
    slowest: float  # 0: not timed
    number: int | None = None  # in the fusion's handle, once it is there
    magnitudes: int = 0  # those in which the kernel stays
    refused: dict[Any, str] = field(default_factory=dict)  # forms for which it is too slow, with the reason
    timing: threading.Lock = field(default_factory=forks.lock)  # one thread decides, others wait


class Trials:
    """The kernels of one specification that are on trial.

    `admit` adds a kernel for calls of some magnitudes to the fusion's handle and returns its number, or widens one
    that has a number. `leave` sends calls of the form of some arguments to the fallback, with a reason, or to an
    equivalent function; it returns whether it can.
    """

    def __init__(
        self,
        spec: KernelSpec,
        admit: Callable[[FusedKernel, int, int | None], int],
        leave: Callable[[tuple[Any, ...], str, Callable[..., Any] | None], bool],
    ) -> None:
        self._spec, self._admit, self._leave = spec, admit, leave
        self._written = spec.graph.written
        self._trials: list[_Trial] = []
        self._lock = forks.lock()  # of the list, and of what changes in its trials

    def add(self, kernel: FusedKernel, calls: int, slowest: float = 0.0) -> None:
        """Put `kernel` on trial: the next `calls` calls are verified; with `slowest`, each magnitude's first is
        timed."""
        me = weakref.ref(self)  # a call holds it

        def slow(args: tuple[Any, ...], status: int) -> Any:
            return cast(Trials, me())._slow(args, status)

        handle = launcher.make_handle(slow)
        handle.add_kernel(kernel.program, kernel.library)
        trial = _Trial(kernel, handle, calls, slowest)
        with self._lock:
            self._trials = [*self._trials, trial]
        untimed = _UNTIMED & ~_SMALL if growth.may_outgrow(kernel.program) else _UNTIMED
        self._settle(trial, untimed if slowest else ALL_MAGNITUDES)

    def _end(self, trial: _Trial) -> None:
        with self._lock:
            self._trials = [t for t in self._trials if t is not trial]

    def _slow(self, args: tuple[Any, ...], status: int) -> Any:
        if status == OUT_OF_BOUNDS:
            raise bounds_error((t.kernel.library, t.kernel.program) for t in self._trials)
        return self._spec.fallback(*args) if status else MISS

    def run(self, args: tuple[Any, ...]) -> Any:
        """The result of a call that a kernel on trial accepts, from the kernel or the fallback; else `MISS`."""
        for trial in self._trials:
            got = trial.handle(*self._spared(args))
            if got is MISS:
                continue
            reason = self._why_slow(trial, args, _largest(got))
            if reason is not None:
                self._spec.store.note_fallback(reason)
                return self._spec.fallback(*args)
            if self._written:
                return trial.handle(*args)
            return self._judge(trial, args, got) if trial.left else got
        return MISS

    def _spared(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Arguments for a call that may be repeated: those that the graph writes are copied."""
        return tuple(_copied(a) if i in self._written else a for i, a in enumerate(args)) if self._written else args

    def _settle(self, trial: _Trial, magnitudes: int) -> None:
        """Let the kernel stay in these magnitudes: their calls go to it directly once it is verified."""
        with self._lock:
            trial.magnitudes |= magnitudes
            if trial.left or all(t is not trial for t in self._trials):  # another thread may have rejected it
                return
            trial.number = self._admit(trial.kernel, trial.magnitudes, trial.number)
            if trial.magnitudes == ALL_MAGNITUDES:
                self._trials = [t for t in self._trials if t is not trial]

    def _why_slow(self, trial: _Trial, args: tuple[Any, ...], elements: int) -> str | None:
        """None if the kernel stays for calls like this one, else why the fallback runs; decided once for each form.

        `elements`: of the largest result.
        """
        b = magnitude_of(args)
        form = form_of(args)
        with trial.timing:
            if trial.magnitudes >> b & 1:
                return None
            if form in trial.refused:
                return trial.refused[form]
            if _SMALL >> b & 1 and elements < LEAST or elements >= MOST:
                self._settle(trial, 3 << (b & ~1) if elements < LEAST else 0)
                return None
            name = self._name(trial, args) if form is not None else None
            if name is not None and records.find(name, records.cpu_folder()) is not None:
                self._settle(trial, 3 << (b & ~1))
                return None
            direct = self._direct(args)
            reason = self._time(trial, args, direct, name)
            if reason is not None and form is not None and self._leave(args, reason, direct):
                trial.refused[form] = reason
                return reason
            self._settle(trial, 3 << (b & ~1))
        return None

    def _name(self, trial: _Trial, args: tuple[Any, ...]) -> str | None:
        """The name of the record that the kernel was certainly faster for arguments like these on this machine.

        None if nothing is kept.
        """
        key = plans.key_of(self._spec, args, None)
        library = pathlib.PurePath(str(trial.kernel.library)).name  # named after the sources that it was made from
        limit = self._limit(trial)
        return None if key is None else records.name_of("trial", key, library, limit, records.machine())

    def _limit(self, trial: _Trial) -> float:
        return min(trial.slowest, ALONE) if self._spec.fallback.is_single else trial.slowest

    def _time(
        self, trial: _Trial, args: tuple[Any, ...], direct: Callable[..., Any] | None, name: str | None
    ) -> str | None:  # fmt: skip
        """Why the kernel is too slow for these arguments; None if it is not, or the trial is undecided.

        `direct` is a faster equivalent of the fallback. If the kernel is certainly faster, that is kept under `name`.
        """
        if torch.are_deterministic_algorithms_enabled():
            return None
        if not launcher.wait(0):  # the Python launcher, which may run at first, takes longer than many kernels
            return None
        heap.keep_warm()  # else ATen writes into new pages in each call
        try:
            limit = self._limit(trial)
            rival = direct or self._spec.fallback
            found = contest.compete(trial.handle, rival, self._spared(args), limit, contest.clock)
        except Exception:  # eager lacks the operator for a dtype: the kernel's result stands, without comparison
            return None
        sizes = ", ".join(str(tuple(a.shape)) for a in args if isinstance(a, torch.Tensor))
        took = f"{found.ratio:.2f} times as long as ATen for sizes {sizes}"
        took += f"; a single operator has to take less than {limit}" if limit < 1 else ""
        winner = "aten" if found.slower else "kernel"
        what = f"kernel {trial.kernel.name}"
        logs.say("fuser_perf", lambda: f"{what} took {took}: {winner} stays")
        choice = records.Choice(winner, f"on trial: it took {took}", (), what)
        if found.faster and name is not None:
            records.keep(name, choice, records.cpu_folder())
        else:
            records.remember(f"{what} {took}", choice)
        return because("slower", f"{what} took {took}") if found.slower else None

    def _direct(self, args: tuple[Any, ...]) -> Callable[..., Any] | None:
        """An equivalent of the fallback with less overhead between Python and the operator; None if there is none."""
        function = self._spec.fallback.direct
        if function is None:
            return None
        mine, theirs = self._spared(args), self._spared(args)
        try:
            found, known = function(*mine), self._spec.fallback(*theirs)
        except Exception:
            return None
        same = _is_equal((found, *(mine[i] for i in self._written)), (known, *(theirs[i] for i in self._written)))
        return function if same else None

    def _judge(self, trial: _Trial, args: tuple[Any, ...], got: Any) -> Any:
        want = self._spec.fallback(*args)
        problem = difference(got, want, args, lambda: self._spec.fallback(*map(_wide, args)))
        with self._lock:
            ends = problem is None and trial.left == 1
            trial.left = max(trial.left - 1, 0)  # threads that began together may be more than are left
            known = trial in self._trials
        if problem is not None and known:
            self._end(trial)
            self._condemn(trial.kernel, args, problem)
        elif ends:
            self._settle(trial, 0)
        return want if problem is not None else got

    def _condemn(self, kernel: FusedKernel, args: tuple[Any, ...], problem: str) -> None:
        from fuser.reproduce import write_reproducer  # few processes need it

        reason = because("verify", f"kernel {kernel.name} failed verification: {problem}")
        self._spec.store.disable(kernel, reason)
        try:
            path = write_reproducer(self._spec, args, reason)
            hint = f"{path} reproduces it"
        except (OSError, RuntimeError, TypeError) as e:
            hint = f"no reproducer could be written ({type(e).__name__}: {e})"
        notices.warn(f"{reason}; the fusion goes on by ATen; {hint}")


def _largest(results: Any) -> int:
    """The element count of the largest result."""
    listed = results if isinstance(results, (tuple, list)) else (results,)
    return max((r.numel() for r in listed if isinstance(r, torch.Tensor)), default=0)


def _is_equal(a: Any, b: Any) -> bool:
    """Whether results are equal bit for bit, including dtypes and strides."""
    if isinstance(a, (tuple, list)):
        return type(a) is type(b) and len(a) == len(b) and all(map(_is_equal, a, b))
    if not isinstance(a, torch.Tensor):
        return type(a) is type(b) and bool(a == b)
    alike = isinstance(b, torch.Tensor) and a.dtype is b.dtype and a.shape == b.shape and a.stride() == b.stride()
    return alike and torch.equal(*map(_bytes_of, (a, b)))


def _copied(x: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor with its strides, and its distance from a multiple of `ALIGNMENT` bytes."""
    places = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride())) if x.numel() else 0
    start = x.data_ptr() % ALIGNMENT // x.element_size()
    return x.new_empty(start + places).as_strided(x.shape, x.stride(), start).copy_(x)


def _bytes_of(x: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor's elements as bytes. (`x.contiguous()` keeps any stride of a single element.)"""
    return x.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def _wide(a: Any) -> Any:
    return a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a


__all__ = ["MISS", "PLAIN_TENSORS", "Trials", "form_of"]
