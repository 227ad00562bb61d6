"""Archives: several named members in one file, each with a checksum. Equal members make equal bytes.

    fuser-archive 1 <bytes of the index> <digest of the index> <HMAC of the index, or ->
    <bytes> <digest> <name>                 one line for each member, in the order of names: the index
    <the members, each at a multiple of 64 bytes, zeros between>

Digests are BLAKE2b of 32 bytes, in hexadecimal; the HMAC is HMAC-SHA256 under a key that writer and reader share.
Nothing in an archive is compressed or interpreted, and no name is a path outside of it: a reader accepts names of
letters, digits and `_ . - /`, and a file of exactly the length that its index says.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import pathlib
import re
import stat
from collections.abc import Mapping

from fuser.errors import InputError
from fuser.lazy_dataclasses import dataclass
from fuser.runtime import files

VERSION = 1
ALIGNMENT = 64
_MAGIC = b"fuser-archive"
_FIRST_LINE = 512  # bytes at most
_MOST_INDEX = 1 << 26
_PIECE = 1 << 24  # bytes read or written at a time
_NAME = re.compile(r"(?!\.)[\w.-]+(/(?!\.)[\w.-]+)*", re.ASCII)  # no part begins with a dot: no "..", nothing hidden
_LONGEST_NAME = 200
_HEADER = re.compile(rb"fuser-archive (\d{1,9}) (\d{1,12}) ([0-9a-f]{64}) ([0-9a-f]{64}|-)\n")
_ROW = re.compile(r"(0|[1-9]\d{0,15}) ([0-9a-f]{64}) (\S+)")

Data = bytes | bytearray | memoryview


class ArchiveError(ValueError):
    """A file that is not a whole archive, or must not be used. The argument is the sentence that says why."""


@dataclass(frozen=True)
class Member:
    """One named part: its offset, size in bytes and digest."""

    name: str
    start: int
    size: int
    digest: str


def is_name(name: str) -> bool:
    """Whether a member may have this name: a relative path without `..`."""
    return len(name) <= _LONGEST_NAME and _NAME.fullmatch(name) is not None


def digest(data: Data) -> str:
    """The checksum of a member."""
    return hashlib.blake2b(data, digest_size=32).hexdigest()


def _check_key(key: bytes | None) -> None:
    if key is not None and not isinstance(key, (bytes, bytearray)):
        raise InputError(f"the key of an archive is a {type(key).__name__}: expected bytes")


def _padding(size: int) -> int:
    return -size % ALIGNMENT


def _check_names(names: list[str]) -> None:
    for name in names:
        if not is_name(name):
            raise ArchiveError(f"{name[:_LONGEST_NAME]!r} is no name of a member")
    folders = {"/".join(parts[:n]) for parts in (name.split("/") for name in names) for n in range(1, len(parts))}
    if twice := folders.intersection(names):
        raise ArchiveError(f"{min(twice)!r} is a member and a folder of others")


# -- writing -----------------------------------------------------------------------------------------------------------
def header(members: Mapping[str, Data], key: bytes | None = None) -> bytes:
    """The bytes before the members of an archive. ArchiveError for a name that no member may have."""
    _check_key(key)
    _check_names(list(members))
    rows = [f"{memoryview(data).nbytes} {digest(data)} {name}\n" for name, data in sorted(members.items())]
    index = "".join(rows).encode()
    signature = hmac.new(key, index, "sha256").hexdigest() if key is not None else "-"
    first = f"{_MAGIC.decode()} {VERSION} {len(index)} {digest(index)} {signature}\n".encode()
    return first + index


def write(path: os.PathLike[str] | str, members: Mapping[str, Data], key: bytes | None = None) -> None:
    """Write an archive, whole or not at all, readable by those who may read new files here. OSError if that fails.

    With a `key`, readers that know the key detect any change of the archive.
    """
    path = pathlib.Path(path).absolute()
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder")
    top = header(members, key)
    with files.working_folder(path.parent) as work:
        made = work / path.name
        with open(made, "wb") as file:
            for data in (top, *(data for _, data in sorted(members.items()))):
                file.write(data)
                file.write(bytes(_padding(memoryview(data).nbytes)))
        files.put(made, path, sealed=False, mode=0o644)


# -- reading -----------------------------------------------------------------------------------------------------------
class Archive:
    """An archive that is open for reading; also a context manager. Members are checked when they are read.

    ArchiveError says why a file is refused: it is damaged, of another version, not signed with `key`, or, if there is
    no key, written by another user or writable by others. OSError if it cannot be read.
    """

    def __init__(self, path: os.PathLike[str] | str, key: bytes | None = None) -> None:
        _check_key(key)
        self.path = os.fspath(path)
        self._handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            self.members = self._index(key)
        except BaseException:
            self.close()
            raise

    def _index(self, key: bytes | None) -> dict[str, Member]:
        found = os.fstat(self._handle)
        if not stat.S_ISREG(found.st_mode):
            raise self._refused("it is no file")
        if key is None and (why := files.distrusted(self.path, found)) is not None:
            raise ArchiveError(f"archive {why}")
        first = self._bytes(0, min(_FIRST_LINE, found.st_size))
        head = _HEADER.match(first)
        if head is None:
            raise self._refused("it does not begin like an archive of fuser")
        version, size, right, signature = (group.decode() for group in head.groups())
        if int(version) != VERSION:
            raise self._refused(f"it has version {version} of the format, where {VERSION} is read")
        if int(size) > min(_MOST_INDEX, found.st_size):
            raise self._refused("its index is too long")
        index = self._bytes(head.end(), int(size))
        if key is not None:
            if signature == "-":
                raise self._refused("it is not signed, but a key was given")
            if not hmac.compare_digest(hmac.new(key, index, "sha256").hexdigest(), signature):
                raise self._refused("its signature is not one of the key")
        if digest(index) != right:
            raise self._refused("its index is damaged")
        return self._members(index, head.end() + int(size), found.st_size)

    def _members(self, index: bytes, start: int, end: int) -> dict[str, Member]:
        out: dict[str, Member] = {}
        before = ""
        start = self._padded(start, end)
        for line in index.decode("ascii", "replace").split("\n")[:-1]:
            row = _ROW.fullmatch(line)
            if row is None:
                raise self._refused(f"{line[:80]!r} is no line of an index")
            size, right, name = row.groups()
            if not is_name(name):
                raise self._refused(f"{name[:80]!r} is no name of a member")
            if name <= before:
                raise self._refused(f"{name!r} is out of order")
            out[name] = Member(name, start, int(size), right)
            start, before = self._padded(start + int(size), end), name
        try:
            _check_names(list(out))
        except ArchiveError as e:
            raise self._refused(str(e)) from None
        if start != end:
            raise self._refused(f"it has {end} bytes, where its index says {start}")
        return out

    def _padded(self, at: int, end: int) -> int:
        """The offset of the next member. ArchiveError if the padding before it is not zeros."""
        size = _padding(at)
        if at + size <= end and self._bytes(at, size) != bytes(size):
            raise self._refused(f"there is something between its members, at {at}")
        return at + size

    def _refused(self, why: str) -> ArchiveError:
        return ArchiveError(f"archive {self.path} is not used: {why}")

    def _bytes(self, start: int, size: int) -> bytes:
        pieces = []
        while size > 0 and (piece := os.pread(self._handle, min(size, _PIECE), start)):
            pieces.append(piece)
            start, size = start + len(piece), size - len(piece)
        if size > 0:
            raise self._refused("it is cut")
        return b"".join(pieces)

    def read(self, name: str) -> bytes:
        """The contents of a member. KeyError if there is none; ArchiveError if it is damaged."""
        member = self.members[name]
        data = self._bytes(member.start, member.size)
        if digest(data) != member.digest:
            raise self._refused(f"its member {name} is damaged")
        return data

    def close(self) -> None:
        """Close the file."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)

    def __enter__(self) -> Archive:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()


__all__ = ["ALIGNMENT", "Archive", "ArchiveError", "Data", "Member", "digest", "header", "is_name", "write"]
