"""From a program that goes wrong to a small one that does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from tests.fuzz.generate import drop_unused
from tests.fuzz.program import Input, Program, Ref, Step, make_inputs, map_refs, refs, run


def shrink(program: Program, fails: Callable[[Program], bool], most: int = 400) -> Program:
    """The smallest program found for which `fails` holds, by at most `most` trials."""
    tried = 0
    found = True
    while found and tried < most:
        found = False
        for smaller in candidates(program):
            tried += 1
            if tried > most:
                break
            if _runs(smaller) and fails(smaller):
                program, found = smaller, True
                break
    return program


def _runs(program: Program) -> bool:
    try:
        with torch.no_grad():
            run(program, make_inputs(program))
    except Exception:
        return False
    return bool(program.steps)


def writes(program: Program) -> bool:
    """Whether some step writes into a tensor."""
    return any(s.fn == "setitem" or s.fn.endswith("_") for s in program.steps)


def candidates(program: Program) -> Iterator[Program]:
    """Programs a little smaller."""
    drop = (lambda p: p) if writes(program) else drop_unused
    if len(program.outputs) > 1:
        for o in program.outputs:
            yield drop(_with_outputs(program, (o,)))
        for o in set(program.outputs):
            yield drop(_with_outputs(program, tuple(x for x in program.outputs if x != o) or program.outputs))
    for i in range(len(program.steps) - 1, -1, -1):
        yield from _without_step(program, i, drop)
    for i, x in enumerate(program.inputs):
        for y in _simpler_inputs(x):
            inputs = (*program.inputs[:i], y, *program.inputs[i + 1 :])
            yield replace(program, inputs=inputs)
    extents = sorted({n for x in program.inputs for n in x.size if n > 2}, reverse=True)
    for n in extents:
        for m in (2, n // 2):
            if m < n:
                sizes = [replace(x, size=tuple(m if d == n else d for d in x.size)) for x in program.inputs]
                yield replace(program, inputs=tuple(sizes))


def _with_outputs(program: Program, outputs: tuple[int, ...]) -> Program:
    return replace(program, outputs=outputs, exact=tuple(e for e in program.exact if e in outputs))


def _without_step(program: Program, i: int, drop: Callable[[Program], Program]) -> Iterator[Program]:
    """The program without step `i`: one of its arguments, or nothing, stands for its result."""
    n = len(program.inputs)
    value = n + i
    step = program.steps[i]
    users = [s for s in program.steps[i + 1 :] if value in refs((s.args, s.kwargs))]
    stand_ins = list(dict.fromkeys(refs((step.args, step.kwargs))))
    if not users and value not in program.outputs:
        stand_ins = [0]
    for r in stand_ins:

        def moved(k: int, r: int = r) -> int:
            k = r if k == value else k
            return k - 1 if k > value else k

        def all_moved(v: Any) -> Any:
            return map_refs(v, lambda x: Ref(moved(x.index)))

        steps = [Step(s.fn, all_moved(s.args), all_moved(s.kwargs)) for k, s in enumerate(program.steps) if k != i]
        outputs = tuple(dict.fromkeys(moved(o) for o in program.outputs))
        kept = tuple(moved(e) for e in program.exact if e != value)
        smaller = Program(program.inputs, tuple(steps), outputs, tuple(e for e in kept if e in outputs))
        yield drop(smaller)


def _simpler_inputs(x: Input) -> Iterator[Input]:
    if x.layout != "dense":
        yield replace(x, layout="dense")
    if x.values in ("special", "normal"):
        yield replace(x, values="integers")
    if x.of >= 0:
        yield replace(x, of=-1, view="")
    if x.dtype not in (torch.float32, torch.int64, torch.bool):
        yield replace(x, dtype=torch.float32 if x.dtype.is_floating_point else torch.int64)
