"""`python -m tests.fuzz N`: N random programs, each compared with eager. A seed always gives the same program.

`python -m tests.fuzz --seed S` runs one and, if it goes wrong, prints a smaller one that does.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.device import test_device, use_device

# Of 100 programs, how many go each way.
SHARES = {"plans": 40, "kernel": 35, "whole": 10, "backend": 13, "compile": 2}
GPU_SHARES = {"kernel": 64, "whole": 14, "backend": 18, "compile": 4}


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    p.add_argument("count", nargs="?", type=int, default=1000)
    p.add_argument("--start", type=int, default=0, help="the first seed")
    p.add_argument("--seed", type=int, help="only this one, shrunk")
    p.add_argument("--way", help="all programs this way, see tests/fuzz/check.py")
    p.add_argument("--device", help="where programs run, such as cuda")
    p.add_argument("--workers", type=int, default=2)
    p.add_argument("--seconds", type=float, help="stop after so long")
    p.add_argument("--worker", nargs=2, metavar=("NUMBER", "FILE"), help=argparse.SUPPRESS)
    p.add_argument("--shrink", action="store_true", help="shrink each program that goes wrong")
    return p.parse_args()


def way_of(seed: int) -> str:
    """The way that a seed's program goes."""
    at = seed * 37 % 100
    for way, share in (SHARES if test_device() == "cpu" else GPU_SHARES).items():
        at -= share
        if at < 0:
            return way
    raise AssertionError("the shares add up to 100")


def run_seed(seed: int, way: str | None) -> tuple[str, str, object]:
    """The way, what is wrong ("" if nothing) and the program."""
    from tests.fuzz.check import FUNCTIONAL, check
    from tests.fuzz.generate import generate

    way = way or way_of(seed)
    program = generate(seed, mutate=way not in FUNCTIONAL)
    try:
        return way, check(program, way), program
    except Exception as e:
        text = str(e).splitlines()
        return way, f"crashes with {type(e).__name__}: {text[0] if text else ''}", program


def shrunk(seed: int, way: str | None) -> str:
    """The smallest program like that of `seed` which goes wrong, and how, as text."""
    from tests.fuzz.check import check
    from tests.fuzz.shrink import shrink

    way, problem, program = run_seed(seed, way)
    if not problem:
        return f"seed {seed} by {way}: nothing is wrong"
    crash = problem.startswith("crashes")

    def fails(p: object) -> bool:
        try:
            found = check(p, way)  # type: ignore[arg-type]
        except Exception as e:
            return crash and type(e).__name__ in problem
        return bool(found) and not crash and found.startswith("raises") == problem.startswith("raises")

    small = shrink(program, fails)  # type: ignore[arg-type]
    return f"seed {seed} by {way}: {problem}\n{small}\n"


def work(options: argparse.Namespace) -> None:
    """This worker's share of the seeds, a line for each."""
    import torch

    torch.set_num_threads(1)
    number, path = int(options.worker[0]), Path(options.worker[1])
    done = {int(line.split()[0]) for line in path.read_text().splitlines() if line[:1].isdigit()}
    began = time.monotonic()
    with path.open("a") as out:
        for seed in range(options.start + number, options.start + options.count, options.workers):
            if seed in done:
                continue
            if options.seconds and time.monotonic() - began > options.seconds:
                return
            print(seed, way_of(seed) if not options.way else options.way, end=" ", file=out, flush=True)
            way, problem, _ = run_seed(seed, options.way)
            print("ok" if not problem else f"WRONG {problem}".replace("\n", " "), file=out, flush=True)
            if problem and options.shrink:
                print("".join(f"# {line}\n" for line in shrunk(seed, way).splitlines()), file=out, flush=True)


def main() -> int:
    options = parse()
    use_device(options.device)
    if options.worker:
        work(options)
        return 0
    if options.seed is not None:
        print(shrunk(options.seed, options.way))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        lines = run_workers(options, Path(folder))
    counts = Counter(line.split()[1] for line in lines if line[:1].isdigit())
    wrong = [line for line in lines if " ok" not in line and line[:1].isdigit()]
    ways = ", ".join(f"{n} by {way}" for way, n in counts.items())
    print(f"{sum(counts.values())} programs ({ways}), {len(wrong)} wrong")
    print("\n".join(line for line in lines if " ok" not in line))
    return int(bool(wrong))


def run_workers(options: argparse.Namespace, folder: Path) -> list[str]:
    """All lines of all workers. A worker that dies leaves its line unfinished; another goes on behind it."""
    running = {}
    for i in range(options.workers):
        (folder / f"{i}").touch()
        running[i] = start(options, i, folder / f"{i}")
    while running:
        for i, process in list(running.items()):
            if process.poll() is None:
                continue
            del running[i]
            if process.returncode:
                with (folder / f"{i}").open("a") as out:
                    print(f"WRONG the process ended with code {process.returncode}", file=out)
                running[i] = start(options, i, folder / f"{i}")
        time.sleep(0.3)
    return [line for i in range(options.workers) for line in (folder / f"{i}").read_text().splitlines()]


def start(options: argparse.Namespace, number: int, path: Path) -> subprocess.Popen[bytes]:
    command = [
        sys.executable, "-m", "tests.fuzz", str(options.count), "--start", str(options.start),
        "--workers", str(options.workers), "--worker", str(number), str(path),
    ]  # fmt: skip
    command += ["--way", options.way] if options.way else []
    command += ["--seconds", str(options.seconds)] if options.seconds else []
    command += ["--shrink"] if options.shrink else []
    return subprocess.Popen(command, env={**os.environ, "OMP_WAIT_POLICY": "passive"})


if __name__ == "__main__":
    sys.exit(main())
