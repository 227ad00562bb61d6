"""What was measured as Markdown: tables and targets, written between two marks of a document."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from typing import Any

from benchmarks.report import Claim, Report, Table, heading

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def _cell(text: str) -> str:
    return text.replace("|", "\\|") or " "


def table(t: Table) -> str:
    """A table, first column left-aligned, the others right-aligned, under its title."""
    rule = "|".join([" --- ", *[" ---: "] * (len(t.columns) - 1)])
    lines = [f"| {' | '.join(map(_cell, row))} |" for row in (t.columns, *t.rows)]
    return "\n".join([f"**{t.title}**", "", lines[0], f"|{rule}|", *lines[1:]])


def claims(suite: Sequence[Claim]) -> str:
    """One line for each target."""
    word = {True: "met", False: "**missed**", None: "open"}
    lines = [f"| {_cell(c.what)} | {_cell(c.target)} | {_cell(c.reached)} | {word[c.met]} |" for c in suite]
    return "\n".join(["| what | target | reached | |", "| --- | --- | --- | --- |", *lines])


def section(report: Report, info: dict[str, Any], command: str) -> str:
    """One suite: the command that measured it, the machine, targets, tables, notes."""
    parts = [f"### {report.suite}", f"`{command}`  \n{heading(info)}"]
    if report.claims:
        parts.append(claims(report.claims))
    parts += [table(t) for t in report.tables]
    if report.wrong:
        parts.append("\n".join(f"- **wrong**: {w}" for w in report.wrong))
    if report.notes:
        parts.append("\n".join(f"- {n}" for n in dict.fromkeys(report.notes)))
    return "\n\n".join(parts)


def load(path: str) -> list[tuple[Report, dict[str, Any], str]]:
    """The reports of a file that `--json` wrote, each with its machine and command."""
    data = json.loads(pathlib.Path(path).read_text())
    found = []
    for suite in data["suites"]:
        tables = [Table(t["title"], tuple(t["columns"]), [tuple(r) for r in t["rows"]]) for t in suite["tables"]]
        report = Report(
            suite["suite"], tables, [Claim(**c) for c in suite["claims"]], suite["wrong"], suite["notes"],
            records=suite["records"],
        )  # fmt: skip
        found.append((report, data["machine"], data.get("command", "python -m benchmarks")))
    return found


def write(path: str, sections: Sequence[str]) -> None:
    """Put the sections between the marks of the document at `path`; a document without marks gets them at its end."""
    file = pathlib.Path(path)
    text = file.read_text() if file.exists() else ""
    before, begin, rest = text.partition(BEGIN)
    after = rest.partition(END)[2] if begin else "\n"
    body = "\n\n".join([BEGIN, *sections, END])
    if not begin and before.strip():
        before = before.rstrip() + "\n\n"
    file.write_text(f"{before}{body}{after}")
