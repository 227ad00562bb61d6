"""Writes docs/passes.md from the stages and passes of the package: `python tools/passes_doc.py [--check]`."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOC = ROOT / "docs" / "passes.md"
HEAD = """# The passes

A graph of `torch.compile(backend="fuser")` goes through three stages of passes and is then grouped into fusions. This
page is written by `tools/passes_doc.py` from the lists themselves; `fuser.debug.passes()` prints them with the settings
in force. A setting is given by `FUSER_DISABLE_PASSES=...` in the environment, by `fuser.config.set(disable_passes=...)`
or for one graph by `torch.compile(..., options={"disable_passes": ...})`.
"""
HOW = (
    ("switch passes off", '`disable_passes="merge_equal,drop_dead"`'),
    ("run only the passes up to number n", "`pass_limit=n`"),
    ("find the pass that breaks a result", "`fuser.debug.bisect_passes(is_right)`: it compiles, runs and judges"),
    ("see what each pass changes", '`dump_passes="log"` or a folder'),
    ("check graph and shapes after each pass", "`check_passes=True`; always done for passes of your own"),
    ("go on without a pass that fails", '`on_pass_error="skip"`: one warning; otherwise an error names pass and node'),
    ("see what each pass did, and its seconds", "`fuser.frontends.dynamo.last_compilation().passes`"),
    ("add a pass", "`fuser.passes.register(stage, name, function, before=..., after=...)`"),
    ("add a pattern", "`fuser.passes.register_pattern(stage, name, pattern, replacement, example_inputs)`"),
)


def text() -> str:
    """The page."""
    from fuser.passes.registry import STAGES

    lines = [HEAD, "| to | do |", "|---|---|", *(f"| {to} | {do} |" for to, do in HOW), ""]
    number = 0
    for stage in STAGES:
        lines += [f"## {stage.name}", "", f"**The graph.** {stage.graph}", "", f"**Why here.** {stage.why}", ""]
        lines += ["| number | pass | what it does |", "|---|---|---|"]
        for p in stage.passes:
            number += 1
            lines.append(f"| {number} | `{p.name}` | {p.doc} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    """Write the page, or with --check say whether it is current."""
    sys.path.insert(0, str(ROOT))
    current = DOC.read_text() if DOC.exists() else ""
    if "--check" in sys.argv:
        if current != text():
            print("docs/passes.md is not current: run python tools/passes_doc.py")
            return 1
        return 0
    DOC.write_text(text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
