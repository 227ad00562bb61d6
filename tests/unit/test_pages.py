"""The pages: each code block runs, and pages that tools write are current."""

from __future__ import annotations

import importlib.util
import pathlib
import re
import runpy

import pytest

ROOT = pathlib.Path(__file__).parents[2]
BLOCKS = {
    page.stem: found
    for page in sorted((ROOT / "docs").glob("*.md"))
    if (found := re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE))
}


def tool(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_have_code():
    assert len(BLOCKS) >= 8


@pytest.mark.parametrize("page", BLOCKS)
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch, fresh_cache_dir):
    """All blocks of a page, in order, as one program."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "example.py"  # a file, for what reads a function's source
    file.write_text("\n".join(BLOCKS[page]))
    runpy.run_path(str(file))


@pytest.mark.parametrize("page", ["settings", "tutorial"])
def test_a_written_page_is_current(page):
    written = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    assert tool(f"{page}_doc").text() == written, f"run python tools/{page}_doc.py"
