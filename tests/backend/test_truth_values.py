"""Truth values that a pass leaves in arrays for a later one: g++ vectorises each loop that joins them with others."""

from __future__ import annotations

import pathlib
import re
import subprocess

import pytest
import torch
from torch import fx

from fuser import compiler, machines, pipeline
from fuser.canonical import canonicalize
from fuser.cpu import toolchain
from tests.backend.fused import compare, fuse, no_fallback

LABELS = torch.arange(24).view(2, 3, 4).repeat(1, 16, 16) % 7 - 1
CLASSES = torch.arange(5).view(1, 5, 1, 1)
SCORES = torch.linspace(-3, 3, 2 * 5 * 48 * 64).view(2, 5, 48, 64).sin()


def _chosen(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """A softmax along a dim of what two conditions choose, one of which is the same along it."""
    return torch.where(other, x, -1.0).softmax(1)


def _gradient(x: torch.Tensor, labels: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """The gradient of a cross entropy of images with labels to ignore."""
    chosen = labels.ne(-1).unsqueeze(1) & (labels.unsqueeze(1) == classes)
    loss = torch.where(chosen, -1.0 / 6000, 0.0)
    return loss - torch.exp(x) * loss.sum(1, keepdim=True)


FUNCTIONS = {
    "labels": lambda x, n, c: _chosen(x, n.ne(-1).unsqueeze(1) & (n.unsqueeze(1) == c)),
    "float32": lambda x, n, c: _chosen(x, n.ne(-1).unsqueeze(1) & (x > 0.25)),
    "float64": lambda x, n, c: _chosen(x, n.ne(-1).unsqueeze(1) & (x.double() * 1.5 > 0.25)),
    "either": lambda x, n, c: _chosen(x, n.ne(-1).unsqueeze(1) | (x > 0.25)),
    "cross entropy": lambda x, n, c: _gradient(x, n.clamp(-1, 4), c),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_loops_over_truth_values_are_vectorised(name, tmp_path: pathlib.Path):
    found = toolchain.find_compiler()
    if found is None or pathlib.Path(found[0]).name.startswith("clang") or not machines.find("").lanes:
        pytest.skip("g++ says which loops it vectorises, for machines that have the vectors")
    function, inputs = FUNCTIONS[name], (SCORES, LABELS, CLASSES)
    graph = canonicalize(fx.symbolic_trace(function)).graph
    source = tmp_path / "kernel.cpp"
    source.write_text(text := pipeline.generate(graph, inputs, compiler.find_backend("cpu")).text)
    flags, _ = toolchain.flags_for(found)
    command = [*found, *flags, str(source), "-o", str(tmp_path / "kernel.so"), "-fopt-info-vec"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    lines = text.splitlines()
    vectors = {int(n) for n in re.findall(r"kernel\.cpp:(\d+):", said)}
    loops = [n for n, line in enumerate(lines, 1) if "#pragma omp simd" in line]
    scalar = [lines[n] for n in loops if not vectors & _lines_of(lines, n)]
    assert loops and not scalar, scalar


def _lines_of(lines: list[str], start: int) -> set[int]:
    """The numbers of the lines of a loop behind line `start`, and of the routines that it calls."""
    found = {*range(start, next(m for m in range(start, len(lines)) if lines[m].strip() == "}") + 1)}
    for name in {name for m in found for name in re.findall(r"\bpoint\d+", lines[m])}:
        first = next(m for m, line in enumerate(lines, 1) if f"auto {name} =" in line)
        found |= {*range(first, next(m for m in range(first, len(lines)) if lines[m].strip() == "};"))}
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_truth_values_in_arrays_are_eagers(name):
    for x, labels in ((SCORES, LABELS), (SCORES[:1, :, :3, :5], LABELS[:1, :3, :5])):
        handle, spec = fuse(FUNCTIONS[name])
        compare(handle(x, labels, CLASSES), FUNCTIONS[name](x, labels, CLASSES), tol={"rtol": 1e-5, "atol": 1e-6})
        no_fallback(spec)
