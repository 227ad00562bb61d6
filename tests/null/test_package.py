"""The package as it is installed: version, entry point, what a wheel holds."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import fuser
from tests import forked

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def distribution():
    """The metadata of `fuser` as installed in this environment; skips where it is only on the path."""
    try:
        return importlib.metadata.distribution("fuser")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("fuser is on the path, not installed")


def test_version(distribution):
    assert distribution.version == fuser.__version__


def test_entry_point_names_the_backend(distribution):
    (point,) = [p for p in distribution.entry_points if p.group == "torch_dynamo_backends"]
    assert (point.name, point.value) == ("fuser", "fuser.frontends.dynamo:fuser_backend")


def test_torch_finds_the_backend_without_an_import(distribution):
    code = (
        "import sys, torch._dynamo; assert 'fuser' not in sys.modules;"
        "from torch._dynamo.backends.registry import lookup_backend; print(lookup_backend('fuser').__name__)"
    )
    done = forked.run(["-c", code], dynamo=True)
    assert done.stdout.strip() == "fuser_backend", done.stderr


def test_native_launcher_is_built_where_it_can_be(distribution):
    compiler = shutil.which("g++") or shutil.which("clang++")
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not (compiler and header.exists()):
        pytest.skip("no C++ compiler, or no Python.h")
    assert importlib.util.find_spec("fuser.runtime._launcher") is not None


def build(kind: str, folder: Path, out: Path, **env: str) -> set[str]:
    """The names in a "wheel" or "sdist" built from `folder` by the setuptools of this environment."""
    out.mkdir()
    code = f"from setuptools import build_meta; build_meta.build_{kind}({str(out)!r})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, env={**os.environ, **env}
    )
    assert done.returncode == 0, done.stderr
    (archive,) = out.iterdir()
    if kind == "wheel":
        return set(zipfile.ZipFile(archive).namelist())
    with tarfile.open(archive) as tar:
        return {name.partition("/")[2] for name in tar.getnames()}


@pytest.fixture
def copied_tree(tmp_path):
    """What a build needs, copied: a build writes into its tree."""
    pytest.importorskip("setuptools")
    tree = tmp_path / "tree"
    shutil.copytree(ROOT / "fuser", tree / "fuser", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tree)
    return tree


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_every_source_file_is_packed_without_a_compiler(copied_tree, tmp_path, kind):
    """With one, the installation that runs the tests has built the launcher."""
    sources = {
        str(f.relative_to(copied_tree))
        for f in (copied_tree / "fuser").rglob("*")
        if f.suffix in (".py", ".cpp", ".h") or f.name == "py.typed"
    }
    names = build(kind, copied_tree, tmp_path / "out", CC="/nowhere/cc", CXX="/nowhere/c++")
    assert sources - names == set() and not any(n.endswith(".so") for n in names)
