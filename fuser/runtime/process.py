"""Running programs with a time limit, each in a process group of its own that ends when this process does.

A shell between this process and the program holds the read end of a pipe whose write end only this process has. When
this process ends, however that happens, the pipe closes and the shell kills the group.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 - registers its exit function first, so that runs after this module's
import contextlib
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar

from fuser import forks, notices
from fuser.errors import CompileError
from fuser.lazy_dataclasses import dataclass

_SHELL = "/bin/sh"
_GUARD = (
    'exec 3<&0 </dev/null; { read _ <&3; kill -9 0; } >/dev/null 2>&1 & guard=$!; "$@" 3<&-; code=$?; '
    "kill -9 $guard; wait $guard 2>/dev/null; exit $code"
)
_NOT_RUN = (126, 127)  # the shell's exit codes for a program that it cannot run
_GLANCE = 0.05  # seconds between two polls of a program whose output is held open by one of its children
_MOST_PARTS = 1 << 10  # reads of output that are kept
HUNG_IN_A_ROW, HUNG_IN_ALL = 2, 4  # stopped runs of one program, after which it is not run again
# The folder for temporary files of programs run by this thread; None: that of TMPDIR.
TEMPORARY: ContextVar[str | None] = ContextVar("TEMPORARY", default=None)
_lifelines: set[int] = set()  # write ends of the pipes of all running programs


# -- the end of this process -------------------------------------------------------------------------------------------
_ending = False
_at_end: dict[object, Callable[[], None]] = {}


def is_ending() -> bool:
    """Whether this process is ending and has stopped the programs that its threads waited for."""
    return _ending


def at_end(key: object, function: Callable[[], None] | None) -> None:
    """Have `function` called when this process ends, before its threads are joined; None removes it."""
    if function is None:
        _at_end.pop(key, None)
    else:
        _at_end[key] = function


def _end() -> None:
    global _ending
    _ending = True
    notices.mute(True)
    for function in list(_at_end.values()):
        function()


# `atexit` runs only after all threads have ended, and these may wait for a compiler that hangs. The order of imports
# decides: the function registered last runs first, and threads of `concurrent.futures` are joined like others.
getattr(threading, "_register_atexit", atexit.register)(_end)


@forks.in_child
def _after_fork() -> None:
    global _ending
    _ending = False
    notices.mute(False)
    for lifeline in list(_lifelines):
        _cut(lifeline)  # else the program would outlive the parent while this child lives
    _at_end.clear()


# -- programs that hang ------------------------------------------------------------------------------------------------
@dataclass
class _Hung:
    """Runs of a program that were stopped: in all, and since its last normal end; time and limit of the last."""

    in_all: int = 0
    in_a_row: int = 0
    last: float = 0.0
    limit: float = 0.0


_hung: dict[str, _Hung] = {}


def why_not(program: str, timeout: float) -> str | None:
    """None if `program` may run for `timeout` seconds; else the sentence that it was stopped too often before."""
    known = _hung.get(program)
    if known is None or timeout > known.limit or known.in_a_row < HUNG_IN_A_ROW and known.in_all < HUNG_IN_ALL:
        return None
    return _sentence(program, known.limit)


def times_hung(program: str) -> int:
    """The number of times that `program` was stopped here."""
    known = _hung.get(program)
    return known.in_all if known is not None else 0


def has_hung() -> bool:
    """Whether any program was stopped here; this is remembered until the process ends."""
    return any(known.in_all for known in _hung.values())


def _sentence(program: str, limit: float) -> str:
    return (
        f"{program} ran longer than {limit:g} s and was stopped; "
        "try it by hand, or give it longer with FUSER_COMPILE_TIMEOUT_SECONDS"
    )


def _note(program: str, began: float, limit: float, stopped: bool) -> None:
    """Count a run. Runs that were in progress when one was stopped count as part of it."""
    known = _hung.setdefault(program, _Hung())
    if not stopped:
        known.in_a_row = 0
    elif began >= known.last:
        known.in_all, known.in_a_row, known.last = known.in_all + 1, known.in_a_row + 1, time.monotonic()
        known.limit = max(known.limit, limit)


# -- running -----------------------------------------------------------------------------------------------------------
@dataclass(eq=False)
class _Running:
    process: subprocess.Popen[bytes]
    lifeline: int

    def has_ended(self) -> bool:
        """Whether the program has ended. Until it is reaped, its number and that of its group stay taken."""
        try:
            return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # another thread reaped it
            return True

    def kill(self) -> None:
        """Kill the program and everything in its group."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)


@contextlib.contextmanager
def temporaries_in(folder: str) -> Iterator[None]:
    """Programs that this thread runs in the block put temporary files into `folder`, so that none remain elsewhere."""
    before = TEMPORARY.set(folder)
    try:
        yield
    finally:
        TEMPORARY.reset(before)


def are_running() -> bool:
    """Whether programs that this process started are running."""
    return bool(_lifelines)


def run(command: Sequence[str], timeout: float) -> tuple[int, str]:
    """Exit code and output of `command`. CompileError if it cannot run, or is stopped after `timeout` seconds.

    A program that was stopped often is not run again: each run would take the whole limit.
    """
    why = why_not(command[0], timeout)
    if why is None and _ending and threading.current_thread() is not threading.main_thread():
        why = f"{command[0]} is not run, since this process ends"
    if why is not None:
        raise CompileError(why)
    began = time.monotonic()
    running = _start(command)
    at_end(running, running.kill)
    try:
        output = _output(running, began + timeout)
    finally:
        at_end(running, None)
        running.kill()  # its leftovers, and the program itself if it was stopped or this call is interrupted
        _cut(running.lifeline)
        running.process.wait()
    _note(command[0], began, timeout, output is None)
    if output is None:
        raise CompileError(_sentence(command[0], timeout))
    text = output.decode(errors="replace")
    if running.process.returncode in _NOT_RUN:
        raise CompileError(f"{command[0]} cannot be run: {text.strip() or 'no reason is given'}", text)
    return running.process.returncode, text


def _start(command: Sequence[str]) -> _Running:
    guarded = [_SHELL, "-c", _GUARD, "sh", *command] if os.access(_SHELL, os.X_OK) else command
    end = None
    try:
        end, lifeline = os.pipe()
        _lifelines.add(lifeline)  # before the program starts: this process may fork in between
        try:
            place = TEMPORARY.get()
            process = subprocess.Popen(
                guarded, stdin=end, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, "TMPDIR": place} if place is not None else None,
            )  # fmt: skip
        except OSError:
            _cut(lifeline)
            raise
    except OSError as e:
        raise CompileError(f"{command[0]} cannot be run: {e}") from None
    finally:
        if end is not None:
            os.close(end)
    return _Running(process, lifeline)


def _cut(lifeline: int) -> None:
    """Close a pipe's write end, once."""
    if lifeline in _lifelines:
        _lifelines.discard(lifeline)
        os.close(lifeline)


def _output(running: _Running, deadline: float) -> bytes | None:
    """The output of a program once it has ended; None if it has not by the deadline.

    The end of the program counts, not that of its output: one of its children may hold that open.
    """
    assert running.process.stdout is not None
    parts: list[bytes] = []
    with running.process.stdout as pipe:
        ready = select.poll()
        ready.register(pipe, select.POLLIN)
        pause, is_open = _GLANCE / 64, True
        while True:
            left = deadline - time.monotonic()
            if is_open and left > 0 and ready.poll(1000 * min(_GLANCE, left)):
                data = os.read(pipe.fileno(), 1 << 16)
                is_open = bool(data)
                if len(parts) < _MOST_PARTS:
                    parts.append(data)
            elif running.has_ended():
                return b"".join(parts)
            elif left <= 0:
                return None
            elif not is_open:
                time.sleep(pause)
                pause = min(2 * pause, _GLANCE)
