"""Processes that are killed while they compile: nothing in the cache is broken, and nothing stays behind."""

from __future__ import annotations

import json
import os
import pathlib

import pytest

import fuser
from tests import forked

pytestmark = pytest.mark.skipif(not fuser.can_fuse_on_cpu(), reason="needs a C++ compiler")
ROOT = pathlib.Path(__file__).resolve().parents[2]
# FUSER_STRESS=1, or "processes,rounds" for other numbers
STRESS = os.environ.get("FUSER_STRESS", "")
PROCESSES, ROUNDS = map(int, STRESS.split(",")) if "," in STRESS else (32, 200) if STRESS == "1" else (4, 1)


def test_processes_that_are_killed_leave_nothing(tmp_path: pathlib.Path) -> None:
    (tmp_path / "tmp").mkdir()
    env = {
        **os.environ, "PYTHONPATH": str(ROOT), "FUSER_CHECK_IR": "0", "FUSER_CACHE_DIR": str(tmp_path / "cache"),
        "TMPDIR": str(tmp_path / "tmp"),
    }  # fmt: skip
    script = pathlib.Path(__file__).with_name("killed.py")
    command = [str(script), str(tmp_path), str(PROCESSES), str(ROUNDS), "7"]
    done = forked.run(command, env, timeout=60 + 60 * ROUNDS)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["killed"] == PROCESSES * ROUNDS and not found["problems"], "\n".join(found["problems"])
