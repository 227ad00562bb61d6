"""`python -m tests.opinfo`: the whole database through fuser; `--write docs/operators.md` makes the table.

The work is dealt to worker processes in blocks: one operator, one dtype, one route. A worker that dies is a crash of
the block that it was at; another goes on behind it. With `--results` a run that was stopped goes on where it was.

The route `batch` is torch.compile for every sample of the database, many in one graph (batches.py). Its blocks hold
all dtypes of an operator, and it goes through the operators in rounds: a few samples of each dtype, then more.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.device import use_device

CRASHED = "crashed"
BATCH = "batch"  # that route
GO_ON = 75  # a worker's exit code when it has loaded so much that a fresh process should go on
MAPPINGS = 30_000  # of the 65,530 that a process may have: each loaded library takes some
LARGEST = 4 << 20  # KiB of memory after which a fresh process goes on: what it compiled stays loaded
ROUTES = ["functional", "call:3", "compile:2"]
COLLECT = 200  # samples after which garbage is collected
ROUNDS = (2, 8, 32, 128, None)  # how many samples of each dtype have run after each round of the route `batch`
BATCHED = (24, 24, 96, 96, 96)  # samples that are one graph, in each round
PLAIN = 2  # from this round on kernels are compiled without optimisation, which takes less than half the time


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="python -m tests.opinfo", description=__doc__)
    p.add_argument("--ops", nargs="*", help="only operators whose name starts with one of these")
    p.add_argument("--families", nargs="*", help="only these families, such as pointwise or other")
    p.add_argument("--dtypes", nargs="*", help="only these dtypes, such as float32")
    p.add_argument(
        "--routes", nargs="*", default=ROUTES,
        help="see tests/opinfo/runner.py; call:3 runs three samples of each operator and dtype",
    )  # fmt: skip
    p.add_argument("--samples", type=int, default=None, help="at most so many of each operator and dtype")
    p.add_argument("--device", help="where samples run, such as cuda")
    p.add_argument("--workers", type=int, default=2)
    p.add_argument("--seconds", type=float, default=900.0, help="one block may take so long")
    p.add_argument("--write", type=Path, help="the file for the table of operators")
    p.add_argument("--results", type=Path, help="a folder that keeps results; blocks that it has are not run again")
    p.add_argument("--worker", nargs=2, metavar=("NUMBER", "FOLDER"), help=argparse.SUPPRESS)
    return p.parse_args(argv)


# -- a worker ----------------------------------------------------------------------------------------------------------
def work(options: argparse.Namespace) -> int:
    """Run this worker's share of the blocks, appending a line for each sample to its file in the folder."""
    import torch

    from fuser import config
    from fuser.compiler import register_backend

    optimise("-O1")  # takes less time
    from tests.opinfo.batches import Together  # imports the frontend, which asks the compiler what flags it takes

    number, folder = int(options.worker[0]), Path(options.worker[1])
    torch.set_num_threads(1)
    done, crashes, complete = ended(folder)
    gc.disable()
    with (folder / f"worker{number}.jsonl").open("a") as out:
        if BATCH in options.routes:
            register_backend("cpu", Together())
            config.set(compile_workers=2 * max(BATCHED))  # they wait for one compiler
        for at, (op, dtype, route, most) in enumerate(blocks(options)):
            name = block_name(op, dtype, route)
            if at % options.workers != number or name in done or (dtype is None and name[0] in complete):
                continue
            say(out, {"begin": name})
            if dtype is None:
                optimise("-O1" if int(route.partition(":")[2]) < PLAIN else "-O0")
                made = run_rounds(op, route, crashes, lambda ids: say(out, {"batch": ids}))
            else:
                made = run_block(op, dtype, route, most, options.seconds)
            for n, record in enumerate(made):
                if "complete" in record:
                    complete.add(record["complete"])
                say(out, record)
                if n % COLLECT == 0:
                    gc.collect()
                    gc.freeze()  # what has been compiled stays: no later collection needs to look at it
            say(out, {"end": name})
            if full():
                return GO_ON
    return 0


def optimise(level: str) -> None:
    """From now on kernels are compiled at this level, such as "-O1"."""
    from fuser.cpu import toolchain
    from fuser.runtime import compilers

    flags = tuple(level if f.startswith("-O") else f for f in compilers.FLAGS)
    if flags != compilers.FLAGS:
        compilers.FLAGS = flags
        toolchain._probe.cache_clear()


def full() -> bool:
    """Whether this process has loaded as much as one should."""
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MAPPINGS:
        return True
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > LARGEST


def say(out: Any, record: dict[str, Any]) -> None:
    out.write(json.dumps(record) + "\n")
    out.flush()


def blocks(options: argparse.Namespace) -> Iterator[tuple[Any, Any, str, int | None]]:
    """(operator, dtype, route, most samples) of all blocks, one family after the other."""
    from tests.opinfo import database

    wanted = tuple(options.ops) if options.ops else ("",)
    families = options.families or database.FAMILY_NAMES
    known = database.operators()
    ops = [op for f in families for op in known if (database.family_of(op) or "other") == f]
    ops = [op for op in ops if database.full_name(op).startswith(wanted)]
    routes = [route for route in options.routes if route != BATCH]
    if BATCH in options.routes:
        yield from ((op, None, f"{BATCH}:{n}", None) for n in range(len(ROUNDS)) for op in ops)
    for op in ops:
        for dtype in database.dtypes_of(op):
            if not options.dtypes or str(dtype).removeprefix("torch.") in options.dtypes:
                for route in routes:
                    name, _, most = route.partition(":")
                    yield op, dtype, name, int(most) if most else options.samples


def block_name(op: Any, dtype: Any, route: str) -> tuple[str, str, str]:
    from tests.opinfo import database

    return database.full_name(op), "all" if dtype is None else name_of(dtype), route


def name_of(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def run_block(op: Any, dtype: Any, route: str, most: int | None, seconds: float) -> Iterator[dict[str, Any]]:
    """A record for each sample."""
    from tests.opinfo import database, runner

    began = time.monotonic()
    base = dict(zip(("op", "dtype", "route"), block_name(op, dtype, route)))
    try:
        samples = list(database.samples_of(op, dtype, most))
    except Exception as e:  # the database's own trouble
        yield {**base, "status": "skipped", "reason": f"no samples: {type(e).__name__}: {str(e)[:100]}"}
        return
    for n, sample in enumerate(samples):
        if time.monotonic() - began > seconds:
            yield {**base, "sample": n, "status": "skipped", "reason": "out of time"}
            return
        made = runner.make_sample(op.op, sample, database.undefined(op, sample))
        outcome = runner.run(made, route)
        record = {**base, "sample": n, "status": outcome.status, "reason": outcome.reason[:200]}
        yield {**record, "problems": outcome.problems} if outcome.problems else record


def run_rounds(
    op: Any, route: str, crashes: list[list[Any]], note: Callable[[list[Any]], None]
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """A record for each sample of one round: all dtypes, in batches. `crashes`: batches in which a worker died."""
    from tests.opinfo import batches, database, runner

    name, number = database.full_name(op), int(route.partition(":")[2])
    waiting, most = [], 0
    for dtype in database.dtypes_of(op):
        try:
            made = list(database.samples_of(op, dtype, None))
        except Exception as e:  # the database's own trouble
            yield {"op": name, "dtype": name_of(dtype), "route": BATCH, "status": "skipped",
                   "reason": f"no samples: {type(e).__name__}: {str(e)[:100]}"}  # fmt: skip
            continue
        most = max(most, len(made))
        waiting += [([name, name_of(dtype), n], made[n]) for n in of_round(len(made), number)]
    size = BATCHED[number]
    while waiting:
        ids = [i for i, _ in waiting[:size]]
        while len(ids) > 1 and ids in crashes:
            ids = ids[: len(ids) // 2]
        now, waiting = waiting[: len(ids)], waiting[len(ids) :]
        note(ids)
        if ids in crashes:
            outcomes, broken = [runner.Outcome(CRASHED, "the process died")], False
        else:
            outcomes, broken = batches.run_batch(
                [runner.make_sample(op.op, s, database.undefined(op, s)) for _, s in now]
            )
        size = 1 if broken else size  # each break is a graph more, and makes the rest's code anew
        for (_, dtype, n), outcome in zip(ids, outcomes):
            record = {"op": name, "dtype": dtype, "route": BATCH, "sample": n, "of": len(ids),
                      "status": outcome.status, "reason": outcome.reason[:200]}  # fmt: skip
            yield {**record, "problems": outcome.problems} if outcome.problems else record
    if most <= (ROUNDS[number] or most):
        yield {"complete": name}


def of_round(n: int, number: int) -> list[int]:
    """Which of `n` samples a round runs: as many as `ROUNDS` says, spread over all, less those of earlier rounds."""

    def spread(most: int | None) -> set[int]:
        return set(range(n)) if most is None or most >= n else {i * n // most for i in range(most)}

    earlier = set().union(*(spread(most) for most in ROUNDS[:number]))
    return sorted(spread(ROUNDS[number]) - earlier)


# -- all workers -------------------------------------------------------------------------------------------------------
def run_all(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """The records of all workers, and of earlier runs in the folder."""
    running = {i: start(options, i, folder) for i in range(options.workers)}
    while running:
        for i, process in list(running.items()):
            code = process.poll()
            if code is None:
                continue
            del running[i]
            if code == 0:
                continue
            if code != GO_ON:
                note_crash(folder / f"worker{i}.jsonl", code)
            running[i] = start(options, i, folder)
        time.sleep(0.5)
    return finished(folder)


def note_crash(path: Path, code: int) -> None:
    """End the last block of a worker that died; of a batch, say so, and it is done again in halves."""
    marks = [r for r in read_lines(path) if "begin" in r or "end" in r]
    if not marks or "end" in marks[-1]:
        raise SystemExit(f"{path.stem} ended with code {code} outside of any block")
    op, dtype, route = block = marks[-1]["begin"]
    with path.open("a") as out:
        out.write("\n")  # after what may be half a line
        batch = next((r.get("batch") for r in reversed(read_lines(path)) if "batch" in r or "begin" in r), None)
        if batch:
            say(out, {"died": batch, "code": code})
            return
        reason = f"the process ended with code {code}"
        say(out, {"op": op, "dtype": dtype, "route": route, "status": CRASHED, "reason": reason})
        say(out, {"end": block})


def start(options: argparse.Namespace, number: int, folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.opinfo", "--worker", str(number), str(folder)]
    for name in ("ops", "families", "dtypes", "routes"):
        if getattr(options, name):
            command += [f"--{name}", *getattr(options, name)]
    if options.samples is not None:
        command += ["--samples", str(options.samples)]
    command += ["--seconds", str(options.seconds), "--workers", str(options.workers)]
    own = {"OMP_WAIT_POLICY": "passive", "FUSER_CHECK_IR": "1", "FUSER_CACHE_DIR": ""}
    return subprocess.Popen(command, env={**os.environ, **own})


def read_lines(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]


def ended(folder: Path) -> tuple[set[tuple[str, str, str]], list[list[Any]], set[str]]:
    """Blocks that came to their end, batches in which a worker died, operators all of whose samples ran in batches."""
    lines = [r for path in sorted(folder.glob("worker*.jsonl")) for r in read_lines(path)]
    blocks = {tuple(r["end"]) for r in lines if "end" in r}
    return blocks, [r["died"] for r in lines if "died" in r], {r["complete"] for r in lines if "complete" in r}


def finished(folder: Path) -> list[dict[str, Any]]:
    """The records of blocks that came to their end."""
    out: list[dict[str, Any]] = []
    for path in sorted(folder.glob("worker*.jsonl")):
        block: list[dict[str, Any]] = []
        for record in read_lines(path):
            if "begin" in record:
                block = []
            elif "end" in record:
                out += block
                block = []
            elif "status" in record:
                block.append(record)
    return out


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
            where = f"{r['op']} {r['dtype']} sample {r.get('sample', '')} by {r['route']}"
            lines.append(f"{r['status']}: {where} ({r['reason']}): {'; '.join(r.get('problems', []))[:300]}")
    return "\n".join(lines)


def main() -> int:
    options = parse()
    use_device(options.device)
    if options.worker:
        return work(options)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.results or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        records = run_all(options, folder)
    print(summary(records))
    if options.write:
        from tests.opinfo.table import table

        options.write.write_text(table(records))
    return int(any(r["status"] in ("wrong", CRASHED) for r in records))


if __name__ == "__main__":
    sys.exit(main())
