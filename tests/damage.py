"""What can happen to the files of a cache, and what a new process then makes of them.

`CASES` are (place, damage): a process that finds the damage gives right results, raises nothing and repairs it. One
process forks a child for each case, so that a case costs what its kernels cost.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fuser.runtime import files
from tests import forked

ROOT = pathlib.Path(__file__).resolve().parents[1]
NOBODY = 65534
IS_ROOT = os.geteuid() == 0
Damage = Callable[[pathlib.Path, pathlib.Path], object]


# -- what happens to a file, given another one of its kind -------------------------------------------------------------
def _cut(at: float) -> Damage:
    return lambda path, other: path.write_bytes(path.read_bytes()[: int(path.stat().st_size * at)])


def _flip(at: float) -> Damage:
    def flip(path: pathlib.Path, other: pathlib.Path) -> None:
        data = bytearray(path.read_bytes())
        data[min(int(len(data) * at), len(data) - 1)] ^= 1
        path.write_bytes(data)

    return flip


def _instead(make: Damage) -> Damage:
    def replace(path: pathlib.Path, other: pathlib.Path) -> None:
        path.unlink()
        make(path, other)

    return replace


def _zeroed(first: float, last: float) -> Damage:
    def zero(path: pathlib.Path, other: pathlib.Path) -> None:
        data = path.read_bytes()
        a, b = int(len(data) * first), int(len(data) * last)
        path.write_bytes(data[:a] + bytes(b - a) + data[b:])

    return zero


def _sealed(change: Callable[[bytes, bytes], bytes]) -> Damage:
    """Other contents of which the checksum is right, as an older or newer version might have written them."""

    def seal(path: pathlib.Path, other: pathlib.Path) -> None:
        data = change(path.read_bytes()[: -files._SEAL], other.read_bytes()[: -files._SEAL])
        path.write_bytes(data + files.seal(path.name, data))

    return seal


def _socket(path: pathlib.Path, other: pathlib.Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # names of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def _full_folder(path: pathlib.Path, other: pathlib.Path) -> None:
    path.mkdir()
    (path / "something").write_text("in the way")


def _linked(path: pathlib.Path, other: pathlib.Path) -> None:
    path.unlink()
    os.link(other, path)


FILES: dict[str, Damage] = {
    "empty": lambda path, other: path.write_bytes(b""),
    "cut after a byte": lambda path, other: path.write_bytes(path.read_bytes()[:1]),
    "cut in the middle": _cut(0.5),
    "cut at the end": _cut(0.99),
    "without its checksum": lambda path, other: path.write_bytes(path.read_bytes()[: -files._SEAL]),
    "its checksum alone": lambda path, other: path.write_bytes(path.read_bytes()[-files._SEAL :]),
    "zeros": _zeroed(0.0, 1.0),
    "zeros at the start": _zeroed(0.0, 0.2),
    "zeros in the middle": _zeroed(0.4, 0.6),
    "zeros at the end": _zeroed(0.9, 1.0),
    "a bit, first": _flip(0.0),
    "a bit, in the first half": _flip(0.3),
    "a bit, in the second half": _flip(0.7),
    "a bit, last": _flip(1.0),
    "longer": lambda path, other: path.write_bytes(path.read_bytes() + b"more"),
    "twice": lambda path, other: path.write_bytes(2 * path.read_bytes()),
    "huge": lambda path, other: os.truncate(path, 1 << 40),
    "another's contents": lambda path, other: shutil.copyfile(other, path),
    "another's file": _linked,
    "rubbish": lambda path, other: path.write_bytes(os.urandom(5000)),
    "missing": lambda path, other: path.unlink(),
    "a pipe": _instead(lambda path, other: os.mkfifo(path)),
    "a socket": _instead(_socket),
    "a folder": _instead(lambda path, other: path.mkdir()),
    "a full folder": _instead(_full_folder),
    "a link to another": _instead(lambda path, other: path.symlink_to(other)),
    "a link to itself": _instead(lambda path, other: path.symlink_to(path)),
    "a broken link": _instead(lambda path, other: path.symlink_to("/nowhere/at/all")),
    "a link to endless zeros": _instead(lambda path, other: path.symlink_to("/dev/zero")),
    "not readable": lambda path, other: path.chmod(0o000),
    "written by the group": lambda path, other: path.chmod(0o660),
    "written by all": lambda path, other: path.chmod(0o602),
    "somebody else's": lambda path, other: os.chown(path, NOBODY, NOBODY),
    "nothing, sealed": _sealed(lambda own, other: b""),
    "zeros, sealed": _sealed(lambda own, other: bytes(5000)),
    "rubbish, sealed": _sealed(lambda own, other: bytes(range(1, 256)) * 9),
    "not UTF-8, sealed": _sealed(lambda own, other: b'"\xff\xfe"'),
    "not JSON, sealed": _sealed(lambda own, other: b'{"name": '),
    "JSON without end, sealed": _sealed(lambda own, other: b"[" * 100_000),
    "another version, sealed": _sealed(lambda own, other: b'{"version": 99, "library": "x.so"}'),
    "a list, sealed": _sealed(lambda own, other: b'[1, null, {"a": []}]'),
    "a number, sealed": _sealed(lambda own, other: b"77777777777777777777777"),
    "the first half, sealed": _sealed(lambda own, other: own[: len(own) // 2]),
}
_MARKED = ("written by the group", "written by all", "somebody else's")  # one warning each


# -- what happens to a folder ------------------------------------------------------------------------------------------
def _no_folder(make: Callable[[pathlib.Path], object]) -> Damage:
    def replace(path: pathlib.Path, other: pathlib.Path) -> None:
        shutil.rmtree(path)
        make(path)

    return replace


def _in_the_way(name: str, make: Callable[[pathlib.Path], object]) -> Damage:
    def put(path: pathlib.Path, other: pathlib.Path) -> None:
        library = next(path.glob("*.so"), None) or next(path.glob("*.plan"))
        library.unlink()
        make(path / name.format(library.name))

    return put


FOLDERS: dict[str, Damage] = {
    "missing": _no_folder(lambda path: None),
    "empty": _no_folder(lambda path: path.mkdir(mode=0o700)),
    "a file": _no_folder(lambda path: path.write_text("in the way")),
    "a pipe": _no_folder(os.mkfifo),
    "a link to nothing": _no_folder(lambda path: path.symlink_to("/nowhere/at/all")),
    "a link to itself": _no_folder(lambda path: path.symlink_to(path)),
    "a link to an empty one": _no_folder(lambda path: (path.with_name("e").mkdir(mode=0o700), path.symlink_to("e"))),
    "written by the group": lambda path, other: path.chmod(0o770),
    "written by all": lambda path, other: path.chmod(0o777),
    "somebody else's": lambda path, other: os.chown(path, NOBODY, NOBODY),
    "a lock that is a folder": _in_the_way(".lock-{}", lambda path: path.mkdir()),
    "a lock that is a link": _in_the_way(".lock-{}", lambda path: path.symlink_to("/nowhere/at/all")),
    "a lock that is a pipe": _in_the_way(".lock-{}", os.mkfifo),
    "a lock that was left": _in_the_way(".lock-{}", lambda path: path.touch()),
    "what a killed process left": _in_the_way(f".work-{files._here()}-999999999-x", lambda path: path.mkdir()),
}
_REFUSED_FOLDERS = (
    "a file", "a pipe", "a link to nothing", "a link to itself", "written by the group", "written by all",
    "somebody else's",
)  # fmt: skip

PLACES: dict[str, str] = {
    "library": "cpu/*.so", "plan": "plans/*.plan", "flags": "cpu/toolchain-*", "operators": "plans/*.operators",
    "source": "cpu/*.cpp",
}  # fmt: skip
PREBUILT = {"prebuilt library": "cpu/*.so", "prebuilt plan": "plans/*.plan", "prebuilt manifest": "manifest.json"}


@dataclass(frozen=True)
class Case:
    """What happens (`damage`), and where: a place of `PLACES` or `PREBUILT`, or a folder."""

    place: str
    damage: str

    def __str__(self) -> str:
        return f"{self.place}: {self.damage}"

    @property
    def is_refused(self) -> bool:
        """Whether a whole folder is not used: kernels are then this process's own, and a warning says so."""
        return self.place.endswith("/") and self.damage in _REFUSED_FOLDERS

    def apply(self, cache: pathlib.Path) -> None:
        """Do it to a cache."""
        if self.place.endswith("/"):
            FOLDERS[self.damage](cache / self.place, cache)
            return
        found = sorted(cache.glob((PLACES | PREBUILT)[self.place]))
        other = found[-1] if len(found) > 1 else next(p for p in sorted(cache.glob("cpu/*.so")))
        FILES[self.damage](found[0], other)


_GIVEN_AWAY = () if IS_ROOT else ("somebody else's",)  # by root alone
CASES: tuple[Case, ...] = tuple(
    Case(place, damage)
    for places, damages in (((*PLACES, *PREBUILT), FILES), (("cpu/", "plans/"), FOLDERS), (("./",), list(FOLDERS)[:10]))
    for place in places
    for damage in damages
    if damage not in _GIVEN_AWAY
)


# -- what a new process makes of it ------------------------------------------------------------------------------------
_USE = """
import json, os, sys, time, warnings
import torch, fuser
from torch import fx
from fuser import config
from fuser.runtime import launcher
groups = [lambda x, y: torch.relu(x * y + 1) - y, lambda x: torch.softmax(x, -1) * 2]
x, y = torch.arange(12.0).reshape(4, 3) / 7, torch.ones(3) / 3
right = [group(*args).tolist() for group, args in zip(groups, ((x, y), (x,)))]
launcher.wait(60)
def use(cache, prebuilt):
    config.set(cache_dir=cache, prebuilt_cache=prebuilt)
    raised, got = [], []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for group, args in zip(groups, ((x, y), (x,))):
            try:
                handle = fuser.fusion_handle(fuser.register_fusion(fx.symbolic_trace(group)))
                for _ in range(2):
                    result = handle(*args)
                got.append([result.tolist(), handle.hits])
            except Exception as e:
                raised.append(repr(e))
                got.append([None, 0])
    wrong = sum(r is None or not torch.allclose(torch.tensor(r), torch.tensor(w)) for (r, _), w in zip(got, right))
    stats = fuser.stats()
    return dict(wrong=wrong, hits=[h for _, h in got], raised=raised, said=[str(w.message) for w in said],
                made=stats["compiles"], found=stats["restored"], binaries=stats["binaries_made"])
for cache, prebuilt in json.loads(sys.argv[1]):
    began = time.time()
    child = os.fork()
    if child == 0:
        print(json.dumps(use(cache, prebuilt)), flush=True)
        os._exit(0)
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        time.sleep(0.005)
        if time.time() > began + 60:
            os.kill(child, 9)
    print("null", flush=True)  # ends a case, whatever became of it
"""


def use(caches: Sequence[tuple[pathlib.Path, pathlib.Path | str]]) -> list[dict[str, Any] | None]:
    """What a new process found in each cache and prebuilt folder; None if it crashed or hung."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "FUSER_CHECK_IR": "0"}
    asked = json.dumps([(str(cache), str(folder)) for cache, folder in caches])
    done = forked.run(["-c", _USE, asked], env=env)
    assert done.returncode == 0, done.stderr
    out: list[dict[str, Any] | None] = []
    last = None
    for line in done.stdout.splitlines():
        found = json.loads(line)
        if found is None:
            out.append(last)
        last = found
    assert len(out) == len(caches), done.stdout + done.stderr
    return out


def judge(case: Case, cache: pathlib.Path, found: dict[str, Any] | None, again: dict[str, Any] | None) -> list[str]:
    """What is wrong with a case, of which `found` and `again` are the first two processes."""
    out = []
    for what, one in (("first", found), ("second", again)):
        if one is None:
            out.append(f"the {what} process crashed or hung")
            continue
        if one["raised"] or one["wrong"]:
            out.append(f"the {what} process: {one['wrong']} wrong, raised {one['raised']}")
        if one["hits"] != [2, 2]:
            out.append(f"the {what} process: {one['hits']} of [2, 2] calls ran kernels; said {one['said']}")
        marked = case.is_refused or case.damage in _MARKED or case.place == "prebuilt manifest"
        if len(one["said"]) > marked:
            out.append(f"the {what} process said {one['said']}")
    if again is not None and not case.is_refused and (again["made"] or again["binaries"]):
        out.append(f"not rebuilt: the second process made {again['made']} kernels, {again['binaries']} libraries")
    left = [str(p.relative_to(cache)) for p in cache.rglob(".work-*")] if cache.is_dir() else []
    return out + ([f"left behind: {left}"] if left else [])
