"""Writes docs/settings.md from the table of settings: `python tools/settings_doc.py [--check]`."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOC = ROOT / "docs" / "settings.md"
HEAD = """# Settings

`fuser.config.numerics` reads a setting. There are four ways to set one:

| for | write |
|---|---|
| the process | `fuser.config.numerics = "eager"`, or `fuser.config.set(numerics="eager")` |
| this thread, for a block | `with fuser.config.override(numerics="eager"):` |
| the start of a process | the environment variable `FUSER_NUMERICS=eager` |
| one model | `torch.compile(model, backend="fuser", options={"numerics": "eager"})` |

An unknown name or value is a `fuser.errors.ConfigError` that says what was expected. Settings marked "key" change
generated code: kernels made
with other values of them are not reused. This page is written by `tools/settings_doc.py`.

| setting | default | values | key | meaning |
|---|---|---|---|---|
"""


def text() -> str:
    """The page."""
    from fuser.config import SETTINGS

    rows = []
    for s in SETTINGS:
        default = "under the user's cache folder" if s.name == "cache_dir" else f"`{s.default!r}`"
        values = ", ".join(f"`{c!r}`" for c in s.choices) or type(s.default).__name__
        values += f", at least {s.least}" if s.least is not None else ""
        meaning = s.doc.replace("|", "\\|").replace("':'", ":")
        rows.append(f"| `{s.name}` | {default} | {values} | {'key' if s.key else ''} | {meaning} |")
    return HEAD + "\n".join(rows) + "\n"


def main() -> int:
    """Write the page, or with --check say whether it is current."""
    sys.path.insert(0, str(ROOT))
    if "--check" in sys.argv:
        return int(DOC.read_text(encoding="utf-8") != text())
    DOC.write_text(text(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
