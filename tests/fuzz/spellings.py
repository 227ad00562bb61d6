"""`python -m tests.fuzz.spellings N`: N random programs, each written in several ways that mean the same.

Every way must do what eager does with the same text: results with dtypes, strides and aliases, versions of inputs,
gradients. The texts agree with each other by how they are written (tests/fuzz/writer.py). Two texts of each program go
through `register_fusion`, a third one by a route of the table in tests/fuzz/routes.py; programs of one route are
compiled together. `--seed S` runs one and, if it goes wrong, prints a smaller one that does, as Python that runs by
itself. `--way` is a route's name.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import sys
from collections.abc import Callable
from typing import Any

from tests.fuzz import running, workers
from tests.fuzz.running import alone_problem, reproducer

MOST = 6  # steps of a program
# Kinds of steps that have many spellings: operators above all.
OFTEN = {
    "unary": 6, "binary": 8, "whole_binary": 5, "comparison": 5, "bitwise_not": 2, "shift": 3, "division": 3,
    "where": 3, "clamp": 2, "cast": 3, "total": 3, "elementary": 3, "activation": 3, "write_binary": 6,
    "write_unary": 3, "fill": 2, "write_index": 4, "write_masked": 2,
}  # fmt: skip
MODULES_EVERY = 16  # one program in so many is made of modules


# -- programs ----------------------------------------------------------------------------------------------------------
def cases_of(seed: int, way: str | None) -> list[Any]:
    """The texts of a seed with their routes."""
    from tests.fuzz.generate import generate

    if seed % MODULES_EVERY == MODULES_EVERY - 1:
        return module_cases(seed, way)
    program = generate(seed, mutate=seed % 4 == 0, most=MOST, often=OFTEN)
    routes = [way] * 3 if way else ["backend" if seed % 4 == 0 else "fx", "fx", _route_of(seed)]
    made = [case_of(program, seed, n, route) for n, route in enumerate(routes)]
    return [c for c in made if c is not None]


def module_cases(seed: int, way: str | None) -> list[Any]:
    """A chain of modules, with gradients and by another route."""
    import torch

    from tests.fuzz import cases, modules

    chain = modules.generate(seed)
    rng = random.Random(f"{seed} chain")
    routes = [("compile", rng.choice(("grad", "grad", "autocast"))), rng.choice(_FOR_MODULES)]
    routes = [(way, "grad")] if way else routes
    made = []
    for route, mode in routes:
        if chain.training and route in ("make_fx", "trace"):
            continue  # which hold the weights as constants
        low = torch.bfloat16 if mode == "autocast" else chain.dtype
        case = cases.Case(seed, route, mode, chain.text, chain.inputs, chain.inputs_text, low)
        if cases.eager(case).error is None:
            made.append(case)
    return made


_FOR_MODULES = (
    ("compile", "none"), ("dynamic", "none"), ("dynamic", "grad"), ("export", "none"), ("make_fx", "none"),
    ("trace", "none"), ("compile", "inference"),
)  # fmt: skip


def _route_of(seed: int) -> str:
    from tests.fuzz.routes import ROUTES

    names = [r.name for r in ROUTES for _ in range(r.share)]
    return names[seed * 37 % len(names)]


def case_of(program: Any, seed: int, n: int, route_name: str) -> Any:
    """Text `n` of a program by a route; None if eager cannot run it that way."""
    import torch

    from tests import compare
    from tests.fuzz import cases, judge, writer
    from tests.fuzz.routes import BY_NAME, is_traceable

    route = BY_NAME[route_name]
    writes = writer.is_writing(program)
    rng = random.Random(f"{seed} {n} mode")
    mode = rng.choice(route.modes)
    if writes and route_name in ("trace", "script"):
        return None
    if writes and mode == "inference":
        mode = "none"
    style = writer.Style(traceable=route.traceable, detaches=mode == "grad", functional=not route.writes)
    with torch.no_grad():
        body = writer.write(program, seed * 4 + n, style)
        if route_name == "script" and not _is_scriptable(writer.function_text(program, body)):
            body = writer.write(program, seed * 4 + n, dataclasses.replace(style, plain=True))
        low = compare.lowest(_values(program))
    if mode == "grad" and writes:
        leaves = [i for i, x in enumerate(program.inputs) if x.of < 0 and x.dtype.is_floating_point]
        body = [*(f"v{i} = v{i}.clone()" for i in leaves), *body]
    if route.traceable and not is_traceable(writer.function_text(program, body), keep=route_name == "fx"):
        return case_of(program, seed, n, "compile" if route.together > 1 else "make_fx")
    if not program.outputs and not route.lowers:
        return None  # `register_fusion` wants a result
    case = cases.Case(seed, route_name, mode, writer.function_text(program, body), lambda: judge.make_inputs(program),
                      writer.inputs_text(program), torch.bfloat16 if mode == "autocast" else low, program, writes,
                      mode in ("none", "inference"))  # fmt: skip
    if mode != "none" and cases.eager(case).error is not None:
        return None
    return case


def _is_scriptable(text: str) -> bool:
    """Whether TorchScript takes it: overloads and most of Python it does not."""
    from tests.fuzz.routes import scripted

    try:
        scripted(text)
    except Exception:
        return False
    return True


def _values(program: Any) -> list[Any]:
    from tests import compare
    from tests.fuzz.program import make_inputs, run_step

    values: list[Any] = make_inputs(program)
    for s in program.steps:
        values.append(run_step(s, values))
    return compare.leaves(values)


def shrunk(seed: int, way: str | None) -> str:
    """The smallest program like that of `seed` which goes wrong, as Python that runs by itself."""
    from tests.fuzz.shrink import shrink

    for n, case in enumerate(cases_of(seed, way)):
        problem = alone_problem(case)
        if not problem:
            continue
        if case.program is None:
            return f"seed {seed}: {problem}\n{reproducer(case)}"
        kind = problem.split()[0]

        def again(program: Any, n: int = n, case: Any = case) -> Any:
            return case_of(program, seed, n, case.route)

        def fails(program: Any, again: Callable[..., Any] = again, kind: str = kind) -> bool:
            made = again(program)
            return made is not None and alone_problem(made).startswith(kind)

        small = shrink(case.program, fails, 150)
        return f"seed {seed}: {alone_problem(again(small))}\n{reproducer(again(small))}"
    return f"seed {seed}: nothing is wrong"


def text(seed: int, way: str) -> str:
    return "\n".join(map(reproducer, cases_of(seed, None if way == "spellings" else way)))


run_batch = functools.partial(running.run_batch, cases_of, "spellings")
SUITE = workers.Suite("tests.fuzz.spellings", run_batch, lambda seed: "spellings", shrunk, text)

if __name__ == "__main__":
    sys.exit(workers.main(SUITE, __doc__))
