"""Threads for background work. If no thread can be started, the caller does the work itself."""

from __future__ import annotations

import concurrent.futures
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from fuser import forks
from fuser.runtime import process

A = TypeVar("A")
R = TypeVar("R")


class NoThread(RuntimeError):
    """No thread can be started, and the caller's thread cannot do the work."""


def start(function: Callable[[], Any], name: str, daemon: bool = True) -> threading.Thread | None:
    """A started thread that runs `function`; None if there can be none. A daemon does not delay the process's end."""
    thread = threading.Thread(target=function, name=name, daemon=daemon)
    try:
        thread.start()
    except RuntimeError:  # a limit on threads or memory
        return None
    return thread


def later(seconds: float, function: Callable[[], Any]) -> threading.Timer | None:
    """A started timer that calls `function`; None if there can be none."""
    timer = threading.Timer(seconds, function)
    timer.daemon = True
    try:
        timer.start()
    except RuntimeError:
        return None
    return timer


def run_all(function: Callable[[A], R], items: Iterable[A], most: int | None = None) -> list[R]:
    """The results of `function` for each item, `most` at a time. Raises the exception of the first that fails."""
    todo = deque(enumerate(items))
    count = len(todo)
    done: dict[int, R] = {}
    failed: dict[int, Exception] = {}

    def work() -> None:
        while todo:
            try:
                at, item = todo.popleft()
            except IndexError:  # another thread was faster
                return
            try:
                done[at] = function(item)
            except Exception as e:
                failed[at] = e

    threads = [start(work, "fuser-worker") for _ in range(min(most or count, count) - 1)]
    try:
        work()
    except BaseException:
        todo.clear()
        raise
    for thread in threads:
        if thread is not None:
            thread.join()
    if failed:
        raise failed[min(failed)]
    return [done[at] for at in range(count)]


class Pool:
    """At most `size()` threads that run calls in the order of submission. A process that ends drops calls not started.

    `lost` is the result, in a forked child, of a call that was not done at the fork.
    """

    def __init__(self, size: Callable[[], int], name: str, lost: Any = None) -> None:
        self._size, self._name = size, name
        self._lost = lost
        self._lock = forks.lock()
        forks.follow(self)
        self._threads: ThreadPoolExecutor | None = None
        self._promised: weakref.WeakSet[Future[Any]] = weakref.WeakSet()
        self._under_way: set[Future[Any]] = set()

    def submit(self, function: Callable[..., R], *args: Any) -> Future[R]:
        """A future of `function(*args)`; it is computed at once in this thread if no other can be started."""
        promise: Future[R] = Future()
        once = deque([(function, args)])
        promise.add_done_callback(self._under_way.discard)
        with self._lock:
            self._promised.add(promise)
            self._under_way.add(promise)
            if self._threads is None:
                self._threads = ThreadPoolExecutor(self._size(), thread_name_prefix=self._name)
                process.at_end(self, self._drop)
            threads = self._threads
        try:
            threads.submit(_run_once, once, promise)
        except RuntimeError:  # no thread can be started; a running one may still take the call
            _run_once(once, promise)
        return promise

    @property
    def busy(self) -> int:
        """The number of calls that have not ended."""
        return sum(not f.done() for f in list(self._under_way))

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all calls have ended, for `timeout` seconds at most. Returns whether they have."""
        end = None if timeout is None else time.monotonic() + timeout
        while left := [f for f in list(self._under_way) if not f.done()]:
            seconds = None if end is None else max(end - time.monotonic(), 0.0)
            if concurrent.futures.wait(left, seconds).not_done:
                return False
        return True

    def _drop(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
        for promise in list(self._promised):
            promise.cancel()

    def after_fork(self) -> None:
        """Reset the pool in a child, which has none of its parent's threads."""
        self._threads = None
        for promise in list(self._promised):
            promise._condition = threading.Condition()
            if not promise.done():
                promise.set_result(self._lost)
        self._under_way.clear()


def _run_once(once: deque[tuple[Callable[..., R], tuple[Any, ...]]], promise: Future[R]) -> None:
    """Run the call left in `once`, if any. When the promise is done, nothing here references the arguments."""
    try:
        function, args = once.popleft()
    except IndexError:
        return
    if not promise.set_running_or_notify_cancel():
        return
    try:
        result = function(*args)
    except BaseException as e:
        del function, args
        traceback.clear_frames(e.__traceback__)
        promise.set_exception(e)
    else:
        del function, args
        promise.set_result(result)
