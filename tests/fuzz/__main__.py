"""`python -m tests.fuzz N`: N random programs, each compared with eager. A seed always gives the same program.

`python -m tests.fuzz --seed S` runs one and, if it goes wrong, prints a smaller one that does. With `--state FOLDER` a
run that was stopped goes on where it was, and leaves a file for each program that went wrong.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence

from tests.device import test_device
from tests.fuzz import workers

# Of 100 programs, how many go each way; on the CPU half of the last two go through the frontend without dynamo.
SHARES = {
    "plans": 64, "kernel": 16, "whole": 6, "backend": 8, "sequence": 3, "gradient": 1, "compile": 1, "dynamic": 1,
}  # fmt: skip
GPU_SHARES = {"kernel": 64, "whole": 14, "backend": 18, "compile": 4}


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
    from tests.fuzz.check import check, program_of

    way = way or way_of(seed)
    program = program_of(seed, way)
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
    from tests.fuzz.check import Judge, begin, program_of

    begun: list[tuple[int, str, Judge | str, object]] = []
    with backend.collecting():
        for seed in seeds:
            own = way or way_of(seed)
            program = program_of(seed, own)
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


def text(seed: int, way: str) -> str:
    """The program of a seed and a way."""
    from tests.fuzz.check import program_of

    return str(program_of(seed, way))


if __name__ == "__main__":
    sys.exit(workers.main(workers.Suite("tests.fuzz", run_batch, way_of, shrunk, text), __doc__))
