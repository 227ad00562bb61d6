"""The README's table of platforms is what test runs left, and a run without an end leaves nothing."""

from __future__ import annotations

import json

import pytest

from tools import platforms

ENDED = """\
FAILED tests/unit/test_plans.py::test_one[a - b] - AssertionError
ERROR tests/unit/test_plans.py::test_two
1 failed, 12 passed, 3 skipped, 1 error in 4.21s
"""


def test_counts_are_those_of_the_closing_line():
    assert platforms.counts(ENDED) == {"failed": 1, "passed": 12, "skipped": 3, "error": 1}
    assert platforms.counts("2 passed of many\n") == {}
    names = platforms.failures(ENDED)
    assert names == ["tests/unit/test_plans.py::test_one", "tests/unit/test_plans.py::test_two"]


def test_a_run_without_an_end_keeps_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(platforms, "KEPT", tmp_path / "rows.json")
    with pytest.raises(ValueError, match="nothing is kept"):
        platforms.keep("one", "....\n", ["tests/unit"])
    assert not platforms.KEPT.exists()
    platforms.keep("one", ENDED, ["tests/unit", "tests/unit/test_plans.py"])
    rows = json.loads(platforms.KEPT.read_text())
    line = platforms.table(rows).splitlines()[-1]
    assert rows["one"]["failed"] == platforms.failures(ENDED)
    assert "`tests/unit`, 1 file" in line and "1 error, 1 failed, 12 passed, 3 skipped" in line


def test_the_readme_has_the_rows():
    text = (platforms.ROOT / "README.md").read_text(encoding="utf-8")
    assert platforms.BEGIN in text
    assert platforms.readme(text, json.loads(platforms.KEPT.read_text())) == text
