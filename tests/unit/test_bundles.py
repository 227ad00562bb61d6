"""`fuser.cache` and bundles: kernels found under another path and user, without a compiler, and misses that say why."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import stat
import time
from typing import Any

import pytest
import torch
from torch import fx

import fuser
from fuser import __main__ as command
from fuser import bundles, cache, config, notices, plans
from fuser.runtime import archive, eviction, files, machine, prebuilt
from fuser.runtime.archive import ArchiveError
from tests import forked

pytestmark = pytest.mark.skipif(not fuser.can_fuse_on_cpu(), reason="needs a C++ compiler")
ROOT = pathlib.Path(__file__).resolve().parents[2]
NOBODY = 65534

# A new process: results of two groups, then how many kernels were made and found, and the warnings.
_USE = """
import json, os, sys, warnings
import torch, fuser
from torch import fx
from fuser.runtime import launcher
launcher.prepare()
user = int(sys.argv[1])
if user:
    os.setgroups([]); os.setgid(user); os.setuid(user)
groups = [lambda x, y: torch.relu(x * y + 1) - y, lambda x: torch.softmax(x, -1)]
x, y = torch.arange(12.0).reshape(4, 3), torch.ones(3)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    for group, args in zip(groups, ((x, y), (x,))):
        handle = fuser.fusion_handle(fuser.register_fusion(fx.symbolic_trace(group)))
        for _ in range(2):
            assert torch.allclose(handle(*args), group(*args))
stats = fuser.stats()
heavy = any(m.startswith("fuser.lowering") for m in sys.modules)
native = launcher.wait(60)
print(json.dumps([stats["compiles"], stats["restored"], stats["hits"], heavy, native, [str(w.message) for w in said]]))
"""


def use(user: int = 0, **environment: str) -> list[Any]:
    """[kernels made, kernels found, hits, whether lowering was imported, whether the launcher is native, warnings]."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "FUSER_CHECK_IR": "0", "PYTHONDONTWRITEBYTECODE": "1", **environment}
    done = forked.run(["-c", _USE, str(user)], env=env, timeout=240, cwd="/")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    made = tmp_path_factory.mktemp("warm") / "cache"
    assert use(FUSER_CACHE_DIR=str(made))[:3] == [2, 0, 4]
    return made


@pytest.fixture(scope="module")
def bundle(warm: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("bundle") / "kernels.bundle"
    with config.override(cache_dir=str(warm)):
        made = cache.export(path)
    assert made.kernels == {"cpu": 2, "cuda": 0} and not made.left_out and not made.differs
    return path


@pytest.fixture
def here(warm: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy of the warm cache, used by this process."""
    shutil.copytree(warm, tmp_path / "cache")
    with config.override(cache_dir=str(tmp_path / "cache"), check_ir=False):
        yield tmp_path / "cache"
    prebuilt.forget()


# -- found elsewhere ---------------------------------------------------------------------------------------------------
def test_a_bundle_hits_without_a_compiler(bundle: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Under another path and user; only read, and with the native launcher."""
    place = tmp_path / "image" / "kernels"
    with config.override(cache_dir=""):
        made = cache.import_(bundle, to=str(place))
    assert made.path == place and not made.differs
    before = {p: p.read_bytes() for p in place.rglob("*") if p.is_file()}
    for p in (place, *place.rglob("*")):
        p.chmod(0o555 if p.is_dir() else 0o444)
        assert p.is_dir() or p.suffix == ".cpp" or files.read(p) is not None
    environment = {"FUSER_CACHE_DIR": "", "FUSER_PREBUILT_CACHE": str(place), "CXX": "/nowhere/g++"}
    assert use(**environment) == [0, 2, 4, False, True, []]
    assert {p: p.read_bytes() for p in place.rglob("*") if p.is_file()} == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_a_bundle_of_root_hits_for_another_user(bundle: pathlib.Path, tmp_path: pathlib.Path) -> None:
    place = tmp_path / "kernels"
    with config.override(cache_dir=""):
        cache.import_(bundle, to=str(place))
    for p in place.parents:
        if p != p.parent and stat.S_IMODE(p.stat().st_mode) & 0o005 != 0o005:
            p.chmod(0o755)
    home = tmp_path / "home"
    home.mkdir()
    os.chown(home, NOBODY, NOBODY)
    environment = {"HOME": str(home), "FUSER_PREBUILT_CACHE": str(place), "CXX": "/nowhere/g++"}
    assert use(NOBODY, FUSER_CACHE_DIR=str(home / "cache"), **environment) == [0, 2, 4, False, True, []]


def test_a_bundle_is_found_in_the_cache_of_its_import(bundle: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with config.override(cache_dir=str(tmp_path / "cache")):
        made = cache.import_(bundle)
        assert cache.import_(bundle).path == made.path  # once
        damaged = next(made.path.glob("cpu/*.so"))
        damaged.write_bytes(b"")
        assert [p.name for p in cache.verify()] == [str(damaged.relative_to(tmp_path / "cache"))]
        assert cache.import_(bundle).path == made.path and not cache.verify()
        assert [(e.kind, e.serves) for e in cache.entries()] == [("bundle", "used here")]
    prebuilt.forget()
    assert not list(tmp_path.rglob(".work-*"))
    assert use(FUSER_CACHE_DIR=str(tmp_path / "cache"))[:5] == [0, 2, 4, False, True]
    with config.override(cache_dir=str(tmp_path / "cache")):
        assert cache.clear() > 0 and not cache.entries()


def test_what_is_not_prebuilt_runs_by_aten_with_one_warning(bundle: pathlib.Path, tmp_path: pathlib.Path) -> None:
    place = tmp_path / "kernels"
    cache.import_(bundle, to=str(place))
    next(place.glob("plans/*.plan")).unlink()
    made, found, hits, _, _, said = use(FUSER_CACHE_DIR="", FUSER_PREBUILT_CACHE=str(place), CXX="/nowhere/g++")
    assert (made, found, hits) == (0, 1, 2) and len(said) == 1 and "not among the prebuilt ones" in said[0]


def test_equal_caches_make_equal_bundles(here: pathlib.Path, bundle: pathlib.Path, tmp_path: pathlib.Path) -> None:
    cache.export(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == bundle.read_bytes()


def test_kernels_of_others_are_left_out(here: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: Any) -> None:
    first, second = sorted(here.glob("plans/*.plan"))
    first.rename(first.with_name(first.name[:33] + "0" * 16 + ".plan"))
    files.write(first.with_name(first.name[:33] + "0" * 16 + ".plan"), files.read(second) or b"")
    second.write_bytes(b"")
    made = cache.export(tmp_path / "a")
    assert made.kernels["cpu"] == 0
    assert made.left_out == {"of another compiler or processor": 1, "not whole": 1}
    with config.override(cache_dir=""), pytest.raises(ValueError, match="no cache to export"):
        cache.export(tmp_path / "b")


# -- misses ------------------------------------------------------------------------------------------------------------
def _remade(bundle: pathlib.Path, path: pathlib.Path, change: Any) -> pathlib.Path:
    with archive.Archive(bundle) as packed:
        members = {name: packed.read(name) for name in packed.members}
    manifest = json.loads(members[prebuilt.MANIFEST])
    change(manifest)
    archive.write(path, {**members, prebuilt.MANIFEST: json.dumps(manifest).encode()})
    return path


def _set(*path: str, value: Any) -> Any:
    def change(manifest: Any) -> None:
        for step in path[:-1]:
            manifest = manifest[step]
        manifest[path[-1]] = value

    return change


MISSES = {
    "architecture": (_set("machine", "architecture", value="riscv64"), "riscv64 there"),
    "isa": (_set("machine", "isa", value=["avx9000"]), "with avx9000 there, without here"),
    "libc": (_set("machine", "libc", value="glibc 9.99"), "glibc 9.99 there"),
    "torch": (_set("made", "torch", value="1.0"), "1.0 there"),
    "sources of fuser": (_set("made", "sources", value="0"), "0 there"),
}


@pytest.mark.parametrize("field", MISSES)
def test_another_machine_is_a_miss_that_names_its_field(
    bundle: pathlib.Path, tmp_path: pathlib.Path, capsys: Any, field: str
) -> None:
    change, text = MISSES[field]
    other = _remade(bundle, tmp_path / "other", change)
    assert [d.field for d in cache.differences(other)] == [field]
    with config.override(cache_dir=str(tmp_path / "cache")):
        assert [d.field for d in cache.import_(other).differs] == [field]
        assert command.main(["cache", "explain-miss", str(other)]) == 1
        assert capsys.readouterr().out.startswith(f"{field}: {text}")
        if field in ("architecture", "isa", "libc"):  # the others are part of each plan's name
            assert len(prebuilt.all_folders()) == 1 and prebuilt.for_cpu() == ()
    prebuilt.forget()


@pytest.mark.parametrize("cuda", [(90,), (80, 90)])
def test_another_sm_is_a_miss_that_says_so(
    bundle: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: Any, cuda: Any
) -> None:
    other = _remade(bundle, tmp_path / "other", lambda m: m.update(capabilities=list(cuda), triton="3.9"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda n=0: (7, 5))
    monkeypatch.setattr(bundles.cuda_toolchain, "triton_version", lambda: "3.5")
    found = {d.field: d for d in cache.differences(other)}
    assert found["sm"].here == "75" and found["sm"].kept == " ".join(map(str, cuda)) and found["triton"].kept == "3.9"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda n=0: (9, 0) if n else (7, 5))
    monkeypatch.setattr(bundles.cuda_toolchain, "triton_version", lambda: None)
    assert cache.differences(other) == ()


def test_more_instructions_and_a_newer_library_are_no_hindrance(monkeypatch: Any) -> None:
    old = {"architecture": "x86_64", "isa": ["avx2", "fma"], "libc": "glibc 2.31"}
    new = {"architecture": "x86_64", "isa": ["avx2", "avx512f", "fma"], "libc": "glibc 2.36"}
    for kept, here, fields in ((old, new, []), (new, old, ["isa", "libc"]), (old, {**old, "libc": "musl"}, ["libc"])):
        monkeypatch.setattr(machine, "facts", lambda here=here: here)
        assert [d.field for d in machine.differences(kept)] == fields


def test_a_miss_names_what_differs_from_the_most_similar_plan(here: pathlib.Path) -> None:
    key = fuser.register_fusion(fx.symbolic_trace(lambda x, y: torch.relu(x * y + 1) - y))
    x, y = torch.zeros(4, 3), torch.zeros(3)
    found = cache.explain_miss(key, [x, y])
    assert found.differences == () and str(found).startswith("found: ")
    for inputs, fields in (([torch.zeros(5, 3), y], ["input 0"]), ([x, 2.0], ["input 1"])):
        assert [d.field for d in cache.explain_miss(key, inputs).differences] == fields
    with config.override(numerics="eager"):
        other = fuser.register_fusion(fx.symbolic_trace(lambda x, y: torch.relu(x * y + 1) - y))
    found = cache.explain_miss(other, [x, y])
    assert [str(d) for d in found.differences] == ["settings.numerics: fast there, eager here"]
    with config.override(cache_dir=""):
        assert str(cache.explain_miss(key, [x, y])) == "no plan is kept"
    for k in (key, other):
        fuser.unregister_fusion(k)


# -- hostile -----------------------------------------------------------------------------------------------------------
def _with(name: str, data: bytes = b"x") -> Any:
    return lambda members: members.update({name: data})


HOSTILE = {
    "a hidden file": (_with("cpu/x.so"), "it holds cpu/x.so"),
    "another folder": (_with("bin/0123456789abcdef0123456789abcdef.so"), "it holds bin/"),
    "code of Python": (_with("cuda/0123456789abcdef0123456789abcdef.py"), "it holds cuda/"),
    "flags": (_with("cpu/toolchain-0123456789abcdef"), "it holds cpu/toolchain"),
    "no manifest": (lambda m: m.pop(prebuilt.MANIFEST), "it has no manifest.json"),
    "a manifest of bytes": (_with(prebuilt.MANIFEST, b"\xff\xfe"), "its manifest is of another form"),
    "a manifest of another version": (_with(prebuilt.MANIFEST, b'{"format": 9}'), "format 9, where 1 is read"),
    "a manifest without end": (_with(prebuilt.MANIFEST, b"[" * 100000), "its manifest is of another form"),
    "a manifest of numbers": (_with(prebuilt.MANIFEST, b'{"format": 1, "machine": 3}'), "of another form"),
}


@pytest.mark.parametrize("how", HOSTILE)
def test_a_hostile_bundle_is_refused_and_nothing_is_written(
    bundle: pathlib.Path, tmp_path: pathlib.Path, capsys: Any, how: str
) -> None:
    change, why = HOSTILE[how]
    with archive.Archive(bundle) as packed:
        members = {name: packed.read(name) for name in packed.members}
    change(members)
    archive.write(tmp_path / "hostile", members)
    with config.override(cache_dir=str(tmp_path / "cache")):
        with pytest.raises(ArchiveError, match=why):
            cache.import_(tmp_path / "hostile")
        assert command.main(["cache", "import", str(tmp_path / "hostile")]) == 2
    assert why in capsys.readouterr().err and [p.name for p in tmp_path.iterdir()] == ["hostile"]


def test_a_plan_of_a_bundle_may_not_lead_out_of_it(bundle: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A whole bundle whose plans name libraries elsewhere, or are no plans: nothing of them is used."""
    with archive.Archive(bundle) as packed:
        members = {name: packed.read(name) for name in packed.members}
    names = sorted(n for n in members if n.endswith(".plan"))
    kept = json.loads(members[names[0]])
    members[names[0]] = json.dumps({**kept, "library": "../../elsewhere/planted.so"}).encode()
    members[names[1]] = b"[" * 100000
    archive.write(tmp_path / "hostile", members)
    cache.import_(tmp_path / "hostile", to=str(tmp_path / "kernels"))
    made, found, *_ = use(FUSER_CACHE_DIR=str(tmp_path / "own"), FUSER_PREBUILT_CACHE=str(tmp_path / "kernels"))
    assert (made, found) == (2, 0)


def test_a_key_is_asked_for(here: pathlib.Path, tmp_path: pathlib.Path) -> None:
    cache.export(tmp_path / "signed", b"a secret")
    with pytest.raises(ArchiveError, match="not one of the key"):
        cache.import_(tmp_path / "signed", b"another")
    assert cache.import_(tmp_path / "signed", b"a secret").kernels["cpu"] == 2


@pytest.mark.parametrize("what", ["", "cpu", "plans", prebuilt.MANIFEST])
def test_prebuilt_kernels_that_others_may_write_are_refused(
    bundle: pathlib.Path, tmp_path: pathlib.Path, what: str, monkeypatch: Any
) -> None:
    place = tmp_path / "kernels"
    cache.import_(bundle, to=str(place))
    (place / what).chmod(0o777)
    monkeypatch.setattr(notices, "_said", {})
    refused = pytest.warns(RuntimeWarning, match="can be written by other users")
    with config.override(prebuilt_cache=str(place)), refused as said:
        assert prebuilt.all_folders() == ()
    assert len(said) == 1
    prebuilt.forget()


def test_folders_that_are_no_bundles_are_one_warning(tmp_path: pathlib.Path, monkeypatch: Any) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(notices, "_said", {})
    named = os.pathsep.join((str(tmp_path / "empty"), str(tmp_path / "missing")))
    with config.override(prebuilt_cache=named), pytest.warns(RuntimeWarning, match="are not used: ") as said:
        assert prebuilt.all_folders() == () == prebuilt.all_folders()
    assert len(said) == 2
    with pytest.raises(FileExistsError, match="not empty"):
        (tmp_path / "empty" / "x").touch()
        bundles._target("0", str(tmp_path / "empty"))


# -- order -------------------------------------------------------------------------------------------------------------
def test_commands(here: pathlib.Path, capsys: Any, tmp_path: pathlib.Path) -> None:
    def say(*words: str) -> tuple[int, str]:
        code = command.main(["cache", *words])
        return code, capsys.readouterr().out

    code, listed = say("list")
    assert code == 0 and "library" in listed and "float32[4, 3], float32[3]): mul add relu sub" in listed
    kinds = [json.loads(line)["kind"] for line in say("list", "--json")[1].splitlines()]
    kinds = sorted(k for k in kinds if k != "flags")  # of which there are none for a usual compiler
    assert kinds == ["library", "library", "operators", "plan", "plan", "source", "source", "sources"]
    assert say("verify") == (0, "all entries are whole\n")
    library = next(here.glob("cpu/*.so"))
    library.write_bytes(library.read_bytes()[:-1])
    code, text = say("verify", "--remove")
    assert code == 1 and f"cpu/{library.name}: its checksum is not that of its name" in text and not library.exists()
    assert "is missing" in text and len(list(here.glob("plans/*.plan"))) == 1 and say("verify")[0] == 0
    assert say("explain-miss") == (0, "every plan of the cache can be found here\n")
    code, text = say("export", str(tmp_path / "b"))
    assert code == 0 and "1 kernels of the CPU" in text
    assert say("import", str(tmp_path / "b"))[0] == 0
    assert say("clear", "--kind", "operators", "--unused-days", "1") == (0, "0 B removed\n")
    assert say("clear", "--kind", "nonsense")[0] == 2
    (here / "reproducers").mkdir()
    (here / "reproducers" / "mine.py").touch()
    assert say("clear")[0] == 0 and [e.kind for e in cache.entries()] == ["reproducer"]


def test_stale_plans_say_which_field_differs(here: pathlib.Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(torch, "__version__", "9.9")
    monkeypatch.setattr(plans, "version", plans.version.__wrapped__)
    ((fields, number),) = cache.stale().items()
    assert number == 2 and fields[0].startswith("torch: ") and fields[0].endswith("9.9 here")


def test_the_least_recently_used_leave_first(tmp_path: pathlib.Path) -> None:
    now = time.time()
    for n in range(20):
        for name in (f"cpu/{n:032x}.so", f"cpu/{n:032x}.cpp"):
            path = files.folder(str(tmp_path), "cpu") / os.path.basename(name)
            files.write(path, bytes(1000 - files._SEAL))
            os.utime(path, (now - 1000 + n, now - 5000))
    files.write(files.folder(str(tmp_path), "plans") / "young", bytes(5000))
    for left in (".work-x", ".lock-x"):
        (tmp_path / "cpu" / left).mkdir()
    assert eviction.trim(str(tmp_path), 1 << 20) == 0
    assert files.read(tmp_path / "cpu" / f"{0:032x}.so") is not None  # used now, so it stays
    removed = eviction.trim(str(tmp_path), 30000)
    left = {int(p.stem, 16) for p in (tmp_path / "cpu").glob("[0-9]*")}
    assert removed == 20000 and left == {0, *range(11, 20)} and (tmp_path / "plans" / "young").exists()
    assert len(list((tmp_path / "cpu").glob(".*"))) == 2
    assert eviction.trim(str(tmp_path), 0) == 18000  # what was used in the last minute stays
    assert {p.name for p in tmp_path.rglob("*") if p.is_file()} == {"young", f"{0:032x}.so", f"{0:032x}.cpp"}


def test_a_process_keeps_to_the_limit_while_it_runs(tmp_path: pathlib.Path) -> None:
    """Entries that leave while a process uses them are made again: no result is wrong, nothing is raised."""
    script = """
import threading, time, torch, fuser
from torch import fx
from fuser.runtime import eviction
eviction._YOUNG_SECONDS = -1.0
stop, removed = threading.Event(), []
def evict():
    while not stop.is_set():
        removed.append(eviction.trim(fuser.config.cache_dir, 1))
        time.sleep(0.001)
thread = threading.Thread(target=evict, daemon=True)
thread.start()
fuser.config.library_limit = 2
x = torch.randn(6, 5)
groups = [lambda x, n=n: (x + n).exp() * 3 for n in range(5, 9)]
handles = [fuser.fusion_handle(fuser.register_fusion(fx.symbolic_trace(group))) for group in groups]
for turn in range(3):
    for group, handle in zip(groups, handles):
        torch.testing.assert_close(handle(x), group(x))
stop.set()
thread.join()
print(sum(removed) > 0, all(handle.hits == 3 for handle in handles))
"""
    env = os.environ | {"PYTHONPATH": str(ROOT), "FUSER_CHECK_IR": "0", "FUSER_CACHE_DIR": str(tmp_path)}
    done = forked.run(["-W", "error", "-c", script], env, timeout=120)
    assert done.returncode == 0 and done.stdout == "True True\n", done.stderr
