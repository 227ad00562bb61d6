"""Machines without a compiler: results are eager's, one warning names it, and calls go straight to ATen.

What else a machine may lack is in the table of `faults.py`.
"""

from __future__ import annotations

import ast
import os
import pathlib
import textwrap

import pytest

from fuser import notices
from fuser.errors import CompileError
from fuser.runtime import compilers
from tests import forked

ROOT = pathlib.Path(__file__).parents[2]

COMMON = """
import os, sys, resource, warnings
import torch, fuser
from torch import fx
from fuser import interface
from fuser.runtime import launcher, native_build, process
def fn(x, y): return torch.relu(x * y + 1).sum(-1)
def other(x, y): return torch.softmax(x - y, 0)
def register(f): return fuser.register_fusion(fx.symbolic_trace(f))
def handle(f): return fuser.fusion_handle(register(f))
x, y = torch.randn(5, 3), torch.randn(3)
"""


def run(code: str, *options: str, **environment: str | None) -> list[str]:
    """The lines that `code` prints in a fresh process; what `environment` gives as None is not set."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "FUSER_CACHE_DIR": ""}
    for name, value in environment.items():
        env.pop(name, None)
        env.update({name: value} if value is not None else {})
    command = [*options, "-c", COMMON + textwrap.dedent(code)]
    done = forked.run(command, env=env, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return [*done.stdout.splitlines(), *done.stderr.splitlines()]


NO_COMPILER = """
if {python}: native_build.installed = lambda: None
asked = []
why_none = fuser.compiler.toolchain.compilers.why_none
fuser.compiler.toolchain.compilers.why_none = lambda: (asked.append(1), why_none())[1]
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    for f in (fn, other):
        h = handle(f)
        for n in range(4):
            assert torch.equal(h(x, y), f(x, y))
        xs = [torch.randn(n, 3, requires_grad=True) for n in range(1, 40)]
        before = len(asked)
        for a in xs:
            assert torch.equal(h(a, y), f(a, y))
        assert len(asked) == before, "found once, and kept by the handle"
        if not {python}:
            c = torch.compile(f, backend="fuser")
            assert torch.equal(c(x, y), f(x, y))
            assert c(xs[7], y).requires_grad
assert len(seen) == 1 and "pip install fuser[compiler]" in str(seen[0].message), [str(w.message) for w in seen]
assert seen[0].filename == "<string>", "the user's own line"
(reason, calls), = fuser.interface.kernel_spec(register(fn)).store.fallbacks.items()
assert calls == 43 and "there is no C++ compiler" in reason
assert not fuser.can_fuse_on_cpu()
if not {python}: from fuser.frontends.records import compilations
assert {python} or all(r.route == "eager" and "no C++ compiler" in r.reason for r in compilations()), compilations()
# A compiler that comes later is found by whoever asks again.
os.environ["PATH"] = {path!r}
fuser.override_can_fuse_on_cpu(None)
h = handle(fn)
assert torch.allclose(h(x, y), fn(x, y)) and fuser.num_compiled_kernels() == {kernels}
print(launcher.is_native() or {python})
"""


@pytest.mark.parametrize("python", [False, True], ids=["native launcher", "Python launcher"])
def test_without_a_compiler_calls_go_straight_to_aten(python):
    kernels = int(compilers.why_none() is None)
    code = NO_COMPILER.format(python=python, path=os.environ["PATH"], kernels=kernels)
    assert run(code, PATH="/nowhere", CXX=None, FUSER_SLOWEST="0")[0] == "True"


@pytest.mark.parametrize("cxx", ["g++ '", "nowhere/g++", " "])
def test_what_cannot_be_a_compiler_is_named(monkeypatch, cxx):
    monkeypatch.setenv("CXX", cxx)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(compilers, "WHEEL", "no_such_wheel")
    with pytest.raises(CompileError, match="install one, or pip install fuser.compiler., or set CXX") as raised:
        compilers.find()
    assert str(raised.value) == compilers.why_none() and (not cxx.strip() or repr(cxx) in str(raised.value))


def test_the_compiler_of_a_wheel_is_found_if_there_is_no_other(monkeypatch, tmp_path):
    wheel = tmp_path / "a_wheel"
    wheel.mkdir()
    (wheel / "__init__.py").touch()
    (wheel / "zig").touch(mode=0o755)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(compilers, "WHEEL", "a_wheel")
    monkeypatch.delenv("CXX", raising=False)
    compilers._find.cache_clear()
    monkeypatch.setenv("PATH", "/nowhere")
    assert compilers.find() == ((str(wheel / "zig"), "c++", "-nostdlib++"),)
    (tmp_path / "g++").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compilers.find() == ((str(tmp_path / "g++"),),)
    compilers._find.cache_clear()


def test_only_one_place_warns():
    for path in sorted((ROOT / "fuser").rglob("*.py")):
        calls = [ast.unparse(n.func) for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
        assert "warnings.warn" not in calls or path.name == "notices.py", f"{path}: use fuser.notices"


def test_a_warning_is_said_once_for_its_cause(monkeypatch):
    monkeypatch.setattr(notices, "_said", {})
    with pytest.warns(RuntimeWarning) as seen:
        notices.warn_once("one", "cause")
        notices.warn_once("two", "cause")
        notices.warn_once("three")
        notices.warn_once("three")
    assert [str(w.message) for w in seen] == ["fuser: one", "fuser: three"] and seen[0].filename == __file__
