"""Getting the native launcher: built once, shared by processes, replaced by Python where it cannot be built."""

from __future__ import annotations

import os
import pathlib
import textwrap

import pytest

from tests import forked

ROOT = pathlib.Path(__file__).parents[2]

COMMON = """
import sys, time, warnings
import torch
from fuser.runtime import launcher, native_build
native_build.installed = lambda: None  # what was built at installation is not under test here
native_build.FLAGS = ("-O0", *native_build.FLAGS[1:])  # nor is how fast it runs: -O2 takes twice as long
"""


def run(code: str, cache: pathlib.Path | str, **environment: str) -> list[str]:
    """The lines that `code` prints in a fresh process."""
    env = os.environ | {"FUSER_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)} | environment
    command = ["-c", COMMON + textwrap.dedent(code)]
    done = forked.run(command, env=env, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


ASK = "print(launcher.wait(60), launcher.is_native(), launcher.reason())"


def test_built_once_then_found(tmp_path):
    assert run(ASK, tmp_path) == ["True True None"]
    (built,) = (tmp_path / "native").iterdir()
    before = built.stat().st_mtime_ns
    assert run("launcher.prepare(); print(launcher.is_native())", tmp_path) == ["True"]  # at once, without a thread
    assert built.stat().st_mtime_ns == before


def test_no_cache_folder(tmp_path, monkeypatch):
    assert run(ASK, "", TMPDIR=str(tmp_path)) == ["True True None"]
    assert not any(tmp_path.iterdir())


def test_unwritable_cache_folder(tmp_path):
    (tmp_path / "file").write_text("in the way")
    assert run(ASK, tmp_path / "file") == ["True True None"]


def test_several_processes_at_once(tmp_path):
    code = f"""
    import os
    children = []
    for _ in range(3):
        children.append(os.fork())
        if not children[-1]:
            {ASK}
            sys.stdout.flush()
            os._exit(0)
    assert all(os.waitpid(child, 0)[1] == 0 for child in children)
    """
    assert run(code, tmp_path) == ["True True None"] * 3
    assert len(list((tmp_path / "native").iterdir())) == 1


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (None, "does not exist"),
        ("echo 'no room on device' >&2; exit 3", "no room on device"),
        ("exec sleep 30", "longer than 0.5 s"),
        ("touch $(echo \"$@\" | sed 's/.* -o //')", "could not be built"),
    ],
    ids=["missing", "fails", "hangs", "writes nothing"],
)
def test_without_a_working_compiler(tmp_path, script, expected):
    compiler = tmp_path / "compiler"
    if script is not None:
        compiler.write_text(f"#!/bin/sh\n{script}\n")
        compiler.chmod(0o755)
    code = """
    import os, pathlib
    from tests.unit import runtime_support as support
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        handle = launcher.make_handle(lambda args, status: ("slow", args, status))
        native = launcher.wait(60)
        print(native, type(handle).__module__, handle(1, 2), handle.misses)
        print(len(seen), launcher.reason())
        del os.environ["CXX"]
        library = support.compile_library(pathlib.Path(%r))  # by the machine's own compiler
        for _ in range(2):
            launcher.make_handle(print).add_kernel(support.mul_add(), library)
        print(*(w.message for w in seen))
    """
    cache = tmp_path / "cache"
    lines = run(code % str(tmp_path), cache, CXX=str(compiler), FUSER_COMPILE_TIMEOUT_SECONDS="0.5")
    assert lines[0] == "False fuser.runtime.launcher ('slow', (1, 2), 0) 1"
    assert lines[1].startswith("0 ") and expected in lines[1]
    assert lines[2] == f"fuser: calls go through the slower Python launcher, because {lines[1][2:]}"
    assert not list(cache.glob("native/*.so")) and not list(cache.glob("native/.*"))


def test_handles_change_over(tmp_path):
    """A handle made while the native launcher is being built runs in Python, then natively, with all it had."""
    code = """
    import pathlib
    from tests.unit import runtime_support as support
    compile = native_build._compile
    def slower(*args):
        while not go: time.sleep(0.01)
        return compile(*args)
    go = []
    native_build._compile = slower
    launcher.prepare()
    handle = launcher.make_handle(lambda args, status: "slow")
    library = support.compile_library(pathlib.Path(%r))
    handle.add_kernel(support.mul_add(), library)
    x = torch.ones(4)
    print(handle(x, x, x).tolist(), handle(1), launcher.is_native(), handle.hits, handle.misses, handle.kernel_hits)
    go.append(1)
    launcher.wait(60)
    while type(handle._target).__module__ == "fuser.runtime.python_launcher": time.sleep(0.01)
    print(handle(x, x, x).tolist(), handle(1), launcher.is_native(), handle.hits, handle.misses, handle.kernel_hits)
    handle.add_kernel(support.temporaries(), library)
    print(handle(x).tolist(), handle.kernel_count, handle.kernel_hits, handle.hits)
    print(type(launcher.make_handle(print)).__module__)
    """
    assert run(code % str(tmp_path), tmp_path / "cache") == [
        "[2.0, 2.0, 2.0, 2.0] slow False 1 1 (1,)",
        "[2.0, 2.0, 2.0, 2.0] slow True 2 2 (2,)",
        "[2.0, 2.0, 2.0, 2.0] 2 (2, 1) 3",
        "fuser.runtime._launcher",
    ]


def test_cold_start_is_not_held_up(tmp_path):
    """Making a handle never waits for the compiler."""
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\nexec sleep 30\n")
    compiler.chmod(0o755)
    code = """
    handle = launcher.make_handle(print)
    print(launcher.is_native(), launcher.reason(), launcher._done.is_set())
    """
    assert run(code, tmp_path, CXX=str(compiler)) == ["False None False"]
