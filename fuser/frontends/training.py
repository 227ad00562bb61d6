"""What training adds: the joint graph cut into a forward and a backward, each compiled like any other graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from fuser import config
from fuser.frontends.functional import compile_functional

Function = Callable[..., Any]


def compiler_of(stage: str, options: dict[str, Any]) -> Any:
    """AOTAutograd's compiler for the graphs of a stage, "forward" or "backward", under settings of this graph alone."""

    def compile_stage(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Function:
        with config.override(**options):
            compiled = compile_functional(gm)
        compiled.remember("wrapped", "gradients are needed", options, stage)
        return _under(options, compiled.boxed) if options else compiled.boxed

    return compile_stage


def _under(options: dict[str, Any], function: Function) -> Function:
    """The function under `options`: a backward is compiled and called outside the block that the forward runs in."""

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        with config.override(**options):
            return function(*args)

    return call


def partition(joint: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The forward and the backward of a joint graph: what is cheap is computed again, the least possible is saved."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    return min_cut_rematerialization_partition(joint, joint_inputs, **kwargs)
