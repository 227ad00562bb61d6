"""A process that answers requests, several at a time, each a line of JSON. It ends with this process, or when idle."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from fuser import forks
from fuser.runtime import process, workers


class Gone(Exception):
    """The process ended or took too long before it answered, or none can be started."""


class _Running:
    """One process, and its unanswered requests."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        try:
            self.process = subprocess.Popen(
                [*command, str(os.getpid())], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL, start_new_session=True, env=os.environ | environment,
            )  # fmt: skip
        except (OSError, ValueError) as e:
            raise Gone(str(e)) from None
        self.lock = forks.lock()
        self.asked: dict[int, Future[dict[str, Any]]] = {}
        self.has_answered = self.has_ended = False
        if workers.start(self._listen, "fuser-peer") is None:
            self.stop()
            raise Gone("no thread can be started")

    def ask(self, request: dict[str, Any]) -> Future[dict[str, Any]]:
        """A future with the answer."""
        future: Future[dict[str, Any]] = Future()
        with self.lock:
            if self.has_ended:
                raise Gone("it ended")
            number = len(self.asked) and max(self.asked) + 1
            self.asked[number] = future
            data = json.dumps({**request, "number": number}).encode() + b"\n"
            try:
                assert self.process.stdin is not None
                self.process.stdin.write(data)
                self.process.stdin.flush()
            except (OSError, ValueError) as e:
                del self.asked[number]
                raise Gone(str(e)) from None
        return future

    def _listen(self) -> None:
        assert self.process.stdout is not None
        with contextlib.suppress(OSError, ValueError, KeyError):
            for line in self.process.stdout:
                answer = json.loads(line)
                with self.lock:
                    future = self.asked.pop(answer.pop("number"))
                self.has_answered = True
                future.set_result(answer)
        with self.lock:
            self.has_ended = True
            left = list(self.asked.values())
            self.asked.clear()
        for future in left:
            future.set_exception(Gone("it ended"))
        self.stop()

    def kill(self) -> None:
        """Kill the process and its group, without waiting."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self.process.returncode is None:
                os.killpg(self.process.pid, signal.SIGKILL)

    def stop(self) -> None:
        """Kill the process and its group, and wait for its end."""
        self.kill()
        with contextlib.suppress(OSError):
            self.process.wait()

    def let_go(self) -> None:
        """Leave the process to the parent, in a forked child."""
        self.process.returncode = 0  # it is not a child of this process
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                os.close(pipe.fileno()) if pipe is not None else None


class Peer:
    """The process that runs `command` with its parent's number. It is started at the first request."""

    def __init__(self, command: Sequence[str], **environment: str) -> None:
        self._command, self._environment = tuple(command), environment
        self._lock = forks.lock()
        self._running: _Running | None = None
        self._why_none: str | None = None  # why this process can have none
        forks.follow(self)

    def ask(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        """The answer to a request. Gone if there is none within `timeout` seconds."""
        for again in (True, False):
            running = self._started()
            try:
                return running.ask(request).result(timeout)
            except TimeoutError:
                self._give_up(running, f"no answer within {timeout:g} s")
            except Gone as e:
                if not running.has_answered:
                    self._give_up(running, str(e))
                elif not again:
                    raise  # the first one may have ended because it was idle
        raise Gone(self._why_none)

    def _started(self) -> _Running:
        with self._lock:
            if self._why_none is not None or process.is_ending():
                raise Gone(self._why_none or "this process ends")
            if self._running is None or self._running.has_ended:
                try:
                    self._running = _Running(self._command, self._environment)
                except Gone as e:
                    self._why_none = str(e)
                    raise
                process.at_end(self, self._running.kill)
            return self._running

    def _give_up(self, running: _Running, why: str) -> None:
        self._why_none = why
        running.stop()

    def after_fork(self) -> None:
        """Let a forked child start its own process."""
        if self._running is not None:
            self._running.let_go()
        self._running = None


def python(module: str) -> list[str] | None:
    """The command that runs `module.main()` with this process's modules; None if this is not a plain Python."""
    if not os.path.basename(sys.executable or "").startswith("python") or getattr(sys, "frozen", False):
        return None
    path = json.dumps([p for p in sys.path if isinstance(p, str)])
    code = f"import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {module} import main; main(int(sys.argv[2]))"
    return [sys.executable, "-c", code, path]


# -- the other side ----------------------------------------------------------------------------------------------------
def watch(parent: int, seconds: float) -> None:
    """End this process and its group once `parent` has ended, even if others hold its pipes open."""
    while os.getppid() == parent:
        time.sleep(seconds)
    os.killpg(0, signal.SIGKILL)


__all__ = ["Gone", "Peer", "python", "watch"]
