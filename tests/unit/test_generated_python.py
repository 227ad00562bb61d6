"""Python that is generated from a graph: names of the graph stay names, reasons stay text, files stay this user's."""

from __future__ import annotations

import ast
import dataclasses
import pathlib
import types

import pytest
import torch
from torch import fx

import fuser
from fuser import config
from fuser.fallback import Fallback
from fuser.interface import kernel_spec
from fuser.reproduce import path_of, write_reproducer

X = torch.arange(4.0)
# None of these may be spliced into source: no names at all, keywords, and letters for which Python reads others.
NAMES = [
    "a b",
    "x=1",
    "1",
    "",
    "lambda",
    "None",
    "__debug__",
    "ﬁ",
    "a\nb",
    "a'b",
    "a\\",
    "v0",
    "b0",
    "__import__('os')",
]


def total(x, *args, **named):
    """x, with each keyword's length and value added."""
    return x + sum(len(name) + value for name, value in named.items())


class Odd:
    def __getattribute__(self, name):
        return lambda: X + len(name)


@pytest.fixture(scope="module")
def spec():
    return kernel_spec(fuser.register_fusion(fx.symbolic_trace(lambda x: torch.relu(x))))


def fallback_of(spec, **change):
    """The fallback of relu(x), with its one call changed to another."""
    rows = tuple(r if r.op == "placeholder" else dataclasses.replace(r, **change) for r in spec.registered.rows)
    return Fallback(dataclasses.replace(spec.registered, rows=rows))


@pytest.mark.parametrize("name", NAMES)
def test_keywords(spec, name):
    fallback = fallback_of(spec, target=total, kwargs={name: 3, "plain": 4})
    assert torch.equal(fallback(X), total(X, **{name: 3, "plain": 4})), fallback.source


@pytest.mark.parametrize("name", NAMES)
def test_methods(spec, name):
    fallback = fallback_of(spec, op="call_method", target=name)
    assert torch.equal(fallback(Odd()), X + len(name)), fallback.source


@pytest.mark.parametrize("name", [*NAMES, "getattr", "slice", "torch", "fallback"])
def test_functions(spec, name):
    function = types.FunctionType((lambda x: x + 1).__code__, {}, name)
    fallback = fallback_of(spec, target=function)
    assert torch.equal(fallback(X), X + 1), fallback.source


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("v0", "b0")])
def test_a_script_names_nothing_odd(name, monkeypatch):
    function = types.FunctionType((lambda x: x).__code__, {}, name)
    monkeypatch.setitem(vars(torch), name, function)
    with pytest.raises(TypeError, match="which a script cannot name"):
        path_of(function)


@pytest.mark.parametrize(
    "why", ["C:\\new\\x", "\\N{oops}", "ends in \\", '"""', "'''", "two\nlines", "{graph} {0}", "\0", "\ud800", "é", ""]
)
def test_a_reason_stays_text(spec, tmp_path, why):
    path = write_reproducer(spec, [X], why, str(tmp_path))
    assert ast.get_docstring(ast.parse(pathlib.Path(path).read_bytes()), clean=False) == why


def written(spec, **settings):
    with config.override(**settings):
        return pathlib.Path(write_reproducer(spec, [X], "why"))


def test_a_reproducer_follows_no_link(spec, tmp_path):
    """Files that are in its place are replaced; what they lead to is left alone."""
    precious = tmp_path / "precious"
    precious.write_text("precious")
    path = written(spec, cache_dir=str(tmp_path / "cache"))
    for made in (path, path.with_suffix(".pt")):
        assert made.stat().st_mode & 0o777 == 0o600
        made.unlink()
        made.symlink_to(precious)
    assert written(spec, cache_dir=str(tmp_path / "cache")) == path
    assert precious.read_text() == "precious" and not path.is_symlink() and not path.with_suffix(".pt").is_symlink()


def test_a_reproducer_is_not_written_where_others_write(spec, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    shared = tmp_path / "reproducers"
    shared.mkdir()
    shared.chmod(0o777)
    made = [written(spec, cache_dir=""), written(spec, cache_dir=""), written(spec, cache_dir=str(tmp_path))]
    folders = {path.parent for path in made}
    assert len(folders) == 3 and shared not in folders and not list(shared.iterdir())
    assert all(folder.stat().st_mode & 0o777 == 0o700 for folder in folders)
