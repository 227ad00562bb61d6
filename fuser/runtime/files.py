"""Files kept for other processes: folders that only this user can write, entries that carry their name and a checksum.

Entries are code that runs later. An entry is read only if this user owns it, nobody else may write it, and it is
whole: its last line is a checksum of its name and contents. A library loads with that line at its end.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import functools
import hashlib
import os
import pathlib
import shutil
import stat
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator

from fuser import forks, notices

_MARK = b"\n#fuser "
_SEAL = len(_MARK) + 64 + 1
_MOST_BYTES = 1 << 28  # more than any entry has
LEAST_ROOM = 1 << 20  # bytes of free space that a compiler needs for a kernel
_WORK = ".work-"
_OUTSIDE = "fuser-"
_LOCK = ".lock-"
_PAUSE = 0.02  # seconds between two attempts at a lock that another process holds
_DAY = 86400.0
_USED_SECONDS = 30.0  # an entry's time of last use is updated if it is older than this


class Refused(OSError):
    """A file or folder that must not be used. The argument is the sentence that says why."""


# -- trust -------------------------------------------------------------------------------------------------------------
def distrusted(path: pathlib.Path | str, found: os.stat_result) -> str | None:
    """Why code must not be read from `path`; None if only this user, or root, can have written it."""
    if found.st_uid not in (os.geteuid(), 0):
        return f"{path} belongs to user {found.st_uid}, not to user {os.geteuid()} of this process"
    if found.st_mode & 0o022:
        mode = stat.S_IMODE(found.st_mode)
        return f"{path} can be written by other users (mode {mode:o}); chmod go-w lets it be used"
    return None


def folder(base: str, *names: str) -> pathlib.Path:
    """The folder `base`/names, created for this user alone if it does not exist.

    OSError if it cannot be created; Refused if another user owns a folder from `base` on, or may write it.
    """
    path = pathlib.Path(base)
    _make(path)
    for name in (None, *names):
        path = path / name if name else path
        if name:
            _make(path)
        existing_folder(path)
    _sweep(str(path), os.getpid())
    return path


def existing_folder(path: pathlib.Path) -> pathlib.Path:
    """The folder `path`. OSError if there is none; Refused if another user owns it or may write it."""
    found = path.stat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(f"{path} is no folder")
    why = distrusted(path, found)
    if why is not None:
        raise Refused(why)
    return path


def _make(path: pathlib.Path) -> None:
    if path.exists():
        return
    if path.parent != path:
        _make(path.parent)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
        path.chmod(0o700)  # regardless of the umask


def say_once(what: pathlib.Path | str, sentence: str) -> None:
    """Warn once in this process about `what`."""
    notices.warn_once(sentence, str(what))


# -- entries -----------------------------------------------------------------------------------------------------------
def seal(name: str, data: bytes) -> bytes:
    """The bytes behind the contents of the entry `name` in its file."""
    digest = hashlib.blake2b(name.encode() + b"\0" + data, digest_size=32).hexdigest()
    return _MARK + digest.encode() + b"\n"


def read(path: pathlib.Path, used: bool = True) -> bytes | None:
    """The contents of an entry; None if it is missing, not whole or not trusted. `used`: update its time of use.

    One warning says why a file is not trusted.
    """
    try:
        # No symbolic links, and no waiting for the writer of a pipe.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or not _SEAL <= found.st_size <= _MOST_BYTES:
            return None
        why = distrusted(path, found)
        whole = os.read(handle, found.st_size) if why is None else b""
        if used and time.time() - found.st_atime > _USED_SECONDS:  # explicitly: some mounts have noatime
            with contextlib.suppress(OSError):
                os.utime(handle, ns=(time.time_ns(), found.st_mtime_ns))
    except OSError:
        return None
    finally:
        os.close(handle)
    if why is not None:
        say_once(path, f"a file of the cache is not used but made again: {why}")
        return None
    data = whole[:-_SEAL]
    return data if whole[-_SEAL:] == seal(path.name, data) else None


def is_whole(path: str) -> bool:
    """Whether there is a whole, trusted entry at `path`."""
    return read(pathlib.Path(path)) is not None


def write(path: pathlib.Path, data: bytes, sealed: bool = True, mode: int = 0o600) -> None:
    """Write an entry, for this user alone, whole or not at all. OSError if that fails."""
    with working_folder(path.parent) as work:
        made = work / path.name
        made.write_bytes(data)
        put(made, path, sealed, mode)


def put(made: pathlib.Path, path: pathlib.Path, sealed: bool = True, mode: int = 0o600) -> None:
    """Move the file `made` to the entry `path` atomically; whatever is there is replaced, never followed."""
    with open(made, "r+b") as file:
        os.fchmod(file.fileno(), mode)
        if sealed:
            file.write(seal(path.name, file.read()))
        file.flush()
        if not sealed:  # a seal shows missing data after a loss of power: the entry is then made again
            os.fsync(file.fileno())
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    os.replace(made, path)


# -- temporary files
# ---------------------------------------------------------------------------------------------------
@functools.cache
def _here() -> str:
    """An identifier of the machine and container within which process numbers are unique."""
    where = os.uname().nodename
    with contextlib.suppress(OSError):
        where += os.readlink("/proc/self/ns/pid")
    return f"{zlib.crc32(where.encode()):08x}"


@contextlib.contextmanager
def working_folder(parent: pathlib.Path) -> Iterator[pathlib.Path]:
    """A temporary folder in `parent`; it is removed at the end, as are those of processes that were killed.

    OSError also if the disk is too full for a kernel: the compiler's own message would be less clear.
    """
    _need_room(str(parent))
    _sweep(str(parent), os.getpid())
    with _removed(tempfile.mkdtemp(prefix=f"{_WORK}{_here()}-{os.getpid()}-", dir=parent)) as path:
        yield path


def _need_room(folder: str) -> None:
    found = os.statvfs(folder)
    is_full = found.f_blocks and found.f_bavail * found.f_frsize < LEAST_ROOM  # some file systems report 0
    if is_full or (found.f_files and not found.f_favail):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), folder)


@contextlib.contextmanager
def temporary_folder() -> Iterator[pathlib.Path]:
    """A temporary folder outside the cache, removed at the end."""
    with _removed(_outside()) as path:
        yield path


@contextlib.contextmanager
def scratch_folder(parent: pathlib.Path) -> Iterator[pathlib.Path]:
    """A temporary folder: in `parent` if that can be written, else outside the cache."""
    with contextlib.ExitStack() as stack:
        try:
            path = stack.enter_context(working_folder(parent))
        except OSError:
            path = stack.enter_context(temporary_folder())
        yield path


def _outside() -> str:
    """A new folder outside the cache. Those of processes that were killed are removed."""
    _sweep(tempfile.gettempdir(), os.getpid())
    return tempfile.mkdtemp(prefix=f"{_OUTSIDE}{_here()}-{os.getpid()}-")


@contextlib.contextmanager
def _removed(path: str) -> Iterator[pathlib.Path]:
    remove = _at_exit(path)  # a thread that makes an entry does not outlive the process
    try:
        yield pathlib.Path(path)
    finally:
        atexit.unregister(remove)
        remove()


def _at_exit(path: str) -> Callable[[], None]:
    """A function that removes a folder; it runs at the latest when this process ends, but not in a forked child."""
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:
            shutil.rmtree(path, ignore_errors=True)

    atexit.register(remove)
    return remove


_private: dict[int, pathlib.Path] = {}  # by process
_choosing = forks.lock()


def private_folder() -> pathlib.Path:
    """This process's own folder, which is removed when the process ends."""
    with _choosing:
        found = _private.get(os.getpid())
        if found is None:
            found = _private[os.getpid()] = pathlib.Path(_outside())
            _at_exit(str(found))
        return found


@functools.lru_cache(maxsize=16)
def _sweep(parent: str, process: int) -> None:
    """Sweep `parent` once for each process."""
    sweep(parent)


def sweep(parent: str) -> None:
    """Remove the working folders and locks in `parent` that ended processes left behind."""
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if entry.name.startswith((_WORK, _OUTSIDE)) and _is_left(entry):
                shutil.rmtree(entry.path, ignore_errors=True)
            elif entry.name.startswith(_LOCK):
                _unlock(entry.path, _lock(entry.path, 0))


def _is_left(entry: os.DirEntry[str]) -> bool:
    is_outside = entry.name.startswith(_OUTSIDE)
    try:
        found = entry.stat(follow_symlinks=False)
        if found.st_uid != os.geteuid() or not stat.S_ISDIR(found.st_mode):
            return False
        if not is_outside and time.time() - found.st_mtime > _DAY:
            return True
        here, process, _ = entry.name.removeprefix(_OUTSIDE if is_outside else _WORK).split("-", 2)
        if here != _here():
            return False
        os.kill(int(process), 0)
    except ProcessLookupError:
        return True
    except (OSError, ValueError):
        return False
    return False


# -- locks
# -------------------------------------------------------------------------------------------------------------
_held: dict[int, str] = {}  # open locks and their files


@contextlib.contextmanager
def claim(path: pathlib.Path, seconds: float) -> Iterator[bool]:
    """A lock on making the entry `path`: no other process or thread of this machine has it during the block.

    It waits for another holder at most `seconds`: a stopped process must not stop all others. The value is False then,
    or if locks are not possible. The system frees the lock of a process that ends.
    """
    lock = str(path.with_name(_LOCK + path.name))
    handle = _lock(lock, seconds)
    try:
        yield handle is not None
    finally:
        _unlock(lock, handle)


def _lock(lock: str, seconds: float) -> int | None:
    end = time.monotonic() + seconds
    while True:
        try:
            handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError:  # a read-only folder
            return None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(handle).st_ino == os.stat(lock).st_ino:
                _held[handle] = lock
                return handle
            held = False  # the holder before has removed the file
        except FileNotFoundError:
            held = False
        except BlockingIOError:
            held = True
        except OSError:  # a file system without locks
            os.close(handle)
            return None
        os.close(handle)
        if held and time.monotonic() >= end:
            return None
        if held:
            time.sleep(_PAUSE)


def _unlock(lock: str, handle: int | None) -> None:
    if handle is not None and _held.pop(handle, None) is not None:
        with contextlib.suppress(OSError):
            os.unlink(lock)
        fcntl.flock(handle, fcntl.LOCK_UN)  # closing is not enough while a forked child has it open
        os.close(handle)


@atexit.register
def _let_go() -> None:
    """Release all locks: threads that hold one may not finish in a process that ends."""
    for handle, lock in list(_held.items()):
        _unlock(lock, handle)


@forks.in_child
def _after_fork() -> None:
    """Close inherited locks: a child would hold them beyond its parent's end."""
    for handle in _held:
        os.close(handle)
    _held.clear()


__all__ = [
    "Refused", "claim", "distrusted", "existing_folder", "folder", "private_folder", "put", "read", "say_once",
    "scratch_folder", "seal", "sweep", "temporary_folder", "working_folder", "write",
]  # fmt: skip
