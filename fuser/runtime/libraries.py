"""Libraries of CPU kernels for the Python launcher, as native/libraries.h has them for the native one.

A library is loaded while something holds it: all `Code` objects of its path, until another library needs the room, and
each call while it runs.
"""

from __future__ import annotations

import _ctypes
import ctypes
import os
import pathlib
import struct
import weakref
from collections import OrderedDict
from typing import Any

from fuser import config, forks
from fuser.runtime import files

settings: Any = config  # its attributes are made from a table


class Library:
    """A library that is loaded as long as this object lives. OSError names the path."""

    def __init__(self, path: str) -> None:
        self.library = ctypes.CDLL(path)

    def __del__(self) -> None:
        library = self.__dict__.get("library")  # none if it could not be loaded
        if library is not None and _ctypes is not None:  # None at the end of the process
            _ctypes.dlclose(library._handle)

    def address(self, entry: str) -> int:
        """The address of an entry. OSError if there is none."""
        try:
            return ctypes.cast(self.library[entry], ctypes.c_void_p).value or 0
        except AttributeError as e:
            raise OSError(f"kernel library {self.library._name} has no such entry: {e}") from None


class _Shared:
    """The library at a path, shared by all its `Code`; None while it is unloaded."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.library: Library | None = None


_lock = forks.rlock()
_shared: weakref.WeakValueDictionary[str, _Shared] = weakref.WeakValueDictionary()
_recent: OrderedDict[str, None] = OrderedDict()  # paths of loaded libraries, least recently called first
_newest = [""]  # its last path


class Code:
    """The entries of one kernel in the library at `path`. OSError if they cannot be loaded."""

    def __init__(self, path: str, names: tuple[str, ...]) -> None:
        with _lock:
            self._shared = _shared.get(path) or _Shared(path)
            _shared[path] = self._shared
        self._names = names
        self._loaded: weakref.ref[Library] | None = None
        self._addresses: tuple[int, ...] = ()
        self.hold()

    def hold(self) -> tuple[Library, tuple[int, ...]]:
        """The library, to be referenced during a call, and the entries' addresses. OSError if it cannot be reloaded."""
        shared = self._shared
        with _lock:
            library = shared.library
            if library is None:
                if self._loaded is not None and not files.is_whole(shared.path):
                    raise OSError(f"kernel library {shared.path} has changed since it was loaded first")
                library = Library(shared.path)
            shared.library = library
            if _newest[0] != shared.path:
                _newest[0] = shared.path
                _recent[shared.path] = None
                _recent.move_to_end(shared.path)
            if len(_recent) > settings.library_limit:
                _make_room()
            if self._loaded is None or self._loaded() is not library:
                self._addresses = tuple(map(library.address, self._names))
                self._loaded = weakref.ref(library)
            return library, self._addresses


def _make_room() -> None:
    """Unload the least recently called libraries beyond the limit. Called under the lock."""
    _newest[0] = ""
    for path in [p for p in _recent if p not in _shared]:
        del _recent[path]
    while len(_recent) > settings.library_limit:
        path, _ = _recent.popitem(last=False)
        if (shared := _shared.get(path)) is not None:
            shared.library = None


def loaded() -> int:
    """The number of libraries that kernels of the Python launcher have loaded."""
    with _lock:
        return sum(s.library is not None for s in _shared.values())


_MAPPED = 1  # a part of an ELF file that is mapped into memory


def is_cut(path: pathlib.Path) -> bool:
    """Whether a 64-bit ELF file is shorter than the segments it maps: loading it would kill the process. OSError."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(64)
        if head[:5] != b"\x7fELF\2":
            return False  # the system's loader reports it
        if len(head) < 64:
            return True
        order = "<" if head[5] == 1 else ">"
        (at,), (each, count) = struct.unpack_from(f"{order}Q", head, 32), struct.unpack_from(f"{order}HH", head, 54)
        file.seek(at)
        table = file.read(each * count)
    if each < 56 or len(table) < each * count:
        return True
    parts = (struct.unpack_from(f"{order}IIQQQQ", table, each * n) for n in range(count))
    return any(kind == _MAPPED and begin + length > size for kind, _, begin, _, _, length in parts)


__all__ = ["Code", "Library", "is_cut", "loaded"]
