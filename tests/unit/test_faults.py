"""Each row of the table of faults: eager's results, no exception, at most one warning, and no cost afterwards."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

import fuser
from tests import forked

ROOT = pathlib.Path(__file__).parents[2]
LEAST = 40
STEP = 1 if os.environ.get("FUSER_TEST_ALL") else 3  # CI runs every third row


@pytest.mark.skipif(not fuser.can_fuse_on_cpu(), reason="needs a C++ compiler to do wrong")
def test_no_fault_of_a_machine_is_more_than_a_fallback(tmp_path):
    env = os.environ | {"PYTHONPATH": str(ROOT), "FUSER_CACHE_DIR": "", "FUSER_SLOWEST": "0"}
    done = forked.run([str(ROOT / "tests/unit/faults.py"), str(tmp_path), "every", str(STEP)], env, timeout=600)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) >= LEAST // STEP and len({row["name"] for row in found}) == len(found)
    wrong = [(row["name"], problem) for row in found for problem in problems(row)]
    assert not wrong, "\n".join(map(repr, wrong))


def problems(row: dict[str, Any]) -> Iterator[Any]:
    """What is wrong with a row."""
    if row["wrong"]:
        yield row["wrong"]
        return
    if len(row["warnings"]) > 1:
        yield row["warnings"]
    if row["fused"] != row["fuses"]:
        yield f"kernels are made with it: {row['fused']}", row["warnings"]
    if not (row["fused"] or row["warnings"] or row["name"] == "warnings are errors"):
        yield "it goes unsaid"
    if row["runs"]:
        yield f"a compiler is started again, {row['runs']} times"
    if row["calls"]:
        yield f"{row['calls']} of five equal calls come to Python"
