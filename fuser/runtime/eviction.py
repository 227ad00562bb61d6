"""The cache's limit: the least recently used entries are removed.

Removal is safe while other processes read: a file that is open or mapped stays until it is closed, and a missing entry
is made again. Entries used in the last minute are never removed, so none disappears between its check and its load.
The time of last use is a file's access time, which `files.read` sets itself.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterator
from typing import Any

from fuser import config, forks
from fuser.lazy_dataclasses import dataclass
from fuser.runtime import workers

settings: Any = config  # its attributes are made from a table

FOLDERS = ("choices", "cpu", "cuda", "native", "plans")
_YOUNG_SECONDS = 60.0
_KEEP = 0.9  # of the limit, once it is exceeded
_SHARE = 32  # the limit divided by the bytes that a process writes between two checks


@dataclass
class _Unit:
    """Files of one stem that are removed together: a library with its source, a GPU's binary with its facts."""

    paths: list[str]
    size: int = 0
    used: float = 0.0


_lock = forks.lock()
_written: dict[str, int] = {}  # by cache folder: bytes since the last look


def note(size: int) -> None:
    """Count `size` bytes written to the cache by this process; trim the cache in the background if that is due."""
    cache_dir, limit = settings.cache_dir, settings.cache_limit_bytes
    if not limit or not cache_dir:
        return
    with _lock:
        due = cache_dir not in _written or _written[cache_dir] + size > limit // _SHARE
        _written[cache_dir] = 0 if due else _written[cache_dir] + size
    if due:
        workers.start(lambda: trim(cache_dir, limit), "fuser-cache")


def trim(cache_dir: str, limit: int) -> int:
    """Remove least recently used entries of `cache_dir` if they exceed `limit` bytes. Returns the bytes removed.

    Imported bundles, reproducers, and files being made are neither counted nor removed.
    """
    units = _units(cache_dir)
    excess = sum(u.size for u in units) - limit
    if excess <= 0:
        return 0
    excess += limit - int(_KEEP * limit)
    removed = 0
    oldest = time.time() - _YOUNG_SECONDS
    for unit in sorted(units, key=lambda u: u.used):
        if removed >= excess or unit.used > oldest:
            break
        for path in unit.paths:
            with contextlib.suppress(OSError):  # another process has removed it, or it is a folder
                os.unlink(path)
        removed += unit.size
    return removed


def _units(cache_dir: str) -> list[_Unit]:
    units: dict[tuple[str, str], _Unit] = {}
    for folder, entry in _files(cache_dir):
        try:
            found = entry.stat(follow_symlinks=False)
        except OSError:
            continue
        if stat.S_ISREG(found.st_mode):
            unit = units.setdefault((folder, entry.name.partition(".")[0]), _Unit([]))
            unit.paths.append(entry.path)
            unit.size += found.st_size
            unit.used = max(unit.used, found.st_atime, found.st_mtime)
    return list(units.values())


def _files(cache_dir: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
    for folder in FOLDERS:
        with contextlib.suppress(OSError), os.scandir(os.path.join(cache_dir, folder)) as entries:
            for entry in entries:
                if not entry.name.startswith("."):
                    yield folder, entry


__all__ = ["FOLDERS", "note", "trim"]
