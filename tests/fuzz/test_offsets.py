"""Random programs whose kernels check every offset, and others under AddressSanitizer.

`make fuzz ARGS=--checked` and `make fuzz ARGS=--asan` run more.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from fuser import config
from tests.fuzz.__main__ import run_batch
from tests.fuzz.workers import sanitized

PORTIONS = [("sequence", 100, 12), ("gradient", 110_000, 3), ("kernel", 120_000, 12)]

# A kernel that reads before its tensor, by remainders that are taken for positive.
READS_OUTSIDE = """
import torch
import fuser.cpu.text
from fuser import register_fusion, run_fusion
from tests.backend.test_bounds import SHIFTED, shifted

fuser.cpu.text.is_nonnegative = lambda e, extents: all(c >= 0 for _, c in e.terms)
key = register_fusion(torch.fx.symbolic_trace(shifted), functional=True)
print("begun", flush=True)
run_fusion(key, list(SHIFTED))
print("not seen", flush=True)
"""


@pytest.mark.parametrize("way, first, count", PORTIONS)
def test_no_kernel_leaves_its_buffers(way, first, count):
    with config.override(check_bounds=True):
        batch = run_batch(range(first, first + count), way, "-O0")
        wrong = [f"seed {seed} by {own}: {problem}\n{program}" for seed, own, problem, program in batch if problem]
    assert not wrong, "\n".join(wrong)


@pytest.fixture(scope="module")
def environment():
    env = {**os.environ, "OMP_NUM_THREADS": "1", "FUSER_SLOWEST": "0"}
    env |= sanitized(env)
    if not all(map(os.path.exists, env["LD_PRELOAD"].split(":"))):
        pytest.skip("the compiler has no AddressSanitizer")
    return env


# Two programs as users compile them, with explicit vectors, tiles and tails.
PROGRAMS = """
from tests.fuzz.__main__ import run_batch
for seed, _, problem, program in run_batch(range(768, 770), "sequence", "-O2"):
    print(f"{seed}: {problem or program}" if problem else "", end="", flush=True)
"""

# Products, convolutions and attention without a plan, at the edges of their blocks.
ROUTINES = """
import itertools, torch
from fuser import config, machines
from fuser.cpu import attention, convolve, packed
calls = missed = 0
for isa in ("", "avx2"):
    if isa and machines.why_not(machines.find(isa)) is not None:
        continue
    with config.override(isa=isa):
        for dtype in (d for d in (torch.float32, torch.bfloat16) if packed.why_not(d, 2) is None):
            for rows, columns, inner in itertools.product((1, 9, 130), (5, 48, 50, 130), (2, 30, 1030)):
                x, w, bias = (torch.randn(*s).to(dtype) for s in ((rows, inner), (columns, inner), (columns,)))
                packed.product(x, packed.pack(w), columns, bias, ("gelu", "erf"))
                missed += packed.PRODUCTS.handle(isa, dtype, columns, True, ("gelu", "erf")).misses
                calls += 1
            steps = "times", "plus", "sum", "relu"
            for n, inner, size, columns in ((1, 8, 3, 5), (2, 2, 7, 70), (1, 516, 5, 16), (3, 1030, 1, 48)):
                for kernel, stride, padding in itertools.product((1, 2, 3), (1, 2), (0, 1, 4)):
                    out = (size + 2 * padding - kernel) // stride + 1
                    if out < 1:
                        continue
                    given = (n, size, size, inner), (n, out, out, columns)
                    x, other = (torch.randn(s).to(dtype).permute(0, 3, 1, 2) for s in given)
                    panels = convolve.pack(torch.randn(columns, inner, kernel, kernel).to(dtype))
                    sizes = columns, [kernel] * 2, [stride] * 2, [padding] * 2
                    convolve.convolution(x, panels, *sizes, steps, torch.randn(2, columns), other)
                    missed += convolve.CONVOLUTIONS.handle(isa, dtype, columns, steps).misses
                    calls += 1
            for m, n, d in ((9, 21, 2), (193, 300, 64), (1, 257, 66), (13, 515, 8)):
                for causal, mask in itertools.product((False, True), (None, (m, n), (1, n))):
                    q, k, v = (torch.randn(2, h, s, d).to(dtype) for h, s in ((2, m), (1, n), (1, n)))
                    around = None if mask is None else torch.randn(mask).to(dtype)
                    attention.attend(q, k, v, causal, around, None)
                    key = isa, dtype, None, causal, None if mask is None else dtype
                    missed += attention.ATTENTION.handle(*key).misses
                    calls += 1
print(calls, missed, flush=True)
"""


def test_kernels_stay_inside_of_tensors_and_a_read_outside_ends_the_process(environment):
    """`config.check_bounds` does not see those without a plan. One process for all: it takes longer to start than they
    do."""
    command = [sys.executable, "-c", PROGRAMS + ROUTINES + READS_OUTSIDE]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    counted, _, later = run.stdout.partition("\n")
    calls, missed = map(int, counted.split() or [0, 0])
    assert calls >= 130 and missed == 0 and later.split() == ["begun"], run.stdout + run.stderr
    assert "AddressSanitizer: heap-buffer-overflow" in run.stderr, run.stderr
