"""Files of the cache that are damaged, planted or left behind: nothing of them runs, and all is rebuilt."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
from collections.abc import Callable

import pytest

from fuser import can_fuse_on_cpu, config, notices
from fuser.cpu import toolchain
from fuser.errors import CompileError
from fuser.runtime import files, native_build
from tests import forked

pytestmark = pytest.mark.skipif(not can_fuse_on_cpu(), reason="needs a C++ compiler")
ROOT = pathlib.Path(__file__).resolve().parents[2]
NOBODY = 65534
SOURCES = ('extern "C" int answer() { return 42; }\n', 'extern "C" int answer() { return 43; }\n')

# A new process for each cache: the answers of both libraries, how often the compiler ran, and the number of warnings.
_USE = """
import ctypes, json, os, sys, warnings
from fuser import config
from fuser.cpu import toolchain
runs, run = [], toolchain.process.run
toolchain.process.run = lambda command, timeout: (runs.append(command), run(command, timeout))[1]
caches, sources = json.loads(sys.argv[1])
for cache in caches:
    child = os.fork()
    if child == 0:
        config.set(cache_dir=cache)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            libraries = [toolchain.compile_library((source,)) for source in sources]
        print(json.dumps([*(ctypes.CDLL(path).answer() for path in libraries), len(runs), len(said)]), flush=True)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        print("null", flush=True)
"""


def use(*caches: pathlib.Path) -> list[list[int] | None]:
    """For each cache what a new process found; None if it ended otherwise."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = ["-c", _USE, json.dumps([list(map(str, caches)), SOURCES])]
    done = forked.run(command, env=env, timeout=240)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def _cut(at: float) -> Callable[[pathlib.Path, pathlib.Path], None]:
    return lambda path, other: path.write_bytes(path.read_bytes()[: int(path.stat().st_size * at)])


def _flip(at: float) -> Callable[[pathlib.Path, pathlib.Path], None]:
    def flip(path: pathlib.Path, other: pathlib.Path) -> None:
        data = bytearray(path.read_bytes())
        data[min(int(len(data) * at), len(data) - 1)] ^= 1
        path.write_bytes(data)

    return flip


def _instead(make: Callable[[pathlib.Path, pathlib.Path], object]) -> Callable[[pathlib.Path, pathlib.Path], None]:
    def replace(path: pathlib.Path, other: pathlib.Path) -> None:
        path.unlink()
        make(path, other)

    return replace


def _full_folder(path: pathlib.Path, other: pathlib.Path) -> None:
    path.mkdir()
    (path / "something").write_text("in the way")


def _page_of_zeros(path: pathlib.Path, other: pathlib.Path) -> None:
    data = path.read_bytes()
    middle = len(data) // 2
    path.write_bytes(data[:middle] + bytes(min(4096, len(data) - middle)) + data[middle + 4096 :])


# What happens to an entry, given another one of the same kind.
DAMAGE: dict[str, Callable[[pathlib.Path, pathlib.Path], object]] = {
    "empty": lambda path, other: path.write_bytes(b""),
    "cut after a byte": lambda path, other: path.write_bytes(path.read_bytes()[:1]),
    "cut in the middle": _cut(0.5),
    "cut at the end": _cut(0.99),
    "zeros": lambda path, other: path.write_bytes(bytes(path.stat().st_size)),
    "a page of zeros": _page_of_zeros,
    "a bit, first": _flip(0.0),
    "a bit, middle": _flip(0.5),
    "a bit, last": _flip(1.0),
    "longer": lambda path, other: path.write_bytes(path.read_bytes() + b"more"),
    "another's contents": lambda path, other: shutil.copyfile(other, path),
    "rubbish": lambda path, other: path.write_bytes(os.urandom(5000)),
    "missing": lambda path, other: path.unlink(),
    "a pipe": _instead(lambda path, other: os.mkfifo(path)),
    "a folder": _instead(lambda path, other: path.mkdir()),
    "a full folder": _instead(_full_folder),
    "a link to another": _instead(lambda path, other: path.symlink_to(other)),
    "a link to itself": _instead(lambda path, other: path.symlink_to(path)),
    "a broken link": _instead(lambda path, other: path.symlink_to("/nowhere/at/all")),
    "not readable": lambda path, other: path.chmod(0o000),
}
TRUST: dict[str, Callable[[pathlib.Path], object]] = {
    "written by the group": lambda path: path.chmod(path.stat().st_mode | 0o020),
    "written by all": lambda path: path.chmod(path.stat().st_mode | 0o002),
    "somebody else's": lambda path: os.chown(path, NOBODY, NOBODY),
}
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
TRUST_CASES = [pytest.param(name, marks=[needs_root] if "else" in name else []) for name in TRUST]


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A cache with the entries of both sources."""
    cache = tmp_path_factory.mktemp("warm")
    first, second = use(cache, cache)
    assert first is not None and first[:2] == [42, 43] and second == [42, 43, 0, 0]
    return cache


@pytest.fixture
def cache(warm: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    return shutil.copytree(warm, tmp_path / "cache")


@pytest.fixture
def here(cache: pathlib.Path) -> pathlib.Path:
    """The same, used by this process."""
    toolchain._probe.cache_clear()
    with config.override(cache_dir=str(cache)):
        yield cache / "cpu"
    toolchain._probe.cache_clear()


def entries(cache: pathlib.Path) -> list[pathlib.Path]:
    return sorted((cache / "cpu").glob("*.so")) + sorted((cache / "cpu").glob("toolchain-*"))


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_rebuilt(cache: pathlib.Path, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`read` takes nothing of it, `write` puts it right: for libraries and the memory of flags."""
    for path in entries(cache):
        right, other = path.read_bytes(), next(e for e in entries(cache) if e != path)
        data = files.read(path)
        assert data is not None and right == data + files.seal(path.name, data)
        DAMAGE[damage](path, other)
        readable = damage == "not readable" and os.geteuid() == 0
        assert files.read(path) == (data if readable else None)
        files.write(path, data)
        assert path.read_bytes() == right and path.is_file() and not path.is_symlink()
        assert path.stat().st_mode & 0o777 == 0o600


def test_processes_live_with_damage(warm: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A library and the memory of flags damaged: a new process is right, and leaves all as it should be."""
    caches = {damage: shutil.copytree(warm, tmp_path / str(n)) for n, damage in enumerate(DAMAGE)}
    for damage, cache in caches.items():
        first, second, *known = entries(cache)  # a usual compiler needs no memory of flags
        for path in (first, *known):
            DAMAGE[damage](path, second)
    for (damage, cache), got in zip(caches.items(), use(*caches.values()), strict=True):
        assert got is not None and got[:2] == [42, 43] and got[3] == 0, (damage, got)
        assert (got[2] > 0) == (damage != "not readable" or os.geteuid() != 0), damage
        assert all(files.read(path) is not None for path in entries(cache)), damage


@pytest.mark.parametrize("how", TRUST_CASES)
def test_a_file_that_others_may_have_written_is_not_used(here: pathlib.Path, how: str) -> None:
    path = entries(here.parent)[0]
    data = files.read(path)
    assert data is not None
    TRUST[how](path)
    notices._said.clear()
    with pytest.warns(RuntimeWarning, match="not used but made again: .*(can be written by other|belongs to) user"):
        assert files.read(path) is None
    files.write(path, data)
    assert files.read(path) == data and path.stat().st_uid == os.geteuid()


@pytest.mark.parametrize("what", ["", "cpu"])
@pytest.mark.parametrize("how", TRUST_CASES)
def test_a_folder_that_others_may_write_is_refused(here: pathlib.Path, how: str, what: str) -> None:
    """Nothing of it is run or written; kernels are made in this process's own folder, and one warning says why."""
    TRUST[how](here.parent / what)
    before = sorted(here.iterdir())
    notices._said.clear()
    with pytest.raises(files.Refused, match="can be written by other|belongs to user"):
        files.folder(str(here.parent), "cpu")
    with pytest.warns(RuntimeWarning, match="kernels are not kept in .* user") as said:
        made = toolchain.compile_library((SOURCES[0],))
    assert len(said) == 1 and pathlib.Path(made).parent.parent != here.parent and sorted(here.iterdir()) == before
    assert native_build.cached(str(here.parent)) is None


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o077, 0o777])
def test_folders_are_for_this_user_alone(tmp_path: pathlib.Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        made = files.folder(str(tmp_path / "a" / "b"), "c")
        files.write(made / "entry", b"contents")
    finally:
        os.umask(before)
    assert [p.stat().st_mode & 0o777 for p in (made, made.parent, made.parent.parent)] == [0o700] * 3
    assert (made / "entry").stat().st_mode & 0o777 == 0o600 and files.read(made / "entry") == b"contents"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"HOME": "", "XDG_CACHE_HOME": "relative"}, "/.cache/fuser"),
        ({"HOME": "somewhere"}, ""),
        ({"HOME": "~"}, ""),
        ({"HOME": "/home/me", "XDG_CACHE_HOME": "relative"}, "/home/me/.cache/fuser"),
        ({"HOME": "/home/me", "XDG_CACHE_HOME": "/caches"}, "/caches/fuser"),
    ],
)
def test_the_cache_is_never_in_the_working_directory(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert config._default_cache_dir() == expected


def test_what_killed_processes_left_is_removed(tmp_path: pathlib.Path) -> None:
    done = subprocess.Popen(["true"])
    done.wait()
    name = f"{files._WORK}{files._here()}-"
    for left in (f"{name}{done.pid}-x", f"{files._WORK}0other00-{done.pid}-x", f"{name}1-x"):
        (tmp_path / left).mkdir()
    os.utime(tmp_path / f"{name}1-x", (0, 0))  # a process has its number, but not for as long
    files.write(tmp_path / "entry", b"contents")
    assert {p.name for p in tmp_path.iterdir()} == {"entry", f"{files._WORK}0other00-{done.pid}-x"}


def test_a_place_from_which_no_library_loads(here: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system mounted with noexec: an earlier library and a new one load from the process's own folder."""
    loads = toolchain._loads
    refuse = lambda path, *more: "failed to map segment" if here in path.parents else loads(path, *more)  # noqa: E731
    monkeypatch.setattr(toolchain, "_loads", refuse)
    notices._said.clear()
    with pytest.warns(RuntimeWarning, match="no library loads from there: failed to map segment") as said:
        made = [toolchain.compile_library((s,)) for s in (SOURCES[0], SOURCES[0].replace("42", "44"))]
    assert len(said) == 1 and not any(here in pathlib.Path(path).parents for path in made)
    monkeypatch.setattr(toolchain, "_loads", lambda path, *more: "failed to map segment")
    with pytest.raises(CompileError, match="failed to map segment"):
        toolchain.compile_library((SOURCES[0].replace("42", "45"),))
