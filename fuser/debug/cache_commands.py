"""`python -m fuser cache`: the module `fuser.cache` as commands. Exit code 1 if an entry is bad, 2 on errors."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
from typing import Any

from fuser import cache
from fuser.debug.units import bytes_text
from fuser.errors import FuserError

_DAY = 86400.0


def add_to(commands: Any) -> None:
    """Add the command and its actions to a parser's subcommands."""
    parser = commands.add_parser("cache", help="the kernels that are kept on disk")
    actions = parser.add_subparsers(dest="action", required=True)
    one = actions.add_parser("list", help="what the cache holds")
    one.add_argument("--json", action="store_true", help="as JSON, a line for each entry")
    one.add_argument("--folder", help="an unpacked bundle instead of the cache")
    one = actions.add_parser("verify", help="check every entry; exit code 1 if one would not be used")
    one.add_argument("--remove", action="store_true", help="remove what would not be used")
    one.add_argument("--folder", help="an unpacked bundle instead of the cache")
    one = actions.add_parser("clear", help="remove entries")
    one.add_argument("--kind", action="append", help="of this kind only; may be given several times")
    one.add_argument("--unused-days", type=float, default=0.0, help="that nobody used for so long")
    one = actions.add_parser("export", help="write the kernels of this machine into a bundle")
    one.add_argument("bundle")
    one.add_argument("--key-file", help="sign with the bytes of this file")
    one = actions.add_parser("import", help="unpack a bundle into the cache")
    one.add_argument("bundle")
    one.add_argument("--to", help="into this new folder instead, for FUSER_PREBUILT_CACHE")
    one.add_argument("--key-file", help="take only what was signed with the bytes of this file")
    one = actions.add_parser("explain-miss", help="which field keeps this process from using a bundle, or the cache")
    one.add_argument("bundle", nargs="?", help="a bundle, or a folder into which one was unpacked; else the cache")
    one.add_argument("--key-file", help="of a signed bundle")


def run(asked: argparse.Namespace) -> int:
    """Run a command; returns the process's exit code."""
    try:
        return _ACTIONS[asked.action](asked)
    except (cache.ArchiveError, ValueError, OSError, FuserError) as e:
        print(e, file=sys.stderr)
        return 2


def _key(asked: argparse.Namespace) -> bytes | None:
    return pathlib.Path(asked.key_file).read_bytes() if asked.key_file else None


def _list(asked: argparse.Namespace) -> int:
    found = cache.entries(asked.folder)
    if asked.json:
        for entry in found:
            print(json.dumps(dataclasses.asdict(entry)))
        return 0
    for e in found:
        numbers = f"{bytes_text(e.bytes):>9}  {_age(e.age):>6}  {_age(e.unused):>6}"
        print(f"{e.kind:10}  {numbers}  {e.name}  {e.serves}".rstrip())
    size = bytes_text(sum(e.bytes for e in found))
    print(f"{len(found)} entries, {size}; kind, size, age, unused for, name, what for")
    return 0


def _age(seconds: float) -> str:
    for size, unit in ((_DAY, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _verify(asked: argparse.Namespace) -> int:
    problems = cache.verify(asked.folder, asked.remove)
    for p in problems:
        print(f"{p.name}: {p.why}{'; removed' * asked.remove}")
    print(f"{len(problems)} entries would not be used" if problems else "all entries are whole")
    return int(bool(problems))


def _clear(asked: argparse.Namespace) -> int:
    print(f"{bytes_text(cache.clear(asked.kind, asked.unused_days * _DAY))} removed")
    return 0


def _export(asked: argparse.Namespace) -> int:
    made = cache.export(asked.bundle, _key(asked))
    print(f"{made.path}: {_said(made)}")
    for why, number in made.left_out.items():
        print(f"left out: {number} {why}")
    return 0


def _import(asked: argparse.Namespace) -> int:
    made = cache.import_(asked.bundle, _key(asked), asked.to)
    print(f"{made.path}: {_said(made)}")
    for difference in made.differs:
        print(f"not used here: {difference}")
    return int(bool(made.differs))


def _said(made: cache.Bundle) -> str:
    return f"{made.kernels['cpu']} kernels of the CPU, {made.kernels['cuda']} of GPUs, {bytes_text(made.bytes)}"


def _explain(asked: argparse.Namespace) -> int:
    if asked.bundle:
        found = cache.differences(asked.bundle, _key(asked))
        print("\n".join(map(str, found)) or "nothing differs: its kernels are found here")
        return int(bool(found))
    stale = cache.stale()
    for fields, number in sorted(stale.items(), key=lambda item: -item[1]):
        print(f"{number} plans are not found here: " + "; ".join(fields))
    print("" if stale else "every plan of the cache can be found here", end="" if stale else "\n")
    return int(bool(stale))


_ACTIONS = {
    "list": _list, "verify": _verify, "clear": _clear, "export": _export, "import": _import, "explain-miss": _explain,
}  # fmt: skip
