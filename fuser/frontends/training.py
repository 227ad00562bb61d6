"""What training adds: the joint graph cut into a forward and a backward, each compiled like any other graph."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fuser import config
from fuser.cuda.graphs import Recorded
from fuser.frontends.functional import compile_functional
from fuser.passes.classify import tensors_of
from fuser.passes.registry import run_stage
from fuser.passes.runner import PassRecord

Function = Callable[..., Any]
# A step's large results (saved tensors, gradients) differ in size and live long: what one of them leaves behind would
# lie idle beside the others when most memory is needed. Fresh huge pages cost a step about a hundredth.
_LEAN = {"output_limit_bytes": 0}


class Training:
    """One graph's way through AOTAutograd, under its own settings: the cut, and a compiler for each part.

    `recorded`: forward and backward run under CUDA graphs, one for each.
    """

    def __init__(
        self, options: dict[str, Any], earlier: tuple[PassRecord, ...], recorded: bool = False,
        by_eager: Counter[str] | None = None,
    ) -> None:  # fmt: skip
        self.options = options
        self.by_eager = by_eager  # calls of the whole graph that do not reach the forward
        self.recorded = recorded
        self.forward: Recorded | None = None
        self.passes = earlier  # of the joint graph and before; told with the forward
        self.cut = False  # whether there is a forward and a backward
        self.random = False  # whether they draw random numbers

    def compiler_of(self, stage: str) -> Any:
        """AOTAutograd's compiler for the "forward" or the "backward"."""

        def compile_stage(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Function:
            with config.override(**self.options):
                compiled = compile_functional(gm, earlier=self.passes if stage == "forward" else ())
            by_eager = self.by_eager if stage == "forward" else None
            compiled.remember("wrapped", "gradients are needed", self.options, stage, by_eager)
            boxed = compiled.boxed
            if self.recorded:
                boxed = compiled.recorded(stage, self.forward)
                self.forward = boxed if isinstance(boxed, Recorded) else None
            return _under({**_LEAN, **self.options}, boxed)

        return compile_stage

    def partition(
        self, joint: fx.GraphModule, joint_inputs: Any, **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """The forward and the backward of a joint graph: what is cheap is computed again, little is saved.

        On the CPU elementwise work is computed again even where the backward has to write it to memory for a product
        to read: it costs a pass over tensors in the cache, and the product far more. Reductions, products, attention
        and random numbers are saved.
        """
        from torch._functorch import config as functorch_config
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        self.cut, self.random = True, any(_draws(n) for n in joint.graph.nodes)
        with config.override(**self.options):
            self.passes += run_stage("joint_graph", joint)
        on_cpu = all(t.device.type == "cpu" for n in joint.graph.nodes for t in tensors_of(n.meta.get("val")))
        with functorch_config.patch(ban_recompute_materialized_backward=not on_cpu):
            return min_cut_rematerialization_partition(joint, joint_inputs, **kwargs)


def _draws(node: fx.Node) -> bool:
    tags = node.target.tags if isinstance(node.target, torch._ops.OpOverload) else ()
    return torch.Tag.nondeterministic_seeded in tags or "rng" in str(node.target)


def _under(options: dict[str, Any], function: Function) -> Function:
    """The function under `options`: a backward is compiled and called outside the block that the forward runs in."""

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        with config.override(**options):
            return function(*args)

    return call
