"""The README's table of platforms: `python tools/platforms.py run NAME [pytest's arguments]`, `emulated`, or `write`.

`run` runs tests with the Python that runs this file, and keeps what came out as the row NAME of docs/platforms.json:
versions, the day, and pytest's own counts. `emulated` is the row of the kernels that qemu runs (`make machines`).
`write` puts the table between its marks in README.md. No count is typed.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "docs" / "platforms.json"
BEGIN, END = "<!-- platforms: begin -->", "<!-- platforms: end -->"
_COUNT = re.compile(r"(\d+) (passed|failed|skipped|error)")


def counts(text: str) -> dict[str, int]:
    """pytest's counts, from its last line; {} where it did not get there."""
    lines = [line for line in text.splitlines() if re.search(r"\bin [\d.]+s\b", line)]
    return {word: int(n) for n, word in _COUNT.findall(lines[-1])} if lines else {}


def failures(text: str) -> list[str]:
    """The tests that failed, without their parameters' texts."""
    return sorted({m[1] for m in re.finditer(r"^(?:FAILED|ERROR) \S*?([\w/]+\.py::\w+)", text, re.MULTILINE)})


def compiler(name: str = "") -> str:
    """The first words of a C++ compiler's version, such as "g++ 12.2.0"; of the one that is in use by default."""
    name = name or os.environ.get("CXX") or shutil.which("g++") or "clang++"
    said = subprocess.run([name, "--version"], capture_output=True, text=True, check=False).stdout.splitlines()
    found = re.search(r"\d+\.\d+(\.\d+)?", said[0]) if said else None
    return f"{Path(name).name} {found[0] if found else ''}".strip()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def machine() -> str:
    """This machine, such as "Linux x86_64"."""
    return f"{platform.system()} {platform.machine()}"


def run(name: str, arguments: list[str], where: tuple[str, str] | None = None) -> int:
    """Run pytest and keep the row. `where`: the machine and the compiler, if not these here.

    The exit code is pytest's.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", *arguments]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    print(done.stdout)
    keep(name, done.stdout, [a for a in arguments if a.startswith("tests")], where)
    return done.returncode


def run_emulated(arguments: list[str]) -> int:
    """Run the tests whose kernels are cross-compiled, and keep the row of aarch64. The exit code is pytest's."""
    os.environ["FUSER_TEST_ALL"] = "1"
    said = subprocess.run(["qemu-aarch64", "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"\d+\.\d+(\.\d+)?", said)
    where = f"Linux aarch64 by qemu {found[0] if found else ''}".strip(), compiler("aarch64-linux-gnu-g++")
    return run("aarch64", ["tests/backend/test_machines.py", "-k", "qemu", *arguments], where)


def keep(name: str, output: str, tests: list[str], where: tuple[str, str] | None = None) -> None:
    """Put the row `name` into docs/platforms.json; ValueError if pytest did not end."""
    found = counts(output)
    if not found:
        raise ValueError("pytest printed no closing line: nothing is kept")
    rows = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    on, by = where or (machine(), compiler())
    rows[name] = {
        "machine": on, "compiler": by,
        "python": platform.python_version(), "torch": _version("torch").partition("+")[0], "triton": _version("triton"),
        "day": datetime.date.today().isoformat(), "tests": tests, "counts": found, "failed": failures(output),
    }  # fmt: skip
    KEPT.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")


def table(rows: dict[str, dict[str, Any]]) -> str:
    """The rows in Markdown, the oldest Python first."""
    lines = ["| machine, compiler | Python | torch | tests | result | day |", "|---|---|---|---|---|---|"]
    for row in sorted(rows.values(), key=lambda r: [int(n) for n in re.findall(r"\d+", r["python"])]):
        said = ", ".join(f"{n} {word}" for word, n in row["counts"].items())
        where = f"{row['machine']}, {row['compiler']}"
        cells = where, row["python"], row["torch"], _said(row["tests"]), said, row["day"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _said(tests: list[str]) -> str:
    """Which tests: folders by name, files by number."""
    files = [t for t in tests if t.endswith(".py")]
    folders = [f"`{t}`" for t in tests if t not in files]
    return ", ".join([*folders, *([f"{len(files)} file{'s' * (len(files) > 1)}"] if files else [])]) or "all"


def readme(text: str, rows: dict[str, dict[str, Any]]) -> str:
    """The README with the table of these rows."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{table(rows)}\n{END}{rest.partition(END)[2]}"


def main(arguments: list[str]) -> int:
    """What the command line asks for."""
    if arguments[:1] == ["run"] and len(arguments) > 1:
        return run(arguments[1], arguments[2:])
    if arguments[:1] == ["emulated"]:
        return run_emulated(arguments[1:])
    if arguments == ["write"]:
        path = ROOT / "README.md"
        path.write_text(readme(path.read_text(encoding="utf-8"), json.loads(KEPT.read_text())), encoding="utf-8")
        return 0
    print(__doc__)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
