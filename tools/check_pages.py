"""Checks README.md and docs/: `python tools/check_pages.py`. Exit code 1 with a line for each fault.

No sentence outside code has over 30 words; no word stands that the glossary replaces by another; links lead to files
and
headings that exist. Pages that other tools write (`GENERATED`) are checked for links alone.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOST_WORDS = 30
GENERATED = {"operators.md", "reasons.md", "settings.md", "zoo.md"}
_FENCE = re.compile(r"^(```|~~~).*?^\1", re.DOTALL | re.MULTILINE)
_INDENTED = re.compile(r"(?:^|\n\n)(?: {4}.*\n?)+")
_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
_WORD = re.compile(r"[^\W_][\w'’%.,×/-]*")
_BREAK = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*#|]|\d+\.)\s)|\n(?=\|)|\n(?=#)")
_END = re.compile(r"(?<=[.?!])[)\"]?\s+(?=[A-Z`\[(*\"0-9])")


def pages() -> list[Path]:
    """The pages, README first."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def prose(text: str) -> str:
    """A page without code: a span of code is one word, a link is its text."""
    text = re.sub(r"^(#+ .*)$", r"\1\n", _INDENTED.sub("\n\n", _FENCE.sub("\n", text)), flags=re.MULTILINE)
    text = re.sub(r"``?[^`]+``?", "X", text)
    return _LINK.sub(r"\1", text)


def sentences(text: str) -> Iterator[str]:
    """The sentences of a page; of a table, those of its cells."""
    for block in _BREAK.split(prose(text)):
        cells = block.strip().strip("|").split("|") if block.lstrip().startswith("|") else [block]
        for cell in cells:
            yield from _END.split(" ".join(cell.split()))


def long_sentences(text: str) -> Iterator[str]:
    """What is wrong with the lengths of a page's sentences."""
    for sentence in sentences(text):
        n = len(_WORD.findall(sentence))
        if n > MOST_WORDS:
            yield f"a sentence of {n} words (at most {MOST_WORDS}): {sentence[:90]}…"


def replaced_words(text: str, words: dict[str, str]) -> Iterator[str]:
    """Words of a page that the glossary replaces."""
    plain = prose(text)
    for word, better in words.items():
        for found in re.finditer(rf"\b{re.escape(word)}\b", plain, re.IGNORECASE):
            around = " ".join(plain[max(0, found.start() - 30) : found.end() + 30].split())
            yield f"'{found.group()}' in '…{around}…': write {better} (docs/glossary.md)"


def glossary_words(text: str) -> dict[str, str]:
    """The table "Instead of" of the glossary: a word and what to write."""
    _, _, table = text.partition("## Instead of")
    rows = [[c.strip() for c in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("|")]
    return {word.strip(): row[1] for row in rows[2:] for word in row[0].split(",")}


def anchors(text: str) -> set[str]:
    """The names by which a page's headings are linked."""
    heads = re.findall(r"^#+ (.*)$", _FENCE.sub("\n", text), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", h).lower()) for h in heads]
    return {p.strip().replace(" ", "-") for p in plain}


def dead_links(page: Path, text: str) -> Iterator[str]:
    """Links of a page that lead nowhere. Addresses on the web are not asked."""
    for _, target in _LINK.findall(_FENCE.sub("\n", text)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists():
            yield f"link to {target}: there is no such file"
        elif anchor and anchor not in anchors(file.read_text(encoding="utf-8")):
            yield f"link to {target}: there is no such heading"


def faults(page: Path, words: dict[str, str]) -> list[str]:
    """What is wrong with a page."""
    text = page.read_text(encoding="utf-8")
    found = list(dead_links(page, text))
    if page.name not in GENERATED:
        found += long_sentences(text)
        found += () if page.name == "glossary.md" else replaced_words(text, words)
    return found


def main() -> int:
    """Print every fault; the exit code says whether there was one."""
    words = glossary_words((ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"))
    wrong = [f"{page.relative_to(ROOT)}: {fault}" for page in pages() for fault in faults(page, words)]
    print("\n".join(wrong) or f"{len(pages())} pages are in order")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
