"""The remote cache: entries of the local cache in a Redis server, read on a local miss, written after a compilation.

The server is not trusted. Entries are code, so each carries a MAC of its name and contents under a key that the
machines share; without a key nothing is read. No call waits longer than `config.remote_cache_seconds` for an answer,
and a server that fails is not asked for a while.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import pathlib
import time
from collections import deque
from typing import Any

from fuser import config, forks, notices
from fuser.runtime import files, process, workers
from fuser.runtime.counting import COUNTS
from fuser.runtime.redis_client import Client, Rubbish, Unusable
from fuser.runtime.spans import span

settings: Any = config  # its attributes are made from a table

LEAST_KEY = 16  # characters
MOST_BYTES = 16 << 20  # of an entry; larger ones stay local
_KEEP_SECONDS = 30 * 86400  # the server drops an entry that is not written again
_MAC = 32  # bytes
_FAILURES = 2  # in a row, before the server is not asked for a while
_PAUSE, _LONGEST_PAUSE = 5.0, 300.0  # seconds of such a pause, at first and at most
_IN_FLIGHT = 16  # requests whose threads may hang, for instance in name resolution
_WRITE_SECONDS = 2.0  # for one write, in the background
_END_SECONDS = 0.5  # a process's end waits this long for writes
_QUEUE = 256  # most entries waiting to be written


class _Breaker:
    """Whether a request is worth its time: after several failures none for a while, then one as a probe."""

    def __init__(self) -> None:
        self._lock = forks.lock()
        self._failures, self._pause, self._until = 0, _PAUSE, 0.0

    def allows(self) -> bool:
        with self._lock:
            if self._failures < _FAILURES:
                return True
            if time.monotonic() < self._until:
                return False
            self._until = time.monotonic() + self._pause  # others skip requests while one probes
            return True

    def succeeded(self) -> None:
        with self._lock:
            self._failures, self._pause = 0, _PAUSE

    def failed(self) -> None:
        with self._lock:
            self._failures += 1
            if self._failures >= _FAILURES:
                self._until = time.monotonic() + self._pause
                self._pause = min(2 * self._pause, _LONGEST_PAUSE)


class _Store:
    """A server and a key."""

    def __init__(self, url: str, key: str) -> None:
        self._key = key.encode()
        self._client = Client(url)
        self.where = self._client.where
        self._prefix = f"fuser:{hmac.digest(self._key, b'names', 'sha256')[:8].hex()}:"  # another key uses other names
        self._reads, self._writes = _Breaker(), _Breaker()
        self._lock = forks.lock()
        self._threads = 0
        self._todo: deque[tuple[str, bytes]] = deque()
        self._idle = forks.event()
        self._idle.set()
        forks.follow(self)

    def _mac(self, name: str, data: bytes) -> bytes:
        return hmac.digest(self._key, b"fuser 1\0" + name.encode() + b"\0" + data, "sha256")

    # Reading: a thread asks, since host name resolution has no time limit.

    def fetch(self, name: str) -> bytes | None:
        """The entry `name`; None if there is none made with this key, or no answer in time."""
        if not self._reads.allows():
            return None
        seconds = settings.remote_cache_seconds
        try:
            data = self.read(name, seconds)
        except _Busy:
            return None
        except Exception as e:  # any error of the package about the server's answer
            self._failed(self._reads, e, seconds)
            return None
        self._reads.succeeded()
        COUNTS.add("remote_hits" if data is not None else "remote_misses")
        return data

    def read(self, name: str, seconds: float) -> bytes | None:
        """The entry `name`. Raises the package's errors, and Rubbish for an entry that was not made with this key."""
        value = self._asked(name, seconds)
        if value is not None and not self._is_ours(name, value):
            raise Rubbish(f"the entry {name} was not made with this key")
        return value[_MAC:] if value is not None else None

    def _is_ours(self, name: str, value: bytes) -> bool:
        return len(value) >= _MAC and hmac.compare_digest(value[:_MAC], self._mac(name, value[_MAC:]))

    def _asked(self, name: str, seconds: float) -> bytes | None:
        deadline, done = time.monotonic() + seconds, forks.event()
        answers: list[Any] = []

        def ask() -> None:
            try:
                answers.append(self._client.get(self._prefix + name, deadline, MOST_BYTES + _MAC))
            except Exception as e:
                answers.append(e)
            finally:
                with self._lock:
                    self._threads -= 1
                done.set()

        with self._lock:
            if self._threads >= _IN_FLIGHT:
                raise _Busy
            self._threads += 1
        if workers.start(ask, "fuser-remote") is None:
            with self._lock:
                self._threads -= 1
            raise _Busy
        done.wait(seconds)
        answer = answers[0] if answers else TimeoutError("no answer")
        if isinstance(answer, Exception):
            raise answer
        found: bytes | None = answer
        return found

    # Writing: one thread, in the order of offers, while there are entries to write.

    def offer(self, name: str, data: bytes) -> None:
        """Queue an entry to be written."""
        with self._lock:
            if len(data) > MOST_BYTES or len(self._todo) >= _QUEUE:
                return
            self._todo.append((name, data))
            if not self._idle.is_set():  # a thread is writing
                return
            self._idle.clear()
        process.at_end(self, self._end)
        if workers.start(self._write_all, "fuser-remote-write") is None:
            with self._lock:
                self._todo.clear()
                self._idle.set()

    def _write_all(self) -> None:
        while True:
            with self._lock:
                if not self._todo:
                    self._idle.set()
                    return
                name, data = self._todo.popleft()
            if self._writes.allows():
                try:
                    self.write(name, data, _WRITE_SECONDS)
                except Exception as e:
                    self._failed(self._writes, e, _WRITE_SECONDS)
                else:
                    self._writes.succeeded()
                    COUNTS.add("remote_stored")

    def write(self, name: str, data: bytes, seconds: float) -> None:
        """Write an entry now. Raises the package's errors."""
        value = self._mac(name, data) + data
        self._client.set(self._prefix + name, value, time.monotonic() + seconds, _KEEP_SECONDS)

    def _stop(self, locked: bool = False) -> None:
        self._writing = False
        self._idle.set()

    def _end(self) -> None:
        self.finish(_END_SECONDS)

    def finish(self, seconds: float) -> bool:
        """Wait until all queued entries are written, for `seconds` at most. Returns whether they are."""
        return self._idle.wait(seconds)

    def after_fork(self) -> None:
        """Reset the store in a child: the parent's threads continue their work there."""
        self._client.after_fork()
        self._threads = 0
        self._todo.clear()
        self._idle.set()

    # Messages.

    def _failed(self, breaker: _Breaker, e: Exception, seconds: float) -> None:
        breaker.failed()
        COUNTS.add("remote_errors")
        kind, why = self.reason(e, seconds)
        notices.warn_once(
            f"the remote cache {self.where} is not used for a while: {why}; kernels come from the local cache or the "
            "compiler; unset FUSER_REMOTE_CACHE to go without",
            f"remote cache {self.where}: {kind}",
        )

    @staticmethod
    def reason(e: Exception, seconds: float) -> tuple[str, str]:
        """The kind of the failure `e`, and a sentence about it."""
        if isinstance(e, TimeoutError) or "Timeout" in type(e).__name__:
            return "time", f"it did not answer within {seconds:g} s"
        if isinstance(e, (Rubbish, RecursionError, ValueError)) or type(e).__name__ == "InvalidResponse":
            return "rubbish", str(e) or "its answer cannot be read"
        return type(e).__name__, (str(e).splitlines() or [type(e).__name__])[0]


class _Busy(Exception):
    """No request can be made now; this is no failure of the server."""


# -- the configured store
# ----------------------------------------------------------------------------------------------
@functools.lru_cache(maxsize=4)
def _made(url: str, key: str) -> _Store | Unusable:
    if len(key) < LEAST_KEY:
        what = "without a key" if not key else f"with a key of less than {LEAST_KEY} characters"
        why = f"code comes from there, and {what} anybody who can write there could run code here"
        return Unusable(why, f"set FUSER_REMOTE_CACHE_KEY to a secret of at least {LEAST_KEY} characters")
    try:
        return _Store(url, key)
    except Unusable as e:
        return e


def _configured() -> _Store | Unusable | None:
    return _made(settings.remote_cache, settings.remote_cache_key) if settings.remote_cache else None


def _store() -> _Store | None:
    """The configured store; None if there is none or it cannot be used, of which one warning says why."""
    found = _configured()
    if isinstance(found, Unusable):
        notices.warn_once(f"the remote cache is not used: {found.why}; {found.cure}", "remote cache")
        return None
    return found


def read(path: pathlib.Path) -> bytes | None:
    """The contents of an entry, from here or from the remote store, then stored here; None if there is none."""
    data = files.read(path)
    if data is not None:
        return data
    data = fetch(path)
    if data is not None:
        with contextlib.suppress(OSError):  # a read-only folder
            files.write(path, data)
    return data


def fetch(path: pathlib.Path) -> bytes | None:
    """The contents of the entry with that name from the remote store; None if there is none."""
    store = _store()
    if store is None:
        return None
    with span("remote", entry=path.name) as noted:
        data = store.fetch(path.name)
        noted.note(found=data is not None)
        return data


def offer(path: pathlib.Path, data: bytes) -> None:
    """Queue a new entry to be written to the remote store, in the background."""
    store = _store()
    if store is not None:
        store.offer(path.name, data)


def wait(seconds: float) -> bool:
    """Wait until all offered entries are written, for `seconds` at most. Returns whether they are."""
    store = _configured()
    return store.finish(seconds) if isinstance(store, _Store) else True


def examine() -> tuple[str, str]:
    """(the state of the remote store, its cure or ''), found by writing an entry and reading it."""
    found = _configured()
    if found is None:
        return "none (FUSER_REMOTE_CACHE is not set)", ""
    if isinstance(found, Unusable):
        return found.why, found.cure
    began, seconds = time.monotonic(), settings.remote_cache_seconds
    try:
        found.write("doctor", b"ok", seconds)
        answer = found.read("doctor", seconds)
    except Exception as e:
        return f"{found.where}: {found.reason(e, seconds)[1]}", "start the server, or correct FUSER_REMOTE_CACHE"
    took = (time.monotonic() - began) * 1e3
    if answer != b"ok":
        return f"{found.where} does not keep what is written", "see the server's log"
    return f"{found.where}, written and read in {took:.1f} ms", ""


__all__ = ["examine", "fetch", "offer", "read", "wait"]
