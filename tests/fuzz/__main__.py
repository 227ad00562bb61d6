"""`python -m tests.fuzz N`: N random programs, each compared with eager. A seed always gives the same program.

`python -m tests.fuzz --seed S` runs one and, if it goes wrong, prints a smaller one that does. With `--state FOLDER` a
run that was stopped goes on where it was, and leaves a file for each program that went wrong.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.device import test_device, use_device

# Of 100 programs, how many go each way; on the CPU half of the last two go through the frontend without dynamo.
SHARES = {"plans": 66, "kernel": 18, "whole": 6, "backend": 8, "compile": 1, "dynamic": 1}
GPU_SHARES = {"kernel": 64, "whole": 14, "backend": 18, "compile": 4}
BATCH = 64  # programs whose kernels are compiled together
OPTIMISED = 12  # one batch in so many is compiled as for users, the others without optimisation
LARGEST = 2 << 20  # KiB of memory after which a worker is replaced: what it compiled stays loaded
RENEW = 75


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    p.add_argument("count", nargs="?", type=int, default=1000)
    p.add_argument("--start", type=int, default=0, help="the first seed")
    p.add_argument("--seed", type=int, help="only this one, shrunk")
    p.add_argument("--way", help="all programs this way, see tests/fuzz/check.py")
    p.add_argument("--device", help="where programs run, such as cuda")
    p.add_argument("--workers", type=int, default=2)
    p.add_argument("--seconds", type=float, help="stop after so long")
    p.add_argument("--state", type=Path, help="a folder for what is done and what went wrong")
    p.add_argument("--again", action="store_true", help="with --state: what went wrong is run once more")
    p.add_argument("--worker", nargs=2, metavar=("NUMBER", "FOLDER"), help=argparse.SUPPRESS)
    p.add_argument("--shrink", action="store_true", help="shrink each program that goes wrong")
    return p.parse_args()


def way_of(seed: int) -> str:
    """The way that a seed's program goes."""
    at = seed * 37 % 100
    if at >= 98 and seed // 100 % 2 and test_device() == "cpu":
        return "backend"  # dynamo takes longer for one program than the rest for thirty
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
        return way, crash(e), program


def crash(e: Exception) -> str:
    text = str(e).splitlines()
    return f"crashes with {type(e).__name__}: {text[0] if text else ''}"


def run_batch(seeds: Sequence[int], way: str | None, level: str) -> Iterator[tuple[int, str, str | None, object]]:
    """(seed, way, None, program) before each program runs, with what is wrong ("" if nothing) after it."""
    backend = _backend()
    backend.level = level
    with backend.installed():
        yield from _run_batch(backend, seeds, way)


def _run_batch(backend, seeds: Sequence[int], way: str | None) -> Iterator[tuple[int, str, str | None, object]]:
    from tests.fuzz.check import FUNCTIONAL, Judge, begin
    from tests.fuzz.generate import generate

    begun: list[tuple[int, str, Judge | str, object]] = []
    with backend.collecting():
        for seed in seeds:
            own = way or way_of(seed)
            program = generate(seed, mutate=own not in FUNCTIONAL)
            try:
                begun.append((seed, own, begin(program, own), program))
            except Exception as e:
                begun.append((seed, own, crash(e), program))
    for seed, own, judge, program in begun:
        yield seed, own, None, program
        try:
            problem = judge if isinstance(judge, str) else judge()
        except Exception as e:
            problem = crash(e)
        yield seed, own, problem, program


@functools.cache
def _backend():
    from tests.fuzz.batch import BatchBackend

    return BatchBackend()


def shrunk(seed: int, way: str | None) -> str:
    """The smallest program like that of `seed` which goes wrong, and how, as text."""
    from tests.fuzz.check import check
    from tests.fuzz.shrink import shrink

    way, problem, program = run_seed(seed, way)
    if not problem:
        return f"seed {seed} by {way}: nothing is wrong"
    crashes = problem.startswith("crashes")

    def fails(p: object) -> bool:
        try:
            found = check(p, way)  # type: ignore[arg-type]
        except Exception as e:
            return crashes and type(e).__name__ in problem
        return bool(found) and not crashes and found.startswith("raises") == problem.startswith("raises")

    small = shrink(program, fails)  # type: ignore[arg-type]
    return f"seed {seed} by {way}: {problem}\n{small}\n"


# -- workers -----------------------------------------------------------------------------------------------------------
def work(options: argparse.Namespace) -> int:
    """This worker's share of the batches: a line for each seed. RENEW if another should go on."""
    import torch

    torch.set_num_threads(1)
    gc.disable()
    number, folder = int(options.worker[0]), Path(options.worker[1])
    done, lone = read_state(folder)
    began = time.monotonic()
    with (folder / f"{number}.log").open("a") as out:
        for at in range(options.start + number * BATCH, options.start + options.count, options.workers * BATCH):
            seeds = [s for s in range(at, min(at + BATCH, options.start + options.count)) if s not in done]
            if options.seconds and time.monotonic() - began > options.seconds:
                return 0
            if seeds:
                run_logged(seeds, at, at in lone, options, folder, out)
                gc.collect()
                gc.freeze()  # what has been compiled stays: no later collection needs to look at it
            if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > LARGEST:
                return RENEW
    return 0


def run_logged(seeds, at: int, lone: bool, options, folder: Path, out) -> None:
    level = "-O2" if at // BATCH % OPTIMISED == 0 else "-O0"
    print(f"batch {at}", file=out, flush=True)
    for some in [[s] for s in seeds] if lone else [seeds]:
        if lone:
            print(some[0], options.way or way_of(some[0]), end=" ", file=out, flush=True)
        for seed, way, problem, program in run_batch(some, options.way, level):
            if problem is None:
                if not lone:
                    print(seed, way, end=" ", file=out, flush=True)
                continue
            print("ok" if not problem else f"WRONG {problem}".replace("\n", " "), file=out, flush=True)
            if problem:
                (folder / f"wrong-{seed}-{way}.txt").write_text(f"{level}: {problem}\n{program}\n")
            if problem and options.shrink:
                print("".join(f"# {line}\n" for line in shrunk(seed, way).splitlines()), file=out, flush=True)
            if "CUDA error" in problem:
                os._exit(RENEW)  # nothing runs on the device any more in this process


def read_state(folder: Path) -> tuple[set[int], set[int]]:
    """The seeds that are done, and the batches that ended their process before any program had begun."""
    lines = [line for f in folder.glob("*.log") for line in f.read_text().splitlines()]
    done = {int(line.split()[0]) for line in lines if line[:1].isdigit()}
    return done, {int(line.split()[1]) for line in lines if line.startswith("lone")}


def main() -> int:
    options = parse()
    use_device(options.device)
    if options.worker:
        return work(options)
    if options.seed is not None:
        print(shrunk(options.seed, options.way))
        return 0
    if options.state:
        options.state.mkdir(parents=True, exist_ok=True)
        return report(run_workers(options, options.state))
    with tempfile.TemporaryDirectory() as folder:
        return report(run_workers(options, Path(folder)))


def report(lines: Sequence[str]) -> int:
    """Print how many programs ran and what was wrong, with the programs; 1 if anything was."""
    from tests.fuzz.check import FUNCTIONAL
    from tests.fuzz.generate import generate

    counts = Counter(line.split()[1] for line in lines if line[:1].isdigit())
    wrong = [line for line in lines if " ok" not in line and line[:1].isdigit()]
    ways = ", ".join(f"{n} by {way}" for way, n in sorted(counts.items()))
    print(f"{sum(counts.values())} programs ({ways}), {len(wrong)} wrong")
    for line in lines:
        if line in wrong:
            seed, way = line.split()[:2]
            print(f"{line}\n{generate(int(seed), mutate=way not in FUNCTIONAL)}")
        elif line.startswith("#"):
            print(line)
    return int(bool(wrong))


def run_workers(options: argparse.Namespace, folder: Path) -> list[str]:
    """All lines of all workers. A worker that dies leaves its line unfinished; another goes on behind it."""
    for i in range(options.workers):
        log = folder / f"{i}.log"
        log.touch()
        finish_line(log, None)
    for log in folder.glob("*.log") if options.again else ():
        log.write_text("".join(line for line in log.read_text().splitlines(True) if " WRONG " not in line))
    running = {i: start(options, i, folder) for i in range(options.workers)}
    while running:
        for i, process in list(running.items()):
            if process.poll() is None:
                continue
            del running[i]
            if process.returncode:
                if process.returncode != RENEW:
                    finish_line(folder / f"{i}.log", f"WRONG the process ended with code {process.returncode}")
                running[i] = start(options, i, folder)
        time.sleep(0.3)
    return [line for f in sorted(folder.glob("*.log")) for line in f.read_text().splitlines()]


def finish_line(log: Path, ending: str | None) -> None:
    """End the line at which a worker stopped: its program is at fault, or (None) is run again."""
    text = log.read_text()
    whole, _, last = text.rpartition("\n")
    if last:
        log.write_text(f"{text}{ending}\n" if ending else f"{whole}\n" if whole else "")
    elif ending and whole.rpartition("\n")[2].startswith("batch"):
        log.write_text(f"{text}{whole.rpartition(chr(10))[2].replace('batch', 'lone')}\n")


def start(options: argparse.Namespace, number: int, folder: Path) -> subprocess.Popen[bytes]:
    command = [
        sys.executable, "-m", "tests.fuzz", str(options.count), "--start", str(options.start),
        "--workers", str(options.workers), "--worker", str(number), str(folder),
    ]  # fmt: skip
    command += ["--way", options.way] if options.way else []
    command += ["--seconds", str(options.seconds)] if options.seconds else []
    command += ["--shrink"] if options.shrink else []
    # What fails on a GPU is then found in its own program.
    return subprocess.Popen(command, env={**os.environ, "OMP_WAIT_POLICY": "passive", "CUDA_LAUNCH_BLOCKING": "1"})


if __name__ == "__main__":
    sys.exit(main())
