"""`python -m tests.opinfo`: the whole database through fuser; `--write docs/operators.md` makes the table.

Operators are dealt to worker processes. A worker that dies is a crash of the operator that it was at; another goes on
behind it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CRASHED = "crashed"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="python -m tests.opinfo", description=__doc__)
    p.add_argument("--ops", nargs="*", help="only operators whose name starts with one of these")
    p.add_argument("--dtypes", nargs="*", help="only these dtypes, such as float32")
    p.add_argument("--routes", nargs="*", default=["call", "aten", "copies"], help="see tests/opinfo/runner.py")
    p.add_argument("--samples", type=int, default=None, help="at most so many of each operator and dtype")
    p.add_argument("--workers", type=int, default=2)
    p.add_argument("--seconds", type=float, default=120.0, help="one operator may take so long")
    p.add_argument("--write", type=Path, help="the file for the table of operators")
    p.add_argument("--results", type=Path, help="read results of an earlier run, or keep those of this one, here")
    p.add_argument("--worker", nargs=3, metavar=("NUMBER", "OF", "FILE"), help=argparse.SUPPRESS)
    return p.parse_args(argv)


# -- a worker ----------------------------------------------------------------------------------------------------------
def work(options: argparse.Namespace) -> None:
    """Run this worker's share of the operators, appending a line for each sample to the file."""
    import torch

    from tests.opinfo import database

    number, of, path = int(options.worker[0]), int(options.worker[1]), Path(options.worker[2])
    torch.set_num_threads(1)
    done = {line["op"] for line in read_lines(path)}
    ops = [op for i, op in enumerate(chosen(options)) if i % of == number]
    with path.open("a") as out:
        for op in ops:
            name = database.full_name(op)
            if name in done:
                continue
            say(out, {"op": name, "begin": True})
            for record in run_operator(op, options):
                say(out, record)


def say(out: Any, record: dict[str, Any]) -> None:
    out.write(json.dumps(record) + "\n")
    out.flush()


def chosen(options: argparse.Namespace) -> list[Any]:
    from tests.opinfo import database

    wanted = tuple(options.ops) if options.ops else ("",)
    return [op for op in database.operators() if database.full_name(op).startswith(wanted)]


def run_operator(op: Any, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A record for each sample and route."""
    from tests.opinfo import database, runner

    began = time.monotonic()
    for dtype in database.dtypes_of(op):
        short = str(dtype).removeprefix("torch.")
        if options.dtypes and short not in options.dtypes:
            continue
        base = {"op": database.full_name(op), "dtype": short}
        try:
            samples = list(database.samples_of(op, dtype, options.samples))
        except Exception as e:  # the database's own trouble
            yield {**base, "status": "skipped", "reason": f"no samples: {type(e).__name__}: {str(e)[:100]}"}
            continue
        for n, sample in enumerate(samples):
            if time.monotonic() - began > options.seconds:
                yield {**base, "sample": n, "status": "skipped", "reason": "out of time"}
                return
            for route in options.routes:
                outcome = runner.run(runner.make_sample(op.op, sample), route)
                yield {
                    **base, "sample": n, "route": route, "status": outcome.status, "reason": outcome.reason[:200],
                    "problems": outcome.problems,
                }  # fmt: skip


# -- all workers -------------------------------------------------------------------------------------------------------
def run_all(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """The records of all workers."""
    paths = [folder / f"worker{i}.jsonl" for i in range(options.workers)]
    running: dict[int, subprocess.Popen[bytes]] = {}
    for i, path in enumerate(paths):
        path.touch()
        running[i] = start(options, i, path)
    while running:
        for i, process in list(running.items()):
            code = process.poll()
            if code is None:
                continue
            del running[i]
            if code:
                last = next((r for r in reversed(read_lines(paths[i])) if "begin" in r), None)
                if last is None:
                    raise SystemExit(f"worker {i} ended with code {code} before its first operator")
                with paths[i].open("a") as out:
                    say(out, {"op": last["op"], "status": CRASHED, "reason": f"the process ended with code {code}"})
                running[i] = start(options, i, paths[i])
        time.sleep(0.5)
    return [r for path in paths for r in read_lines(path) if "begin" not in r]


def start(options: argparse.Namespace, number: int, path: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.opinfo", "--worker", str(number), str(options.workers), str(path)]
    for name in ("ops", "dtypes", "routes"):
        if getattr(options, name):
            command += [f"--{name}", *getattr(options, name)]
    if options.samples is not None:
        command += ["--samples", str(options.samples)]
    command += ["--seconds", str(options.seconds)]
    return subprocess.Popen(command, env={**os.environ, "OMP_WAIT_POLICY": "passive", "FUSER_CHECK_IR": "1"})


def read_lines(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def summary(records: list[dict[str, Any]]) -> str:
    """Counts by status, and everything that is wrong."""
    counts = Counter(r["status"] for r in records)
    lines = [", ".join(f"{n} {status}" for status, n in counts.most_common())]
    seen: Counter[tuple[str, str]] = Counter()
    for r in records:
        if r["status"] not in ("wrong", CRASHED, "refused"):
            continue
        seen[r["op"], r["status"]] += 1
        if seen[r["op"], r["status"]] <= 3:
            where = f"{r['op']} {r.get('dtype', '')} sample {r.get('sample', '')} by {r.get('route', '')}"
            lines.append(f"{r['status']}: {where} ({r['reason']}): {'; '.join(r.get('problems', []))[:300]}")
    return "\n".join(lines)


def main() -> int:
    options = parse()
    if options.worker:
        work(options)
        return 0
    if options.results and options.results.exists():
        records = read_lines(options.results)
    else:
        with tempfile.TemporaryDirectory() as folder:
            records = run_all(options, Path(folder))
    if options.results and not options.results.exists():
        options.results.write_text("".join(json.dumps(r) + "\n" for r in records))
    print(summary(records))
    if options.write:
        from tests.opinfo.table import table

        options.write.write_text(table(records))
    return int(any(r["status"] in ("wrong", CRASHED) for r in records))


if __name__ == "__main__":
    sys.exit(main())
