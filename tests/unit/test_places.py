"""Places that change under a process: a file system that fills up, a working directory that is left."""

from __future__ import annotations

import os
import pathlib
import shlex
import signal

import pytest
import torch

import fuser
from fuser import config
from fuser.cpu import toolchain
from fuser.runtime import files
from tests import forked

ROOT = pathlib.Path(__file__).parents[2]
needs_compiler = pytest.mark.skipif(not fuser.can_fuse_on_cpu(), reason="needs a C++ compiler")


def runs(registry, number: float) -> int:
    """Kernels made for a new group."""
    handle = fuser.fusion_handle(fuser.register_fusion(torch.fx.symbolic_trace(lambda x: torch.tanh(x) * number)))
    x = torch.randn(3, 5)
    torch.testing.assert_close(handle(x), torch.tanh(x) * number)
    return registry.compiled.value


@pytest.fixture
def full(tmp_path, monkeypatch):
    """A cache on a file system without room; all others have some."""
    statvfs = os.statvfs

    def found(path):
        values = list(statvfs("/"))
        if tmp_path in (pathlib.Path(path), *pathlib.Path(path).parents):
            values[4] = 3  # f_bavail
        return os.statvfs_result(values)

    monkeypatch.setattr(files.os, "statvfs", found)
    toolchain._probe.cache_clear()
    with config.override(cache_dir=str(tmp_path)):
        yield tmp_path
    toolchain._probe.cache_clear()


@needs_compiler
def test_a_full_cache_is_left_for_another_place(full, registry):
    with pytest.warns(RuntimeWarning, match="no space is left"):
        assert runs(registry, 1.03125) == 1
    assert not list(full.rglob("*.so"))


@needs_compiler
def test_a_compiler_that_finds_no_room_tries_another_place(tmp_path):
    """In a process of its own, by a compiler that writes everywhere but in the cache; its first source is no kernel."""
    cache, compiler = tmp_path / "cache", tmp_path / "g++"
    said = "ld: final close failed: Disk quota exceeded"
    real = shlex.join(toolchain.find_compiler())
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *"-o {cache}"*) echo "{said}" >&2; exit 1;; esac\nexec {real} "$@"\n')
    compiler.chmod(0o755)
    script = """
import torch, fuser
handle = fuser.fusion_handle(fuser.register_fusion(torch.fx.symbolic_trace(lambda x: torch.tanh(x) * 2)))
x = torch.randn(3, 5)
torch.testing.assert_close(handle(x), torch.tanh(x) * 2)
print(fuser.num_compiled_kernels())
"""
    env = os.environ | {"FUSER_CACHE_DIR": str(cache), "CXX": str(compiler), "FUSER_STRICT": "0"}
    done = forked.run(["-c", script], cwd=ROOT, env=env)
    assert (done.stdout.strip(), done.returncode) == ("1", 0), done.stderr
    assert done.stderr.count("the quota of") == 1
    assert not list(cache.rglob("*.so"))


@needs_compiler
def test_a_cache_with_room_needs_no_other_place(tmp_path):
    """A process that is killed leaves nothing outside of the cache, where no later one would look for it."""
    (tmp_path / "temporary").mkdir()
    script = """
import os, signal, torch, fuser
handle = fuser.fusion_handle(fuser.register_fusion(torch.fx.symbolic_trace(lambda x: torch.tanh(x) * 3)))
handle(torch.randn(3, 5))
assert fuser.num_compiled_kernels() == 1
os.kill(os.getpid(), signal.SIGKILL)
"""
    env = os.environ | {"FUSER_CACHE_DIR": str(tmp_path / "cache"), "TMPDIR": str(tmp_path / "temporary")}
    done = forked.run(["-c", script], cwd=ROOT, env=env)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert list((tmp_path / "cache").rglob("*.so")) and not list((tmp_path / "temporary").iterdir())


def test_folders_stay_where_they_are(tmp_path):
    script = """
import os, fuser
from fuser import config
os.chdir("/")
print(config.cache_dir, config.prebuilt_cache)
"""
    env = os.environ | {"FUSER_CACHE_DIR": "kept", "FUSER_PREBUILT_CACHE": f"one{os.pathsep}/two",
                        "PYTHONPATH": str(ROOT)}  # fmt: skip
    done = forked.run(["-c", script], cwd=tmp_path, env=env)
    assert done.stdout.split() == [f"{tmp_path}/kept", f"{tmp_path}/one{os.pathsep}/two"], done.stderr
