"""Every kind of damage to every kind of file of the cache: results are right, nothing is raised, all is rebuilt."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import sys

import pytest

import fuser
from fuser import cache, config
from fuser.cpu import toolchain
from tests import damage, forked
from tests.damage import CASES, Case

pytestmark = pytest.mark.skipif(not fuser.can_fuse_on_cpu(), reason="needs a C++ compiler")
SAMPLE = 121  # CI runs every 121st case
GROUP = 12  # cases of one process


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with a warm cache, a bundle of it, and the folder into which that was unpacked."""
    place = tmp_path_factory.mktemp("damage")
    first, second = damage.use([(place / "cache", "")] * 2)
    assert first is not None and first["made"] == 2 and first["hits"] == [2, 2]
    assert second is not None and second["found"] == 2 and not second["made"] and not second["said"]
    with config.override(cache_dir=str(place / "cache")):
        toolchain._probe.cache_clear()
        toolchain.flags_for(toolchain.find_compiler())  # a usual compiler is not asked before a kernel fails
        cache.export(place / "bundle")
        cache.import_(place / "bundle", to=str(place / "prebuilt"))
    return place


def test_there_are_enough_kinds() -> None:
    assert len(damage.FILES) + len(damage.FOLDERS) >= 58 and len(CASES) >= 300


CHOSEN = CASES if os.environ.get("FUSER_TEST_ALL") == "1" else CASES[::SAMPLE]
GROUPS = [CHOSEN[at : at + GROUP] for at in range(0, len(CHOSEN), GROUP)]


@pytest.mark.parametrize("cases", GROUPS, ids=lambda cases: str(cases[0]))
def test_damage_is_rebuilt(warm: pathlib.Path, tmp_path: pathlib.Path, cases: tuple[Case, ...]) -> None:
    places: list[tuple[pathlib.Path, pathlib.Path | str]] = []
    for number, case in enumerate(cases):
        own, folder = tmp_path / str(number) / "cache", ""
        if case.place in damage.PREBUILT:
            folder = str(shutil.copytree(warm / "prebuilt", tmp_path / str(number) / "prebuilt"))
            case.apply(pathlib.Path(folder))
        else:
            case.apply(shutil.copytree(warm / "cache", own))
        places.append((own, folder))
    found = damage.use([place for place in places for _ in range(2)])
    wrong = {}
    for case, (own, _), first, second in zip(cases, places, found[::2], found[1::2], strict=True):
        if problems := damage.judge(case, own, first, second):
            wrong[str(case)] = problems
    assert not wrong, "\n".join(f"{case}: {'; '.join(problems)}" for case, problems in wrong.items())


@pytest.mark.parametrize("kind", damage.FILES)
def test_a_damaged_bundle_is_refused(warm: pathlib.Path, tmp_path: pathlib.Path, kind: str) -> None:
    if not damage.IS_ROOT and kind == "somebody else's":
        pytest.skip("only root gives files away")
    path = shutil.copy(warm / "bundle", tmp_path / "bundle")
    damage.FILES[kind](pathlib.Path(path), next((warm / "cache").glob("cpu/*.so")))
    with config.override(cache_dir=str(tmp_path / "cache")):
        if damage.IS_ROOT and kind == "not readable":
            assert cache.import_(path).kernels["cpu"] == 2
            return
        with pytest.raises((cache.ArchiveError, OSError)) as refused:
            cache.import_(path)
    assert str(path) in str(refused.value) and not (tmp_path / "cache").exists()


_MODULE = """
#include <Python.h>
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_launcher", nullptr, -1, nullptr};
PyMODINIT_FUNC PyInit__launcher() { return PyModule_Create(&module); }
"""
_BUILD = """
import json, os, pathlib, sys, warnings
warnings.simplefilter("error")
from fuser.runtime import native_build
native_build.SOURCE = pathlib.Path(sys.argv[1])
for cache in sys.argv[2:]:
    child = os.fork()
    if child == 0:
        found = native_build.cached(cache) is not None
        print(json.dumps([found, native_build.build(cache).__name__]), flush=True)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        print("null", flush=True)
"""
LAUNCHERS = [k for k in damage.FILES if k not in damage._MARKED and k != "not readable"]


def test_a_damaged_launcher_is_rebuilt(tmp_path: pathlib.Path) -> None:
    (tmp_path / "source").mkdir()
    source = tmp_path / "source" / "launcher.cpp"
    source.write_text(_MODULE)
    kinds = LAUNCHERS if os.environ.get("FUSER_TEST_ALL") == "1" else ["the first half, sealed", "zeros", "a pipe"]

    def run(*caches: pathlib.Path) -> list[list[object] | None]:
        env = {**os.environ, "PYTHONPATH": str(damage.ROOT)}
        command = ["-c", _BUILD, str(source), *map(str, caches)]
        done = forked.run(command, env=env, timeout=500)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    name = "fuser.runtime._launcher"
    assert run(*[tmp_path / "warm"] * 2) == [[False, name], [True, name]]
    other = next(p for p in pathlib.Path(sys.prefix).rglob("*.so"))
    for kind in kinds:
        damaged = shutil.copytree(tmp_path / "warm", tmp_path / kind)
        damage.FILES[kind](next(damaged.glob("native/*.so")), other)
    found = run(*(tmp_path / kind for kind in kinds for _ in range(2)))
    expected = [[False, name], [True, name]] * len(kinds)
    wrong = {kinds[n // 2]: f for n, (f, e) in enumerate(zip(found, expected, strict=True)) if f != e}
    assert not wrong
