"""Places that change under a process: a file system that fills up, a working directory that is left."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest
import torch

import fuser
from fuser import config
from fuser.cpu import toolchain
from fuser.errors import CompileError
from fuser.runtime import files

needs_compiler = pytest.mark.skipif(not fuser.can_fuse_on_cpu(), reason="needs a C++ compiler")


def runs(number: float) -> int:
    """Kernels made for a new group."""
    before = fuser.num_compiled_kernels()
    handle = fuser.fusion_handle(fuser.register_fusion(torch.fx.symbolic_trace(lambda x: torch.tanh(x) * number)))
    x = torch.randn(3, 5)
    torch.testing.assert_close(handle(x), torch.tanh(x) * number)
    return fuser.num_compiled_kernels() - before


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
def test_a_full_cache_is_left_for_another_place(full):
    with pytest.warns(RuntimeWarning, match="no space is left"):
        assert runs(1.03125) == 1
    assert not list(full.rglob("*.so"))


@needs_compiler
def test_a_compiler_that_finds_no_room_tries_another_place(tmp_path, monkeypatch):
    run = toolchain.run_compiler

    def no_room(command):
        if str(tmp_path) in command[command.index("-o") + 1]:
            raise CompileError("g++ cannot work", "ld: final close failed: Disk quota exceeded")
        run(command)

    monkeypatch.setattr(toolchain, "run_compiler", no_room)
    with config.override(cache_dir=str(tmp_path)), pytest.warns(RuntimeWarning, match="the quota of"):
        assert runs(1.0625) == 1


def test_folders_stay_where_they_are(tmp_path):
    script = """
import os, fuser
from fuser import config
os.chdir("/")
print(config.cache_dir, config.prebuilt_cache)
"""
    env = os.environ | {"FUSER_CACHE_DIR": "kept", "FUSER_PREBUILT_CACHE": f"one{os.pathsep}/two",
                        "PYTHONPATH": str(pathlib.Path(__file__).parents[2])}  # fmt: skip
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stdout.split() == [f"{tmp_path}/kept", f"{tmp_path}/one{os.pathsep}/two"], done.stderr
