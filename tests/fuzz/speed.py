"""`python -m tests.fuzz.speed N`: random programs over 4096 elements and more, fused and by ATen, by time.

Both run the same graph on one thread; calls alternate, and the least time of each counts. Prints every program slower
than `--limit` times ATen, with its kernel or why there is none, and how many there were. `--slowest 0` measures kernels
that users would not meet, since a slow one is left at its first call. `--small-first` makes them for a few elements in
each dim, where they are not timed, and then measures those that serve the program's own sizes, too.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import warnings

import torch

from fuser import config, register_fusion
from fuser.contests.trial import compete
from fuser.interface import fusion_handle, kernel_spec
from fuser.runtime import launcher
from tests.fuzz import generate as generator
from tests.fuzz.program import Program, graph_of, make_inputs

SIZES = ((4096,), (64, 128), (16, 512), (8, 32, 64), (300, 40), (2, 16, 24, 24), (100_000,))


def large_program(seed: int) -> Program | None:
    """The program of a seed over inputs of at least 4096 elements in all, None if it has none."""
    before = generator.SIZES, generator.MOST_ELEMENTS
    generator.SIZES, generator.MOST_ELEMENTS = SIZES, 400_000  # type: ignore[assignment]
    try:
        program = generator.generate(seed, most=8)
    finally:
        generator.SIZES, generator.MOST_ELEMENTS = before
    return program if any(t.numel() >= 4096 for t in make_inputs(program)) else None


def small(program: Program) -> dict[int, int]:
    """A few elements for each dim of the inputs: others where they were others."""
    extents = sorted({n for x in program.inputs for n in x.size if n > 1})
    return {n: 3 + 2 * k for k, n in enumerate(extents)}


def measure(program: Program, first: dict[int, int] | None = None) -> tuple[float, str]:
    """The time of a program registered as it is by ATen's, and the kernel's name or why there is none.

    With sizes for a `first` call: of the kernel that it made, if that serves the program's own sizes.
    """
    key = register_fusion(graph_of(program))
    spec, handle, inputs = kernel_spec(key), fusion_handle(key), make_inputs(program)
    with torch.no_grad():
        if first is not None:
            with contextlib.suppress(Exception):
                handle(*make_inputs(program, first))
        made = len(spec.store.kernels)
        handle(*inputs)
        if first is not None and not 0 < made == len(spec.store.kernels):
            return 0.0, "another kernel"
        found = compete(handle, spec.fallback, inputs, 1.0).ratio
        if found > 1.0:  # once more: the machine may have been busy
            found = min(found, compete(handle, spec.fallback, inputs, 1.0).ratio)
    reasons = list(spec.store.fallbacks)
    return found, f"ATen: {reasons[0]}" if reasons else spec.store.kernels[0].name


def main() -> None:
    p = argparse.ArgumentParser(prog="python -m tests.fuzz.speed", description=__doc__)
    p.add_argument("count", nargs="?", type=int, default=100)
    p.add_argument("--start", type=int, default=0)
    p.add_argument("--limit", type=float, default=1.05)
    p.add_argument("--small-first", action="store_true", help="time kernels that were made for few elements")
    p.add_argument("--slowest", type=float, default=config.slowest, help="config.slowest: leave what is slower")
    options = p.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    launcher.wait()
    ratios, fused, left, slow = [], 0, 0, 0
    for seed in range(options.start, options.start + options.count):
        program = large_program(seed)
        if program is None:
            continue
        with config.override(slowest=options.slowest):
            found = measure(program, small(program) if options.small_first else None)
        if not found[0]:
            continue
        ratios.append(found[0])
        fused += not found[1].startswith("ATen")
        left += found[1].startswith("ATen: kernel ")
        slow += found[0] > options.limit and not found[1].startswith("ATen")
        if found[0] > options.limit:
            print(f"seed {seed}: {found[0]:.2f} x eager, {found[1]}\n{program}\n", flush=True)
    calls = sum(r > options.limit for r in ratios) - slow
    median = statistics.median(ratios)
    counts = f"{len(ratios)} programs, {fused} fused, {left} left to ATen by their time"
    print(f"{counts}, median {median:.2f} x eager, above {options.limit}: {slow} by kernels, {calls} by ATen")


if __name__ == "__main__":
    main()
