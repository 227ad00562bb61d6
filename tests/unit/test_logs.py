"""Logs: silent by default, by names of TORCH_LOGS or FUSER_LOG; a line of progress on a terminal."""

from __future__ import annotations

import io
import logging
import os
import sys
import time

import pytest
import torch

import fuser
from fuser import config, logs, progress
from fuser.errors import ConfigError
from tests import forked

PROGRAM = """
import torch, fuser
for n in range(2):
    key = fuser.register_fusion(torch.fx.symbolic_trace(lambda x: torch.nextafter((x + 1).half(), x.half()) * 2))
    fuser.run_fusion(key, [torch.rand(8)])
"""


def said(**environment):
    kept = {k: v for k, v in os.environ.items() if k not in ("TORCH_LOGS", "FUSER_LOG")}
    done = forked.run(["-c", PROGRAM], env={**kept, **environment})
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_torch_logs():
    """Names of artifacts are taken by torch although it parses them before the package is imported."""
    text = said(TORCH_LOGS="fuser_why,+fuser")
    assert "[arguments]: nextafter of a 16-bit float" in text and "no kernel for fusion" in text
    assert "typedef" not in text


@pytest.fixture
def fusion():
    before = config.log
    yield lambda f: fuser.run_fusion(fuser.register_fusion(torch.fx.symbolic_trace(f)), [torch.rand(8)])
    config.log = before


def test_fuser_log(fusion, capsys):
    config.log = "fuser_code,fuser_perf"
    fusion(lambda x: torch.sin(x) + 31)
    text = capsys.readouterr().err
    assert "void" in text and "(sin add)" in text and " s (" in text
    config.log = "+fuser"
    fusion(lambda x: torch.sin(x) + 32)
    text = capsys.readouterr().err
    assert "[fuser] kernel pw_" in text and "void" not in text
    config.log = ""
    fusion(lambda x: torch.sin(x) + 33)
    assert capsys.readouterr().err == ""
    assert logging.getLogger("fuser").level == logging.NOTSET and logging.getLogger("fuser").propagate
    with pytest.raises(ConfigError, match="log='fuser_wy': expected names from fuser, fuser_why"):
        config.log = "fuser_wy"


def test_names_are_torchs_own():
    registry = torch._logging._internal.log_registry
    assert registry.is_log("fuser") and all(map(registry.is_artifact, logs.ARTIFACTS))


def test_a_graph_through_torch_compile(fusion, capsys):
    config.log = "fuser,fuser_why"
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(lambda x: (x + 1).sort().values * 2, backend="fuser")(torch.rand(8))
    text = capsys.readouterr().err
    assert "2 operators in 2 groups of 2 kinds, 1 on ATen" in text
    assert "aten.sort at " in text and "test_logs.py:" in text and "[left_to_aten] 128 bytes: it sorts" in text


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress(monkeypatch):
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(progress, "AFTER", 0.05)
    monkeypatch.setattr(progress, "EVERY", 0.02)
    with progress.working(lambda: "fusion 7 (gelu)"):
        time.sleep(0.2)
    deadline = time.monotonic() + 5
    while not shown.getvalue().endswith("\r\x1b[K") and time.monotonic() < deadline:
        time.sleep(0.02)
    assert "0 compilations done, 1 under way: fusion 7 (gelu)" in shown.getvalue()
    assert shown.getvalue().endswith("\r\x1b[K"), "the line is taken away"


def test_progress_is_for_terminals_alone(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with progress.working(lambda: "x"):
        assert not progress._running
    assert len(progress.line(4.0, 2, ["fusion 1 (" + "add " * 50 + ")"])) <= 100
