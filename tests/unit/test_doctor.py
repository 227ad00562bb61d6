"""`python -m fuser doctor`: what it says of a machine that has everything, and of one that lacks things."""

from __future__ import annotations

import os
import pathlib

import pytest

import fuser
from fuser import config
from fuser.__main__ import main
from fuser.debug import doctor
from fuser.runtime import compilers, files, launcher
from tests import forked


def said(capsys) -> tuple[int, dict[str, str]]:
    code = main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    return code, {line[6:16].strip(): line for line in lines}


@pytest.mark.skipif(not fuser.can_fuse_on_cpu(), reason="needs a C++ compiler")
def test_a_machine_with_everything_is_well(capsys, tmp_path):
    with config.override(cache_dir=str(tmp_path)):
        code, lines = said(capsys)
    assert code == 0 and all(line.startswith("ok") for line in lines.values()), lines
    assert {"torch", "compiler", "processor", "OpenMP", "launcher", "GPU", "cache", "temporary"} <= set(lines)
    assert " MiB free" in lines["cache"] and "native" in lines["launcher"]
    assert not [p for p in (tmp_path / "cpu").iterdir() if p.name == "doctor"]


def no_room():
    raise OSError(28, "No space left on device")


LACKS = {
    "compiler": lambda m, tmp: (m.setenv("CXX", "nowhere/g++"), m.setattr(compilers, "WHEEL", "no_such_wheel")),
    "launcher": lambda m, tmp: m.setattr(launcher, "wait", lambda timeout: False),
    "cache": lambda m, tmp: tmp.chmod(0o777),
    "temporary": lambda m, tmp: m.setattr(files, "temporary_folder", no_room),
    "OpenMP": lambda m, tmp: m.setattr(doctor.torch_abi, "symbol", lambda *names: None),
    "torch": lambda m, tmp: m.setattr(doctor.torch, "__version__", "2.9.1+cpu"),
}


@pytest.mark.parametrize("what", LACKS)
def test_what_is_missing_is_named_with_its_cure(what, capsys, monkeypatch, tmp_path):
    LACKS[what](monkeypatch, tmp_path)
    with config.override(cache_dir=str(tmp_path)):
        code, lines = said(capsys)
    assert code == 1 and lines[what].startswith("FAIL") and " -> " in lines[what], lines
    assert [name for name, line in lines.items() if line.startswith("FAIL")] == [what]


def test_no_room_is_no_crash(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(doctor, "LEAST_FREE", 1 << 62)
    with config.override(cache_dir=str(tmp_path)):
        code, lines = said(capsys)
    assert code == 1 and "set FUSER_CACHE_DIR" in lines["cache"] and "set TMPDIR" in lines["temporary"]


def test_it_is_a_command():
    root = pathlib.Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": str(root)}
    done = forked.run(["-m", "fuser", "nonsense"], env)
    assert done.returncode == 2 and "doctor" in done.stderr
