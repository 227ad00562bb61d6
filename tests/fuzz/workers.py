"""Worker processes for long runs: a line for each seed, another worker where one dies, and a state to go on from."""

from __future__ import annotations

import argparse
import faulthandler
import gc
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from tests.device import use_device

OPTIMISED = 12  # one batch in so many is compiled as for users, the others without optimisation
LARGEST = 2 << 20  # KiB of memory after which a worker is replaced: what it compiled stays loaded
RENEW = 75
STACK = 8  # frames that are told of a worker that died
HANGS = 300.0  # seconds without any progress after which a worker hangs: it tells where, and ends

Event = tuple[int, str, "str | None", object]


@dataclass(frozen=True)
class Suite:
    """What runs. `run_batch(seeds, way, level)` gives (seed, way, None, program) before each program runs, with what
    is wrong ("" if nothing) after it; `way_of` a seed's way, `shrunk` a smaller program and `text` the program of a
    seed and a way; `batch` seeds go together."""

    module: str
    run_batch: Callable[[Sequence[int], str | None, str], Iterator[Event]]
    way_of: Callable[[int], str]
    shrunk: Callable[[int, str | None], str]
    text: Callable[[int, str], str]
    batch: int = 64


def parse(suite: Suite, about: str | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog=f"python -m {suite.module}", description=about)
    p.add_argument("count", nargs="?", type=int, default=1000)
    p.add_argument("--start", type=int, default=0, help="the first seed")
    p.add_argument("--seed", type=int, help="only this one, shrunk")
    p.add_argument("--way", help="all programs this way")
    p.add_argument("--device", help="where programs run, such as cuda")
    p.add_argument("--workers", type=int, default=2)
    p.add_argument("--seconds", type=float, help="stop after so long")
    p.add_argument("--state", type=Path, help="a folder for what is done and what went wrong")
    p.add_argument("--again", action="store_true", help="with --state: what went wrong is run once more")
    p.add_argument("--worker", nargs=2, metavar=("NUMBER", "FOLDER"), help=argparse.SUPPRESS)
    p.add_argument("--shrink", action="store_true", help="shrink each program that goes wrong")
    p.add_argument("--checked", action="store_true", help="kernels check every offset (config.check_bounds)")
    p.add_argument("--asan", action="store_true", help="kernels, vectors included, under AddressSanitizer")
    return p.parse_args()


def main(suite: Suite, about: str | None) -> int:
    options = parse(suite, about)
    use_device(options.device)
    if options.worker:
        return work(suite, options)
    if options.seed is not None:
        print(suite.shrunk(options.seed, options.way))
        return 0
    if options.state:
        options.state.mkdir(parents=True, exist_ok=True)
        return report(suite, run_workers(suite, options, options.state))
    with tempfile.TemporaryDirectory() as folder:
        return report(suite, run_workers(suite, options, Path(folder)))


def report(suite: Suite, lines: Sequence[str]) -> int:
    """Print how many programs ran and what was wrong, with the programs; 1 if anything was."""
    counts = Counter(line.split()[1] for line in lines if line[:1].isdigit())
    wrong = [line for line in lines if " ok" not in line and line[:1].isdigit()]
    ways = ", ".join(f"{n} by {way}" for way, n in sorted(counts.items()))
    print(f"{sum(counts.values())} programs ({ways}), {len(wrong)} wrong")
    for line in lines:
        if line in wrong:
            seed, way = line.split()[:2]
            print(f"{line}\n{suite.text(int(seed), way)}")
        elif line.startswith("#"):
            print(line)
    return int(bool(wrong))


def work(suite: Suite, options: argparse.Namespace) -> int:
    """This worker's share of the batches: a line for each seed. RENEW if another should go on."""
    import torch

    torch.set_num_threads(1)
    gc.disable()
    number, folder = int(options.worker[0]), Path(options.worker[1])
    done, lone = read_state(folder)
    began = time.monotonic()
    with (folder / f"{number}.log").open("a") as out, (folder / f"{number}.crash").open("w") as crash:
        faulthandler.enable(crash)
        watch(crash)
        end = options.start + options.count
        for at in range(options.start + number * suite.batch, end, options.workers * suite.batch):
            seeds = [s for s in range(at, min(at + suite.batch, end)) if s not in done]
            if options.seconds and time.monotonic() - began > options.seconds:
                return 0
            if seeds:
                alive()
                try:
                    run_logged(suite, seeds, at, at in lone, options, folder, out)
                except Exception:
                    crash.write(traceback.format_exc())
                    raise
                signal.setitimer(signal.ITIMER_REAL, 0)
                gc.collect()
                gc.freeze()  # what has been compiled stays: no later collection needs to look at it
            if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > LARGEST:
                return RENEW
    return 0


_watched: list[bool] = []  # not empty in a worker


def watch(crash: TextIO) -> None:
    """Have this process end where `alive` is not called for too long, with its stack in the file `crash`.

    The stack is that of the main thread alone: faulthandler writes those of a hundred threads, the main one's last.
    """
    faulthandler.register(signal.SIGALRM, crash, all_threads=False, chain=True)  # whose next handler ends the process
    _watched.append(True)


def alive() -> None:
    """Wait another while before this process counts as hanging; nothing in a process that is no worker."""
    if _watched:
        signal.setitimer(signal.ITIMER_REAL, HANGS)


def ended(code: int) -> str:
    """How a process ended, by its exit code."""
    return f"nothing happened for {HANGS:.0f} s" if code == -signal.SIGALRM else f"the process ended with code {code}"


def run_logged(suite: Suite, seeds, at: int, lone: bool, options, folder: Path, out) -> None:
    level = "-O2" if at // suite.batch % OPTIMISED == 0 else "-O0"
    print(f"batch {at}", file=out, flush=True)
    for some in [[s] for s in seeds] if lone else [seeds]:
        if lone:
            print(some[0], options.way or suite.way_of(some[0]), end=" ", file=out, flush=True)
        for seed, way, problem, program in suite.run_batch(some, options.way, level):
            if problem is None:
                if not lone:
                    print(seed, way, end=" ", file=out, flush=True)
                continue
            print("ok" if not problem else f"WRONG {problem}".replace("\n", " "), file=out, flush=True)
            if problem:
                (folder / f"wrong-{seed}-{way}.txt").write_text(f"{level}: {problem}\n{program}\n")
            if problem and options.shrink:
                print("".join(f"# {line}\n" for line in suite.shrunk(seed, way).splitlines()), file=out, flush=True)
            if "CUDA error" in problem:
                os._exit(RENEW)  # nothing runs on the device any more in this process


def read_state(folder: Path) -> tuple[set[int], set[int]]:
    """The seeds that are done, and the batches that ended their process before any program had begun."""
    lines = [line for f in folder.glob("*.log") for line in f.read_text().splitlines()]
    done = {int(line.split()[0]) for line in lines if line[:1].isdigit()}
    return done, {int(line.split()[1]) for line in lines if line.startswith("lone")}


def run_workers(suite: Suite, options: argparse.Namespace, folder: Path) -> list[str]:
    """All lines of all workers. A worker that dies leaves its line unfinished; another goes on behind it."""
    for i in range(options.workers):
        log = folder / f"{i}.log"
        log.touch()
        finish_line(log, None)
    for log in folder.glob("*.log") if options.again else ():
        log.write_text("".join(line for line in log.read_text().splitlines(True) if " WRONG " not in line))
    running = {i: start(suite, options, i, folder) for i in range(options.workers)}
    while running:
        for i, process in list(running.items()):
            if process.poll() is None:
                continue
            del running[i]
            if process.returncode:
                if process.returncode != RENEW:
                    at = crashed_at(folder / f"{i}.crash")
                    finish_line(folder / f"{i}.log", f"WRONG {ended(process.returncode)}{at}")
                running[i] = start(suite, options, i, folder)
        time.sleep(0.3)
    return [line for f in sorted(folder.glob("*.log")) for line in f.read_text().splitlines()]


def crashed_at(path: Path) -> str:
    """Where a worker's main thread was when it died, innermost first; "" if nobody could say."""
    text = path.read_text() if path.exists() else ""
    at = max(text.find("Current thread"), 0)  # of a worker that hung there is but one
    stack = text[at:].partition("\n\n")[0]
    frames = re.findall(r'File "(.*?)", line (\d+) in (\S+)', stack)[:STACK]
    if "Traceback (most recent call last)" in text:  # the harness itself raised: innermost last
        frames = re.findall(r'File "(.*?)", line (\d+), in (\S+)', text)[: -STACK - 1 : -1]
        return f", {text.splitlines()[-1][:200]}, in " + _told(frames)
    return ", in " + _told(frames) if frames else ""


def _told(frames: Sequence[tuple[str, str, str]]) -> str:
    return " < ".join(f"{Path(file).name}:{line} {name}" for file, line, name in frames)


def finish_line(log: Path, ending: str | None) -> None:
    """End the line at which a worker stopped: its program is at fault, or (None) is run again."""
    text = log.read_text()
    whole, _, last = text.rpartition("\n")
    if last:
        log.write_text(f"{text}{ending}\n" if ending else f"{whole}\n" if whole else "")
    elif ending and whole.rpartition("\n")[2].startswith("batch"):
        log.write_text(f"{text}{whole.rpartition(chr(10))[2].replace('batch', 'lone')}\n")


def start(suite: Suite, options: argparse.Namespace, number: int, folder: Path) -> subprocess.Popen[bytes]:
    command = [
        sys.executable, "-m", suite.module, str(options.count), "--start", str(options.start),
        "--workers", str(options.workers), "--worker", str(number), str(folder),
    ]  # fmt: skip
    command += ["--way", options.way] if options.way else []
    command += ["--seconds", str(options.seconds)] if options.seconds else []
    command += ["--shrink"] if options.shrink else []
    # What fails on a GPU is then found in its own program.
    env = {**os.environ, "OMP_WAIT_POLICY": "passive", "CUDA_LAUNCH_BLOCKING": "1"}
    env |= {"FUSER_CHECK_BOUNDS": "1"} if options.checked else {}
    return subprocess.Popen(command, env=env | sanitized(env) if options.asan else env)


def sanitized(env: Mapping[str, str]) -> dict[str, str]:
    """What a process needs whose kernels are compiled with AddressSanitizer.

    A load or store outside of a tensor that torch allocated then ends the process. Temporaries of one call share a
    block, so what leaves one of them for another is seen by `config.check_bounds` alone.
    """
    compiler = env.get("CXX", "g++")
    loaded = []
    for name in ("libasan.so", "libstdc++.so.6"):  # which finds the functions of the second that it replaces
        found = subprocess.run([*shlex.split(compiler), f"-print-file-name={name}"], capture_output=True, text=True)
        loaded.append(str(Path(found.stdout.strip()).resolve()))
    return {
        "CXX": f"{compiler} -fsanitize=address -fno-omit-frame-pointer",
        "LD_PRELOAD": ":".join(loaded),
        "ASAN_OPTIONS": "detect_leaks=0:detect_odr_violation=0:abort_on_error=0",
        "FUSER_CACHE_DIR": "",
    }
