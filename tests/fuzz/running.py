"""Cases of many seeds, compiled together, run and judged; and what is said of one that goes wrong."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from tests.fuzz import workers

DRAWS = 16  # of the inputs of modules whose first ones miss the limit
ROUNDINGS = 4  # runs in float64 with random roundings, for each draw
CasesOf = Callable[[int, "str | None"], Sequence[Any]]  # of a seed, by its own routes or one


def run_batch(
    cases_of: CasesOf, name: str, seeds: Sequence[int], way: str | None, level: str
) -> Iterator[workers.Event]:  # fmt: skip
    """The events of a suite, see workers.py; `name` is what its way is called."""
    backend = _backend()
    backend.level = level
    with backend.installed():
        yield from _run_batch(backend, cases_of, name, seeds, way)


@functools.cache
def _backend() -> Any:
    from tests.fuzz.batch import BatchBackend

    return BatchBackend()


def _run_batch(
    backend: Any, cases_of: CasesOf, name: str, seeds: Sequence[int], way: str | None
) -> Iterator[workers.Event]:  # fmt: skip
    import torch

    from fuser.frontends.dynamo import forget_compilations
    from tests.fuzz import cases as running_cases

    torch._dynamo.reset()
    forget_compilations()
    made = {seed: cases_of(seed, way) for seed in seeds}
    every = [c for cases in made.values() for c in cases]
    want = {id(c): running_cases.eager(c) for c in every}
    groups = grouped(every, {i for i, o in want.items() if o.error is not None})
    with backend.collecting():
        for group in groups:
            workers.alive()
            group.begin(None if backend.level == "-O2" else backend.rehearse)
    seen: dict[int, running_cases.Observation] = {}
    for seed in seeds:
        workers.alive()
        yield seed, way or name, None, None
        problem = ""
        for case in made[seed]:
            group = next(g for g in groups if any(c is case for c in g.cases))
            if id(case) not in seen:
                seen.update((id(c), o) for c, o in zip(group.cases, group.finish()))
            found = judged(case, seen.pop(id(case)), want.pop(id(case)), group.cases)
            problem = problem or (f"by {case.route} in mode {case.mode}: {found}" if found else "")
        yield seed, way or name, problem, "\n".join(map(reproducer, made[seed])) if problem else ""


def grouped(cases: Sequence[Any], raising: Collection[int] = ()) -> list[Any]:
    """The cases in groups that are compiled as one function. Those that raise in eager (`raising`, their ids) would end
    the calls of all others, so each is a group."""
    from tests.fuzz.routes import BY_NAME, Group

    groups: dict[Any, list[list[Any]]] = {}
    for n, case in enumerate(cases):
        alias = case.writes and case.program is not None and any(x.of >= 0 for x in case.program.inputs)
        together = BY_NAME[case.route].together > 1 and id(case) not in raising
        together = together and not alias  # a graph runs unfused where written inputs overlap
        chunks = groups.setdefault((case.route, case.mode) if together else n, [[]])
        if len(chunks[-1]) == BY_NAME[case.route].together:
            chunks.append([])
        chunks[-1].append(case)
    return [Group(BY_NAME[c[0].route], c) for chunks in groups.values() for c in chunks]


# -- verdicts ----------------------------------------------------------------------------------------------------------
EXCUSED: Counter[str] = Counter()  # by route: cases that torch itself does not bring as far as a right graph


def judged(case: Any, got: Any, want: Any, beside: Sequence[Any]) -> str:
    """What is wrong with what a case did beside eager; run again by itself, and by aot_eager, before it is said.
    `beside` are the cases that were compiled with it, itself among them."""
    from tests.fuzz import cases
    from tests.fuzz.routes import BY_NAME, alone, together

    found = cases.problems(case, got, want)
    if not found:
        return ""
    if BY_NAME[case.route].together > 1:
        lonely = cases.problems(case, alone(case), want)
        if not lonely and got.error is None:
            at = next(i for i, c in enumerate(beside) if c is case)
            theirs = cases.problems(case, together(beside, aot_eager())[at], want)
            EXCUSED[case.route] += bool(theirs)
            return "" if theirs else f"only beside others: {found}"
        if not lonely:
            return ""
        found = lonely
    excused = _is_torchs_own(case, want)
    EXCUSED[case.route] += excused
    return "" if excused or is_by_chance(case, found) else found


def is_by_chance(case: Any, found: str) -> bool:
    """Whether values are as near to float64, over draws of inputs, as eager's are or as random roundings leave them.

    Where large terms cancel, the distance of one draw is that of a few roundings and says nothing. Of a program that is
    data only gradients are judged so, since its results are judged by the data, and its inputs are those of one draw,
    as are a generated model's. Strides, aliases and whatever else is `found` beside values is no chance.
    """
    from tests.distances import Distances
    from tests.fuzz import cases
    from tests.fuzz.routes import alone

    judged = "gradient" if case.program is not None else ""
    if case.writes or not all("elements differ" in part and part.startswith(judged) for part in found.split("; ")):
        return False
    again = case.program is None and cases.drawn(case, 1).inputs_text != case.inputs_text
    distances: dict[tuple[str, int], Distances] = {}
    for draw in range(DRAWS if again else 1):
        workers.alive()
        own = cases.drawn(case, draw) if again else case
        got, want, exact = alone(own), cases.eager(own), cases.exact(own)
        rounded = [cases.rounded(own, i) for i in range(ROUNDINGS)]
        if any(o.error is not None for o in (got, want, exact, *rounded)):
            return False
        for kind in ("outputs", "gradients", "state"):
            lists = [getattr(o, kind) for o in (got, want, exact, *rounded)]
            for k, values in enumerate(zip(*lists, strict=True)):
                if any(v is None for v in values):
                    continue
                if kind == "outputs" and case.program is not None:
                    continue
                if not distances.setdefault((kind, k), Distances()).add(*values[:3], values[3:]):
                    return False
    return all(d.is_right for d in distances.values())


def alone_problem(case: Any) -> str:
    """What is wrong with a case by itself."""
    from tests.fuzz import cases
    from tests.fuzz.routes import alone

    want = cases.eager(case)
    found = cases.problems(case, alone(case), want)
    return "" if found and (_is_torchs_own(case, want) or is_by_chance(case, found)) else found


def _is_torchs_own(case: Any, want: Any) -> bool:
    """Whether torch itself does not bring the case as far as a graph, or not as far as the right one."""
    from tests.fuzz import cases
    from tests.fuzz.routes import BY_NAME, alone, traced

    reference = alone(case, aot_eager()) if BY_NAME[case.route].lowers else traced(case)
    return bool(cases.problems(case, reference, want))


def aot_eager() -> Any:
    """The backend that stops before the compiler."""
    from torch._dynamo.backends import debugging

    return debugging.aot_eager


def reproducer(case: Any) -> str:
    """A case as Python that runs by itself and prints both results."""
    from tests.fuzz.routes import BY_NAME

    return f"""# seed {case.seed} by {case.route} in mode {case.mode}
import operator
import fuser
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from fuser.frontends.torchscript import to_fx

{case.inputs_text}
{case.text}
mode = {_MODE_TEXTS[case.mode]}
with mode:
    print(program(*inputs()))
    print(({BY_NAME[case.route].reproduce})(*inputs()))
"""


_MODE_TEXTS = {
    "none": "torch.no_grad()", "grad": "torch.enable_grad()  # with gradients of the floating inputs",
    "inference": "torch.inference_mode()", "autocast": "torch.autocast('cpu', dtype=torch.bfloat16)",
}  # fmt: skip
