"""Models that NNSmith generates: graphs of operators whose sizes a solver has found to fit."""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import torch

NODES = (2, 10)
MOST_ELEMENTS = 4096
SOLVER_MS = 20_000
# What NNSmith raises where it finds no model, and torch where it does not run the one found.
_REFUSALS = (RuntimeError, ValueError, TypeError, AssertionError, IndexError, KeyError)
Step = tuple[Callable[..., Any], tuple[str, ...], tuple[str, ...]]


class Model(torch.nn.Module):
    """A generated graph, run operator by operator."""

    def __init__(self, steps: list[Step], inputs: list[str], outputs: list[str]) -> None:
        super().__init__()
        self.steps, self.input_names, self.output_names = steps, inputs, outputs
        self.weights = torch.nn.ModuleList([f for f, _, _ in steps if isinstance(f, torch.nn.Module)])

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = dict(zip(self.input_names, inputs))
        for function, args, results in self.steps:
            made = function(*[values[a] for a in args])
            values.update(zip(results, (made,) if isinstance(made, torch.Tensor) else made))
        return tuple(values[o] for o in self.output_names)


@functools.cache
def _operators() -> tuple[Any, ...]:
    from nnsmith.materialize import Model as Kind

    return tuple(dict.fromkeys(Kind.init("torch", backend_target="cpu").operators()))


def build(seed: int) -> tuple[Model, list[torch.Tensor]]:
    """A new copy of the model of a seed, which eager can run, and of its inputs; ImportError without NNSmith.

    The same seed gives the same: in one process always, in another unless the solver runs out of time there.
    """
    return copy.deepcopy(_built(seed))


@functools.lru_cache(maxsize=128)
def _built(seed: int) -> tuple[Model, list[torch.Tensor]]:
    draw = random.Random(f"nnsmith {seed}")
    while True:
        own = draw.randrange(1 << 30)
        with contextlib.suppress(*_REFUSALS):
            model, inputs = _generate(own, draw.randint(*NODES))
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model(*[x.clone() for x in inputs])
            return model, inputs


def _generate(seed: int, nodes: int) -> tuple[Model, list[torch.Tensor]]:
    from nnsmith.error import ConstraintError
    from nnsmith.graph_gen import model_gen
    from nnsmith.materialize import Model as Kind

    with _seeded(seed):
        try:
            made = model_gen(opset=list(_operators()), method="symbolic-cinit", seed=seed, max_nodes=nodes,
                             max_elem_per_tensor=MOST_ELEMENTS, timeout_ms=SOLVER_MS)  # fmt: skip
        except ConstraintError as e:
            raise ValueError(str(e)) from e
        net = Kind.init("torch", backend_target="cpu").from_gir(made.make_concrete()).native_model
        inputs = list(net.get_random_inps(base="center").values())
    steps = [(f, tuple(args), tuple(results)) for f, args, results, _ in net.instructions]
    return Model(steps, list(net.input_map), list(net.output_map)), inputs


@contextlib.contextmanager
def _seeded(seed: int) -> Any:
    """All generators that NNSmith draws from begin with `seed`, and are as before afterwards.

    The default dtype is float32: other dtypes draw other weights.
    """
    import z3.z3

    z3.z3._main_ctx = None  # what the solver finds depends on the terms that its context holds already
    state, arrays, dtype = random.getstate(), numpy.random.get_state(), torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    random.seed(seed)
    numpy.random.seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
            random.setstate(state)
            numpy.random.set_state(arrays)
