"""Index arithmetic of lowerings, checked by enumeration: one lowering, run by the interpreter at every size it takes.

A plan that is made for five rows is for all sizes that its guards admit. Slices, shifts, flips, windows, pads and joins
of each other are compared with eager at sizes from 0 to 10; the interpreter reports offsets outside of a tensor.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from fuser.canonical import canonicalize
from fuser.cpu import fused_kernel
from fuser.debug.reference import interpret_schedule
from fuser.errors import Unsupported
from fuser.lowering.graph import lower_graph
from fuser.runtime.python_launcher import match
from fuser.scheduler.schedule import schedule

SIZES = (0, 1, 2, 3, 4, 5, 7, 10)
MADE_FOR = (5, 6, 2)


def interleaved(x):
    return torch.stack([x, x * 2], 1).flatten(0, 1)


def shifted(x):
    return F.pad(x[:-1], (0, 0, 1, 0))


VIEWS = {
    "flip": lambda x: x.flip(0), "roll": lambda x: x.roll(2, 0), "roll back": lambda x: x.roll(-3, 0),
    "interleaved": interleaved, "shifted": shifted, "even": lambda x: x[::2], "odd": lambda x: x[1::2],
    "windows": lambda x: x.unfold(0, 2, 1).sum(-1),
    "wide steps": lambda x: x.unfold(0, 3, 2).movedim(-1, 1).flatten(0, 1),
    "repeat": lambda x: x.repeat(2, 1), "repeat each": lambda x: x.repeat_interleave(3, 0),
    "pad": lambda x: F.pad(x, (1, 0, 2, 1)), "crop": lambda x: F.pad(x, (0, -1, -1, 0)), "last": lambda x: x[-1:],
    "blocks": lambda x: x.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1), "lower": lambda x: x.tril(-1),
    "joined": lambda x: torch.cat([x[1:], x.flip(0)]), "chunk": lambda x: x.chunk(2)[-1],
    "turned": lambda x: x.t().flatten(),
    "split": lambda x: x.tensor_split(3)[1], "flat": lambda x: x.flatten()[:, None],
    "diagonal": lambda x: x.diagonal(1)[:, None],
    "doubled": lambda x: x + shifted(x), "selected": lambda x: x.index_select(0, torch.arange(x.shape[0] // 2)),
}  # fmt: skip
BOUNDS = itertools.product((None, -3, -1, 0, 1, 2), (None, -2, 0, 1, 4), (1, 2, 3))
SLICES = {f"x[{a}:{b}:{s}]": lambda x, part=slice(a, b, s): x[part] for a, b, s in BOUNDS}
PAIRS = {f"{b} of {a}": (f, g) for (a, f), (b, g) in itertools.product(VIEWS.items(), VIEWS.items())}


def after(f, g):
    return lambda x: g(f(x))


def problems(name, function):
    """What goes wrong at any size; and at how many sizes plans ran."""
    registered = canonicalize(torch.fx.symbolic_trace(function).graph, True)
    found, ran = [], 0
    for made_for in MADE_FOR:
        try:
            example = (*registered.bound, rows(made_for))
            lowered = lower_graph(registered.graph, example)
            plan = schedule(lowered, 256)
            program = fused_kernel.generate(lowered, plan, registered.graph.single).program
        except Unsupported:
            continue
        for n in SIZES:
            args = (*registered.bound, rows(n))
            if match(program, args) is None:
                continue
            try:
                want = function(rows(n))
            except (RuntimeError, IndexError):
                continue
            ran += 1
            (got,) = interpret_schedule(lowered, plan, args)
            if got.shape != want.shape or not torch.equal(got, want):
                found.append(f"{name} made for {made_for} rows, at {n}: {got} instead of {want}")
    return found, ran


def rows(n):
    return torch.arange(1.0, 3 * n + 1).reshape(n, 3)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("part", range(3))
def test_views_of_views(part):
    wrong, ran = [], 0
    for k, (name, (f, g)) in enumerate(PAIRS.items()):
        if k % 18 == 6 * part:  # a sixth of them; the fuzzer tries more
            found, n = problems(name, after(f, lambda x, g=g: g(x) + 1))
            wrong, ran = wrong + found, ran + n
    assert not wrong, "\n".join(wrong[:5])
    assert ran > 50


def test_slices():
    wrong, ran = [], 0
    for name, f in SLICES.items():
        found, n = problems(name, after(f, interleaved))
        wrong, ran = wrong + found, ran + n
    assert not wrong, "\n".join(wrong[:5])
    assert ran > 200
