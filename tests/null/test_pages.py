"""What `tools/check_pages.py` finds in pages, and that it finds nothing in ours."""

from __future__ import annotations

import importlib.util
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("check_pages", ROOT / "tools" / "check_pages.py")
pages = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(pages)

LONG = " ".join(["word"] * 31) + "."


@pytest.mark.parametrize(
    "text, found",
    [
        (f"Short. {LONG} Short.", 1),
        (f"| a | {LONG} |\n|---|---|\n| {LONG} | b |", 2),
        (f"- {LONG}\n- {LONG}", 2),
        (f"# A heading\n{LONG[5:]}", 0),
        (f"```\n{LONG}\n```\n\n    {LONG}\n", 0),
        (f"`{LONG}` and `{LONG}`", 0),
        ("A sentence with `code.of` a [link to somewhere](x.md) ends. " * 9, 0),
    ],
)
def test_long_sentences(text, found):
    assert len(list(pages.long_sentences(text))) == found


def test_replaced_words():
    table = "| instead of | write |\n|---|---|\n| hangs on, hang on | depends on |\n"
    words = pages.glossary_words(f"## Instead of\n\n{table}")
    assert words == {"hangs on": "depends on", "hang on": "depends on"}
    text = "It hangs on two things that\nhang on three; `hangs on` is code."
    assert len(list(pages.replaced_words(text, words))) == 2


def test_dead_links(tmp_path):
    (tmp_path / "a.md").write_text("# One `x` heading\n")
    page = tmp_path / "b.md"
    good = "[a](a.md) [h](a.md#one-x-heading) [own](#here) [web](https://pytorch.org)\n\n## Here\n"
    assert not list(pages.dead_links(page, good.replace("## Here", "")))[1:]
    page.write_text(good)
    assert not list(pages.dead_links(page, good))
    assert len(list(pages.dead_links(page, "[a](c.md) [h](a.md#two)"))) == 2


@pytest.mark.parametrize("page", pages.pages(), ids=lambda p: p.stem)
def test_our_pages(page):
    words = pages.glossary_words((ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"))
    assert not pages.faults(page, words)
