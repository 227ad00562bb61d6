"""`python -m tests.packages [--only REGEX] [--part 1/4] [--seconds S] [--device cuda]`: public packages beside eager.

Functions of kornia, torchmetrics, torchvision, PyTorch Geometric and MONAI, and modules of these, vit-pytorch and
x-transformers, with arguments found by trial. Each runs plainly, with gradients, and with symbolic sizes. Prints what
is wrong, and whether `aot_eager`, which compiles nothing, is wrong too. Exit code 1 if anything else is.
"""

from __future__ import annotations

import argparse
import inspect
import random
import re
import sys
import time
import warnings
from typing import Any

import torch

from tests.packages import arguments, catalogue
from tests.packages.programs import MODES, Program, check

_LONGEST = 90  # seconds of a program in one mode


def _program(name: str, member: Any) -> Program | None:
    if not inspect.isclass(member):
        values = arguments.for_function(member)
        return None if values is None else Program(name, member, values)
    found = arguments.for_module(member)
    return None if found is None else Program(name, lambda m, *rest: m(*rest), [found[0], *found[1]])


def _outcome(program: Program, mode: str) -> str:
    """A line, or nothing for a program that is right or that eager itself does not run."""
    try:
        with arguments.limited(_LONGEST):
            found = check(program, mode)
            if found is None:
                return ""
            other = check(program, mode, "aot_eager")
    except (LookupError, TimeoutError) as error:
        return "" if isinstance(error, LookupError) else f"LATE {program.name} {mode}: {error}"
    return f"{'WRONG' if other is None else 'as aot_eager'} {program.name} {mode}: {found}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.packages")
    parser.add_argument("--only", default="", help="regular expression of names")
    parser.add_argument("--part", default="1/1", help="which of how many parts, as 2/8")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no program later")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    part, parts = map(int, options.part.split("/"))
    members = sorted((m for m in catalogue.members() if re.search(options.only, m[0])), key=lambda m: m[0])
    random.Random(5).shuffle(members)
    start, ran, wrong = time.monotonic(), 0, 0
    for name, member in members[part - 1 :: parts]:
        if time.monotonic() - start > options.seconds:
            break
        program = _program(name, member)
        if program is None:
            continue
        try:
            program = program.on(options.device)
        except Exception:  # it cannot be there
            continue
        ran += 1
        for line in filter(None, (_outcome(program, mode) for mode in MODES)):
            wrong += line.startswith("WRONG")
            print(line, flush=True)
    print(f"{ran} programs, {wrong} wrong", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
