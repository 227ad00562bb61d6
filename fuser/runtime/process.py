"""Running another program with a time limit, in a process group of its own, so that nothing of it stays behind."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence

from fuser.errors import CompileError

_ending = False


def is_ending() -> bool:
    """Whether this process is about to end, and stopped what it was waiting for."""
    return _ending


def run(command: Sequence[str], timeout: float) -> tuple[int, str]:
    """Exit code and output of `command`. CompileError if it cannot be run, or is stopped after `timeout` seconds."""
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
    except OSError as e:
        raise CompileError(f"{command[0]} cannot be run: {e}") from None
    owner = os.getpid()

    def kill() -> None:
        if os.getpid() == owner:  # not in a forked child
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the compiler's driver and the passes that it started

    def end() -> None:
        global _ending
        _ending = os.getpid() == owner
        kill()

    atexit.register(end)  # a process that ends before its compiler takes it along
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        kill()
        process.communicate()
        raise CompileError(f"{command[0]} ran longer than {timeout:g} s and was stopped") from None
    finally:
        atexit.unregister(end)
    return process.returncode, output.decode(errors="replace")
