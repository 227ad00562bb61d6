"""The how-to pages: a newcomer's steps, one after the other, in an empty folder with the package installed."""

from __future__ import annotations

import os
import pathlib
import re

import pytest

from tests import forked

ROOT = pathlib.Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "howto").glob("*.md"))
_BLOCK = re.compile(r'^```(python|console)(?: title="([^"]+)")?\n(.*?)^```', re.DOTALL | re.MULTILINE)


def steps(text: str) -> list[tuple[str, str]]:
    """A page's blocks in order: a file's name and text, or "" and what a terminal shows."""
    return [("" if kind == "console" else name, body) for kind, name, body in _BLOCK.findall(text)]


def test_there_is_a_page_for_each_extension():
    assert [p.stem for p in PAGES] == ["device", "lowering", "op", "pass", "reduction"]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_the_steps_of_a_page(page, tmp_path, fresh_cache_dir):
    """Files are written as their titles say; each command prints what the page shows."""
    found = steps(page.read_text(encoding="utf-8"))
    assert all(name or body.startswith("$ python ") for name, body in found) and any(not name for name, _ in found)
    path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH", "")) if p)
    for name, body in found:
        if name:
            (tmp_path / name).write_text(body, encoding="utf-8")
            continue
        command, _, shown = body.partition("\n")
        env = os.environ | {"PYTHONPATH": path}
        done = forked.run(command.split()[2:], env, tmp_path, timeout=120, dynamo=True)
        assert (done.returncode, done.stdout.strip()) == (0, shown.strip()), done.stderr


def test_every_program_of_a_page_is_run():
    """A file that no command runs, and no other file imports, would not be tested."""
    for page in PAGES:
        found = steps(page.read_text(encoding="utf-8"))
        text = "\n".join(body for _, body in found)
        for name, _ in found:
            stem = name.removesuffix(".py")
            assert not name or f"python {name}" in text or re.search(rf"^import {stem}$", text, re.MULTILINE), name
