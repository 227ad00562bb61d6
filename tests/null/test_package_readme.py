"""The README's examples run as they stand there."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[2] / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def test_there_are_examples():
    assert len(EXAMPLES) == 3


@pytest.mark.parametrize("text", EXAMPLES, ids=["torch_compile", "fusion_handle", "explain"])
def test_example_runs(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if "backend=" in text and not any(importlib.metadata.entry_points(group="torch_dynamo_backends", name="fuser")):
        pytest.skip("fuser is on the path, not installed")
    file = tmp_path / "example.py"  # a file, for what reads a function's source
    file.write_text(text)
    exec(compile(text, str(file), "exec"), {"__name__": "example"})
