"""`python -m tests.zoo [--only REGEX] [--modes …] [--workers N] [--rival] [--write docs/zoo.md]`: the zoo, compared.

Prints a line for each model and mode that is not right, then a table. Exit code 1 if anything is wrong or raises.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import pathlib
import platform
import re
import sys
import tempfile
import time
from collections import Counter

from tests.zoo.modes import MODES, Verdict
from tests.zoo.work import run, start

MARKS = {"right": "yes", "wrong": "NO", "raised": "RAISED", "not in eager": "–"}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__)
    parser.add_argument("--only", default="", help="a regular expression that a model's name matches")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rival", action="store_true", help="compile by TorchInductor too, for its time")
    parser.add_argument("--untimed", action="store_true", help="compare results alone")
    parser.add_argument("--seconds", type=float, help="stop after so long, with a table of the runs that are done")
    parser.add_argument("--write", help="a page for the table")
    return parser.parse_args()


def table(found: list[Verdict], modes: list[str]) -> list[str]:
    """The rows of the page: a model each."""
    head = ["model", *modes, "fused", "own compile s (inference, training)", "of TorchInductor's", "speed by eager"]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    by_name: dict[str, dict[str, Verdict]] = {}
    for v in found:
        by_name.setdefault(v.name, {})[v.mode] = v
    for name, row in sorted(by_name.items()):
        timed = [row[m] for m in ("inference", "training") if m in row and row[m].speed]
        rival = ", ".join(f"{v.compile_seconds / v.rival_seconds:.2f}" for v in timed if v.rival_seconds)
        cells = [name, *(MARKS[row[m].status] if m in row else "" for m in modes)]
        cells += [f"{row['inference'].share:.0%}" if "inference" in row else ""]
        cells += [", ".join(f"{v.compile_seconds:.1f}" for v in timed), rival]
        cells += [", ".join(f"{v.speed:.2f}" for v in timed)]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def main() -> int:
    options = _arguments()
    os.environ.setdefault("FUSER_CACHE_DIR", tempfile.mkdtemp(prefix="fuser-zoo-"))
    from tests.zoo.architectures import ZOO

    modes = options.modes.split(",")
    cases = [
        (name, mode, options.rival, not options.untimed)
        for name, model in ZOO.items() if re.search(options.only, name)
        for mode in modes if mode != "generate" or model.generates
    ]  # fmt: skip
    found: list[Verdict] = []
    end = time.monotonic() + options.seconds if options.seconds else float("inf")
    with multiprocessing.get_context("spawn").Pool(options.workers, start, (1,), maxtasksperchild=8) as pool:
        verdicts = pool.imap_unordered(run, cases)
        while len(found) < len(cases):
            try:
                verdict = verdicts.next(None if end == float("inf") else max(end - time.monotonic(), 0.0))
            except multiprocessing.TimeoutError:
                print(f"stopped after {options.seconds:.0f} s: {len(found)} of {len(cases)} runs are done")
                break
            found.append(verdict)
            if verdict.status != "right":
                print(f"{verdict.status}: {verdict.name} {verdict.mode}: {verdict.why}", flush=True)
    lines = table(found, modes)
    print("\n".join(lines))
    count = Counter(v.status for v in found)
    print(f"{len({v.name for v in found})} models, {len(found)} runs:", dict(count))
    if options.write:
        _write(options.write, lines)
    return int(count["wrong"] + count["raised"] > 0)


def _write(path: str, lines: list[str]) -> None:
    import torch

    made = f"Made by `make zoo`: torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} processors."
    pathlib.Path(path).write_text("\n".join(["# The zoo", "", made, "", *lines, ""]))


if __name__ == "__main__":
    sys.exit(main())
