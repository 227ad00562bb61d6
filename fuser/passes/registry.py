"""The pipeline as data: the stages, each stage's passes in order, and the passes that users add."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from fuser import forks
from fuser.errors import ConfigError
from fuser.lazy_dataclasses import dataclass
from fuser.passes import runner
from fuser.passes.joint_graph import JOINT_GRAPH
from fuser.passes.post_grad import POST_GRAD
from fuser.passes.pre_grad import PRE_GRAD
from fuser.passes.runner import Numbered, Pass, PassRecord
from fuser.runtime.spans import span


@dataclass(frozen=True)
class Stage:
    """A stage of the pipeline: the form of its graphs, and which passes belong there."""

    name: str
    graph: str
    why: str
    passes: tuple[Pass, ...]


STAGES: tuple[Stage, ...] = (
    Stage(
        "pre_grad",
        "The graph as dynamo took it from the program: torch functions and methods with the arguments the user wrote, "
        "parameters as inputs, batch norms and attention whole. It may write tensors in place and make views of them; "
        "nothing is functional, nothing is normalised. A node's value is in `meta['example_value']`.",
        "Autograd comes later: a rewritten call gets the gradients of the calls that replace it. Rewrites that need an "
        "operation whole (attention, convolution and batch norm) are here, and those that would need a second pattern "
        "for the backward. Each makes sure that no write comes between the nodes it joins.",
        PRE_GRAD,
    ),
    Stage(
        "joint_graph",
        "ATen calls by overload, functional: no call writes a tensor, and views are explicit. Inputs that the program "
        "writes get their new content by `copy_` at the end, or come back as results. In training it holds forward "
        "and backward together, before they are cut; for inference it is the forward. A node's value is in "
        "`meta['val']`.",
        "What shrinks the graph here shrinks forward, backward and what is saved between the two.",
        JOINT_GRAPH,
    ),
    Stage(
        "post_grad",
        "ATen calls, functional, one graph each for inference, forward and backward, the cut between them made. Inputs "
        "that the program writes are written by `copy_` at the very end. Grouping follows; after it `reinplacing` "
        "turns those copies into stores of the kernels that compute the values, where nobody else reads the input.",
        "The graph is final but for what runs where: merging of equal calls, calls of libraries' fused operators, "
        "shapes of calls that suit the grouping.",
        POST_GRAD,
    ),
)
_lock = forks.lock()
_passes: dict[str, tuple[Pass, ...]] = {stage.name: stage.passes for stage in STAGES}


@functools.lru_cache(maxsize=1)
def _numbered_of(passes: tuple[tuple[str, tuple[Pass, ...]], ...]) -> tuple[Numbered, ...]:
    in_order = ((stage, p) for stage, found in passes for p in found)
    return tuple(Numbered(number, stage, p) for number, (stage, p) in enumerate(in_order, 1))


def numbered() -> tuple[Numbered, ...]:
    """All passes in the order in which they run, numbered from 1 over all stages."""
    return _numbered_of(tuple(_passes.items()))


def disabled_names() -> frozenset[str]:
    """The names that `config.disable_passes` switches off; ConfigError for an unknown name."""
    return runner.check_names([p.item.name for p in numbered()])


def run_stage(stage: str, module: fx.GraphModule) -> tuple[PassRecord, ...]:
    """Run one stage's enabled passes on a graph module, in place; PassError names a pass that fails."""
    with span("passes", stage=stage):
        return runner.run_passes(module, [p for p in numbered() if p.stage == stage], disabled_names())


def register(
    stage: str,
    name: str,
    function: Callable[[fx.GraphModule], Any],
    *,
    before: str | None = None,
    after: str | None = None,
    line: str = "",
) -> None:
    """Add a pass to a stage: before or after a pass of that stage, else at its end.

    Args:
        stage: "pre_grad", "joint_graph" or "post_grad"; docs/passes.md describes its graphs.
        name: the pass's name in messages and in `config.disable_passes`; no commas.
        function: rewrites a graph module in place, or returns another.
        before: the pass of the stage before which it runs.
        after: the pass of the stage after which it runs; not both.
        line: one line on what it does, for `fuser.debug.passes`. If it is empty, the first line of the function's
            docstring is taken.

    Raises:
        ConfigError: an unknown stage or neighbour, a name that is taken or no name, or no function.
    """
    if not isinstance(name, str) or not name.strip() or "," in name:
        raise ConfigError(f"pass {name!r}: expected a name without commas, as config.disable_passes lists them")
    if not callable(function):
        raise ConfigError(f"pass {name!r} is a {type(function).__name__}: expected a function of a graph module")
    with _lock:
        passes = list(_of_stage(stage))
        if any(name == p.name for found in _passes.values() for p in found):
            raise ConfigError(f"pass {name!r} is registered already: choose another name, or unregister it first")
        if before is not None and after is not None:
            raise ConfigError(f"pass {name!r}: expected before= or after=, not both")
        at = len(passes)
        if before is not None or after is not None:
            at = _place(stage, passes, str(before or after)) + (after is not None)
        passes.insert(at, Pass(name, function, line, built_in=False))
        _passes[stage] = tuple(passes)


def register_pattern(
    stage: str,
    name: str,
    pattern: Callable[..., Any],
    replacement: Callable[..., Any],
    example_inputs: Sequence[Any],
    *,
    before: str | None = None,
    after: str | None = None,
) -> None:
    """Add a pass that replaces the calls of `pattern` by those of `replacement`.

    Both are functions of the same inputs, traced when the pass first runs, and matched call by call, constants
    included.

    Args:
        stage: "pre_grad", "joint_graph" or "post_grad".
        name: the pass's name in messages and in `config.disable_passes`; no commas.
        pattern: a function of tensors; its calls are searched for.
        replacement: a function of the same tensors; its calls replace the pattern's.
        example_inputs: tensors on which both are traced into ATen calls, as the stage's graphs have them. The stage
            "pre_grad" traces without them.
        before: the pass of the stage before which it runs.
        after: the pass of the stage after which it runs; not both.

    Raises:
        ConfigError: an unknown stage or neighbour, a name that is taken or no name, no functions, or inputs that are no
            list or tuple.
    """
    for what, given in (("pattern", pattern), ("replacement", replacement)):
        if not callable(given):
            raise ConfigError(f"the {what} of pass {name!r} is a {type(given).__name__}: expected a function")
    if not isinstance(example_inputs, (list, tuple)):
        raise ConfigError(
            f"the example inputs of pass {name!r} are a {type(example_inputs).__name__}: expected a list of tensors"
        )
    from fuser.passes.patterns import compile_pattern  # for patterns of users

    function = compile_pattern(stage, pattern, replacement, example_inputs)
    sought, made = getattr(pattern, "__name__", "pattern"), getattr(replacement, "__name__", "replacement")
    register(stage, name, function, before=before, after=after, line=f"{sought} becomes {made}")


def unregister(name: str) -> None:
    """Remove a pass that a user registered.

    Args:
        name: the name under which it was registered.

    Raises:
        ConfigError: no pass of that name was registered; `config.disable_passes` switches off the package's own.
    """
    with _lock:
        for stage, found in _passes.items():
            if any(p.name == name and not p.built_in for p in found):
                _passes[stage] = tuple(p for p in found if p.name != name)
                return
    raise ConfigError(f"no pass {name!r} was registered; built-in ones are switched off by config.disable_passes")


def _of_stage(stage: str) -> tuple[Pass, ...]:
    if not isinstance(stage, str) or stage not in _passes:
        raise ConfigError(f"unknown stage {stage!r}: expected one of {', '.join(_passes)}")
    return _passes[stage]


def _place(stage: str, passes: list[Pass], name: str) -> int:
    for i, p in enumerate(passes):
        if p.name == name:
            return i
    raise ConfigError(f"stage {stage!r} has no pass {name!r}: expected one of {', '.join(p.name for p in passes)}")
