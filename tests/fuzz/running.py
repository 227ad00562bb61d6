"""Cases of many seeds, compiled together, run and judged; and what is said of one that goes wrong."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tests.fuzz import workers

TOGETHER = 12  # programs in one compiled function
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
    from tests.fuzz.cases import Observation

    torch._dynamo.reset()
    forget_compilations()
    made = {seed: cases_of(seed, way) for seed in seeds}
    groups = grouped([c for cases in made.values() for c in cases])
    with backend.collecting():
        for group in groups:
            group.begin()
    seen: dict[int, Observation] = {}
    for seed in seeds:
        yield seed, way or name, None, None
        problem = ""
        for case in made[seed]:
            if id(case) not in seen:
                group = next(g for g in groups if any(c is case for c in g.cases))
                seen.update((id(c), o) for c, o in zip(group.cases, group.finish()))
            found = judged(case, seen.pop(id(case)))
            problem = problem or (f"by {case.route} in mode {case.mode}: {found}" if found else "")
        yield seed, way or name, problem, "\n".join(map(reproducer, made[seed])) if problem else ""


def grouped(cases: Sequence[Any]) -> list[Any]:
    """The cases in groups that are compiled as one function."""
    from tests.fuzz.routes import BY_NAME, Group

    groups: dict[Any, list[list[Any]]] = {}
    for n, case in enumerate(cases):
        alias = case.writes and case.program is not None and any(x.of >= 0 for x in case.program.inputs)
        together = BY_NAME[case.route].together and not alias  # a graph runs unfused where written inputs overlap
        chunks = groups.setdefault((case.route, case.mode) if together else n, [[]])
        if len(chunks[-1]) == TOGETHER:
            chunks.append([])
        chunks[-1].append(case)
    return [Group(BY_NAME[c[0].route], c) for chunks in groups.values() for c in chunks]


# -- verdicts ----------------------------------------------------------------------------------------------------------
def judged(case: Any, got: Any) -> str:
    """What is wrong with what a case did; run again by itself, and by aot_eager, before it is said."""
    from tests.fuzz import cases
    from tests.fuzz.routes import BY_NAME, alone

    want = cases.eager(case)
    found = cases.problems(case, got, want)
    if not found:
        return ""
    if BY_NAME[case.route].together:
        lonely = cases.problems(case, alone(case), want)
        if not lonely:
            return "" if got.error is not None else f"only beside others: {found}"
        found = lonely
    return "" if _is_torchs_own(case, want) else found


def alone_problem(case: Any) -> str:
    """What is wrong with a case by itself."""
    from tests.fuzz import cases
    from tests.fuzz.routes import alone

    want = cases.eager(case)
    found = cases.problems(case, alone(case), want)
    return "" if found and _is_torchs_own(case, want) else found


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
