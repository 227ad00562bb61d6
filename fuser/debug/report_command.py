"""`python -m fuser report SCRIPT -o FILE`: run a script and write a page about its models; docs/report.md."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from pathlib import Path
from typing import Any


def add_to(commands: Any) -> None:
    """Add the command to a parser's subcommands."""
    parser = commands.add_parser("report", help="run a script and write one page about what became of its models")
    parser.add_argument("-o", "--output", default="report.html", help="the page (report.html)")
    parser.add_argument("--steps", type=int, default=5, help="how many steps are timed; 0 for a script that profiles")
    parser.add_argument("script", help="what to run, with the arguments that follow")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script; -o FILE may end the line")


def run(asked: argparse.Namespace) -> int:
    """Run the command; returns the script's exit code, or 1 if it raised."""
    script = Path(asked.script)
    if not script.is_file():
        print(f"{script} is no file: expected a Python script", file=sys.stderr)
        return 2
    from fuser.debug.explained_text import headline
    from fuser.debug.page import page
    from fuser.debug.watching import run_script

    arguments, output = _own_output(asked.arguments, asked.output)
    found = run_script(script, arguments, asked.steps)
    began = time.perf_counter()
    text = page(found.explanation, script.name, found.times)
    Path(output).write_text(text, encoding="utf-8")
    said = f"{output}: {len(text.encode()) / 1e6:.1f} MB, written in {time.perf_counter() - began:.1f} s"
    print(headline(found.explanation), said, sep="\n", file=sys.stderr)
    return _code_of(found.error)


def _own_output(arguments: list[str], output: str) -> tuple[list[str], str]:
    """The arguments of the script, and the page's path: a final `-o PAGE` belongs to this command."""
    if len(arguments) >= 2 and arguments[-2] in ("-o", "--output"):
        return arguments[:-2], arguments[-1]
    return arguments, output


def _code_of(error: BaseException | None) -> int:
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    if error is not None:
        traceback.print_exception(error)
    return 0 if error is None else 1


__all__ = ["add_to", "run"]
