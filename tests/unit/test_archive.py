"""The container of bundles and ahead-of-time files: whole, or refused with a sentence."""

from __future__ import annotations

import os
import pathlib
import re
import stat

import pytest

from fuser.runtime import archive
from fuser.runtime.archive import Archive, ArchiveError

MEMBERS = {"about.json": b"{}", "cpu/abc.so": bytes(range(256)) * 5, "empty": b"", "plans/a.plan": b"x" * 64}
KEY = b"a key"


@pytest.fixture
def made(tmp_path: pathlib.Path) -> pathlib.Path:
    archive.write(tmp_path / "a.bundle", MEMBERS)
    return tmp_path / "a.bundle"


def contents(path: pathlib.Path, key: bytes | None = None) -> dict[str, bytes]:
    with Archive(path, key) as found:
        return {name: found.read(name) for name in found.members}


def test_members_come_back_and_bytes_are_the_same(made: pathlib.Path, tmp_path: pathlib.Path) -> None:
    assert contents(made) == MEMBERS and stat.S_IMODE(made.stat().st_mode) == 0o644
    with Archive(made) as found:
        assert all(m.start % archive.ALIGNMENT == 0 for m in found.members.values())
        assert {n: m.size for n, m in found.members.items()} == {n: len(d) for n, d in MEMBERS.items()}
        with pytest.raises(KeyError):
            found.read("nothing")
    archive.write(tmp_path / "b", dict(reversed(MEMBERS.items())))
    assert (tmp_path / "b").read_bytes() == made.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.bundle", "b"]
    archive.write(tmp_path / "b", {})
    assert contents(tmp_path / "b") == {}


def test_a_key_tells_whether_an_archive_was_changed(made: pathlib.Path, tmp_path: pathlib.Path) -> None:
    signed = tmp_path / "signed"
    archive.write(signed, MEMBERS, KEY)
    assert contents(signed, KEY) == contents(signed) == MEMBERS
    for path, key, why in ((signed, b"another", "not one of the key"), (made, KEY, "not signed")):
        with pytest.raises(ArchiveError, match=why):
            Archive(path, key)
    # Whoever changes a member can make its digests right, but not the signature.
    forged = archive.header({**MEMBERS, "about.json": b"[]"}, b"another")
    right = signed.read_bytes()
    signed.write_bytes(forged + right[len(forged) :])
    with pytest.raises(ArchiveError, match="not one of the key"):
        Archive(signed, KEY)


def test_flipped_bits_and_other_lengths_are_refused(made: pathlib.Path) -> None:
    right = made.read_bytes()
    for at in range(0, len(right), 7):
        made.write_bytes(right[:at] + bytes([right[at] ^ 1]) + right[at + 1 :])
        with pytest.raises(ArchiveError, match="is not used: "):
            contents(made)
    for size in (0, 1, 13, 100, len(right) // 2, len(right) - 1):
        made.write_bytes(right[:size])
        with pytest.raises(ArchiveError):
            contents(made)
    made.write_bytes(right + b"x")
    with pytest.raises(ArchiveError, match="where its index says"):
        Archive(made)


BAD_NAMES = [
    "../up", "a/../../b", "/etc/passwd", "a//b", "a/", "", ".hidden", "a/.work-1", "a\\b", "c:\\x", "a b", "a\nb", "é",
    "a\0b", "~/x", "x" * 300, "a/./b",
]  # fmt: skip


@pytest.mark.parametrize("name", BAD_NAMES)
def test_no_name_leads_out_of_an_archive(tmp_path: pathlib.Path, name: str) -> None:
    """Neither is such an archive written, nor read if somebody else wrote it with right checksums."""
    with pytest.raises(ArchiveError, match="is no name of a member"):
        archive.write(tmp_path / "a", {name: b"1"})
    index = f"1 {archive.digest(b'1')} {name}\n".encode()
    forge(tmp_path / "a", index, b"1")
    with pytest.raises(ArchiveError, match="is not used: "):
        Archive(tmp_path / "a")


def forge(path: pathlib.Path, index: bytes, data: bytes, version: str = "1", size: int | None = None) -> None:
    top = f"fuser-archive {version} {len(index) if size is None else size} {archive.digest(index)} -\n".encode() + index
    path.write_bytes(top + bytes(-len(top) % 64) + data + bytes(-len(data) % 64))


ONE = archive.digest(b"1")
FORGED = {
    "twice": (f"1 {ONE} a\n1 {ONE} a\n", "out of order"),
    "out of order": (f"1 {ONE} b\n1 {ONE} a\n", "out of order"),
    "a file and a folder": (f"1 {ONE} a\n1 {ONE} a/b\n", "a member and a folder"),
    "larger than the file": (f"999999999999999 {ONE} a\n", "where its index says"),
    "a negative size": (f"-1 {ONE} a\n", "no line of an index"),
    "an octal size": (f"01 {ONE} a\n", "no line of an index"),
    "not UTF-8": ("1 \udcff a\n", "no line of an index"),
}


@pytest.mark.parametrize("what", FORGED)
def test_an_index_with_right_checksums_that_makes_no_sense(tmp_path: pathlib.Path, what: str) -> None:
    text, why = FORGED[what]
    forge(tmp_path / "a", text.encode("utf-8", "surrogateescape"), b"1")
    with pytest.raises(ArchiveError, match=why):
        Archive(tmp_path / "a")


def test_other_versions_sizes_and_kinds_of_files(made: pathlib.Path, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a"
    forge(path, b"", b"", version="2")
    with pytest.raises(ArchiveError, match=re.escape("it has version 2 of the format, where 1 is read")):
        Archive(path)
    forge(path, b"", b"", size=10**11)
    with pytest.raises(ArchiveError, match="index is too long"):
        Archive(path)
    path.unlink()
    os.mkfifo(path)
    for other in (path, tmp_path):
        with pytest.raises((ArchiveError, IsADirectoryError)):
            Archive(other)
    with pytest.raises(IsADirectoryError):
        archive.write(tmp_path, MEMBERS)
    made.chmod(0o666)
    with pytest.raises(ArchiveError, match="can be written by other users"):
        Archive(made)
    with pytest.raises(FileNotFoundError):
        Archive(tmp_path / "missing")


def test_a_key_takes_the_place_of_an_owner(tmp_path: pathlib.Path) -> None:
    archive.write(tmp_path / "a", MEMBERS, KEY)
    (tmp_path / "a").chmod(0o666)
    assert contents(tmp_path / "a", KEY) == MEMBERS
