"""Handles: callables that find and launch kernels for their arguments. Native if possible, otherwise in Python.

The native launcher is `fuser.runtime._launcher` if it was built at installation; else it is built here into the cache
folder, once for each source, Python and compiler. Building takes half a second, in a thread started by `prepare` or by
the first handle; handles created before it ends run in Python and then switch over. Without a compiler they stay in
Python: `reason()` says why, and the first kernel causes one warning.
"""

from __future__ import annotations

import copyreg
import functools
import threading
import weakref
from collections import Counter
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fuser import config, forks, notices
from fuser.errors import BackendError, CompileError
from fuser.kernel_spec import LaunchProgram
from fuser.runtime import events, libraries, native_build, process, torch_abi, workers
from fuser.runtime.encode import encode
from fuser.runtime.handles import ALL_MAGNITUDES, Slow, reduced

if TYPE_CHECKING:
    from fuser.runtime.python_launcher import Handle as PythonHandle
    from fuser.runtime.python_launcher import Seen

settings: Any = config  # its attributes are made from a table

_lock = forks.lock()
_done = forks.event()
_thread: threading.Thread | None = None
_native: ModuleType | None = None
_reason: str | None = None
_disabled: set[str] = set()
_waiting: weakref.WeakSet[Handle] = weakref.WeakSet()  # handles made before the native launcher was ready


class Handle:
    """`handle(*args)` until the native launcher is ready: it runs in Python, then forwards every call."""

    __name__ = "fusion"  # in a graph of torch.fx

    def __init__(self, slow: Slow) -> None:
        self._slow = slow
        self._lock = forks.lock()
        self._kernels: list[tuple[LaunchProgram, Any]] = []
        self._turns: list[tuple[int, int]] = []  # numbers of kernels, and the magnitudes added to them
        self._python = _python_handle(slow)
        self._target: Any = self._python

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._target(*args, **named)

    def __copy__(self) -> Handle:
        return self

    def __deepcopy__(self, memo: Any) -> Handle:
        return self

    def each(self, arity: int, keep: bool, *args: Any) -> tuple[Any, ...] | None:
        """A call for every `arity` arguments; no call reads what another writes. Returns the results if `keep`."""
        results: tuple[Any, ...] | None = self._target.each(arity, keep, *args)
        return results

    def add_kernel(self, program: LaunchProgram, library: Any, magnitudes: int = ALL_MAGNITUDES) -> int:
        """Add a kernel for later calls of these magnitudes that match `program`. Returns its number.

        OSError if the library cannot be loaded.
        """
        with self._lock:
            number: int = self._target.add_kernel(program, library, magnitudes)
            self._kernels.append((program, library))
            self._turns.append((number, magnitudes))
        if _reason is not None:
            _warn()
        return number

    def widen(self, number: int, magnitudes: int) -> None:
        """Let kernel `number` also take calls of these magnitudes."""
        with self._lock:
            self._target.widen(number, magnitudes)
            self._turns.append((number, magnitudes))

    def refuse(self, function: Any, reason: str, which: Any, first: bool = False) -> bool:
        """Have the native launcher call `function` in place of `slow`, or of kernels if `first`.

        `which`: arguments, for all calls of their form, or a number of inputs, for all calls. Returns whether it does.
        """
        with self._lock:
            if self._target is self._python and isinstance(which, tuple):
                return False
            return bool(self._target.refuse(function, reason, which, first))

    def pardon(self, reason: str) -> None:
        """Send calls that were refused for `reason` to `slow` again."""
        with self._lock:
            self._target.pardon(reason)

    @property
    def refused(self) -> tuple[tuple[str, int], ...]:
        """Pairs of a reason for refusals and the number of calls refused for it."""
        found = Counter(dict(self._python.refused))
        for reason, calls in self._target.refused if self._target is not self._python else ():
            found[reason] += calls
        return tuple(found.items())

    def upgrade(self, native: ModuleType) -> None:
        """Switch to the native launcher with all kernels."""
        with self._lock:
            if self._target is not self._python:
                return
            target = native.Handle(self._slow)
            try:
                for kernel in self._kernels:
                    target.add_kernel(*kernel, 0)
                for turn in self._turns:
                    target.widen(*turn)
            except OSError:
                return  # a library whose file is gone stays with the Python handle that has loaded it
            if self._python.all is not None:
                target.refuse(*self._python.all)
            self._target = target

    @property
    def slow(self) -> Slow:
        """The function that answers calls no kernel takes."""
        return self._slow

    @property
    def hits(self) -> int:
        """Calls that a kernel answered."""
        return self._sum("hits")

    @property
    def misses(self) -> int:
        """Calls that no kernel answered."""
        return self._sum("misses")

    def _sum(self, name: str) -> int:
        target = self._target
        n: int = getattr(self._python, name)
        return n if target is self._python else n + int(getattr(target, name))

    @property
    def seen(self) -> tuple[Seen, ...]:
        """For each kernel: the slots of the last observed call, and whether those of others differed; or None."""
        found: tuple[Seen, ...] = self._target.seen
        return found

    def forget(self) -> None:
        """Reset `seen`."""
        self._target.forget()

    @property
    def kernel_count(self) -> int:
        """Kernels added so far."""
        return len(self._kernels)

    @property
    def kernel_hits(self) -> tuple[int, ...]:
        """Calls that each kernel answered, in the order they were added."""
        target, before = self._target, self._python.kernel_hits
        if target is self._python:
            return before
        now: tuple[int, ...] = target.kernel_hits
        return tuple(n + (before[i] if i < len(before) else 0) for i, n in enumerate(now))


def _python_handle(slow: Slow) -> PythonHandle:
    from fuser.runtime.python_launcher import Handle as PythonHandle  # most processes find a native launcher at once

    return PythonHandle(slow)


copyreg.pickle(Handle, reduced)


def make_handle(slow: Slow) -> Any:
    """A handle without kernels: `handle(*args)`, `add_kernel(program, library, magnitudes=ALL_MAGNITUDES)`, `widen`,
    `hits`, `misses`, `kernel_count`, and, where it is native, `refuse(function, reason, which, first=False)`,
    `pardon(reason)` and `refused`.

    `slow(args, status)` answers every call that no kernel takes (status 0) or whose kernel reported a status of
    `kernel_spec.STATUS`, and its result is the call's.
    """
    prepare()
    if _native is not None:
        return _native.Handle(slow)
    handle = Handle(slow)
    with _lock:
        if not _done.is_set():
            _waiting.add(handle)
            return handle
    if _native is not None:
        handle.upgrade(_native)
    return handle


def set_enabled(device_type: str, on: bool) -> None:
    """Allow or forbid kernels on tensors of `device_type`; if forbidden, every such call goes to `slow`."""
    if device_type not in torch_abi.DEVICE_TYPES:
        raise BackendError(f"device {device_type!r}: expected one of {', '.join(torch_abi.DEVICE_TYPES)}")
    with _lock:
        (_disabled.discard if on else _disabled.add)(device_type)
        _set_enabled_in_python(device_type, on)
        if _native is not None:
            _native.set_enabled(torch_abi.DEVICE_TYPES[device_type], on)


def _set_enabled_in_python(device_type: str, on: bool) -> None:
    from fuser.runtime.python_launcher import set_enabled as set_in_python

    set_in_python(device_type, on)


def _follow() -> None:
    """Pass `config.enabled` of the process and of this thread to the native launcher."""
    if _native is not None:
        here = settings.overridden("enabled")
        _native.switch(settings._values["enabled"], 0 if here is None else 1 if here else -1)


def _follow_warm_limit() -> None:
    """Pass the limit of held result memory of the process and of this thread to the native launcher."""
    if _native is not None:
        here = settings.overridden("output_limit_bytes")
        _native.warm_limit(settings._values["output_limit_bytes"], -1 if here is None else here)


def _follow_ranges() -> None:
    """Pass the functions that open ranges around calls to the native launcher."""
    if _native is None:
        return
    kind = settings._values["ranges"]
    pair = events.range_functions(kind)
    if kind and pair is None:
        notices.warn_once(f"there are no ranges: this torch has no {kind}", "ranges")
    _native.ranges(*(pair or (None, None)))


def prepare() -> None:
    """Start loading or building the native launcher, the latter in the background. Returns at once."""
    global _thread
    if _thread is not None or _done.is_set():
        return
    with _lock:
        if _thread is not None or _done.is_set():
            return
        ready = native_build.installed() or native_build.cached(settings.cache_dir)
        if ready is not None:
            _start(ready)
            return
        cache_dir = settings.cache_dir
        _thread = workers.start(functools.partial(_build, cache_dir), "fuser-launcher")
        if _thread is None:
            _fail("no thread can be started to build the native one")


def wait(timeout: float | None = None) -> bool:
    """Wait until the native launcher is ready or has failed. Returns whether there is one."""
    prepare()
    _done.wait(timeout)
    return is_native()


def native() -> ModuleType | None:
    """The native launcher's module; None until it is ready."""
    return _native


def loaded_libraries() -> int:
    """The number of loaded CPU kernel libraries."""
    return libraries.loaded() + (int(_native.loaded_libraries()) if _native is not None else 0)


def is_native() -> bool:
    """Whether handles run native code now."""
    return _native is not None


def reason() -> str | None:
    """The reason why handles run in Python if there is no native launcher; None otherwise."""
    return _reason


def _build(cache_dir: str) -> None:
    try:
        module = native_build.build(cache_dir)
    except (CompileError, OSError) as e:
        with _lock:
            _fail(str(e))
        return
    with _lock:
        _start(module)
        handles = list(_waiting)
        _waiting.clear()
    for handle in handles:
        handle.upgrade(module)


def _start(module: ModuleType) -> None:
    """Set up a loaded module. Called under the lock."""
    global _native
    try:
        module.setup(torch_abi.describe() | {"encode": encode, "settings": settings._values})
        for device_type in _disabled:
            module.set_enabled(torch_abi.DEVICE_TYPES[device_type], False)
    except (RuntimeError, TypeError, KeyError) as e:
        _fail(f"this torch does not offer what the native launcher needs: {e}")
        return
    _native = module
    copyreg.pickle(module.Handle, reduced)
    _follow()
    _follow_ranges()
    _follow_warm_limit()
    _done.set()


def _fail(why: str) -> None:
    """Stay with the Python launcher. Called under the lock."""
    global _reason
    _reason = why
    _done.set()
    late = any(handle.kernel_count for handle in _waiting) and not process.is_ending()
    _waiting.clear()
    if late:
        _warn()


def _warn() -> None:
    """Warn once, and only if there is a kernel to launch: with no compiler at all there is none."""
    notices.warn_once(f"calls go through the slower Python launcher, because {_reason}", "launcher")


@forks.in_child
def _after_fork() -> None:
    """Forget the build thread in a forked child, which starts its own when it first needs one."""
    global _thread
    if not _done.is_set():
        _thread = None

settings.watch("enabled", _follow)
settings.watch("ranges", _follow_ranges)
settings.watch("output_limit_bytes", _follow_warm_limit)

__all__ = ["Handle", "is_native", "make_handle", "native", "prepare", "reason", "set_enabled", "wait"]
