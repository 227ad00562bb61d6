"""Training: the joint graph is cut into a forward and a backward, each compiled like any other graph."""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from fuser import config, targets
from fuser.frontends.functional import Compiled, compile_functional
from fuser.frontends.unused_results import reached_results, read_gradients
from fuser.frontends.views_of_inputs import view_written_inputs
from fuser.passes.classify import all_nodes, tensors_of
from fuser.passes.cleanup import keep_results_apart, merge_joint
from fuser.passes.decompositions import decomposition_table
from fuser.passes.grouping import group_nodes
from fuser.passes.randomness import DRAWS, Draw, draws_of, node_draws
from fuser.passes.registry import run_stage
from fuser.passes.rounding import round_both
from fuser.passes.runner import PassRecord
from fuser.runtime.warm import WARM_MIN

if TYPE_CHECKING:
    from fuser.cuda.graphs import Recorded

Function = Callable[..., Any]
# Operators that run another operator under a generator state.
_UNDER_STATE = ("run_and_save_rng_state", "run_with_rng_state", "graphsafe_run_with_rng_state")
# A step's large results (saved tensors, gradients) differ in size and live long: memory kept from one of them would
# stay idle beside the others at peak memory. Fresh huge pages cost a step about a hundredth of its time.
_LEAN = {"output_limit_bytes": 0}
_OF_BATCH = (0, 1, 2)  # results of a batch norm computed from the batch alone: its values, mean and deviation
_LEAST_KEPT = 1e-9  # with 0, torch's cut would draw random numbers again


class Training:
    """One graph's compilation through AOTAutograd, under its own settings: the cut, and a compiler for each part.

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
        self.passes = earlier  # of the joint graph and before; recorded with the forward
        self.cut = False  # whether there is a forward and a backward
        self.random = False  # whether they draw random numbers
        self.draws: tuple[Draw, ...] | None = ()  # their random operators; None if these are unknown
        self.needed: frozenset[int] = frozenset()  # the inputs whose content the gradients depend on
        self.dead: frozenset[int] = frozenset()  # the inputs to which the backward gives no gradient
        self.reached: tuple[int, ...] = ()  # for each input the results that depend on it, as bits
        self.read: tuple[int, ...] = ()  # for each input the results' gradients that its own is made of, as bits
        self.compiled: dict[str, Compiled] = {}  # by stage
        self.gains_nothing = False  # whether Dynamo's graph, with eager's backward, does the same
        self._backward: fx.GraphModule | None = None  # before its passes

    def trace(self, module: Any, inputs: Sequence[Any], inference_compiler: Function | None = None) -> Function:
        """The module through AOTAutograd. Its backward may run again, whatever the first call allows."""
        from torch._functorch.aot_autograd import aot_module_simplified

        traced: Function = aot_module_simplified(
            module,
            inputs,
            fw_compiler=self.compiler_of("forward"),
            bw_compiler=self.compiler_of("backward"),
            partition_fn=self.partition,
            inference_compiler=inference_compiler,
            decompositions=decomposition_table(),
            keep_inference_input_mutations=True,
        )
        meta: Any = getattr(torch._guards.TracingContext.try_get(), "fw_metadata", None)
        if getattr(meta, "bw_donated_idxs", None):  # saved tensors that a backward may overwrite; none here
            meta.bw_donated_idxs = []  # AOTAutograd would refuse `retain_graph=True` after a backward without it
        return traced

    def compiler_of(self, stage: str) -> Any:
        """AOTAutograd's compiler for the "forward" or the "backward"."""

        def compile_stage(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Function:
            if stage == "forward":
                view_written_inputs(gm, with_tokens=True)
            with config.override(**self.options):
                compiled = compile_functional(gm, earlier=self.passes if stage == "forward" else ())
            self.compiled[stage] = compiled
            by_eager, route = None, ("wrapped", "gradients are needed")
            if stage == "forward":
                by_eager, self.gains_nothing = self.by_eager, self._is_bare(compiled)
                route = ("direct", "") if self.gains_nothing else route
            compiled.remember(*route, self.options, stage, by_eager)
            boxed = compiled.boxed
            if self.recorded:
                boxed = compiled.recorded(stage, self.forward)
                from fuser.cuda.graphs import Recorded  # for CUDA graphs alone

                self.forward = boxed if isinstance(boxed, Recorded) else None
            return self.under_options(stage, boxed)

        return compile_stage if stage == "forward" else _hidden(compile_stage)

    def _is_bare(self, forward: Compiled) -> bool:
        """Whether nothing of the forward is fused, and nothing of the backward would be."""
        backward, self._backward = self._backward, None
        if self.recorded or backward is None or not forward.gains_nothing(self.options):
            return False
        return not group_nodes(backward.graph).groups

    def under_options(self, stage: str, function: Function) -> Function:
        """The function of a compiled stage under the settings with which its kernels are compiled and run."""
        lean = {} if is_small(self.compiled[stage].module) else _LEAN
        options = {**lean, **self.options}
        return _under(options, function) if options else function

    def partition(
        self, joint: fx.GraphModule, joint_inputs: Any, **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """The forward and the backward of a joint graph: cheap values are recomputed, few are saved.

        On the CPU elementwise work is recomputed even if the backward has to write it to memory for a product to read:
        that costs a pass over tensors in the cache, and the product far more. Reductions, products, attention and
        random numbers are saved.
        """
        from torch._functorch import config as functorch_config
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        from fuser.frontends.recompute import keep_for_products, keep_from_written, told_to_the_cut, written_inputs
        from fuser.passes.norm_results import recompose_norms

        random, given = sum(map(draws, all_nodes(joint))), draws_of(joint.graph)
        self.cut, self.random = True, bool(random)
        written = written_inputs(joint)
        self.reached = reached_results(joint, kwargs["num_fwd_outputs"])
        self.read = read_gradients(joint, kwargs["num_fwd_outputs"])
        with config.override(**self.options):
            self.passes += run_stage("joint_graph", joint)
        self.needed = _needed(joint, kwargs["num_fwd_outputs"])  # a batch norm's statistics are dropped from here on
        given = joint.meta.get(DRAWS, given)
        self.draws = given if len(given) == random else None
        keep_results_apart(joint)
        on_cpu = is_on_cpu(joint)
        floats = _floats_as_integers(joint)
        keep_from_written(joint, written)
        kept = float(self.options.get("memory", config.memory))
        if kept < 1:
            _keep_drawn(joint)
        else:
            keep_for_products(joint)
        budget = max(kept, _LEAST_KEPT)
        if functorch_config.cse:
            merge_joint(joint)
        settings = functorch_config.patch(
            ban_recompute_materialized_backward=not on_cpu, activation_memory_budget=budget, cse=False
        )
        with settings, told_to_the_cut(joint):
            forward, backward = min_cut_rematerialization_partition(joint, joint_inputs, **kwargs)
        for part in (forward, backward):
            for node in part.graph.nodes:
                if node.name in floats and node.op == "placeholder":
                    node.meta["val"] = floats[node.name]
        round_both(forward, backward)
        recompose_norms(forward)
        given_back: Any = backward.graph.output_node().args[0]
        self.dead = frozenset(i for i, gradient in enumerate(given_back) if gradient is None)
        self._backward = backward
        return forward, backward


def _keep_drawn(joint: fx.GraphModule) -> None:
    """Let the cut save random numbers: recomputed ones would differ."""
    from torch.utils.checkpoint import CheckpointPolicy

    for node in joint.graph.nodes:
        if draws(node):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _floats_as_integers(joint: fx.GraphModule) -> dict[str, Any]:
    """Replace symbolic floats, which torch's cut never saves, by symbolic integers; returns the floats by name."""
    from torch.fx.experimental.symbolic_shapes import DimDynamic  # with sympy: not before a kernel's compiler is warm

    floats = {}
    for node in joint.graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and isinstance(value, torch.SymFloat):
            source = torch._dynamo.source.ConstantSource(f"float_{node.name}")
            make = value.node.shape_env.create_unspecified_symint_and_symbol
            node.meta["val"] = make(7, source, DimDynamic.DYNAMIC)
            floats[node.name] = value
    return floats


def is_on_cpu(module: fx.GraphModule) -> bool:
    """Whether all tensors of a graph are on the CPU."""
    return all(targets.is_host(t.device) for n in module.graph.nodes for t in tensors_of(n.meta.get("val")))


def draws(node: fx.Node) -> bool:
    """Whether a node of a graph draws random numbers."""
    target = node.target
    return node_draws(node) or isinstance(target, torch._ops.HigherOrderOperator) and str(target) in _UNDER_STATE


def _needed(joint: fx.GraphModule, forward: int) -> frozenset[int]:
    """The numbers of the inputs from whose content a joint graph computes gradients, its results from `forward` on."""
    results: Any = joint.graph.output_node().args[0]
    left = [n for n in results[forward:] if isinstance(n, fx.Node)]
    reached = set(left)
    while left:
        news = [a for a in _read_for(left.pop()) if a not in reached]
        reached.update(news)
        left += news
    return frozenset(i for i, p in enumerate(joint.graph.find_nodes(op="placeholder")) if p in reached)


def _read_for(node: fx.Node) -> Sequence[fx.Node]:
    """The nodes that a node is computed from. A batch norm in training reads its statistics only to update them."""
    made_by = node.args[0] if node.target is operator.getitem else None
    if not isinstance(made_by, fx.Node) or not isinstance(made_by.target, torch._ops.OpOverload):
        return node.all_input_nodes
    given = dict(zip([a.name for a in made_by.target._schema.arguments], made_by.args, strict=False))
    if given.get("training") is not True or node.args[1] not in _OF_BATCH:
        return node.all_input_nodes
    read = [a for name, a in given.items() if isinstance(a, fx.Node) and not name.startswith("running_")]
    return [*read, *(a for a in made_by.kwargs.values() if isinstance(a, fx.Node))]


def _hidden(compile_stage: Function) -> Function:
    """A compiler that Dynamo does not trace, nor its result.

    Dynamo traces Python code after a graph break, and a `backward()` there compiles and runs a backward.
    """
    from torch._dynamo import disable

    return disable(lambda *args: disable(compile_stage(*args)))  # type: ignore[no-any-return, no-untyped-call]


def _under(options: dict[str, Any], function: Function) -> Function:
    """The function under `options`: a backward is compiled and called outside the block of the forward."""
    settings = config.prepared(**options)

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        with settings:
            return function(*args)

    return call


def is_small(module: fx.GraphModule) -> bool:
    """Whether no tensor of a graph is large enough for warm memory, for any sizes that the graph accepts."""
    for node in module.graph.nodes:
        for t in tensors_of(node.meta.get("val")):
            n = t.numel()
            if targets.is_host(t.device) and (not isinstance(n, int) or n * t.element_size() >= WARM_MIN):
                return False
    return True
