"""`python -m tests.nnsmith N`: N models that NNSmith generates, forward and backward, compared with eager.

What differs is said only where `aot_eager` does as eager does. `--seed S` runs one by itself.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from tests.fuzz import running, workers
from tests.fuzz.running import alone_problem, reproducer

_TEXT = """\
from tests.nnsmith.model import build
module = build({seed})[0]

def program(*inputs):
    return module(*inputs)
"""
_INPUTS = """\
def inputs():
    from tests.nnsmith.model import build
    return build({seed})[1]
"""
# Of twelve models: the route and the grad mode.
_WAYS = (*[("compile", "grad")] * 7, *[("dynamic", "grad")] * 2, *[("compile", "none")] * 2, ("compile", "inference"))


def cases_of(seed: int, way: str | None) -> list[Any]:
    """The case of a seed's model."""
    from tests import compare
    from tests.fuzz import cases
    from tests.nnsmith.model import build

    route, mode = (way, "grad") if way else _WAYS[seed % len(_WAYS)]
    model, inputs = build(seed)
    low = compare.lowest([*inputs, *model.parameters()])
    make = functools.partial(compare.copy_inputs, inputs)
    case = cases.Case(seed, route, mode, _TEXT.format(seed=seed), make, _INPUTS.format(seed=seed), low)
    return [case] if cases.eager(case).error is None else []


def shrunk(seed: int, way: str | None) -> str:
    """What is wrong with a seed's model by itself."""
    for case in cases_of(seed, way):
        problem = alone_problem(case)
        return f"seed {seed} by {case.route}, {case.mode}: {problem or 'nothing is wrong'}\n{reproducer(case)}"
    return f"seed {seed}: eager has no gradients of it"


def text(seed: int, way: str) -> str:
    return "\n".join(map(reproducer, cases_of(seed, None if way == "nnsmith" else way)))


run_batch = functools.partial(running.run_batch, cases_of, "nnsmith")
SUITE = workers.Suite("tests.nnsmith", run_batch, lambda seed: "nnsmith", shrunk, text, 24)

if __name__ == "__main__":
    sys.exit(workers.main(SUITE, __doc__))
