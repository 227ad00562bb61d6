"""Runs a script for a report: its compiled graphs are kept alive, and some steps are timed; it is not changed.

A step begins with a call of an object from `torch.compile`, and ends where the next call of the same object begins.
The first such object that is called a second time defines the steps; a compilation during a step restarts the steps.
"""

from __future__ import annotations

import contextlib
import functools
import runpy
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

import torch

from fuser import interface
from fuser.debug.explanation import Explanation
from fuser.debug.gathering import explanation_of, graph_breaks, recompilations
from fuser.debug.page_data import Times
from fuser.debug.profile_report import ProfileReport
from fuser.debug.profiling import example_of, finished, profile
from fuser.errors import FuserError
from fuser.executor import may_repeat
from fuser.frontends.records import CompiledGraph, collected
from fuser.kernel_cache import REGISTRY
from fuser.lazy_dataclasses import dataclass
from fuser.runtime import spans

_REPLAY_SECONDS, _REPLAYS = 3.0, 5


class _Held(list[CompiledGraph]):
    """Records of graphs, with handles that keep their groups registered."""

    def __init__(self) -> None:
        super().__init__()
        self.handles: list[Any] = []

    def append(self, record: CompiledGraph) -> None:
        super().append(record)
        self.handles += [interface.fusion_handle(key) for key in record.keys]


@dataclass
class Steps:
    """Times `wanted` steps of a script, after one that is not counted."""

    wanted: int
    records: Sequence[CompiledGraph]
    thread: int = field(default_factory=threading.get_ident)
    calls: Counter[int] = field(default_factory=Counter)
    open: profile | None = None
    done: ProfileReport | None = None
    maker: int | None = None
    compiled: int = 0
    made: int = 0

    def begin(self, number: int) -> None:
        """Note that a call of object `number` begins."""
        if not self.wanted or self.done is not None or threading.get_ident() != self.thread:
            return
        self.calls[number] += 1
        if self.open is None:
            if self.calls[number] >= 2 and self.maker in (None, number) and not _is_recorded():
                self.maker = number
                self._start()
        elif not self.open.running:  # it gave way to a profile of the script's own
            self.wanted, self.open = 0, None
        elif number == self.maker:
            if len(self.records) != self.compiled:
                self.open.stop()
                self._start()
                return
            self.open.step()
            self.made += 1
            if self.made == self.wanted:
                self.end()

    def _start(self) -> None:
        self.compiled, self.made = len(self.records), 0
        self.open = profile(gives_way=True)
        self.open.__enter__()

    def end(self) -> None:
        """End the steps; a running step counts if it is the only one, and nothing was compiled in it."""
        if self.open is None:
            return
        found, self.open = self.open, None
        if found.running and not self.made and len(self.records) == self.compiled:
            found.step()
            self.made = 1
        if found.running and self.made:
            found.__exit__(None)
            self.done = found.report()
        found.stop()


def _is_recorded() -> bool:
    return bool(torch.autograd.profiler._is_profiler_enabled)


@contextlib.contextmanager
def _watched_compile(steps: Steps) -> Iterator[None]:
    """Let `torch.compile` return objects that report each call to `steps`."""
    plain: Any = torch.compile
    count = iter(range(1 << 62))

    def watched(made: Any) -> Any:
        number = next(count)
        inner = made.forward if isinstance(made, torch.nn.Module) else made

        @functools.wraps(inner)
        def call(*args: Any, **kwargs: Any) -> Any:
            steps.begin(number)
            return inner(*args, **kwargs)

        if not isinstance(made, torch.nn.Module):
            return call
        made.forward = call
        return made

    @functools.wraps(plain)
    def compile(model: Any = None, *args: Any, **kwargs: Any) -> Any:
        made = plain(model, *args, **kwargs)
        return watched(made) if model is not None else lambda function: watched(made(function))

    torch.compile = compile
    try:
        yield
    finally:
        torch.compile = plain


@dataclass(frozen=True)
class Watched:
    """The result of a script's run: the explanation of all that it compiled, times, its exception or exit."""

    explanation: Explanation
    times: Times
    error: BaseException | None


def run_script(script: Path, arguments: Sequence[str], steps: int = 5) -> Watched:
    """Run `script` as `__main__` with `arguments`; explain and time what it compiles by `torch.compile`.

    At most `steps` steps are timed. If the script has no steps, kernels are called by themselves. A profile of the
    script's own (`fuser.profile()`) takes precedence over both.
    """
    records = _Held()
    watch = Steps(steps, records)
    own, error = list(finished), None
    clock = time.perf_counter(), time.time()
    with collected(records), spans.collected() as stages, _watched_compile(watch), _as_main(script, arguments):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except BaseException as e:
            error = e
        watch.end()
        interface.wait()
    others = [r for r in REGISTRY.registrations() if r.key not in {k for g in records for k in g.keys} | _pieces()]
    explanation = explanation_of(records, graph_breaks(), recompilations(), others)
    last = finished[-1] if finished and finished != own else None
    found, replayed = last or watch.done, False
    if found is None or not found.kernels:
        found, replayed = _replay(explanation), True
    note = "" if error is None or _is_exit(error) else f"The script ended with {type(error).__name__}: {error}"
    times = Times(found, replayed, tuple(stages), _frames(*clock), clock[0], note)
    return Watched(explanation, times, error)


def _pieces() -> set[int]:
    return {k for r in REGISTRY.registrations() for made in r.spec.store.splits for k in made.keys}


def _is_exit(error: BaseException) -> bool:
    return isinstance(error, SystemExit) and error.code in (None, 0)


@contextlib.contextmanager
def _as_main(script: Path, arguments: Sequence[str]) -> Iterator[None]:
    """Set `sys.argv` and `sys.path` as `python script arguments` does."""
    argv, path = list(sys.argv), list(sys.path)
    sys.argv[:] = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        yield
    finally:
        sys.argv[:], sys.path[:] = argv, path


def _frames(clock: float, wall: float) -> tuple[tuple[str, float, float], ...]:
    """Dynamo's compilations since the wall clock time `wall`: name, begin on the other clock, seconds."""
    read: Callable[[], Any] | None = getattr(sys.modules.get("torch._dynamo.utils"), "get_compilation_metrics", None)
    found = []
    for m in read() if read is not None else ():
        begin, seconds = getattr(m, "start_time_us", None), getattr(m, "duration_us", None)
        if begin and seconds and begin / 1e6 >= wall and getattr(m, "co_name", None):
            found.append((f"{m.compile_id} {m.co_name}", clock + begin / 1e6 - wall, seconds / 1e6))
    return tuple(found)


# -- kernels by themselves ---------------------------------------------------------------------------------------------
def _replay(explanation: Explanation) -> ProfileReport | None:
    """Call the groups that may be repeated on arguments like those of their first call, for some seconds at most."""
    calls = [c for c in map(_call_of, {g.key: g for g in explanation.groups if g.kernels}) if c is not None]
    if not calls or _is_recorded():
        return None
    end = time.monotonic() + _REPLAY_SECONDS
    for handle, given in calls:
        handle(*given)  # kernels that have not run recently are warm now
    with torch.no_grad(), profile() as found:
        for handle, given in calls:
            for _ in range(_REPLAYS):
                if time.monotonic() < end:
                    handle(*given)
    return found.report()


def _call_of(key: int) -> tuple[Any, list[Any]] | None:
    try:
        found = REGISTRY.find(key)
        entry = next((e for e in found.spec.store.entries if e.example and e.kernels), None)
        if entry is None or not may_repeat(found.spec):
            return None
        given = [example_of(a) for a in entry.example]
        found.runner.handle(*given)
        return found.runner.handle, given
    except (FuserError, RuntimeError):
        return None


__all__ = ["Steps", "Watched", "run_script"]
