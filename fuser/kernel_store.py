"""The kernels of one specification: each is compiled once, however many threads request it at the same time.

A failure is remembered with its reason and not tried again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any, Protocol

from fuser import config, forks, logs, progress
from fuser.errors import CompileError, FuserError, is_defect, is_refusal
from fuser.kernel_spec import ArgSpec, LaunchProgram
from fuser.lazy_dataclasses import dataclass
from fuser.logs import LOG
from fuser.reasons import because, code_of
from fuser.runtime.counting import COUNTS
from fuser.runtime.memory import Tally
from fuser.runtime.spans import timed

if TYPE_CHECKING:
    from fuser.splitting import Split

class FusedKernel(Protocol):
    """The result of a device's compiler: the launch program, the library, and the source for people."""

    @property
    def program(self) -> LaunchProgram: ...
    @property
    def library(self) -> Any: ...
    @property
    def source(self) -> str: ...
    @property
    def name(self) -> str: ...


@dataclass
class KernelEntry:
    """The store's record of one `ArgSpec`. `reason` says why there is no kernel, or no further one.

    `example` describes the arguments of its first compilation: (dtype, device type, size, stride), or a number.
    """

    spec: ArgSpec
    kernels: list[FusedKernel] = field(default_factory=list)
    reason: str | None = None
    compiling: bool = False
    seconds: float = 0.0
    example: tuple[Any, ...] = ()
    stages: dict[str, float] = field(default_factory=dict)  # seconds of compilation by stage, in the caller's thread

    @property
    def state(self) -> str:
        """ "compiling", "ready" or "failed"."""
        if self.compiling:
            return "compiling"
        return "ready" if self.kernels else "failed"


class Counted:
    """A counter that threads share."""

    def __init__(self) -> None:
        self._lock, self.value = forks.lock(), 0

    def add_one(self) -> None:
        """Count one more."""
        with self._lock:
            self.value += 1


class KernelStore:
    """The kernels of one specification, by `ArgSpec`."""

    def __init__(self) -> None:
        self._lock = forks.lock()
        self._changed = forks.condition(self._lock)
        forks.follow(self)
        self._entries: dict[ArgSpec, KernelEntry] = {}
        self._fallbacks = Tally()
        self._splits: list[Split] = []
        self.compiled = Counted()
        self.label: Callable[[], str] = lambda: "a group"  # for people
        self.native_fallbacks: Callable[[], Sequence[tuple[str, int]]] = tuple  # those counted only by a handle

    def get_or_compile(
        self, arg_spec: ArgSpec, compile_kernel: Callable[[], FusedKernel], have: int
    ) -> tuple[KernelEntry, bool]:
        """The entry of `arg_spec` with more than `have` kernels, or with a reason; True if this call compiled.

        While one thread compiles, others that request the same wait. The text of an exception from `compile_kernel`
        becomes the reason; exceptions that are no `Exception` (an interrupt) propagate and are not remembered.
        """
        with self._lock:
            entry = self._entries.setdefault(arg_spec, KernelEntry(arg_spec))
            while entry.compiling:
                self._changed.wait()
            if entry.reason is not None or len(entry.kernels) > have:
                return entry, False
            entry.compiling = True
        kernel, reason, began = None, None, time.perf_counter()
        stages: dict[str, float] = {}
        try:
            with timed(stages), progress.working(self.label):
                kernel = compile_kernel()
        except Exception as e:
            reason = reason_of(e)
            COUNTS.add("failed")
            if config.strict and is_defect(e):
                raise
        finally:
            seconds = time.perf_counter() - began
            COUNTS.add("seconds", seconds)
            with self._lock:
                entry.compiling = False
                entry.seconds += seconds
                for name, taken in stages.items():
                    entry.stages[name] = entry.stages.get(name, 0.0) + taken
                entry.reason = reason
                if kernel is not None:
                    entry.kernels.append(kernel)
                    self.compiled.add_one()
                self._changed.notify_all()
        self._log(kernel, reason, seconds, stages)
        return entry, kernel is not None

    def _log(self, kernel: FusedKernel | None, reason: str | None, seconds: float, stages: dict[str, float]) -> None:
        if kernel is None:
            LOG.debug("no kernel for %s: %s", self.label(), reason)
            logs.say("fuser_why", lambda: f"{self.label()} [{code_of(str(reason))}]: {reason}")
            return
        LOG.debug("kernel %s of %s in %.3f s", kernel.name, self.label(), seconds)
        by_stage = ", ".join(f"{name} {taken:.3f}" for name, taken in stages.items())
        logs.say("fuser_perf", lambda: f"kernel {kernel.name} of {self.label()}: {seconds:.3f} s ({by_stage})")
        logs.say("fuser_code", lambda: f"kernel {kernel.name} of {self.label()}: {kernel.library}\n{kernel.source}")
        logs.trace(f"fuser_kernel_{kernel.name}", lambda: str(kernel.source))

    def after_fork(self) -> None:
        """Reset the entries in a child, which compiles for itself: its parent's threads do not go on there."""
        for entry in self._entries.values():
            entry.compiling = False

    def count(self, arg_spec: ArgSpec) -> int:
        """The number of kernels of `arg_spec`."""
        with self._lock:
            entry = self._entries.get(arg_spec)
            return len(entry.kernels) if entry is not None else 0

    def reason(self, arg_spec: ArgSpec) -> str | None:
        """The reason why there is no kernel for `arg_spec`, or no further one; None if no reason is known."""
        with self._lock:
            entry = self._entries.get(arg_spec)
            return entry.reason if entry is not None else None

    def close(self, arg_spec: ArgSpec, reason: str) -> None:
        """Compile nothing more for `arg_spec`."""
        with self._lock:
            entry = self._entries.setdefault(arg_spec, KernelEntry(arg_spec))
            entry.reason = entry.reason or reason

    def disable(self, kernel: FusedKernel, reason: str) -> None:
        """Remove a kernel; no further one is compiled for its `ArgSpec`."""
        with self._lock:
            for entry in self._entries.values():
                if any(k is kernel for k in entry.kernels):
                    entry.kernels = [k for k in entry.kernels if k is not kernel]
                    entry.reason = reason

    def note_fallback(self, reason: str) -> None:
        """Count one call that ran on ATen, whole or in part."""
        with self._lock:
            first = reason not in self._fallbacks
            self._fallbacks.note(reason)
        if first:
            logs.say("fuser_why", lambda: f"calls of {self.label()} run on ATen [{code_of(reason)}]: {reason}")

    def note_split(self, split: Split) -> None:
        """Record how the group was split for some arguments."""
        with self._lock:
            self._splits.append(split)

    @property
    def splits(self) -> tuple[Split, ...]:
        """The splits of the group for arguments that no kernel accepts, in the order of arrival."""
        with self._lock:
            return tuple(self._splits)

    @property
    def entries(self) -> tuple[KernelEntry, ...]:
        """The entry of each `ArgSpec` seen, in the order of arrival."""
        with self._lock:
            return tuple(self._entries.values())

    @property
    def fallbacks(self) -> dict[str, int]:
        """Calls that ran on ATen, whole or in part, by reason. Calls that a kernel answered are not counted."""
        with self._lock:
            found = Counter(self._fallbacks)
        for reason, calls in self.native_fallbacks():
            found[reason] += calls
        return dict(found)

    @property
    def kernels(self) -> tuple[FusedKernel, ...]:
        """All kernels, in the order of their `ArgSpec`s' arrival."""
        with self._lock:
            return tuple(k for e in self._entries.values() for k in e.kernels)

    @property
    def compile_seconds(self) -> float:
        """Wall time of compilations, including failed ones, in seconds."""
        with self._lock:
            return sum(e.seconds for e in self._entries.values())


def reason_of(error: Exception) -> str:
    """The reason why there is no kernel, from the error of its compilation."""
    if isinstance(error, FuserError):
        said: str | None = getattr(error, "reason", None)
        if said is None and is_defect(error):
            return because("defect", f"a defect of fuser, {error}")
        return said or because("compiler" if isinstance(error, CompileError) else "arguments", str(error))
    if is_refusal(error):
        what = getattr(error, "strerror", None) or "no memory"
        return because("compiler", f"the system refuses what it takes to make a kernel: {what}")
    return because("defect", f"a defect of fuser, {type(error).__name__}: {error}")


__all__ = ["Counted", "FusedKernel", "KernelEntry", "KernelStore", "reason_of"]
